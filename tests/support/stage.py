"""A store on a simulated disk, and actors that do something with it in many orders."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from authors import check_everything
from deltackpt_store.manifest import Commit
from deltackpt_store.protocol import Committed
from deltackpt_store.store import Store
from deltackpt_store.testing import SimulatedDisk
from interleaving import Body, Choose, Run
from orders import explore, now_and_then, shared_paths
from touching import Touched

PATH = "/store"


@pytest.fixture
def one_thread_per_actor(one_thread: None) -> Iterator[None]:
    """Packs are written by the actor's own thread, and nothing is logged ten thousand times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Stage:
    """What the actors of a run begin with, and what they have been told."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.acknowledged: dict[str, Commit | Committed] = {}

    def acknowledge(self, commit: Commit | Committed) -> None:
        self.acknowledged[commit.run] = commit  # the newest of each run: others may be retired

    def run(self, bodies: list[tuple[str, Body]], choose: Choose,
            shared: frozenset[str] | None = None) -> Run:  # fmt: skip
        """One run on a copy of the disk. At its end what is acknowledged restores, and so does all
        that is listed."""
        self.acknowledged = {}
        run = Run(self.disk.copy(), bodies, choose, shared)
        try:
            run.go()
            if not run.cut:
                store = Store.open(PATH, io=run.disk)
                check_everything(store, [*self.acknowledged.values()], "at the end")
        except BaseException:
            print("\n".join(run.log[-80:]))
            raise
        return run

    def every_order(self, bodies: list[tuple[str, Body]], preemptions: int) -> Iterator[Run]:
        """Runs in every order with at most so many preemptions (see `explore`)."""
        samples = [self.run(bodies, now_and_then(0.3, seed)) for seed in range(40)]
        touched = Touched()
        shared = shared_paths(samples, touched)
        yield from explore(lambda choose: self.run(bodies, choose, shared), preemptions, touched)
