"""Running actors (writers, a collector, readers) over one simulated disk in any order.

Each actor is a thread, and exactly one runs at a time. Before every *visible* file operation (one
that another actor could notice) the schedule decides who goes on; `orders` tries many schedules.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deltackpt_store.fileio import TEMPORARY_PREFIX, Buffer, FileIO
from deltackpt_store.testing import SimulatedDisk
from touching import Op, op_of

Body = Callable[["ActorIO"], None]
Choose = Callable[["Run", tuple[int, ...], int | None], int]
"""Decides who goes on: called with the run, who could, and who has been running."""
T = TypeVar("T")


class Killed(BaseException):
    """The actor was killed: not an error that anything may handle."""


@dataclass
class Decision:
    """One point of a run: who could have gone on, who had been running, who was chosen."""

    enabled: tuple[int, ...]
    running: int | None
    chosen: int
    at: int
    """How many visible operations came before."""

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


class GivenUp(Exception):  # noqa: N818 - not an error
    """Raised by a choice: what follows has been looked at before."""


class State:
    """What may matter to the actors from here on, by names that are alike in every run.

    Actors are deterministic: what each does next follows from what its calls have told it so far.
    Names of temporary files, digests and bytes that hold random numbers differ from run to run; a
    file is known by who made it, as which of theirs.
    """

    def __init__(self, actors: int) -> None:
        self._told = [0] * actors  # hash of what each actor was told
        self._made = [0] * actors
        self._files: dict[str, tuple[int, int]] = {}  # by whom, which of theirs
        self._names = 0  # hash of the set of names and what they lead to
        self.handles: dict[int, object] = {}

    def key(self) -> tuple[object, ...]:
        return (*self._told, self._names)

    def tell(self, number: int, what: str, path: str, result: object) -> None:
        self._told[number] = hash((self._told[number], what, self.name(path), result))

    def failed(self, number: int, what: str, path: str, error: BaseException) -> None:
        self.tell(number, what, path, type(error).__name__)

    def name(self, path: str) -> object:
        """A name for the path that is alike in every run."""
        directory, _, name = path.rpartition("/")
        if name.startswith(TEMPORARY_PREFIX):
            rest = name[len(TEMPORARY_PREFIX) + 13 :]
            return directory, rest if len(rest) != 64 else "manifest"
        if directory.endswith("/manifests") and path in self._files:
            return directory, self._files[path]
        return path

    def file(self, path: str) -> object:
        return self._files.get(path, path)

    def make(self, number: int, path: str) -> None:
        self._made[number] += 1
        self._files[path] = (number, self._made[number])
        self._toggle(path)

    def link(self, source: str, target: str) -> None:
        if source in self._files:
            self._files[target] = self._files[source]
        self._toggle(target)

    def remove(self, path: str) -> None:
        self._toggle(path)
        self._files.pop(path, None)

    def touch(self, handle: int, path: str) -> None:
        self.handles[handle] = self.file(path)

    def held(self, path: str) -> None:
        """A lock was taken, or let go."""
        self._names ^= hash((self.name(path), "held"))

    def wrote(self, handle: int, offset: int, size: int) -> None:
        self._names ^= hash((self.handles.get(handle), "wrote", offset, size))

    def _toggle(self, path: str) -> None:
        self._names ^= hash((self.name(path), self.file(path)))


class Run:
    """One execution of all actors. `choose(run, enabled, running)` decides at each point."""

    def __init__(
        self,
        disk: SimulatedDisk,
        actors: Sequence[tuple[str, Body]],
        choose: Choose,
        shared: frozenset[str] | None = None,
    ) -> None:
        """`shared`: only before operations on these paths may the run be preempted (None: all)."""
        self.disk = disk
        self.shared = shared
        self.actors = [Actor(name, body) for name, body in actors]
        self.decisions: list[Decision] = []
        self.log: list[str] = []
        self.state = State(len(actors))
        self.trace: list[Op] = []
        self.cut = False
        """Given up, as what follows has been looked at before."""
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
        if not self.cut:
            self._next(None)
        elif all(other.done for other in self.actors):
            self._over.set()

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
        try:
            chosen = enabled[0] if len(enabled) == 1 else self._choose(self, enabled, running)
        except GivenUp:
            self._give_up(running)
            return None
        if len(enabled) > 1:
            self.decisions.append(Decision(enabled, running, chosen, len(self.trace)))
        if chosen != running:
            self.actors[chosen].go.release()
        return chosen

    def _give_up(self, running: int | None) -> None:
        """Everybody ends where they are."""
        self.cut = True
        for number, actor in enumerate(self.actors):
            actor.killed = True
            if number != running:
                actor.go.release()
        if all(actor.done for actor in self.actors):
            self._over.set()

    def key(self) -> int:
        """Runs with equal keys in which the same actor is running go on alike, whatever came
        before."""
        stand = tuple((actor.done, actor.waiting) for actor in self.actors)
        return hash((stand, self.state.key()))

    def point(self, number: int, what: str, path: str) -> None:
        """The actor `number` is about to do something visible."""
        actor = self.actors[number]
        if actor.killed:
            raise Killed
        op = op_of(number, what, path, makes=what in ("create", "make", "link", "unlink"))
        free = self.shared is None or not self.shared.isdisjoint(op.paths)
        if free and self._next(number) != number and not self.cut:
            actor.go.acquire()
        if actor.killed:
            raise Killed
        self.steps += 1
        self.trace.append(op)
        self.log.append(f"{actor.name} {what} {path}")
        for other in self.actors:  # something may have changed: who waits may look again
            if other is not actor:
                other.waiting = False

    def wait(self, number: int) -> None:
        """The actor waits until somebody else has done something visible."""
        actor = self.actors[number]
        actor.waiting = True
        if self._next(number) != number and not self.cut:
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
        for handle, path in self._locks.items():
            with contextlib.suppress(KeyError):
                self._disk.close(handle)
            self._run.state.held(path)
        self._locks.clear()

    # visible -------------------------------------------------------------------------------

    def _do(self, what: str, path: str, act: Callable[[], T], told: object = None) -> T:
        """Do what was announced, and note what it tells the actor."""
        state = self._run.state
        try:
            result = act()
        except OSError as error:
            state.failed(self._number, what, path, error)
            raise
        state.tell(self._number, what, path, told)
        return result

    def create(self, path: str, mode: int = 0o666) -> int:
        self._visible("create", path)
        handle = self._do("create", path, lambda: self._disk.create(path, mode))
        self._run.state.make(self._number, path)
        self._run.state.touch(handle, path)
        return handle

    def link(self, source: str, target: str) -> None:
        self._visible("link", target)
        self._do("link", target, lambda: self._disk.link(source, target))
        self._run.state.link(source, target)

    def unlink(self, path: str) -> None:
        self._visible("unlink", path)
        self._do("unlink", path, lambda: self._disk.unlink(path))
        self._run.state.remove(path)

    def lock(self, path: str, *, create: bool = False) -> int:
        makes = create and not self._disk.exists(path)
        self._visible("make" if makes else "lock", path)
        fresh = create and not self._disk.exists(path)  # nobody else has made it meanwhile
        handle = self._do("lock", path, lambda: self._disk.lock(path, create=create), fresh)
        self._locks[handle] = path
        if fresh:
            self._run.state.make(self._number, path)
        self._run.state.touch(handle, path)
        self._run.state.held(path)
        return handle

    def open(self, path: str) -> int:
        self._visible("open", path)
        state = self._run.state
        handle = self._do("open", path, lambda: self._disk.open(path), state.file(path))
        state.touch(handle, path)
        return handle

    def list(self, path: str) -> list[str]:
        self._visible("list", path)
        names = self._do("list", path, lambda: self._disk.list(path))
        state = self._run.state
        state.tell(
            self._number, "listed", path, frozenset(state.name(f"{path}/{n}") for n in names)
        )
        return names

    def exists(self, path: str) -> bool:
        self._visible("exists", path)
        there = self._do("exists", path, lambda: self._disk.exists(path))
        self._run.state.tell(self._number, "exists", path, there)
        return there

    # private to the actor, or of no effect while the power stays on -------------------------

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._check()
        size = self._disk.write(handle, buffers, offset)
        self._run.state.wrote(handle, offset, size)
        return size

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
                path = self._locks.pop(handle, None)
                self._disk.close(handle)
                if path is not None:
                    self._run.state.held(path)

    def sync_directory(self, path: str) -> None:
        self._check()
        self._disk.sync_directory(path)

    def mkdir(self, path: str) -> None:
        self._check()
        self._do("mkdir", path, lambda: self._disk.mkdir(path))

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
