"""Modules of a model, read from paths: ``model/layers.0.attn.weight`` lies in ``model/layers.0``.

A path has parts separated by ``/`` (keys of the state) and, within a key, by ``.`` (attributes of
a module). Folding a path to depth 2 keeps its first two parts. Quoted keys are one part.
"""

from __future__ import annotations

import re

_PART = re.compile(r'"(?:[^"]*)"|[^/.]+')
_NUMBERS = re.compile(r"(\d+)")


def parts(path: str) -> list[tuple[int, int]]:
    """(start, end) of every part of `path`."""
    return [match.span() for match in _PART.finditer(path)]


def depth_of(path: str) -> int:
    """How many parts the path has."""
    return len(parts(path))


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


def depth_for(paths: list[str], limit: int) -> int:
    """The largest depth at which `paths` fold to at most `limit` modules (at least 1)."""
    deepest = max((depth_of(path) for path in paths), default=1)
    best = 1
    for depth in range(1, deepest):
        if len({fold(path, depth) for path in paths}) > limit:
            break
        best = depth
    return best
