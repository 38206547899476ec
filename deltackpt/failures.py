"""Which failed saves are not reported yet, and whether the newest one is to be repeated."""

from __future__ import annotations

from contextlib import AbstractContextManager

from deltackpt_store.errors import DeltackptError

from .report import SaveProgress
from .restless import is_torn


class Failures:
    """The failures of one pipeline. For any thread.

    `lock` is the pipeline's, which holds it from the end of a save until `failed` has returned: who
    learns of that end from a handle comes here later.
    """

    def __init__(self, lock: AbstractContextManager[bool]) -> None:
        self._lock = lock
        self._untold: dict[int, DeltackptError] = {}  # by id of the progress, oldest first
        self._newest: SaveProgress | None = None  # accepted last
        self.torn = False
        """A save was torn, and none has been accepted since."""
        self.comparable = False
        """Saves have been accepted, and none failed since: they show what has not changed."""

    def accepted(self, progress: SaveProgress) -> None:
        """A save was accepted: it makes up for a torn one."""
        with self._lock:
            self._newest, self.comparable = progress, True
            self._forget_torn()

    def restored(self) -> None:
        """What was torn is of no interest any more."""
        with self._lock:
            self.comparable = False
            self._forget_torn()

    def failed(self, progress: SaveProgress, error: DeltackptError) -> None:
        """A save has failed. One that was torn needs telling only when it was the newest."""
        with self._lock:
            self.comparable = False
            if is_torn(error):
                if self._newest is not progress:
                    return  # a later one has made up for it
                self.torn = True
            self._untold[id(progress)] = error

    def told(self, progress: SaveProgress) -> None:
        """The handle of the save has reported its failure."""
        with self._lock:
            self._untold.pop(id(progress), None)

    def take(self, *, torn: bool = True) -> DeltackptError | None:
        """The oldest failure not reported yet; later ones count as reported with it.

        Without `torn`, not that of a torn save, for which the next one makes up.
        """
        if not self._untold:
            return None
        with self._lock:
            errors = [error for error in self._untold.values() if torn or not is_torn(error)]
            if errors:
                self._untold.clear()
        return errors[0] if errors else None

    def _forget_torn(self) -> None:
        self.torn = False
        for key in [key for key, error in self._untold.items() if is_torn(error)]:
            del self._untold[key]
