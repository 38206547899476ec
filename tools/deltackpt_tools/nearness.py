"""Choosing leaves by globs of their paths, and saying what is near when nothing matches."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from deltackpt_store.errors import NotFoundError

_SHOWN = 5
_COMPARED = 5000  # paths, at most, that are compared letter by letter


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether `path` is wanted: no globs want everything; ``*`` crosses ``/``.

    Every path is a glob of itself, also one with ``[`` in it.
    """
    return not globs or any(_matches(path, pattern) for pattern in globs)


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def require_matches(globs: Sequence[str], paths: Iterable[str], where: str) -> None:
    """NotFoundError (kind ``nothing-selected``) for the first glob that none of `paths` matches.

    What was mistyped must not look like what does not differ. `where` names the steps looked at.
    """
    known = list(paths) if globs else []
    for pattern in globs:
        if not any(_matches(path, pattern) for path in known):
            raise NotFoundError(
                f"nothing in {where} matches {pattern!r}",
                kind="nothing-selected",
                hint=near(pattern, known),
                pattern=pattern,
            )


def near(pattern: str, paths: Sequence[str], values: Collection[str] = ()) -> str:
    """What to write instead of a path or glob that matched none of `paths`; `values` are those of
    plain values, where only tensors will do."""
    if pattern in values:
        return f"it is a plain value: 'show --only {pattern}' prints it, 'diff' compares it"
    if os.path.lexists(pattern):
        return f"a file here has that name: quote the pattern ('{pattern}') against the shell"
    below = pattern.rstrip("/") + "/"
    if any(path.startswith(below) for path in paths):
        return f"to take all that lies below it, write '{below}*'"
    found = _alike(pattern, paths)
    if found:
        return f"near it are {', '.join(found)}"
    tops = sorted({path.partition("/")[0] for path in paths})
    return f"its top-level keys are {', '.join(tops[:20]) or '(none)'}"


def _alike(pattern: str, paths: Sequence[str]) -> list[str]:
    """Paths that hold the longest plain piece of the pattern, or look like the whole of it."""
    import difflib

    pieces = [piece for piece in pattern.replace("?", "*").split("*") if len(piece) > 2]
    for piece in sorted(pieces, key=len, reverse=True):
        holding = [path for path in paths if piece.lower().strip("/.") in path.lower()]
        if holding:
            return holding[:_SHOWN]
    plain = pattern.replace("*", "").replace("?", "")
    return difflib.get_close_matches(plain, paths[:_COMPARED], _SHOWN, 0.5)
