"""Waiting that an exception out of a signal handler cannot leave locked.

Ctrl-C, or a handler that raises, interrupts the main thread between any two calls. The methods of
`threading.Condition` and `threading.Event` are written in Python: interrupted where ``__enter__``
returns, the lock is taken and nobody will release it, and every other thread waits for ever.
Here a lock is taken only by ``with`` of a lock made in C, which cannot be interrupted between
taking it and being in the block, and nobody waits while holding it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LONGEST = 1.0  # seconds until a notification that was interrupted is made up for


class Condition:
    """Something to wait for, and the lock of what it depends on. For any thread.

    Take the lock by ``with condition.lock``; it may be taken again by the thread that has it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._bells: list[threading.Lock] = []  # one for each thread that waits, locked until told

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate` holds, which is asked with the lock taken; its last value.

        Call it without the lock. `timeout` in seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            bell = threading.Lock()
            with self.lock:
                if predicate():
                    return True
                bell.acquire()
                self._bells.append(bell)
            left = _LONGEST if deadline is None else min(_LONGEST, deadline - time.monotonic())
            told = left > 0 and bell.acquire(timeout=left)
            if not told:
                with self.lock:
                    if bell in self._bells:
                        self._bells.remove(bell)
                    if deadline is not None and time.monotonic() >= deadline:
                        return predicate()

    def notify_all(self) -> None:
        """Have all who wait look again. Call it with the lock taken."""
        for bell in self._bells:
            if bell.locked():
                bell.release()
        self._bells.clear()
