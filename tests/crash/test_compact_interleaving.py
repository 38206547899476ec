"""Prevents: compaction takes away what a save, a reader or a collection is working with.

The real code of a training, another writer, a compaction, a collection and a reader runs over one
simulated disk in many orders, with the compaction killed now and then. Whatever was acknowledged
must restore, whatever is listed must be whole, and the next compaction must finish the work.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from authors import Author, Session, check_everything, id_of, words_in
from deltackpt_store.compact import compact
from deltackpt_store.errors import ConflictError
from deltackpt_store.gc import collect
from deltackpt_store.retention import Keep, apply
from deltackpt_store.store import Store
from deltackpt_store.testing import SimulatedDisk
from interleaving import ActorIO, Body, Choose, Run
from orders import now_and_then
from stage import PATH, Stage
from stage import one_thread_per_actor as one_thread_per_actor

pytestmark = pytest.mark.usefixtures("one_thread_per_actor")

WORDS = ["x", "y"]


def words(step: int) -> list[str]:
    return [f"{word}~{step}" for word in WORDS] if step else WORDS


class World(Stage):
    """Run a: steps 2 and 3 are listed, coded against a step that is not. Run b has a thin pack."""

    def __init__(self) -> None:
        super().__init__()
        store = Store.create(PATH, io=self.disk)
        a, b = Author(store, "first a", codec="small"), Author(store, "first b")
        a.run, b.run = "a", "b"
        for step in range(4):
            a.save(step, words(step))
        b.save(1, ["part", "p", "q", "r"])
        b.save(2, ["part"])
        a.close()
        b.close()
        apply(store, "a", Keep(last=2))
        apply(store, "b", Keep(last=1))
        collect(store)

    # actors --------------------------------------------------------------------------------

    def session(self, io: ActorIO) -> None:
        """A training that goes on from the newest step."""
        store = Store.open(PATH, io=io)
        session = Session(store, "a", io, codec="small", keep=Keep(last=2))
        try:
            head = store.head("a")
            report = session.save(4, words(4), commit=head, parent=head)
            for step in (5, 6):
                assert report is not None
                self.acknowledge(report)
                session.writer.attend()
                report = session.save(step, words(step), relative=session.newest)
            assert report is not None
            self.acknowledge(report)
        finally:
            session.close()

    def author(self, io: ActorIO) -> None:
        """A writer that finds in the thin pack what it wants to save."""
        author = Author(Store.open(PATH, io=io), "second b")
        author.run = "b"
        try:
            author.parent = author.store.head("b")
            self.acknowledge(author.save(3, ["part", "p"]))
        finally:
            author.close()

    def compactor(self, io: ActorIO) -> None:
        io.free_bytes = lambda path: 1 << 40
        compact(Store.open(PATH, io=io), wait=io.wait)

    def collector(self, io: ActorIO) -> None:
        collect(Store.open(PATH, io=io), wait=io.wait)

    def reader(self, io: ActorIO) -> None:
        """Reads a step whose one pack is emptied."""
        store = Store.open(PATH, io=io)
        assert words_in(store, store.find("b", 2)) == ["part"]

    # runs ----------------------------------------------------------------------------------

    def bodies(self, *names: str) -> list[tuple[str, Body]]:
        return [(name, tolerant(getattr(self, name))) for name in names]


def tolerant(body: Body) -> Body:
    """Two of a kind: one is turned away. Nobody else may fail."""

    def run(io: ActorIO) -> None:
        try:
            body(io)
        except ConflictError as error:
            if error.kind not in ("gc-running", "compaction-running"):
                raise

    return run


def check_goes_on(disk: SimulatedDisk) -> None:
    """The next compaction finds nobody in its way, and finishes what there is."""
    store = Store.open(PATH, io=disk)
    compact(store)
    assert compact(Store.open(PATH, io=disk)).nothing
    store = Store.open(PATH, io=disk)
    check_everything(store)
    assert not any(store.index().locations(id_of(word)) for word in WORDS)


# case 128
@pytest.mark.parametrize(
    ("actors", "least"),
    [(("session", "compactor"), 80), (("author", "compactor"), 20), (("reader", "compactor"), 2),
     (("collector", "compactor"), 20), (("compactor", "compactor"), 10)],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_every_order_with_one_preemption(
    actors: tuple[str, ...], least: int, figure: Callable[[str, int], None]
) -> None:
    world = World()
    bodies = world.bodies(*actors)
    schedules = sum(1 for _ in world.every_order(bodies, 1))
    assert schedules >= least
    figure("schedules with compactions", schedules)


# cases 109, 130
@pytest.mark.parametrize("part", range(4))
def test_random_orders_with_killed_compactions(part: int) -> None:
    world = World()
    names = ("compactor", "session", "author", "collector", "reader", "compactor")
    bodies = world.bodies(*names)
    for seed in range(part * 25, part * 25 + 25):
        mixture = random.Random(seed)
        kill_at = mixture.choice([None, mixture.randrange(1, 400)])
        preempting = now_and_then(mixture.choice([0.02, 0.1, 0.5]), seed)
        ios: list[ActorIO] = []

        def spied(io: ActorIO, ios: list[ActorIO] = ios) -> None:
            ios.append(io)
            tolerant(world.compactor)(io)

        def choose(run: Run, enabled: tuple[int, ...], running: int | None,
                   kill_at: int | None = kill_at, preempting: Choose = preempting,
                   ios: list[ActorIO] = ios) -> int:  # fmt: skip
            if kill_at is not None and run.steps >= kill_at and ios and not run.actors[0].done:
                run.actors[0].killed = True
                ios[0].let_go()
            return preempting(run, enabled, running)

        try:
            run = world.run([("compactor", spied), *bodies[1:]], choose)
            check_goes_on(run.disk)
        except BaseException:
            print(f"seed {seed}, killed at {kill_at}")
            raise
