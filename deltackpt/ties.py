"""Live tensors that share memory can hold one value only: find where the checkpoint has two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from deltackpt_store.manifest import TensorView
from deltackpt_store.merkle import tensor_digest

from .reading import Step
from .spans import cut, span


class _Region(NamedTuple):
    device: str
    start: int
    end: int
    slot: int
    tensor: torch.Tensor


class Ties(NamedTuple):
    """Pairs of slots whose live tensors share memory.

    `broken`: the saved tensors cannot both be restored. `unsure`: both live tensors are the very
    same, and the saved ones have to be compared.
    """

    broken: list[tuple[int, int]]
    unsure: list[tuple[int, int]]


def find_ties(step: Step, goals: Iterable[tuple[int, torch.Tensor]]) -> Ties:
    """Check every overlap among the live tensors that the slots are restored into."""
    regions = sorted(
        (_region(slot, tensor) for slot, tensor in goals if tensor.numel()), key=lambda r: r[:4]
    )
    ties = Ties([], [])
    open_ones: list[_Region] = []
    for region in regions:
        open_ones = [r for r in open_ones if r.device == region.device and r.end > region.start]
        for other in open_ones:
            _compare(step, other, region, ties)
        open_ones.append(region)
    return ties


def _compare(step: Step, left: _Region, right: _Region, ties: Ties) -> None:
    pair = left.slot, right.slot
    a, b = step.views[left.slot], step.views[right.slot]
    if left.tensor is right.tensor or _same_place(left.tensor, right.tensor):
        if not _same_view(a, b) and not _same_content(step, *pair):
            ties.unsure.append(pair)
    elif not _overlap_alike(a, b, left.tensor, right.tensor):
        both = [span(t.data_ptr(), t.element_size(), t.shape, t.stride())
                for t in (left.tensor, right.tensor)]  # fmt: skip
        if len(cut(both, [0, 1])) == 1:  # else they lie in each other's gaps
            ties.broken.append(pair)


def _region(slot: int, tensor: torch.Tensor) -> _Region:
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    end = start + reach * tensor.element_size()
    return _Region(str(tensor.device), start, end, slot, tensor)


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
