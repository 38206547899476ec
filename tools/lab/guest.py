"""A user-mode Linux kernel on this machine's own root (read-only), killed whenever one likes.

Killing it is a kernel crash: what the guest's kernel had not written to its disk image is lost.
What it had written is safe, even from the host's point of view, as the host goes on; only the
power cut of the disk itself is not modelled here (see `block_replay`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PREFIX = "@lab "
BOOT_SECONDS = 240.0

# The kernel must not be the first process of its namespace: it relies on signals that the first
# one does not get. With --kill-child all of the namespace dies as one.
_START = 'linux.uml "$@" </dev/null & wait $!'

Message = dict[str, Any]


def python(module: str, config: object) -> str:
    """The line of a job that runs ``python -m module`` on `config`."""
    where = f"{ROOT}:{ROOT}/store:{ROOT}/tools"
    text = json.dumps(config).replace("'", "'\\''")
    return f"PYTHONPATH={where} {sys.executable} -m {module} '{text}'"


class GuestError(Exception):
    """The guest did not do what every trial relies on; its last lines are in the message."""


class Guest:
    """One boot. Messages are the lines of its console that begin with `PREFIX`, as JSON."""

    def __init__(
        self, work: Path, job: Sequence[str], disks: Sequence[Path], *, memory: str = "512M"
    ) -> None:
        """Start the kernel with `disks` as /dev/ubda, /dev/ubdb, ... and `job` as its only job."""
        self.share = work / f"share-{secrets.token_hex(4)}"
        self.share.mkdir()
        (self.share / "job.sh").write_text("\n".join(job) + "\n")
        self.lines: list[str] = []
        self._messages: queue.Queue[Message | None] = queue.Queue()
        self._process = subprocess.Popen(
            [
                "unshare", "--pid", "--fork", "--kill-child", "sh", "-c", _START, "sh",
                f"mem={memory}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
                "con=null", "con0=null,fd:1", f"init={HERE / 'boot.sh'}", "quiet",
                f"umid=lab-{self.share.name}", f"uml_dir={work}", f"lab_share={self.share}",
                *(f"ubd{letter}={disk}" for letter, disk in zip("abcd", disks, strict=False)),
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env={**os.environ, "TMPDIR": _memory_directory(work)},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip()
            self.lines.append(text)
            if text.startswith(PREFIX):
                with contextlib.suppress(ValueError):  # cut short by the kill
                    self._messages.put(json.loads(text[len(PREFIX) :]))
        self._messages.put(None)  # nobody holds the console any more: all of the guest is gone

    def wait_for(self, wanted: Callable[[Message], bool], timeout: float = BOOT_SECONDS) -> Message:
        """The next message that is `wanted`; the ones before are dropped from the queue."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._error(f"the guest said nothing of the kind for {timeout} s") from None
            if message is None:
                self._messages.put(None)
                raise self._error("the guest ended")
            if wanted(message):
                return message

    def messages(self) -> list[Message]:
        """Everything said so far, in order."""
        found: list[Message] = []
        for line in list(self.lines):
            if line.startswith(PREFIX):
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line[len(PREFIX) :]))
        return found

    def finish(self, timeout: float) -> list[Message]:
        """Wait for a clean end; GuestError when the job failed."""
        last = self.wait_for(lambda message: "exit" in message, timeout)
        self._reader.join(60)
        self.kill()
        if last["exit"]:
            raise self._error(f"the guest's job ended with {last['exit']}")
        return self.messages()

    def kill(self) -> None:
        """The kernel crash. On return nothing of the guest runs, so its disks are free."""
        self._process.kill()
        self._reader.join(60)
        self._process.wait(60)
        if self._reader.is_alive():
            raise self._error("the guest cannot be killed")

    def _error(self, what: str) -> GuestError:
        return GuestError("\n".join([what, *self.lines[-25:]]))


def _memory_directory(work: Path) -> str:
    """Where the guest's memory is kept: in memory if possible, else beside the images."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(work)
