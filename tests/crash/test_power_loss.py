"""Prevents: a step that was reported durable is gone, or half there, after a power cut.

Saves run on a simulated disk that journals every file operation; every prefix of the journal is
then cut off with unsynced writes lost, kept, torn or zeroed and unsynced names lost or kept, and
the store must still hold every acknowledged step, whole.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from deltackpt_store import store_writer
from deltackpt_store.errors import NotFoundError, StateError
from deltackpt_store.fileio import make_directories
from deltackpt_store.gc import collect
from deltackpt_store.store import Store
from deltackpt_store.testing import CrashState, SimulatedDisk, check_crash_states
from saver import CHUNK, Saver, check_whole

Figure = Callable[[str, int], None]

PATH = "/disk/store"


def saver_on_a_disk(pack_bytes: int = 1 << 20) -> tuple[SimulatedDisk, Saver]:
    disk = SimulatedDisk()
    make_directories(disk, "/disk")
    disk.sync_directory("/")
    return disk, Saver(PATH, disk, pack_bytes)


def recover(crash: CrashState) -> frozenset[int]:
    """The steps that are there, each proven whole."""
    try:
        store = Store.open(PATH, io=crash.disk())
    except NotFoundError:
        return frozenset()
    return frozenset(check_whole(store, set(), crash))


def accept(steps: frozenset[int], crash: CrashState) -> None:
    acknowledged = {step for step in crash.marks if isinstance(step, int)}
    assert acknowledged <= steps, f"{crash}: {acknowledged} were durable, {set(steps)} are there"


# case 83
@pytest.mark.parametrize("pack_bytes", [1 << 20, 2 * CHUNK])
def test_every_crash_state_of_saves_keeps_acknowledged_steps(
    pack_bytes: int, figure: Figure
) -> None:
    disk, saver = saver_on_a_disk(pack_bytes)
    for step in range(5):
        saver.save(step)
        disk.mark(step)
    saver.writer.close()
    found = check_crash_states(disk, recover, accept, exhaustive=256, random_states=12)
    figure("crash states of full saves and unchanged chunks", found.states)
    figure("crash states that differ", found.distinct)
    assert found.states > 6000
    assert found.distinct > 400


def test_a_store_that_was_being_made_is_complete_or_not_there() -> None:
    """A store without its `pins` would refuse collections for ever."""
    disk = SimulatedDisk()
    make_directories(disk, "/disk")
    disk.sync_directory("/")
    Store.create(PATH, io=disk)
    found = 0
    for crash in disk.crash_states():
        after = crash.disk()
        try:
            store = Store.open(PATH, io=after)
            found += 1
        except NotFoundError:
            store = Store.create(PATH, io=after)
        collect(store)
        saver = Saver(PATH, after)
        saver.save(0)
        saver.writer.close()
        check_whole(store, {0}, crash)
    assert found > 1


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("folder", ["packs", "runs"])
def test_folders_that_a_killed_process_made_are_durable_when_a_save_in_them_is(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, saver = saver_on_a_disk()
    sync, listed = disk.sync_directory, disk.list

    def killed(path: str) -> None:
        if path == f"{PATH}/{folder}" and listed(path):
            raise Killed
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync_directory", killed)
        with pytest.raises((Killed, StateError)):
            saver.save(0)
    assert disk.list(f"{PATH}/{folder}")
    disk.end_processes()
    monkeypatch.setattr(store_writer.secrets, "token_hex", lambda _: saver.writer.writer[:2] * 8)
    again = Saver(PATH, disk)
    again.save(1)
    disk.mark(1)
    again.writer.close()
    check_crash_states(disk, recover, accept, random_states=2)


# case 83
def test_a_store_recovered_from_a_crash_takes_further_saves() -> None:
    """A crash must leave nothing behind that stops the next save (leftovers, taken numbers)."""
    disk, saver = saver_on_a_disk()
    saver.save(0)
    start = disk.operations
    saver.save(1)
    saver.writer.close()
    for crash in disk.crash_states(start=start, random_states=2):
        again = Saver(PATH, crash.disk())
        again.parent = again.store.head("main")
        commit = again.save(2)
        again.writer.close()
        assert again.store.head("main").digest == commit.digest
        check_whole(again.store, {0, 2}, crash)
