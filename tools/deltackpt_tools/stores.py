"""Opening a store for a command, and the few words in which steps are spoken of."""

from __future__ import annotations

import logging

from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

SHORT_DIGEST = 12  # hex digits that stand for a digest in text


def open_store(path: str) -> Store:
    """The store at `path`, which must be one (exit code 10 otherwise). Never writes.

    Damage that the store logs while reading is reported by the commands themselves.
    """
    quiet_logs()
    return Store.open(path)


def quiet_logs() -> None:
    """What the library logs is part of what commands report."""
    logging.getLogger("deltackpt").addHandler(logging.NullHandler())


def short(digest: bytes) -> str:
    return digest.hex()[:SHORT_DIGEST]


def label(commit: Commit) -> str:
    """``run@step``, the name under which a command finds the commit again."""
    return f"{commit.run}@{commit.step}"


def stat(commit: Commit, name: str) -> int | None:
    """A figure that the writer recorded with the commit, None when it did not."""
    value = commit.stats.get(name)
    return None if value is None else int(value)
