"""Prevents: a crash or a failing call during compaction loses a step, or space for ever.

Power cuts at every operation of a compaction, alone and beside a training; one failing call after
the other; kills of a real compacting process while a real writer saves.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from authors import Author, Session, check_clean, check_everything, everything_in, id_of
from beside import beside
from deltackpt_store.client import WriterClient
from deltackpt_store.compact import compact
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import make_directories
from deltackpt_store.gc import collect
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.retention import Keep, apply
from deltackpt_store.store import Store
from deltackpt_store.testing import CrashState, FailingIO, SimulatedDisk, check_crash_states
from dense_trainer import DenseState
from toy_trainer import CHUNK, SEED, ToyTrainer, read_arrays

PATH = "/disk/store"
WORDS = ["a", "b", "c"]
FAULTS = [(errno.EIO, False), (errno.ENOSPC, True), (errno.ESTALE, False), (errno.EDQUOT, False),
          (errno.EIO, True), (errno.EROFS, True)]  # fmt: skip
"""What goes wrong, and whether it does so for good."""
Figure = Callable[[str, int], None]


def words(step: int) -> list[str]:
    return [f"{word}~{step}" for word in WORDS] if step else WORDS


def trained() -> SimulatedDisk:
    """Steps 3 and 4 of a run are listed; the base that both are coded against is not. Step 4 has
    a pack that another run needs a part of."""
    disk = SimulatedDisk()
    make_directories(disk, "/disk")
    disk.sync_directory("/")
    store = Store.create(PATH, io=disk)
    author = Author(store, "main", codec="small")
    for step in range(5):
        author.save(step, words(step))
    author.close()
    other = Author(store, "other")
    other.save(1, ["part", "x", "y", "z"])
    other.save(2, ["part"])
    other.close()
    apply(store, "main", Keep(last=2))
    apply(store, "other", Keep(last=1))
    collect(store)
    return disk


def is_compact(disk: SimulatedDisk) -> bool:
    """Whether the old base is gone, and thin packs are."""
    index = Store.open(PATH, io=disk).index()
    return not any(index.locations(id_of(word)) for word in ("a", "x"))


def check_goes_on(disk: SimulatedDisk, where: object) -> None:
    """The next compaction finishes, and leaves what it need not do again."""
    store = Store.open(PATH, io=disk)
    compact(store)
    assert is_compact(disk), where
    assert compact(Store.open(PATH, io=disk)).nothing, where
    check_everything(Store.open(PATH, io=disk), where=where)
    check_clean(Store.open(PATH, io=disk), where)


class Recovery:
    """What each crash state leaves; now and then also that the next compaction finishes."""

    def __init__(self, must: set[bytes], goes_on_every: int) -> None:
        self._must = must
        self._every = goes_on_every
        self._count = 0

    def recover(self, crash: CrashState) -> int:
        disk = crash.disk()
        store = Store.open(PATH, io=disk)
        assert self._must <= everything_in(store, crash), crash
        newest = store.head("main").step
        self._count += 1
        if self._count % self._every == 0:
            check_goes_on(disk, crash)
        return newest

    def accept(self, newest: int, crash: CrashState) -> None:
        assert newest >= max((m for m in crash.marks if isinstance(m, int)), default=0), crash


# case 109
@pytest.mark.usefixtures("names")
def test_every_crash_state_of_compaction(figure: Figure) -> None:
    disk = trained()
    must = everything_in(Store.open(PATH, io=disk))
    start = disk.operations
    compact(Store.open(PATH, io=disk))
    assert is_compact(disk)
    recovery = Recovery(must, goes_on_every=20)
    found = check_crash_states(
        disk, recovery.recover, recovery.accept, start=start, exhaustive=8, random_states=2
    )
    figure("crash states of compaction", found.states)
    figure("crash states that differ", found.distinct)
    assert found.states > 200
    assert found.distinct > 60


@pytest.mark.usefixtures("names")
def test_every_crash_state_of_compaction_beside_a_training(figure: Figure) -> None:
    """The training saves while the compaction waits for it, and codes against the new base."""
    disk = trained()
    store = Store.open(PATH, io=disk)
    other = {store.head("other").digest}
    session = Session(store, "main", disk, codec="small", keep=Keep(last=2))
    first = session.save(5, words(5), commit=store.head("main"), parent=store.head("main"))
    assert first is not None
    start = disk.operations
    disk.mark(5)
    step = 5

    def save(_: object) -> bool:
        nonlocal step
        step += 1
        if step < 9:
            assert session.save(step, words(step), relative=session.newest) is not None
            disk.mark(step)
        session.heed()
        return step < 40

    compact(store, wait=save)
    session.close()
    assert step >= 6
    recovery = Recovery(other, goes_on_every=40)
    found = check_crash_states(
        disk, recovery.recover, recovery.accept, start=start, exhaustive=4, random_states=1
    )
    figure("crash states of compaction", found.states)
    figure("crash states that differ", found.distinct)
    assert found.states > 200


# case 79
@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("part", range(len(FAULTS)))
def test_every_call_of_compaction_may_fail(part: int, figure: Figure) -> None:
    """It ends with a typed error or is done; whatever happened, the next one finishes.

    Each call fails once over all parts; DELTACKPT_EVERY_ERROR=1 tries each with every fault.
    """
    number, persistent = FAULTS[part]
    stride = 1 if os.environ.get("DELTACKPT_EVERY_ERROR") else len(FAULTS)
    base = trained()
    must = everything_in(Store.open(PATH, io=base))
    failures = 0
    for fail_at in itertools.count(1 + part % stride, stride):
        disk = base.copy()
        io = FailingIO(disk, number=number, persistent=persistent, fail_at=fail_at)
        try:
            compact(Store.open(PATH, io=io), timeout=0)
        except DeltackptError:
            failures += 1
        if not io.failed:
            break
        where = f"call {fail_at}"
        assert must <= everything_in(Store.open(PATH, io=disk), where), where
        io.fail_at = None
        if fail_at % 5 == 0:
            check_goes_on(disk, where)
    assert fail_at > 100
    assert failures > 60 // stride
    figure("failing calls survived", failures)


# real processes ---------------------------------------------------------------------------------


# case 109
def test_killed_compactions_beside_a_real_training(tmp_path: Path, figure: Figure) -> None:
    """A compacting process is killed again and again while a writer process saves every step."""
    path = str(tmp_path / "store")
    client = WriterClient(
        path, "main", seed=SEED, ring_bytes=64 * CHUNK, slot_bytes=4 * CHUNK,
        options=WriterOptions(codec="small", keep=Keep(last=3)),
    )  # fmt: skip
    state = DenseState(lr=1e-5)
    trainer = ToyTrainer(client, state.layout())
    saved: dict[int, list[bytes]] = {}
    mixture = random.Random(3)

    def save() -> None:
        arrays = state.advance()
        saved[state.step] = arrays
        trainer.save_now(state.step, arrays)

    def check() -> None:
        store = Store.open(path)
        commits = store.commits("main")
        assert not commits.damaged
        assert commits[-1].step == state.step
        for commit in commits:
            assert read_arrays(store, commit) == saved[commit.step], commit.step

    save()
    kills = 8
    for _ in range(kills):
        with beside(path, "compact"):
            for _ in range(mixture.randrange(1, 6)):  # the kill falls somewhere into a compaction
                save()
        check()
    compact(Store.open(path))  # beside the training, which answers it
    check()
    save()
    check()
    client.close(60)
    compact(Store.open(path))
    assert compact(Store.open(path)).nothing
    check()
    figure("kills survived, of compactions", kills)
