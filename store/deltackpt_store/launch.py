"""Starting the writer: as a process of its own, or as a thread for notebooks and debugging.

Both run :func:`deltackpt_store.serve.serve` over the same kind of socket and ring. The process
runs `writer` by its file name, in a session of its own: the user's main module is never imported
again, and signals to the trainer's process group do not reach it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import tempfile
import threading
import traceback
from typing import IO, Protocol

from deltackpt_store import child, writer
from deltackpt_store.errors import WriterError
from deltackpt_store.fileio import FileIO
from deltackpt_store.protocol import Channel
from deltackpt_store.ring import Ring

_TAIL_BYTES = 4000
_SCARCE = "raise the limit on open files, processes or memory (ulimit -n, -u, -v)"


class Running(Protocol):
    """A started writer, as its client sees it."""

    pid: int

    def wait(self, timeout: float | None) -> bool:
        """Wait until it has ended; False when `timeout` seconds were not enough."""
        ...

    def bury(self) -> str:
        """Release what it left; returns how it ended and the last words of its error output."""
        ...

    def forget(self) -> None:
        """In a forked child: drop what belongs to the parent, without touching the writer."""
        ...


class WriterProcess:
    """The writer as a child process."""

    def __init__(self, control: socket.socket, memory: int, *, nice: int) -> None:
        """Start it; it inherits `control` and `memory`, the ring's descriptor, and nothing else.

        Raises `WriterError` when the process cannot be started.
        """
        if not child.has_interpreter():
            raise WriterError(
                "there is no Python interpreter to start the writer process with: this program is"
                " frozen or embeds Python",
                hint='use writer="thread"',
            )
        self._stderr = error_file()
        command = child.command(
            "--control-fd", str(control.fileno()), "--ring-fd", str(memory),
            "--parent", str(os.getpid()), "--nice", str(nice),
        )  # fmt: skip
        # Blocked from birth, ignored as soon as the writer runs: no gap in which one could kill it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, writer.IGNORED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr if self._stderr is not None else subprocess.DEVNULL,
                stderr=self._stderr if self._stderr is not None else subprocess.DEVNULL,
                env=child.environment(),
                cwd="/",
                close_fds=True,
                pass_fds=(control.fileno(), memory),
                start_new_session=True,
            )
        except OSError as error:
            if self._stderr is not None:
                self._stderr.close()
            scarce = error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
            raise WriterError(
                f"cannot start the writer process: {error}",
                hint=_SCARCE if scarce else 'use writer="thread"',
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid

    def wait(self, timeout: float | None) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kill it: for one that has nothing to finish."""
        self._process.kill()
        self._process.wait()
        if self._stderr is not None:
            self._stderr.close()

    def bury(self) -> str:
        code = self._process.returncode
        if code is None:
            how = "closed its channel"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        tail = last_words(self._stderr)
        if self._stderr is not None:
            self._stderr.close()
        return f"{how}; its last words: {tail}" if tail else how

    def forget(self) -> None:
        self._process.returncode = 0  # not a child of this process: nothing to reap
        if self._stderr is not None:
            self._stderr.close()


def last_words(stderr: IO[bytes] | None) -> str:
    """The end of what a process has written to its `error_file`."""
    if stderr is None:
        return ""
    with contextlib.suppress(OSError, ValueError):
        size = os.fstat(stderr.fileno()).st_size
        data = os.pread(stderr.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return data.decode("utf-8", "replace").strip()
    return ""


def start_compactions(
    store: str, settings: str, stderr: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """A process of the lowest priority that compacts `store` now and then: see `compact_job`.

    `settings` are its `JobSettings` as JSON. It tells on stdout what it has done, and ends with
    this process. `stderr` takes its last words. OSError when it cannot be started.
    """
    command = child.command(
        "--store", store, "--compact", settings, "--parent", str(os.getpid()), "--nice", "19"
    )
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if stderr is None else stderr,
        env=child.environment(), cwd="/", start_new_session=True,
    )  # fmt: skip


class WriterThread:
    """The writer as a thread of the trainer, over the same socket and ring."""

    def __init__(self, control: socket.socket, ring: Ring, *, io: FileIO | None) -> None:
        self.pid = os.getpid()
        self._control = control
        self._last_words = ""
        self._thread = threading.Thread(
            target=self._run, args=(ring, io), name="deltackpt-writer", daemon=True
        )
        self._thread.start()

    def _run(self, ring: Ring, io: FileIO | None) -> None:
        try:  # what fails here, too, must end the channel, on which the trainer waits
            from deltackpt_store.serve import serve

            serve(Channel(self._control), lambda slots, slot_bytes: ring, io=io)
        except BaseException:
            self._last_words = traceback.format_exc()[-_TAIL_BYTES:]
        finally:
            self._control.close()

    def wait(self, timeout: float | None) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def bury(self) -> str:
        how = "is a thread that ended"
        return f"{how}; its last words: {self._last_words}" if self._last_words else how

    def forget(self) -> None:
        fd = self._control.detach()
        if fd >= 0:
            os.close(fd)


def error_file() -> IO[bytes] | None:
    """An unlinked file for the writer's error output; None where no directory takes one."""
    try:
        return tempfile.TemporaryFile(prefix="deltackpt-writer-")
    except OSError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
