"""Prevents: a copy made of a store while it is saved to, in the documented order, lists steps that
it does not hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from authors import Author, check_everything, words_in
from deltackpt_store.errors import ConflictError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.retention import Keep, apply
from deltackpt_store.runlock import RunLock
from deltackpt_store.store import Store
from deltackpt_store.store_locks import collection_lock
from deltackpt_store.verify import verify

NAMES, NAMED = ("FORMAT", "gc", "pins", "runs"), ("manifests", "packs")


class Live:
    """A store that is saved to, thinned out and collected before every file that is copied."""

    def __init__(self, path: Path) -> None:
        self.store = Store.create(path)
        self._authors = [Author(self.store, run) for run in ("one", "two")]
        self._step = 0
        self.turned_away = 0
        for _ in range(6):
            self.go_on()
        self.store.pin("best", self.store.head("one"))

    def go_on(self) -> None:
        self._step += 1
        author = self._authors[self._step % 2]
        author.save(self._step, ["same", f"{self._step % 5}", f"{self._step}"])
        apply(Store.open(self.store.path), author.run, Keep(last=2))
        try:
            collect(Store.open(self.store.path), wait=self._wait)
        except ConflictError:
            self.turned_away += 1

    def _wait(self, _: list[str]) -> bool:
        for author in self._authors:
            author.heed()
        return True

    def steps(self) -> set[tuple[str, int]]:
        store = Store.open(self.store.path)
        return {(c.run, c.step) for run in store.runs() for c in store.commits(run)}

    def close(self) -> None:
        for author in self._authors:
            author.close()


def copy(live: Live, target: Path, order: tuple[str, ...]) -> Store:
    target.mkdir()

    def one(source: str, destination: str) -> None:
        live.go_on()
        if os.path.exists(source):  # as a copying tool passes over what is gone by now
            shutil.copy2(source, destination)

    source = Path(live.store.path)
    for name in order:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=one)
        else:
            one(str(source / name), str(target / name))
    return Store.open(target)


@pytest.mark.parametrize("locked", [True, False])
def test_a_copy_in_the_documented_order_is_whole(tmp_path: Path, locked: bool) -> None:
    live = Live(tmp_path / "store")
    listed = live.steps()
    lock = FileIO().lock(f"{live.store.path}/gc/lock", create=True) if locked else None
    copied = copy(live, tmp_path / "copy", NAMES + NAMED)
    if lock is None:  # what the order alone does not do
        assert not verify(copied).ok
    else:
        os.close(lock)
        assert live.turned_away
        assert verify(copied).findings == ()
        check_everything(copied)
        kept = {(c.run, c.step) for run in copied.runs() for c in copied.commits(run)}
        newest = {(run, max(step for of, step in kept if of == run)) for run in copied.runs()}
        assert {run for run, _ in newest} == {"one", "two"}
        assert min(step for _, step in newest) >= max(step for _, step in listed) - 1
        assert copied.pinned("best").run == "one"
        assert collect(copied).kept_packs
    live.close()


def test_another_order_is_noticed(tmp_path: Path) -> None:
    """What is not whole in such a copy is told, step by step."""
    live = Live(tmp_path / "store")
    lock = FileIO().lock(f"{live.store.path}/gc/lock", create=True)
    copied = copy(live, tmp_path / "copy", NAMED + NAMES)
    os.close(lock)
    damaged = verify(copied).damaged_steps
    assert damaged
    for run in copied.runs():
        for commit in copied.commits(run):
            if (run, commit.step) not in damaged:
                assert words_in(copied, commit)[0] == "same"
    live.close()


def locked_run(store: Path) -> RunLock:
    return RunLock.acquire(str(store / "runs/one"), "one", timeout=0, cancelled=lambda _: False)


def test_a_copy_made_of_hard_links_has_locks_of_its_own(tmp_path: Path) -> None:
    """Whoever works on a snapshot of a store must not lock the store itself."""
    live = Live(tmp_path / "store")
    live.close()
    io, original, snapshot = FileIO(), tmp_path / "store", tmp_path / "snapshot"
    locked_run(original).release()
    shutil.copytree(original, snapshot, copy_function=os.link)
    for first, second in ((snapshot, original), (original, snapshot)):
        held = locked_run(first)
        with collection_lock(io, str(first)):
            locked_run(second).release()
            with collection_lock(io, str(second)):
                pass
            with pytest.raises(ConflictError), collection_lock(io, str(first)):
                pass
        with pytest.raises(ConflictError):
            locked_run(first)
        held.release()
    for path in (original, snapshot):
        store = Store.open(path)
        author = Author(store, "more")
        author.save(1, [path.name])
        author.close()
        collect(Store.open(path))
        assert verify(Store.open(path)).ok


def test_a_lock_that_a_copy_made_of_hard_links_shares_is_named(tmp_path: Path) -> None:
    live = Live(tmp_path / "store")
    live.close()
    held = locked_run(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "snapshot", copy_function=os.link)
    with pytest.raises(ConflictError, match=r"remove .*/snapshot/runs/one/\.lock"):
        locked_run(tmp_path / "snapshot")
    (tmp_path / "snapshot/runs/one/.lock").unlink()
    locked_run(tmp_path / "snapshot").release()
    held.release()
