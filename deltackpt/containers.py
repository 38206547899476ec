"""Containers of a state, whatever their kind: their items, and how they take others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .nodes import kind_of
from .paths import segments
from .targets import is_a


def items_of(value: Any) -> dict[Any, Any] | None:
    """The items of a container by key or index; None for what is no container."""
    if is_a(value, Mapping):
        return dict(value)
    if is_a(value, list, tuple, deque) and not is_a(value, torch.Size):
        indexed: Any = enumerate(value)
        return dict(indexed)
    return None


def places_of(value: Any, path: str) -> dict[Any, str]:
    """The path of each item of a container at `path`."""
    items = items_of(value)
    if not items:
        return {}
    fields = getattr(kind_of(value), "_fields", None)
    keys: Iterable[Any] = fields if is_a(value, tuple) and fields else items
    return {key: f"{path}/{name}" for key, name in zip(items, segments(keys), strict=True)}


def refilled(container: Any, items: Mapping[Any, Any]) -> Any:
    """`container` with `items` (by key or index) in place of its own; a new one if it is a tuple.

    What it holds besides its items (a deque's length, a factory) stays.
    """
    if is_a(container, dict):
        refill(container, items)
        return container
    values = list(items.values())
    if is_a(container, list):
        container[:] = values
        return container
    if is_a(container, deque):
        refill_deque(container, values)
        return container
    kind = kind_of(container)
    return kind(*values) if hasattr(container, "_fields") else kind(values)


def refill(target: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    target.clear()
    for key, value in items.items():  # not update(): a Counter would add
        target[key] = value


def refill_deque(target: deque[Any], items: Iterable[Any]) -> None:
    target.clear()
    target.extend(items)
