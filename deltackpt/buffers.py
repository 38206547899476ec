"""Warm memory for private copies, reused from one capture to the next."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from deltackpt_store.errors import NO_MEMORY, WriterError
from torch import Tensor

_LARGE_BYTES = 4 << 20


class Arrival(Protocol):
    """The end of copies into host memory that a device makes by itself (`DeviceEvent`)."""

    def query(self) -> bool:
        """Whether they are complete."""
        ...

    def synchronize(self) -> None:
        """Wait until they are. For any thread."""
        ...


class BufferPool:
    """Idle uint8 buffers by device, so that private copies do not page-fault at every save.

    Thread-safe. Keeps at most `keep` idle buffers per device: enough for that many captures in
    flight. A buffer given out belongs to the taker until it is given back.
    """

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._idle: dict[tuple[torch.device, bool], list[Tensor]] = {}
        self.full: set[torch.device] = set()
        """Devices that had no memory left for a buffer, kept by who asked for one."""

    def take(
        self,
        device: torch.device,
        nbytes: int,
        *,
        landing: Callable[[int], Tensor] | None = None,
    ) -> Tensor:
        """A flat uint8 tensor of at least `nbytes` bytes, with arbitrary content.

        With `landing` it is host memory that `device` copies to, and that function makes it. Idle
        buffers that are too small, or more than four times too large, are freed.
        """
        with self._lock:
            idle = self._idle.get((device, landing is not None), [])
            idle[:] = [b for b in idle if nbytes <= b.numel() <= 4 * nbytes]
            kept = idle.pop() if idle else None
        if kept is not None:
            if kept.is_cuda:  # perhaps another stream's: the allocator then waits for this one, too
                kept.record_stream(torch.cuda.current_stream(device))
            return kept
        with torch.inference_mode(False):  # what is made in that mode takes no copy outside of it
            if landing is not None:
                return landing(nbytes)
            if device.type == "cpu":
                return _host(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor, *, landed_from: torch.device | None = None) -> None:
        """Return a buffer that nobody reads or writes any more."""
        key = (buffer.device, False) if landed_from is None else (landed_from, True)
        with self._lock:
            idle = self._idle.setdefault(key, [])
            if len(idle) < self._keep:
                idle.append(buffer)

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._idle.clear()


@dataclass(frozen=True, slots=True)
class Lease:
    """A buffer taken from a pool; `arrived` when a device copies into it, and `landed_from` which
    one when that is to host memory."""

    buffer: Tensor
    landed_from: torch.device | None = None
    arrived: Arrival | None = None

    def end(self, pool: BufferPool) -> None:
        """Give the buffer back; one that is still being written is left to torch's allocator."""
        with contextlib.suppress(RuntimeError):  # the device has failed
            if self.arrived is None or self.arrived.query():
                pool.give(self.buffer, landed_from=self.landed_from)


def _host(nbytes: int) -> Tensor:
    """Host memory; much of it in huge pages, if any: training waits while it is filled first."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        if nbytes < _LARGE_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        room = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, RuntimeError) as error:
        raise WriterError(
            f"no memory for a private copy of {nbytes} bytes of the state: {error}",
            kind="memory",
            hint=NO_MEMORY,
        ) from error
    with contextlib.suppress(AttributeError, OSError):
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8)
