"""Saving and restoring through one checkpointer: lineages, waiting, and what a resume stages."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import ConflictError, NotFoundError, StateError, StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.names import number_name
from deltackpt_store.repair import repair
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from saving import (
    Opener,
    Recorder,
    Training,
    assert_same,
    gate_disk,
    gate_staging,
    saved,
    steps,
)

import deltackpt
from deltackpt.pipeline import SavePipeline


def test_restore_right_after_save_waits_for_it(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a restore that reads half a step, or an older one, without a word."""
    # case 55
    gate = gate_disk(monkeypatch)
    training = Training()
    recorder = Recorder()
    ckpt = opened(training.objects, observers=[recorder])
    training.step()
    copy = training.copy()
    gate.close()
    ckpt.save(1)
    training.step()
    assert steps(path) == []  # for another process it is not there yet
    opening = threading.Timer(0.05, gate.open)
    opening.start()
    restored = ckpt.restore(1)
    opening.join()
    assert restored is not None
    assert restored.step == 1
    assert_same(training.copy(), copy)
    assert [type(event).__name__ for event in recorder.events] == [
        "Staged", "Committed", "Restored",
    ]  # fmt: skip
    assert recorder.of(deltackpt.Restored) == [restored]


def test_restore_of_a_step_that_failed_says_why_it_is_not_there(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 55
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    training = Training()
    ckpt = opened(training.objects)
    ckpt.save(1).result(60)
    training.step()
    with monkeypatch.context() as patch:
        patch.setattr(FileIO, "write", full)
        ckpt.save(2)
        with pytest.raises(NotFoundError, match="2") as caught:
            ckpt.restore(2)
    assert isinstance(caught.value.__cause__, StorageError)
    assert ckpt.restore() is not None
    assert ckpt.steps() == [1]


def test_a_fresh_run_restores_nothing(opened: Opener) -> None:
    ckpt = opened(Training().objects)
    assert ckpt.restore() is None
    assert ckpt.steps() == []
    with pytest.raises(NotFoundError):
        ckpt.restore(7)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_the_first_save_after_a_resume_stages_only_what_changed(
    path: Path, opened: Opener, writer: str
) -> None:
    """Prevents: every restart of a large run costing another full save."""
    training = Training(width=128)
    with opened(training.objects, writer=writer) as ckpt:
        training.step()
        ckpt.save(1).result(60)
    resumed = Training(width=128, seed=9)
    ckpt = opened(resumed.objects, writer=writer)
    restored = ckpt.restore()
    assert restored is not None
    assert_same(resumed.copy(), training.copy())
    report = ckpt.save(2).result(60)
    assert report.chunks > 50
    assert report.changed_chunks == 0
    first = next(resumed.model.parameters())
    first.data[0, 0] += 1
    report = ckpt.save(3).result(60)
    assert report.changed_chunks == 1
    assert_same(saved(path, 3), resumed.copy())


def test_what_changes_while_the_table_is_made_is_saved_all_the_same(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a change table that describes something else than the restored step."""
    training = Training(width=128)
    with opened(training.objects) as ckpt:
        training.step()
        ckpt.save(1).result(60)
    gate = gate_staging(monkeypatch)
    ckpt = opened(training.objects)
    gate.close()
    ckpt.restore()
    gate.wait_for_visitor()
    for parameter in training.model.parameters():
        parameter.data.add_(1)  # behind the lock
    gate.open()
    ckpt.save(2).result(60)
    assert_same(saved(path, 2), training.copy())


def test_training_waits_until_the_table_is_made(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(width=128)
    with opened(training.objects) as ckpt:
        training.step()
        ckpt.save(1).result(60)
    gate = gate_staging(monkeypatch)
    ckpt = opened(training.objects)
    gate.close()
    ckpt.restore()
    gate.wait_for_visitor()
    real, opened_by = SavePipeline.lock, list[str]()

    def lock(self: SavePipeline) -> None:
        opened_by.append("lock")
        gate.open()
        real(self)

    monkeypatch.setattr(SavePipeline, "lock", lock)
    before = training.copy()["model"]
    training.backward()
    training.optimizer.step()
    assert opened_by == ["lock"]
    monkeypatch.setattr(SavePipeline, "lock", real)
    report = ckpt.save(2).result(60)
    unchanged = sum(
        torch.equal(tensor, before[name]) for name, tensor in training.copy()["model"].items()
    )
    assert unchanged == 0
    assert report.changed_chunks > 0
    assert_same(saved(path, 2), training.copy())


def test_a_run_continues_from_the_step_that_was_restored(path: Path, opened: Opener) -> None:
    """Prevents: an old run's larger step numbers winning over the new save."""
    # case 93
    state = {"x": torch.zeros(5000)}
    with opened(state) as ckpt:
        for step in (400, 5000):
            state["x"].fill_(step)
            ckpt.save(step)
    ckpt = opened(state, every=100)
    restored = ckpt.restore(400)
    assert restored is not None
    assert torch.equal(state["x"], torch.full((5000,), 400.0))
    with pytest.raises(ConflictError, match="step 400"):
        ckpt.save(400)
    state["x"].fill_(500)
    ckpt.save(450).result(60)
    ckpt.save(475)
    ckpt.save(500).result(60)  # each continues the one before, not the restored one again
    assert steps(path) == [400, 450, 475, 500]
    assert Store.open(path).head("main").step == 500
    ckpt.close()
    again = opened(state)
    state["x"].zero_()
    newest = again.restore()
    assert newest is not None
    assert newest.step == 500
    assert torch.equal(state["x"], torch.full((5000,), 500.0))


def test_going_back_within_a_session_starts_a_branch(path: Path, opened: Opener) -> None:
    state = {"x": torch.zeros(5000)}
    ckpt = opened(state, every=1, final=True)
    for step in range(4):
        state["x"].fill_(step)
        ckpt.step(step)
    ckpt.restore(1)
    assert torch.equal(state["x"], torch.ones(5000))
    for step in (2, 3):
        state["x"].fill_(10 + step)
        ckpt.step(step)
    ckpt.close()
    assert steps(path) == [0, 1, 2, 3]
    assert torch.equal(saved(path, 3)["x"], torch.full((5000,), 13.0))
    head = Store.open(path).head("main")
    assert head.number == 6


def test_close_after_going_back_saves_nothing_under_a_later_step(
    path: Path, opened: Opener
) -> None:
    """Prevents: the restored state being saved as the step that training had come to before."""
    # case 161
    state = {"x": torch.zeros(5000)}
    ckpt = opened(state, every=2, final=True)
    for step in range(4):
        state["x"].fill_(step)
        ckpt.step(step)
    ckpt.restore(0)
    ckpt.close()
    assert steps(path) == [0, 2]


def test_a_run_may_start_from_another_run(path: Path, opened: Opener) -> None:
    # case 107
    state = {"x": torch.randn(50_000), "y": torch.zeros(3)}
    with opened(state) as ckpt:
        ckpt.save(7)
    ckpt = opened(state, run="fork", rng=False)
    assert ckpt.restore() is None
    restored = ckpt.restore(run="main")
    assert restored is not None
    assert (restored.run, restored.step) == ("main", 7)
    report = ckpt.save(1).result(60)  # steps of another run forbid nothing
    assert report.written_bytes == 0
    parent = Store.open(path).head("fork").parent
    assert parent is not None
    assert parent[:2] == ("main", 1)
    assert steps(path) == [7]
    assert steps(path, "fork") == [1]


@pytest.mark.parametrize("harm", ["damaged", "lost", "a directory", "with its manifest"])
def test_saves_go_on_when_the_record_of_the_restored_step_is_lost(
    path: Path, opened: Opener, tmp_path: Path, harm: str
) -> None:
    """Prevents: a training that can never save again, for a file that it has read already."""
    training = Training()
    first = opened(training.objects)
    for step in (1, 2):
        training.step()
        first.save(step).result()
    first.close()
    shutil.copytree(path, tmp_path / "copy")
    ckpt = opened(training.objects)
    ckpt.restore()
    store = Store.open(path)
    head = store.head("main")
    record = path / "runs" / "main" / number_name(head.number)
    record.unlink()
    if harm == "a directory":
        record.mkdir()
    elif harm != "lost":
        record.write_bytes(b"damaged")
    if harm == "with its manifest":
        manifest = path / "manifests" / head.manifest.hex()
        manifest.unlink()
        manifest.write_bytes(b"damaged")
        with pytest.raises(StateError, match="cannot be read any more"):
            ckpt.save(3).result()
    training.step()
    ckpt.save(4).result()
    copy = training.copy()
    ckpt.close()
    assert steps(path) == [1, 4]
    newest = store.head("main")
    assert newest.parent == ("main", head.number, head.digest)
    assert newest.number == head.number + 1
    training.step()
    opened(training.objects).restore()
    assert_same(training.copy(), copy)
    (finding, *_) = verify(store).findings
    assert finding.name == f"runs/main/{number_name(head.number)}"
    assert repair(store, sources=[tmp_path / "copy"]).ok
    assert steps(path) == [1, 2, 4]


def test_no_save_continues_a_step_that_another_has_the_place_of(
    path: Path, opened: Opener, tmp_path: Path
) -> None:
    """Prevents: a step that is said to continue one of another history."""
    training = Training()
    ckpt = opened(training.objects)
    ckpt.save(1).result()
    ckpt.close()
    shutil.copytree(path, tmp_path / "copy")
    for folder in (tmp_path / "copy", path):
        other = deltackpt.Checkpointer(folder, training.objects)
        training.step()
        other.save(2).result()
        other.close()
    ckpt = opened(training.objects)
    ckpt.restore()
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", path)
    with pytest.raises(ConflictError, match="restore again") as caught:
        ckpt.save(3).result()
    assert caught.value.kind == "commit-replaced"
    ckpt.restore()
    ckpt.save(3).result()
    assert steps(path) == [1, 2, 3]


def test_parts_of_another_step_do_not_change_the_lineage(path: Path, opened: Opener) -> None:
    state = {"a": torch.zeros(3000), "b": torch.zeros(3000)}
    with opened(state, run="pretrained") as ckpt:
        state["a"].fill_(5)
        ckpt.save(90)
    ckpt = opened(state)
    state["a"].zero_()
    ckpt.save(3).result(60)
    ckpt.restore(run="pretrained", only="a")
    assert torch.equal(state["a"], torch.full((3000,), 5.0))
    ckpt.save(4).result(60)
    parent = Store.open(path).head("main").parent
    assert parent is not None
    assert parent[:2] == ("main", 1)
    assert_same(saved(path, 4), state)


def test_close_after_restore_does_not_save_what_was_restored(path: Path, opened: Opener) -> None:
    # case 161
    state = {"x": torch.zeros(5000)}
    with opened(state, every=5, final=True) as ckpt:
        for step in range(8):
            ckpt.step(step)
    assert steps(path) == [0, 5, 7]
    with opened(state, every=5, final=True) as ckpt:
        assert ckpt.restore() is not None
    assert steps(path) == [0, 5, 7]
    with opened(state, every=5, final=True) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        for step in range(restored.step + 1, 13):  # not a multiple of the interval
            state["x"].fill_(step)
            ckpt.step(step)
    assert steps(path) == [0, 5, 7, 10, 12]
    assert torch.equal(saved(path, 12)["x"], torch.full((5000,), 12.0))


class Prefetching:
    """A data source whose workers run ahead; its state counts what the loop has taken."""

    def __init__(self, samples: int = 20, ahead: int = 2) -> None:
        self.order = torch.randperm(samples, generator=torch.Generator().manual_seed(3)).tolist()
        self.ahead = ahead
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        fetched = self.order[self.taken : self.taken + self.ahead]
        while fetched:
            sample = fetched.pop(0)
            self.taken += 1
            position = self.taken + len(fetched)
            fetched += self.order[position : position + 1]
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


@pytest.mark.parametrize("stop", [0, 1, 7, 18, 19])
def test_a_resumed_loop_sees_each_sample_once(path: Path, opened: Opener, stop: int) -> None:
    """Prevents: samples that were prefetched, and never trained on, counting as consumed."""
    # case 159
    loader, seen = Prefetching(), list[int]()
    with opened({"loader": loader}, every=1) as ckpt:
        for step, sample in enumerate(loader):
            seen.append(sample)
            ckpt.step(step)
            if step == stop:
                break
    loader = Prefetching()
    with opened({"loader": loader}, every=1) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        for step, sample in enumerate(loader, start=restored.step + 1):
            seen.append(sample)
            ckpt.step(step)
    assert seen == Prefetching().order
    assert "prefetched" in (deltackpt.Checkpointer.__doc__ or "")


def test_an_optimizer_without_its_model_is_remarked_on_once(
    path: Path, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents: a run that saves moments for days, and no weights."""
    # case 47
    training = Training()
    training.step()
    ckpt = opened({"optimizer": training.optimizer, "n": 1})
    ckpt.save(0)
    more = torch.nn.Parameter(torch.zeros(3))
    training.optimizer.add_param_group({"params": [more]})
    ckpt.save(1).result(60)
    assert caplog.text.count("parameters of optimizer 'optimizer' are not part") == 1
    caplog.clear()
    for run, state in {
        "with model": training.objects | {"more": more},
        "loose": {"optimizer": training.optimizer, "p": [*training.model.parameters(), more]},
        "none": {"n": 1},
    }.items():
        opened(state, run=run.replace(" ", "-")).save(0).result(60)
    assert "not part of the state" not in caplog.text


def test_modules_that_an_optimizer_trains_and_the_state_lacks_are_remarked_on(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents: a loss with weights, or the second network of two, that is forgotten in the state
    and starts anew at every resume, with the moments of the old one."""
    # case 47
    model, loss = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    everything = torch.optim.AdamW([*model.parameters(), *loss.parameters(), frozen])
    other = torch.optim.SGD(loss.parameters(), lr=0.1)
    opened({"model": model, "both": everything, "other": other}, run="lacks").save(0).result(60)
    assert "2 of 5 parameters of optimizer 'both' are not part of the state" in caplog.text
    assert "the 2 parameters of optimizer 'other' are not part of the state" in caplog.text
    caplog.clear()
    flat = torch.nn.Parameter(torch.zeros(15))
    for parameter, part in zip(model.parameters(), flat.detach().split([12, 3]), strict=True):
        parameter.data = part.view_as(parameter)
    for run, state in {
        "all": {"m": model, "loss": loss, "both": everything, "other": other},
        "entries": {"m": model.state_dict(), "loss": loss.state_dict(), "both": everything},
        "views": {"m": model, "flat": torch.optim.SGD([flat], lr=0.1)},
    }.items():
        opened(state, run=run).save(0).result(60)
    assert "not part of the state" not in caplog.text
