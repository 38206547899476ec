"""Which step to read: the one asked for, or the newest that verifies; held while it is read.

A hold keeps retention and collection from taking a step. It is best effort: where it cannot be had
(a read-only store, no file locks, a full disk), readers go without, and are safe as long as nobody
retires what they read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from deltackpt_store.errors import (
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
    told,
)
from deltackpt_store.history import Damaged
from deltackpt_store.leases import Hold, hold
from deltackpt_store.manifest import Commit
from deltackpt_store.names import check_name, check_step, parse_number, parse_step_name
from deltackpt_store.store import Store

_log = logging.getLogger("deltackpt.restore")

_LISTINGS = 10  # of a run whose steps are retired while they are tried


@dataclass(frozen=True, slots=True)
class Skipped:
    """A commit that was passed over, and why. `step` is None when not even that can be read."""

    run: str
    number: int
    step: int | None
    reason: str


class Held:
    """A commit that is held until :meth:`release`, or by whoever takes the hold over."""

    def __init__(self, store: Store, commit: Commit) -> None:
        """NotFoundError (kind "retired") when retention has just taken the commit."""
        self.commit = commit
        self._hold = _hold(store, commit)

    def take_over(self) -> Hold | None:
        """The hold, if there is one; it is the caller's to release from now on."""
        taken, self._hold = self._hold, None
        return taken

    def release(self) -> None:
        taken = self.take_over()
        if taken is not None:
            taken.release()


def _hold(store: Store, commit: Commit) -> Hold | None:
    try:
        store.format.require("write", store.path)
        return hold(store.io, store.path, commit)
    except (StorageError, UnsupportedFormatError) as error:
        _log.debug("step %s@%d is read without a hold: %s", commit.run, commit.step, error)
        return None


def named_step(store: Store, run: object, step: int | None) -> tuple[str, int | None]:
    """The run and the step that `run` and `step` mean, where `run` may be a ``RUN@STEP`` as well.

    `InvalidInputError` for a step number in place of a run, and for a step that is named twice.
    """
    if isinstance(run, int) and not isinstance(run, bool):
        raise InvalidInputError(
            f"{told(run)} cannot be the name of a run",
            option="run",
            hint=f"for a step: step={told(run)}",
        )
    if not isinstance(run, str) or "@" not in run:
        store.check_spelling(check_name(cast("str", run), "run"))
        return cast("str", run), step
    if step is not None:
        raise InvalidInputError(
            f"run={told(run)} names a step, and so does step={told(step)}",
            option="step",
            hint="leave one of them out",
        )
    name = parse_step_name(run)
    return name.run or store.resolve_name(run).run, name.step


def held_candidates(
    store: Store, run: str, step: int | None, skipped: list[Skipped]
) -> Iterator[Held]:
    """As :func:`candidates`, each held until the next one is asked for.

    Steps that retention takes in the meantime are passed over; if there were any, the run is listed
    again after the last one.
    """
    tried: set[tuple[str, int]] = set()
    for _ in range(_LISTINGS):
        gone = False
        for commit in candidates(store, run, step, skipped):
            if (commit.run, commit.number) in tried:
                continue
            try:
                held = Held(store, commit)
            except NotFoundError as error:
                if step is not None:
                    raise
                _log.info("%s", error)
                gone = True
                continue
            tried.add((commit.run, commit.number))
            try:
                yield held
            finally:
                held.release()
        if not gone:
            return


def candidates(
    store: Store, run: str, step: int | None, skipped: list[Skipped]
) -> Iterator[Commit]:
    """Commits to try, best first; commits that cannot be read are noted in `skipped`.

    The lineage of the run's newest commit from its end, then what else the run holds, newest
    first. Nothing when the run does not exist or has no commit. With `step`, that one only, or
    `NotFoundError`.
    """
    if step is not None:
        yield store.find(run, check_step(step))
        return
    try:
        lineage = store.lineage(run)
    except NotFoundError as error:
        _log.info("%s: nothing to restore", error)
        return
    newest = lineage[-1].number
    for damaged in lineage.damaged:
        _note(run, damaged, newest, skipped)
    yield from reversed(lineage)
    known = {commit.number for commit in lineage}
    others = store.commits(run)
    for damaged in others.damaged:
        _note(run, damaged, newest, skipped)
    yield from (commit for commit in reversed(others) if commit.number not in known)


def _note(run: str, damaged: Damaged, newest: int, skipped: list[Skipped]) -> None:
    number = parse_number(os.path.basename(damaged.path))
    if number is None or any(entry.number == number for entry in skipped):
        return
    if isinstance(damaged.error, UnsupportedFormatError) and number > newest:
        raise damaged.error
    skipped.append(Skipped(run, number, None, str(damaged.error)))


def nothing_verifies(run: str, skipped: Iterable[Skipped]) -> CorruptionError:
    """The error for a run none of whose commits can be restored."""
    lines = [f"commit {s.number} (step {s.step}): {s.reason}" for s in skipped]
    return CorruptionError(
        "\n  ".join([f"no step of run {run!r} can be restored", *lines]),
        kind="nothing-verifies",
        hint="`deltackpt verify` tells what is damaged; another copy of the store may have it",
        run=run,
    )
