"""How many processor cores this process may use without taking them from anyone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_STEP_SECONDS = 0.02


class IdleCores:
    """Cores that were idle lately, together with those that the writer used itself.

    `own` gives the processor time that the writer has used. Looks at ``/proc/stat`` at most every
    20 ms; where there is none, says 1. Used by one thread.
    """

    def __init__(self, most: int, own: Callable[[], float]) -> None:
        self._most = max(1, min(most, len(os.sched_getaffinity(0))))
        self._own = own
        self._seen = (time.monotonic(), _idle_seconds(), own())
        self._cores = 1

    def count(self) -> int:
        """Processes worth running now: 1 on a busy machine, at most `most`."""
        if self._most == 1:
            return 1
        now = time.monotonic()
        before, idle_before, own_before = self._seen
        if now - before < _STEP_SECONDS:
            return self._cores
        idle, own = _idle_seconds(), self._own()
        self._seen = now, idle, own
        if idle is None or idle_before is None:
            return 1
        free = (idle - idle_before + own - own_before) / (now - before)
        self._cores = max(1, min(self._most, round(free)))
        return self._cores


def _idle_seconds() -> float | None:
    """Seconds that all cores together have been idle since the machine started."""
    try:
        with open("/proc/stat", "rb") as file:
            fields = file.readline().split()
        return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
