"""Taking a whole run off the list of a store. As retention, it deletes nothing: `gc` does.

Every commit of the run is retired, the oldest first, under the lock of the run: a run that is being
written stays whole, and one of which this was killed half-way is continued as after retention.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from deltackpt_store.errors import ConflictError, DeltackptError, InvalidInputError
from deltackpt_store.leases import held_commits
from deltackpt_store.oserror import storage_error
from deltackpt_store.records import some_of
from deltackpt_store.retention import retire
from deltackpt_store.roots import Retired
from deltackpt_store.runlock import RunLock
from deltackpt_store.store import Store

_BUSY = "end that trainer first; a writer that only finishes its last save lets go by itself"


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """What was taken off the list, or with `dry_run` would be: (number, step) in the order of
    numbers; a step that could not be read is None."""

    run: str
    retired: list[tuple[int, int | None]]


def delete_run(store: Store, run: str, *, dry_run: bool = False) -> DeletionPlan:
    """Take all commits of `run`, damaged ones too, off its list, durably.

    InvalidInputError (kind ``pinned``) when any is pinned, ConflictError when the run is being
    written (kind ``run-locked``) or one of its steps read or trained from (``held``); nothing was
    taken off then. NotFoundError for an unknown run, CorruptionError when a pin cannot be read,
    UnsupportedFormatError, StorageError. `dry_run` reads only, and takes no lock.
    """
    store.format.require("write", store.path)
    store.numbers(run)  # NotFoundError
    if dry_run:
        return _plan(store, run)
    directory = os.path.join(store.path, "runs", run)
    try:
        lock = RunLock.acquire(
            directory, run, timeout=0, cancelled=lambda seconds: True, hint=_BUSY
        )
    except OSError as error:
        if isinstance(error, DeltackptError):
            raise
        raise storage_error(error, "lock the run", directory) from error
    try:
        plan = _plan(store, run)
        retire(store, [Retired(run, number) for number, _ in plan.retired])
    finally:
        lock.release()
    return plan


def _plan(store: Store, run: str) -> DeletionPlan:
    pinned = [name for name, pin in store.all_pins().items() if pin.run == run]
    if pinned:
        raise InvalidInputError(
            f"steps of run {run!r} are pinned, as {some_of(pinned)}: nothing is taken off its list",
            kind="pinned",
            hint=f"`deltackpt unpin` {pinned[0]} first, or let `deltackpt retain` keep what is"
            " pinned",
            run=run,
        )
    held = held_commits(store.io, store.path)
    if any(of_run == run for of_run, _ in held):
        raise ConflictError(
            f"a step of run {run!r} is being read, or trained from: nothing is taken off its list",
            kind="held",
            hint="wait for what reads it (a compaction, an export), or end it (a training that was"
            " restored from it and has not saved yet)",
            run=run,
        )
    steps = {commit.number: commit.step for commit in store.commits(run)}
    return DeletionPlan(run, [(number, steps.get(number)) for number in store.numbers(run)])
