"""One stager for states that live on the host and on any number of devices."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import ExtentKey

from ..report import DeviceFigures
from ..sources import Source
from ..stage import HostStager, Job, Ring, Staging
from .fallback import CopyStager
from .hasher import Counters
from .runtime import CudaRuntime, Runtime
from .selftest import check_device
from .stager import DeviceStager

_log = logging.getLogger("deltackpt.cuda")

HOST = torch.device("cpu")


class DevicePart(Protocol):
    """What :class:`SplitStager` needs of a device's stager (see `DeviceStager`)."""

    counters: Counters

    def mark(self) -> Any: ...
    def start(self, job: Job, mark: Any) -> Any: ...
    def finish(self, job: Job, ring: Ring, detection: Any) -> Staging: ...
    def abandon(self) -> None: ...
    def hash_all(
        self, layout: Layout, sources: Mapping[int, Source], mark: Any
    ) -> Iterator[tuple[ExtentKey, int, bytes, memoryview]]: ...
    def close(self) -> None: ...


def stager_for(runtime: Runtime, *, seed: int) -> DevicePart:
    """The best stager that works on this device. Compiles the kernels and tests them (seconds).

    Without triton or a C compiler (which triton needs to launch kernels), or when the self-test
    fails, that is one which copies everything to the host; a warning says so.
    """
    if importlib.util.find_spec("triton") is None:
        _log.warning(
            "triton is not installed: saves copy the whole state of %s to the host instead of what"
            " changed; pip install 'deltackpt[gpu]'",
            runtime.device,
        )
        return CopyStager(runtime, seed=seed)
    began = time.monotonic()
    try:
        wrong = check_device(runtime, seed=seed)
    except Exception as error:
        _log.warning(
            "the kernels do not run on %s (%s: %s): saves copy the whole state to the host;"
            " triton needs a C compiler, Python's headers and a cache directory it can write to",
            runtime.device, type(error).__name__, error, exc_info=True,
        )  # fmt: skip
        return CopyStager(runtime, seed=seed)
    if wrong:
        _log.error(
            "the kernels hash wrongly or move wrong bytes on %s (%d faults in the self-test, first"
            " %s): saves copy the whole state to the host; please report this",
            runtime.device, len(wrong), wrong[0],
        )  # fmt: skip
        return CopyStager(runtime, seed=seed)
    _log.info("kernels are ready on %s after %.1f s", runtime.device, time.monotonic() - began)
    return DeviceStager(runtime, seed=seed)


def _stager_device(source: Source) -> torch.device:
    """Where a source is hashed: on its own device if that is CUDA's (or ROCm's)."""
    return source.device if source.device.type == "cuda" else HOST


class SplitStager:
    """A `deltackpt.stage.Stager`: host memory to :class:`HostStager`, each device to its own.

    All devices hash while the host does; then each stages what changed. `unlock` is called when
    all parts have read their live memory; copies that have landed on the host (see
    `deltackpt.landing`) are staged after that, so that no live memory waits for them. :meth:`mark`
    belongs to the training thread, all else to the staging thread, where a device's stager is made
    when first needed.
    """

    def __init__(
        self,
        *,
        seed: int,
        threads: int,
        runtime: Callable[[torch.device], Runtime] = CudaRuntime,
        make: Callable[[Runtime], DevicePart] | None = None,
        device_of: Callable[[Source], torch.device] = _stager_device,
    ) -> None:
        self._seed = seed
        self._host = HostStager(seed=seed, threads=threads)
        self._landed = HostStager(seed=seed, threads=threads)  # each keeps the plan of its part
        self._runtime, self._device_of = runtime, device_of
        self._make: Callable[[Runtime], DevicePart] = make or partial(stager_for, seed=seed)
        self._runtimes: dict[torch.device, Runtime] = {}
        self._parts: dict[torch.device, DevicePart] = {}

    def mark(self, sources: Mapping[int, Source]) -> Mapping[torch.device, Any]:
        """For the training thread, right after capture: where its streams are now.

        Staging with these marks reads device memory only after what the current streams have been
        given by now. Takes microseconds.
        """
        marks: dict[torch.device, Any] = {}
        for source in sources.values():
            device = self._place(source)
            if device != HOST and device not in marks:
                if device not in self._runtimes:
                    self._runtimes[device] = self._runtime(device)
                marks[device] = self._runtimes[device].mark()
        return marks

    def stage(self, job: Job, ring: Ring) -> Staging:
        landed = {e: s for e, s in job.sources.items() if s.arrived is not None}
        groups = self._by_device({e: s for e, s in job.sources.items() if e not in landed})
        if not landed and not groups.keys() - {HOST}:
            return self._host.stage(job, ring)
        gate = _Gate(1 + len(groups), job.unlock)
        gate.open()  # for the landed copies, which hold no live memory; perhaps there is no other
        jobs = {device: _part_of(job, sources, gate.open) for device, sources in groups.items()}
        parts = {device: self._part(device) for device in jobs if device != HOST}
        before = {device: dataclasses.replace(part.counters) for device, part in parts.items()}
        results: list[Staging] = []
        try:
            started = {device: self._start(device, parts, jobs[device]) for device in tuple(parts)}
            if HOST in jobs:
                results.append(self._host.stage(jobs[HOST], ring))
            for device in tuple(parts):
                results.append(self._finish(device, parts, jobs[device], ring, started[device]))
            if landed:
                results.append(self._landed.stage(_part_of(job, landed, lambda: None), ring))
        except BaseException:
            for part in parts.values():
                part.abandon()
            raise
        figures = {
            str(device): _difference(before[device], part.counters)
            for device, part in parts.items()
        }
        return dataclasses.replace(_joined(results), devices=figures)

    def hash_all(
        self,
        layout: Layout,
        sources: Mapping[int, Source],
        marks: Any = None,
    ) -> Iterator[tuple[ExtentKey, int, bytes, memoryview]]:
        for device, group in self._by_device(sources).items():
            if device == HOST:
                yield from self._host.hash_all(layout, group)
            else:
                yield from self._part(device).hash_all(layout, group, marks[device])

    def close(self) -> None:
        self._host.close()
        self._landed.close()
        for device, part in self._parts.items():
            try:
                part.close()
            except RuntimeError as error:  # it has failed, and with it all that training does there
                _log.warning("the memory of %s could not be given back: %s", device, error)
        self._parts.clear()

    def _start(self, device: torch.device, parts: dict[torch.device, DevicePart], job: Job) -> Any:
        """Start a part's detection; on a full device, with a part that needs none of its memory."""
        try:
            return parts[device].start(job, job.marks[device])
        except torch.OutOfMemoryError as error:
            return self._without_memory(device, parts, error).start(job, job.marks[device])

    def _finish(
        self,
        device: torch.device,
        parts: dict[torch.device, DevicePart],
        job: Job,
        ring: Ring,
        detection: Any,
    ) -> Staging:
        """Finish what :meth:`_start` began; anew where there is no memory to gather anything."""
        try:
            return parts[device].finish(job, ring, detection)
        except torch.OutOfMemoryError as error:
            plain = self._without_memory(device, parts, error)
            return plain.finish(job, ring, plain.start(job, job.marks[device]))

    def _without_memory(
        self,
        device: torch.device,
        parts: dict[torch.device, DevicePart],
        error: torch.OutOfMemoryError,
    ) -> DevicePart:
        """Replace a part for which its device has no memory left, for good: to ask for it at every
        save would have the allocator drop training's cache each time."""
        _log.warning(
            "%s has no memory left for hashing: from now on, saves copy its whole state to the"
            " host (%s)",
            device, error,
        )  # fmt: skip
        parts[device].close()
        plain = CopyStager(self._runtimes[device], seed=self._seed)
        plain.counters = parts[device].counters  # it goes on counting
        parts[device] = self._parts[device] = plain
        return plain

    def _part(self, device: torch.device) -> DevicePart:
        part = self._parts.get(device)
        if part is None:
            part = self._parts[device] = self._make(self._runtimes[device])
        return part

    def _by_device(self, sources: Mapping[int, Source]) -> dict[torch.device, dict[int, Source]]:
        groups: dict[torch.device, dict[int, Source]] = {}
        for extent, source in sources.items():
            groups.setdefault(self._place(source), {})[extent] = source
        return groups

    def _place(self, source: Source) -> torch.device:
        return HOST if source.arrived is not None else self._device_of(source)


class _Gate:
    """Calls `action` when it has been opened `count` times. For any thread."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left, self._action = count, action
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._action()


def _part_of(job: Job, sources: dict[int, Source], unlock: Callable[[], None]) -> Job:
    versions = {extent: version for extent, version in job.versions.items() if extent in sources}
    return dataclasses.replace(job, sources=sources, versions=versions, unlock=unlock)


def _difference(before: Counters, after: Counters) -> DeviceFigures:
    return DeviceFigures(
        launches=after.launches - before.launches,
        transfers=after.transfers - before.transfers,
        transferred_bytes=after.transferred_bytes - before.transferred_bytes,
        device_bytes=after.device_bytes,
        pinned_bytes=after.pinned_bytes,
    )


def _joined(parts: list[Staging]) -> Staging:
    table: dict[ExtentKey, bytes | bytearray] = {}
    for part in parts:
        table.update(part.table)
    return Staging(
        table=table,
        chunks=sum(part.chunks for part in parts),
        changed_chunks=sum(part.changed_chunks for part in parts),
        changed_bytes=sum(part.changed_bytes for part in parts),
        staged_bytes=sum(part.staged_bytes for part in parts),
    )
