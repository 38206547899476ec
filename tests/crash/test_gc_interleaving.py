"""Prevents: garbage collection deletes what a concurrent writer builds upon, or a reader reads.

The real code of two writers, a collection and a reader runs over one simulated disk in every order
with at most two preemptions; that of all four at once with one (`make soak ARGS="--orders 2"` has
two). Whatever was acknowledged must restore, and whatever is listed must be whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from authors import Session, check_everything
from deltackpt_store.errors import ConflictError
from deltackpt_store.gc import collect
from deltackpt_store.store import Store
from gc_world import World
from interleaving import ActorIO, Body
from stage import PATH
from stage import one_thread_per_actor as one_thread_per_actor

pytestmark = pytest.mark.usefixtures("one_thread_per_actor")


# case 128
@pytest.mark.parametrize(
    ("actors", "preemptions", "least"),
    [
        (("session", "collector"), 2, 600),
        (("author", "collector"), 2, 400),
        (("brief_session", "reader", "collector"), 2, 1000),
        (("session", "author", "collector"), 1, 200),
        (("brief_session", "brief_author", "reader", "collector"), 1, 600),
        (("collector", "author", "collector"), 1, 60),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_every_order_with_few_preemptions(
    actors: tuple[str, ...], preemptions: int, least: int, figure: Callable[[str, int], None]
) -> None:
    world = World()
    bodies = [(name, getattr(world, name)) for name in actors]
    if actors.count("collector") == 2:  # the second is turned away while the first is at work
        bodies[0] = ("collector", _turned_away(world.collector))
        bodies[2] = ("collector 2", _turned_away(world.collector))
    schedules = sum(1 for _ in world.every_order(bodies, preemptions))
    assert schedules >= least
    figure("schedules explored, of saving beside collection", schedules)


def _turned_away(body: Body) -> Body:
    def tolerant(io: ActorIO) -> None:
        try:
            body(io)
        except ConflictError as error:
            if error.kind != "gc-running":
                raise

    return tolerant


def test_a_collection_waits_for_a_stalled_writer_and_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # case 129: however long the writer stalls, by whatever clock
    world = World()
    store = Store.open(PATH, io=world.disk)
    session = Session(store, "a", world.disk)
    save = session.begin(3, ["garbage", "a2"])
    monkeypatch.setattr(time, "time", lambda: 4e9)
    before = sorted(store.packs.names())
    with pytest.raises(ConflictError) as caught:
        collect(store, timeout=0)
    assert caught.value.kind == "gc-busy"
    assert sorted(store.packs.names()) == before
    report = session.finish(save)
    assert report is not None
    session.writer.attend()
    collect(store, timeout=0, wait=lambda _: session.writer.attend() or True)
    check_everything(store, [session.commit_of(report)])
    session.close()
