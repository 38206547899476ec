"""Prevents: a repair that is interrupted loses a record that was still good.

Power cuts at every operation of a repair; one failing call after the other; kills of a real
repairing process while a real writer saves.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from authors import Author, check_everything, chunk_of, words_in
from blake3 import blake3
from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.io_thread import IoThread
from deltackpt_store.manifest import Commit
from deltackpt_store.names import number_name
from deltackpt_store.pack import pack_path
from deltackpt_store.repair import repair
from deltackpt_store.store import Store
from deltackpt_store.testing import CrashState, FailingIO, SimulatedDisk
from deltackpt_store.verify import verify

PATH, COPY = "/disk/store", "/disk/copy"


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: IoThread) -> bool:
        return False

    monkeypatch.setattr(IoThread, "_start", no_thread)


def rewrite(disk: FileIO, path: str, change: Callable[[bytearray], None]) -> None:
    """Damage a file of a disk."""
    handle = disk.open(path)
    data = bytearray(disk.size(handle))
    disk.read_into(handle, [data], 0)
    disk.close(handle)
    change(data)
    disk.unlink(path)
    handle = disk.create(path)
    disk.write(handle, [data], 0)
    disk.sync(handle)
    disk.close(handle)
    disk.sync_directory(os.path.dirname(path))


def flipped(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


def copy_tree(disk: FileIO, source: str, target: str) -> None:
    make_directories(disk, target)
    for name in disk.list(source):
        path = f"{source}/{name}"
        try:
            handle = disk.open(path)
        except IsADirectoryError:
            copy_tree(disk, path, f"{target}/{name}")
            continue
        data = bytearray(disk.size(handle))
        disk.read_into(handle, [data], 0)
        disk.close(handle)
        made = disk.create(f"{target}/{name}")
        disk.write(made, [data], 0)
        disk.sync(made)
        disk.close(made)
    disk.sync_directory(target)


class Hurt:
    """A store with damage of every kind, some of which nothing can repair, and a copy of a part.

    Run main: steps 1 ("lost", "a"), 2 ("a", "copied"), 3 ("a", "b"), 4 ("c", "twice"), and run b:
    1 ("twice"). The record of "lost" is damaged and nothing has it; that of "copied" is in the
    copy; one record of "twice" is in another pack; the footer of step 3's pack is cut off; the
    manifest of step 4 and the commit of step 2 are damaged and in the copy.
    """

    LOST = ("main", 1)

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        make_directories(self.disk, "/disk")
        self.disk.sync_directory("/")
        store = Store.create(PATH, io=self.disk)
        main, b = Author(store, "main"), Author(store, "b")
        self.commits: list[Commit] = []
        words = [["lost", "a"], ["a", "copied"], ["a", "b"], ["c", "twice"]]
        for step, said in enumerate(words, 1):
            self.commits.append(main.save(step, said))
        self.commits.append(b.save(1, ["twice"]))
        main.close()
        b.close()
        copy_tree(self.disk, PATH, COPY)
        copy = Store.open(COPY, io=self.disk)
        gone = pack_path(COPY, self._pack(copy, "lost"))
        self.disk.unlink(gone)
        self.disk.sync_directory(os.path.dirname(gone))
        self.damaged = [self._pack(store, word) for word in ("lost", "copied", "twice", "b")]
        for word in ("lost", "copied", "twice"):
            place = store.index().get(blake3(chunk_of(word)).digest())
            assert place is not None
            rewrite(self.disk, pack_path(PATH, place.pack), flipped(place.payload + 9))
        rewrite(self.disk, pack_path(PATH, self._pack(store, "b")), lambda data: data.__delitem__(
            slice(len(data) - 30, None)))  # fmt: skip
        step4, step2 = self.commits[3], self.commits[1]
        rewrite(self.disk, f"{PATH}/manifests/{step4.manifest.hex()}", flipped(50))
        rewrite(self.disk, f"{PATH}/runs/main/{number_name(step2.number)}", flipped(50))

    @staticmethod
    def _pack(store: Store, word: str) -> str:
        place = store.index().get(blake3(chunk_of(word)).digest())
        assert place is not None
        return place.pack

    def check(self, disk: FileIO, where: object, *, done: bool) -> None:
        """All that could be read before the repair can be; when it is done, all but the lost."""
        store = Store.open(PATH, io=disk)
        for name in self.damaged:
            assert any(
                disk.exists(pack_path(root, name)) for root in (PATH, PATH + "/quarantine")
            ), (where, "a damaged pack is gone")
        for commit in self.commits:
            hurt = (commit.run, commit.number) in (("main", 2), ("main", 4))
            try:
                words_in(store, commit)
            except CorruptionError:
                must_be_whole = done or not hurt
                assert commit == self.commits[0] or not must_be_whole, (where, commit)
        if done:
            report = verify(store, level="chunks")
            assert {(h.run, h.number) for f in report.findings for h in f.hits} == {self.LOST}


# case 112
@pytest.mark.usefixtures("one_thread")
def test_every_crash_state_of_a_repair() -> None:
    hurt = Hurt()
    start = hurt.disk.operations
    hurt.check(hurt.disk, "before", done=False)
    report = repair(Store.open(PATH, io=hurt.disk), sources=[Store.open(COPY, io=hurt.disk)])
    assert not report.left
    assert [(lost.run, lost.number) for lost in report.lost] == [hurt.LOST]
    hurt.check(hurt.disk, "after", done=True)
    states = 0
    for crash in hurt.disk.crash_states(start=start, random_states=2):
        check_crash(hurt, crash, states % 30 == 0)
        states += 1
    assert states > 500


def check_crash(hurt: Hurt, crash: CrashState, again: bool) -> None:
    disk = crash.disk()
    hurt.check(disk, crash, done=False)
    if not again:
        return
    report = repair(Store.open(PATH, io=disk), sources=[Store.open(COPY, io=disk)], threads=1)
    assert not report.left, (crash, report.left)
    hurt.check(disk, crash, done=True)
    assert not repair(Store.open(PATH, io=disk), threads=1).packs


# case 79
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for-good"])
def test_every_call_of_a_repair_may_fail(persistent: bool) -> None:
    errors = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS)
    hurt = Hurt()
    failures, at = 0, 0
    while True:
        at += 5 if persistent else 2
        disk = hurt.disk.copy()
        io = FailingIO(disk, number=errors[at % len(errors)], persistent=persistent, fail_at=at)
        try:
            store = Store.open(PATH, io=io)
            repair(store, sources=[Store.open(COPY, io=io)], threads=1, wait=lambda _: False)
        except DeltackptError:
            failures += 1
        hurt.check(disk, f"call {at}", done=False)
        if not io.failed:
            break
        if at % 30 == 0:
            report = repair(
                Store.open(PATH, io=disk), sources=[Store.open(COPY, io=disk)], threads=1
            )
            assert not report.left, (at, report.left)
            hurt.check(disk, f"call {at}, after", done=True)
    assert at > 200
    assert failures > 8


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
