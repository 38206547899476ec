"""Actors around a garbage collection on one simulated disk, for tests of their interleavings."""

from __future__ import annotations

from authors import Author, Session, words_in
from deltackpt_store.gc import collect
from deltackpt_store.retention import Keep, retire
from deltackpt_store.store import Store
from interleaving import ActorIO
from stage import PATH, Stage


class World(Stage):
    """A store with garbage that writers would like to use, and the actors' acknowledgements.

    Run a: commit 1 (retired: "garbage", "old"), commit 2. Run b: commit 1. Run c: commit 1, whose
    one chunk lies in the pack `spare` and in another one too.
    """

    def __init__(self) -> None:
        super().__init__()
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
