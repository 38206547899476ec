"""Copies of a store that were written to by themselves, and so have parted from it.

Such a copy holds commits under numbers that the store has given to others, or may yet: they are
of another history, and none of them may come here. A run of a copy has parted at the first number
of which the copy has another commit than the store, or one that continues another commit. Beyond
that number a commit is of this store only where what it continues is, and lies beyond it too: one
that continues what both have from before they parted was saved by whoever went on with the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deltackpt_store.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

Place = tuple[str, int]
"""Run and number of a commit."""


def shared_commits(store: Store, copy: Store) -> Mapping[Place, Commit]:
    """The commits of `copy`, a store of the same uuid, that are of the history of `store`.

    Those that cannot be read are left out; a copy that has lost its folder of runs has none. Reads
    every commit of the copy, and of the store those of the same places, once. StorageError.
    """
    try:
        runs = copy.runs()
    except CorruptionError:
        runs = []
    commits = [commit for run in runs for commit in copy.commits(run)]
    foreign = _Comparison(store, commits).foreign
    places = (((commit.run, commit.number), commit) for commit in commits)
    return {place: commit for place, commit in places if place not in foreign}


class _Comparison:
    def __init__(self, store: Store, commits: Sequence[Commit]) -> None:
        self.foreign: set[Place] = set()
        self._store = store
        self._digests: dict[Place, bytes | None] = {}
        self._parted: dict[str, int] = {}  # run -> the first number that is not of this store
        known = -1
        while known != len(self.foreign):  # a fork may come before the run that it came from
            known = len(self.foreign)
            for commit in commits:
                if self._is_foreign(commit):
                    self.foreign.add((commit.run, commit.number))
                    first = self._parted.get(commit.run, commit.number)
                    self._parted[commit.run] = min(first, commit.number)

    def _is_foreign(self, commit: Commit) -> bool:
        here = self._digest((commit.run, commit.number))
        if here is not None:
            return here != commit.digest
        parted = self._parted.get(commit.run, commit.number)
        if commit.parent is None:
            return parted < commit.number
        run, number, digest = commit.parent
        if (run, number) in self.foreign or self._digest((run, number)) not in (None, digest):
            return True
        return parted < commit.number and (run != commit.run or number < parted)

    def _digest(self, place: Place) -> bytes | None:
        """The digest of the store's commit of that place; None where it has none that is whole."""
        if place not in self._digests:
            try:
                self._digests[place] = self._store.read_commit(*place).digest
            except (CorruptionError, NotFoundError, UnsupportedFormatError):
                self._digests[place] = None
        return self._digests[place]
