"""Taking back what a foreign ``load_state_dict`` did before it failed, and proving it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from .containers import items_of
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
    else:
        for item in (items_of(value) or {}).values():
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
    items, others = items_of(left), items_of(right)
    if items is not None and others is not None:
        same = list(items) == list(others) and _held(left) == _held(right)
        return same and all(alike(items[key], others[key]) for key in items)
    if is_a(left, np.ndarray):
        same = (left.dtype, left.shape) == (right.dtype, right.shape)
        return same and left.tobytes() == right.tobytes()
    if is_a(left, float):
        return left.hex() == right.hex()
    return bool(left == right) or (left != left and right != right)


def _held(container: Any) -> tuple[Any, Any]:
    """What a deque or defaultdict holds besides its items."""
    return getattr(container, "maxlen", None), getattr(container, "default_factory", None)
