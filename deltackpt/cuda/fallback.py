"""Staging from device memory without kernels: everything is copied to the host and hashed there.

For CUDA tensors where triton is missing or failed its self-test. Right, but every save moves the
whole state over the bus, and the lock lasts as long as that takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from deltackpt_store.errors import StateError
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import ExtentKey, extent_keys

from ..detect import HASH_BYTES, change_hash, memory
from ..sources import Source, parted
from ..stage import Job, Packer, Ring, Staging
from .hasher import Counters
from .plan import check_sizes, check_still, check_versions
from .runtime import Runtime

HALF_BYTES = 32 * 1024 * 1024
"""Page-locked bytes per buffer; there are two. At least one chunk is brought at a time."""


class _Load(NamedTuple):
    """Chunks ``first <= index < last`` of one extent, on their way into one buffer."""

    extent: int
    first: int
    last: int
    arrived: Any
    buffer: torch.Tensor


class CopyStager:
    """The stager of one device that copies all. Used by the staging thread, except :meth:`mark`."""

    def __init__(self, runtime: Runtime, *, seed: int, half_bytes: int = HALF_BYTES) -> None:
        self.counters = Counters()
        self._runtime, self._seed, self._half_bytes = runtime, seed, half_bytes
        self._stream = runtime.stream()
        self._buffers = [runtime.pinned(0), runtime.pinned(0)]

    def mark(self) -> Any:
        """For the training thread: an event after all that its current stream was given so far."""
        return self._runtime.mark()

    def start(self, job: Job, mark: Any) -> Any:
        """Nothing is queued before :meth:`finish`; what it returns must be given to that."""
        return mark

    def finish(self, job: Job, ring: Ring, detection: Any) -> Staging:
        """Copy, hash, compare, pack. As `Stager.stage`."""
        keys = extent_keys(job.layout)
        live, private = parted(job.sources)
        paths = [keys[extent][0] for extent in live]
        check_sizes(job.sources, live, paths)
        self._runtime.synchronize(detection)
        job.reached()
        tables = {extent: bytearray(HASH_BYTES * job.layout.extents[extent].chunk_count)
                  for extent in job.sources}  # fmt: skip
        packer = Packer(job, ring)
        changed: set[int] = set()
        try:
            for extents in (live, private):
                for extent, index, digest, data in self._hashed(
                    job.layout, job.sources, extents, detection
                ):
                    if job.cancelled():
                        raise StateError("the save was given up", kind="cancelled")
                    at = index * HASH_BYTES
                    old = job.table.get(keys[extent])
                    if old is None or old[at : at + HASH_BYTES] != digest:
                        packer.add(extent, index, data, digest)
                        changed.add(extent)
                    tables[extent][at : at + HASH_BYTES] = digest
                if extents is live:
                    check_sizes(job.sources, live, paths)
                    check_versions(job.sources, job.versions, live, paths)
                    if job.witness is not None:
                        own = {extent: keys[extent] for extent in job.sources}
                        check_still(job.sources, job.table, own, changed)
                    job.unlock()
            packer.flush()
        except BaseException:
            packer.abandon()
            raise
        return Staging(
            table={keys[extent]: table for extent, table in tables.items()},
            chunks=sum(job.layout.extents[extent].chunk_count for extent in job.sources),
            changed_chunks=packer.chunks, changed_bytes=packer.nbytes, staged_bytes=packer.nbytes,
        )  # fmt: skip

    def abandon(self) -> None:
        """Wait until nothing is being read any more."""
        with contextlib.suppress(RuntimeError):
            self._runtime.synchronize(self._runtime.record(self._stream))

    def hash_all(
        self, layout: Layout, sources: Mapping[int, Source], mark: Any
    ) -> Iterator[tuple[ExtentKey, int, bytes, memoryview]]:
        """As `Stager.hash_all`; each yielded view is valid until the next is asked for."""
        keys = extent_keys(layout)
        for extent, index, digest, data in self._hashed(layout, sources, list(sources), mark):
            yield keys[extent], index, digest, data

    def close(self) -> None:
        self.abandon()
        self._buffers = [self._runtime.pinned(0), self._runtime.pinned(0)]
        self.counters.pinned_bytes = 0

    def _hashed(
        self, layout: Layout, sources: Mapping[int, Source], extents: list[int], mark: Any
    ) -> Iterator[tuple[int, int, bytes, memoryview]]:
        """(extent, chunk, change hash, private copy) of all chunks; one copy runs ahead."""
        self._runtime.wait(self._stream, mark)
        try:
            ahead: _Load | None = None
            for load in self._loads(layout, sources, extents):
                if ahead is not None:
                    yield from self._hash(layout, ahead)
                ahead = load
            if ahead is not None:
                yield from self._hash(layout, ahead)
        finally:
            self.abandon()

    def _loads(
        self, layout: Layout, sources: Mapping[int, Source], extents: list[int]
    ) -> Iterator[_Load]:
        turn = 0
        for extent in extents:
            spec, data = layout.extents[extent], sources[extent].data
            step = max(1, self._half_bytes // spec.chunk_bytes)
            for first in range(0, spec.chunk_count, step):
                last = min(first + step, spec.chunk_count)
                start, end = first * spec.chunk_bytes, min(last * spec.chunk_bytes, spec.nbytes)
                buffer = self._buffer(turn % 2, end - start)[: end - start]
                self._runtime.copy(self._stream, buffer, data[start:end])
                self.counters.transfers += 1
                self.counters.transferred_bytes += end - start
                yield _Load(extent, first, last, self._runtime.record(self._stream), buffer)
                turn += 1

    def _hash(self, layout: Layout, load: _Load) -> Iterator[tuple[int, int, bytes, memoryview]]:
        spec = layout.extents[load.extent]
        self._runtime.synchronize(load.arrived)
        view = memory(load.buffer)
        for index in range(load.first, load.last):
            start = (index - load.first) * spec.chunk_bytes
            data = view[start : start + spec.chunk_length(index)]
            yield load.extent, index, change_hash(data, self._seed), data

    def _buffer(self, which: int, nbytes: int) -> torch.Tensor:
        if self._buffers[which].numel() < nbytes:
            grown = max(nbytes, min(self._half_bytes, 2 * nbytes))
            self.counters.pinned_bytes += grown - self._buffers[which].numel()
            self._buffers[which] = self._runtime.pinned(grown)
        return self._buffers[which]
