"""Torch's own plain values (dtype, device, Size, ...) in value documents.

Importing this module teaches `deltackpt_store.values` both directions; `encode` and `decode` are
those of the store and are re-exported, so that the trainer side has them with torch known.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from deltackpt_store.errors import UnsupportedFormatError
from deltackpt_store.values import decode, encode, register

__all__ = ["decode", "dtype_from_name", "dtype_name", "encode"]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for torch.bfloat16: the name under which a dtype is recorded."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`; `UnsupportedFormatError` when this torch has no such dtype."""
    dtype: object = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormatError(
            f"this torch ({torch.__version__}) has no dtype {name!r}",
            hint="restore with a version of torch that has it",
            dtype=name,
        )
    return dtype


def _named(kind: type) -> None:
    """Register a type whose values are attributes of the torch module (torch.strided, ...)."""
    prefix = "torch."

    def write(value: Any) -> list[Any]:
        return [str(value).removeprefix(prefix)]

    def read(payload: list[Any]) -> object:
        (name,) = payload
        value: object = vars(torch)[name]
        if not isinstance(value, kind):
            raise TypeError(f"torch.{name} is no {kind.__name__}")
        return value

    register(f"torch.{kind.__name__}", kind, write, read)


def _read_size(payload: list[Any]) -> object:
    return torch.Size(payload[0])


def _read_device(payload: list[Any]) -> object:
    return torch.device(payload[0])


for _kind in (torch.dtype, torch.layout, torch.memory_format):
    _named(_kind)
register("torch.device", torch.device, lambda value: [str(value)], _read_device)
register("torch.size", torch.Size, lambda value: [list(value)], _read_size)
