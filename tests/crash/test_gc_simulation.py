"""Prevents: a rare order of saving and collecting loses a step.

The actors of `gc_world` run in thousands of random orders, with stalled and killed actors, locks
that lie, lost answers and clocks hours apart. Whatever was acknowledged must restore, whatever is
listed must be whole, and whoever comes next must find nothing to clean up by hand.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable

import pytest
from authors import Session, check_clean, check_everything
from deltackpt_store.errors import ConflictError, CorruptionError, DeltackptError, StateError
from deltackpt_store.fileio import TEMPORARY_PREFIX
from deltackpt_store.gc import collect
from deltackpt_store.store import Store
from gc_world import World
from interleaving import ActorIO, Body, Run
from stage import PATH
from stage import one_thread_per_actor as one_thread_per_actor

pytestmark = pytest.mark.usefixtures("one_thread_per_actor")


class Trial:
    """One seed: which faults there are, and who is chosen when."""

    def __init__(self, world: World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        mixture = self.mixture = random.Random(seed)
        self.lying_locks = mixture.random() < 0.25
        self.stalled = mixture.choice([None, None, 0, 1])
        self.killed = mixture.choice([None, None, 0, 1, 2, 3])
        self.kill_at = mixture.randrange(1, 160)
        self.lose = mixture.choice([0.0, 0.0, 0.01, 0.05])
        self.chance = mixture.choice([0.02, 0.1, 0.5])
        skew = [mixture.uniform(-8, 8) * 3600 for _ in range(4)]
        self.current = 0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + skew[self.current])
        self.ios: dict[int, ActorIO] = {}
        self.waits = 0
        self.errors: list[Exception] = []

    def bodies(self) -> list[tuple[str, Body]]:
        world = self.world
        plain = [world.session, world.author, world.collector, world.reader]
        return [(body.__name__, self._tolerant(i, body)) for i, body in enumerate(plain)]

    def _tolerant(self, number: int, body: Body) -> Body:
        def tolerant(io: ActorIO) -> None:
            self.ios[number] = io
            if number != 3:  # the reader meets no faults, and so may not fail
                io.fault = self._fault(io)
            if number == 2:
                io.wait = self._patience(io)  # this actor's own
                if self.lying_locks:
                    io.lock = self._lie(io)
            try:
                body(io)
            except (DeltackptError, OSError) as error:
                self.errors.append(error)

        return tolerant

    def check_errors(self) -> None:
        """Actors may only fail in the ways that are foreseen for the faults there were."""
        for error in self.errors:
            if self.lose and isinstance(error, (OSError, CorruptionError)):
                continue
            if self.lying_locks and isinstance(error, OSError) and error.errno == errno.ENOENT:
                continue  # its unfinished file was taken away: the save fails, and is told
            assert isinstance(error, (ConflictError, StateError)), repr(error)
            # A writer that was told nothing of its lease withdraws, as one whose lease is gone.
            unsure = self.lying_locks or self.lose
            assert error.kind == "gc-busy" or (unsure and error.kind == "collected")

    def _fault(self, io: ActorIO) -> Callable[[str, str], None]:
        def fault(what: str, path: str) -> None:
            if self.mixture.random() < self.lose:
                if what == "link":  # it was done, and only the answer was lost
                    temporary = [n for n in io.names(path.rpartition("/")[0])
                                 if n.startswith(TEMPORARY_PREFIX)]  # fmt: skip
                    if len(temporary) == 1:
                        directory = path.rpartition("/")[0]
                        io.do_link(f"{directory}/{temporary[0]}", path)
                raise OSError(errno.EIO, "the answer was lost", path)

        return fault

    def _lie(self, io: ActorIO) -> Callable[..., int]:
        real = ActorIO.lock

        def lock(path: str, *, create: bool = False) -> int:
            try:
                return real(io, path, create=create)
            except BlockingIOError:
                if "/leases/" not in path:
                    raise
                return io.open(path)

        return lock

    def _patience(self, io: ActorIO) -> Callable[[object], bool]:
        def wait(_: object) -> bool:
            self.waits += 1
            if self.waits > 30:
                self.stalled = None
                return False
            return ActorIO.wait(io)

        return wait

    def choose(self, run: Run, enabled: tuple[int, ...], running: int | None) -> int:
        if self.killed is not None and run.steps >= self.kill_at:
            victim, self.killed = self.killed, None
            if not run.actors[victim].done and victim in self.ios:
                run.actors[victim].killed = True
                self.ios[victim].let_go()
        going = tuple(i for i in enabled if i != self.stalled) or enabled
        if running not in going or self.mixture.random() < self.chance:
            running = self.mixture.choice(going)
        self.current = running
        return running


# cases 128, 129
@pytest.mark.parametrize("part", range(10))
def test_random_orders_with_stalls_kills_lies_and_skewed_clocks(
    part: int, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str, int], None]
) -> None:
    world = World()
    for seed in range(part * 500, part * 500 + 500):
        trial = Trial(world, seed, monkeypatch)
        try:
            run = world.run(trial.bodies(), trial.choose)
            trial.check_errors()
        except BaseException:
            print(f"seed {seed}: {vars(trial)}")
            raise
        # case 130: nobody has to clean up after the dead
        store = Store.open(PATH, io=run.disk)
        again = Session(store, "a", run.disk, name="again")
        report = again.save(10, ["garbage", "afterwards"])
        assert report is not None, f"seed {seed}: {again.sent}"
        again.close()
        collect(store)
        check_everything(Store.open(PATH, io=run.disk), [again.commit_of(report)], seed)
        check_clean(store)
    figure("simulation seeds", 500)
