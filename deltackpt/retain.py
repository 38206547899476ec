"""Retention after each durable step, by the store's rules."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from deltackpt_store.store import Store

from .events import Compacted, Observers
from .policy import Keep

_log = logging.getLogger("deltackpt")


class Retention:
    """Applies `keep` to a run; without `keep`, or a store that knows no retention, does nothing."""

    def __init__(self, store: Store, run: str, keep: Keep | None, observers: Observers) -> None:
        self._store, self._run, self._keep, self._observers = store, run, keep, observers
        self._rules: Any = _find_rules() if keep is not None else None

    def __call__(self, step: int) -> None:
        """`step` is durable. The rules return the steps that they took off the list.

        A failure is logged: what should have gone is still there, so nothing is lost.
        """
        if self._rules is None:
            return
        try:
            removed = tuple(self._rules.apply(self._store, self._run, self._keep))
            if removed:
                self._observers(Compacted(self._run, step, removed))
        except Exception as error:
            _log.warning("retention of run %s failed: %s", self._run, error)


def _find_rules() -> Any:
    try:
        return importlib.import_module("deltackpt_store.retention")
    except ModuleNotFoundError:
        _log.warning("this version keeps every step: keep= has no effect yet")
        return None
