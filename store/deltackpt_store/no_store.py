"""What to say of a path at which no store is: why, and which stores are near it."""

from __future__ import annotations

import os

from deltackpt_store.errors import NotFoundError
from deltackpt_store.fileio import FileIO
from deltackpt_store.format_file import FORMAT_NAME, REMAKE
from deltackpt_store.records import some_of

_LOOKED_AT = 200
"""Names in a folder that are tried: there may be very many, and this is only a hint."""
_LEVELS = 3
"""Folders above a path that may be the store it lies in."""
_ADVICE = "name the directory that a Checkpointer was given"


def not_a_store(io: FileIO, path: str) -> NotFoundError:
    """The error (kind ``not-a-store``) for the absolute `path`, which has no FORMAT."""
    why, hint = _explain(io, path)
    return NotFoundError(
        f"{path} is not a deltackpt store: {why}", kind="not-a-store", hint=hint, path=path
    )


def looks_like_a_store(names: set[str]) -> bool:
    """Whether a directory that holds `names` is a store, perhaps one that lost its FORMAT."""
    return {"packs", "manifests", "runs"} <= names


def _explain(io: FileIO, path: str) -> tuple[str, str]:
    around = _store_around(io, path)
    try:
        names = io.list(path)
    except FileNotFoundError:
        return "it does not exist", _named(_stores_in(io, os.path.dirname(path)))
    except NotADirectoryError:
        why, names = "it is a file, and a store is a directory", []
    except OSError:
        return "it has no file FORMAT", _ADVICE
    else:
        why = "it has no file FORMAT"
    if around is not None:
        return why, f"it lies in the store {around}: name that"
    if looks_like_a_store(set(names)):
        return why, f"it looks like one whose FORMAT was lost: {REMAKE}"
    return why, _named(_stores_in(io, path))


def _named(stores: list[str]) -> str:
    return f"{_ADVICE}; near it are {some_of(stores)}" if stores else _ADVICE


def _store_around(io: FileIO, path: str) -> str | None:
    for _ in range(_LEVELS):
        path = os.path.dirname(path)
        if _is_store(io, path):
            return path
    return None


def _stores_in(io: FileIO, folder: str) -> list[str]:
    try:
        places = [f"{folder}/{name}" for name in sorted(io.list(folder))[:_LOOKED_AT]]
    except OSError:
        return []
    return [place for place in places if _is_store(io, place)]


def _is_store(io: FileIO, path: str) -> bool:
    try:
        return io.exists(f"{path}/{FORMAT_NAME}")
    except OSError:
        return False
