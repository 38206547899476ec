"""Device tensors that have to be copied at the call of `save`, within bounded device memory.

Up to :data:`COPY_BYTES` of them are copied on the device, where they are hashed like live memory.
The rest *lands*: it crosses the bus into page-locked host memory and is hashed there. What has
gaps is packed on the way, piece by piece, in one device buffer of at most :data:`PIECE_BYTES`. All
of it is queued on the current stream of the training thread, which waits for nothing: the stream's
order makes it one instant, and lets the one buffer serve all pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .buffers import Arrival
from .devices import DeviceEvent, page_locked

_log = logging.getLogger("deltackpt")

COPY_BYTES = 112 << 20
"""Bound of one capture's copies on each device. Which extents stay depends on the layout alone."""
PIECE_BYTES = 32 << 20
"""Bound of the device buffer in which landing tensors are packed."""
_LEAST_BYTES = 64 << 10
"""A full device must have this much left for it."""


class Transport(Protocol):
    """One device, seen from the training thread: everything is queued on its current stream."""

    def room(self, nbytes: int) -> Tensor:
        """Device memory (uint8)."""
        ...

    def locked(self, nbytes: int) -> Tensor:
        """Host memory (uint8), page-locked where the device can do that."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy within the device or to such host memory; equal dtypes and shapes."""
        ...

    def record(self) -> Arrival | None:
        """What happens after all copies so far; None when they are complete already."""
        ...


class CurrentStream:
    """The :class:`Transport` of real devices. Those other than CUDA's copy synchronously."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"

    def room(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def locked(self, nbytes: int) -> Tensor:
        if not self._cuda:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return page_locked(nbytes, self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=self._cuda)

    def record(self) -> Arrival | None:
        return DeviceEvent(self._device) if self._cuda else None


def transport(device: torch.device) -> Transport | None:
    """How copies leave `device`; None for the host, which needs no landing."""
    return None if device.type == "cpu" else CurrentStream(device)


def staying(rooms: Sequence[int], bound: int) -> list[bool]:
    """Which copies, of these sizes, stay on the device: first come, as long as they fit."""
    left, stay = bound, list[bool]()
    for room in rooms:
        stay.append(room <= left)
        left -= room if stay[-1] else 0
    return stay


def pieces(view: Tensor, most: int) -> Iterator[Tensor]:
    """Parts of `view` of at most `most` elements which, one after another in row-major order,
    are all of it."""
    if view.numel() <= most:
        yield view
        return
    inner = view.numel() // view.shape[0]
    if inner > most:
        for row in view.unbind():
            yield from pieces(row, most)
    else:
        rows = most // inner
        for first in range(0, view.shape[0], rows):
            yield view[first : first + rows]


def warn_of_full_device(device: torch.device, error: torch.OutOfMemoryError) -> None:
    _log.warning(
        "%s has no memory left for copies at the call of a save: from now on they all cross the bus"
        " (%s)",
        device,
        error,
    )


def _packing_room(way: Transport, nbytes: int) -> Tensor:
    """Device memory of `nbytes`, or of as much as there is left."""
    while True:
        try:
            return way.room(nbytes)
        except torch.OutOfMemoryError:
            if nbytes <= _LEAST_BYTES:
                raise
            nbytes = max(nbytes // 2, _LEAST_BYTES)


class Landing:
    """Queues the landing copies of one capture from one device, and counts them.

    `packed_bytes`: size of the largest extent that :meth:`packed` will be given.
    """

    def __init__(self, way: Transport, packed_bytes: int) -> None:
        self._way = way
        self._room = _packing_room(way, min(PIECE_BYTES, packed_bytes)) if packed_bytes else None
        self.transfers = 0
        self.nbytes = 0

    @property
    def device_bytes(self) -> int:
        return 0 if self._room is None else self._room.numel()

    def dense(self, out: Tensor, source: Tensor) -> None:
        """Bring contiguous bytes into `out`."""
        self._way.copy(out, source)
        self.transfers += 1
        self.nbytes += out.numel()

    def packed(self, out: Tensor, source: Tensor) -> None:
        """Bring the elements of any strided tensor, in row-major order, into `out`."""
        assert self._room is not None
        at = 0
        for piece in pieces(source, self._room.numel() // source.itemsize):
            nbytes = piece.numel() * source.itemsize
            room = self._room[:nbytes]
            self._way.copy(room.view(source.dtype).view(piece.shape), piece)
            self.dense(out[at : at + nbytes], room)
            at += nbytes
