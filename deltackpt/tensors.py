"""Which tensors can be saved: dense memory with a plain class. Everything else is refused by key.

Sparse tensors never get here: the tree takes them apart (see `tree`).
"""

from __future__ import annotations

import functools

import torch
from deltackpt_store.errors import StateError, UnsupportedFormatError
from deltackpt_store.layout_check import MAX_DIMENSIONS
from deltackpt_store.manifest import element_bytes
from deltackpt_store.values import refuse
from torch import Tensor, nn

from .values import dtype_from_name, dtype_name

PLAIN: frozenset[type] = frozenset((Tensor, nn.Parameter))  # nn.Buffer makes plain tensors

_QUANTIZED = frozenset(("qint8", "quint8", "qint32", "quint4x2", "quint2x4"))
"""Their numbers mean nothing without the scale and zero point, which a tensor may lack."""

_TRAINED = "{name: p for name, p in model.named_parameters() if p.requires_grad}"


@functools.cache
def dtype_problem(dtype: torch.dtype) -> str | None:
    """Why no tensor of `dtype` is saved nor loaded; None when it is.

    Both sides ask here, so that what is accepted by a save is always known to a load.
    """
    name = dtype_name(dtype)
    if name in _QUANTIZED:
        return "is quantized"
    try:
        if dtype_from_name(name) is dtype and element_bytes(name) == dtype.itemsize:
            return None
    except UnsupportedFormatError:
        pass
    return "has a name that does not tell its size"


def check_mode() -> None:
    """`StateError` (kind "mode") where PyTorch gives no real memory, as in a FakeTensorMode."""
    probe = torch.empty(0, dtype=torch.uint8, device="cpu")
    if type(probe) is not Tensor or _wrapped(probe):
        raise StateError(
            f"nothing can be saved or restored here: new tensors are {type(probe).__name__}s"
            " without memory",
            kind="mode",
            hint="call it outside of FakeTensorMode and of torch.func transforms",
        )


def refuse_unsupported(path: str, tensor: Tensor) -> None:
    """Raise `InvalidInputError` (kind "unsupported-value") unless `tensor` can be saved."""
    problem = _problem(tensor)
    if problem is not None:
        raise refuse(path, *problem)


def _problem(tensor: Tensor) -> tuple[str, str] | None:
    """Reason and way out, or None when all is well."""
    if type(tensor) not in PLAIN:
        return _subclass(tensor)
    if _wrapped(tensor):
        return "is a tensor inside a torch.func transform", "save outside of the transform"
    if tensor.is_nested:
        return "is a nested tensor", "save its list of tensors (tensor.unbind())"
    if tensor.is_meta:
        return "is a meta tensor, which has no data", "materialise it (to_empty) and load it first"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}", "save tensor.to_dense()"
    if tensor.is_quantized:
        return (
            f"is a quantized tensor ({tensor.dtype})",
            "save tensor.int_repr() with its scale and zero point",
        )
    problem = dtype_problem(tensor.dtype)
    if problem is not None:
        return f"has the dtype {tensor.dtype}, which {problem}", "save tensor.view(torch.uint8)"
    if tensor.dim() > MAX_DIMENSIONS:
        return f"has {tensor.dim()} dimensions (limit {MAX_DIMENSIONS})", "save it reshaped"
    if not tensor.numel():
        return None
    if tensor._is_zerotensor():  # pyright: ignore  # no public spelling
        return "is a symbolic zero, which has no data", "save tensor.clone()"
    size, offset = tensor.itemsize, tensor.storage_offset()
    reach = tensor.numel()
    if not tensor.is_contiguous():
        reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if held < (offset + reach) * size:
        return (
            f"needs {(offset + reach) * size} bytes, but its storage was resized to {held}",
            "save while the parameter is gathered, or leave it out of the state",
        )
    if tensor.data_ptr() == offset * size:
        return "has no memory behind it", "save a real copy of it (tensor.clone())"
    return None


def _subclass(tensor: Tensor) -> tuple[str, str]:
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore  # a subclass may refuse anything
        return _subclass_problem(tensor)


def _subclass_problem(tensor: Tensor) -> tuple[str, str]:
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if nn.parameter.is_lazy(tensor):
        return "is a parameter that is not initialised yet", "run one forward pass before saving"
    if kind.__qualname__ == "FakeTensor":
        return "is a FakeTensor, which has no data", "save outside of FakeTensorMode"
    if kind.__qualname__ == "DTensor":
        return "is a DTensor", "save tensor.to_local() per rank, or tensor.full_tensor() on one"
    if tensor.is_nested:
        return "is a nested tensor", "save its list of tensors (tensor.unbind())"
    if hasattr(kind, "__tensor_flatten__"):
        reason = f"is the wrapper subclass {name}"
        hint = "save its inner tensors and metadata (__tensor_flatten__) as plain values"
    else:
        reason = f"is the tensor subclass {name}"
        hint = "save tensor.as_subclass(torch.Tensor) if its class carries no meaning"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        hint += f"; where it is a frozen base, save in place of the model {_TRAINED}"
    return reason, hint


def _wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore
