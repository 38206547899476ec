"""Helper processes of the writer, for encoding on several cores: Python runs on one at a time.

They are forked off before the writer has threads, locks or files of a store, and share with it the
ring, from which they read, and an arena each, into which they put what they have made. What they
are given are pure functions of bytes (see `encode_helper`): when one of them dies or hangs, the
writer does its share, and goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from deltackpt_store import encode_helper
from deltackpt_store.cores import usable_cores
from deltackpt_store.encode_helper import (
    MESSAGE_BYTES,
    Failed,
    Job,
    Message,
    Piece,
    Reply,
    payload_bytes,
)
from deltackpt_store.ring import Ring

_R_co = TypeVar("_R_co", covariant=True)
_R = TypeVar("_R")

_log = logging.getLogger("deltackpt.writer")

MOST_CORES = 4

PATIENCE_SECONDS = 10.0
"""A helper that has jobs and says nothing for so long is given up; a job takes a millisecond."""

_AHEAD = 2  # messages that a helper has at a time, so that it need not wait for the next
_AREAS = 2 * _AHEAD  # parts of its arena: as many again are being dealt with
_END_SECONDS = 1.0


class Task(Protocol[_R_co]):
    """Something that can be done here, and perhaps by a helper, with the same result."""

    def job(self, crew: Crew) -> Job | None:
        """What to ask a helper for; None when only this process can do it."""
        ...

    def here(self) -> _R_co:
        """Do it in this process."""
        ...

    def done(self, reply: Any, payload: memoryview) -> _R_co:
        """The result from a helper's reply to `job`. It may refer to `payload`, which stays as it
        is until the next result is asked for."""
        ...


class _Area:
    """A part of a helper's arena, for the payloads of one message. It goes back to the `free` ones
    when nothing is lent of it any more."""

    def __init__(self, number: int, memory: memoryview, free: deque[_Area]) -> None:
        self.number = number
        self.memory = memory
        self._free = free
        self._lent = 0
        free.append(self)

    def lend(self, count: int) -> None:
        self._lent = count
        if not count:
            self._free.append(self)

    def give_back(self) -> None:
        self.lend(self._lent - 1)


class Run(Generic[_R]):
    """Tasks to be done, by a team of helpers and by this process; see `Crew.start`."""

    def __init__(self, tasks: Sequence[Task[_R]], team: list[_Helper]) -> None:
        self.tasks = tasks
        self.team = team
        self.results: dict[int, tuple[_R, _Area | None]] = {}  # and what they are lent of
        self.shared = deque(range(len(tasks)))  # nobody has begun with these
        self.own = deque[int]()  # left to this process
        self.given_up = False

    def take(self, number: int) -> Iterator[_R]:
        """The result of one task, which must be there."""
        result, area = self.results.pop(number)
        try:
            yield result
        finally:
            if area is not None:
                area.give_back()

    def give_up(self) -> None:
        """Nobody asks for results any more."""
        self.given_up = True
        for _, area in self.results.values():
            if area is not None:
                area.give_back()
        self.results.clear()


class _Given(NamedTuple):
    """What a message asks a helper for, and where payloads go."""

    run: Run[Any]
    tasks: list[int]
    area: _Area


class _Helper:
    """One helper as the writer sees it."""

    def __init__(self, pid: int, sock: socket.socket, arena: memoryview, area: int) -> None:
        self.pid = pid
        self.sock = sock
        self.given: deque[_Given] = deque()
        self.areas = deque[_Area]()
        """Those that are free."""
        for number in range(_AREAS):
            _Area(number, arena[number * area : (number + 1) * area], self.areas)
        self._room = memoryview(bytearray(MESSAGE_BYTES))

    def give(self, message: Message, given: _Given) -> None:
        """OSError when it is not there any more."""
        self.given.append(given)
        data = message.encoded(given.area.number)
        self.sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def replies(self) -> tuple[_Given, list[Reply]] | None:
        """The next replies, and to what; None when there are none yet.

        Raises OSError and msgspec's errors when there will be no more.
        """
        try:
            size = self.sock.recv_into(self._room, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not size:
            raise ConnectionError("it has ended")
        replies = encode_helper.decode_replies(self._room[:size])
        return self.given.popleft(), replies

    def kill(self) -> None:
        self.sock.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Crew:
    """The helpers of one writer process. Used by one thread."""

    def __init__(self) -> None:
        """A crew of none: see `hire`."""
        self._helpers: list[_Helper] = []
        self._later: Run[Any] | None = None  # to be begun when the present one has all been given
        self._gone: list[int] = []  # killed, perhaps not reaped yet
        self._ring_at = self._ring_bytes = 0

    @classmethod
    def hire(cls, ring: Ring, count: int | None = None) -> Crew:
        """Fork `count` helpers: by default one for each further core, three at most.

        The process must have no thread yet but the caller's. Fewer are made, or none, where the
        system gives no more or cannot do it.
        """
        crew = cls()
        crew._ring_at = _address(ring.view(0))
        crew._ring_bytes = ring.slots * ring.slot_bytes
        if count is None:
            count = min(MOST_CORES, usable_cores()) - 1
        if sys.platform != "linux":
            count = 0
        try:
            for _ in range(count):
                crew._hire_one(ring)
        except OSError as error:
            _log.info("only %d processes to help with encoding: %s", len(crew._helpers), error)
        return crew

    def _hire_one(self, ring: Ring) -> None:
        area = ring.slot_bytes  # no chunk is larger; it takes memory where it is used
        arena = memoryview(mmap.mmap(-1, _AREAS * area))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        writer = os.getpid()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                encode_helper.run(theirs, ring, arena, area, writer)
        self._helpers.append(_Helper(pid, ours, arena, area))

    def piece(self, raw: memoryview) -> Piece | None:
        """Where in the ring the bytes lie; None when they do not."""
        at = _address(raw) - self._ring_at
        return (at, len(raw)) if 0 <= at <= self._ring_bytes - len(raw) else None

    def start(self, tasks: Sequence[Task[_R]], *, alone: bool, ahead: bool = False) -> Run[_R]:
        """Tasks to be done, by helpers too unless `alone`.

        `ahead`: this process has something else to do first. Helpers begin with these when there
        is nothing of that left for them.
        """
        run = Run(tasks, [] if alone else list(self._helpers))
        if ahead:
            self._later = run
        return run

    def results(self, run: Run[_R]) -> Iterator[_R]:
        """Do all tasks and give the results in order.

        Helpers do the first ones, so that the caller can deal with a result, which only it can do,
        while there are still others for them; this process does the last ones when it would have
        to wait. Raises what a task raises here; what goes wrong in a helper is done here instead.
        """
        if run is self._later:
            self._later = None
        try:
            for number in range(len(run.tasks)):
                self._exchange(run)
                while number not in run.results:
                    if run.own:
                        self._do(run, run.own.popleft())
                    elif run.shared:
                        given = run.shared[0] != number
                        self._do(run, run.shared.pop() if given else run.shared.popleft())
                    else:
                        self._wait(run)
                    self._exchange(run)
                yield from run.take(number)
        finally:
            run.give_up()

    def _do(self, run: Run[Any], task: int) -> None:
        run.results[task] = run.tasks[task].here(), None

    def _exchange(self, run: Run[Any]) -> None:
        """Take from helpers what they have done by now, and give them more."""
        for helper in list(run.team):
            self._collect(helper)
        if run.team and run.shared:
            self._hand_out(run)
        elif self._later is not None and self._later.shared:
            self._hand_out(self._later, spare=0)

    def _hand_out(self, run: Run[Any], spare: int = 1) -> None:
        """Give helpers the tasks that come first, but for `spare`, which are left to this process.

        Many at first, then fewer, so that all are ready at about the same time.
        """
        run.team = [helper for helper in run.team if helper in self._helpers]
        workers = len(run.team) + 1
        for ahead in range(_AHEAD):
            for helper in list(run.team):
                room = helper.areas and len(helper.given) <= ahead
                if room and len(run.shared) > (workers if ahead else spare):
                    self._give(run, helper, max(1, len(run.shared) // (2 * workers)))

    def _give(self, run: Run[Any], helper: _Helper, count: int) -> None:
        """Give a helper the first tasks, `count` of them if they go into one message."""
        area = helper.areas.popleft()
        given, message = _Given(run, [], area), Message(len(area.memory))
        for _ in range(count):
            task = run.shared.popleft()
            job = run.tasks[task].job(self)
            if job is None:
                run.own.append(task)
            elif message.add(job):
                given.tasks.append(task)
            else:
                run.shared.appendleft(task)
                break
        if not given.tasks:
            helper.areas.appendleft(area)
            return
        try:
            helper.give(message, given)
        except OSError as error:
            self._lose(helper, str(error))

    def _wait(self, run: Run[Any]) -> None:
        """Until a helper has replied, or has ended; those that do neither are given up."""
        busy = [helper for helper in run.team if helper.given]
        poll = select.poll()
        for helper in busy:
            poll.register(helper.sock, select.POLLIN)
        for _ in range(2):  # all may have been stopped meanwhile: then a helper needs a moment
            if poll.poll(500 * PATIENCE_SECONDS):
                return
        for helper in busy:
            self._lose(helper, "it does not answer")

    def _collect(self, helper: _Helper) -> None:
        """Take what the helper has done by now."""
        try:
            while helper.given and (found := helper.replies()) is not None:
                (run, tasks, area), replies = found
                payload, lent = area.memory, 0
                for task, reply in zip(tasks, replies, strict=True):
                    if isinstance(reply, Failed):
                        _log.debug("not done by a helper: %s", reply.why)
                        run.own.append(task)
                    elif not run.given_up:
                        size = payload_bytes(reply)
                        result = run.tasks[task].done(reply, payload[:size])
                        run.results[task] = result, area if size else None
                        payload, lent = payload[size:], lent + (size > 0)
                area.lend(lent)
        except (OSError, msgspec.MsgspecError) as error:
            self._lose(helper, str(error))

    def _lose(self, helper: _Helper, why: str) -> None:
        """Go on without a helper: what it has been given is done here."""
        for given in helper.given:
            given.run.own.extend(given.tasks)
        helper.given.clear()
        if helper not in self._helpers:
            return
        self._helpers.remove(helper)
        helper.kill()
        self._gone.append(helper.pid)
        self._gone = [pid for pid in self._gone if not _reaped(pid)]
        _log.warning(
            "a process that helps the writer with encoding is given up (%s); %d are left",
            why, len(self._helpers),
        )  # fmt: skip

    def close(self) -> None:
        """End the helpers: what they have in hand is of no use to anyone."""
        for helper in self._helpers:
            helper.kill()
            self._gone.append(helper.pid)
        self._helpers.clear()
        deadline = time.monotonic() + _END_SECONDS
        while self._gone and time.monotonic() < deadline:
            self._gone = [pid for pid in self._gone if not _reaped(pid)]
            time.sleep(0.001 if self._gone else 0)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]
