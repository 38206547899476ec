"""One background thread that runs I/O jobs in order, so that hashing and writing overlap."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class IoThread:
    """Runs jobs one after the other; the first failure makes it skip all jobs until `reset`.

    Owned by one caller thread. At most `depth` jobs wait; `submit` blocks beyond that, which bounds
    the memory their buffers hold. The thread starts with the first job and is a daemon: a process
    that ends without `drain` loses what was not drained, and is not kept alive by it. Where no
    thread can be started (interpreter shutting down) jobs run in the caller.
    """

    def __init__(self, name: str, depth: int = 2) -> None:
        self._name = name
        self._depth = depth
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.busy_seconds = 0.0
        """Wall time spent in jobs so far."""

    def submit(self, job: Job) -> None:
        """Queue `job`; once a job has failed, do nothing (the failure is raised by `drain`)."""
        if self._thread is None and not self._start():
            self._run(job)
            return
        with self._changed:
            while len(self._jobs) >= self._depth and self.error is None:
                self._changed.wait()
            if self.error is None:
                self._jobs.append(job)
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until no job is queued or running; raise the error of the first that failed."""
        with self._changed:
            while self._jobs or self._busy:
                self._changed.wait()
        if self.error is not None:
            raise self.error

    def reset(self) -> None:
        """Drop queued jobs, wait for the running one, and forget a failure."""
        with self._changed:
            self._jobs.clear()
            while self._busy:
                self._changed.wait()
            self.error = None

    def stop(self) -> None:
        """`reset`, then end the thread."""
        self.reset()
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            thread.join()
            self._stopping = False

    def _start(self) -> bool:
        thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                job = self._jobs.popleft()
                self._busy = True
                self._changed.notify_all()
            self._run(job)
            del job  # its buffers may be large: do not hold them while idle
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _run(self, job: Job) -> None:
        if self.error is None:
            began = time.perf_counter()
            try:
                job()
            except BaseException as error:  # handed to the owner by drain
                self.error = error
                with self._changed:
                    self._jobs.clear()
                    self._changed.notify_all()
            finally:
                self.busy_seconds += time.perf_counter() - began
