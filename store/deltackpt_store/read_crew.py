"""Helper processes of a large read, as the process that reads sees them.

Decoding takes many short calls, between which the threads of one interpreter wait for each other:
two are hardly quicker than one. Helpers (`read_helper`) decode into shared memory and prove what
they have decoded; here a thread for each gives it jobs and copies its results to where they belong.
What a helper does not do, because it died, hangs or failed, is done here.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from deltackpt_store import child
from deltackpt_store.copies import copy_bytes
from deltackpt_store.cores import usable_cores
from deltackpt_store.descriptors import socket_pair
from deltackpt_store.errors import WriterError
from deltackpt_store.fetch import Request
from deltackpt_store.fileio import FileIO
from deltackpt_store.frames import FrameChannel, frame
from deltackpt_store.pack_set import PackSet
from deltackpt_store.ring import memory_file, set_size

_log = logging.getLogger("deltackpt.store")

MOST_CORES = 4

CREW_BYTES = 384 * 1024 * 1024
"""Bytes to decode from which on helpers are worth the fifth of a second that they take to start."""

PATIENCE_SECONDS = 10.0
"""A helper that says nothing for so long is given up; a job takes some hundredths of a second."""

AREA_BYTES = 8 * 1024 * 1024
"""Bytes of the chunks of one job at most."""
AREAS = 2
"""In the shared memory, used by jobs in turn: one is filled while another is copied."""

READY, DONE, FAILED = b"ready", b"done", b"failed"
"""Answers to the start, and to jobs. Why one failed shows when it is done here."""


class Start(msgspec.Struct, array_like=True, frozen=True):
    """The store to read from; `hints` as of a `ChunkReader`."""

    root: bytes
    uuid: bytes
    hints: tuple[str, ...]


Job = list[tuple[bytes, int]]
"""Ids and lengths of chunks, which go into one area, one after the other."""

_Part = TypeVar("_Part")


class Helper:
    """One helper, for one thread."""

    def __init__(self, packs: PackSet, hints: Sequence[str]) -> None:
        """Start it. OSError when that cannot be done."""
        self.ready = False
        """Whether it has started."""
        memory = memory_file()
        try:
            set_size(memory, AREAS * AREA_BYTES)
            shared = memoryview(mmap.mmap(memory, AREAS * AREA_BYTES))
            ours, theirs = socket_pair()
            with theirs:
                self._channel = FrameChannel(ours)
                try:
                    self._process = _start(theirs, memory)
                except BaseException:
                    self._channel.close()
                    raise
        finally:
            os.close(memory)
        self._areas = deque(shared[i * AREA_BYTES :][:AREA_BYTES] for i in range(AREAS))
        self._start = Start(os.fsencode(os.path.abspath(packs.root)), packs.uuid, tuple(hints))

    def lead(
        self,
        take: Callable[[int], _Part | None],
        requests: Callable[[_Part], list[Request]],
        back: Callable[[_Part], None],
    ) -> None:
        """Have done what `take` gives, for as long as it does: parts of so many bytes at most.

        `requests` are those of a part. Parts that are not done go `back`.
        """
        given: deque[_Part] = deque()
        try:
            self._channel.send(frame(msgspec.msgpack.encode(self._start)))
            self.ready = self._answer() == READY
            while self.ready:
                while len(given) < AREAS and (part := take(AREA_BYTES)) is not None:
                    given.append(part)
                    job = [(chunk_id, len(dest)) for chunk_id, dest in requests(part)]
                    self._channel.send(frame(msgspec.msgpack.encode(job)))
                if not given:
                    break
                if self._answer() == DONE:
                    _copy(self._areas[0], requests(given[0]))
                    given.popleft()
                else:
                    back(given.popleft())
                self._areas.rotate(-1)
        except (OSError, WriterError) as error:
            _log.info("a process that helps with reading is given up: %s", error)
        finally:
            for part in given:
                back(part)
            self._channel.close()

    def _answer(self) -> bytes:
        if not self._channel.ready(PATIENCE_SECONDS):
            raise TimeoutError("it does not answer")
        answer = self._channel.receive()
        if answer is None:
            raise ConnectionError("it has ended")
        return bytes(answer)

    def end(self) -> None:
        """End it; `lead` returns soon. Idempotent."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let go of the channel, once nobody is in `lead`. Idempotent."""
        self._channel.close()


def hire(packs: PackSet, hints: Sequence[str]) -> list[Helper]:
    """A helper for each further core, three at most; fewer, or none, where they cannot start."""
    helpers: list[Helper] = []
    if sys.platform == "linux" and child.has_interpreter() and type(packs.io) is FileIO:
        try:
            for _ in range(min(MOST_CORES, usable_cores()) - 1):
                helpers.append(Helper(packs, hints))
        except OSError as error:
            _log.info("only %d processes help with reading: %s", len(helpers), error)
    return helpers


def _start(control: socket.socket, memory: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        child.command("--read", str(control.fileno()), "--memory", str(memory)),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=child.environment(), cwd="/", pass_fds=(control.fileno(), memory),
        start_new_session=True,
    )  # fmt: skip


def _copy(area: memoryview, requests: list[Request]) -> None:
    at = 0
    for _, dest in requests:
        data = area[at : at + len(dest)]
        at += len(dest)
        copy_bytes(dest, data)
