"""Limiting how many bytes a second are read and written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from deltackpt_store.errors import InvalidInputError
from deltackpt_store.fileio import Buffer, FileIO

BURST_SECONDS = 0.25
_PASSED_ON = (
    "create", "sync", "close", "link", "replace", "unlink", "sync_directory", "mkdir", "chmod",
    "rmdir", "lock", "open", "size", "list", "exists", "free_bytes",
)  # fmt: skip


class TokenBucket:
    """Lets `rate` bytes a second pass on average, and a quarter of a second's worth at once.

    Thread-safe. `clock` (seconds) and `sleep` are replaced in tests.
    """

    def __init__(
        self,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < rate < float("inf"):
            raise InvalidInputError(
                f"a rate must be a positive number of bytes per second, not {rate!r}",
                option="max_rate",
            )
        self.rate = float(rate)
        self.taken = 0
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()  # when what was taken so far will have been paid for

    def take(self, count: int) -> None:
        """Account for `count` bytes; waits as long as the rate demands."""
        with self._lock:
            now = self._clock()
            self.taken += count
            self._free_at = max(self._free_at, now - BURST_SECONDS) + count / self.rate
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)


class ThrottledIO(FileIO):
    """A file layer whose reads and writes pass through a bucket."""

    def __init__(self, inner: FileIO, bucket: TokenBucket) -> None:
        self._inner = inner
        self._bucket = bucket
        for name in _PASSED_ON:
            setattr(self, name, getattr(inner, name))

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._bucket.take(sum(len(memoryview(b).cast("B")) for b in buffers))
        return self._inner.write(handle, buffers, offset)

    def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        count = self._inner.read_into(handle, buffers, offset)
        self._bucket.take(count)
        return count
