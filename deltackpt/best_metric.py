"""A warning for a metric by which retention is to keep the best step, and that no step has."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from deltackpt_store.errors import DeltackptError
from deltackpt_store.store import Store

from .policy import Keep

_log = logging.getLogger("deltackpt")


class BestMetric:
    """Looks at the first save of a checkpointer. Used by the training thread alone."""

    def __init__(self, store: Store, run: str, keep: Keep | None) -> None:
        best = None if keep is None else keep.best
        self._store, self._run = store, run
        self._metric = best[0] if isinstance(best, tuple) else best

    def saving(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn, once, when neither `metrics` nor a step that the run lists has the metric."""
        wanted, self._metric = self._metric, None
        if wanted is None or wanted in metrics:
            return
        known = {*metrics, *self._recorded()}
        if wanted in known:
            return
        names = ", ".join(map(repr, sorted(known)))
        _log.warning(
            "keep.best=%r: no step of run %r has this metric, nor has step %d: %s; until one has"
            " it, none stays for being the best, and what no other rule keeps leaves the list",
            wanted, self._run, step,
            f"the metrics are {names}" if known else "they have none, pass metrics= to step()",
        )  # fmt: skip

    def _recorded(self) -> set[str]:
        try:
            return {name for commit in self._store.lineage(self._run) for name in commit.metrics}
        except DeltackptError:  # there is none, or the save will say what is wrong
            return set()
