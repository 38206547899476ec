"""Names of runs and steps, options and places that are wrong: the error says what is right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.client import WriterClient
from deltackpt_store.errors import (
    ConflictError,
    DeltackptError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StateError,
    StorageError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.store import Store

import deltackpt


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("named") / "store"
    state = {"x": torch.zeros(4)}
    for run in ("base", "other"):
        with deltackpt.Checkpointer(where, state, run=run, writer="thread") as ckpt:
            for step in (1, 2):
                state["x"].fill_(step)
                ckpt.save(step)
    return where


def _opened(path: Path | str, **options: Any) -> deltackpt.Checkpointer:
    return deltackpt.Checkpointer(path, {"x": torch.zeros(4)}, writer="thread", **options)


def test_another_run_that_does_not_exist_is_an_error(path: Path) -> None:
    """Prevents: a fine-tuning that starts from random weights for a misspelt run."""
    with _opened(path, run="tune") as ckpt:
        with pytest.raises(NotFoundError, match="'nope'") as caught:
            ckpt.restore(run="nope")
        assert "base, other" in str(caught.value.hint)
        with pytest.raises(NotFoundError, match="'nope'"):
            ckpt.restore(run="nope@latest")
        assert ckpt.restore() is None
        assert ckpt.restore(run="tune") is None  # its own, which is new
        assert ckpt.restore(run="base") is not None


def test_in_a_new_store_there_is_nothing_to_restore(tmp_path: Path) -> None:
    with _opened(tmp_path / "new", run="tune") as ckpt:
        assert ckpt.restore() is None
        assert ckpt.restore(run="base") is None


def test_a_step_may_be_named_as_on_the_command_line(path: Path) -> None:
    assert deltackpt.load(path, "base@1")["x"][0] == 1
    assert deltackpt.load(path, "other@latest")["x"][0] == 2
    state = {"x": torch.zeros(4)}
    done = deltackpt.restore_into(path, state, run="base@1")
    assert done is not None
    assert (done.run, done.step, float(state["x"][0])) == ("base", 1, 1.0)
    with _opened(path, run="tune") as ckpt:
        restored = ckpt.restore(run="base@1")
    assert restored is not None
    assert restored.step == 1


Call = Callable[[Path], object]


class _Deaf:
    def on_event(self, event: object) -> None: ...


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda path: deltackpt.load(path, 20), "step=20"),
        (lambda path: deltackpt.load(path, "base@1", 2), "leave one of them out"),
        (lambda path: deltackpt.load(path, "base@first"), "RUN@STEP"),
        (lambda path: deltackpt.load(path, "base", "latest"), "leave step out"),
        (lambda path: deltackpt.load(path, "base", "@2"), "pass 2"),
        (lambda path: deltackpt.load(path, step="base@2"), "pass 2 and the run, 'base'"),
        (lambda path: deltackpt.steps(path, "base@2"), "its run alone, base"),
        (lambda path: _opened(path, save_on=(999,)), "signal.SIGTERM"),
        (lambda path: _opened(path, save_on=(9,)), "signal.SIGTERM"),
        (lambda path: _opened(path, every="5"), "every=50"),
        (lambda path: deltackpt.Keep(3), "Keep(last=3)"),
        (lambda path: deltackpt.Keep(best=("loss", "low")), '"max"'),
        (lambda path: deltackpt.Every(3), "Every(steps=50)"),
        (lambda path: deltackpt.Every(), "Every(steps=50)"),
        (lambda path: deltackpt.Compact(300), "Compact(interval=600)"),
        (lambda path: _opened(path, observers=[_Deaf]), "observers=[_Deaf()]"),
    ],
)
def test_a_wrong_value_is_answered_with_a_right_one(path: Path, call: Call, advice: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call(path)
    assert advice in str(caught.value.hint)


def test_a_misspelt_name_in_the_state_is_answered_with_those_of_the_checkpoint(path: Path) -> None:
    state = {"y": torch.zeros(4)}
    with pytest.raises(MismatchError, match=r"\n  \(the checkpoint calls them 'x'\)$") as caught:
        deltackpt.restore_into(path, state, run="base")
    assert "unexpected in the checkpoint:\n    x\n" in str(caught.value)  # a list, hint below it
    with pytest.raises(MismatchError, match="the checkpoint calls them 'x'"):
        deltackpt.restore_into(path, state, run="base", only="x")


def test_entries_that_one_side_has_alone_take_one_line_and_the_way_out_names_the_others(
    tmp_path: Path,
) -> None:
    """Prevents: hundreds of lines of optimizer state for somebody who wants the model alone."""
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with deltackpt.Checkpointer(tmp_path / "store", state, writer="thread") as ckpt:
        ckpt.save(0)
    with pytest.raises(MismatchError) as caught:
        deltackpt.restore_into(tmp_path / "store", {"model": model})
    message = str(caught.value)
    count = len(caught.value.context["unexpected"])  # which has all of them
    assert f"unexpected in the checkpoint:\n    optimizer (all of it, {count} values)\n" in message
    assert count > 1
    assert "only='model' restores just that" in message
    deltackpt.restore_into(tmp_path / "store", {"model": model}, only="model")
    with pytest.raises(MismatchError) as caught:
        deltackpt.restore_into(tmp_path / "store", {"net": model})
    assert "net (all of it, 2 values)\n" in str(caught.value)
    assert "calls them 'model', 'optimizer'" in str(caught.value)


def test_another_run_that_does_not_exist_is_told_where_it_may_be_new(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert deltackpt.restore_into(path, {"x": torch.zeros(4)}) is None
    assert "no step of run 'main' (its runs are base, other)" in caplog.text


def test_a_training_with_a_mistyped_run_is_warned_that_it_starts_over(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(path, tmp_path / "store")
    with deltackpt.Checkpointer(
        tmp_path / "store", {"x": torch.zeros(4)}, run="bsae", writer="thread"
    ) as ckpt:
        assert ckpt.restore() is None
    assert "no step of run 'bsae' (its runs are base, other)" in caplog.text

    caplog.clear()
    with deltackpt.Checkpointer(
        tmp_path / "new", {"x": torch.zeros(4)}, run="bsae", writer="thread"
    ) as ckpt:
        assert ckpt.restore() is None
    assert not caplog.records  # nothing to mistake it for


def test_what_is_restored_is_printed_without_the_whole_record(path: Path) -> None:
    restored = deltackpt.restore_into(path, {"x": torch.zeros(4)}, run="base")
    assert repr(restored).startswith("Restored(run='base', step=2, number=2, root='")
    assert "commit" not in repr(restored)
    assert repr(restored).endswith(", metrics={})")


def test_a_closed_checkpointer_and_an_older_step_are_answered_with_advice(tmp_path: Path) -> None:
    with _opened(tmp_path / "store", every=1) as ckpt:
        ckpt.step(1)
        with pytest.raises(ConflictError, match="from one epoch to the next"):
            ckpt.step(0)
    with pytest.raises(StateError, match="make a new one"):
        ckpt.step(2)


def test_a_method_in_the_state_is_answered_with_its_call(tmp_path: Path) -> None:
    """Prevents: the advice to leave a model out, where () is missing."""
    with pytest.raises(InvalidInputError, match="call it") as caught:
        deltackpt.Checkpointer(tmp_path / "store", {"model": torch.nn.Linear(1, 1).state_dict})
    assert caught.value.context["path"] == "model"


@pytest.mark.parametrize("where", ["/proc/x", "/dev/null/x"])
def test_a_place_where_no_store_can_be_is_answered_with_advice(where: str) -> None:
    with pytest.raises(DeltackptError) as caught:
        _opened(where)
    assert isinstance(caught.value, (StorageError, InvalidInputError))
    assert caught.value.hint


def test_rules_can_be_copied_and_pickled() -> None:
    import copy
    import pickle

    for rules in (deltackpt.Keep(last=3), deltackpt.Every(seconds=3.0), deltackpt.Compact(every=3)):
        assert copy.deepcopy(rules) == rules
        assert pickle.loads(pickle.dumps(rules)) == rules


class Folding(FileIO):
    """A file system that ignores case in the names of runs, and keeps them as they were given."""

    def _found(self, path: str) -> str:
        folder, name = os.path.split(path)
        if os.path.basename(folder) != "runs":
            return path
        alike = [one for one in os.listdir(folder) if one.lower() == name.lower()]
        return f"{folder}/{alike[0]}" if alike else path

    def exists(self, path: str) -> bool:
        return super().exists(self._found(path))

    def mkdir(self, path: str) -> None:
        super().mkdir(self._found(path))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_runs_that_the_file_system_cannot_tell_apart_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Prevents: the steps of two trainings in one folder, where all are damage to each."""
    store = Store.create(tmp_path / "store")
    if when == "before":
        with _opened(store.path, run="main") as ckpt:
            ckpt.save(1)
        with _opened(store.path, run="Main") as ckpt:  # two names, where case counts
            ckpt.save(1)
        shutil.rmtree(tmp_path / "store/runs/Main")
        with monkeypatch.context() as patch:
            patch.setattr("deltackpt_store.store.FileIO", Folding)
            for use in (partial(_opened, run="Main"), partial(deltackpt.load, run="MAIN"),
                        partial(deltackpt.load, run="mAIN", step=1)):  # fmt: skip
                with pytest.raises(InvalidInputError, match="ignores upper and lower") as caught:
                    use(store.path)
                assert (caught.value.kind, caught.value.context["option"]) == ("bad-name", "run")
                assert "'main'" in str(caught.value.hint)
            with _opened(store.path, run="main") as ckpt:
                ckpt.save(2)
    else:
        (tmp_path / "store/runs/main").mkdir()
    writer = WriterClient(store.path, "MAIN", seed=1, ring_bytes=1 << 16, slot_bytes=1 << 12,
                          mode="thread", io=Folding())  # fmt: skip
    with pytest.raises(InvalidInputError, match="ignores upper and lower"):
        writer.ready(60)
    writer.close(60)
    assert os.listdir(tmp_path / "store/runs") == ["main"]
    assert store.numbers("main") == ([1, 2] if when == "before" else [])
