"""Which step numbers may be saved next: only later ones than that of the commit to continue."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from deltackpt_store.errors import ConflictError, NotFoundError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store


class StepOrder:
    """Follows the lineage of one checkpointer, so that a wrong step is refused at once.

    (The writer checks again: it sees what other processes have committed.) `check` is for the
    training thread, the others for any.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._known = False
        self._newest: int | None = None

    def committed(self, step: int) -> None:
        """`step` is durable: the next save continues it."""
        self._newest, self._known = step, True

    def restored(self, commit: Commit) -> None:
        """The next save continues `commit`; the steps of another run forbid nothing."""
        self._newest = commit.step if commit.run == self._run else None
        self._known = True

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
