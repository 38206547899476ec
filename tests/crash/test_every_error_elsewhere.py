"""Prevents: a failing disk makes a verification pass, a pin half there, retention remove too much.

Every file call of verification, pinning and retention fails in turn, with every error that storage
gives. Each must end with a typed error, a finding, or its whole effect; and once the fault is gone
the same call does what it should.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from authors import Author, check_everything
from deltackpt_store.budgeted import Budget
from deltackpt_store.errors import DeltackptError, NotFoundError
from deltackpt_store.manifest import Commit
from deltackpt_store.retention import Keep, apply
from deltackpt_store.store import Store
from deltackpt_store.testing import FailingIO, SimulatedDisk
from deltackpt_store.verify import verify

PATH = "/store"
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS)
KEEP = Keep(last=2)


@pytest.fixture
def saved(
    one_thread: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[SimulatedDisk, list[Commit]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    disk = SimulatedDisk()
    author = Author(Store.create(PATH, io=disk), "main")
    commits = [author.save(step, ["kept", f"{step}"]) for step in range(4)]
    author.close()
    Store.open(PATH, io=disk).pin("old", commits[0])
    return disk, commits


def failing(
    disk: SimulatedDisk, number: int, persistent: bool, action: Callable[[Store], object]
) -> Iterator[tuple[SimulatedDisk, object]]:
    """`action` with its n-th file call failing, for every n: (the disk after it, its result or its
    typed error)."""
    for at in range(1, 3000):
        copy = disk.copy()
        io = FailingIO(copy, number=number, persistent=persistent)
        store = Store.open(PATH, io=io)
        io.count, io.fail_at = 0, at
        try:
            result = action(store)
        except DeltackptError as error:
            result = error
        yield copy, result
        if not io.failed:
            assert at > 1
            return
    pytest.fail("it takes more calls than this test has looked at")


# case 79
@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[e] for e in ERRORS])
def test_verification_says_so_when_it_could_not_read(
    saved: tuple[SimulatedDisk, list[Commit]], number: int
) -> None:
    disk, commits = saved
    results = list(failing(disk, number, False, lambda s: verify(s, threads=1)))
    *failed, (_, last) = results
    assert not isinstance(last, DeltackptError)
    assert last.ok
    for copy, result in failed:
        if not isinstance(result, DeltackptError):
            told = result.findings
            # A read that failed once may have been repeated, or a close be of no consequence.
            assert told or result.commits == 4
        check_everything(Store.open(PATH, io=copy), commits)


def test_a_disk_that_fails_for_good_is_never_called_whole(
    saved: tuple[SimulatedDisk, list[Commit]],
) -> None:
    disk, _ = saved
    calls = ("open", "size", "read_into", "list", "exists")
    io = FailingIO(disk, number=errno.EIO, persistent=True, calls=calls)
    for at in range(1, 400):
        store = Store(PATH, io, Store.open(PATH, io=disk).format)
        io.count, io.failed, io.fail_at = 0, 0, at
        try:
            report = verify(store, threads=1)
        except DeltackptError:
            report = None
        if not io.failed:
            assert report is not None
            assert report.ok
            return
        assert report is None or not report.ok, at
    pytest.fail("it takes more calls than this test has looked at")


def test_a_budgeted_verification_remembers_nothing_that_it_could_not_read(
    saved: tuple[SimulatedDisk, list[Commit]],
) -> None:
    disk, _ = saved
    budget = Budget(bytes=1 << 30)
    for copy, result in failing(disk, errno.EIO, False, lambda s: verify(s, budget=budget,
                                                                         threads=1)):  # fmt: skip
        again = verify(Store.open(PATH, io=copy), budget=budget, threads=1)
        assert again.ok
        assert again.coverage is not None
        assert again.coverage.never_packs == 0
        del result


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[e] for e in ERRORS])
def test_pins_are_made_and_removed_whole_or_not_at_all(
    saved: tuple[SimulatedDisk, list[Commit]], number: int, persistent: bool
) -> None:
    disk, commits = saved
    failed = 0
    for copy, result in failing(disk, number, persistent, lambda s: s.pin("new", commits[1])):
        store = Store.open(PATH, io=copy)
        assert not store.pins().damaged
        if isinstance(result, DeltackptError):
            failed += 1
            assert store.pins().get("new", store.read_pin("old")).number in (1, 2)
        else:
            assert store.pinned("new") == commits[1]
        store.pin("new", commits[1])
        assert store.pinned("new") == commits[1]
        check_everything(store, commits)
    assert failed > 3
    for copy, result in failing(disk, number, persistent, lambda s: s.unpin("old")):
        store = Store.open(PATH, io=copy)
        if isinstance(result, DeltackptError):
            try:
                store.unpin("old")
            except NotFoundError:
                continue  # it was gone, and the error spoke of its durability
        assert "old" not in store.pins()


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[e] for e in ERRORS])
def test_retention_removes_what_it_should_or_less(
    saved: tuple[SimulatedDisk, list[Commit]], number: int, persistent: bool
) -> None:
    disk, commits = saved
    stay = [commits[0], *commits[2:]]  # pinned, and the last two
    failed = 0
    for copy, result in failing(disk, number, persistent, lambda s: apply(s, "main", KEEP)):
        failed += isinstance(result, DeltackptError)
        store = Store.open(PATH, io=copy)
        check_everything(store, stay)
        plan = apply(store, "main", KEEP)
        assert {c.number for c, _ in plan.kept} >= {3, 4}
        assert store.numbers("main") == [1, 3, 4]
        check_everything(store, stay)
    assert failed > 3
