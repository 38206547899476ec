"""Prevents: training that stands still for ever, or a store that is lost for it, because a disk
hangs for a while."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from deltackpt_store.errors import StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.store import Store
from deltackpt_store.testing import SlowIO
from deltackpt_store.verify import verify
from saving import Gate, Opener, Recorder, Training, assert_same, gate_disk, set_timeout

from deltackpt import Checkpointer, load, steps
from deltackpt.events import Staged


# case 79
def test_a_disk_that_hangs_and_comes_back(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_disk(monkeypatch)
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    ckpt.save(0).result(60)
    first = training.copy()
    set_timeout(ckpt, 0.5)
    gate.close()
    training.step()
    ckpt.save(1)
    gate.wait_for_visitor()
    begun = time.monotonic()
    for _ in range(3):
        training.step()  # the state was staged before the disk was needed
    with pytest.raises(StorageError, match="step 1 was not durable within"):
        ckpt.wait()
    assert time.monotonic() - begun < 30, "no call blocks much longer than durable_timeout"
    gate.open()
    ckpt._pipeline.wait_idle(60)
    ckpt._pipeline.failures.take()
    set_timeout(ckpt, 60.0)
    training.step()
    ckpt.save(2).result(60)
    assert {0, 2} <= set(steps(tmp_path / "store"))
    assert_same(load(tmp_path / "store", step=0)["model"], first["model"])
    assert_same(load(tmp_path / "store", step=2)["model"], training.copy()["model"])
    assert verify(Store.open(tmp_path / "store")).ok


def test_a_slow_disk_makes_reading_slow_and_nothing_else(tmp_path: Path, opened: Opener) -> None:
    training = Training(layers=1)
    ckpt = opened(training.objects)
    training.step()
    ckpt.save(0).result(60)
    slow = SlowIO(FileIO(), seconds=0.01, calls=("read_into", "open", "list"))
    assert verify(Store.open(tmp_path / "store", io=slow), level="restore").ok


def begun(gate: Gate, opened: Opener) -> tuple[Training, Checkpointer]:
    """A training of which step 0 is durable, with a disk that hangs from now on."""
    training = Training(layers=1)
    ckpt = opened(training.objects)
    ckpt.save(0).result(60)
    set_timeout(ckpt, 0.5)
    gate.close()
    training.step()
    return training, ckpt


@pytest.mark.parametrize("readable", [True, False])
def test_a_save_that_is_given_up_when_its_commit_is_there_says_so(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, readable: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Prevents: a save that is told to have failed, and is found on the list."""
    gate, real = Gate(), FileIO.sync_directory

    def sync_directory(self: FileIO, path: str) -> None:
        if path.endswith("runs/main"):
            gate.pass_through()
        real(self, path)

    monkeypatch.setattr(FileIO, "sync_directory", sync_directory)
    training, ckpt = begun(gate, opened)
    with monkeypatch.context() as patch:
        if not readable:
            patch.setattr(Store, "read_commit", lambda *_: 1 / 0)
        with pytest.raises(StorageError, match="step 1 was not durable within") as caught:
            ckpt.save(1).result()
    assert caught.value.kind == "timeout"
    assert caught.value.context["listed"] is (True if readable else None)
    assert "on the list of the run" in str(caught.value)
    assert ckpt.steps() == [0, 1]
    gate.open()
    set_timeout(ckpt, 60.0)
    training.step()
    ckpt.save(2).result(60)
    assert "step 1, whose save had been given up, is durable all the same" in caplog.text
    assert ckpt.steps() == [0, 1, 2]
    assert verify(Store.open(tmp_path / "store")).ok


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_save_that_is_durable_at_the_last_moment_is_no_failure(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """Prevents: a save that is told to have failed, when its writer has said that it is durable."""
    recorder = Recorder()
    ckpt = opened(Training(layers=1).objects, writer=writer, observers=[recorder])
    ckpt.save(0).result(60)
    set_timeout(ckpt, 1.5)
    with monkeypatch.context() as patch:  # what the writer says is not heard before the deadline
        patch.setattr(ckpt._pipeline._link, "_on_result", lambda *_: None)
        assert ckpt.save(1).result().step == 1
    told = [(type(e).__name__, e.step) for e in recorder.events if not isinstance(e, Staged)]
    assert told == [("Committed", 0), ("Committed", 1)]
    assert ckpt.last is not None
    assert ckpt.last.step == 1
    set_timeout(ckpt, 60.0)
    ckpt.save(2).result(60)
    assert steps(tmp_path / "store") == [0, 1, 2]


def test_a_save_that_is_given_up_before_its_commit_says_that_it_is_not_there(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_disk(monkeypatch)
    _, ckpt = begun(gate, opened)
    with pytest.raises(StorageError, match="was not durable") as caught:
        ckpt.save(1).result()
    assert caught.value.context["listed"] is False
    gate.open()
