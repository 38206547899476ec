"""Which parameter an optimizer's index means: names instead of positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def names_of(state: Mapping[Any, Any]) -> dict[str, list[str | None]]:
    """The "#params" entry of live objects: optimizer path -> name of each parameter index.

    A name is ``<path of the module>/<FQN without wrappers>``, found by identity; None for a
    parameter that no captured module holds.
    """
    raise NotImplementedError


def canonical_names(module: nn.Module) -> dict[str, str]:
    """state_dict key -> the key without wrappers (DDP, torch.compile, ...)."""
    raise NotImplementedError


def align(
    state_dict: Mapping[str, Any],
    recorded: Sequence[str | None],
    present: Sequence[str | None],
    *,
    path: str = "optimizer",
) -> dict[str, Any]:
    """An optimizer state_dict whose indices fit the present optimizer: shallow copy, matched by name.

    Raises `MismatchError` naming parameters that are missing, unexpected or in another group.
    """
    raise NotImplementedError
