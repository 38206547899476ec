"""Warm memory for private copies, reused from one capture to the next."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class BufferPool:
    """Idle uint8 buffers by device, so that private copies do not page-fault at every save.

    Thread-safe. Keeps at most `keep` idle buffers per device: enough for that many captures in
    flight. A buffer given out belongs to the taker until it is given back.
    """

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._idle: dict[torch.device, list[Tensor]] = {}

    def take(self, device: torch.device, nbytes: int) -> Tensor:
        """A flat uint8 tensor of at least `nbytes` bytes, with arbitrary content.

        Idle buffers that are too small, or more than four times too large, are freed.
        """
        with self._lock:
            idle = self._idle.get(device, [])
            idle[:] = [b for b in idle if nbytes <= b.numel() <= 4 * nbytes]
            if idle:
                return idle.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that nobody reads any more."""
        with self._lock:
            idle = self._idle.setdefault(buffer.device, [])
            if len(idle) < self._keep:
                idle.append(buffer)

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._idle.clear()
