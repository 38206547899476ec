"""Running actors (writers, a collector, readers) over one simulated disk in every order.

Each actor is a thread, and exactly one runs at a time. Before every *visible* file operation (one
that another actor could notice) the schedule decides who goes on. :func:`explore` tries all
schedules with a bounded number of preemptions, in the manner of CHESS (Musuvathi et al., OSDI
2008): most concurrency bugs need one or two.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltackpt_store.fileio import TEMPORARY_PREFIX, Buffer, FileIO
from deltackpt_store.testing import SimulatedDisk

Body = Callable[["ActorIO"], None]


class Killed(BaseException):
    """The actor was killed: not an error that anything may handle."""


@dataclass
class Decision:
    """One point of a run: who could have gone on, who had been running, who was chosen."""

    enabled: tuple[int, ...]
    running: int | None
    chosen: int

    def preempts(self, choice: int) -> bool:
        return self.running in self.enabled and choice != self.running


@dataclass
class Actor:
    name: str
    body: Body
    done: bool = False
    waiting: bool = False
    killed: bool = False
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Run:
    """One execution of all actors. `choose(run, enabled, running)` decides at each point."""

    def __init__(
        self,
        disk: SimulatedDisk,
        actors: Sequence[tuple[str, Body]],
        choose: Callable[[Run, tuple[int, ...], int | None], int],
        shared: frozenset[str] | None = None,
    ) -> None:
        """`shared`: only before operations on these paths may the run be preempted (None: all)."""
        self.disk = disk
        self.shared = shared
        self.reads: list[set[str]] = [set() for _ in actors]
        self.writes: list[set[str]] = [set() for _ in actors]
        self.actors = [Actor(name, body) for name, body in actors]
        self.decisions: list[Decision] = []
        self.log: list[str] = []
        self._choose = choose
        self._over = threading.Event()
        self.steps = 0

    def go(self) -> None:
        """Run to the end; raises the first error of an actor."""
        threads = [
            threading.Thread(target=self._live, args=(number,), daemon=True)
            for number in range(len(self.actors))
        ]
        for thread in threads:
            thread.start()
        self._next(None)
        assert self._over.wait(120), f"stuck after {self.log[-20:]}"
        for thread in threads:
            thread.join()
        for actor in self.actors:
            if actor.error is not None:
                raise AssertionError(f"{actor.name}: {actor.error!r}") from actor.error

    def _live(self, number: int) -> None:
        actor = self.actors[number]
        actor.go.acquire()
        io = ActorIO(self, number)
        try:
            if not actor.killed:
                actor.body(io)
        except Killed:
            pass
        except BaseException as error:
            actor.error = error
        io.let_go()
        actor.done = True
        self._next(None)

    def _next(self, running: int | None) -> int | None:
        """Choose who goes on and, if it is somebody else, let them."""
        enabled = tuple(i for i, a in enumerate(self.actors) if not a.done and not a.waiting)
        if not enabled:  # everybody who is left waits: let them look again
            for actor in self.actors:
                actor.waiting = False
            enabled = tuple(i for i, a in enumerate(self.actors) if not a.done)
        if not enabled:
            self._over.set()
            return None
        chosen = enabled[0] if len(enabled) == 1 else self._choose(self, enabled, running)
        if len(enabled) > 1:
            self.decisions.append(Decision(enabled, running, chosen))
        if chosen != running:
            self.actors[chosen].go.release()
        return chosen

    def point(self, number: int, what: str, path: str) -> None:
        """The actor `number` is about to do something visible."""
        actor = self.actors[number]
        if actor.killed:
            raise Killed
        directory = path.rpartition("/")[0]
        if what in ("open", "list", "exists"):
            touched = {path}
            self.reads[number].add(path)
        else:
            touched = {path, directory}
            self.writes[number] |= touched
        free = self.shared is None or not self.shared.isdisjoint(touched)
        if free and self._next(number) != number:
            actor.go.acquire()
        if actor.killed:
            raise Killed
        self.steps += 1
        self.log.append(f"{actor.name} {what} {path}")
        for other in self.actors:  # something may have changed: who waits may look again
            if other is not actor:
                other.waiting = False

    def wait(self, number: int) -> None:
        """The actor waits until somebody else has done something visible."""
        actor = self.actors[number]
        actor.waiting = True
        if self._next(number) != number:
            actor.go.acquire()
        actor.waiting = False
        if actor.killed:
            raise Killed


class ActorIO(FileIO):
    """The file layer of one actor. Holds its locks, which end when it is killed."""

    def __init__(self, run: Run, number: int) -> None:
        self._run = run
        self._number = number
        self._disk = run.disk
        self._locks: dict[int, str] = {}  # handle -> path
        self.fault: Callable[[str, str], None] | None = None
        """Called before every visible operation; may raise."""

    def wait(self, _: Any = None) -> bool:
        """For `collect(wait=...)`: let others go on; never gives up."""
        self._run.wait(self._number)
        return True

    def _visible(self, what: str, path: str) -> None:
        if path.rsplit("/", 1)[-1].startswith(TEMPORARY_PREFIX):
            self._check()
            return
        if self.fault is not None:
            self.fault(what, path)
        self._run.point(self._number, what, path)

    def _check(self) -> None:
        if self._run.actors[self._number].killed:
            raise Killed

    def names(self, path: str) -> list[str]:
        """For faults: what lies in a directory, seen by nobody."""
        return self._disk.list(path)

    def do_link(self, source: str, target: str) -> None:
        """For faults: publish, seen by nobody."""
        self._disk.link(source, target)

    def let_go(self) -> None:
        """The process is gone, and with it its locks."""
        for handle in self._locks:
            with contextlib.suppress(KeyError):
                self._disk.close(handle)
        self._locks.clear()

    # visible -------------------------------------------------------------------------------

    def create(self, path: str, mode: int = 0o666) -> int:
        self._visible("create", path)
        return self._disk.create(path, mode)

    def link(self, source: str, target: str) -> None:
        self._visible("link", target)
        self._disk.link(source, target)

    def unlink(self, path: str) -> None:
        self._visible("unlink", path)
        self._disk.unlink(path)

    def lock(self, path: str, *, create: bool = False) -> int:
        self._visible("lock", path)
        handle = self._disk.lock(path, create=create)
        self._locks[handle] = path
        return handle

    def open(self, path: str) -> int:
        self._visible("open", path)
        return self._disk.open(path)

    def list(self, path: str) -> list[str]:
        self._visible("list", path)
        return self._disk.list(path)

    def exists(self, path: str) -> bool:
        self._visible("exists", path)
        return self._disk.exists(path)

    # private to the actor, or of no effect while the power stays on -------------------------

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._check()
        return self._disk.write(handle, buffers, offset)

    def sync(self, handle: int) -> None:
        self._check()
        self._disk.sync(handle)

    def close(self, handle: int) -> None:
        self._check()
        try:
            if handle in self._locks:
                self._visible("unlock", self._locks[handle])
        finally:  # closed, even when that reports an error
            if not self._run.actors[self._number].killed:
                self._locks.pop(handle, None)
                self._disk.close(handle)

    def sync_directory(self, path: str) -> None:
        self._check()
        self._disk.sync_directory(path)

    def mkdir(self, path: str) -> None:
        self._check()
        self._disk.mkdir(path)

    def chmod(self, path: str, mode: int) -> None:
        self._check()

    def rmdir(self, path: str) -> None:
        self._check()
        self._disk.rmdir(path)

    def size(self, handle: int) -> int:
        return self._disk.size(handle)

    def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return self._disk.read_into(handle, buffers, offset)

    def free_bytes(self, path: str) -> int:
        return 0  # nothing is set aside: the reserve has tests of its own


def shared_paths(runs: Sequence[Run]) -> frozenset[str]:
    """Paths that one actor changes and another one looks at or changes, in any of the runs.

    An operation on any other path commutes with everything that the other actors do, so that
    preempting before it shows nothing that preempting elsewhere does not.
    """
    actors = range(len(runs[0].actors))
    reads = [set().union(*(run.reads[i] for run in runs)) for i in actors]
    writes = [set().union(*(run.writes[i] for run in runs)) for i in actors]
    return frozenset(
        path
        for i in actors
        for path in writes[i]
        if any(path in reads[j] or path in writes[j] for j in actors if j != i)
    )


Choose = Callable[[Run, tuple[int, ...], int | None], int]


def explore(start: Callable[[Choose], Run], preemptions: int) -> Iterator[Run]:
    """Every schedule with at most so many preemptions; `start(choose)` makes and runs one.

    Which actor goes on when one has ended or waits is free: all choices are tried.
    """
    stack: list[list[int]] = [[]]
    while stack:
        prefix = stack.pop()

        def choose(
            run: Run, enabled: tuple[int, ...], running: int | None, prefix: list[int] = prefix
        ) -> int:
            at = len(run.decisions)
            if at < len(prefix):
                assert prefix[at] in enabled, "the actors do not behave the same way twice"
                return prefix[at]
            return running if running in enabled else enabled[0]

        run = start(choose)
        yield run
        spent = 0
        for at, decision in enumerate(run.decisions):
            if at >= len(prefix):
                for other in decision.enabled:
                    cost = spent + decision.preempts(other)
                    if other != decision.chosen and cost <= preemptions:
                        stack.append([*(d.chosen for d in run.decisions[:at]), other])
            spent += decision.preempts(decision.chosen)
