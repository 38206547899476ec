"""What the functions of the Python API take for a store and a step, and what they find there."""

from __future__ import annotations

import os

from deltackpt_store.errors import NotFoundError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

from deltackpt_tools.stores import open_store

StoreLike = Store | str | os.PathLike[str]
StepLike = Commit | str


def as_store(store: StoreLike) -> Store:
    """`store` itself, or the store at that path (NotFoundError, kind "not-a-store")."""
    return store if isinstance(store, Store) else open_store(store)


def as_commit(store: Store, step: StepLike) -> Commit:
    """`step` itself, or the commit called ``RUN@STEP``, ``@STEP``, RUN, PIN or ``latest``."""
    return step if isinstance(step, Commit) else store.resolve_name(step)


def parent_of(store: Store, commit: Commit) -> Commit:
    """The commit that `commit` continues; of removed ones the nearest before that is left.

    NotFoundError when it continues none.
    """
    if commit.parent is not None:
        run, number, _ = commit.parent
        try:
            return store.read_commit(run, number)
        except NotFoundError:
            before = [
                n
                for n in store.numbers(commit.run)
                if any(first <= n <= last for first, last in commit.ancestors)
            ]
            if before:
                return store.read_commit(commit.run, before[-1])
    raise NotFoundError(
        f"{commit.run}@{commit.step} continues no step that is left in the store",
        kind="no-parent",
        hint="name two steps",
        run=commit.run,
        step=commit.step,
    )


def ancestry(store: Store, commit: Commit) -> list[Commit]:
    """`commit` and all it continues, across forks, oldest first. Stops at what is gone."""
    line: list[Commit] = []
    seen: set[tuple[str, int]] = set()
    current: Commit | None = commit
    while current is not None and (current.run, current.number) not in seen:
        seen.add((current.run, current.number))
        line.append(current)
        try:
            current = parent_of(store, current)
        except NotFoundError:
            current = None
    line.reverse()
    return line
