"""The save path as a training loop sees it: one instant per step, bounded, and honest."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    StateError,
    StorageError,
    WriterError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.store import Store
from saving import (
    Opener,
    Recorder,
    Training,
    assert_same,
    gate_disk,
    gate_staging,
    opener,
    saved,
    steps,
)
from torch import nn

import deltackpt.detect as detect_module
import deltackpt.stage as stage_module
from deltackpt import buffers, events, lifecycle, pipeline
from deltackpt.checkpointer import Checkpointer
from deltackpt.load import load
from deltackpt.pipeline import SavePipeline
from deltackpt.policy import Keep
from deltackpt.restore import restore_into
from deltackpt.stage import Packer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(path: Path) -> Iterator[Opener]:
    with opener(path) as open_one:
        yield open_one


# one instant -------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_every_step_reads_back_as_it_was(path: Path, opened: Opener, writer: str) -> None:
    training = Training()
    copies: dict[int, Any] = {}
    with opened(training.objects, writer=writer) as ckpt:
        for step in range(5):
            training.step()
            ckpt.save(step, {"loss": float(step)})
            copies[step] = training.copy()
    assert steps(path) == [0, 1, 2, 3, 4]
    for step, copy in copies.items():
        assert_same(saved(path, step), copy)


def test_loose_tensors_may_change_on_the_next_line(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: the value of a later moment in the step that was saved before it."""
    # case 48
    gate = gate_disk(monkeypatch)
    state = {"x": torch.zeros(10_000), "small": torch.zeros(3), "nested": [torch.ones(5000)]}
    ckpt = opened(state)
    gate.close()
    save = ckpt.save(1)
    for tensor in (state["x"], state["small"], state["nested"][0]):
        tensor.add_(1)
    gate.open()
    save.result(60)
    found = saved(path, 1)
    assert torch.equal(found["x"], torch.zeros(10_000))
    assert torch.equal(found["small"], torch.zeros(3))
    assert torch.equal(found["nested"][0], torch.ones(5000))


def test_a_parameter_changed_behind_the_lock_fails_the_save_by_name(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a committed step with weights of two moments."""
    # case 48
    gate = gate_staging(monkeypatch)
    training = Training()
    ckpt = opened(training.objects)
    training.step()  # shows the checkpointer an optimizer, so that it overlaps
    ckpt.save(0).result(60)
    training.step()
    gate.close()
    save = ckpt.save(1)
    gate.wait_for_visitor()
    with torch.no_grad():
        training.model[0].weight.add_(1)
    gate.open()
    with pytest.raises(CorruptionError, match=r"model/0\.weight") as caught:
        save.result(60)
    assert caught.value.kind == "torn"
    assert steps(path) == [0]
    ckpt.save(1).result(60)  # the step can be saved again
    assert_same(saved(path, 1), training.copy())


def test_lock_makes_changes_by_hand_safe(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 48
    gate = gate_staging(monkeypatch)
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    copy = training.copy()
    gate.close()
    save = ckpt.save(0)
    gate.wait_for_visitor()
    opening = threading.Timer(0.05, gate.open)
    opening.start()
    ckpt.lock()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    assert save.result(60).stall_seconds > 0
    opening.join()
    assert_same(saved(path, 0), copy)


@pytest.mark.parametrize("options", [{"overlap": False}, {}], ids=["overlap=False", "no optimizer"])
def test_without_overlap_anything_may_change_after_save(
    path: Path, opened: Opener, options: dict[str, Any]
) -> None:
    # case 48
    training = Training()
    training.step()
    state = training.objects if options else {"model": training.model}
    ckpt = opened(state, **options)
    training.step()
    copy = training.copy()
    save = ckpt.save(0)
    for parameter in training.model.parameters():
        parameter.data.zero_()  # which no version counter sees
    save.result(60)
    assert_same(saved(path, 0)["model"], copy["model"])


def test_replays_of_a_captured_step_need_no_lock(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents two steps mixed in one save: a CUDA graph replays a step without its hooks."""
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    monkeypatch.setattr("deltackpt.guard.is_capturing", lambda: True)
    training.step()
    monkeypatch.setattr("deltackpt.guard.is_capturing", lambda: False)
    copy = training.copy()
    save = ckpt.save(0)
    for parameter in training.model.parameters():
        parameter.data -= 1  # as a replay does
    save.result(60)
    assert_same(saved(path, 0), copy)
    assert "captured in a CUDA graph" in caplog.text


def test_a_loop_without_a_torch_optimizer_is_safe_by_default(path: Path, opened: Opener) -> None:
    """Prevents: `p.data -= lr * p.grad` right after save, which nothing would notice."""
    training = Training()
    training.step()  # before the checkpointer exists: it has seen no optimizer
    ckpt = opened(training.objects)
    copy = training.copy()
    save = ckpt.save(0)
    for parameter in training.model.parameters():
        parameter.data -= 1
    save.result(60)
    assert_same(saved(path, 0), copy)


def test_the_optimizer_waits_by_itself(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: the step counter of one step with the moments of another."""
    # case 49
    gate = gate_staging(monkeypatch)
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    real = SavePipeline.lock

    def lock(self: SavePipeline) -> None:
        gate.open()  # the optimizer is about to step; only now may staging go on
        real(self)

    for step in range(3):
        training.backward()
        copy = training.copy()
        monkeypatch.setattr(SavePipeline, "lock", real)
        gate.close()
        save = ckpt.save(step)
        gate.wait_for_visitor()
        monkeypatch.setattr(SavePipeline, "lock", lock)
        training.optimizer.step()
        save.result(60)
        assert_same(saved(path, step), copy)


def test_buffers_that_forward_changes_are_those_of_the_call(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 49
    gate = gate_staging(monkeypatch)
    training = Training(width=1024, layers=1)  # batch-norm statistics of 4 KiB
    ckpt = opened(training.objects)
    training.step()
    copy = training.copy()
    gate.close()
    save = ckpt.save(0)
    gate.wait_for_visitor()
    training.backward()
    gate.open()
    save.result(60)
    assert_same(saved(path, 0), copy)


def test_storages_that_move_between_saves_are_read_where_they_are(
    path: Path, opened: Opener
) -> None:
    """Prevents: saving the bytes of the first step for ever after an offload."""
    # case 50
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    ckpt.save(0).result(60)
    parameter = next(training.model.parameters())
    changes: list[Callable[[], None]] = [
        lambda: setattr(parameter, "data", parameter.data.clone() + 1),
        lambda: _offload_and_back(parameter),
        lambda: training.optimizer.load_state_dict(training.optimizer.state_dict()),
        lambda: training.step(),
    ]
    for step, change in enumerate(changes, start=1):
        change()
        ckpt.save(step).result(60)
        ckpt.lock()
        assert_same(saved(path, step), training.copy())


def _offload_and_back(parameter: nn.Parameter) -> None:
    held = parameter.data.clone()
    size = parameter.untyped_storage().nbytes()
    parameter.untyped_storage().resize_(0)
    parameter.untyped_storage().resize_(size)
    parameter.data.copy_(held * 2)


def test_writes_that_no_counter_sees_are_saved(path: Path, opened: Opener) -> None:
    # case 76
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    ckpt.save(0).result(60)
    parameter = next(training.model.parameters())
    parameter.data[0, 0] = 5
    parameter.detach().numpy()[1, 1] = 7
    ckpt.save(1).result(60)
    found = saved(path, 1)["model"]["0.weight"]
    assert (found[0, 0], found[1, 1]) == (5, 7)
    assert_same(found, parameter.detach())


def test_bytes_that_change_between_hash_and_copy_are_never_committed(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 52
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    ckpt.save(0).result(60)
    training.step()
    real, first = Packer.copy, iter([True])

    def late(self: Packer, slot: int, at: int, data: memoryview) -> None:
        if next(first, False):
            training.model[0].weight.data.add_(1)
        real(self, slot, at, data)

    monkeypatch.setattr(Packer, "copy", late)
    with pytest.raises(CorruptionError) as caught:
        ckpt.save(1).result(60)
    assert caught.value.kind == "torn"
    assert steps(path) == [0]
    ckpt.save(1).result(60)
    assert_same(saved(path, 1), training.copy())


# many saves --------------------------------------------------------------------------------------


def test_saving_every_step_waits_and_commits_in_order(path: Path, opened: Opener) -> None:
    """Prevents: an unbounded queue of copies, and buffers that are reused in flight."""
    # case 56
    training = Training(width=128)
    recorder = Recorder()
    copies: dict[int, Any] = {}
    with opened(training.objects, observers=[recorder], ring_bytes=1 << 20) as ckpt:
        for step in range(20):
            training.step()
            ckpt.save(step)
            assert len(ckpt._pipeline.in_flight) <= 2
            copies[step] = training.copy()
    assert [event.step for event in recorder.of(events.Committed)] == list(range(20))
    assert steps(path) == list(range(20))
    for step in (0, 7, 19):
        assert_same(saved(path, step), copies[step])


def test_skip_drops_saves_while_two_are_in_flight_and_counts_them(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 56
    gate = gate_disk(monkeypatch)
    recorder, state = Recorder(), {"x": torch.zeros(5000)}
    ckpt = opened(state, on_busy="skip", observers=[recorder])
    gate.close()
    saves = [ckpt.save(step) for step in range(5)]
    assert [save.skipped for save in saves] == [None, None, "skip", "skip", "skip"]
    assert saves[2].done()
    with pytest.raises(StateError, match="step 2 was not saved") as caught:
        saves[2].result()
    assert caught.value.kind == "skipped"
    gate.open()
    ckpt.wait()
    state["x"].add_(1)
    report = ckpt.save(6).result(60)
    assert report.skipped == 3
    assert steps(path) == [0, 1, 6]
    assert [event.step for event in recorder.of(events.Skipped)] == [2, 3, 4]
    assert torch.equal(saved(path, 6)["x"], torch.ones(5000))


def test_coalesce_saves_a_later_moment_under_its_own_step(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 56
    gate = gate_disk(monkeypatch)
    state = {"x": torch.zeros(5000)}
    ckpt = opened(state, on_busy="coalesce", every=lambda step: step < 4)
    gate.close()
    for step in range(4):
        state["x"].fill_(step)
        save = ckpt.step(step)
        assert save is not None
        assert save.skipped == (None if step < 2 else "coalesce")
    gate.open()
    ckpt.wait()
    assert steps(path) == [0, 1]
    state["x"].fill_(4)
    save = ckpt.step(4)  # not due by itself: it makes up for 2 and 3
    assert save is not None
    assert save.result(60).skipped == 2
    assert ckpt.step(5) is None
    assert torch.equal(saved(path, 4)["x"], torch.full((5000,), 4.0))
    assert steps(path) == [0, 1, 4]


def test_a_state_four_times_the_ring_goes_through(path: Path, opened: Opener) -> None:
    """Prevents: out of memory at the first save, because all of it is staged at once."""
    # case 74
    state = {f"t{i}": torch.randn(1 << 16) for i in range(16)}  # 4 MiB
    ckpt = opened(state, ring_bytes=1 << 20, chunk_bytes=65536, rng=False)
    report = ckpt.save(0).result(60)
    assert report.staged_bytes == 4 << 20
    assert report.ring_bytes <= 1 << 20
    assert_same(saved(path, 0), state)


def test_memory_does_not_grow_with_saves(path: Path, opened: Opener) -> None:
    """Prevents: staged copies, tables or futures that pile up over a long run."""
    # case 72
    training = Training(width=256, layers=4)  # 3 MB of state, all of it changing
    ckpt = opened(training.objects, writer="process", chunk_bytes=65536)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before = 0
    for step in range(60):
        training.step()
        ckpt.save(step).result(60)
        if step == 19:
            before = resident()
    assert resident() - before < 40 * (1 << 20) // 4
    assert not ckpt._pipeline._tasks
    assert not ckpt._pipeline.failures._untold


def test_thousands_of_tiny_tensors_are_few_messages_and_files(path: Path, opened: Opener) -> None:
    """Prevents: one copy, file or plan entry per tensor and save."""
    # case 168
    generator = torch.Generator().manual_seed(1)
    state = {
        f"t{i}": torch.randn(int(n), generator=generator)
        for i, n in enumerate(torch.randint(1, 1025, (20_000,), generator=generator))
    }
    ckpt = opened(state, chunk_bytes=1 << 18, rng=False)
    ckpt.save(0).result(60)
    previous = ckpt._previous
    for i in (5, 10_000):
        state[f"t{i}"].add_(1)
    files = sum(len(names) for _, _, names in os.walk(path))
    report = ckpt.save(1).result(60)
    assert sum(len(names) for _, _, names in os.walk(path)) - files <= 4
    assert ckpt._previous is not None
    assert previous is not None
    assert ckpt._previous.layout is previous.layout
    assert report.changed_chunks <= 2
    assert_same(saved(path, 1), state)


# failures ----------------------------------------------------------------------------------------


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("injected")


def _full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


FAULTS: dict[str, tuple[Any, str, Any, type[DeltackptError]]] = {
    "hash": (stage_module, "change_hash", _raises, DeltackptError),
    "copy": (Packer, "copy", _raises, DeltackptError),
    "plan": (detect_module, "plan_units", _raises, DeltackptError),
    "disk write": (FileIO, "write", _full, StorageError),
    "disk sync": (FileIO, "sync", _full, StorageError),
    "link": (FileIO, "link", _full, StorageError),
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
    monkeypatch.setattr(FileIO, "link", _full)
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
        patch.setattr(FileIO, "write", _full)
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
        patch.setattr(FileIO, "write", _full)
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


def test_a_second_checkpointer_on_the_run_is_told_who_holds_it(path: Path, opened: Opener) -> None:
    state = {"x": torch.zeros(5000)}
    first, second = opened(state), opened(state, lock_timeout=0.1)
    first.save(0).result(60)
    with pytest.raises(ConflictError, match=str(os.getpid())):
        second.save(1).result(60)
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
    ckpt._pipeline._options = _with_timeout(ckpt, 0.5)
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
    ckpt._pipeline._options = _with_timeout(ckpt, 60.0)
    training.step()
    ckpt.save(4).result(60)
    assert steps(path) == [0, 4]


def _with_timeout(ckpt: Checkpointer, seconds: float) -> Any:
    import dataclasses

    return dataclasses.replace(ckpt._options, durable_timeout=seconds)


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
    ckpt._pipeline._options = _with_timeout(ckpt, 0.3)
    gate.close()
    ckpt.save(1)
    gate.wait_for_visitor()
    training.step()  # waits at the lock, 0.3 s and not for ever, and raises nothing
    gate.open()
    with pytest.raises(StorageError, match="step 1 was not staged"):
        ckpt.wait()
    ckpt._pipeline._options = _with_timeout(ckpt, 60.0)
    ckpt.save(2).result(60)
    assert_same(saved(path, 2), training.copy())


# the end -----------------------------------------------------------------------------------------


def test_leaving_the_block_waits_and_raises_what_failed(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.zeros(5000)}
    with opened(state) as ckpt:
        ckpt.save(0)
    assert steps(path) == [0]
    ckpt.close()  # again: nothing
    for call in (lambda: ckpt.save(1), lambda: ckpt.step(1), ckpt.wait, ckpt.lock,
                 lambda: ckpt.should_save(1), lambda: ckpt.__enter__()):  # fmt: skip
        with pytest.raises(StateError, match="closed"):
            call()
    monkeypatch.setattr(FileIO, "write", _full)
    ckpt = opened(state)
    state["x"].add_(1)
    ckpt.save(1)
    with pytest.raises(StorageError):
        ckpt.__exit__(None, None, None)


def leave_by_exception(ckpt: Checkpointer, action: Callable[[], object]) -> None:
    with ckpt:
        action()
        raise ZeroDivisionError


def test_an_exception_in_the_block_is_not_hidden(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.zeros(5000)}
    ckpt = opened(state, every=100, final=True)
    with pytest.raises(ZeroDivisionError):
        leave_by_exception(ckpt, lambda: (ckpt.save(1), ckpt.step(2)))
    assert steps(path) == [1]  # in flight: finished; the unsaved step 2 may be half done: not saved
    monkeypatch.setattr(FileIO, "write", _full)
    ckpt = opened(state)
    state["x"].add_(1)
    with pytest.raises(ZeroDivisionError):
        leave_by_exception(ckpt, lambda: ckpt.save(5))
    assert "step 5" in caplog.text


def test_close_saves_the_last_step_once(path: Path, opened: Opener) -> None:
    """Prevents: the end of a run that is not a multiple of the interval being lost."""
    # case 161
    state = {"x": torch.zeros(5000)}
    with opened(state, every=3, final=True) as ckpt:
        for step in range(8):
            state["x"].fill_(step)
            ckpt.step(step)
    assert steps(path) == [0, 3, 6, 7]
    assert torch.equal(saved(path, 7)["x"], torch.full((5000,), 7.0))
    with opened(state, run="exact", every=2, final=True) as ckpt:
        for step in range(5):
            ckpt.step(step)
    assert steps(path, "exact") == [0, 2, 4]
    with opened(state, run="off", every=3, final=False) as ckpt:
        for step in range(5):
            ckpt.step(step)
    assert steps(path, "off") == [0, 3]
    with opened(state, run="none", final=True) as ckpt:
        ckpt.save(1)
    assert steps(path, "none") == [1]


def test_close_saves_a_last_step_that_was_skipped(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 161
    gate = gate_disk(monkeypatch)
    state = {"x": torch.zeros(5000)}
    ckpt = opened(state, every=1, on_busy="skip", final=True)
    gate.close()
    for step in range(4):
        ckpt.step(step)
    opening = threading.Timer(0.05, gate.open)
    opening.start()
    ckpt.close()
    opening.join()
    assert steps(path) == [0, 1, 3]


def test_a_save_after_the_end_of_the_interpreter_has_begun_is_refused(
    path: Path, opened: Opener
) -> None:
    """Prevents: an exit that hangs, for a thread or a function of atexit that still saves."""
    # case 61
    ckpt = opened({"x": torch.zeros(5000)}, durable_timeout=5, final=False)
    ckpt.save(0)
    ckpt._pipeline.finish_at_exit()
    with pytest.raises(StateError, match="interpreter is ending") as caught:
        ckpt.save(1)
    assert caught.value.kind == "closed"
    ckpt.close()
    assert steps(path) == [0]


def test_a_dropped_checkpointer_still_finishes(path: Path) -> None:
    state = {"x": torch.zeros(5000)}
    ckpt = Checkpointer(path, state, writer="thread")
    save = ckpt.save(0)
    del ckpt
    gc.collect()
    assert save.result(60).step == 0
    with Checkpointer(path, state, writer="thread") as again:
        again.save(1)
    assert steps(path) == [0, 1]


# what it says ------------------------------------------------------------------------------------


def test_reports_add_up(path: Path, opened: Opener) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {"x": torch.randn(65536, generator=generator), "y": torch.zeros(10)}
    ckpt = opened(state, chunk_bytes=65536, codec="none", rng=False)
    report = ckpt.save(0, {"loss": 0.5}).result(60)
    assert (report.step, report.run, report.commit) == (0, "main", 1)
    assert report.changed_bytes == report.staged_bytes == 65536 * 4
    assert 65536 * 4 <= report.written_bytes <= 65536 * 4 * 1.001
    assert (report.chunks, report.changed_chunks, report.codecs) == (4, 4, {"raw": 4})
    assert report.state_bytes >= 65536 * 4 + 40
    assert 0 <= report.stall_seconds <= report.durable_seconds
    assert report.staged_seconds <= report.durable_seconds
    assert report.ring_bytes > 0
    commit = Store.open(path).head("main")
    assert report.root == commit.root.hex()
    assert commit.metrics == {"loss": 0.5}
    state["x"][0] += 1
    report = ckpt.save(1).result(60)
    assert report.changed_chunks == 1
    assert 65536 <= report.written_bytes <= 65536 * 1.002
    report = ckpt.save(2).result(60)
    assert (report.changed_chunks, report.staged_bytes, report.written_bytes) == (0, 0, 0)
    assert ckpt.last == report
    assert report.to_dict()["step"] == 2


def test_observers_hear_of_each_save_in_order(path: Path, opened: Opener) -> None:
    class Broken:
        def on_event(self, event: events.Event, /) -> None:
            raise RuntimeError("broken observer")

    recorder = Recorder()
    with opened({"x": torch.zeros(5000)}, observers=[Broken(), recorder]) as ckpt:
        for step in range(3):
            ckpt.save(step).result(60)
    assert [(type(e).__name__, e.step) for e in recorder.events] == [
        (name, step) for step in range(3) for name in ("Staged", "Committed")
    ]
    assert steps(path) == [0, 1, 2]


def test_calls_within_calls_are_refused(path: Path, opened: Opener) -> None:
    """Prevents: a signal handler that saves while a save holds its lock, and waits for ever."""
    # case 62
    errors: list[StateError] = []

    class Meddler:
        def state_dict(self) -> dict[str, Any]:
            try:
                ckpt.save(99)
            except StateError as error:
                errors.append(error)
            return {"n": 1}

    ckpt = opened({"meddler": Meddler()})
    ckpt.save(0).result(60)
    assert errors[0].kind == "reentrant"
    assert steps(path) == [0]


def test_handles_wait_no_longer_than_told(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 55
    gate = gate_disk(monkeypatch)
    ckpt = opened({"x": torch.zeros(5000)})
    gate.close()
    save = ckpt.save(0)
    save.staged(60)
    assert not save.done()
    assert steps(path) == []  # another process, too, sees all of it or nothing
    with pytest.raises(StateError, match="step 0 is not durable") as caught:
        save.result(0.01)
    assert caught.value.kind == "pending"
    with pytest.raises(StateError, match="step 0"):
        ckpt.wait(0.01)
    gate.open()
    assert save.result(60).step == 0
    assert "commit 1" in repr(save)


def test_bad_options_are_refused_when_opened(path: Path) -> None:
    # case 26
    for chunk_bytes in (1, 0, 4 << 30, 100_000):
        with pytest.raises(InvalidInputError, match="chunk_bytes"):
            Checkpointer(path, {"x": torch.zeros(1)}, chunk_bytes=chunk_bytes)
    for state in ({}, [], None):
        with pytest.raises(InvalidInputError, match="state"):
            Checkpointer(path, state)  # users' mistakes
    for number in (999, signal.SIGKILL):
        with pytest.raises(InvalidInputError, match="save_on"):
            Checkpointer(path, {"x": torch.zeros(1)}, save_on=[number])
    assert not path.exists()


def test_options_of_a_call_are_checked_before_it_does_anything(path: Path, opened: Opener) -> None:
    """Prevents: a word in the place of a flag that ends the writer, or that means its opposite."""
    # case 26
    wrong: dict[str, Any]
    state = {"x": torch.zeros(5000)}
    with opened(state, final=False) as ckpt:
        ckpt.save(0).result(60)
        for wrong in ({"overwrite": 1}, {"overwrite": "no"}):
            with pytest.raises(InvalidInputError, match="overwrite"):
                ckpt.save(1, **wrong)
        for wrong in ({"strict": None}, {"low_memory": "no"}):
            with pytest.raises(InvalidInputError, match=next(iter(wrong))):
                ckpt.restore(**wrong)
        assert ckpt.save(1).result(60).step == 1
    for wrong in ({"rng": 0}, {"threads": 0}, {"threads": "2"}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            restore_into(path, state, **wrong)
    for threads in (0, True, 1.5):
        with pytest.raises(InvalidInputError, match="threads"):
            load(path, threads=threads)


def test_retention_follows_each_commit_and_says_so(path: Path, opened: Opener) -> None:
    # case 100
    recorder = Recorder()
    state = {"x": torch.zeros(5000)}
    with opened(state, keep=Keep(last=2, every=5), observers=[recorder]) as ckpt:
        for step in range(8):
            ckpt.save(step).result(60)
    assert steps(path) == [0, 5, 6, 7]
    removed = [(event.step, event.removed) for event in recorder.of(events.Compacted)]
    assert removed == [(3, (1,)), (4, (2,)), (5, (3,)), (6, (4,))]
    with opened(state, run="one", keep=Keep(last=1)) as ckpt:
        ckpt.save(0)
    assert steps(path, "one") == [0]
