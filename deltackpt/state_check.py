"""What can be told of a state before its first save, without asking any object for its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .capture import refuse_reserved
from .nodes import OBJECT, Kid, Origin
from .tree import Walker
from .values import encode


def check_state(state: Mapping[Any, Any]) -> None:
    """`InvalidInputError` naming the path of the first value that no save could take.

    Looks into plain containers. Tensors and what `state_dict` of an object returns are looked at by
    the saves alone.
    """
    refuse_reserved(state)
    look = _Look()
    look.walk(dict(state), "", 0)
    for value, path in look.values:
        encode(value, path)


class _Look(Walker):
    """A walk that stops at tensors and at objects with a state of their own."""

    @property
    def values(self) -> list[tuple[Any, str]]:
        """The plain values and their paths."""
        paths = (self.paths[slot] for slot in self.object_slots)
        return list(zip(self.leaves.objects, paths, strict=True))

    def _tensor(self, tensor: Tensor, path: str, origin: Origin) -> tuple[Any, Kid]:
        return 0, OBJECT

    def _stateful(
        self, value: Any, path: str, depth: int, origin: Origin | None
    ) -> tuple[Any, Kid]:
        return 0, OBJECT
