"""Prevents: a step that was reported durable is gone, or half there, after a power cut.

Saves run on a simulated disk that journals every file operation; every prefix of the journal is
then cut off with unsynced writes lost, kept, torn or zeroed and unsynced names lost or kept, and
the store must still hold every acknowledged step, whole.
"""

from __future__ import annotations

import pytest
from deltackpt_store.errors import NotFoundError
from deltackpt_store.fileio import make_directories
from deltackpt_store.store import Store
from deltackpt_store.testing import CrashState, SimulatedDisk
from saver import CHUNK, Saver, check_whole

PATH = "/disk/store"


def saver_on_a_disk(pack_bytes: int = 1 << 20) -> tuple[SimulatedDisk, Saver]:
    disk = SimulatedDisk()
    make_directories(disk, "/disk")
    disk.sync_directory("/")
    return disk, Saver(PATH, disk, pack_bytes)


def check_recovered(crash: CrashState) -> None:
    acknowledged = {step for step in crash.marks if isinstance(step, int)}
    try:
        store = Store.open(PATH, io=crash.disk())
    except NotFoundError:
        assert not acknowledged, f"{crash}: the store is gone, steps {acknowledged} were durable"
        return
    check_whole(store, acknowledged, crash)


# case 83
@pytest.mark.parametrize("pack_bytes", [1 << 20, 2 * CHUNK])
def test_every_crash_state_of_saves_keeps_acknowledged_steps(pack_bytes: int) -> None:
    disk, saver = saver_on_a_disk(pack_bytes)
    for step in range(5):
        saver.save(step)
        disk.mark(step)
    saver.writer.close()
    states = 0
    for crash in disk.crash_states(random_states=6):
        check_recovered(crash)
        states += 1
    assert states > 1000


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
