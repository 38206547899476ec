"""Which step numbers may be saved next: only later ones than that of the commit to continue."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from deltackpt_store.errors import ConflictError, DeltackptError, NotFoundError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

_log = logging.getLogger("deltackpt")


class StepOrder:
    """Follows the lineage of one checkpointer, so that a wrong step is refused at once.

    (The writer checks again: it sees what other processes have committed.) `check` is for the
    training thread, the others for any.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._known = False
        self._newest: int | None = None
        self._went_back = False  # to a restored step, after which nothing has been saved
        self._seen: int | None = None  # the run's last commit when a save after a restore began
        self._told: set[int] = set()  # steps that a warning has named as left

    def committed(self, step: int) -> None:
        """`step` is durable: the next save continues it."""
        self._newest, self._known = step, True
        self._told.discard(step)

    def restored(self, commit: Commit) -> None:
        """The next save continues `commit`; the steps of another run forbid nothing."""
        self._newest = commit.step if commit.run == self._run else None
        self._known = self._went_back = True

    def leave(self, step: int) -> None:
        """Say which steps of the run a save of `step` takes off its list, if any.

        Those after a restored step when training goes on from there, and those after a step that is
        overwritten, by this checkpointer or by an earlier one. They can still be asked for by
        number, until a later step has the same one, as long as retention leaves them.
        """
        with contextlib.suppress(DeltackptError):  # the save will say what is wrong
            self._learn()
        newest, back = self._newest, self._went_back
        self._went_back = False
        if back:
            self._seen = self._last_number()
        if not back and (newest is None or step > newest):
            return
        last = -1 if newest is None else newest
        kept = min(last, step - 1) if back else step - 1
        try:
            left = [s for s in self._store.steps(self._run) if s > kept and s != step
                    and s not in self._told]  # fmt: skip
        except DeltackptError:  # there is none, or the save will say what is wrong
            return
        if left:
            self._warn(step, left, "")

    def left_unseen(self, step: int, number: int) -> None:
        """Say which steps of other trainers the commit `number` of `step` took off the list.

        Those that they committed after the first save since a restore had begun, which then waited
        for them to let the run go: `leave` cannot have seen them.
        """
        seen, self._seen = self._seen, None
        if seen is None or number <= seen + 1:
            return
        with contextlib.suppress(DeltackptError):
            own = self._store.read_commit(self._run, number)
            others = [commit.step for commit in self._store.commits(self._run)
                      if seen < commit.number < number and commit.writer != own.writer]  # fmt: skip
            left = [s for s in others if s != step and s not in self._told]
            if left:
                self._warn(step, left, ", which another trainer has saved since the restore")

    def _warn(self, step: int, left: list[int], whose: str) -> None:
        self._told.update(left)
        _log.warning(
            "saving step %d of run %r leaves its steps %s%s: the run goes on without them, and"
            " steps() does not list them any more; restore(step=%d), load(store, %r, %d) and"
            " '%s@%d' on the command line still find one, until retention (keep=) takes it or"
            " a later save has its number; 'deltackpt pin' keeps one",
            step, self._run, ", ".join(map(str, left)), whose,
            left[-1], self._run, left[-1], self._run, left[-1],
        )  # fmt: skip

    def _last_number(self) -> int | None:
        try:
            return self._store.numbers(self._run)[-1]
        except (DeltackptError, IndexError):  # there is none, or the save will say what is wrong
            return None

    def check(self, step: int, in_flight: Sequence[int]) -> None:
        """Raise `ConflictError` when `step` does not come after what it would continue.

        `in_flight`: the steps being saved, oldest first; the last may go back before the others.
        """
        self._learn()
        if in_flight:
            newest, what = in_flight[-1], "is being saved already"
        else:
            newest, what = self._newest, f"is the newest of run {self._run!r}"
        if newest is not None and step <= newest:
            raise ConflictError(
                f"step {step} cannot be saved: step {newest} {what}",
                kind="step-exists",
                hint="restore() first to continue the run, or choose another run=; steps only grow,"
                " also from one epoch to the next; overwrite=True goes back to this step, and the"
                " later ones leave the run's list",
                step=step,
                newest=newest,
                run=self._run,
            )

    def _learn(self) -> None:
        """What an earlier checkpointer left as the newest step of the run; read once."""
        if not self._known:
            with contextlib.suppress(NotFoundError):
                self._newest = self._store.head(self._run).step
            self._known = True
