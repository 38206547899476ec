"""Random operations on one store over a simulated disk whose power fails at random calls.

`Voyage(seed)` is determined by its seed: operations, file calls, power cuts and what each of them
leaves. A plain model knows what must be there: every acknowledged step that no rule has let go.
"""

from __future__ import annotations

import errno
import itertools
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from authors import Author, Session, everything_in
from deltackpt_store.compact import compact
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import make_directories
from deltackpt_store.gc import collect
from deltackpt_store.io_thread import IoThread
from deltackpt_store.mark import mark
from deltackpt_store.retention import Keep, apply
from deltackpt_store.roots import read_roots
from deltackpt_store.store import Store
from deltackpt_store.testing import SimulatedDisk
from deltackpt_store.testing.failing import Intercepting
from deltackpt_store.verify import verify

PATH = "/disk/store"
RUNS = ("a", "b", "c")
WORDS = ("red", "green", "blue", "cyan", "red~1", "red~2", "green~1", "blue~9")


class PowerCut(BaseException):
    """The machine is off: nothing handles it, and nothing comes after it."""


class Trouble(Intercepting):
    """A disk that fails at call `cut_at` for good, or whose call `fail_at` reports an error."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__(disk)
        self.cut_at = self.fail_at = 0
        self.calls = 0
        self.failed = False

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls += 1
        if self.cut_at and self.calls >= self.cut_at:
            raise PowerCut
        if self.calls == self.fail_at:
            self.failed = True
            raise OSError(errno.EIO, "this call failed", str(arguments[0]))


@contextmanager
def repeatable(seed: str) -> Iterator[None]:
    """Random names, nonces and threads of the store are the same for equal seeds."""
    chance = random.Random(seed)
    real = secrets.token_bytes, secrets.token_hex, IoThread._start

    def token_bytes(size: int | None = None) -> bytes:
        return chance.randbytes(size or 32)

    def token_hex(size: int | None = None) -> str:
        return token_bytes(size).hex()

    secrets.token_bytes, secrets.token_hex = token_bytes, token_hex
    IoThread._start = lambda self: False
    try:
        yield
    finally:
        secrets.token_bytes, secrets.token_hex, IoThread._start = real


class Voyage:
    """One store's life. `log` tells each operation and how it ended; `figures` count."""

    def __init__(self, seed: str, _: str = "", operations: int = 40) -> None:
        self.seed = seed
        self.log: list[str] = []
        self.figures = {"operations": 0, "power cuts": 0, "failing calls": 0}
        self._operations = operations
        self._chance = random.Random(f"voyage {seed}")
        self._names = itertools.count(1)
        self._must: dict[str, list[bytes]] = {run: [] for run in RUNS}
        self._pins: dict[str, bytes] = {}
        self._step = 0

    def go(self) -> None:
        """AssertionError when a promise was broken; the log's last line is where."""
        with repeatable(self.seed):
            self._disk = SimulatedDisk()
            make_directories(self._disk, "/disk")
            self._disk.sync_directory("/")
            Store.create(PATH, io=self._disk)
            for _ in range(self._operations):
                self._one()
            self._settle()

    # operations ----------------------------------------------------------------------------

    def _one(self) -> None:
        chance = self._chance
        name, weight = zip(*self._weights().items(), strict=True)
        chosen = chance.choices(name, weight)[0]
        operation: Callable[[Store], str] = getattr(self, f"_{chosen}")
        self._io = io = Trouble(self._disk)
        fate = chance.random()
        if fate < 0.35:
            io.cut_at = chance.randrange(1, 160)
        elif fate < 0.5:
            io.fail_at = chance.randrange(1, 160)
        self.figures["operations"] += 1
        self.log.append(f"{chosen} (cut at {io.cut_at}, failure at {io.fail_at})")
        try:
            self.log[-1] += ": " + operation(Store.open(PATH, io=io))
        except PowerCut:
            self._restart()
        except (DeltackptError, OSError) as error:
            self.log[-1] += f": {type(error).__name__}"
            if not io.failed:
                raise
        self.figures["failing calls"] += io.failed
        self._disk.end_processes()
        self._check()

    @staticmethod
    def _weights() -> dict[str, int]:
        return {"save": 6, "session": 4, "abandon": 2, "retain": 3, "pin": 1, "unpin": 1,
                "collect": 4, "compact": 2}  # fmt: skip

    def _words(self) -> list[str]:
        return [*self._chance.sample(WORDS, self._chance.randrange(1, 5)), f"{self._step}"]

    def _author(self, store: Store) -> Author:
        author = Author(store, f"{next(self._names)}", codec=self._chance.choice(["none", "small"]))
        author.run = self._chance.choice(RUNS)
        if author.run in store.runs() and store.numbers(author.run):
            author.parent = store.head(author.run)
        return author

    def _save(self, store: Store) -> str:
        self._step += 1
        words = self._words()
        author = self._author(store)
        try:
            commit = author.save(self._step, words)
        finally:
            self._close(author)
        self._must[author.run].append(commit.digest)
        return f"{author.run}@{self._step} {words}"

    def _session(self, store: Store) -> str:
        """A training that saves thrice and lets all but two steps go."""
        run = self._chance.choice(RUNS)
        session = Session(store, run, self._io, name=f"{next(self._names)}", keep=Keep(last=2))
        saved: list[int] = []
        try:
            for _ in range(3):
                self._step += 1
                save = session.begin(self._step, self._words())
                self._may_go(run, 1)
                report = session.finish(save)
                if report is None:
                    break
                self._must[run].append(report.digest)
                saved.append(self._step)
                session.heed()
        finally:
            self._close(session)
        return f"{run} {saved}"

    def _abandon(self, store: Store) -> str:
        self._step += 1
        author = self._author(store)
        try:
            author.prepare(self._words())
        finally:
            self._close(author)
        return author.run

    def _retain(self, store: Store) -> str:
        run, last = self._chance.choice(RUNS), self._chance.randrange(1, 4)
        if run not in store.runs() or not store.numbers(run):
            return f"nothing in {run}"
        self._may_go(run, last)
        return f"{run}: {len(apply(store, run, Keep(last=last)).retired)} retired"

    def _may_go(self, run: str, last: int) -> None:
        """From here on a rule lets go of all but the newest so many steps that are listed."""
        store = Store.open(PATH, io=self._disk)
        listed = store.commits(run) if run in store.runs() else []
        stays = {commit.digest for commit in listed[-last:]}
        self._must[run] = [digest for digest in self._must[run] if digest in stays]

    def _pin(self, store: Store) -> str:
        run = self._chance.choice(RUNS)
        if run not in store.runs() or not store.numbers(run):
            return f"nothing in {run}"
        name, commit = f"pin{next(self._names)}", store.head(run)
        store.pin(name, commit)
        self._pins[name] = commit.digest
        return f"{run}@{commit.step} as {name}"

    def _unpin(self, store: Store) -> str:
        if not self._pins:
            return "nothing"
        name = self._chance.choice(sorted(self._pins))
        del self._pins[name]
        store.unpin(name)
        return name

    def _collect(self, store: Store) -> str:
        return f"{len(collect(store, timeout=0).packs)} packs went"

    def _compact(self, store: Store) -> str:
        return f"{compact(store, timeout=0).chunks} chunks written"

    def _close(self, writer: Author | Session) -> None:
        """As the end of a process; after a power cut there is nothing left to end."""
        if not self._io.cut_at or self._io.calls < self._io.cut_at:
            writer.close()

    # power cuts and checks -----------------------------------------------------------------

    def _restart(self) -> None:
        self.figures["power cuts"] += 1
        states = list(self._disk.crash_states(start=self._disk.operations, random_states=12))
        state = self._chance.choice(states)
        self._disk = state.disk()
        self.log[-1] += f": power cut, {state}"

    def _check(self) -> None:
        found = everything_in(Store.open(PATH, io=self._disk), self.log[-1])
        must = {digest for digests in self._must.values() for digest in digests}
        must |= set(self._pins.values())
        assert must <= found, f"{len(must - found)} acknowledged steps are gone"

    def _settle(self) -> None:
        """In the end all is sound, and nothing is left that nothing needs."""
        store = Store.open(PATH, io=self._disk)
        collect(store, timeout=0)
        report = verify(Store.open(PATH, io=self._disk), level="chunks")
        assert report.ok, report.findings
        marking = mark(store, read_roots(store))
        assert marking.keeping() == set(marking.catalogue.names)
        self._check()
