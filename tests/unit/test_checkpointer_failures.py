"""What fails in a save: the training is told once, nothing half is there, the next one works."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import (
    ConflictError,
    DeltackptError,
    InvalidInputError,
    StateError,
    StorageError,
    WriterError,
)
from deltackpt_store.fileio import FileIO
from saving import (
    Opener,
    Training,
    assert_same,
    full_disk,
    gate_disk,
    gate_staging,
    saved,
    set_timeout,
    steps,
)

import deltackpt.detect as detect_module
import deltackpt.stage as stage_module
from deltackpt import buffers, events, lifecycle, pipeline
from deltackpt.pipeline import SavePipeline
from deltackpt.stage import Packer


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("injected")


FAULTS: dict[str, tuple[Any, str, Any, type[DeltackptError]]] = {
    "hash": (stage_module, "change_hash", _raises, DeltackptError),
    "copy": (Packer, "copy", _raises, DeltackptError),
    "plan": (detect_module, "plan_units", _raises, DeltackptError),
    "disk write": (FileIO, "write", full_disk, StorageError),
    "disk sync": (FileIO, "sync", full_disk, StorageError),
    "link": (FileIO, "link", full_disk, StorageError),
}


@pytest.mark.parametrize("how", ["save", "step", "wait", "close", "result"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_anywhere_is_raised_once_and_commits_nothing(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, fault: str, how: str
) -> None:
    """Prevents: a save that reports success although a thread of it died."""
    # case 58
    where, name, action, kind = FAULTS[fault]
    state = {"x": torch.zeros(50_000)}
    ckpt = opened(state, every=1)
    ckpt.save(1).result(60)
    state["x"].add_(1)
    state["new"] = torch.randn(20_000)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, action)
        save = ckpt.save(2)
        ckpt._pipeline.wait_idle(60)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt.save(3),
        "step": lambda: ckpt.step(3),
        "wait": ckpt.wait,
        "close": ckpt.close,
        "result": save.result,
    }
    with pytest.raises(kind) as caught:
        calls[how]()
    assert caught.value.context["step"] == 2
    assert steps(path) == [1]
    if how == "close":
        ckpt.close()
        ckpt = opened(state)
    else:
        ckpt.wait()  # told once, not twice
    # case 97: the step can be saved again, and memory agrees with the disk
    ckpt.save(2).result(60)
    assert steps(path) == [1, 2]
    assert_same(saved(path, 2), state)


@pytest.mark.parametrize("missing", ["deltackpt-finish", "deltackpt-stage"])
def test_no_thread_for_saving_is_an_error_and_the_next_save_tries_again(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    # case 58
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == missing:
            raise RuntimeError("can't start new thread")
        real(self)

    ckpt = opened({"x": torch.zeros(5000)})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(StateError, match="no thread"):
            ckpt.save(1)
    ckpt.save(1).result(60)
    ckpt.close()
    assert steps(path) == [1]


@pytest.mark.parametrize("place", ["_next_task", "_next_action"])
def test_no_memory_between_saves_ends_no_thread(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Prevents: later saves that wait for ever for a thread which has ended."""
    # case 58
    real, met = getattr(SavePipeline, place), list[str]()

    def fail_once(self: SavePipeline) -> Any:
        if not met:
            met.append(place)
            raise MemoryError
        return real(self)

    ckpt = opened({"x": torch.zeros(5000)})
    monkeypatch.setattr(SavePipeline, place, fail_once)
    ckpt.save(1).result(60)
    ckpt.close()
    assert met
    assert steps(path) == [1]


@pytest.mark.parametrize("count", [100, 5 << 20])
def test_no_memory_for_copies_fails_that_save_only(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Prevents: a training that ends of a lack of memory for a save, also with on_error="warn"."""

    real = torch.empty

    def refuse(*args: Any, **options: Any) -> Any:
        if args == (0,):
            return real(0, **options)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    state = {**Training().objects, "x": torch.zeros(1024 + count, dtype=torch.uint8)}
    ckpt = opened(state, every=1, on_error="warn")
    ckpt.lock()  # from here on saves copy what may change
    with monkeypatch.context() as patch:
        patch.setattr(buffers.mmap, "mmap", refuse)
        patch.setattr(buffers.torch, "empty", refuse)
        with pytest.raises(WriterError, match="ring_bytes") as caught:
            ckpt.save(1)
        assert ckpt.step(1) is None
    assert caught.value.kind == "memory"
    assert ckpt.step(2) is not None
    ckpt.close()
    assert steps(path) == [2]


def test_an_observer_that_exits_while_lock_gives_a_save_up(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: close() that waits for ever for a save which has ended."""

    class Exit:
        def on_event(self, event: events.Event, /) -> None:
            if isinstance(event, events.Failed):
                raise SystemExit(3)

    gate = gate_staging(monkeypatch)
    ckpt = opened(Training().objects, observers=[Exit()])
    ckpt.lock()
    handle = ckpt.save(1)
    task = ckpt._pipeline._tasks[0]
    with pytest.raises(SystemExit):
        ckpt._pipeline._give_up(task)
    assert handle.done()
    assert task not in ckpt._pipeline._tasks
    gate.open()
    with pytest.raises(StorageError, match="staged within"):
        ckpt.close()


@pytest.mark.parametrize("interrupted", ["deltackpt-finish", "deltackpt-stage"])
def test_an_interrupt_while_the_threads_start_leaves_none_behind(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """Prevents: two sets of threads that stage side by side, or one that nobody ends."""
    real, begun = threading.Thread.start, list[threading.Thread]()

    def start(self: threading.Thread) -> None:
        real(self)
        begun.append(self)
        if self.name == interrupted:
            raise KeyboardInterrupt

    ckpt = opened({"x": torch.zeros(5000)})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1)
    for thread in begun:
        thread.join(60)
        assert not thread.is_alive()
    assert ckpt._pipeline not in lifecycle._open
    ckpt.save(1).result(60)
    ckpt.close()
    assert steps(path) == [1]


def test_an_interrupt_while_a_save_is_accepted_does_not_make_close_wait_for_ever(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = opened({"x": torch.zeros(5000)})
    ckpt.save(0)
    ckpt.wait(60)
    condition = ckpt._pipeline._condition

    def interrupt() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(condition, "notify_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(1)
    closing = threading.Thread(target=ckpt.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert steps(path) == [0, 1]


def test_saves_in_flight_behind_a_failed_one_fail_with_it(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a step that refers to blobs of a step that never became durable."""
    gate, real = gate_disk(monkeypatch), FileIO.write
    state = {"x": torch.zeros(50_000), "y": torch.zeros(50_000)}
    ckpt = opened(state)
    ckpt.save(0).result(60)
    gate.close()
    state["x"].add_(1)
    first = ckpt.save(1)
    gate.wait_for_visitor()
    state["y"].add_(1)
    second = ckpt.save(2)  # stages y only: x is as in step 1
    second.staged(60)

    def sync(self: FileIO, handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(FileIO, "sync", sync)
    # what already waits at the gate goes through the real sync; break its write instead
    monkeypatch.setattr(FileIO, "link", full_disk)
    gate.open()
    for save in (first, second):
        with pytest.raises(DeltackptError):
            save.result(60)
    monkeypatch.undo()
    assert FileIO.write is real
    assert steps(path) == [0]
    ckpt.save(3).result(60)
    assert steps(path) == [0, 3]
    assert_same(saved(path, 3), state)


def test_warn_keeps_training_alive(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"x": torch.zeros(5000)}
    ckpt = opened(state, every=1, on_error="warn")
    with monkeypatch.context() as patch:
        patch.setattr(FileIO, "write", full_disk)
        ckpt.step(0)
        ckpt._pipeline.wait_idle(60)
        with caplog.at_level(logging.WARNING, "deltackpt"):
            ckpt.step(1)  # warns of step 0
            ckpt._pipeline.wait_idle(60)
    assert "training goes on" in caplog.text
    state["bad"] = object()
    assert ckpt.step(2) is None  # a value that cannot be saved is a warning, too
    del state["bad"]
    ckpt.step(3)
    ckpt.wait()
    assert steps(path) == [3]
    with monkeypatch.context() as patch:
        patch.setattr(FileIO, "write", full_disk)
        state["x"].add_(1)
        ckpt.step(4)
        with pytest.raises(StorageError):  # the end of the run is not silent
            ckpt.close()


def test_a_value_that_cannot_be_saved_is_refused_by_path(path: Path, opened: Opener) -> None:
    state: dict[str, Any] = {"x": torch.zeros(10)}
    ckpt = opened(state)
    state["bad"] = {"callback": lambda: None}  # from the start, the constructor refuses it
    with pytest.raises(InvalidInputError, match="bad/callback"):
        ckpt.save(0)
    assert steps(path) == []
    state["bad"] = {"fine": 1}
    ckpt.save(0).result(60)


def test_existing_and_earlier_steps_are_refused(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: two different contents under one step, by accident."""
    # case 99
    gate = gate_disk(monkeypatch)
    state = {"x": torch.zeros(5000)}
    ckpt = opened(state)
    ckpt.save(10).result(60)
    state["x"].fill_(1)
    for step in (10, 5, 0):
        with pytest.raises(ConflictError, match=f"step {step} cannot be saved"):
            ckpt.save(step)
    gate.close()
    ckpt.save(11)
    with pytest.raises(ConflictError, match="step 11"):
        ckpt.save(11)  # in flight counts, too
    gate.open()
    ckpt.wait()
    gate.close()
    state["x"].fill_(2)
    save = ckpt.save(10, overwrite=True)
    gate.wait_for_visitor()
    assert steps(path) == [10, 11]  # the old one stays until the new one is durable
    assert torch.equal(saved(path, 10)["x"], torch.zeros(5000))
    gate.open()
    save.result(60)
    assert torch.equal(saved(path, 10)["x"], torch.full((5000,), 2.0))
    other = opened(state, run="other")
    other.save(3).result(60)  # other runs are not concerned
    ckpt.close()
    again = opened(state)
    with pytest.raises(ConflictError, match="restore"):
        again.save(1)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_second_checkpointer_on_the_run_is_told_who_holds_it(
    path: Path, opened: Opener, writer: str
) -> None:
    """The training process, which is what the user knows and can end; here it is this one."""
    state = {"x": torch.zeros(5000)}
    first = opened(state, writer=writer)
    second = opened(state, writer=writer, lock_timeout=0.1)
    first.save(0).result(60)
    with pytest.raises(ConflictError, match=f"written by process {os.getpid()} ") as caught:
        second.save(1).result(60)
    assert caught.value.hint is not None
    assert "close() the Checkpointer" in caught.value.hint
    first.close()
    second.save(1).result(60)


def test_the_writers_death_is_an_error_and_the_next_save_starts_another(
    path: Path, opened: Opener
) -> None:
    training = Training()
    ckpt = opened(training.objects, writer="process")
    training.step()
    ckpt.save(0).result(60)
    client = ckpt._pipeline._link._client
    assert client is not None
    os.kill(client.writer_pid, signal.SIGSTOP)
    training.step()
    ckpt.save(1)
    os.kill(client.writer_pid, signal.SIGKILL)
    ckpt._pipeline.wait_idle(60)
    with pytest.raises(WriterError, match="SIGKILL"):
        ckpt.save(2)
    training.step()
    ckpt.save(2).result(60)
    assert steps(path) == [0, 2]
    assert_same(saved(path, 2), training.copy())


def test_a_full_ring_and_a_dead_writer_never_hang(path: Path, opened: Opener) -> None:
    state = {"x": torch.randn(1 << 20)}
    ckpt = opened(state, writer="process", ring_bytes=1 << 18, chunk_bytes=65536)
    ckpt.save(0).result(60)
    client = ckpt._pipeline._link._client
    assert client is not None
    os.kill(client.writer_pid, signal.SIGSTOP)
    state["x"].add_(1)
    killer = threading.Timer(0.2, os.kill, (client.writer_pid, signal.SIGKILL))
    killer.start()
    save = ckpt.save(1)  # waits for the ring, since nothing shows that the state is guarded
    with pytest.raises(WriterError):
        save.result(60)
    killer.join()
    ckpt.save(1).result(60)
    assert_same(saved(path, 1), state)


def test_storage_that_hangs_fails_the_save_in_time_and_names_it(path: Path, opened: Opener) -> None:
    """Prevents: training that stands still for ever because a file server does."""
    training = Training()
    ckpt = opened(training.objects, writer="process", durable_timeout=5.0)
    training.step()
    ckpt.save(0).result(60)
    client = ckpt._pipeline._link._client
    assert client is not None
    set_timeout(ckpt, 0.5)
    os.kill(client.writer_pid, signal.SIGSTOP)
    training.step()
    ckpt.save(1)

    def go_on() -> None:
        training.step()
        ckpt.save(2)
        ckpt.wait()

    with pytest.raises(StorageError, match=r"step 1 was not durable within 0\.5 s") as caught:
        go_on()
    assert caught.value.kind == "timeout"
    ckpt._pipeline.wait_idle(60)
    ckpt._pipeline.failures.take()
    set_timeout(ckpt, 60.0)
    training.step()
    ckpt.save(4).result(60)
    assert steps(path) == [0, 4]


def test_time_for_which_the_process_is_stopped_does_not_count(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: jobs suspended for longer than `durable_timeout` that fail when they go on."""

    class Clock:
        perf_counter = time.perf_counter
        ahead = 0.0

        @classmethod
        def monotonic(cls) -> float:
            return time.monotonic() + cls.ahead

    monkeypatch.setattr(pipeline, "time", Clock)
    gate = gate_disk(monkeypatch)
    ckpt = opened({"x": torch.zeros(5000)}, durable_timeout=600)
    ckpt.save(0).result(60)
    gate.close()
    handle = ckpt.save(1)
    gate.wait_for_visitor()
    seen = threading.Event()
    ckpt._pipeline._actions.put(seen.set)
    assert seen.wait(60)
    Clock.ahead = 10_000.0
    seen.clear()
    ckpt._pipeline._actions.put(lambda: None)
    ckpt._pipeline._actions.put(seen.set)
    assert seen.wait(60)
    gate.open()
    assert handle.result(60).step == 1


def test_staging_that_hangs_gives_the_save_up_and_lets_training_go_on(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_staging(monkeypatch)
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    ckpt.save(0).result(60)
    training.step()
    set_timeout(ckpt, 0.3)
    gate.close()
    ckpt.save(1)
    gate.wait_for_visitor()
    training.step()  # waits at the lock, 0.3 s and not for ever, and raises nothing
    gate.open()
    with pytest.raises(StorageError, match="step 1 was not staged"):
        ckpt.wait()
    set_timeout(ckpt, 60.0)
    ckpt.save(2).result(60)
    assert_same(saved(path, 2), training.copy())


class Broken(dict[Any, Any]):
    """A mapping of somebody's that raises, and a number that does, while `broken`."""

    broken = False

    def keys(self) -> Any:
        if Broken.broken:
            raise LookupError("out of order")
        return super().keys()

    def __iter__(self) -> Any:
        if Broken.broken:
            raise LookupError("out of order")
        return super().__iter__()

    def __float__(self) -> float:
        if Broken.broken:
            raise LookupError("out of order")
        return 1.0


USERS: dict[str, tuple[dict[str, Any], type[DeltackptError], str]] = {
    "every": ({}, InvalidInputError, "every"),
    "a metric": ({"metrics": {"loss": Broken()}}, InvalidInputError, "metrics"),
    "metrics": ({"metrics": Broken(loss=1.0)}, StateError, "metrics"),
    "state": ({}, StateError, "state"),
}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("what", USERS)
def test_what_the_user_gave_and_what_raises_is_named(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, what: str, on_error: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Prevents: a raw error out of the middle of `step`, and saves that it leaves half done."""
    options, kind, option = USERS[what]

    def due(step: int) -> bool:
        if what == "every" and Broken.broken:
            raise LookupError("out of order")
        return step != 7

    weights = torch.ones(50_000)
    state = (Broken if what == "state" else dict)(w=weights)
    ckpt = opened(state, every=due, on_error=on_error, final=True)
    saved_first = ckpt.step(0)
    assert saved_first is not None
    saved_first.result(60)
    weights.add_(1)
    before = weights.clone()
    with monkeypatch.context() as patch:
        patch.setattr(Broken, "broken", True)
        if on_error == "raise":
            with pytest.raises(kind, match=r"LookupError|no number") as caught:
                ckpt.step(1, **options)
            assert caught.value.context["option"] == option
            assert isinstance(caught.value.__cause__, LookupError)
        else:
            assert ckpt.step(1, **options) is None
            assert option in caplog.text
        if what == "every":
            with pytest.raises(kind, match="every="):
                ckpt.should_save(1)
        if what == "state":
            with pytest.raises(kind, match="out of order"):
                ckpt.restore(0)
    assert torch.equal(weights, before)
    assert not ckpt._pipeline.in_flight
    handle = ckpt.step(2)
    assert handle is not None
    assert handle.result(60).step == 2
    assert ckpt.step(7) is None
    ckpt.close()
    assert steps(path) == [0, 2, 7]


def test_a_signal_and_close_save_whatever_every_raises(path: Path, opened: Opener) -> None:
    """Prevents: the last save before preemption lost to a function that is not asked for it."""

    def due(step: int) -> bool:
        raise LookupError("out of order")

    ckpt = opened({"w": torch.ones(10)}, every=due, save_on=[signal.SIGUSR1], final=True)
    with pytest.raises(InvalidInputError, match="every="):
        ckpt.step(1)
    signal.raise_signal(signal.SIGUSR1)
    handle = ckpt.step(2)
    assert handle is not None
    with pytest.raises(InvalidInputError, match="every="):
        ckpt.step(3)
    ckpt.close()
    assert steps(path) == [2, 3]


def test_an_error_of_ours_in_every_stays_what_it_is(opened: Opener) -> None:
    """A function that saves by itself is told so, also with on_error="warn"."""
    ckpt = opened({"w": torch.ones(10)}, every=lambda step: ckpt.save(step), on_error="warn")
    with pytest.raises(StateError) as caught:
        ckpt.step(1)
    assert caught.value.kind == "reentrant"


def test_a_restore_names_the_object_that_gives_no_state(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    ckpt = opened(training.objects)
    ckpt.save(0).result(60)
    expected = training.copy()
    with monkeypatch.context() as patch:
        patch.setattr(training.model, "state_dict", _raises)
        with pytest.raises(StateError, match=r"'model'.*injected") as caught:
            ckpt.restore()
        assert caught.value.kind == "state-failed"
    assert_same(training.copy(), expected)
    assert ckpt.restore() is not None
    ckpt.save(1).result(60)


def test_a_state_that_takes_no_new_values_is_told_after_a_restore(opened: Opener) -> None:
    class Closed(dict[str, Any]):
        def update(self, *args: Any, **options: Any) -> None:
            raise LookupError("read only")

    state = Closed(w=torch.zeros(5), epoch=1)
    ckpt = opened(state)
    ckpt.save(1).result(60)
    ckpt.restore()  # nothing is to be replaced
    state["epoch"] = 2
    with pytest.raises(StateError, match="read only") as caught:
        ckpt.restore()
    assert (caught.value.kind, caught.value.context["option"]) == ("incomplete-target", "state")
    assert caught.value.context["incomplete"] == ("epoch",)
