"""Who holds which bytes: chunks counted by the steps and runs that reach them.

Bytes are those stored (encoded payloads). A chunk is *only here* when no other step (or run)
reaches it: that much would become free if the step (or run) alone went away. For speed chunks are
told apart by the first eight bytes of their ids, which is far more than counting needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from deltackpt_store.errors import DeltackptError
from deltackpt_store.manifest import Commit, Snapshot
from deltackpt_store.store import Store
from numpy.typing import NDArray

Keys = NDArray[np.uint64]


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


class Catalogue:
    """Every stored chunk once: its key, its stored bytes, and what it is coded against."""

    def __init__(self, store: Store) -> None:
        index = store.index()
        tables = [e for e in map(index.entries, sorted(index.packs())) if e is not None]
        keys = joined([chunk_keys(entries.ids) for entries in tables], np.uint64)
        stored = joined([entries.table["stored"].astype(np.int64) for entries in tables], np.int64)
        self.all_stored = int(stored.sum())
        self.keys, first = np.unique(keys, return_index=True)
        self.stored: NDArray[np.int64] = stored[first]
        owners = [np.repeat(chunk_keys(e.ids), e.table["refs"]) for e in tables if len(e.refs)]
        targets = [chunk_keys(e.refs) for e in tables if len(e.refs)]
        self._from = self.find(joined(owners, np.uint64))[0]
        self._to, self._known = self.find(joined(targets, np.uint64))

    def find(self, keys: Keys) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Place of each key, and whether it is there at all."""
        if not len(self.keys):
            return np.zeros(len(keys), np.intp), np.zeros(len(keys), np.bool_)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return places, self.keys[places] == keys

    def closure(self, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """`places` and the chunks they are coded against, each once."""
        reached = np.zeros(len(self.keys), np.bool_)
        reached[places] = True
        while len(self._from):
            targets = self._to[reached[self._from] & self._known]
            if reached[targets].all():
                break
            reached[targets] = True
        return np.flatnonzero(reached)


def chunk_keys(ids: NDArray[np.uint8]) -> Keys:
    """The first eight bytes of every id."""
    return np.ascontiguousarray(ids[:, :8]).view(np.uint64).reshape(-1)


def joined(arrays: list[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    """All arrays one after the other; of `dtype` when there is none."""
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def measure(store: Store, progress: Callable[[int, int], None] | None = None) -> Usage:
    """Read all commits, manifests and pack tables (no payload) and add up.

    `progress(done, total)` counts commits. What cannot be read is listed, never guessed at.
    """
    unreadable: list[tuple[str, str]] = []
    commits = all_commits(store, unreadable)
    catalogue = Catalogue(store)
    unreadable += [(f"packs/{n}", e.message) for n, e in sorted(store.packs.damaged.items())]
    size = len(catalogue.keys)
    reached = np.zeros(size, np.int64)  # by how many steps
    owner = np.zeros(size, np.int64)  # the last of them
    run_reached = np.zeros(size, np.int64)  # by how many runs
    run_owner = np.full(size, -1, np.int64)
    runs: list[RunUsage] = []
    steps: list[StepUsage] = []
    done, total = 0, sum(len(of_run) for _, of_run in commits)
    for number, (run, of_run) in enumerate(commits):
        usage = RunUsage(run)
        runs.append(usage)
        for commit in of_run:
            try:
                snapshot = store.snapshot(commit)
            except DeltackptError as error:
                unreadable.append((f"{commit.run}@{commit.step}", error.message))
                continue
            step = StepUsage(commit)
            places = _places(snapshot, catalogue, step)
            stored = catalogue.stored[places]
            step.total = int(stored.sum())
            step.added = int(stored[reached[places] == 0].sum())
            reached[places] += 1
            owner[places] = len(steps)
            fresh = places[run_owner[places] != number]
            usage.total += int(catalogue.stored[fresh].sum())
            run_reached[fresh] += 1
            run_owner[fresh] = number
            steps.append(step)
            usage.steps.append(step)
            done += 1
            if progress is not None:
                progress(done, total)
    for step, unique in zip(
        steps, _sums(owner, catalogue.stored, reached == 1, len(steps)), strict=True
    ):
        step.unique = unique
    for usage, unique in zip(
        runs, _sums(run_owner, catalogue.stored, run_reached == 1, len(runs)), strict=True
    ):
        usage.unique = unique
    files = measure_files(store)
    distinct = int(catalogue.stored.sum())
    referenced = int(catalogue.stored[reached > 0].sum())
    return Usage(
        files=files,
        runs=runs,
        referenced=referenced,
        unreferenced=distinct - referenced,
        duplicates=catalogue.all_stored - distinct,
        overhead=files.bytes.get("packs", 0) - catalogue.all_stored,
        unreadable=unreadable,
    )


def all_commits(store: Store, unreadable: list[tuple[str, str]]) -> list[tuple[str, list[Commit]]]:
    """All commits by run, pinned ones that their run no longer lists included."""
    found: dict[str, dict[int, Commit]] = {}
    for run in store.runs():
        commits = store.commits(run)
        found[run] = {commit.number: commit for commit in commits}
        unreadable += [(bad.path, bad.error.message) for bad in commits.damaged]
    pins = store.pins()
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


def _places(snapshot: Snapshot, catalogue: Catalogue, step: StepUsage) -> NDArray[np.intp]:
    keys = np.unique(joined([chunk_keys(ids) for ids in snapshot.chunks.values()], np.uint64))
    places, known = catalogue.find(keys)
    step.missing = int((~known).sum())
    return catalogue.closure(places[known])


def _sums(
    owner: NDArray[np.int64], stored: NDArray[np.int64], chosen: NDArray[np.bool_], count: int
) -> list[int]:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, owner[chosen], stored[chosen])
    return sums.tolist()


def measure_files(store: Store) -> Files:
    """Length of every file of the store, by the folder at the top it lies in ("" for the top)."""
    files = Files()
    for relative in _walk(store, ""):
        try:
            handle = store.io.open(f"{store.path}/{relative}")
        except FileNotFoundError:  # a file may be collected meanwhile
            continue
        try:
            length = store.io.size(handle)
        finally:
            store.io.close(handle)
        folder = relative.partition("/")[0] if "/" in relative else ""
        files.bytes[folder] = files.bytes.get(folder, 0) + length
        files.count[folder] = files.count.get(folder, 0) + 1
    return files


def _walk(store: Store, relative: str) -> Iterator[str]:
    """Every file below `relative`, as a path relative to the store."""
    try:
        names = store.io.list(f"{store.path}/{relative}")
    except NotADirectoryError:
        yield relative
        return
    except FileNotFoundError:
        return
    for name in sorted(names):
        yield from _walk(store, f"{relative}/{name}" if relative else name)
