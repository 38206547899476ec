"""Prevents: a crash of retention or garbage collection loses a step, or space for ever.

Power cuts at every operation, with unsynced changes lost, kept or torn; one failing call after the
other; kills of a real collecting process while a real writer saves.
"""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from authors import (
    Author,
    Session,
    check_clean,
    check_everything,
    chunk_of,
    everything_in,
    words_in,
)
from beside import beside
from deltackpt_store.client import WriterClient
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import make_directories
from deltackpt_store.gc import collect
from deltackpt_store.manifest import Commit
from deltackpt_store.names import relative_pack_path
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.retention import Keep, apply, retire
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from deltackpt_store.testing import CrashState, FailingIO, SimulatedDisk, check_crash_states
from toy_trainer import CHUNK, SEED, ToyTrainer, check_run

PATH = "/disk/store"
Figure = Callable[[str, int], None]


class Kept:
    """What must be there after a power cut at a point: marked in the journal as it becomes so."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        make_directories(self.disk, "/disk")
        self.disk.sync_directory("/")
        self.store = Store.create(PATH, io=self.disk)

    def must(self, *commits: Commit) -> None:
        """From here on these are acknowledged and no rule lets them go."""
        self.disk.mark(tuple(commits))


class Recovery:
    """What each crash state leaves; now and then also that work goes on from there."""

    def __init__(self, goes_on_every: int = 0) -> None:
        self._every = goes_on_every
        self._count = 0

    def recover(self, crash: CrashState) -> tuple[set[bytes], int]:
        """Commits that are there, each whole, and the step of the newest of the run."""
        disk = crash.disk()
        store = Store.open(PATH, io=disk)
        found = everything_in(store, crash)
        newest = max((commit.step for commit in store.commits("main")), default=-1)
        self._count += 1
        if self._every and self._count % self._every == 0:
            check_goes_on(disk, crash)
        return found, newest

    def accept(self, recovered: tuple[set[bytes], int], crash: CrashState) -> None:
        """What was marked last as what must be there is, and the newest acknowledged step."""
        found, newest = recovered
        must = next((mark for mark in reversed(crash.marks) if isinstance(mark, tuple)), ())
        for commit in must:
            assert commit.digest in found, f"{crash}: {commit.run}@{commit.step} is gone"
        assert newest >= max((m for m in crash.marks if isinstance(m, int)), default=-1), crash


def check_goes_on(disk: SimulatedDisk, where: object) -> None:
    """The next save works at once, the next collection frees what nothing needs."""
    store = Store.open(PATH, io=disk)
    session = Session(store, "main", disk, name=f"after {where}")
    report = session.save(1000, ["kept", "garbage", "after"])
    assert report is not None, where
    session.close()
    collect(store)
    check_everything(store, [report], where)
    check_clean(store, where)


# case 109
@pytest.mark.usefixtures("one_thread")
def test_every_crash_state_of_retention_and_collection(figure: Figure) -> None:
    kept = Kept()
    author = Author(kept.store, "main")
    commits = [author.save(step, ["kept", f"{step}", f"{step // 2}"]) for step in range(6)]
    author.close()
    kept.must(*commits)
    kept.store.pin("good", commits[1])
    start = kept.disk.operations
    kept.must(commits[1], *commits[4:])
    apply(kept.store, "main", Keep(last=2))
    collect(kept.store)
    kept.store.unpin("good")
    kept.must(*commits[4:])
    collect(kept.store)
    recovery = Recovery(goes_on_every=5)
    found = check_crash_states(
        kept.disk, recovery.recover, recovery.accept, start=start, exhaustive=128, random_states=16
    )
    figure("crash states of retention and collection", found.states)
    figure("crash states that differ", found.distinct)
    assert found.states > 2000
    assert found.distinct > 300


@pytest.mark.usefixtures("one_thread")
def test_every_crash_state_of_saving_beside_a_collection(figure: Figure) -> None:
    """The writer's own operations and the collection's alternate."""
    kept = Kept()
    author = Author(kept.store, "main")
    old = [author.save(step, ["kept", f"{step}", "garbage"]) for step in range(3)]
    author.close()
    kept.must(*old)
    start = kept.disk.operations
    session = Session(kept.store, "main", kept.disk, keep=Keep(last=1))
    kept.must()
    saved = [2]

    def save(_: object) -> bool:
        saved[0] += 1
        if saved[0] < 6:
            report = session.save(saved[0], ["kept", "garbage", f"{saved[0]}"])
            assert report is not None
            kept.disk.mark(report.step)
        session.heed()
        return True

    save(None)
    for _ in range(2):
        collect(kept.store, wait=save)
    session.close()
    collect(kept.store)
    recovery = Recovery(goes_on_every=20)
    found = check_crash_states(
        kept.disk, recovery.recover, recovery.accept, start=start, exhaustive=64, random_states=8
    )
    figure("crash states of saving beside a collection", found.states)
    figure("crash states that differ", found.distinct)
    assert found.states > 3000
    assert found.distinct > 300


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("left", ["retired", "pin", "pack", "withdrawn"])
def test_what_a_killed_process_left_unsynced_is_made_durable_before_deletions(
    left: str, figure: Figure
) -> None:
    """Guard: the sync before the deletions.

    A process was killed between a change and its directory sync: a step marked as retired, a pin
    removed, a copy of a chunk published, a commit withdrawn. Collection acts upon that; a power
    cut must not bring back what it was, when what that needs is deleted.
    """
    kept = Kept()
    author = Author(kept.store, "main")
    first = author.save(1, ["garbage"])
    if left == "withdrawn":
        author.parent = None  # nobody continues a commit that is taken back
    second = author.save(2, ["kept"])
    author.close()
    run = f"{PATH}/runs/main"
    avoid: list[str] = []
    if left == "pin":
        kept.store.pin("good", first)
        retire(kept.store, [first])
        kept.disk.unlink(f"{PATH}/pins/good")
    elif left == "retired":
        kept.disk.close(kept.disk.create(f"{run}/{first.number:020d}.retired"))
    elif left == "withdrawn":
        kept.disk.unlink(f"{run}/{first.number:020d}")
    else:  # another copy of the chunk, in a pack whose name is not durable; the durable one goes
        retire(kept.store, [first])
        avoid = kept.store.packs.names()
        copier = StoreWriter(kept.store, codec="none")
        copy = f"{PATH}/{relative_pack_path(copier.put(chunk_of('kept')).pack)}"
        copier.flush()
        copier.close()
        kept.disk.link(copy, f"{PATH}/moved")
        kept.disk.unlink(copy)
        for directory in (PATH, os.path.dirname(copy)):
            kept.disk.sync_directory(directory)
        kept.disk.link(f"{PATH}/moved", copy)
        kept.disk.unlink(f"{PATH}/moved")
    kept.must(second)
    start = kept.disk.operations
    collect(kept.store, avoid=avoid)
    assert len(kept.store.packs.names()) == 1
    recovery = Recovery()
    found = check_crash_states(
        kept.disk, recovery.recover, recovery.accept, start=start, exhaustive=128, random_states=8
    )
    figure("crash states of retention and collection", found.states)
    figure("crash states that differ", found.distinct)


# case 79
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_every_call_of_retention_and_collection_may_fail(
    number: int, persistent: bool, figure: Figure
) -> None:
    failures = 0
    base = Kept()
    author = Author(base.store, "main")
    commits = [author.save(step, ["kept", f"{step}"]) for step in range(4)]
    author.close()
    for fail_at in range(1, 400):
        disk = base.disk.copy()
        io = FailingIO(disk, number=number, persistent=persistent, fail_at=fail_at)
        try:
            store = Store.open(PATH, io=io)
            apply(store, "main", Keep(last=2))
            collect(store)
        except DeltackptError:
            failures += 1
        check_everything(Store.open(PATH, io=disk), commits[2:], f"call {fail_at}")
        if not io.failed:
            break
        io.fail_at = None
        apply(Store.open(PATH, io=disk), "main", Keep(last=2))
        collect(Store.open(PATH, io=disk))
        assert Store.open(PATH, io=disk).steps("main") == [2, 3]
        assert len(Store.open(PATH, io=disk).packs.names()) <= 3
    else:
        pytest.fail("retention and collection take more calls than this test has looked at")
    assert failures > 30
    figure("failing calls survived", failures)


# real processes ---------------------------------------------------------------------------------


# case 109
def test_killed_collections_beside_a_real_writer(tmp_path: Path, figure: Figure) -> None:
    """A collecting process is killed again and again while a writer process saves every step."""
    path = str(tmp_path / "store")
    client = WriterClient(
        path, "main", seed=SEED, ring_bytes=64 * 4 * CHUNK, slot_bytes=4 * CHUNK,
        options=WriterOptions(keep=Keep(last=2)),
    )  # fmt: skip
    client.ready(60)  # the store exists now
    trainer = ToyTrainer(client)
    mixture = random.Random(5)
    step = 0
    for _ in range(25):
        with beside(path, "collect"):
            for _ in range(mixture.randrange(1, 4)):  # the kill falls somewhere into a collection
                trainer.save_now(step)
                step += 1
        assert check_run(path)[-1] == step - 1
    figure("kills survived, at random times", 25)
    client.close(60)
    collect(Store.open(path))
    assert check_run(path) == [step - 2, step - 1]
    check_clean(Store.open(path))


# case 130
def test_a_killed_writer_and_the_next_one_at_once(tmp_path: Path, figure: Figure) -> None:
    """Writers are killed while collections run; the next one starts without a manual unlock."""
    path = str(tmp_path / "store")
    Store.create(path)
    with beside(path, "collect"):
        step = 0
        for round_ in range(8):
            client = WriterClient(
                path, "main", seed=SEED, ring_bytes=64 * 4 * CHUNK, slot_bytes=4 * CHUNK,
                options=WriterOptions(keep=Keep(last=2)),
            )  # fmt: skip
            trainer = ToyTrainer(client)
            durable = -1
            for _ in range(3):
                trainer.save_now(step)
                durable, step = step, step + 1
            trainer.save(step)  # in flight
            step += 1
            os.kill(client.writer_pid, signal.SIGKILL)
            client.close(60)
            assert check_run(path)[-1] >= durable, round_
    figure("kills survived, at random times", 8)


def test_words_survive_what_the_helpers_do(tmp_path: Path) -> None:
    """The checks of this file see a missing pack."""
    store = Store.create(tmp_path / "store")
    author = Author(store, "main")
    commit = author.save(1, ["a"])
    author.close()
    os.unlink(next(Path(store.path).glob("packs/*/*.pack")))
    with pytest.raises(DeltackptError):
        words_in(Store.open(store.path), commit)
