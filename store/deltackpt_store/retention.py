"""Retention: which steps of a run stay on its list. Takes steps off the list, deletes nothing.

A commit is taken off by creating ``<number>.retired`` beside it (empty, durable); garbage
collection then deletes what nothing else needs. Rules are applied to the lineage of the run's
newest restorable commit; steps that were abandoned by going back are kept by no rule. Never taken
off: the newest commit that can be restored and anything newer, what is pinned, what somebody holds
(a reader, or a training that was restored from it and has not saved yet), commits of other runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import msgspec

from deltackpt_store.errors import (
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
    told,
)
from deltackpt_store.fileio import FileIO, refuse_link
from deltackpt_store.history import Commits
from deltackpt_store.impact import NeededChunks
from deltackpt_store.leases import held_commits
from deltackpt_store.lost_chunks import lost_chunks
from deltackpt_store.manifest import Commit
from deltackpt_store.names import RETIRED_SUFFIX, listed_numbers, number_name
from deltackpt_store.oserror import FULL, storage_error, sync_directory
from deltackpt_store.pack_set import PackSet
from deltackpt_store.records import is_listed
from deltackpt_store.reserve import with_reserve
from deltackpt_store.roots import Retired, Roots
from deltackpt_store.store import Store

Best = tuple[str, Literal["min", "max"]]

SESSION_SECONDS = "session_seconds"
"""Figure of a commit: seconds since its session began, by a clock that nobody sets."""


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps stay; a step stays when any rule keeps it. Without a rule all do.

    `last`: the newest so many. `every`: steps that are multiples of it. `best`: a metric and
    whether its smallest or largest value is best; of equal ones the newest. `within`: seconds of
    training before the newest step; between two sessions those of the wall clock, so that one that
    was set ahead looks like a long pause. InvalidInputError for a value that could keep nothing.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    within: float | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "within"):
            value: Any = getattr(self, name)
            if value is None:
                continue
            whole = name != "within"
            right = isinstance(value, int) if whole else isinstance(value, (int, float))
            if not right or isinstance(value, bool) or not 0 < value < math.inf:
                kind = "a whole number of at least 1" if whole else "a positive number"
                raise InvalidInputError(
                    f"keep.{name} must be {kind}, not {told(value)}", option=f"keep.{name}"
                )
        best: Any = self.best
        if best is not None and not (best[0] and best[1] in ("min", "max")):
            raise InvalidInputError(
                f'keep.best must be a metric and "min" or "max", not {told(best)}',
                option="keep.best",
            )

    @property
    def everything(self) -> bool:
        """Whether no rule is given."""
        return self == Keep()


def keep_of(rules: object) -> Keep:
    """`rules` (anything with the fields of `Keep`; a bare metric name means its minimum)."""
    if isinstance(rules, Keep):
        return rules
    best: Any = getattr(rules, "best", None)
    if isinstance(best, str):
        best = (best, "min")
    return Keep(
        last=getattr(rules, "last", None),
        every=getattr(rules, "every", None),
        best=cast("Best | None", best),
        within=getattr(rules, "within", None),
    )


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What retention did, or with `dry_run` would do, to one run; ascending by number.

    `kept` says why each kept commit stays: rules by name, "newest", "pinned", "held".
    """

    run: str
    kept: list[tuple[Commit, tuple[str, ...]]] = field(
        default_factory=list[tuple[Commit, tuple[str, ...]]]
    )
    retired: list[Commit] = field(default_factory=list[Commit])


def apply(store: Store, run: str, keep: object, *, dry_run: bool = False) -> RetentionPlan:
    """Take off the list of `run` what `keep` (see `keep_of`) does not keep.

    Durable on return. NotFoundError for an unknown run or one without a step, CorruptionError when
    none of its steps can be restored, StorageError. Damaged commits are left alone.
    """
    rules = keep_of(keep)
    commits = store.commits(run)
    newest = _newest_restorable(store, commits, run)
    plan = _plan(store, run, rules, commits, newest)
    if not dry_run:
        retire(store, plan.retired)
    return plan


_FILES_A_SAVE = 64
"""For each so many files in the last listing of the run's folder, one save goes without one."""
_FILES_A_COMMIT = 16
"""With this many times as many files as commits, commits are looked up one by one instead."""


class Retention:
    """The rules of one session, applied after each of its commits. Used by one thread.

    To list the run's folder takes time for every step that was ever retired and has not been
    collected. So a long listing is made rarely, and in between the commits that it found are looked
    up: others may have taken them off the list. What others put back on it is seen later.
    """

    def __init__(self, store: Store, run: str, keep: Keep) -> None:
        self._store = store
        self._run = run
        self._keep = keep
        self._known: dict[int, Commit] = {}
        self._unlisted = 0  # saves that still go without a listing

    def apply(self, newest: Commit) -> list[Commit]:
        """`newest`, of this run, has just become durable: take off what need not stay.

        Reads only records that it has not read before. Errors as of the function `apply`.
        """
        if self._keep.everything:
            return []
        store, run = self._store, self._run
        numbers = [n for n in self._numbers() if n <= newest.number]
        known: dict[int, Commit] = {newest.number: newest}
        for number in numbers:
            with contextlib.suppress(NotFoundError, CorruptionError, UnsupportedFormatError):
                known[number] = known.get(number) or self._known.get(number) or (
                    store.read_commit(run, number)
                )  # fmt: skip
        self._known = known
        commits = [known[number] for number in sorted(known)]
        plan = _plan(store, run, self._keep, commits, newest)
        retire(store, plan.retired)
        for commit in plan.retired:
            del self._known[commit.number]
        return plan.retired

    def _numbers(self) -> list[int]:
        """Numbers of the commits that are not retired, ascending; the newest one may be missing."""
        if self._unlisted:
            self._unlisted -= 1
            io, root = self._store.io, self._store.path
            return [number for number in self._known if is_listed(io, root, self._run, number)]
        files = self._store.files(self._run)
        numbers = listed_numbers(files)
        if len(files) >= _FILES_A_COMMIT * len(numbers):
            self._unlisted = len(files) // _FILES_A_SAVE
        return numbers


def retire(store: Store, commits: Iterable[Commit | Retired]) -> None:
    """Take commits off their runs' lists, durably (StorageError). Idempotent.

    The caller makes sure that none of them is needed, as `apply` does. UnsupportedFormatError when
    this package may only read the store.
    """
    store.format.require("write", store.path)
    directories: set[str] = set()
    for commit in commits:
        directory = f"{store.path}/runs/{commit.run}"
        path = f"{directory}/{number_name(commit.number)}{RETIRED_SUFFIX}"
        directories.add(directory)
        try:
            refuse_link(directory)
            with_reserve(store.io, store.path, partial(_mark, store.io, path))
        except OSError as error:
            raise storage_error(error, "retire the commit by", path) from error
    for directory in sorted(directories):
        sync_directory(store.io, directory)


def _mark(io: FileIO, path: str) -> None:
    """Make the mark of retirement at `path`. OSError.

    Where there is no room for a file, inodes above all, the record gets it as a second name: else
    the reserve went for it, which the collection needs that makes room.
    """
    try:
        io.close(io.create(path))
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in FULL:
            raise
        try:
            io.link(path.removesuffix(RETIRED_SUFFIX), path)
        except FileExistsError:
            return
        except OSError:
            raise error from None


# rules ------------------------------------------------------------------------------------------


def _plan(
    store: Store, run: str, keep: Keep, commits: Sequence[Commit], newest: Commit
) -> RetentionPlan:
    """`commits` are all of the run that are not retired, ascending; `newest` must stay."""
    lineage = [c for c in commits if c is newest or _continues(newest, c)]
    reasons = _reasons(keep, lineage)
    pinned = {(pin.run, pin.number) for pin in store.all_pins().values()}
    held = held_commits(store.io, store.path)
    plan = RetentionPlan(run)
    for commit in commits:
        why = list(reasons.get(commit.number, ()))
        if commit.number >= newest.number:
            why.append("newest")
        if (run, commit.number) in pinned:
            why.append("pinned")
        if (run, commit.number) in held:
            why.append("held")
        if why or keep.everything:
            plan.kept.append((commit, tuple(why)))
        else:
            plan.retired.append(commit)
    return plan


def _reasons(keep: Keep, lineage: Sequence[Commit]) -> dict[int, list[str]]:
    reasons: dict[int, list[str]] = {}

    def stays(commits: Iterable[Commit], why: str) -> None:
        for commit in commits:
            reasons.setdefault(commit.number, []).append(why)

    if keep.last is not None:
        stays(lineage[-keep.last :], "last")
    if keep.every is not None:
        stays((c for c in lineage if c.step % keep.every == 0), "every")
    if keep.best is not None:
        stays(_best(lineage, *keep.best), "best")
    if keep.within is not None:
        stays(_within(lineage, keep.within), "within")
    return reasons


def _best(lineage: Sequence[Commit], metric: str, mode: str) -> list[Commit]:
    sign = -1.0 if mode == "max" else 1.0
    best: Commit | None = None
    for commit in lineage:
        value = commit.metrics.get(metric, math.nan)
        if math.isnan(value):
            continue
        if best is None or sign * value <= sign * best.metrics[metric]:
            best = commit
    return [] if best is None else [best]


def _within(lineage: Sequence[Commit], seconds: float) -> list[Commit]:
    """Commits at most so long before the newest one."""
    found: list[Commit] = []
    age, later = 0.0, None
    for commit in reversed(lineage):
        if later is not None:
            age += _seconds_between(commit, later)
        if not age <= seconds:
            break
        found.append(commit)
        later = commit
    return found


def _seconds_between(commit: Commit, later: Commit) -> float:
    """Within one session by its own clock, which nobody sets.

    Else by clocks of several machines, perhaps: where they go back, no time has passed.
    """
    times = [one.stats.get(SESSION_SECONDS) for one in (commit, later)]
    if commit.writer == later.writer and times[0] is not None and times[1] is not None:
        return max(0.0, times[1] - times[0])
    return max(0.0, later.created - commit.created)


def _continues(newest: Commit, commit: Commit) -> bool:
    return any(first <= commit.number <= last for first, last in newest.ancestors)


def _newest_restorable(store: Store, commits: Commits, run: str) -> Commit:
    """The newest commit of which every part is there, as far as pack tables show."""
    failure: Exception | None = None
    for commit in reversed(commits):
        try:
            _check_whole(store, commit)
        except (CorruptionError, UnsupportedFormatError) as error:
            failure = error
        else:
            return commit
    if failure is not None:
        raise CorruptionError(
            f"no step of run {run!r} can be restored: nothing is taken off its list",
            kind="nothing-restorable",
            hint="run `deltackpt verify`",
            run=run,
        ) from failure
    return store.head(run)  # raises what tells that there is none


def _check_whole(store: Store, commit: Commit) -> None:
    """CorruptionError, UnsupportedFormatError when pack tables show that a part of it is gone.

    Looks into the packs that it names; into all only when something lies elsewhere.
    """
    from deltackpt_store.mark import mark

    snapshot = store.snapshot(commit)
    needed = NeededChunks()
    needed.add(snapshot)
    packs = PackSet(store.io, store.path, store.uuid)
    packs.load(snapshot.packs)
    if lost_chunks(packs, *needed.get(), (), scan=False):
        mark(store, Roots(commits={(commit.run, commit.number): commit}))
