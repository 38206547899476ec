"""The state tree: containers as structure nodes, tensors and plain values as numbered leaves."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any


def build(
    structure: bytes, leaf: Callable[[int], Any], *, keep: Container[int] | None = None
) -> Any:
    """The nested state that `structure` describes, each leaf being ``leaf(slot)``.

    `leaf` gets a slot (index into `Layout.paths`) and returns a tensor (for slots of
    `Layout.tensors`, e.g. ``extents.rebuild``) or a decoded value. It is called once per slot.
    With `keep`, slots outside of it are left out: dict entries without any kept leaf vanish, and
    list, tuple and namedtuple items that are not kept become None.
    Sparse tensors and large NumPy arrays are put together here from the tensors of their parts.
    Raises `CorruptionError` (kind "structure") for a malformed document.
    """
    raise NotImplementedError
