"""Moving changed chunks from device memory into ring slots, in batches, within bounded memory.

A batch is gathered into one half of a device buffer (work stream) and leaves by one copy per slot
(copy stream), while the next is gathered into the other half.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deltackpt_store.errors import StateError, StorageError
from numpy.typing import NDArray

from ..stage import Job, Ring
from .hasher import Counters, Hasher
from .pinning import PinnedSlots
from .placement import Placement
from .runtime import Runtime

_log = logging.getLogger("deltackpt.cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """What one save moves: `rows` of the table are the chunks that `placement` placed.

    `records(ordinal)` are the packed records of a slot. `live_is_read` is called once, when the
    entries that come first in the placement have been gathered.
    """

    hasher: Hasher
    rows: NDArray[np.int64]
    placement: Placement
    slot_bytes: int
    records: Callable[[int], bytes]
    live_is_read: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies queued and not sent: an event after them, (leased slot, ordinal) of each."""

    copied: Any
    slots: tuple[tuple[int, int], ...]


class Mover:
    """The buffers and streams of one device. Used by the staging thread.

    Takes device memory when first needed, keeps it, and grows it up to `gather_bytes` (at least
    one slot). Where the device has less left, that is the bound from then on.
    """

    def __init__(self, runtime: Runtime, work: Any, counters: Counters, gather_bytes: int) -> None:
        self._runtime, self._work, self._copies = runtime, work, runtime.stream()
        self._counters, self._gather_bytes = counters, gather_bytes
        self._slots = PinnedSlots(runtime, counters)
        self._buffer = runtime.empty(work, 0)
        self._entries = runtime.empty(work, 0)
        self._host_entries = runtime.pinned(0)

    @property
    def buffer(self) -> torch.Tensor:
        """What :meth:`gather` fills."""
        return self._buffer

    def load(self, cargo: Cargo, slots: int) -> int:
        """Upload what is gathered where; make room for `slots` slots in the buffer, or for as many
        as the device has memory for, at least one. Returns how many."""
        placement = cargo.placement
        count = len(placement.order)
        if self._host_entries.numel() < 16 * count:
            self.settle()
            grown = 16 << (count - 1).bit_length()
            entries, host = self._runtime.empty(self._work, grown), self._runtime.pinned(grown)
            self._count(grown - self._entries.numel(), grown - self._host_entries.numel())
            self._entries, self._host_entries = entries, host
        slots = self._make_room(slots, cargo.slot_bytes)
        entries = np.stack(
            [cargo.rows[placement.order], placement.slot * cargo.slot_bytes + placement.offset],
            axis=1,
        )
        nbytes = entries.nbytes
        self._host_entries.numpy()[:nbytes] = entries.view(np.uint8).reshape(-1)
        self.copy(self._work, self._entries[:nbytes], self._host_entries[:nbytes])
        return slots

    def _make_room(self, slots: int, slot_bytes: int) -> int:
        if self._buffer.numel() >= slots * slot_bytes:
            return slots
        self.settle()
        self._count(-self._buffer.numel(), 0)
        self._buffer = self._runtime.empty(self._work, 0)  # free the old before taking the new
        while True:
            try:
                self._buffer = self._runtime.empty(self._work, slots * slot_bytes)
            except torch.OutOfMemoryError:
                if slots == 1:
                    raise
                slots //= 2
                self._gather_bytes = slots * slot_bytes
                _log.warning(
                    "%s is nearly full: changed chunks leave it in batches of at most %d bytes",
                    self._runtime.device,
                    self._gather_bytes,
                )
            else:
                self._count(self._buffer.numel(), 0)
                return slots

    def gather(self, cargo: Cargo, first: int, end: int, base: int) -> None:
        """Queue gathering of slots ``first <= ordinal < end`` to offset `base` of the buffer."""
        slots = cargo.placement.slots[first:end]
        cargo.hasher.gather(
            self._entries.view(torch.int64), slots[0].first, slots[-1].end - slots[0].first,
            max(slot.longest for slot in slots),
            self._buffer.data_ptr() + base - first * cargo.slot_bytes,
        )  # fmt: skip

    def move(self, job: Job, ring: Ring, cargo: Cargo) -> None:
        """Stage all of `cargo`; on return every slot is sent and both streams are idle.

        An error leaves both streams idle, too, and gives back every slot that was not sent. One for
        lack of device memory comes before `live_is_read` is called or anything is sent.
        """
        leased: list[int] = []
        try:
            if cargo.placement.slots:
                self._move(job, ring, cargo, leased)
            else:
                cargo.live_is_read()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.settle()
            for slot in leased:
                ring.release_slot(slot)
            raise

    def _move(self, job: Job, ring: Ring, cargo: Cargo, leased: list[int]) -> None:
        placement, slot_bytes = cargo.placement, cargo.slot_bytes
        total = len(placement.slots)
        bound = max(1, self._gather_bytes // slot_bytes)
        per_half = min(max(1, bound // 2), total)
        halves = 1 if per_half >= total or bound == 1 else 2
        self._slots.use(ring)
        held = self.load(cargo, halves * per_half)
        if held < halves * per_half:
            per_half, halves = max(1, held // 2), min(held, 2)
        if placement.first_count == 0:
            cargo.live_is_read()
        waiting: deque[_Batch] = deque()
        copied: list[Any] = []

        def send_until(left: int) -> None:
            while len(waiting) > left:
                self._send(job, ring, cargo, waiting.popleft(), leased)

        done = 0
        while done < total:
            if job.cancelled():
                raise StateError(f"save {job.save} was given up", kind="cancelled")
            wanted = min(per_half, total - done)
            slots = self._lease(job, ring, wanted, leased, lambda: send_until(0))
            base = len(copied) % halves * per_half * slot_bytes
            if len(copied) >= halves:
                self._runtime.wait(self._work, copied[-halves])
            end = done + len(slots)
            self.gather(cargo, done, end, base)
            gathered = self._runtime.record(self._work)
            self._runtime.wait(self._copies, gathered)
            for place, slot in enumerate(slots):
                used = placement.slots[done + place].used
                start = base + place * slot_bytes
                target = self._slots.target(slot)[:used]
                self.copy(self._copies, target, self._buffer[start : start + used])
            copied.append(self._runtime.record(self._copies))
            waiting.append(_Batch(copied[-1], tuple(zip(slots, range(done, end), strict=True))))
            if placement.slots[done].first < placement.first_count <= placement.slots[end - 1].end:
                self._runtime.synchronize(gathered)
                cargo.live_is_read()
            done = end
            send_until(1)
        send_until(0)

    def _send(self, job: Job, ring: Ring, cargo: Cargo, batch: _Batch, leased: list[int]) -> None:
        self._runtime.synchronize(batch.copied)
        for slot, ordinal in batch.slots:
            self._slots.land(slot, cargo.placement.slots[ordinal].used)
            leased.remove(slot)
            ring.slot(job.save, slot, cargo.records(ordinal))

    def _lease(
        self, job: Job, ring: Ring, wanted: int, leased: list[int], send_all: Callable[[], None]
    ) -> list[int]:
        """Up to `wanted` slots, at least one; only for that one is waited."""
        slots: list[int] = []
        while len(slots) < wanted:
            try:
                slot = ring.acquire_slot(0.0)
            except StorageError as error:
                if error.kind != "timeout":
                    raise
                if slots:
                    break
                send_all()  # the writer can release only what it has been sent
                slot = ring.acquire_slot(max(0.0, job.deadline - time.monotonic()))
            leased.append(slot)
            slots.append(slot)
        return slots

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of bytes between device and page-locked memory."""
        self._counters.transfers += 1
        self._counters.transferred_bytes += source.numel()
        self._runtime.copy(stream, target, source)

    def settle(self) -> None:
        """Wait until nothing queued on either stream is running."""
        for stream in (self._work, self._copies):
            self._runtime.synchronize(self._runtime.record(stream))

    def close(self) -> None:
        """Unlock the ring's memory and free the buffers. Both streams are idle."""
        self._slots.forget()
        self._count(-self._buffer.numel() - self._entries.numel(), -self._host_entries.numel())
        self._buffer = self._entries = self._runtime.empty(self._work, 0)
        self._host_entries = self._runtime.pinned(0)

    def _count(self, device_bytes: int, pinned_bytes: int) -> None:
        self._counters.device_bytes += device_bytes
        self._counters.pinned_bytes += pinned_bytes
