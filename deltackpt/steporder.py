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

    def committed(self, step: int) -> None:
        """`step` is durable: the next save continues it."""
        self._newest, self._known = step, True

    def restored(self, commit: Commit) -> None:
        """The next save continues `commit`; the steps of another run forbid nothing."""
        self._newest = commit.step if commit.run == self._run else None
        self._known = self._went_back = True

    def leave(self, step: int) -> None:
        """Say which steps of the run a save of `step` takes off its list, if any.

        Those after a restored step when training goes on from there, and those after a step that is
        overwritten. They can still be asked for by number, as long as retention leaves them.
        """
        newest, back = self._newest, self._went_back
        self._went_back = False
        if not back and (newest is None or step > newest):
            return
        last = -1 if newest is None else newest
        kept = min(last, step - 1) if back else step - 1
        try:
            left = [s for s in self._store.steps(self._run) if s > kept and s != step]
        except DeltackptError:  # there is none, or the save will say what is wrong
            return
        if left:
            _log.warning(
                "saving step %d of run %r leaves its steps %s: they are not listed any more",
                step, self._run, ", ".join(map(str, left)),
            )  # fmt: skip

    def check(self, step: int, in_flight: Sequence[int]) -> None:
        """Raise `ConflictError` when `step` does not come after what it would continue."""
        if not self._known:
            with contextlib.suppress(NotFoundError):
                self._newest = self._store.head(self._run).step
            self._known = True
        if in_flight:
            newest, what = max(in_flight), "is being saved already"
        else:
            newest, what = self._newest, f"is the newest of run {self._run!r}"
        if newest is not None and step <= newest:
            raise ConflictError(
                f"step {step} cannot be saved: step {newest} {what}",
                kind="step-exists",
                hint="restore() first to continue the run, choose another run=, or pass"
                " overwrite=True",
                step=step,
                newest=newest,
                run=self._run,
            )
