"""Prevents: a pin, a retirement or a withdrawal that was reported done is undone by a power cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from authors import Author, check_everything, everything_in
from deltackpt_store import leases
from deltackpt_store.errors import StateError
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.gc import collect
from deltackpt_store.retention import Keep, apply, retire
from deltackpt_store.store import Store
from deltackpt_store.testing import CrashState, SimulatedDisk, check_crash_states

PATH = "/disk/store"
Figure = Callable[[str, int], None]


@pytest.fixture
def disk(one_thread: None) -> SimulatedDisk:
    disk = SimulatedDisk()
    make_directories(disk, "/disk")
    disk.sync_directory("/")
    Store.create(PATH, io=disk)
    return disk


def pinned(crash: CrashState) -> object:
    return sorted(Store.open(PATH, io=crash.disk()).pins())


def listed(crash: CrashState) -> object:
    store = Store.open(PATH, io=crash.disk())
    everything_in(store, crash)
    return [commit.step for commit in store.commits("main")]


def newest_mark(found: object, crash: CrashState) -> None:
    """What was told last is what is found, from the telling on."""
    if crash.marks:
        assert found == crash.marks[-1], crash


def test_pins_are_durable_when_they_are_told(disk: SimulatedDisk, figure: Figure) -> None:
    author = Author(Store.open(PATH, io=disk), "main")
    commit = author.save(1, ["a"])
    author.close()
    store = Store.open(PATH, io=disk)
    start = disk.operations

    def at_a_telling(found: object, crash: CrashState) -> None:
        if crash.point in told:
            newest_mark(found, crash)

    told: set[int] = set()
    for action, names in ((lambda: store.pin("good", commit), ["good"]),
                          (lambda: store.unpin("good"), [])):  # fmt: skip
        action()
        disk.mark(names)
        told.add(disk.operations)
    found = check_crash_states(disk, pinned, at_a_telling, start=start)
    figure("crash states of pins, retirement, withdrawal", found.states)
    assert len(told) == 2


class Killed(BaseException):
    """The process is gone."""


def test_a_pin_that_a_killed_process_made_is_durable_when_it_is_told_again(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    author = Author(Store.open(PATH, io=disk), "main")
    commit = author.save(1, ["a"])
    author.close()
    store = Store.open(PATH, io=disk)

    def killed(path: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync_directory", killed)
        with pytest.raises(Killed):
            store.pin("good", commit)
    start = disk.operations
    store.pin("good", commit)
    disk.mark(["good"])
    assert check_crash_states(disk, pinned, newest_mark, start=start).states


def test_retirement_is_durable_when_it_is_told(disk: SimulatedDisk, figure: Figure) -> None:
    author = Author(Store.open(PATH, io=disk), "main")
    for step in (1, 2, 3):
        author.save(step, ["a"])
    author.close()
    start = disk.operations
    apply(Store.open(PATH, io=disk), "main", Keep(last=1))
    disk.mark([3])
    found = check_crash_states(disk, listed, newest_mark, start=start)
    figure("crash states of pins, retirement, withdrawal", found.states)


def test_a_withdrawn_commit_does_not_come_back(
    disk: SimulatedDisk, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was durable for a moment, and what it needs has been deleted."""
    store = Store.open(PATH, io=disk)
    author, late = Author(store, "main"), Author(store, "late")
    first = author.save(1, ["garbage"])
    author.save(2, ["kept"])
    author.close()
    retire(store, [first])
    late.heed()
    late.run = "main"
    late.prepare(["garbage"])

    def dead(io: FileIO, path: str) -> bool:
        return False

    def buried(io: FileIO, root: str, writer: str) -> bool:
        io.unlink(f"{root}/{leases.LEASES}/{writer}")
        return True

    with monkeypatch.context() as patch:  # a lock that lies: the writer is taken for dead
        patch.setattr(leases, "is_locked", dead)
        patch.setattr(leases, "bury", buried)
        assert collect(store).packs
    start = disk.operations
    with pytest.raises(StateError, match="took this writer for dead"):
        late.finish(3)
    disk.mark([2])

    def recover(crash: CrashState) -> object:
        store = Store.open(PATH, io=crash.disk())
        return [commit.step for commit in store.commits("main")]

    found = check_crash_states(disk, recover, newest_mark, start=start)
    figure("crash states of pins, retirement, withdrawal", found.states)
    check_everything(store)
