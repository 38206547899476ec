"""Bit-exact copies into live tensors, whatever their layout.

Everything here compares and moves *bits*: NaN payloads, signs of zero and odd bool bytes survive.
Source and target must agree in dtype and shape (callers check and report); strides, device and
dense or expanded layout of the target are kept as they are. Functions run in the calling thread
and never build an autograd graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .spans import form

_neg_view: Any = torch._neg_view  # pyright: ignore
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """An integer view of the same memory (complex128: with a last dimension of two)."""
    tensor = tensor.detach()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def plain_bits(tensor: torch.Tensor) -> bool:
    """Whether :func:`bits` shows the logical values: dense storage, no lazy conj or neg bit."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and logical values, compared as bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.layout != torch.strided or right.layout != torch.strided:
        return left.layout == right.layout and _same_sparse(left, right)
    left = left.detach().resolve_conj().resolve_neg()
    right = right.detach().resolve_conj().resolve_neg()
    return torch.equal(bits(left), bits(right.to(left.device)))


def _same_sparse(left: torch.Tensor, right: torch.Tensor) -> bool:
    pairs = zip(sparse_parts(left).values(), sparse_parts(right).values(), strict=True)
    return all(same_bits(a, b) for a, b in pairs)


def sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The dense tensors that a sparse one consists of, by name (not coalesced, no copy)."""
    t: Any = tensor.detach()
    if t.layout == torch.sparse_coo:
        return {"indices": t._indices(), "values": t._values()}
    names = ["crow_indices", "col_indices", "values"]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        names[:2] = ["ccol_indices", "row_indices"]
    return {name: getattr(t, name)() for name in names}


def writable_layout(tensor: torch.Tensor) -> bool:
    """Whether no two elements of a dense tensor share memory (an expanded tensor's do)."""
    if 0 in tensor.shape:
        return True
    pairs = sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    )
    span = 0
    for stride, size in pairs:
        if stride <= span:
            return False
        span += stride * (size - 1)
    return True


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target` element by element, as bits; both of one dtype and shape.

    A target whose elements share memory (``expand``) is written through one representative per
    repeated dimension; the caller has checked that the source repeats there, too.
    """
    with torch.no_grad():
        target, source = _without_flags(target, source)
        if _copy_memory(target, source):
            return
        if _alike(target, source) and (count := _run_length(target)):
            target = target.detach().as_strided((count,), (1,))
            source = source.detach().as_strided((count,), (1,))
        else:
            layout = zip(target.shape, target.stride(), strict=True)
            for dim, (size, stride) in enumerate(layout):
                if size > 1 and stride == 0:
                    target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        bits(target).copy_(bits(source.resolve_conj().resolve_neg()))


def _without_flags(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same copy, with `target` as a view of its memory that has no lazy conj or neg bit."""
    if target.is_conj():
        target, source = target.conj(), source.conj()
    if target.is_neg():
        target, source = _neg_view(target), _neg_view(source)
    return target, source


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` of any layout into `target`, which is of the same."""
    with torch.no_grad():
        target.copy_(source)  # not of a detached alias: a sparse one would take it for itself


_LARGE = 1 << 16


def _copy_memory(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy large host tensors of one dense layout as memory; False when they are not that.

    ``Tensor.copy_`` would have its threads spin for one another, which is many times slower than
    one ``memcpy`` when other processes compete for the processors.
    """
    if target.device.type != "cpu" or source.device.type != "cpu":
        return False
    if target.numel() * target.element_size() < _LARGE:
        return False
    order = memory_order(target.shape, target.stride())
    if order is None:
        return False
    there, here = dense_bytes(source, order), dense_bytes(target, order)
    if there is None or here is None:
        return False
    memory: Any = here.numpy()
    memory[:] = there.numpy()
    here[:0].zero_()  # so that autograd knows that the tensor has changed
    return True


_BLOCK = 1 << 18  # bytes swapped at a time: stays in the processor's cache
_DEVICE_BLOCK = 1 << 24  # where one side is on a device, which takes microseconds for each copy


def exchange_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Swap the contents of two tensors of one dtype and shape, which share no memory.

    Both keep their layout and device. Neither is expanded or overlaps itself.
    """
    with torch.no_grad():
        if not (plain_bits(target) and plain_bits(source)):
            old = target.detach().clone()
            target.detach().copy_(source.detach())
            source.detach().copy_(old)
            return
        left, right = bits(target), bits(source)
        order = memory_order(left.shape, left.stride())
        if order is None or not right.permute(order).is_contiguous():
            old = left.clone()
            left.copy_(right)
            right.copy_(old)
            return
        left, right = left.permute(order).view(-1), right.permute(order).view(-1)
        block = _BLOCK if left.is_cpu and right.is_cpu else _DEVICE_BLOCK
        step = block // left.element_size()
        for at in range(0, len(left), step):
            old = left[at : at + step].clone()
            left[at : at + step].copy_(right[at : at + step])
            right[at : at + step].copy_(old)


def repeats_like(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `source` holds equal values wherever `target`'s elements share memory."""
    if _alike(target, source):  # its elements share memory there, too
        return True
    return not overwritten([(target, source)])


def _alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether two tensors of one shape overlap themselves in the same way (dense ones do not)."""
    return (
        target.stride() == source.stride()
        and not target.is_contiguous()
        and not writable_layout(target)
    )


def _run_length(tensor: torch.Tensor) -> int:
    """Elements of the memory that a tensor looks at, when that has no gaps; else 0."""
    own = form(tensor.element_size(), tensor.shape, tensor.stride())
    return own.nbytes // tensor.element_size() if own.gapless else 0


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy, which takes no more memory than `tensor` does if that overlaps itself."""
    tensor = tensor.detach()
    if tensor.layout == torch.strided and not writable_layout(tensor) and plain_bits(tensor):
        count = _run_length(tensor)
        if count:
            run = tensor.as_strided((count,), (1,)).clone()
            return run.as_strided(tensor.shape, tensor.stride(), 0)
    return tensor.clone()


def overwritten(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    """Which targets would not hold their sources after each source is copied into its target.

    The targets (strided, on one device, each with elements) may share memory with themselves and
    with each other in any way; none of it is touched, the copies go into as much host memory.
    """
    found: list[int] = []
    tried: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    first = min(target.data_ptr() for target, _ in pairs)
    spans = [reach(target) + target.data_ptr() - first for target, _ in pairs]
    room = torch.zeros(max(spans), dtype=torch.uint8, device="cpu")
    for number, (target, source) in enumerate(pairs):
        whole, size = source, target.element_size()
        shape, strides = list(target.shape), list(target.stride())
        for dim, (length, stride) in enumerate(zip(shape, strides, strict=True)):
            if length > 1 and stride == 0:
                source, shape[dim] = source.narrow(dim, 0, 1), 1
        if not same_bits(source.expand(whole.shape), whole):
            found.append(number)
            continue
        place = room.as_strided(
            (*shape, size), (*(stride * size for stride in strides), 1), target.data_ptr() - first
        )
        content = _physical(source, target).reshape(*shape, size)
        place.copy_(content)
        tried.append((number, place, content))
    return sorted(found + [n for n, place, content in tried if not torch.equal(place, content)])


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to past the last element of a tensor that has any."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * s for n, s in steps)) * tensor.element_size()


def _physical(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The flat bytes that stand for the elements of `source` in the memory of `target`."""
    values = source.detach().cpu().resolve_conj().resolve_neg()
    if target.is_conj():
        values = values.conj().resolve_conj()
    if target.is_neg():
        values = values.neg()
    flat = values.contiguous().as_strided((values.numel(),), (1,))
    return bits(flat).view(torch.uint8).view(-1)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Dimensions from outermost to innermost in memory, or None when the view has gaps or overlaps.

    ``tensor.permute(order)`` of a tensor with this layout is contiguous.
    """
    order = sorted(
        range(len(shape)), key=lambda dim: (shape[dim] == 1, -stride[dim], -shape[dim], dim)
    )
    expected = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return None
        expected *= shape[dim]
    return tuple(order)


def dense_bytes(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor | None:
    """The memory of a dense tensor as flat uint8, when its memory order is `order`; else None."""
    permuted = tensor.detach().permute(order)
    if not plain_bits(permuted) or not permuted.is_contiguous():
        return None
    flat = permuted.as_strided((permuted.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8)


def scatter(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Write flat `values` to the elements ``start ... start + len(values)`` of `target`.

    Elements are numbered in the row-major order of `target`'s shape; its strides may be anything
    without overlap. Both hold the same (integer) dtype; `values` is contiguous, maybe elsewhere.
    """
    count = values.numel()
    if not count:
        return
    if target.is_contiguous():
        target.view(-1)[start : start + count].copy_(values)
        return
    inner = math.prod(target.shape[1:])
    row, offset = divmod(start, inner)
    if offset:
        take = min(inner - offset, count)
        scatter(target[row], offset, values[:take])
        row, values = row + 1, values[take:]
    rows = values.numel() // inner
    if rows:
        block = values[: rows * inner].view(rows, *target.shape[1:])
        target[row : row + rows].copy_(block)
    if values.numel() % inner:
        scatter(target[row + rows], 0, values[rows * inner :])
