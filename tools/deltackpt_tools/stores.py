"""Opening a store for a command, and the few words in which steps are spoken of."""

from __future__ import annotations

import logging
import os

from deltackpt_store.errors import CorruptionError, DeltackptError, NotFoundError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

SHORT_DIGEST = 12  # hex digits that stand for a digest in text


def open_store(path: str | os.PathLike[str]) -> Store:
    """The store at `path`, which must be one (exit code 10 otherwise). Never writes.

    Damage that the store logs while reading is reported by the commands themselves.
    """
    quiet_logs()
    return Store.open(path)


def quiet_logs() -> None:
    """What the library logs is part of what commands report."""
    logging.getLogger("deltackpt").addHandler(logging.NullHandler())


def gone_meanwhile(error: Exception) -> NotFoundError | None:
    """What `error` means if what it misses was taken off the list while a command read it, as
    retention and collection may do at any time: that is no damage."""
    if getattr(error, "kind", None) != "missing-manifest" or not isinstance(error, CorruptionError):
        return None
    digest = bytes.fromhex(str(error.context["path"]).rpartition("/")[2])
    store = Store.open(str(error.context["store"]))
    try:
        listed = [store.read_commit(run, n) for run in store.runs() for n in store.numbers(run)]
        listed += [store.pinned(name) for name in store.pins()]
    except DeltackptError:
        return None
    if any(digest in (commit.manifest, commit.base) for commit in listed):
        return None
    return NotFoundError(
        "a step was retired and collected while it was read",
        kind="retired", hint="run the command again", path=store.path,
    )  # fmt: skip


def short(digest: bytes) -> str:
    return digest.hex()[:SHORT_DIGEST]


def label(commit: Commit) -> str:
    """``run@step``, the name under which a command finds the commit again."""
    return f"{commit.run}@{commit.step}"


def stat(commit: Commit, name: str) -> int | None:
    """A figure that the writer recorded with the commit, None when it did not."""
    value = commit.stats.get(name)
    return None if value is None else int(value)
