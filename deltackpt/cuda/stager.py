"""Staging from device memory: detect there, gather what changed, copy it in large transfers.

Per save, on streams of its own that wait for the training stream as it was at the call::

    work stream    hash all chunks | list changed -> host | gather batch 0 | gather batch 1 | ...
    copy stream                                           |  batch 0 -> slots |  batch 1 -> slots

Live memory is free again as soon as it has been gathered; it need not have crossed the bus. The
host waits only on the staging thread, never on a training stream.

Memory safety: every tensor that a queued operation reads is held by the job, and :meth:`finish`
returns, also by an exception, only when both streams are idle; so the allocator cannot hand the
memory out again while it is read, and no slot is sent or released while a copy into it may run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import ExtentKey

from ..detect import ChangeTable, memory
from ..sources import Source
from ..stage import Job, Ring, Staging
from . import specs
from .hasher import Changes, Counters, Hasher
from .moving import Cargo, Mover
from .placement import Placement, records
from .plan import DevicePlan, Digests, check_sizes, check_still, check_versions, words_of
from .runtime import Runtime
from .xxh3 import digest_bytes

GATHER_BYTES = 256 * 1024 * 1024
"""Default bound of the device buffer that changed chunks are gathered into, both halves."""
READ_BYTES = 8 * 1024 * 1024
"""Bytes that `hash_all` brings to the host at a time, at least one chunk."""


class Detection(NamedTuple):
    """What :meth:`DeviceStager.start` leaves for `finish`: digests compared with, as what, since
    when."""

    plan: DevicePlan
    hasher: Hasher
    before: Digests
    known: Mapping[ExtentKey, bytes]
    mark: Any


class DeviceStager:
    """The stager of one device. Used by the staging thread, except :meth:`mark`.

    `gather_bytes` bounds the gather buffer (at least one slot), `scratch_bytes` the scratch of the
    hash. Device memory is taken at the first save and kept until :meth:`close`.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        seed: int,
        gather_bytes: int = GATHER_BYTES,
        scratch_bytes: int = specs.SCRATCH_BYTES,
    ) -> None:
        self.counters = Counters()
        self._runtime, self._seed, self._scratch_bytes = runtime, seed, scratch_bytes
        self._work = runtime.stream()
        self._mover = Mover(runtime, self._work, self.counters, gather_bytes)
        self._plan: DevicePlan | None = None
        self._hasher: Hasher | None = None
        self._digests: Digests = np.zeros((0, 16), np.uint8)
        self._table: dict[ExtentKey, bytes] | None = None
        """What the digests on the device are, as handed out; None while that is not known."""

    def mark(self) -> Any:
        """For the training thread: an event after all that its current stream was given so far."""
        return self._runtime.mark()

    def start(self, job: Job, mark: Any) -> Detection:
        """Queue detection for `job`; `mark` is what :meth:`mark` returned at the call of `save`.

        Must be followed by :meth:`finish` or :meth:`abandon` while the job's tensors are held.
        """
        return self._detect(job.layout, job.sources, job.table, mark)

    def finish(self, job: Job, ring: Ring, detection: Detection) -> Staging:
        """Wait for detection and stage what changed. As `Stager.stage`.

        `torch.OutOfMemoryError` comes before anything is sent or unlocked.
        """
        try:
            return self._finish(job, ring, detection)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Wait until nothing is being read any more; the save that was started will not be."""
        with contextlib.suppress(RuntimeError):  # a lost device has stopped, too
            self._mover.settle()

    def hash_all(
        self, layout: Layout, sources: Mapping[int, Source], mark: Any
    ) -> Iterator[tuple[ExtentKey, int, bytes, memoryview]]:
        """As `Stager.hash_all`: every chunk, through page-locked memory, some at a time."""
        try:
            plan, hasher, *_ = self._detect(layout, sources, {}, mark)
            changes, table = hasher.changes(), plan.table
            digests = digest_bytes(changes.digests)
            room = max(int(table.length.max(initial=0)), READ_BYTES)
            placement = Placement(table.length[changes.rows], changes.rows < 0, room)
            cargo = Cargo(
                hasher=hasher, rows=changes.rows, placement=placement, slot_bytes=room,
                records=lambda ordinal: b"", live_is_read=lambda: None,
            )  # fmt: skip
            landing = self._runtime.pinned(room)
            if placement.slots:
                self._mover.load(cargo, 1)
            for ordinal, slot in enumerate(placement.slots):
                self._mover.gather(cargo, ordinal, ordinal + 1, 0)
                self._mover.copy(self._work, landing[: slot.used], self._mover.buffer[: slot.used])
                self._runtime.synchronize(self._runtime.record(self._work))
                view = memory(landing)
                for entry in range(slot.first, slot.end):
                    at = int(placement.order[entry])
                    row, offset = int(changes.rows[at]), int(placement.offset[entry])
                    data = view[offset : offset + int(table.length[row])]
                    key = plan.keys[int(table.extent[row])]
                    yield key, int(table.chunk[row]), digests[at].tobytes(), data
        finally:
            self.abandon()

    def close(self) -> None:
        """Unlock the ring's memory and free the device's. The ring may be closed already."""
        self.abandon()
        self._mover.close()
        self._forget_plan()

    # detection -------------------------------------------------------------------------------

    def _detect(
        self, layout: Layout, sources: Mapping[int, Source], table: ChangeTable, mark: Any
    ) -> Detection:
        plan, hasher = self._plan_for(layout, sources)
        known, self._table = self._table, None
        check_sizes(sources, plan.extents.tolist(), [key[0] for key in plan.keys])
        hasher.set_addresses(plan.addresses(sources))
        if known is None or any(table.get(key) is not known[key] for key in plan.keys):
            self._digests = plan.digests_of(table)
            hasher.set_digests(words_of(self._digests))
            known = {}
        self._runtime.wait(self._work, mark)  # only what follows reads training memory
        hasher.detect()
        return Detection(plan, hasher, self._digests, known, mark)

    def _plan_for(self, layout: Layout, sources: Mapping[int, Source]) -> tuple[DevicePlan, Hasher]:
        plan, hasher = self._plan, self._hasher
        if plan is None or hasher is None or not plan.fits(layout, sources):
            self._forget_plan()
            plan = DevicePlan(
                layout, sources, scratch_bytes=self._scratch_bytes,
                blocks_per_program=specs.sum_blocks_per_program(self._runtime.wave),
            )  # fmt: skip
            hasher = Hasher(self._runtime, self._work, plan.table, self._seed, self.counters)
            self._plan, self._hasher = plan, hasher
        return plan, hasher

    def _forget_plan(self) -> None:
        if self._hasher is not None:
            self.counters.device_bytes -= self._hasher.device_bytes
            self.counters.pinned_bytes -= self._hasher.pinned_bytes
        self._plan = self._hasher = self._table = None

    # moving ----------------------------------------------------------------------------------

    def _finish(self, job: Job, ring: Ring, detection: Detection) -> Staging:
        plan, table = detection.plan, detection.plan.table
        self._runtime.synchronize(detection.mark)
        job.reached()
        changes = detection.hasher.changes()
        rows, digests = changes.rows, digest_bytes(changes.digests)
        if job.witness is not None:
            keys = dict(zip(plan.extents.tolist(), plan.keys, strict=True))
            check_still(job.sources, job.table, keys, plan.extents[table.extent[rows]].tolist())
        placement = Placement(table.length[rows], rows < plan.live_rows, ring.slot_bytes)

        def live_is_read() -> None:
            extents, paths = plan.extents.tolist(), [key[0] for key in plan.keys]
            check_sizes(job.sources, extents, paths)
            check_versions(job.sources, job.versions, extents, paths)
            job.unlock()

        cargo = Cargo(
            hasher=detection.hasher, rows=rows, placement=placement, slot_bytes=ring.slot_bytes,
            records=lambda ordinal: _records(plan, changes, placement, digests, ordinal),
            live_is_read=live_is_read,
        )  # fmt: skip
        self._mover.move(job, ring, cargo)

        self._digests = detection.before.copy()
        self._digests[rows] = digests
        moved: set[int] = set(np.unique(table.extent[rows]).tolist())
        moved.update(p for p, key in enumerate(plan.keys) if key not in detection.known)
        self._table = plan.table_of(self._digests, detection.known, moved)
        nbytes = int(table.length[rows].sum())
        return Staging(
            table=dict(self._table), chunks=table.count, changed_chunks=len(rows),
            changed_bytes=nbytes, staged_bytes=nbytes,
        )  # fmt: skip


def _records(
    plan: DevicePlan, changes: Changes, placement: Placement, digests: Digests, ordinal: int
) -> bytes:
    slot = placement.slots[ordinal]
    at = placement.order[slot.first : slot.end]
    rows = changes.rows[at]
    table = plan.table
    return records(
        plan.extents[table.extent[rows]], table.chunk[rows].astype(np.int64),
        placement.offset[slot.first : slot.end], table.length[rows].astype(np.int64), digests[at],
    )  # fmt: skip
