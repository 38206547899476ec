"""Restore with little memory: verified chunks go straight into the live tensors.

Bytes of an extent land in one of three ways, chosen per extent:

- *in place*: the live tensor is host memory laid out exactly as the extent: read into it directly;
- *by window*: a few chunks at a time are read into a small buffer, verified there, and scattered
  into the live tensors, whatever their layout or device;
- *whole*: odd views (expanded, overlapping, or cut across an element): the extent is read into
  memory of its own and copied from there.

Nothing can be taken back here: when a chunk turns out to be damaged, earlier ones have already
been written, and in-place targets may even hold the damaged bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from deltackpt_store.fetch import Request
from deltackpt_store.manifest import TensorView

from .copying import (
    bits,
    copy_bits,
    dense_bytes,
    memory_order,
    plain_bits,
    scatter,
    writable_layout,
)
from .reading import Step, memory_of
from .views import rebuild

WINDOW_BYTES = 16 * 1024 * 1024
"""Size of the buffer through which windows pass (more only when a single chunk is larger)."""

_ALIGN = 256  # of pieces within the window


class Goal(NamedTuple):
    """A live tensor that `view` is to be written to; same dtype and shape."""

    view: TensorView
    tensor: torch.Tensor


class _Sink(NamedTuple):
    """A goal that takes flat ranges: its bits in the memory order of the saved view."""

    target: torch.Tensor
    offset: int  # bytes within the extent
    length: int  # bytes


class _Piece(NamedTuple):
    extent: int
    first: int  # chunk
    last: int
    start: int  # byte within the extent
    nbytes: int


def stream(step: Step, goals: Mapping[int, Sequence[Goal]], threads: int | None) -> None:
    """Write the extents into the live tensors named for them.

    `CorruptionError` when damage is met; the targets are incomplete then.
    """
    direct: dict[int, torch.Tensor] = {}
    windows: dict[int, list[_Sink]] = {}
    whole: list[int] = []
    for extent, wanted in goals.items():
        spec = step.layout.extents[extent]
        if not spec.nbytes:
            continue
        flat = _same_memory(wanted[0], spec.nbytes)
        if flat is not None:
            direct[extent] = flat
            continue
        sinks = [_sink(goal, spec.chunk_bytes) for goal in wanted]
        if all(sink is not None for sink in sinks):
            windows[extent] = [sink for sink in sinks if sink is not None]
        else:
            whole.append(extent)
    step.fill(direct, threads)
    for extent, flat in direct.items():
        for goal in goals[extent][1:]:
            if goal.tensor.data_ptr() != flat.data_ptr():
                copy_bits(goal.tensor, rebuild(goal.view, _aligned(flat)))
    _through_windows(step, windows, threads)
    for extent in whole:
        memory = step.read_all([extent], threads)[extent]
        for goal in goals[extent]:
            copy_bits(goal.tensor, rebuild(goal.view, memory))


def _same_memory(goal: Goal, nbytes: int) -> torch.Tensor | None:
    """The target's memory when it is the extent's, byte for byte; else None."""
    view, tensor = goal
    if tensor.device.type != "cpu" or view.offset or view.conj or view.neg:
        return None
    if tensor.numel() * tensor.element_size() != nbytes:
        return None
    order = memory_order(view.shape, view.stride)
    return None if order is None else dense_bytes(tensor, order)


def _sink(goal: Goal, chunk_bytes: int) -> _Sink | None:
    """How the goal takes ranges of whole elements; None when it must be copied in one go."""
    view, tensor = goal
    order = memory_order(view.shape, view.stride)
    if order is None or view.conj or view.neg or not plain_bits(tensor):
        return None
    if not writable_layout(tensor):
        return None
    target = bits(tensor)
    if target.dim() > tensor.dim():  # complex128: two words per element
        order = (*order, tensor.dim())
    width = target.element_size()
    if chunk_bytes % width or view.offset % width:
        return None
    return _Sink(target.permute(order), view.offset, target.numel() * width)


def _through_windows(
    step: Step, windows: Mapping[int, Sequence[_Sink]], threads: int | None
) -> None:
    """Read the extents piece by piece into one buffer, and scatter what has been verified."""
    pieces = [piece for extent in windows for piece in _pieces(step, extent)]
    if not pieces:
        return
    largest = max(_room(piece) for piece in pieces)
    total = sum(_room(piece) for piece in pieces)
    buffer = torch.empty(max(largest, min(WINDOW_BYTES, total)), dtype=torch.uint8, device="cpu")
    batch: list[tuple[_Piece, int]] = []
    used = 0
    for piece in pieces:
        if used + _room(piece) > buffer.numel():
            _deliver(step, windows, buffer, batch, threads)
            batch, used = [], 0
        batch.append((piece, used))
        used += _room(piece)
    _deliver(step, windows, buffer, batch, threads)


def _pieces(step: Step, extent: int) -> list[_Piece]:
    spec = step.layout.extents[extent]
    if spec.inline:
        return [_Piece(extent, 0, 0, 0, spec.nbytes)]
    at_once = max(1, WINDOW_BYTES // 4 // spec.chunk_bytes)
    pieces: list[_Piece] = []
    for first in range(0, spec.chunk_count, at_once):
        last = min(first + at_once, spec.chunk_count)
        start = first * spec.chunk_bytes
        end = min(last * spec.chunk_bytes, spec.nbytes)
        pieces.append(_Piece(extent, first, last, start, end - start))
    return pieces


def _room(piece: _Piece) -> int:
    return math.ceil(piece.nbytes / _ALIGN) * _ALIGN


def _deliver(
    step: Step,
    windows: Mapping[int, Sequence[_Sink]],
    buffer: torch.Tensor,
    batch: list[tuple[_Piece, int]],
    threads: int | None,
) -> None:
    view = memory_of(buffer)
    requests: list[Request] = []
    for piece, at in batch:
        room = view[at : at + piece.nbytes]
        if step.layout.extents[piece.extent].inline:
            room[:] = step.snapshot.inline[piece.extent]
        else:
            requests += step.requests(piece.extent, room, piece.first, piece.last)
    step.read(requests, threads)
    with torch.no_grad():
        for piece, at in batch:
            for sink in windows[piece.extent]:
                low = max(piece.start, sink.offset)
                high = min(piece.start + piece.nbytes, sink.offset + sink.length)
                if low >= high:
                    continue
                width = sink.target.element_size()
                data = buffer[at + low - piece.start : at + high - piece.start]
                scatter(sink.target, (low - sink.offset) // width, data.view(sink.target.dtype))


def _aligned(flat: torch.Tensor) -> torch.Tensor:
    """`flat` at a storage offset that :func:`rebuild` takes."""
    if flat.storage_offset() % 16 == 0:
        return flat
    return flat.clone()
