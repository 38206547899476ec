"""Prevents: compaction beside a training stalls it, ends it, outlives it, or fails unseen."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store import compact_job
from deltackpt_store.errors import ConflictError, InvalidInputError, StorageError
from deltackpt_store.store import Store

import deltackpt
from deltackpt import Compact, CompactionFailed, Keep, StoreCompacted, compaction
from deltackpt.compaction import Compactions

PATIENCE = 300.0  # seconds; a machine with nothing else to do takes one


class Recorder:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_event(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Training:
    """Weights that move a little each step, saved each step."""

    def __init__(self, path: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(40_000)
        self.recorder = Recorder()
        self.saved: dict[int, torch.Tensor] = {}
        self.number = 0
        self.ckpt = deltackpt.Checkpointer(
            path / "store", {"w": self.weight}, keep=Keep(last=3), codec="small",
            chunk_bytes=16 * 1024, rng=False, observers=[self.recorder], **options,
        )  # fmt: skip

    def step(self) -> None:
        self.number += 1
        self.weight[:: 97 + self.number] += 1e-3
        self.saved[self.number] = self.weight.clone()
        self.ckpt.save(self.number)
        self.ckpt.wait()

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.recorder.events[-5:]
            self.step()

    def check(self) -> None:
        store = self.ckpt._store.path
        for number in deltackpt.steps(store):
            state = deltackpt.load(store, step=number)
            assert torch.equal(state["w"], self.saved[number]), number


def process_of(training: Training) -> Any:
    compactions = training.ckpt._compactions
    assert isinstance(compactions, Compactions)
    return compactions._process


def test_a_training_is_compacted_while_it_goes_on(tmp_path: Path) -> None:
    training = Training(tmp_path, compact=Compact(interval=0.05, when_ratio=0.0, max_rate=None))
    training.step()
    training.until(lambda: any(e.report.bases for e in training.recorder.of(StoreCompacted)))
    assert not training.recorder.of(CompactionFailed)
    process = process_of(training)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    training.step()
    training.ckpt.close()
    assert process.poll() is not None
    training.check()
    assert deltackpt.steps(tmp_path / "store")[-1] == training.number


def test_what_python_prints_when_it_starts_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: no compaction for the rest of a training, where a sitecustomize greets."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome\\nto the cluster', end='')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    training = Training(tmp_path, compact=Compact(interval=0.05, when_ratio=0.0, max_rate=None))
    training.step()
    training.until(
        lambda: training.recorder.of(StoreCompacted) or training.recorder.of(CompactionFailed)
    )
    assert not training.recorder.of(CompactionFailed)
    training.ckpt.close()


def test_a_compacting_process_that_dies_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, compact="auto")
    training.step()
    training.until(lambda: process_of(training) is not None)
    with caplog.at_level(logging.WARNING, "deltackpt"):
        process_of(training).send_signal(signal.SIGKILL)
        training.until(lambda: training.recorder.of(CompactionFailed))
    [failed] = training.recorder.of(CompactionFailed)
    assert failed.error.kind == "compaction"
    assert "training goes on" in caplog.text
    training.step()
    training.ckpt.close()
    training.check()


def test_without_a_thread_for_it_training_goes_on_uncompacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a save that counts as failed, and a close that lets nothing go, for a helper."""
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "deltackpt-compactions":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    training = Training(tmp_path, compact="auto")
    training.step()
    training.step()
    [failed] = training.recorder.of(CompactionFailed)
    assert failed.error.kind == "no-thread"
    training.ckpt.close()
    training.check()
    assert deltackpt.steps(tmp_path / "store") == [1, 2]


@pytest.mark.parametrize("executable", [None, ""])
def test_a_program_that_cannot_start_python_compacts_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    """Prevents: compaction that fails unseen where Python is embedded in another program."""
    monkeypatch.setattr(sys, "executable", executable)
    training = Training(tmp_path, compact="auto", writer="thread")
    training.until(lambda: training.recorder.of(CompactionFailed))
    training.ckpt.close()
    [failed] = training.recorder.of(CompactionFailed)
    assert "no Python interpreter" in str(failed.error)


def test_whatever_ends_the_listening_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(self: Compactions, process: Any) -> None:
        process.stdout.close()
        raise MemoryError

    monkeypatch.setattr(Compactions, "_listen", listen)
    training = Training(tmp_path, compact="auto", writer="thread")
    training.until(lambda: training.recorder.of(CompactionFailed))
    training.ckpt.close()
    assert process_of(training).returncode == -signal.SIGKILL
    [failed] = training.recorder.of(CompactionFailed)
    assert "MemoryError" in str(failed.error)


def test_a_checkpointer_may_be_collected_while_its_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: garbage collection of Python objects, in the very thread that starts the process,
    that waits for that thread for ever."""
    real, started = compaction.start_compactions, list[Any]()

    def start(*arguments: Any) -> Any:
        compactions.end()  # as the finalizer of a checkpointer does, wherever it runs
        started.append(real(*arguments))
        return started[0]

    monkeypatch.setattr(compaction, "start_compactions", start)
    Store.create(tmp_path / "store")
    compactions = Compactions(str(tmp_path / "store"), "main", Compact(), [].append)
    compactions.start()
    thread = compactions._thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    assert started[0].returncode == -signal.SIGKILL


def test_a_checkpointer_that_is_dropped_ends_its_process(tmp_path: Path) -> None:
    training = Training(tmp_path, compact="auto")
    training.step()
    training.until(lambda: process_of(training) is not None)
    process, compactions = process_of(training), training.ckpt._compactions
    del training.ckpt
    process.wait(PATIENCE)
    assert compactions is not None
    compactions.close()
    assert not training.recorder.of(CompactionFailed)


def test_nothing_is_started_without_a_save(tmp_path: Path) -> None:
    training = Training(tmp_path, compact="auto")
    training.ckpt.close()
    assert process_of(training) is None


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What compactions of the job raise, one after the other; then the job's trainer is gone."""
    errors: list[Exception] = []

    def compact(*_: object, **__: object) -> object:
        raise errors.pop(0)

    def look(_: int) -> None:
        if not errors:
            raise compact_job._OrphanedError

    monkeypatch.setattr(compact_job, "compact", compact)
    monkeypatch.setattr(compact_job, "_look", look)
    return errors


def test_the_job_tells_of_errors_and_tries_again(
    tmp_path: Path, outcomes: list[Exception], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """That somebody else is at work is no error."""
    import msgspec

    store = Store.create(tmp_path / "store")
    outcomes += [ConflictError("busy", kind="gc-busy"), StorageError("full", kind="no-space")]
    settings = msgspec.json.encode(compact_job.JobSettings(run="main", interval=0.0)).decode()
    compact_job.run_job(store.path, settings, os.getppid())
    [line] = filter(None, capfdbinary.readouterr().out.splitlines())
    told = msgspec.json.decode(line, type=compact_job.Told)
    assert told.error is not None
    assert told.error["kind"] == "no-space"


def test_the_job_ends_with_its_trainer(tmp_path: Path) -> None:
    compact_job.run_job(str(tmp_path), '{"run": "main", "interval": 1000}', parent=-1)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"interval": 0}, "interval"), ({"when_ratio": -1}, "when_ratio"), ({"every": 0}, "every"),
     ({"min_live_share": 1.5}, "min_live_share"), ({"max_rate": "fast"}, "max_rate")],
)  # fmt: skip
def test_options_are_checked(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Compact(**options)
    assert caught.value.context["option"] == f"compact.{named}"


def test_a_number_that_is_out_of_range_is_told_the_range() -> None:
    with pytest.raises(InvalidInputError, match="at least 0 or None, got -1"):
        Compact(when_ratio=-1)


def test_the_option_of_the_checkpointer_is_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="compact must be"):
        deltackpt.Checkpointer(tmp_path / "s", {"w": torch.zeros(3)}, compact="always")
