"""NumPy arrays that share memory hold one value only: find what does not fit into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .copying import bits, plain_bits, reach
from .spans import clusters

Array = np.ndarray[Any, Any]


class _Region(NamedTuple):
    """Memory that something is to be written to; `source` None: nobody knows what."""

    start: int
    end: int
    address: int  # of its first element, which need not be the lowest
    live: Array
    source: Array | None
    array: bool


def conflicting(
    arrays: Sequence[tuple[Array, Array]],
    tensors: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
) -> frozenset[int]:
    """The ids of live arrays that would not hold what is saved of them, when all is written.

    `arrays` and `tensors`: what is live, and what is to be written there, of one shape and dtype.
    """
    if not arrays:
        return frozenset()
    regions = [_region(live, saved, array=True) for live, saved in arrays if live.nbytes]
    for live, saved in tensors:
        if live.device.type != "cpu" or not live.numel() or live.layout != torch.strided:
            continue
        if saved is not None and plain_bits(live) and plain_bits(saved):
            regions.append(_region(bits(live).numpy(), bits(saved).numpy(), array=False))
        else:
            regions.append(_region(_memory(live).numpy(), None, array=False))
    apart: set[int] = set()
    for group in _groups(regions):
        apart |= _lost(group)
    return frozenset(apart)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from its first to its last element."""
    flat = torch.empty(0, dtype=torch.uint8)
    start = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), start, (reach(tensor),), (1,))


def _region(live: Array, source: Array | None, *, array: bool) -> _Region:
    address: int = live.__array_interface__["data"][0]
    steps = [(n - 1) * s for n, s in zip(live.shape, live.strides, strict=True)]
    start = address + sum(step for step in steps if step < 0)
    end = address + sum(step for step in steps if step > 0) + live.itemsize
    return _Region(start, end, address, live, source, array)


def _groups(regions: list[_Region]) -> list[list[_Region]]:
    """Regions that may share bytes, directly or through others, as far as an array is concerned."""
    if not regions:
        return []
    found = clusters(np.array([r.start for r in regions]), np.array([r.end for r in regions]))
    parts: list[list[int]] = [p.tolist() for p in np.split(found.order, found.begins[1:])]
    groups = [[regions[i] for i in part] for part in parts]
    return [
        group
        for group in groups
        if any(r.array for r in group) and (len(group) > 1 or _overlaps_itself(group[0].live))
    ]


def _overlaps_itself(array: Array) -> bool:
    run = array.itemsize  # bytes
    for stride, n in sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True)):
        if n > 1 and stride < run:
            return True
        run += (n - 1) * stride
    return False


def _lost(group: list[_Region]) -> set[int]:
    """Try it in memory of its own; tensors come last, and what they need stays."""
    arrays = [region for region in group if region.array]
    if any(region.source is None for region in group):
        return {id(region.live) for region in arrays}
    first = min(region.start for region in group)
    room = np.zeros(max(region.end for region in group) - first, np.uint8)
    ordered = [*arrays, *(region for region in group if not region.array)]
    for region in ordered:
        place, source = _place(region, room, first)
        place[...] = source
    lost: set[int] = set()
    for region in arrays:
        place, source = _place(region, room, first)
        if place.tobytes() != source.tobytes():
            lost.add(id(region.live))
    return lost


def _place(region: _Region, room: Array, first: int) -> tuple[Array, Array]:
    """Where a region lies in `room`, and its source, both as bytes."""
    assert region.source is not None
    kind = np.dtype(f"V{region.live.itemsize}")
    place: Array = np.ndarray(
        region.live.shape, kind, room, region.address - first, region.live.strides
    )
    return place, np.ascontiguousarray(region.source).view(kind).reshape(region.live.shape)
