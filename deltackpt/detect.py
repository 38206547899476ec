"""Finding what changed on the host: seeded XXH3-128 of every chunk, by a few threads.

A change hash says "these bytes differ from last time"; it is never an identity and never stored
(its seed is drawn per process, so nobody can prepare bytes that collide). Content decides, never
version counters, addresses or values: NaNs, signed zeros and writes that no counter sees are
found or found unchanged by their bits.

The xxhash package releases the GIL above 65,536 bytes, so chunks larger than that are hashed
beside the training thread. Smaller pieces are cheaper to hash than to hand over.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import xxhash
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import ExtentKey, extent_keys

HASH_BYTES = 16
GIL_FREE_BYTES = 65536
UNIT_BYTES = 4 * 1024 * 1024

_view_of = ctypes.pythonapi["PyMemoryView_FromMemory"]  # by [], as an attribute it is everybody's
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of.restype = ctypes.py_object
_READ = 0x100  # PyBUF_READ

ChangeTable = Mapping[ExtentKey, bytes | bytearray]
"""Extent key -> change hashes of all its chunks, joined. Never written once it is handed out."""


def change_hash(data: Any, seed: int) -> bytes:
    """The 16 bytes that both sides of the staging ring compare (any contiguous buffer)."""
    return xxhash.xxh3_128_digest(data, seed=seed)


def memory(data: torch.Tensor) -> memoryview:
    """The bytes of a flat uint8 host tensor, read-only, without a copy.

    The view does not keep the tensor alive: the caller does. (``Tensor.numpy()`` would also do,
    but makes the user's storage un-resizable for good.)
    """
    return memory_at(data.data_ptr(), data.numel())


def memory_at(address: int, nbytes: int) -> memoryview:
    """:func:`memory` of what lies there."""
    return _view_of(address, nbytes, _READ)


class Piece(NamedTuple):
    """Chunks ``first <= index < last`` of one extent."""

    extent: int
    first: int
    last: int


Unit = tuple[Piece, ...]


def plan_units(layout: Layout, extents: Sequence[int], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Cut `extents` into units of about `unit_bytes` to hand to threads; small ones share one."""
    units: list[Unit] = []
    unit: list[Piece] = []
    room = unit_bytes
    for extent in extents:
        spec = layout.extents[extent]
        first, count = 0, spec.chunk_count
        while first < count:
            last = min(count, first + max(1, room // spec.chunk_bytes))
            unit.append(Piece(extent, first, last))
            room -= min(spec.nbytes, last * spec.chunk_bytes) - first * spec.chunk_bytes
            first = last
            if room <= 0:
                units.append(tuple(unit))
                unit, room = [], unit_bytes
    if unit:
        units.append(tuple(unit))
    return units


def staging_order(layout: Layout, extents: Sequence[int]) -> list[int]:
    """What helps the writer to store other tensors goes before these: exp_avg, by which the rest of
    an Adam state is predicted, first; 16-bit tensors, which may follow from float32 ones, last."""
    keys = extent_keys(layout)

    def rank(extent: int) -> int:
        path, _, dtype, *_ = keys[extent]
        return 0 if path.endswith("/exp_avg") else 2 if dtype in ("bfloat16", "float16") else 1

    return sorted(extents, key=rank)


class LayoutPlan:
    """What is the same for every save with one layout: extent keys, and work cut into units.

    `live` and `private` are units over the extents that are read from training memory and from
    private copies; the live ones go first, because training waits for them.
    """

    def __init__(
        self,
        layout: Layout,
        live: Sequence[int],
        private: Sequence[int],
        unit_bytes: int = UNIT_BYTES,
    ) -> None:
        self.layout = layout
        self.keys = extent_keys(layout)
        self._extents = live, private
        self.live = plan_units(layout, staging_order(layout, live), unit_bytes)
        self.private = plan_units(layout, staging_order(layout, private), unit_bytes)
        specs = [layout.extents[extent] for extent in (*live, *private)]
        self.chunks = sum(spec.chunk_count for spec in specs)
        bulk = sum(spec.nbytes for spec in specs if spec.nbytes > GIL_FREE_BYTES)
        self.useful_threads = 1 + bulk // unit_bytes
        """More would only wait for each other: small pieces are hashed with the GIL."""

    def fits(self, layout: Layout, live: Sequence[int], private: Sequence[int]) -> bool:
        return layout is self.layout and self._extents == (live, private)


class Workers:
    """A few persistent daemon threads that help the caller of :meth:`run`.

    They are plain threads rather than a ``ThreadPoolExecutor``, which refuses work during
    interpreter exit, just when a last save must still be finished. Threads start at the first
    `run` that can use them. One `run` at a time (the owner is a single staging thread).
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started: list[threading.Thread] = []

    def run(
        self,
        work: Callable[[Iterator[Unit]], None],
        units: Sequence[Unit],
        *,
        at_most: int | None = None,
    ) -> None:
        """Call `work` with one shared iterator of `units` on up to `at_most` threads.

        Returns when all calls have returned. The first exception of any of them is raised here;
        the others then find no more units.
        """
        queue = deque(units)
        errors: list[BaseException] = []

        def take() -> Iterator[Unit]:
            while True:
                try:
                    yield queue.popleft()
                except IndexError:
                    return

        def guarded() -> None:
            try:
                work(take())
            except BaseException as error:
                errors.append(error)
                queue.clear()

        helpers = min(self.threads, at_most or self.threads, len(units)) - 1
        done = threading.Semaphore(0)

        def helper_job() -> None:
            guarded()
            done.release()

        while len(self._started) < helpers:
            thread = threading.Thread(target=self._serve, name="deltackpt-hash", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads: go on with fewer
                helpers = len(self._started)
                break
            self._started.append(thread)
        for _ in range(helpers):
            self._jobs.put(helper_job)
        guarded()
        for _ in range(helpers):
            done.acquire()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads and wait for it; none of them is working, since `run` has returned.

        One that lets go of a tensor while the interpreter ends would abort the process: PyTorch
        takes the GIL again in a destructor, where Python then ends the thread.
        """
        for _ in self._started:
            self._jobs.put(None)
        for thread in self._started:
            thread.join()
        self._started.clear()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and the tensors of the save, which it refers to
