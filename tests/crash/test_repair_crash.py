"""Prevents: a repair that is interrupted loses a record that was still good.

Power cuts at every operation of a repair; one failing call after the other; kills of a real
repairing process while a real writer saves. `test_kill_at_call` has kills at every call.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authors import Author, check_everything
from deltackpt_store.errors import DeltackptError
from deltackpt_store.pack import pack_path
from deltackpt_store.repair import repair
from deltackpt_store.store import Store
from deltackpt_store.testing import CrashState, FailingIO, SimulatedDisk, check_crash_states
from deltackpt_store.verify import verify
from hurt_store import HurtChunks, HurtRecords, HurtStore

FAULTS = list(itertools.product(
    (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS), (False, True)
))  # fmt: skip
"""What goes wrong, and whether it does so for good."""
Figure = Callable[[str, int], None]
KINDS = pytest.mark.parametrize("kind", [HurtChunks, HurtRecords])


# case 112
@pytest.mark.usefixtures("names")
@KINDS
def test_every_crash_state_of_a_repair(kind: type[HurtStore], figure: Figure) -> None:
    hurt = kind()
    start = hurt.disk.operations
    report = hurt.repair(hurt.disk)
    assert not report.left
    assert {(lost.run, lost.number) for lost in report.lost} == hurt.lost
    numbers = itertools.count()

    def recover(crash: CrashState) -> None:
        disk = crash.disk()
        hurt.check(disk, crash, power_cut=True)
        if next(numbers) % 10 == 0:
            hurt.check_goes_on(disk, crash, power_cut=True)

    found = check_crash_states(
        hurt.disk, recover, lambda _, crash: None, start=start, random_states=2
    )
    figure("crash states of repair", found.states)
    figure("crash states that differ", found.distinct)
    assert found.distinct > 60


# case 79
@KINDS
def test_every_call_of_a_repair_may_fail(kind: type[HurtStore], names: Any, figure: Figure) -> None:
    """Each call fails in one of the ways, in turn. It ends with a typed error, or is done, or says
    what it left; what lies there afterwards is no worse, and the next repair finishes."""
    hurt = kind()
    failures = 0
    known: set[int] = set()
    for at in itertools.count(1):
        names.count = 0
        disk = hurt.disk.copy()
        number, persistent = FAULTS[at % len(FAULTS)]
        io = FailingIO(disk, number=number, persistent=persistent, fail_at=at)
        try:
            report = hurt.repair(io)
            done = report.ok
        except DeltackptError:
            done = False
        failures += not done
        if not io.failed:
            break
        where = f"call {at}, {errno.errorcode[number]}"
        content = content_of(disk)
        if content not in known:
            known.add(content)
            hurt.check(disk, where)
            hurt.check_goes_on(disk, where)
    figure("failing calls survived", at - 1)
    assert at > 300
    assert failures > 100


def content_of(disk: SimulatedDisk) -> int:
    """Equal for disks with the same files."""
    return hash(frozenset((path, disk.content(path)) for path in disk.files("/")))


def test_a_repairing_process_may_be_killed_at_any_time(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    author = Author(store, "main")
    commits = [author.save(step, [f"{step}.{i}" for i in range(20)]) for step in range(12)]
    names = Store.open(store.path).packs.names()
    for name in names[::2]:
        path = pack_path(store.path, name)
        os.truncate(path, os.path.getsize(path) - 10)
    code = (
        "import sys; from deltackpt_store.repair import repair;"
        " print('ready', flush=True); repair(sys.argv[1])"
    )
    kills = 0
    for attempt in range(12):
        process = subprocess.Popen([sys.executable, "-c", code, store.path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(attempt):
            author.heed()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        kills += process.returncode == -signal.SIGKILL
        commits.append(author.save(100 + attempt, [f"new {attempt}", "1.1"]))
        check_everything(Store.open(store.path), commits)
    assert kills
    author.close()
    report = repair(store)
    assert report.ok
    check_everything(Store.open(store.path), commits)
    assert not verify(Store.open(store.path)).findings
