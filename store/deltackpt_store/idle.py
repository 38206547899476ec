"""How many processor cores this process may use without taking them from anyone."""

from __future__ import annotations

import os
import time


class IdleCores:
    """Cores that were idle lately, together with those this process used itself.

    Looks at ``/proc/stat`` at most every 50 ms; where there is none, says 1. Used by one thread.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = max(1, min(most, len(os.sched_getaffinity(0))))
        self._seen: tuple[float, float, float] | None = None
        self._cores = 1

    def count(self) -> int:
        """Threads worth running now: 1 on a busy machine, at most `most`."""
        if self._most == 1:
            return 1
        now = time.monotonic()
        if self._seen is not None and now - self._seen[0] < 0.05:
            return self._cores
        idle = _idle_seconds()
        if idle is None:
            return 1
        seen, self._seen = self._seen, (now, idle, time.process_time())
        if seen is not None:
            wall = now - seen[0]
            free = (idle - seen[1] + self._seen[2] - seen[2]) / wall
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
