"""What can be told of a state before its first save, without asking objects for a state that may be
dear to make."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .capture import refuse_reserved
from .nodes import OBJECT, Kid, Origin, kind_of, state_of
from .options import entries_of
from .tree import Walker
from .values import encode

_log = logging.getLogger("deltackpt")


def check_state(state: Mapping[Any, Any]) -> None:
    """`InvalidInputError` naming the path of the first value that no save could take.

    Logs a warning for modules of which nothing would be saved. Looks into plain containers. Tensors
    and what `state_dict` of an object returns are looked at by the saves alone.
    """
    entries = entries_of(state, "state")
    refuse_reserved(entries)
    look = _Look()
    look.walk(entries, "", 0)
    for value, path in look.values:
        encode(value, path)
    for path, module in look.modules:
        if _saves_nothing(module):
            _log.warning(
                "the state_dict of the %s at %r is empty: nothing of it will be saved; if it keeps"
                " something, make that persistent (a metric of torchmetrics: persistent(True))",
                kind_of(module).__qualname__,
                path,
            )


def _saves_nothing(module: nn.Module) -> bool:
    """Whether it has neither parameters nor buffers nor a state, as a metric; torch's have none by
    their nature."""
    if kind_of(module).__module__.startswith("torch."):
        return False
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return False
    try:
        return not state_of(module)
    except Exception:  # a save will report it
        return False


class _Look(Walker):
    """A walk that stops at tensors and at objects with a state of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[tuple[str, nn.Module]] = []

    @property
    def values(self) -> list[tuple[Any, str]]:
        """The plain values and their paths."""
        paths = (self.paths[slot] for slot in self.object_slots)
        return list(zip(self.leaves.objects, paths, strict=True))

    def _tensor(self, tensor: Tensor, path: str, origin: Origin) -> tuple[Any, Kid]:
        self.paths.append(path)
        return 0, OBJECT

    def _stateful(
        self, value: Any, path: str, depth: int, origin: Origin | None
    ) -> tuple[Any, Kid]:
        if isinstance(value, nn.Module):
            self.modules.append((path, value))
        return 0, OBJECT
