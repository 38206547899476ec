"""``deltackpt_tools.log``: the saved steps of each run as typed values. Reads commits only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltackpt_store.errors import DeltackptError
from deltackpt_store.history import Commits
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

from deltackpt_tools.arguments import check_whole
from deltackpt_tools.frames import Record, frame
from deltackpt_tools.named import StoreLike, as_store
from deltackpt_tools.stores import stat


@dataclass(frozen=True, slots=True)
class Parent(Record):
    """The commit that another continues. `step` is None when it can no longer be read."""

    run: str
    number: int
    step: int | None
    digest: str


@dataclass(frozen=True, slots=True)
class LoggedStep(Record):
    """One commit. Digests are hex, times Unix seconds, sizes bytes (None when not recorded)."""

    run: str
    step: int
    number: int
    created: float
    digest: str
    root: str
    manifest: str
    base: str | None
    parent: Parent | None
    in_lineage: bool
    """False when the run went back to an earlier step and continued from there."""
    pins: tuple[str, ...]
    state_bytes: int | None
    written_bytes: int | None
    metrics: dict[str, float]
    stats: dict[str, float]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunLog:
    """One run: `commits` newest first, at most as many as were asked for; `steps` are all."""

    run: str
    steps: int
    commits: tuple[LoggedStep, ...]
    newest: int | None
    """Step of the head."""
    before: dict[int, int]
    """Number of every commit -> number of the commit listed before it."""
    damaged: tuple[tuple[str, str], ...]
    """What could not be read: (path in the store, reason)."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "steps": self.steps,
            "commits": [commit.to_dict() for commit in self.commits],
        }


@dataclass(frozen=True, slots=True)
class Log:
    """The commits of all runs asked for; `damaged_pins` are (path in the store, reason)."""

    store: str
    runs: tuple[RunLog, ...]
    damaged_pins: tuple[tuple[str, str], ...]

    @property
    def damaged(self) -> tuple[tuple[str, str], ...]:
        """(path in the store, reason) of every pin and commit that could not be read."""
        return self.damaged_pins + tuple(bad for run in self.runs for bad in run.damaged)

    def to_dict(self) -> dict[str, Any]:
        """As the JSON document has it, but for `format`."""
        return {
            "store": self.store,
            "runs": [run.to_dict() for run in self.runs],
            "damaged": [{"path": path, "reason": reason} for path, reason in self.damaged],
        }

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per commit; metrics and stats are columns."""
        return frame([commit.to_dict() for run in self.runs for commit in run.commits])


def log(store: StoreLike, run: str | None = None, *, limit: int | None = None) -> Log:
    """The commits of all runs (or of `run`), newest first, at most `limit` of each. Damaged ones
    are listed, not raised."""
    if limit is not None:
        check_whole("limit", limit)
    where = as_store(store)
    pins = where.pins()
    pinned: dict[tuple[str, int], list[str]] = {}
    for name, pin in pins.items():
        pinned.setdefault((pin.run, pin.number), []).append(name)
    return Log(
        store=where.path,
        runs=tuple(
            _run(where, name, pinned, limit) for name in (where.runs() if run is None else [run])
        ),
        damaged_pins=tuple((bad.path, bad.error.message) for bad in pins.damaged),
    )


def _run(
    store: Store, name: str, pins: dict[tuple[str, int], list[str]], limit: int | None
) -> RunLog:
    commits = store.commits(name)
    line = {commit.number: commit for commit in (store.lineage(name) if commits else Commits())}
    by_number = {commit.number: commit for commit in commits}
    order = [commit.number for commit in commits]

    def entries() -> Iterator[LoggedStep]:
        for commit in commits[::-1][:limit]:
            yield LoggedStep(
                run=commit.run,
                step=commit.step,
                number=commit.number,
                created=commit.created,
                digest=commit.digest.hex(),
                root=commit.root.hex(),
                manifest=commit.manifest.hex(),
                base=None if commit.base is None else commit.base.hex(),
                parent=_parent(store, commit, by_number),
                in_lineage=commit.number in line,
                pins=tuple(pins.get((commit.run, commit.number), ())),
                state_bytes=stat(commit, "state_bytes"),
                written_bytes=stat(commit, "written_bytes"),
                metrics=dict(commit.metrics),
                stats=dict(commit.stats),
                versions=dict(commit.versions),
            )

    return RunLog(
        run=name,
        steps=len(commits),
        commits=tuple(entries()),
        newest=max((commit.step for commit in line.values()), default=None),
        before=dict(zip(order[1:], order, strict=False)),
        damaged=tuple((bad.path, bad.error.message) for bad in commits.damaged),
    )


def _parent(store: Store, commit: Commit, own: dict[int, Commit]) -> Parent | None:
    if commit.parent is None:
        return None
    run, number, digest = commit.parent
    step: int | None = None
    if run == commit.run and number in own:
        step = own[number].step
    elif run != commit.run:
        try:
            step = store.read_commit(run, number).step
        except DeltackptError:  # removed by retention, or damaged: then its own run reports it
            step = None
    return Parent(run, number, step, digest.hex())


def note(entry: LoggedStep, before: int | None) -> str:
    """What a reader should know about a commit beyond its figures. `before` is the number of the
    commit listed before it."""
    words: list[str] = []
    parent = entry.parent
    if parent is not None and parent.run != entry.run:
        words.append(
            f"fork of {parent.run}" + (f"@{parent.step}" if parent.step is not None else "")
        )
    elif parent is not None and parent.number != before and parent.step is not None:
        words.append(f"continues {parent.step}")
    if not entry.in_lineage:
        words.append("abandoned")
    words += [f"pin {name}" for name in entry.pins]
    return ", ".join(words)
