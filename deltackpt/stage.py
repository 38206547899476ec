"""Staging: from training memory into the ring that the writer reads, changed chunks only.

Per save the stager hashes every chunk, compares it with the change table of an earlier save and
copies the differing ones into leased slots of the ring; a slot is sent as soon as it is full. The
hash is taken over the source, then the bytes are copied, and the writer hashes the copy again: a
source that moved in between gives a save that fails, never one that is committed. One that moved
before the hash is found by its version counter, by the note that the call of `save` took of it
(see `witness`), or, when nothing is supposed to change it, by its differing from the save before.

A stager for device memory is another class with the same three methods.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from deltackpt_store.copies import copy_bytes
from deltackpt_store.errors import StateError
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import ExtentKey

from .detect import (
    GIL_FREE_BYTES,
    HASH_BYTES,
    UNIT_BYTES,
    ChangeTable,
    LayoutPlan,
    Piece,
    Unit,
    Workers,
    change_hash,
    memory,
    memory_at,
)
from .report import DeviceFigures
from .restless import torn
from .sources import Sign, Source, parted
from .witness import Witness

RECORD = struct.Struct("<IIII16s")
"""One staged chunk as the writer expects it: extent, chunk, offset, length, change hash."""

_SMALL_ALIGN = 64
_PAGE = 4096


class Ring(Protocol):
    """What staging needs of the writer client. Safe to use from several threads."""

    @property
    def slot_bytes(self) -> int: ...

    def acquire_slot(self, timeout: float | None) -> int:
        """Lease a slot, waiting for one; raises when there is none in time or ever."""
        ...

    def view(self, slot: int) -> memoryview: ...

    def put(self, slot: int, at: int, data: memoryview) -> None:
        """Copy into a leased slot; above 64 KiB without the GIL."""
        ...

    def slot(self, save: int, slot: int, records: bytes) -> None:
        """Hand a filled slot to the writer."""
        ...

    def release_slot(self, slot: int) -> None:
        """Return a leased slot unused."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One save to stage. `versions` are those of live data at the call of `save`."""

    save: int
    layout: Layout
    sources: Mapping[int, Source]
    table: ChangeTable
    versions: Mapping[int, Sign]
    deadline: float
    """``time.monotonic()`` after which waiting for a slot is given up."""
    unlock: Callable[[], None]
    """Called once, on any thread, when no live memory will be read any more."""
    cancelled: Callable[[], bool]
    """Whether the save has been given up and staging may end early."""
    marks: Any = None
    """What :meth:`Stager.mark` returned at the call of `save`."""
    witness: Witness | None = None
    """What the call of `save` has noted of live tensors; None when training waits for staging."""
    reached: Callable[[], None] = lambda: None
    """Called when a device has done what was queued before its mark, once for each device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """What a stager did: the new change table, and how much was changed and copied."""

    table: dict[ExtentKey, bytes | bytearray]
    chunks: int
    changed_chunks: int
    changed_bytes: int
    staged_bytes: int
    devices: dict[str, DeviceFigures] = dataclasses.field(default_factory=dict[str, DeviceFigures])


def with_copies(staging: Staging, copies: Mapping[str, DeviceFigures]) -> Staging:
    """`staging` with the cost of the copies that its capture made on devices."""
    devices = dict(staging.devices)
    for device, copied in copies.items():
        both = map(dataclasses.astuple, (devices.get(device, DeviceFigures()), copied))
        devices[device] = DeviceFigures(*map(sum, zip(*both, strict=True)))
    return dataclasses.replace(staging, devices=devices)


def not_comparable() -> StateError:
    """The error of a save without proof that what must not change has not changed."""
    return StateError(
        "the save that this one is relative to has failed", kind="relative-failed",
        hint="save again",
    )  # fmt: skip


class Stager(Protocol):
    """Turns sources into staged chunks. Used by one staging thread, except :meth:`mark`."""

    def mark(self, sources: Mapping[int, Source]) -> Any:
        """Training thread, right after capture: where its device streams are now (microseconds).

        The staging thread's `stage` or `hash_all` of these sources is given the result.
        """
        ...

    def stage(self, job: Job, ring: Ring) -> Staging:
        """Stage one save; on return every byte is in the ring and every slot is sent.

        Raises `CorruptionError` (kind "torn") when a live tensor was modified meanwhile, and
        whatever the ring raises. After an error all unsent slots have been given back.
        """
        ...

    def hash_all(
        self, layout: Layout, sources: Mapping[int, Source], marks: Any = None
    ) -> Iterator[tuple[ExtentKey, int, bytes, memoryview]]:
        """(extent key, chunk index, change hash, private copy of the bytes) of every chunk."""
        ...

    def close(self) -> None: ...


def _host_bytes(source: Source, start: int, end: int) -> tuple[object, memoryview]:
    """Bytes ``start ... end`` (at most) of a source, and what keeps them alive.

    Waits for a copy that a device is still making.
    Device memory is copied to the host first: right, but slower than a stager that detects there.
    """
    if source.arrived is not None:
        source.arrived.synchronize()
    if source.device.type == "cpu":
        end = min(end, source.nbytes)
        return source.storage, memory_at(source.address + start, end - start)
    data = source.data[start:end].cpu()
    return data, memory(data)


def versions_of(sources: Mapping[int, Source]) -> dict[int, Sign]:
    """Extent -> address and autograd version counter, for live sources with an owner."""
    return {
        extent: sign
        for extent, source in sources.items()
        if source.live and (sign := source.sign) is not None
    }


class Packer:
    """Fills slots for one thread. Chunks are packed: big ones page-aligned, small ones to 64."""

    def __init__(self, job: Job, ring: Ring) -> None:
        self._job, self._ring = job, ring
        self._slot: int | None = None
        self._used = 0
        self._records: list[bytes] = []
        self.chunks = 0
        self.nbytes = 0

    def add(self, extent: int, chunk: int, data: memoryview, digest: bytes) -> None:
        size = len(data)
        align = _PAGE if size >= GIL_FREE_BYTES else _SMALL_ALIGN
        offset = -(-self._used // align) * align
        if self._slot is None or offset + size > self._ring.slot_bytes:
            self.flush()
            self._slot = self._ring.acquire_slot(self._job.deadline - time.monotonic())
            offset = 0
        self.copy(self._slot, offset, data)
        self._records.append(RECORD.pack(extent, chunk, offset, size, digest))
        self._used = offset + size
        self.chunks += 1
        self.nbytes += size

    def copy(self, slot: int, at: int, data: memoryview) -> None:
        self._ring.put(slot, at, data)

    def flush(self) -> None:
        """Send the slot in hand, if there is one."""
        if self._slot is not None:
            slot, records = self._slot, b"".join(self._records)
            self._forget()
            self._ring.slot(self._job.save, slot, records)

    def abandon(self) -> None:
        """Give the slot in hand back unsent."""
        if self._slot is not None:
            slot = self._slot
            self._forget()
            self._ring.release_slot(slot)

    def _forget(self) -> None:
        self._slot, self._used = None, 0
        self._records.clear()


class HostStager:
    """The stager for host memory: `threads` threads hash and copy side by side."""

    def __init__(self, *, seed: int, threads: int, unit_bytes: int = UNIT_BYTES) -> None:
        self._seed = seed
        self._unit_bytes = unit_bytes
        self._workers = Workers(threads)
        self._plan: LayoutPlan | None = None

    def mark(self, sources: Mapping[int, Source]) -> None:
        """Host memory has no streams."""

    def stage(self, job: Job, ring: Ring) -> Staging:
        plan = self._plan_for(job.layout, job.sources)
        run = _Run(job, plan, self._seed, ring)
        if not plan.live:
            run.live_is_done()
        self._workers.run(run.work, plan.live + plan.private, at_most=plan.useful_threads)
        return Staging(
            table=run.finished_table(), chunks=plan.chunks, changed_chunks=run.changed_chunks,
            changed_bytes=run.changed_bytes, staged_bytes=run.changed_bytes,
        )  # fmt: skip

    def hash_all(
        self, layout: Layout, sources: Mapping[int, Source], marks: Any = None
    ) -> Iterator[tuple[ExtentKey, int, bytes, memoryview]]:
        plan = self._plan_for(layout, sources)
        scratch = bytearray(max((spec.chunk_bytes for spec in layout.extents), default=0))
        room = memoryview(scratch)
        for unit in plan.live + plan.private:
            for extent, first, last in unit:
                spec = layout.extents[extent]
                if sources[extent].gone:
                    raise StateError(f"{plan.keys[extent][0]} was resized", kind="torn")
                start = first * spec.chunk_bytes
                held, data = _host_bytes(sources[extent], start, last * spec.chunk_bytes)
                for index in range(first, last):
                    at = index * spec.chunk_bytes - start
                    copy = room[: spec.chunk_length(index)]
                    copy_bytes(copy, data[at : at + len(copy)])
                    yield plan.keys[extent], index, change_hash(copy, self._seed), copy
                del held

    def close(self) -> None:
        self._workers.close()
        self._plan = None

    def _plan_for(self, layout: Layout, sources: Mapping[int, Source]) -> LayoutPlan:
        live, private = parted(sources)
        plan = self._plan
        if plan is None or not plan.fits(layout, live, private):
            plan = self._plan = LayoutPlan(layout, live, private, self._unit_bytes)
        return plan


class _Run:
    """One pass over all chunks of one save, shared by the threads that make it."""

    def __init__(self, job: Job, plan: LayoutPlan, seed: int, ring: Ring) -> None:
        self._job, self._plan, self._seed, self._ring = job, plan, seed, ring
        self._lock = threading.Lock()
        self._live_left = sum(len(unit) for unit in plan.live)
        self._torn: set[int] = set()
        self._new = {
            extent: bytearray(HASH_BYTES * job.layout.extents[extent].chunk_count)
            for extent in job.sources
        }
        self.changed_chunks = 0
        self.changed_bytes = 0

    def finished_table(self) -> dict[ExtentKey, bytes | bytearray]:
        return {self._plan.keys[extent]: hashes for extent, hashes in self._new.items()}

    def work(self, units: Iterator[Unit]) -> None:
        """One thread's part; the units come from an iterator that the threads share."""
        packer = Packer(self._job, self._ring)
        try:
            for unit in units:
                if self._job.cancelled():
                    raise StateError("the save was given up", kind="cancelled")
                self._stage_unit(unit, packer)
            packer.flush()
        except BaseException:
            packer.abandon()
            raise
        with self._lock:
            self.changed_chunks += packer.chunks
            self.changed_bytes += packer.nbytes

    def _stage_unit(self, unit: Unit, packer: Packer) -> None:
        live = 0
        for piece in unit:
            if self._job.sources[piece.extent].live:
                live += 1
            self._stage_piece(piece, packer)
        if live:
            with self._lock:
                self._live_left -= live
                last_live = self._live_left == 0
            if last_live:
                self.live_is_done()

    def _stage_piece(self, piece: Piece, packer: Packer) -> None:
        extent, first, last = piece
        source, spec, witness = (
            self._job.sources[extent], self._job.layout.extents[extent], self._job.witness
        )  # fmt: skip
        if source.live and source.gone:
            raise torn([self._plan.keys[extent][0]])
        start, size = first * spec.chunk_bytes, spec.chunk_bytes
        held, data = _host_bytes(source, start, last * size)
        old, new = self._job.table.get(self._plan.keys[extent]), self._new[extent]
        resting = source.still and witness is not None
        if resting and old is None:
            raise not_comparable()
        noted = None if witness is None else witness.digests.get(extent)
        for index in range(first, last):
            chunk = data[index * size - start : (index + 1) * size - start]
            digest = change_hash(chunk, self._seed)
            at = index * HASH_BYTES
            changed = old is None or old[at : at + HASH_BYTES] != digest
            if (resting and changed) or (noted and noted[at : at + HASH_BYTES] != digest):
                self._torn.add(extent)
            if changed and not self._torn:  # of a torn save only the names are of interest
                packer.add(extent, index, chunk, digest)
            new[at : at + HASH_BYTES] = digest
        if witness is not None and not witness.agrees(extent, source, start, start + len(data)):
            self._torn.add(extent)
        del held

    def live_is_done(self) -> None:
        """All live bytes are hashed and copied: check that nobody moved them, then unlock."""
        now = versions_of(self._job.sources)
        moved = {extent for extent, v in self._job.versions.items() if now.get(extent) != v}
        if moved or self._torn:
            raise torn([self._plan.keys[extent][0] for extent in sorted(moved | self._torn)])
        self._job.unlock()
