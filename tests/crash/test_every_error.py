"""Prevents: one failing file call damages earlier steps, passes silently, or stops later saves.

The n-th file operation of a save fails, for every n and every error that storage gives, once and
for good (a full disk). The save must end with a typed error or be whole; earlier steps stay whole;
and once the fault is gone the same writer saves again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.store import Store
from deltackpt_store.testing import FailingIO, ShortIO, SimulatedDisk
from saver import CHUNK, Saver, check_whole

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS)


# case 79
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[e] for e in ERRORS])
def test_every_call_of_a_save_may_fail(
    number: int, persistent: bool, figure: Callable[[str, int], None]
) -> None:
    failures = 0
    for fail_at in range(1, 200):
        disk = SimulatedDisk()
        io = FailingIO(disk, number=number, persistent=persistent)
        saver = Saver("/store", io, pack_bytes=2 * CHUNK)
        acknowledged = {0}
        saver.save(0)
        io.count, io.fail_at = 0, fail_at
        try:
            saver.save(1)
            acknowledged.add(1)
        except DeltackptError:
            failures += 1
            saver.writer.abort()
        done = not io.failed
        io.fail_at = None
        check_whole(Store.open("/store", io=disk), acknowledged, f"call {fail_at}")
        again = saver.save(2)
        saver.writer.close()
        assert again.step == 2
        check_whole(Store.open("/store", io=disk), acknowledged | {2}, f"call {fail_at}, after")
        if done:
            break
    else:
        pytest.fail("a save takes more calls than this test has looked at")
    assert failures > 20
    figure("failing calls survived", failures)


# case 24
def test_short_writes_are_carried_on(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path / "store"), ShortIO(100))
    saver.save(0)
    saver.save(1)
    saver.writer.close()
    check_whole(Store.open(tmp_path / "store", io=FileIO()), {0, 1}, "short writes")
