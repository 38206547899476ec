"""The save path as a training loop sees it: one instant per step, bounded, and honest."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import (
    CorruptionError,
    InvalidInputError,
    StateError,
    StorageError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.store import Store
from saving import (
    Opener,
    Recorder,
    Training,
    assert_same,
    full_disk,
    gate_disk,
    gate_staging,
    saved,
    steps,
)
from torch import nn

from deltackpt import events
from deltackpt.buffers import BufferPool
from deltackpt.checkpointer import Checkpointer
from deltackpt.load import load
from deltackpt.pipeline import SavePipeline
from deltackpt.policy import Keep
from deltackpt.restore import restore_into
from deltackpt.stage import Packer

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
    for step, expected in copies.items():
        assert_same(saved(path, step), expected)


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
    monkeypatch.setattr(FileIO, "write", full_disk)
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
    monkeypatch.setattr(FileIO, "write", full_disk)
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


def test_a_closed_checkpointer_keeps_no_copy_of_the_state(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: memory of that size, for as long as somebody refers to the object."""
    taken: list[weakref.ref[torch.Tensor]] = []
    real = BufferPool.take

    def take(*args: Any, **kwargs: Any) -> torch.Tensor:
        buffer = real(*args, **kwargs)
        taken.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(BufferPool, "take", take)
    training = Training()
    ckpt = opened({**training.objects, "average": torch.randn(5000)})
    for step in range(3):
        training.step()
        ckpt.save(step).result(60)
    ckpt.close()
    gc.collect()
    assert taken
    assert not any(ref() is not None for ref in taken)


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


def test_reports_tell_of_what_lies_in_the_manifest(path: Path, opened: Opener) -> None:
    """All their figures were zero while a hundred kilobytes were written for each save."""
    state: dict[str, Any] = {"noise": os.urandom(100_000), "small": torch.zeros(10)}
    ckpt = opened(state, rng=False)
    first = ckpt.save(0).result(60)
    state["small"][3] = 1
    second = ckpt.save(1).result(60)
    third = ckpt.save(2).result(60)
    size = (path / "manifests" / Store.open(path).find("main", 0).manifest.hex()).stat().st_size
    assert 100_040 <= first.small_changed_bytes <= size
    assert second.small_changed_bytes == 40
    assert third.small_changed_bytes == third.written_bytes == 0
    assert first.state_bytes == 40


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


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_none_is_copied_or_sent_to_a_worker(opened: Opener, send: Callable[[Any], Any]) -> None:
    """Prevents: "cannot pickle '_thread.RLock' object" of a spawned worker, whose dataset knows the
    trainer."""
    ckpt = opened({"a": 1})
    with pytest.raises(StateError, match="cannot be copied nor pickled") as caught:
        send([ckpt] if send is not copy.copy else ckpt)
    assert caught.value.kind == "not-copied"
