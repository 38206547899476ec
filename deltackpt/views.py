"""From bytes back to tensors: the inverse of `extents`."""

from __future__ import annotations

import torch
from deltackpt_store.errors import CorruptionError
from deltackpt_store.manifest import TensorView
from torch import Tensor, nn

from .tensors import dtype_problem
from .values import dtype_from_name


def rebuild(view: TensorView, memory: Tensor) -> Tensor:
    """The tensor that `view` describes, looking at `memory` (no copy).

    `memory` is the extent's bytes: flat contiguous uint8, any device, at a storage offset that is
    a multiple of 16. Views of one extent built on one `memory` share its storage, as they did when
    saved. The result is a plain tensor that requires no grad; see :func:`dress`.
    Raises `CorruptionError` when the view does not fit `memory`, `UnsupportedFormatError` for a
    dtype this torch does not have.
    """
    dtype = dtype_from_name(view.dtype)
    if dtype_problem(dtype) is not None:
        raise CorruptionError(f"tensor view of the dtype {view.dtype}", kind="view")
    size = dtype.itemsize
    numbers = (*view.shape, *view.stride, view.offset)
    reach = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=False))
    end = view.offset + reach * size if all(view.shape) else view.offset
    at = int(memory.storage_offset()) + view.offset
    if (
        len(view.shape) != len(view.stride)
        or any(n < 0 for n in numbers)
        or end > memory.numel()
        or at % size
    ):
        raise CorruptionError(
            f"tensor view of {list(view.shape)} {view.dtype} at {view.offset} does not fit its "
            f"{memory.numel()} bytes",
            kind="view",
            slot=view.slot,
        )
    try:
        out = _blank(dtype, memory.device)
        out = out.set_(memory.untyped_storage(), at // size, view.shape, view.stride)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise _impossible(error) from None
    if view.neg:
        out = torch._neg_view(out)  # pyright: ignore  # no public spelling
    return torch.conj(out) if view.conj else out


def _blank(dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.complex32:  # torch.empty warns that it is experimental
        return torch.empty(0, dtype=torch.uint8, device=device).view(dtype)
    return torch.empty(0, dtype=dtype, device=device)


def dress(view: TensorView, tensor: Tensor) -> Tensor:
    """`tensor` as an nn.Parameter or with requires_grad, as recorded in `view`.

    Raises `CorruptionError` for one that cannot have a grad.
    """
    try:
        if view.parameter:
            return nn.Parameter(tensor, requires_grad=view.requires_grad)
        return tensor.requires_grad_() if view.requires_grad else tensor
    except RuntimeError as error:
        raise _impossible(error) from None


def shape_of(view: TensorView) -> Tensor:
    """A tensor on the meta device with the saved one's dtype and shape. Raises as `rebuild`."""
    try:
        return torch.empty(view.shape, dtype=dtype_from_name(view.dtype), device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise _impossible(error) from None


def _impossible(error: Exception) -> CorruptionError:
    return CorruptionError(f"impossible tensor view: {error}", kind="view")
