"""Taking back what a foreign ``load_state_dict`` did before it failed, and proving it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from .copying import same_bits
from .nodes import kind_of
from .targets import is_a


class Attributes:
    """The attributes of some objects as they are now, by reference: assignments can be undone."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._before = [
            (held, dict(held))
            for value in objects
            for held in _dictionaries(getattr(value, "__dict__", None))
        ]

    def put_back(self) -> None:
        for held, before in self._before:
            if held.keys() != before.keys() or any(held[k] is not before[k] for k in before):
                held.clear()
                held.update(before)


def _dictionaries(attributes: Any) -> list[dict[str, Any]]:
    """The attributes of an object, and of a module those it keeps by name."""
    if not is_a(attributes, dict):
        return []
    named = [attributes.get(name) for name in ("_parameters", "_buffers", "_modules")]
    return [attributes, *(held for held in named if is_a(held, dict))]


def private_copy(value: Any) -> Any:
    """A deep copy; results of computations, which `copy.deepcopy` refuses, without their graph."""
    memo: dict[int, Any] = {}
    _copy_results(value, memo)
    return copy.deepcopy(value, memo)


def _copy_results(value: Any, memo: dict[int, Any]) -> None:
    """Note a copy of every tensor in `value` that has a graph, in the way of `copy.deepcopy`."""
    if is_a(value, torch.Tensor):
        if not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    elif is_a(value, Mapping):
        for item in value.values():
            _copy_results(item, memo)
    elif is_a(value, list, tuple):
        for item in value:
            _copy_results(item, memo)


def undo(
    attributes: Attributes, before: Any, state: Callable[[], Any], load: Callable[[Any], object]
) -> None:
    """Make ``state()`` what it was `before`: by attributes first, then by ``load(before)``.

    Raises what `load` raises, or ``RuntimeError``, when the state is still another afterwards.
    """
    attributes.put_back()
    if alike(state(), before):
        return
    load(before)
    if not alike(state(), before):
        raise RuntimeError("its state is not what it was before")


def alike(left: Any, right: Any) -> bool:
    """Equal containers, types and values; tensors, arrays and floats by their bits."""
    if is_a(left, torch.Tensor) and is_a(right, torch.Tensor):
        return same_bits(left, right)
    if kind_of(left) is not kind_of(right):
        return False
    if is_a(left, Mapping):
        return list(left) == list(right) and all(alike(left[key], right[key]) for key in left)
    if is_a(left, list, tuple):
        return len(left) == len(right) and all(map(alike, left, right))
    if is_a(left, np.ndarray):
        same = (left.dtype, left.shape) == (right.dtype, right.shape)
        return same and left.tobytes() == right.tobytes()
    return bool(left == right) or (left != left and right != right)
