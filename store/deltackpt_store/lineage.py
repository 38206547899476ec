"""Which commit the next one of a run continues.

Rules. The first save after a restore names the commit that was restored; every later one
continues the last commit of this session; a session that restored nothing continues the run's
newest commit. Within a run a step must be larger than the step it continues, unless `overwrite`:
then the new commit continues the newest earlier commit with a smaller step, and the steps from
there on are abandoned (not deleted) when, and only when, the new commit exists. Where the record
of an earlier commit is damaged, a commit that takes the place of a step continues what that one
did, as its own record tells; one of an earlier step continues the nearest that can be read.
"""

from __future__ import annotations

import contextlib
import logging

import msgspec

from deltackpt_store.errors import ConflictError, CorruptionError, NotFoundError
from deltackpt_store.history import within
from deltackpt_store.manifest import Commit
from deltackpt_store.names import check_step
from deltackpt_store.store import Store

_log = logging.getLogger("deltackpt.store")


class Lineage:
    """The head of what this session writes. Used by one thread."""

    def __init__(self, store: Store, run: str) -> None:
        """Start at the newest commit of the run, if there is any that can be read."""
        self._store = store
        self._run = run
        self.head: Commit | None = None
        with contextlib.suppress(NotFoundError):
            self.head = store.head(run)

    def restart(self, commit: Commit) -> None:
        """Continue `commit` (of this or another run), which training was restored from.

        Its record may have been damaged or lost since: what continues it tells of it, so that this
        is noticed and can be repaired. Raises `ConflictError` when another one has its place.
        """
        run, number = commit.run, commit.number
        try:
            there = self._store.read_commit(run, number).digest
        except (NotFoundError, CorruptionError):
            there = commit.digest
        if there != commit.digest:
            raise ConflictError(
                f"commit {number} of run {run!r} is not the one that was restored: the store has"
                " another history now",
                kind="commit-replaced", run=run, number=number, step=commit.step,
                hint="restore again, or give this training a run of its own",
            )  # fmt: skip
        self.head = commit

    def check(self, step: int, *, overwrite: bool, begun: int | None) -> None:
        """Refuse a step that does not come after the one it would continue.

        `begun` is the largest step of a save in flight. Raises `ConflictError`, and
        `InvalidInputError` for what can be no step.
        """
        step = check_step(step)
        head = self.head
        last = head.step if head is not None and head.run == self._run else None
        if begun is not None and (last is None or begun > last):
            last = begun
        if overwrite or last is None or step > last:
            return
        raise ConflictError(
            f"step {step} does not come after step {last}, the last one of run {self._run!r}",
            kind="step-order",
            hint="restore first, save a later step, use another run, or pass overwrite=True",
            run=self._run,
            step=step,
            last=last,
        )

    def parent_of(self, step: int) -> Commit | None:
        """The commit that a commit of `step` continues."""
        commit = self.head
        while commit is not None and commit.run == self._run and commit.step >= step:
            commit = self._before(commit, step)
        return commit

    def _before(self, commit: Commit, step: int) -> Commit | None:
        if commit.parent is None:
            return None
        run, number, _ = commit.parent
        try:
            return self._store.read_commit(run, number)
        except NotFoundError:  # retention removed it; what it continued may still be there
            pass
        except CorruptionError as error:
            if commit.step == step:
                return _as_told_by(commit)
            _log.warning("%s; step %d is saved without it among what it continues", error, step)
        for candidate in reversed(within(self._store.numbers(self._run), commit)):
            with contextlib.suppress(NotFoundError, CorruptionError):
                return self._store.read_commit(self._run, candidate)
        return None


def _as_told_by(commit: Commit) -> Commit:
    """The parent of `commit`, whose own record is damaged, as far as `commit` names it: by run,
    number, digest and ancestors. Its step is only known to be smaller."""
    assert commit.parent is not None
    run, number, digest = commit.parent
    if run != commit.run:
        return msgspec.structs.replace(
            commit, run=run, number=number, step=0, digest=digest, parent=None, ancestors=()
        )
    ancestors = tuple(
        (first, min(last, number - 1)) for first, last in commit.ancestors if first < number
    )
    return msgspec.structs.replace(
        commit,
        number=number,
        step=commit.step - 1,
        digest=digest,
        parent=None,
        ancestors=ancestors,
    )
