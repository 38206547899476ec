"""``deltackpt_tools.report``: everything about a store on one page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from deltackpt_store.errors import DeltackptError, NotFoundError, told
from deltackpt_store.manifest import Commit, Snapshot
from deltackpt_store.store import Store
from numpy.typing import NDArray

from deltackpt_tools.advice import Advice, from_commits, measure_restore, recent_saves
from deltackpt_tools.arguments import check_seconds
from deltackpt_tools.base_interval import base_interval
from deltackpt_tools.frames import frame
from deltackpt_tools.named import StoreLike, as_store
from deltackpt_tools.store_health import Health, health_of
from deltackpt_tools.stored_chunks import chunk_keys, joined
from deltackpt_tools.survey import RunSurvey, RunWalk, Shares, save_points
from deltackpt_tools.usage import all_commits

Progress = Callable[[int, int | None], None]
MTBF = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the page shows; `made` is when, in Unix seconds."""

    store: str
    made: float
    runs: tuple[RunSurvey, ...]
    health: Health

    def to_dict(self) -> dict[str, Any]:
        """As the JSON document has it, but for `format` and `output`."""
        return {
            "store": self.store,
            "made": self.made,
            "runs": [run.to_dict() for run in self.runs],
            "health": self.health.to_dict(),
        }

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per save; metrics are columns."""
        return frame(
            [{"run": run.run, **save.to_dict()} for run in self.runs for save in run.saves]
        )

    @property
    def damage(self) -> int:
        """Findings of the verification, or, without one, what was met that could not be read."""
        met = 0 if self.health.verified else sum(len(run.unreadable) for run in self.runs)
        return len(self.health.findings) + len(self.health.unreadable) + met

    def to_html(self) -> str:
        """The page: one document that needs nothing else."""
        from deltackpt_tools.report_page import page

        return page(self.store, self.made, self.runs, self.health)

    def heatmap_png(self, run: str | None = None) -> bytes:
        """The heat-map of `run` (default: the first) as a PNG file; NotFoundError where the report
        has no such run."""
        from deltackpt_tools.heatmap_image import image

        for one in self.runs:
            if run is None or one.run == run:
                return image(one)
        raise NotFoundError(
            "the report has no run" if run is None else f"the report has no run {told(run)}",
            kind="unknown-run",
            hint=f"it has {', '.join(one.run for one in self.runs)}" if self.runs else None,
        )


def report(
    store: StoreLike,
    run: str | None = None,
    *,
    values: bool = False,
    verify: str | None = "structure",
    mtbf: float = MTBF,
    progress: Progress | None = None,
) -> Report:
    """Survey all runs of a store (or `run`), the one with most saves first.

    Reads commits, manifests and pack tables; with `values` also every chunk that any save changed;
    `verify` names a level of `deltackpt verify` or is None. A restore is measured on a part of the
    newest step of each run. `mtbf` (seconds) is for the advice. `progress(done, total)` counts
    steps. Damage is listed, not raised; StorageError where the system lets something not be read.
    """
    check_seconds("mtbf", mtbf)
    where = as_store(store)
    unreadable: list[tuple[str, str]] = []
    commits = all_commits(where, unreadable)
    lines = {name: _lineage(where, name) for name, of in commits if of and run in (None, name)}
    if run is not None and run not in lines:
        where.numbers(run)  # raises when there is no such run
    total = sum(len(of) for _, of in commits)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(min(done, total), total)

    keys: list[NDArray[np.uint64]] = []
    surveys: list[RunSurvey] = []
    for name, line in lines.items():
        survey, of_run = _survey(where, name, line, values, mtbf, advance)
        surveys.append(survey)
        keys += of_run
    for name, of_run in commits:
        walked = {commit.number for commit in lines.get(name, ())}
        keys += _others(where, [c for c in of_run if c.number not in walked], unreadable, advance)
    surveys.sort(key=lambda survey: (-len(survey.saves), survey.run))
    health = health_of(where, keys, total, verify, run, unreadable)
    return Report(where.path, time.time(), tuple(surveys), health)


def _lineage(store: Store, run: str) -> list[Commit]:
    try:
        return list(store.lineage(run))
    except DeltackptError:
        return []


def _survey(
    store: Store,
    name: str,
    line: list[Commit],
    values: bool,
    mtbf: float,
    advance: Callable[[], None],
) -> tuple[RunSurvey, list[NDArray[np.uint64]]]:
    walk = RunWalk(store, line)
    updates = _Updates(store, walk, line) if values else None
    walk.walk(advance, None if updates is None else updates.visit)
    saves = save_points(store, line)
    survey = RunSurvey(
        run=name,
        saves=saves,
        modules=tuple(walk.modules),
        module_bytes=tuple(walk.module_bytes.tolist()),
        module_parameters=walk.parameters(),
        share=walk.share,
        update=None if updates is None else updates.matrix(),
        not_finite=() if updates is None else tuple(updates.not_finite),
        tensors=walk.habits(walk.newest),
        bases=base_interval([(save.is_base, save.manifest_bytes) for save in saves]),
        advice=_advice(store, line, mtbf),
        unreadable=tuple(walk.unreadable),
    )
    return survey, walk.keys


class _Updates:
    """Relative updates by module and save, read from the chunks that changed."""

    def __init__(self, store: Store, walk: RunWalk, line: list[Commit]) -> None:
        self._store, self._walk, self._line = store, walk, line
        store.index()  # all packs at once: step by step the index would be sorted each time
        self._found: dict[tuple[int, int], float] = {}
        self.not_finite: list[tuple[int, str, int]] = []

    def visit(self, index: int, old: Snapshot | None, new: Snapshot) -> None:
        from deltackpt_tools.changed_values import ValueReader, add_values
        from deltackpt_tools.compare import compare

        if old is None:
            return
        found = compare(old, new, lambda path: not path.startswith("#"))
        reader = ValueReader(old, self._store.reader(old.packs), new, self._store.reader(new.packs))
        for change in add_values(found, reader).tensors:
            row, stats = self._walk.number_of(change.path), change.values
            if row is None or stats is None:
                continue
            broken = (stats.new_nan or 0) + (stats.new_inf or 0)
            if broken:
                self.not_finite.append((self._line[index].step, change.path, broken))
            if stats.relative_update is not None:
                known = self._found.get((row, index), 0.0)
                self._found[row, index] = max(known, stats.relative_update)

    def matrix(self) -> Shares:
        matrix = np.where(np.isnan(self._walk.share), np.nan, 0).astype(np.float32)
        for (row, index), update in self._found.items():
            matrix[row, index] = update
        return matrix


def _advice(store: Store, line: list[Commit], mtbf: float) -> Advice | None:
    recent = recent_saves(line)
    if len(recent) < 2:
        return None
    try:
        restore = measure_restore(store, line[-1])
    except DeltackptError:  # damaged: told under health
        return None
    return from_commits(
        recent, store=store.path, mtbf=mtbf, overhead=None, restore=restore, measured=True
    )


def _others(
    store: Store,
    commits: list[Commit],
    unreadable: list[tuple[str, str]],
    advance: Callable[[], None],
) -> list[NDArray[np.uint64]]:
    """Chunk keys of steps that no lineage shown holds: they keep their chunks referenced."""
    keys: list[NDArray[np.uint64]] = []
    for commit in commits:
        advance()
        try:
            snapshot = store.snapshot(commit)
        except DeltackptError as error:
            unreadable.append((f"{commit.run}@{commit.step}", error.message))
            continue
        mine = [chunk_keys(ids) for ids in snapshot.chunks.values()]
        keys.append(np.unique(joined(mine, np.uint64)))
    return keys
