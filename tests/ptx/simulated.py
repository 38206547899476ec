"""Simulated devices: what the kernels promise, and streams that run as late as events allow.

:class:`ModelKernels` does in numpy and xxhash what each kernel's contract says, so that the code
around the kernels can be tested quickly. :class:`LateStreams` keeps everything asynchronous undone
until an event demands it (or, by a seeded coin, a little earlier), so that a missing wait shows as
wrong bytes.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from deltackpt.cuda.specs import kernel_specs
from deltackpt.cuda.xxh3 import SEED

_PATTERN = 0xA5


def fresh(nbytes: int) -> torch.Tensor:
    """Memory aligned to 256 bytes, full of a pattern that is never right."""
    memory = torch.full((nbytes + 256,), _PATTERN, dtype=torch.uint8)
    skip = -memory.data_ptr() % 256
    return memory[skip : skip + nbytes]


class ModelKernels:
    """The kernels' contracts. Sums are not modelled: a chunk is hashed when it is finished."""

    def __call__(self, kernel: str, programs: int, *args: Any) -> None:
        names = [name for name, _ in kernel_specs()[kernel].arguments]
        getattr(self, kernel)(programs, **dict(zip(names, args, strict=True)))

    def sweep(self, programs: int, *, table: Any, keys: Any, digests: Any, flags: Any,
              done_first: int, done_end: int, sums: Any, **numbers: int) -> None:  # fmt: skip
        sums[:] = 0  # the scratch is written over while it is used
        self._hash(table, keys, digests, flags, range(done_first, done_end), long=True)

    def short_chunks(
        self, programs: int, *, table: Any, keys: Any, digests: Any, flags: Any, chunks: int
    ) -> None:
        self._hash(table, keys, digests, flags, range(chunks), long=False)

    def _hash(
        self, table: Any, keys: Any, digests: Any, flags: Any, rows: range, *, long: bool
    ) -> None:
        words, out = table.numpy().reshape(-1, 2), digests.numpy().reshape(-1, 2)
        seed = int(keys.numpy()[SEED])
        for row in rows:
            length = int(words[row, 1]) & 0xFFFFFFFF
            if (length > 240) is not long:
                continue
            data = ctypes.string_at(int(words[row, 0]), length)
            value = xxhash.xxh3_128_intdigest(data, seed=seed)
            new = np.array([value & (1 << 64) - 1, value >> 64], np.uint64)
            flags[row] = int((out[row] != new).any())
            out[row] = new

    def compact(
        self, programs: int, *, flags: Any, digests: Any, changed: Any, changed_digests: Any,
        chunks: int,
    ) -> None:  # fmt: skip
        rows = np.flatnonzero(flags.numpy()[:chunks])
        changed.numpy()[: len(rows) + 1] = [len(rows), *rows]
        found = digests.numpy().reshape(-1, 2)[rows]
        changed_digests.numpy()[: 2 * len(rows)] = found.reshape(-1)

    def gather(
        self, programs: int, *, table: Any, plan: Any, target: int, first: int, tiles_log2: int
    ) -> None:
        words, entries = table.numpy().reshape(-1, 2), plan.numpy().reshape(-1, 2)
        for row, offset in entries[first : first + (programs >> tiles_log2)]:
            length = int(words[row, 1]) & 0xFFFFFFFF
            assert length <= 16 * 1024 << tiles_log2, "too few programs for this chunk"
            assert (target + int(offset)) % 16 == 0
            ctypes.memmove(target + int(offset), int(words[row, 0]), length)


@dataclass(eq=False)
class LateStream:
    """Work in order: things to do, and events of other streams to wait for first."""

    queue: deque[Any] = field(default_factory=deque[Any])


@dataclass(eq=False)
class LateEvent:
    stream: LateStream
    happened: bool = False


class LateStreams:
    """A `deltackpt.cuda.runtime.Runtime` whose streams lag. `main` is the training stream.

    `haste` is the chance that a step of some stream runs when something is queued. `trouble` is
    raised by what is queued next, if set. `lockable` False makes page-locking fail. `largest` is
    the most bytes of device memory that are given out at once.
    """

    def __init__(
        self, kernels: Callable[..., None], *, haste: float = 0.0, seed: int = 0,
        lockable: bool = True,
    ) -> None:  # fmt: skip
        self.device, self.wave = torch.device("cpu"), 32
        self.kernels, self.haste, self.lockable = kernels, haste, lockable
        self.random = random.Random(seed)
        self.streams: list[LateStream] = []
        self.main = self.stream()
        self.locked: dict[int, int] = {}
        self.trouble: Exception | None = None
        self.largest: int | None = None

    def stream(self) -> LateStream:
        self.streams.append(LateStream())
        return self.streams[-1]

    def submit(self, stream: LateStream, work: Callable[[], object]) -> None:
        """Queue anything; tests queue what training does on `main`."""
        if self.trouble is not None:
            raise self.trouble
        stream.queue.append(work)
        while self.random.random() < self.haste:
            self._step(self.random.choice(self.streams))

    def mark(self) -> LateEvent:
        return self.record(self.main)

    def record(self, stream: LateStream) -> LateEvent:
        event = LateEvent(stream)
        stream.queue.append(event)
        return event

    def wait(self, stream: LateStream, event: LateEvent) -> None:
        stream.queue.append((event,))

    def synchronize(self, event: LateEvent) -> None:
        self._reach(event)

    def _reach(self, event: LateEvent) -> None:
        while not event.happened:
            self._step(event.stream)

    def _step(self, stream: LateStream) -> None:
        if not stream.queue:
            return
        item = stream.queue.popleft()
        if isinstance(item, LateEvent):
            item.happened = True
        elif isinstance(item, tuple):
            self._reach(item[0])
        else:
            item()

    def launch(self, stream: LateStream, kernel: str, programs: int, *args: Any) -> None:
        assert 0 < programs < 1 << 31
        self.submit(stream, lambda: self.kernels(kernel, programs, *args))

    def copy(self, stream: LateStream, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.numel() == source.numel()
        target.fill_(_PATTERN)  # whoever reads the target before the copy is complete sees this
        self.submit(stream, lambda: target.copy_(source))

    def empty(self, stream: LateStream, nbytes: int) -> torch.Tensor:
        if self.largest is not None and nbytes > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return fresh(nbytes)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return fresh(nbytes)

    def lock(self, view: memoryview) -> str | None:
        if not self.lockable:
            return "operation not supported"
        address = np.frombuffer(view, np.uint8).ctypes.data
        assert address not in self.locked, "locked twice"
        self.locked[address] = len(view)
        return None

    def unlock(self, view: memoryview) -> None:
        del self.locked[np.frombuffer(view, np.uint8).ctypes.data]

    @property
    def idle(self) -> bool:
        """Whether no stream but the training stream has anything left to do."""
        return not any(
            callable(item) for s in self.streams if s is not self.main for item in s.queue
        )
