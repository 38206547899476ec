"""Modules of a model, read from paths: ``model/layers.0.attn.weight`` lies in ``model/layers.0``.

A path has parts separated by ``/`` (keys of the state) and, within a key, by ``.`` (attributes of
a module). Folding a path to depth 2 keeps its first two parts. Quoted keys are one part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

_PART = re.compile(r'"(?:[^"]*)"|[^/.]+')
_NUMBERS = re.compile(r"(\d+)")


def parts(path: str) -> list[tuple[int, int]]:
    """(start, end) of every part of `path`."""
    return [match.span() for match in _PART.finditer(path)]


def fold(path: str, depth: int) -> str:
    """The first `depth` parts of `path`, or its module when that is shorter: never the leaf itself
    unless it has one part only."""
    spans = parts(path)
    kept = min(depth, max(1, len(spans) - 1))
    return path[: spans[kept - 1][1]] if spans else path


def natural(path: str) -> tuple[str | int, ...]:
    """Sort key that puts ``layers.2`` before ``layers.10``."""
    pieces = _NUMBERS.split(path)
    return tuple(int(piece) if i % 2 else piece for i, piece in enumerate(pieces))


@dataclass(frozen=True, slots=True)
class Folding:
    """Folds paths to modules: to `depth` parts everywhere, or (None) as deep as `opened` tells, a
    set of modules of which the parts are modules of their own."""

    depth: int | None = None
    opened: frozenset[str] = frozenset()

    def __call__(self, path: str) -> str:
        """The module of `path`."""
        if self.depth is not None:
            return fold(path, self.depth)
        kept = 1
        module = fold(path, kept)
        while module in self.opened and (deeper := fold(path, kept + 1)) != module:
            kept, module = kept + 1, deeper
        return module


Depth = int | Literal["auto"]
"""How modules are divided: by a number of parts, or so that a readable number of them results."""

ROWS = 60  # modules that are read at a glance
_FEW = 8  # when there are fewer, one level more is shown, up to
_MOST = 240


def folding(depth: Depth, paths: Iterable[str]) -> Folding:
    """`depth` as a Folding; with "auto" the one that suits `paths`."""
    return suited(list(paths)) if depth == "auto" else Folding(depth)


def suited(paths: Sequence[str], limit: int = ROWS) -> Folding:
    """The folding that shows `paths` as at most `limit` modules, the upper levels opened first.

    A module with too many parts stays closed, unless very few modules would be left then: a model
    of a hundred equal layers is shown layer by layer.
    """
    held: dict[str, list[str]] = {}
    for path in paths:
        held.setdefault(fold(path, 1), []).append(path)
    opened: set[str] = set()
    level = 1
    waiting = dict(held)
    closed: dict[str, dict[str, list[str]]] = {}
    while waiting:
        following: dict[str, list[str]] = {}
        split = {module: _split(members, level + 1) for module, members in waiting.items()}
        for module, parts_of in sorted(split.items(), key=lambda item: (len(item[1]), item[0])):
            if set(parts_of) == {module}:
                continue  # leaves only
            if len(held) - 1 + len(parts_of) > limit:
                closed[module] = parts_of
                continue
            del held[module]
            held.update(parts_of)
            opened.add(module)
            following.update({name: one for name, one in parts_of.items() if name != module})
        waiting, level = following, level + 1
    if len(held) < _FEW and closed:
        module = min(closed, key=lambda one: (len(closed[one]), one))
        if len(closed[module]) <= _MOST:
            opened.add(module)
    return Folding(opened=frozenset(opened))


def _split(paths: list[str], depth: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(fold(path, depth), []).append(path)
    return found
