"""Who holds which bytes: chunks counted by the steps and runs that reach them.

Bytes are those stored (encoded payloads). A chunk is *only here* when no other step (or run)
reaches it: that much would become free if the step (or run) alone went away.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from deltackpt_store.errors import DeltackptError, StorageError
from deltackpt_store.fileio import is_link
from deltackpt_store.history import Commits
from deltackpt_store.manifest import Commit
from deltackpt_store.pins import Pins
from deltackpt_store.store import DIRECTORIES, Store
from numpy.typing import NDArray

from deltackpt_tools.chunk_lives import Lives
from deltackpt_tools.chunk_states import ChunkStates, Keys
from deltackpt_tools.stored_chunks import StoredChunks

_T = TypeVar("_T")


@dataclass(slots=True)
class StepUsage:
    commit: Commit
    total: int = 0
    unique: int = 0
    added: int = 0
    """Bytes that no commit before this one (in the order of the report) reaches."""
    missing: int = 0
    """Chunks that no intact pack holds."""


@dataclass(slots=True)
class RunUsage:
    run: str
    steps: list[StepUsage] = field(default_factory=list[StepUsage])
    total: int = 0
    unique: int = 0


@dataclass(slots=True)
class Files:
    """Sizes of the store's files by folder, and their number."""

    bytes: dict[str, int] = field(default_factory=dict[str, int])
    count: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(slots=True)
class Usage:
    files: Files
    runs: list[RunUsage]
    referenced: int
    unreferenced: int
    duplicates: int
    """Bytes of further copies of chunks that another pack holds too."""
    overhead: int
    """Bytes of packs that are not payloads: record heads, padding, tables."""
    unreadable: list[tuple[str, str]]
    """What could not be read, and so is not counted: (what, why)."""


def measure(store: Store, progress: Callable[[int, int], None] | None = None) -> Usage:
    """Read all commits, manifests and pack tables (no payload) and add up.

    `progress(done, total)` counts commits. What cannot be read is listed, never guessed at.
    """
    unreadable: list[tuple[str, str]] = []
    commits = all_commits(store, unreadable)
    chunks = StoredChunks(store)
    unreadable += chunks.unreadable
    counting = _Counting(chunks, ChunkStates(store))
    done, total = 0, sum(len(of_run) for _, of_run in commits)
    for run, of_run in commits:
        counting.begin(run)
        for commit in of_run:
            try:
                counting.add(commit)
            except DeltackptError as error:
                unreadable.append((f"{commit.run}@{commit.step}", error.message))
                continue
            done += 1
            if progress is not None:
                progress(done, total)
    runs, referenced = counting.finish()
    files, left_out = measure_files(store)
    told = {what for what, _ in unreadable}
    unreadable += [one for one in left_out if one[0] not in told]
    distinct = int(chunks.stored.sum())
    return Usage(
        files=files,
        runs=runs,
        referenced=referenced,
        unreferenced=distinct - referenced,
        duplicates=chunks.all_stored - distinct,
        overhead=files.bytes.get("packs", 0) - chunks.all_stored,
        unreadable=unreadable,
    )


def all_commits(store: Store, unreadable: list[tuple[str, str]]) -> list[tuple[str, list[Commit]]]:
    """All commits by run, pinned ones that their run no longer lists included.

    What cannot be read is added to `unreadable`: its path in the store, and why.
    """

    def attempt(what: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except StorageError as error:
            unreadable.append((what, error.message))
            return otherwise

    found: dict[str, dict[int, Commit]] = {}
    for run in attempt("runs", store.runs, []):
        commits = attempt(f"runs/{run}", partial(store.commits, run), Commits())
        found[run] = {commit.number: commit for commit in commits}
        unreadable += [(bad.path, bad.error.message) for bad in commits.damaged]
    pins = attempt("pins", store.pins, Pins())
    unreadable += [(bad.path, bad.error.message) for bad in pins.damaged]
    for name, pin in pins.items():
        if pin.number not in found.setdefault(pin.run, {}):
            try:
                found[pin.run][pin.number] = store.pinned(name)
            except DeltackptError as error:
                unreadable.append((f"pins/{name}", error.message))
    in_order = [(run, [of[n] for n in sorted(of)]) for run, of in sorted(found.items())]
    return _forks_last(in_order)


def _forks_last(runs: list[tuple[str, list[Commit]]]) -> list[tuple[str, list[Commit]]]:
    """Runs by name, but each after the one it was forked from, which is thus what added bytes."""
    by_name = dict(runs)
    ordered: dict[str, list[Commit]] = {}

    def place(run: str, above: frozenset[str]) -> None:
        if run in ordered or run in above or run not in by_name:
            return
        for commit in by_name[run]:
            if commit.parent is not None and commit.parent[0] != run:
                place(commit.parent[0], above | {run})
        ordered[run] = by_name[run]

    for run in by_name:
        place(run, frozenset())
    return list(ordered.items())


class _Counting:
    """Counts steps and runs by chunk, in time that grows with what changes from step to step.

    Chunks that no pack holds have places behind those of the stored ones, and no bytes.
    """

    def __init__(self, chunks: StoredChunks, states: ChunkStates) -> None:
        self._chunks = chunks
        self._states = states
        self._lost = np.empty(0, np.uint64)  # keys of the chunks that no pack holds, in order
        self._lost_at = np.empty(0, np.intp)  # and their places
        self._keys = np.empty(0, np.uint64)
        self._runs: list[RunUsage] = []
        self._steps: list[StepUsage] = []
        size = len(chunks.keys)
        self._lives = Lives(size, *chunks.references)
        self._stored = chunks.stored
        self._reached = np.zeros(size, np.int64)  # by how many steps, up to when it went last
        self._since = np.zeros(size, np.int64)  # number of the step that needed it first, or again
        self._run_reached = np.zeros(size, np.int64)  # by how many runs
        self._run_owner = np.full(size, -1, np.int64)  # the last of them
        self._total = self._missing = 0

    def begin(self, run: str) -> None:
        """The steps that come next are of this run."""
        self._runs.append(RunUsage(run))
        self._move(np.empty(0, np.uint64))  # what the last run needed is not needed for its own

    def add(self, commit: Commit) -> None:
        """Count the next step; nothing is counted when it cannot be read (DeltackptError)."""
        born = self._move(self._states.keys(commit))
        usage, number = self._runs[-1], len(self._runs) - 1
        step = StepUsage(commit, total=self._total, missing=self._missing)
        new = born[self._run_owner[born] < 0]
        step.added = int(self._stored[new].sum())
        fresh = born[self._run_owner[born] != number]
        usage.total += int(self._stored[fresh].sum())
        self._run_reached[fresh] += 1
        self._run_owner[fresh] = number
        self._steps.append(step)
        usage.steps.append(step)

    def finish(self) -> tuple[list[RunUsage], int]:
        """All runs, and the bytes that any step reaches."""
        self._move(np.empty(0, np.uint64))
        alone = self._reached == 1
        sums = _sums(self._since, self._stored, alone, len(self._steps))
        for step, unique in zip(self._steps, sums, strict=True):
            step.unique = unique
        alone = self._run_reached == 1
        sums = _sums(self._run_owner, self._stored, alone, len(self._runs))
        for usage, unique in zip(self._runs, sums, strict=True):
            usage.unique = unique
        return self._runs, int(self._stored[self._reached > 0].sum())

    def _move(self, keys: Keys) -> NDArray[np.intp]:
        """Need these from the next step on; return the places that were not needed before."""
        less, more = self._keys, keys
        if len(less) == len(more):
            differ = np.flatnonzero(less != more)
            less, more = less[differ], more[differ]
        self._keys = keys
        change = self._lives.move(self._find(less), self._find(more))
        now = len(self._steps)
        self._reached[change.gone] += now - self._since[change.gone]
        self._since[change.born] = now
        for places, sign in ((change.born, 1), (change.gone, -1)):
            self._total += sign * int(self._stored[places].sum())
            self._missing += sign * int((places >= len(self._chunks.keys)).sum())
        return change.born

    def _find(self, keys: Keys) -> NDArray[np.intp]:
        places, known = self._chunks.find(keys)
        if not known.all():
            places[~known] = self._find_lost(keys[~known])
        return places

    def _find_lost(self, keys: Keys) -> NDArray[np.intp]:
        new = np.setdiff1d(keys, self._lost)
        if len(new):
            first = len(self._stored)
            self._lost = np.concatenate([self._lost, new])
            self._lost_at = np.concatenate([self._lost_at, np.arange(first, first + len(new))])
            order = np.argsort(self._lost)
            self._lost, self._lost_at = self._lost[order], self._lost_at[order]
            none = np.zeros(len(new), np.int64)
            self._lives.grow(len(new))
            self._stored = np.concatenate([self._stored, none])
            self._reached = np.concatenate([self._reached, none])
            self._since = np.concatenate([self._since, none])
            self._run_reached = np.concatenate([self._run_reached, none])
            self._run_owner = np.concatenate([self._run_owner, none - 1])
        return self._lost_at[np.searchsorted(self._lost, keys)]


def _sums(
    owner: NDArray[np.int64], stored: NDArray[np.int64], chosen: NDArray[np.bool_], count: int
) -> list[int]:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, owner[chosen], stored[chosen])
    return sums.tolist()


def measure_files(store: Store) -> tuple[Files, list[tuple[str, str]]]:
    """Length of every file of the store, by the folder at the top it lies in ("" for the top); and
    which of them, or of their folders, cannot be read: (path in the store, why)."""
    files = Files()
    unreadable: list[tuple[str, str]] = []
    for relative in _walk(store, "", unreadable):
        try:
            handle = store.io.open(f"{store.path}/{relative}")
        except OSError as error:  # collected in the meantime, or not a file
            if error.errno not in (errno.ENOENT, errno.ENXIO, errno.EISDIR, errno.ELOOP):
                unreadable.append((relative, error.strerror or str(error)))
            continue
        try:
            length = store.io.size(handle)
        finally:
            store.io.close(handle)
        folder = relative.partition("/")[0] if "/" in relative else ""
        files.bytes[folder] = files.bytes.get(folder, 0) + length
        files.count[folder] = files.count.get(folder, 0) + 1
    return files, unreadable


def _walk(store: Store, relative: str, unreadable: list[tuple[str, str]]) -> Iterator[str]:
    """Every file below `relative`, as a path relative to the store.

    Links are not followed, except one of the store's own folders at the top: what they lead to
    is not part of the store.
    """
    if relative and relative not in DIRECTORIES and is_link(f"{store.path}/{relative}"):
        return
    try:
        names = store.io.list(f"{store.path}/{relative}")
    except NotADirectoryError:
        yield relative
        return
    except FileNotFoundError:
        return
    except OSError as error:
        unreadable.append((relative, error.strerror or str(error)))
        return
    for name in sorted(names):
        yield from _walk(store, f"{relative}/{name}" if relative else name, unreadable)
