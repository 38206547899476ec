"""Operations of actors that others can notice, and which of them commute."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Op(NamedTuple):
    """A visible operation.

    `looks` and `changes` are paths; ``path/*`` stands for the names in a directory. `names` are
    directories in which it makes or removes a name: two such operations commute, as they concern
    different names or also change the same path.
    """

    actor: int
    looks: tuple[str, ...]
    changes: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return self.looks + self.changes + self.names


@cache
def op_of(actor: int, what: str, path: str, *, makes: bool) -> Op:
    """The operation `what` of the actor; `makes`: it makes or removes the name `path`."""
    if what == "list":
        return Op(actor, (f"{path}/*",), (), ())
    if what in ("open", "exists"):
        return Op(actor, (path,), (), ())
    return Op(actor, (), (path,), (f"{path.rpartition('/')[0]}/*",) if makes else ())


_NOBODY: frozenset[int] = frozenset()


class Touched:
    """By whom paths are looked at and changed in a number of operations."""

    def __init__(self) -> None:
        self._looks: dict[str, set[int]] = {}
        self._changes: dict[str, set[int]] = {}
        self._names: dict[str, set[int]] = {}

    def add(self, op: Op) -> None:
        for path in op.looks:
            self._looks.setdefault(path, set()).add(op.actor)
        for path in op.changes:
            self._changes.setdefault(path, set()).add(op.actor)
        for path in op.names:
            self._names.setdefault(path, set()).add(op.actor)

    def rivals(self, op: Op) -> frozenset[int]:
        """The other actors that do anything that does not commute with `op`."""
        found: set[int] = set()
        for path in op.looks + op.changes:
            found |= self._changes.get(path, _NOBODY)
        for path in op.changes + op.names:
            found |= self._looks.get(path, _NOBODY)
        for path in op.looks:
            found |= self._names.get(path, _NOBODY)
        return frozenset(found - {op.actor})
