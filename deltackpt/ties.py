"""Live tensors that share memory hold one value only: find where the checkpoint may have two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from deltackpt_store.manifest import TensorView
from deltackpt_store.merkle import tensor_digest

from .copying import reach
from .reading import Step
from .spans import Span, cut, span

_FEW = 32
"""So many overlapping regions are compared each with each, without looking for those apart."""


class _Region(NamedTuple):
    device: str
    start: int
    end: int
    slot: int
    tensor: torch.Tensor


def find_ties(
    step: Step, goals: Iterable[tuple[int, torch.Tensor]]
) -> list[list[tuple[int, torch.Tensor]]]:
    """Groups of slots whose live tensors share memory otherwise than the saved ones did.

    Their contents have to be compared. Every overlap among the live tensors that the slots are
    restored into is looked at. Slots are in order of their places in memory.
    """
    regions = sorted(
        (_region(slot, tensor) for slot, tensor in goals if tensor.numel()), key=lambda r: r[:4]
    )
    alike: dict[tuple[Any, ...], list[_Region]] = {}
    for region in regions:
        alike.setdefault(_look(step, region), []).append(region)
    every = {own[0].slot: own for own in alike.values()}
    groups: dict[int, list[_Region]] = {}  # slot -> the group it is in
    for part in _sharing([own[0] for own in alike.values()]):
        _compare(step, part, groups)
    distinct = {id(group): group for group in groups.values()}
    return [
        [(r.slot, r.tensor) for r in sorted(one for r in group for one in every[r.slot])]
        for group in distinct.values()
    ]


def _look(step: Step, region: _Region) -> tuple[Any, ...]:
    """Equal for regions that are one place in memory, restored from one place of the step: what is
    true of one of them beside a third is true of all, and among themselves they are well."""
    t = region.tensor
    view = msgspec.structs.replace(step.views[region.slot], slot=0)
    place = region.device, region.start, region.end, t.dtype, t.shape, t.stride()
    return (*place, t.is_conj(), t.is_neg(), view)


def _sharing(regions: Iterable[_Region]) -> Iterator[list[_Region]]:
    """`regions`, which are in order, apart where no memory is shared between them for certain."""
    cluster: list[_Region] = []
    end = 0
    for region in regions:
        if cluster and (region.device != cluster[0].device or region.start >= end):
            yield from _parts(cluster)
            cluster = []
        end = max(end, region.end) if cluster else region.end
        cluster.append(region)
    yield from _parts(cluster)


def _parts(cluster: list[_Region]) -> Iterator[list[_Region]]:
    """Regions that overlap as ranges; many are parted first into those that share bytes."""
    if len(cluster) <= _FEW:
        yield cluster
        return
    for group in cut([_span(region.tensor) for region in cluster], range(len(cluster))):
        yield [cluster[i] for i in group.members]


def _compare(step: Step, regions: list[_Region], groups: dict[int, list[_Region]]) -> None:
    """Put those into one group that overlap, and not as the saved ones did."""
    fits = {_fit(step, region) for region in regions}
    if len(fits) == 1 and None not in fits:
        return
    open_ones: list[_Region] = []
    for region in regions:
        open_ones = [r for r in open_ones if r.end > region.start]
        for other in open_ones:
            if not _tied_alike(step, other, region):
                left = groups.setdefault(other.slot, [other])
                right = groups.setdefault(region.slot, [region])
                if left is not right:
                    left += right
                    groups.update((r.slot, left) for r in right)
        open_ones.append(region)


def _fit(step: Step, region: _Region) -> tuple[Any, ...] | None:
    """Equal for regions that all lie over each other exactly as the saved tensors do; None for one
    that lies otherwise than its own."""
    view, tensor = step.views[region.slot], region.tensor
    if tuple(tensor.stride()) != view.stride:
        return None
    signs = view.conj, view.neg, tensor.is_conj(), tensor.is_neg()
    return (view.extent, region.start - view.offset, *signs)


def _tied_alike(step: Step, left: _Region, right: _Region) -> bool:
    """Whether what is restored into the one leaves the other as it should be, as far as is known
    without comparing bytes."""
    a, b = step.views[left.slot], step.views[right.slot]
    if left.tensor is right.tensor or _same_place(left.tensor, right.tensor):
        return _same_view(a, b) or _same_content(step, left.slot, right.slot)
    if _overlap_alike(a, b, left.tensor, right.tensor):
        return True
    both = [_span(left.tensor), _span(right.tensor)]
    return len(cut(both, [0, 1])) > 1  # they lie in each other's gaps


def _span(t: torch.Tensor) -> Span:
    return span(t.data_ptr(), t.element_size(), t.shape, t.stride())


def _region(slot: int, tensor: torch.Tensor) -> _Region:
    start = tensor.data_ptr()
    return _Region(str(tensor.device), start, start + reach(tensor), slot, tensor)


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype, a.is_conj(), a.is_neg()) == (
        b.data_ptr(), b.shape, b.stride(), b.dtype, b.is_conj(), b.is_neg())  # fmt: skip


def _same_view(a: TensorView, b: TensorView) -> bool:
    return (a.extent, a.offset, a.stride, a.conj, a.neg) == (
        b.extent, b.offset, b.stride, b.conj, b.neg)  # fmt: skip


def _overlap_alike(a: TensorView, b: TensorView, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the saved tensors lie over each other exactly as the live ones do."""
    apart = right.data_ptr() - left.data_ptr()
    strides = tuple(left.stride()) == a.stride and tuple(right.stride()) == b.stride
    return a.extent == b.extent and b.offset - a.offset == apart and strides


def _same_content(step: Step, left: int, right: int) -> bool:
    return tensor_digest(step.snapshot, left) == tensor_digest(step.snapshot, right)
