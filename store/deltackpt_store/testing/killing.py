"""Killing a process at a chosen file call, for testing what survives a SIGKILL there."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deltackpt_store.fileio import FileIO
from deltackpt_store.testing.failing import CALLS, Intercepting

Tell = Callable[[bytes], None]
Operation = Callable[[FileIO, Tell], None]

TOLD_BYTES = 32
"""Length of what an operation reports at once."""


class KillingIO(Intercepting):
    """Real files; the process is killed (SIGKILL) when it comes to call `kill_at` of those named in
    `calls`, from 1.

    A write that is met has put half of its bytes into the file. Nothing is synced: a kill takes no
    page cache away, and the calls are counted all the same. One thread.
    """

    def __init__(self, kill_at: int, calls: Sequence[str] = CALLS) -> None:
        super().__init__()
        self.left = kill_at
        self.calls = frozenset(calls)

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in self.calls:
            return
        self.left -= 1
        if self.left:
            return
        if name == "write":
            handle, buffers, offset = arguments
            data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
            os.pwrite(handle, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)

    def sync(self, handle: int) -> None:
        self.before("sync", (handle,))

    def sync_directory(self, path: str) -> None:
        self.before("sync_directory", (path,))


class Death(NamedTuple):
    """How an operation ended: whether the kill came before its end, and what it had told."""

    killed: bool
    told: list[bytes]


def killed_at(operation: Operation, kill_at: int, *, calls: Sequence[str] = CALLS) -> Death:
    """Run `operation(io, tell)` in a forked child that is killed at its file call `kill_at`.

    With `calls` only those count. `CHANGES` leaves nothing out: killed at any other call, a process
    leaves the same files as at the next one of these. What the child tells (pieces of `TOLD_BYTES`
    each) before its death comes back. Call it in a process without other threads. AssertionError
    when the child fails by itself.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(reading)
            operation(KillingIO(kill_at, calls), lambda told: _tell(writing, told))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the operation failed before call {kill_at}"
    pieces = [told[i : i + TOLD_BYTES] for i in range(0, len(told), TOLD_BYTES)]
    return Death(status != 0, pieces)


def _tell(descriptor: int, told: bytes) -> None:
    os.write(descriptor, told)
