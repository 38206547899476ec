"""``deltackpt_tools.watch``: what a running training is saving, seen from the store alone.

Every save leaves its figures in its commit, and what is being written lies in the store as
temporary files until it is published; a writer at work holds the lock of its run. So a store is
watched by looking at it, from any machine that sees it, without the trainer's help.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deltackpt_store.errors import DeltackptError, NotFoundError
from deltackpt_store.fileio import TEMPORARY_PREFIX, read_file
from deltackpt_store.manifest import Commit
from deltackpt_store.store import DIRECTORIES, Store

from deltackpt_tools.arguments import check_seconds
from deltackpt_tools.frames import Record, frame
from deltackpt_tools.history_stat import durable_seconds
from deltackpt_tools.named import StoreLike, as_store


@dataclass(frozen=True, slots=True)
class RunState(Record):
    """The newest save of one run. Times in seconds, sizes in bytes; None when not recorded."""

    run: str
    step: int
    number: int
    saves: int
    age: float
    """Since the commit was made (by the clock of the trainer's machine)."""
    interval: float | None
    """Between the last two commits."""
    stall: float | None
    staged: float | None
    durable: float | None
    state_bytes: int | None
    staged_bytes: int | None
    written_bytes: int | None
    skipped: int
    metrics: dict[str, float]
    writer: str | None
    """Who locked the run last, as ``pid@host``: it may have ended since."""


@dataclass(frozen=True, slots=True)
class StoreState(Record):
    """What the newest commits tell of the trainings that save; `time` in Unix seconds."""

    store: str
    time: float
    in_flight_bytes: int
    """Bytes of packs that are being written and belong to no step yet: the backlog."""
    runs: tuple[RunState, ...]
    """The one saved to last first."""

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per run."""
        return frame([run.to_dict() for run in self.runs])


def look(store: StoreLike, run: str | None = None, *, now: float | None = None) -> StoreState:
    """The present state of all runs (or of `run`). Reads the newest commits only."""
    where = as_store(store)
    moment = time.time() if now is None else now
    states: list[RunState] = []
    for name in where.runs() if run is None else [run]:
        state = _state(where, name, moment)
        if state is not None:
            states.append(state)
    states.sort(key=lambda state: state.age)
    return StoreState(where.path, moment, _in_flight(where), tuple(states))


def await_store(path: str, run: str | None, *, poll: float, told: Callable[[str], None]) -> Store:
    """The store at `path`, once it is there and has `run`; `told` hears what is waited for.

    A directory that holds something else is no place where a store will appear: NotFoundError.
    """
    said = ""
    while True:
        words = f"{path} is no store yet"
        try:
            store = as_store(path)
            if run is None or run in store.runs():
                return store
            words = f"{store.path} has no run {run!r} yet"
        except NotFoundError:
            if os.path.lexists(path) and not _may_become_one(path):
                raise
        if words != said:
            told(f"{words}: waiting for the first save")
            said = words
        time.sleep(poll)


def _may_become_one(path: str) -> bool:
    """Whether a directory is empty, or a store that is being made: FORMAT comes last, into one
    that has empty directories only."""
    try:
        names = [name for name in os.listdir(path) if not name.startswith(".")]
        own = {*DIRECTORIES, "cache", "FORMAT"}.issuperset(names)
        full = any(os.listdir(f"{path}/{name}") for name in names if name in DIRECTORIES)
    except OSError:
        return False
    return own and not full


def watch(store: StoreLike, run: str | None = None, *, poll: float = 1.0) -> Iterator[StoreState]:
    """The state now, and again whenever a step was saved or bytes in flight changed. Never ends.

    `poll` is the time between two looks, in seconds.
    """
    check_seconds("poll", poll, zero=True)
    where = as_store(store)
    last: object = None
    while True:
        state = look(where, run)
        seen = (state.in_flight_bytes, [(one.run, one.number) for one in state.runs])
        if seen != last:
            last = seen
            yield state
        time.sleep(poll)


def _state(store: Store, run: str, now: float) -> RunState | None:
    numbers = store.numbers(run)
    newest: list[Commit] = []
    for number in reversed(numbers):
        try:
            newest.append(store.read_commit(run, number))
        except DeltackptError:  # being collected, or damaged: `log` and `verify` tell
            continue
        if len(newest) == 2:
            break
    if not newest:
        return None
    commit, stats = newest[0], newest[0].stats
    interval = None
    if len(newest) == 2 and newest[1].created < commit.created:
        interval = commit.created - newest[1].created

    def count(name: str) -> int | None:
        return None if name not in stats else int(stats[name])

    return RunState(
        run=run,
        step=commit.step,
        number=commit.number,
        saves=len(numbers),
        age=max(0.0, now - commit.created),
        interval=interval,
        stall=stats.get("stall_seconds"),
        staged=stats.get("staged_seconds"),
        durable=durable_seconds(stats),
        state_bytes=count("state_bytes"),
        staged_bytes=count("staged_bytes"),
        written_bytes=count("written_bytes"),
        skipped=count("skipped") or 0,
        metrics=dict(commit.metrics),
        writer=_holder(store, run),
    )


def _holder(store: Store, run: str) -> str | None:
    """Process and host in the run's lock file. The lock itself is not tried: that would take it."""
    try:
        found: Any = json.loads(read_file(store.io, f"{store.path}/runs/{run}/.lock", 1000))
        return f"{int(found['pid'])}@{str(found['host'])[:100]}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _in_flight(store: Store) -> int:
    """Bytes of temporary pack files. They come and go while one looks."""
    total = 0
    for folder in _list(store, "packs"):
        for name in _list(store, f"packs/{folder}"):
            if name.startswith(TEMPORARY_PREFIX):
                try:
                    handle = store.io.open(f"{store.path}/packs/{folder}/{name}")
                except OSError:
                    continue
                try:
                    total += store.io.size(handle)
                finally:
                    store.io.close(handle)
    return total


def _list(store: Store, folder: str) -> list[str]:
    try:
        return store.io.list(f"{store.path}/{folder}")
    except OSError:
        return []
