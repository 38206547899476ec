"""Tensors measured at one moment: facts, addresses, storages.

Addresses are comparable inside one probe only: memory is reused between saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .tensors import refuse_unsupported

_T = TypeVar("_T")
_ADDRESSED = frozenset(("cpu", "cuda", "xpu"))  # data_ptr() orders the bytes of a device

Facts = tuple[Any, ...]
"""(shape, stride, dtype, device, requires_grad, type, layout, conj, neg)

`requires_grad` is that of a leaf of a graph. That of a result comes of its graph, which is not
saved: as a leaf, it would refuse the in-place operations that the original takes."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The tensors of one capture as measured: facts per tensor, addresses and storages."""

    facts: list[Facts]
    address: NDArray[np.int64]
    offset: NDArray[np.int64]  # of the first element in its storage, in elements
    storage: NDArray[np.int64]  # bytes of the storage


def probe(
    paths: Sequence[str], tensors: Sequence[Tensor], expected: list[Facts] | None = None
) -> Probe | None:
    """Measure `tensors`; `InvalidInputError` names the path of one that has no readable memory.

    Equal facts are one object. With `expected`, the facts of an earlier probe: None as soon as a
    tensor differs from them. (Facts are compared one by one and not collected: 20,000 new tuples
    would wake the garbage collector, which costs more than all the rest.)
    """
    try:
        if expected is None:
            known: dict[Facts, Facts] = {}
            facts: list[Facts] = [
                known.setdefault(own, own)
                for own in (
                    (t.shape, t.stride(), t.dtype, t.device, t.requires_grad and t.is_leaf, type(t),
                     t.layout, t.is_conj(), t.is_neg())
                    for t in tensors
                )
            ]  # fmt: skip
        elif len(tensors) == len(expected) and all(
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad and t.is_leaf, type(t),
             t.layout, t.is_conj(), t.is_neg()) == known
            for t, known in zip(tensors, expected, strict=True)
        ):  # fmt: skip
            facts = expected
        else:
            return None
        count = len(tensors)
        address = np.fromiter(map(Tensor.data_ptr, tensors), np.uint64, count).view(np.int64)
        offset = np.fromiter(map(Tensor.storage_offset, tensors), np.int64, count)
        storage = np.fromiter((t.untyped_storage().nbytes() for t in tensors), np.int64, count)
    except Exception:
        for path, tensor in zip(paths, tensors, strict=True):
            refuse_unsupported(path, tensor)
        raise
    if any(own[3].type not in _ADDRESSED for own in _distinct(facts).values()):
        address = _pseudo_addresses(tensors)
    return Probe(facts, address, offset, storage)


def of_each(facts: Sequence[Facts], make: Callable[[Facts], _T]) -> list[_T]:
    """What `make` makes of the facts of each tensor; asked once for those that are one object."""
    made = {key: make(own) for key, own in _distinct(facts).items()}
    return [made[id(own)] for own in facts]


def _distinct(facts: Sequence[Facts]) -> dict[int, Facts]:
    return {id(own): own for own in facts}


def _pseudo_addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Stand-ins where data_ptr() is only a handle: the same order of bytes within a storage."""
    number: dict[int, int] = {}
    out = [
        ((1 + number.setdefault(t.untyped_storage().data_ptr(), len(number))) << 44)
        + t.storage_offset() * t.itemsize
        for t in tensors
    ]
    return np.array(out, np.int64)
