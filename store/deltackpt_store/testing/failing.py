"""File layers that fail or wait, for exercising every storage error at every call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from deltackpt_store.fileio import Buffer, FileIO

CALLS = (
    "create", "write", "sync", "close", "link", "replace", "unlink", "sync_directory", "mkdir",
    "rmdir", "chmod", "lock", "open", "size", "read_into", "list", "exists", "free_bytes",
)  # fmt: skip
"""Names of all operations of a file layer."""
CHANGES = (
    "create", "write", "link", "replace", "unlink", "mkdir", "rmdir", "chmod", "lock",
)  # fmt: skip
"""Names of those that may leave other files or names than they found."""


class Intercepting(FileIO):
    """Runs `before(name)` ahead of every operation of the layer it wraps."""

    def __init__(self, inner: FileIO | None = None) -> None:
        self._inner = inner or FileIO()

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        """What happens ahead of the operation; subclasses say. What it raises comes out of it."""
        raise NotImplementedError

    def create(self, path: str, mode: int = 0o666) -> int:
        self.before("create", (path,))
        return self._inner.create(path, mode)

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.before("write", (handle, buffers, offset))
        return self._inner.write(handle, buffers, offset)

    def sync(self, handle: int) -> None:
        self.before("sync", (handle,))
        self._inner.sync(handle)

    def close(self, handle: int) -> None:
        try:
            self.before("close", (handle,))
        finally:
            self._inner.close(handle)  # the descriptor is gone even when close reports an error

    def link(self, source: str, target: str) -> None:
        self.before("link", (source, target))
        self._inner.link(source, target)

    def replace(self, source: str, target: str) -> None:
        self.before("replace", (source, target))
        self._inner.replace(source, target)

    def unlink(self, path: str) -> None:
        self.before("unlink", (path,))
        self._inner.unlink(path)

    def sync_directory(self, path: str) -> None:
        self.before("sync_directory", (path,))
        self._inner.sync_directory(path)

    def mkdir(self, path: str) -> None:
        self.before("mkdir", (path,))
        self._inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        self.before("rmdir", (path,))
        self._inner.rmdir(path)

    def chmod(self, path: str, mode: int) -> None:
        self.before("chmod", (path,))
        self._inner.chmod(path, mode)

    def lock(self, path: str, *, create: bool = False) -> int:
        self.before("lock", (path,))
        return self._inner.lock(path, create=create)

    def open(self, path: str) -> int:
        self.before("open", (path,))
        return self._inner.open(path)

    def size(self, handle: int) -> int:
        self.before("size", (handle,))
        return self._inner.size(handle)

    def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self.before("read_into", (handle, buffers, offset))
        return self._inner.read_into(handle, buffers, offset)

    def list(self, path: str) -> list[str]:
        self.before("list", (path,))
        return self._inner.list(path)

    def exists(self, path: str) -> bool:
        self.before("exists", (path,))
        return self._inner.exists(path)

    def free_bytes(self, path: str) -> int:
        self.before("free_bytes", (path,))
        return self._inner.free_bytes(path)


class FailingIO(Intercepting):
    """Raises ``OSError(number)`` at call `fail_at` (counted from 1 over `calls`).

    `persistent` keeps failing from then on, as a full disk does; otherwise once. `count` tells
    how many calls there were, so that a test can run ``for n in 1..count``. Thread-safe.
    """

    def __init__(
        self,
        inner: FileIO | None = None,
        *,
        number: int,
        fail_at: int | None = None,
        persistent: bool = False,
        calls: Sequence[str] = CALLS,
    ) -> None:
        super().__init__(inner)
        self.number = number
        self.fail_at = fail_at
        self.persistent = persistent
        self.calls = frozenset(calls)
        self.count = 0
        self.failed = 0
        self._lock = threading.Lock()

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in self.calls:
            return
        with self._lock:
            self.count += 1
            due = self.fail_at is not None and (
                self.count >= self.fail_at if self.persistent else self.count == self.fail_at
            )
            self.failed += due
        if due:
            raise OSError(self.number, os.strerror(self.number), str(arguments[0]))


class ShortIO(FileIO):
    """Real files whose writes accept only part of what they are given, as POSIX allows."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
        return os.pwrite(handle, memoryview(views[0])[: self._limit], offset)


class SlowIO(Intercepting):
    """Waits `seconds` before each of `calls`."""

    def __init__(
        self,
        inner: FileIO | None = None,
        *,
        seconds: float = 0.0,
        calls: Sequence[str] = ("sync",),
    ) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._calls = frozenset(calls)

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in self._calls and self._seconds:
            time.sleep(self._seconds)
