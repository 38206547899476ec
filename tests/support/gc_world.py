"""Actors around a garbage collection on one simulated disk, for tests of their interleavings."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from authors import Author, Session, check_everything, words_in
from deltackpt_store.fileio import TEMPORARY_PREFIX
from deltackpt_store.gc import collect
from deltackpt_store.io_thread import IoThread
from deltackpt_store.manifest import Commit
from deltackpt_store.mark import mark
from deltackpt_store.protocol import Committed
from deltackpt_store.retention import Keep, retire
from deltackpt_store.roots import read_roots
from deltackpt_store.store import Store
from deltackpt_store.testing import SimulatedDisk
from interleaving import ActorIO, Body, Choose, Run

PATH = "/store"


@pytest.fixture
def one_thread_per_actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packs are written by the actor's own thread, and nothing is logged ten thousand times."""

    def no_thread(_: IoThread) -> bool:
        return False

    monkeypatch.setattr(IoThread, "_start", no_thread)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class World:
    """A store with garbage that writers would like to use, and the actors' acknowledgements.

    Run a: commit 1 (retired: "garbage", "old"), commit 2. Run b: commit 1. Run c: commit 1, whose
    one chunk lies in the pack `spare` and in another one too.
    """

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        store = Store.create(PATH, io=self.disk)
        a, b, c = (Author(store, f"first {run}") for run in "abc")
        for author, run in ((a, "a"), (b, "b"), (c, "c")):
            author.run = run
        old = a.save(1, ["garbage", "old"])
        self.manifest = old.manifest
        self.second = a.save(2, ["base", "a2"])
        b.save(1, ["base", "b1"])
        c.save(1, ["base"])  # its index knows nothing of the others' packs
        self.spare = store.snapshot(store.head("c")).packs
        for author in (a, b, c):
            author.close()
        retire(store, [old])
        self.acknowledged: dict[str, Commit | Committed] = {}

    def acknowledge(self, commit: Commit | Committed) -> None:
        self.acknowledged[commit.run] = commit  # the newest of each run: others may be retired

    # actors --------------------------------------------------------------------------------

    def session(self, io: ActorIO) -> None:
        """A training with retention: what it saves uses a chunk that nothing else needs."""
        session = Session(Store.open(PATH, io=io), "a", io, keep=Keep(last=1))
        try:
            first = session.save(3, ["garbage", "a2"])
            session.writer.attend()
            second = None
            if first is not None:
                self.acknowledge(first)
                second = session.save(4, ["garbage", "a4"], relative=1)
            if second is not None:
                self.acknowledge(second)
        finally:
            session.close()

    def author(self, io: ActorIO) -> None:
        """A bare store writer. It saves once exactly what the retired step was."""
        author = Author(Store.open(PATH, io=io), "second b")
        author.run = "b"
        try:
            self.acknowledge(author.save(2, ["garbage", "b2"]))
            author.writer.heed()
            self.acknowledge(author.save(3, ["garbage", "old"]))
        finally:
            author.close()

    def brief_session(self, io: ActorIO) -> None:
        """The same, with one save."""
        session = Session(Store.open(PATH, io=io), "a", io, keep=Keep(last=1))
        try:
            report = session.save(3, ["garbage", "a2"])
            if report is not None:
                self.acknowledge(report)
        finally:
            session.close()

    def brief_author(self, io: ActorIO) -> None:
        """A bare store writer with one save."""
        author = Author(Store.open(PATH, io=io), "second b")
        author.run = "b"
        try:
            self.acknowledge(author.save(2, ["garbage", "old"]))
        finally:
            author.close()

    def collector(self, io: ActorIO) -> None:
        collect(Store.open(PATH, io=io), wait=io.wait, avoid=self.spare)

    def reader(self, io: ActorIO) -> None:
        """Reads a step whose pack is collected, as its chunk lies elsewhere too."""
        store = Store.open(PATH, io=io)
        assert words_in(store, store.head("c")) == ["base"]

    def check(self, disk: SimulatedDisk, where: object) -> None:
        """What is acknowledged restores, and so does all that is listed."""
        check_everything(Store.open(PATH, io=disk), [*self.acknowledged.values()], where)

    def run(self, bodies: list[tuple[str, Body]], choose: Choose,
            shared: frozenset[str] | None = None) -> Run:  # fmt: skip
        self.acknowledged = {}
        run = Run(self.disk.copy(), bodies, choose, shared)
        try:
            run.go()
            if not run.cut:
                self.check(run.disk, "at the end")
        except BaseException:
            print("\n".join(run.log[-80:]))
            raise
        return run


def now_and_then(chance: float, seed: int) -> Choose:
    """Preempts at random."""
    mixture = random.Random(seed)

    def choose(run: Run, enabled: tuple[int, ...], running: int | None) -> int:
        if running in enabled and mixture.random() > chance:
            return running
        return mixture.choice(enabled)

    return choose


def check_clean(store: Store) -> None:
    """Nothing is left that nothing needs."""
    marking = mark(store, read_roots(store))
    assert marking.keeping() == set(marking.catalogue.names)
    leftovers = [n for d in ("", "/manifests", "/runs/a", "/runs/b", "/gc", "/pins")
                 for n in store.io.list(PATH + d) if n.startswith(TEMPORARY_PREFIX)]  # fmt: skip
    assert not leftovers
