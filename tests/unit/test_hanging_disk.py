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
from saving import Opener, Training, assert_same, gate_disk, set_timeout

from deltackpt import load, steps


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
