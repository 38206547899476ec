"""Which parameter a piece of optimizer state belongs to, as the training recorded it.

An optimizer numbers its parameters, so its state lies at ``optimizer/state/12/exp_avg``. Saves
record the parameters' names in the entry ``#params`` (docs/format.md); nothing is guessed where
they did not.
"""

from __future__ import annotations

from typing import Any, cast

from deltackpt_store.errors import CorruptionError
from deltackpt_store.manifest import Snapshot

from deltackpt_tools.structure import entries, parse_structure
from deltackpt_tools.value_text import parse

PARAMS = "#params"
_STATE = "/state/"


class ParameterNames:
    """Names for the paths of one step."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._names = {f"{path}{_STATE}": names for path, names in _recorded(snapshot).items()}

    def of(self, path: str) -> str | None:
        """The parameter that the entry at `path` is optimizer state of; None for all others."""
        for prefix, names in self._names.items():
            if path.startswith(prefix):
                number = path[len(prefix) :].partition("/")[0]
                if number.isdecimal() and len(number) < 10 and int(number) < len(names):
                    return names[int(number)]
        return None


def labelled(path: str, name: str | None) -> str:
    """`path` for people: with the parameter's name behind it, where there is one."""
    return path if name is None else f"{path} ({name})"


def _recorded(snapshot: Snapshot) -> dict[str, list[str | None]]:
    """Path of each optimizer -> name of each parameter index; empty when nothing sound is there."""
    found: dict[str, list[str | None]] = {}
    try:
        root = parse_structure(snapshot.layout.structure)
        node = next((child for key, child in entries(root) if key == PARAMS), None)
        for key, slot in [] if node is None else entries(node):
            document = snapshot.objects.get(slot)
            tree = None if document is None else parse(document)
            if isinstance(key, str) and isinstance(tree, list):
                found[key] = _strings(cast("list[Any]", tree))
    except (CorruptionError, ValueError, TypeError, IndexError, KeyError):
        return {}
    return found


def _strings(tree: list[Any]) -> list[str | None]:
    """A value document's list of strings and nil; ValueError for anything else."""
    if len(tree) != 2 or tree[0] != "l":
        raise ValueError("not a list")
    if not all(name is None or isinstance(name, str) for name in tree[1]):
        raise ValueError("not names")
    return list(tree[1])
