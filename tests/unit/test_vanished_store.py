"""Prevents: a store that is deleted, moved or replaced under a running training is made anew, half,
at the old path, and saves go on into it; and a copy without its empty folders is of no use."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from deltackpt_store import serve
from deltackpt_store.client import WriterClient
from deltackpt_store.compact import compact
from deltackpt_store.errors import (
    CorruptionError,
    DeltackptError,
    StateError,
    StorageError,
    UnsupportedFormatError,
    WriterError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.format_file import FORMAT_NAME, encode_format
from deltackpt_store.gc import collect
from deltackpt_store.names import number_name
from deltackpt_store.retention import retire
from deltackpt_store.run_deletion import delete_run
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from deltackpt_store.verify import verify
from processes import ended
from toy_trainer import CHUNK, SEED, ToyTrainer, check_run

import deltackpt

FOLDERS = ("packs", "manifests", "runs", "pins", "gc", "quarantine", "cache")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[ToyTrainer]:
    client = WriterClient(tmp_path / "store", "main", seed=SEED, ring_bytes=8 * CHUNK,
                          slot_bytes=4 * CHUNK, mode="thread")  # fmt: skip
    yield ToyTrainer(client)
    client.close(60)


def refused(trainer: ToyTrainer, step: int) -> StorageError:
    last = trainer.table, trainer.relative
    with pytest.raises(StorageError) as caught:
        trainer.save_now(step)
    trainer.table, trainer.relative = last  # what comes next is relative to what is durable
    assert caught.value.kind == "store-vanished"
    assert "put it back" in str(caught.value)
    return caught.value


def test_a_store_that_was_moved_away_and_back(trainer: ToyTrainer, tmp_path: Path) -> None:
    path, away = tmp_path / "store", tmp_path / "away"
    trainer.save_now(1)
    path.rename(away)
    for step in (2, 3):
        assert str(path) in str(refused(trainer, step))
        assert not path.exists()
    away.rename(path)
    for step in (4, 5):
        trainer.save_now(step)
    assert check_run(str(path)) == [1, 4, 5]
    assert verify(Store.open(path), level="restore").ok


def test_a_store_that_was_deleted_and_put_back_from_a_copy(
    trainer: ToyTrainer, tmp_path: Path
) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    trainer.save_now(1)
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("cache", "leases", "reserve"))
    shutil.rmtree(path)
    refused(trainer, 2)
    assert not path.exists()
    shutil.copytree(copy, path)
    for step in (3, 4):
        trainer.save_now(step)
    assert check_run(str(path)) == [1, 3, 4]
    assert verify(Store.open(path), level="restore").ok


def test_an_older_copy_gets_no_step_that_needs_what_it_lacks(
    trainer: ToyTrainer, tmp_path: Path
) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    trainer.save_now(1)
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("cache"))
    trainer.save_now(2)
    shutil.rmtree(path)
    refused(trainer, 3)
    shutil.copytree(copy, path)
    with contextlib.suppress(DeltackptError):
        trainer.save_now(4)
    # What the copy lacks is told as lost commits, and is all that is wrong with it.
    report = verify(Store.open(path), level="restore")
    assert {finding.kind for finding in report.findings} <= {"commit"}
    assert not report.damaged_steps


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "another store", "a file"])
def test_nothing_is_made_at_the_old_path(trainer: ToyTrainer, tmp_path: Path, there: str) -> None:
    path = tmp_path / "store"
    trainer.save_now(1)
    path.rename(tmp_path / "away")
    if there == "an empty folder":
        path.mkdir()
    elif there == "another store":
        Store.create(path)
    elif there == "a file":
        path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    told = refused(trainer, 2)
    assert sorted(tmp_path.rglob("*")) == before
    assert there != "another store" or "another store" in str(told)


def test_a_new_writer_makes_no_new_store(tmp_path: Path) -> None:
    """The writer process dies while the store is away: the next one must not begin afresh."""
    path, away = tmp_path / "store", tmp_path / "away"
    model = torch.nn.Linear(64, 64)
    ckpt = deltackpt.Checkpointer(path, {"model": model}, overlap=False)
    ckpt.save(1).result()
    client = ckpt._pipeline._link._client  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] - to kill it
    path.rename(away)
    os.kill(client.writer_pid, signal.SIGKILL)
    failures: list[str] = []
    for step in (2, 3, 4):
        with pytest.raises((StorageError, WriterError)) as caught:
            ckpt.save(step).result()
        failures.append(caught.value.kind)
        assert not path.exists()
    assert failures[-1] == "store-vanished"
    away.rename(path)
    saved = False
    for step in range(5, 9):  # the failures may be raised once more by the calls that come next
        with contextlib.suppress(DeltackptError):
            saved = ckpt.save(step).result() is not None or saved
    assert saved
    with contextlib.suppress(DeltackptError):
        ckpt.close()
    assert deltackpt.steps(path)[0] == 1
    assert verify(Store.open(path), level="restore").ok


@pytest.mark.parametrize("there", ["nothing", "another store"])
def test_a_store_that_is_gone_is_no_new_run(tmp_path: Path, there: str) -> None:
    """restore() returned None, as on a fresh run, or took a step of a store that is not this one's;
    steps() was empty."""
    path = tmp_path / "store"
    with deltackpt.Checkpointer(path, {"at": torch.zeros(9)}, writer="thread", run="x") as ckpt:
        ckpt.save(1).result()
        path.rename(tmp_path / "away")
        if there == "another store":
            other = {"at": torch.ones(9)}
            with deltackpt.Checkpointer(path, other, writer="thread", run="x") as beside:
                beside.save(7)
        for call in (ckpt.restore, ckpt.steps):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.kind == "store-vanished"
        if there == "another store":
            path.rename(tmp_path / "other")
        (tmp_path / "away").rename(path)
        restored = ckpt.restore()
        assert restored is not None
        assert (restored.step, ckpt.steps()) == (1, [1])


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
@pytest.mark.parametrize("at", [8, 20])
def test_a_store_that_goes_while_it_is_verified_is_not_damaged(
    trainer: ToyTrainer, tmp_path: Path, left: str, at: int
) -> None:
    """All of it was told as missing, with the exit code of damage."""
    for step in (1, 2, 3):
        trainer.save_now(step)
    trainer.client.close(60)
    path = tmp_path / "store"

    class Going(FileIO):
        opened = 0

        def open(self, name: str) -> int:
            self.opened += 1
            if self.opened == at:
                path.rename(tmp_path / "away")
                if left == "an empty folder":
                    path.mkdir()
            return super().open(name)

    with pytest.raises(StorageError) as caught:
        verify(Store.open(path, io=Going()), level="restore")
    assert caught.value.kind == "store-vanished"
    assert verify(Store.open(tmp_path / "away"), level="restore").ok


def test_a_writer_survives_the_loss_of_the_folder_runs(
    trainer: ToyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died when it next looked for a collection, with a traceback for its last words."""
    monkeypatch.setattr(serve, "ATTEND_SECONDS", 0.0)
    runs, away = tmp_path / "store/runs", tmp_path / "runs"
    trainer.save_now(1)
    last = trainer.table, trainer.relative
    runs.rename(away)
    for kind, step in (("storage", 2), ("damaged-store", 3), ("damaged-store", 4)):
        with pytest.raises((StorageError, CorruptionError)) as caught:
            trainer.save_now(step)
        assert caught.value.kind == kind
        trainer.table, trainer.relative = last
    away.rename(runs)
    trainer.save_now(5)
    assert check_run(str(tmp_path / "store")) == [1, 5]


# copies -----------------------------------------------------------------------------------------


def stripped(path: Path) -> None:
    """As git or an object store copies it: without empty folders and disposable files."""
    shutil.rmtree(path / "cache", ignore_errors=True)
    for name in ("leases", "holds", "acks"):
        shutil.rmtree(path / "gc" / name, ignore_errors=True)
    (path / "gc/lock").unlink(missing_ok=True)
    (path / "gc/reserve").unlink(missing_ok=True)
    for folder in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def test_a_copy_without_empty_folders_is_read_and_written(
    trainer: ToyTrainer, tmp_path: Path
) -> None:
    trainer.save_now(1)
    trainer.save_now(2)
    trainer.client.close(60)
    path = tmp_path / "store"
    stripped(path)
    assert not (path / "gc").exists()
    assert not (path / "pins").exists()
    assert check_run(str(path)) == [1, 2]
    store = Store.open(path)
    assert store.pins() == {}
    assert verify(store, level="restore").ok
    (path / "pins").mkdir()
    assert collect(store, dry_run=True).nothing
    with StoreWriter(store) as writer:
        put = writer.put(b"x" * 1000)
        assert writer.flush() == [put.pack]
    assert (path / "gc/leases").exists()


def test_a_copy_without_pins_says_how_to_collect_it(trainer: ToyTrainer, tmp_path: Path) -> None:
    """Pins that were lost must not let steps be deleted, so nobody makes that folder by itself."""
    trainer.save_now(1)
    trainer.save_now(2)
    trainer.client.close(60)
    path = tmp_path / "store"
    store = Store.open(path)
    retire(store, [store.find("main", 1)])
    stripped(path)
    with pytest.raises(StorageError, match="pins") as caught:
        collect(store)
    assert f"mkdir {path}/pins" in str(caught.value)
    with pytest.raises(StorageError, match="pins") as caught:
        store.pin("best", store.find("main", 2))
    assert f"mkdir {path}/pins" in str(caught.value)
    os.mkdir(path / "pins")
    store.pin("best", store.find("main", 2))
    assert collect(store).commits == [("main", 1)]


def test_a_copy_without_empty_folders_may_be_planned_for(
    trainer: ToyTrainer, tmp_path: Path
) -> None:
    trainer.save_now(1)
    trainer.client.close(60)
    path = tmp_path / "store"
    shutil.rmtree(path / "gc")
    store = Store.open(path)
    assert collect(store, dry_run=True).generation == 0
    assert compact(store, dry_run=True).nothing
    assert not (path / "gc").exists()


def test_an_empty_store_without_folders(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    stripped(tmp_path / "store")
    assert os.listdir(store.path) == [FORMAT_NAME]
    assert store.runs() == []
    assert verify(store).ok
    with StoreWriter(Store.open(store.path)) as writer:
        writer.put(b"x" * 1000)
        writer.flush()
    assert Store.open(store.path).packs.names()


def test_a_store_that_a_newer_package_must_write(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made = Store.create(path)
    newer = msgspec.structs.replace(made.format, write=("tomorrow",))
    (path / FORMAT_NAME).write_bytes(encode_format(newer))
    with pytest.raises(UnsupportedFormatError, match="tomorrow") as caught:
        StoreWriter(Store.open(path))
    assert "upgrade" in str(caught.value)
    assert sorted(os.listdir(path / "gc")) == []


class Trained:
    """A real training of three tensors: one changes at every step, one at step 4, one never."""

    def __init__(self, path: Path, writer: Literal["process", "thread"] = "thread") -> None:
        self.path = path
        self.state = {"state": self._at(0)}
        self.checkpointer = deltackpt.Checkpointer(
            path, self.state, rng=False, final=False, writer=writer
        )

    @staticmethod
    def _at(step: int) -> dict[str, torch.Tensor]:
        seeds = {"always": step, "once": 1000 + step // 4, "never": 2000}
        return {
            name: torch.randn(5000, generator=torch.Generator().manual_seed(seed))
            for name, seed in seeds.items()
        }

    def save(self, step: int) -> None:
        for name, tensor in self._at(step).items():
            self.state["state"][name].copy_(tensor)
        self.checkpointer.save(step).result()

    def holds(self, step: int) -> bool:
        found = deltackpt.load(self.path, step=step)["state"]
        return all(torch.equal(found[name], tensor) for name, tensor in self._at(step).items())


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    made = Trained(tmp_path / "store")
    yield made
    with contextlib.suppress(DeltackptError):
        made.checkpointer.close()


def take(path: Path, folder: str) -> None:
    """Put the older content of a folder, or of all of them, in place of what is there."""
    copy = path.with_name("copy")
    if folder == "all":
        path.rename(path.with_name("away"))
        copy.rename(path)
    else:
        shutil.rmtree(path / folder)
        shutil.copytree(copy / folder, path / folder)


@pytest.mark.parametrize("folder", ["all", "runs", "packs", "manifests"])
def test_no_step_is_told_durable_that_needs_what_an_older_copy_lacks(
    trained: Trained, folder: str
) -> None:
    """I1: the copy is put there between two saves, so that no call of the writer fails by it."""
    for step in (1, 2):
        trained.save(step)
    shutil.copytree(trained.path, trained.path.with_name("copy"))
    for step in (4, 5):
        trained.save(step)
    take(trained.path, folder)
    acknowledged = [1, 2]
    for step in (6, 7, 8):
        try:
            trained.save(step)
            acknowledged.append(step)
        except StateError as error:
            assert error.kind == "collected"  # noqa: PT017 - any number of these saves may fail
    assert len(acknowledged) >= 4  # what is gone is stored anew: one save fails at most
    assert all(map(trained.holds, acknowledged))


@pytest.mark.parametrize("which", ["packs/*/*-00000003.pack", "manifests/*"])
def test_what_is_deleted_by_hand_is_stored_anew(trained: Trained, which: str) -> None:
    for step in (1, 2, 4):
        trained.save(step)
    for path in trained.path.glob(which):
        path.unlink()
    with contextlib.suppress(StateError):
        trained.save(5)
    trained.save(6)
    assert trained.holds(6)
    assert 5 not in trained.checkpointer.steps() or trained.holds(5)


@pytest.mark.parametrize("gone", ["run", "commit", "manifest"])
def test_a_new_writer_stores_anew_what_it_cannot_build_upon(tmp_path: Path, gone: str) -> None:
    """No save succeeded again after that: each was relative to the step that is gone."""
    trained = Trained(tmp_path / "store", "process")
    for step in (1, 2, 4):
        trained.save(step)
    client = trained.checkpointer._pipeline._link._client
    assert client is not None
    os.kill(client.writer_pid, signal.SIGKILL)
    assert ended(client.writer_pid)
    while client.alive:  # until that is noticed
        time.sleep(0.01)
    store = Store.open(trained.path)
    if gone == "run":
        delete_run(store, "main")
        collect(store)
    else:
        name = {"commit": f"runs/main/{number_name(3)}",
                "manifest": f"manifests/{store.head('main').manifest.hex()}"}[gone]  # fmt: skip
        (trained.path / name).unlink()
        (trained.path / name).write_bytes(b"damaged")
    with pytest.raises(StateError, match="cannot be read any more") as caught:
        trained.save(5)
    assert caught.value.kind == "collected"
    trained.save(6)
    trained.save(7)
    trained.checkpointer.close()
    assert trained.holds(6)
    assert trained.holds(7)
