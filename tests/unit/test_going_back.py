"""Saves that go back to an earlier step: which steps they leave is said, and how to get them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from command_line import run
from deltackpt_store.errors import ConflictError
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from saving import saved, steps

import deltackpt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "store"
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(where, state, writer="thread") as ckpt:
        for step in range(5):
            state["x"].fill_(step)
            ckpt.save(step)
    return where


def _left(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "leaves its steps" in r.message]


def test_overwriting_without_a_restore_names_the_steps_it_leaves_and_the_way_back(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents: steps that vanish from a run's list without a word."""
    state = {"x": torch.full((4,), 9.0)}
    with (
        caplog.at_level(logging.WARNING, "deltackpt"),
        deltackpt.Checkpointer(path, state, writer="thread") as ckpt,
    ):
        ckpt.save(2, overwrite=True).result(60)
        (message,) = _left(caplog)
        assert "leaves its steps 3, 4:" in message
        ckpt.save(3).result(60)
    assert _left(caplog) == [message]  # once, not again by the next one
    assert steps(path) == [0, 1, 2, 3]
    # every way back that the message tells is one
    assert "load(store, 'main', 4)" in message
    assert torch.equal(saved(path, 4)["x"], torch.full((4,), 4.0))
    assert "'main@4' on the command line" in message
    shown = run("show", path, "main@4")
    assert shown.exit_code == 0, shown.output
    assert "restore(step=4)" in message
    with deltackpt.Checkpointer(path, state, writer="thread") as ckpt:
        restored = ckpt.restore(step=4)
    assert restored is not None
    assert torch.equal(state["x"], torch.full((4,), 4.0))


def test_overwriting_the_newest_step_leaves_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "deltackpt"),
        deltackpt.Checkpointer(path, {"x": torch.zeros(4)}, writer="thread") as ckpt,
    ):
        ckpt.save(4, overwrite=True)
    assert _left(caplog) == []
    assert steps(path) == [0, 1, 2, 3, 4]


def test_a_forgotten_restore_is_told_to_restore_first(path: Path) -> None:
    """Prevents: an error whose advice makes the run lose its steps."""
    with (
        deltackpt.Checkpointer(path, {"x": torch.zeros(4)}, writer="thread") as ckpt,
        pytest.raises(ConflictError) as caught,
    ):
        ckpt.save(2)
    hint = str(caught.value.hint)
    assert hint.startswith("restore() first")
    assert "the later ones leave the run's list" in hint


def test_closing_does_not_save_a_step_again_that_a_save_went_back_from(tmp_path: Path) -> None:
    """The state of step 1 was saved once more at close, as step 5; or closing failed, as the save
    that was gone back from was still in flight."""
    # case 99, case 161
    path, state = tmp_path / "new", {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(path, state, every=1, writer="thread") as ckpt:
        for step in range(6):
            ckpt.step(step)
        state["x"].fill_(7)
        ckpt.save(1, overwrite=True)
    assert steps(path) == [0, 1]
    assert torch.equal(saved(path, 1)["x"], torch.full((4,), 7.0))
    with deltackpt.Checkpointer(path, state, every=100, writer="thread") as ckpt:
        ckpt.restore()
        ckpt.step(100)
        ckpt.save(2, overwrite=True)
        ckpt.step(3)
    assert steps(path) == [0, 1, 2, 3]
    with deltackpt.Checkpointer(path, state, every=100, writer="thread") as ckpt:
        ckpt.step(9)  # not due: nothing has it
        ckpt.save(2, overwrite=True)
    assert steps(path) == [0, 1, 2, 9]


def _record(path: Path, number: int) -> Path:
    return path / "runs" / "main" / f"{number:020d}"


def _overwrite(path: Path, step: int) -> None:
    state = {"x": torch.full((4,), 9.0)}
    with deltackpt.Checkpointer(path, state, writer="thread", rng=False) as ckpt:
        ckpt.save(step, overwrite=True).result(60)
    assert torch.equal(saved(path, step)["x"], torch.full((4,), 9.0))


def test_a_step_is_saved_again_although_the_one_before_is_damaged(path: Path) -> None:
    """Prevents: one damaged old record after which a run's newest step can never be replaced."""
    whole = _record(path, 4).read_bytes()
    _record(path, 4).write_bytes(whole[:-1])
    _overwrite(path, 4)
    assert steps(path) == [0, 1, 2, 4]
    _record(path, 4).write_bytes(whole)  # repaired from a copy: nothing of the run was lost
    assert steps(path) == [0, 1, 2, 3, 4]
    assert verify(Store.open(path)).ok


def test_going_back_over_a_damaged_record_continues_the_nearest_before(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (3, 4):
        _record(path, number).write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING, "deltackpt"):
        _overwrite(path, 2)
    assert steps(path) == [0, 1, 2]
    assert "step 2 is saved without it" in caplog.text


def test_a_fork_whose_origin_is_damaged_is_saved_again(path: Path) -> None:
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(path, state, run="fork", writer="thread") as ckpt:
        ckpt.restore(run="main", step=4)
        ckpt.save(5)
    _record(path, 5).write_bytes(b"damaged")
    with deltackpt.Checkpointer(path, state, run="fork", writer="thread") as ckpt:
        ckpt.save(5, overwrite=True).result(60)
    commit = Store.open(path).head("fork")
    assert commit.parent is not None
    assert commit.parent[:2] == ("main", 5)


def test_steps_that_another_trainer_saved_since_the_restore_are_named_when_they_are_left(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents: two trainers of one run, of which the later takes the earlier one's steps off."""
    state = {"x": torch.zeros(4)}
    first = deltackpt.Checkpointer(path, {"x": torch.ones(4)}, writer="thread")
    second = deltackpt.Checkpointer(path, state, writer="thread")
    with caplog.at_level(logging.WARNING, "deltackpt"), second:
        first.restore()
        first.save(5).result(60)
        second.restore()
        handle = second.save(6)  # waits until the first one lets the run go
        first.save(7)
        first.save(8)
        first.close()
        handle.result(60)
        (message,) = _left(caplog)
        assert "leaves its steps 7, 8, which another trainer" in message
        second.save(9).result(60)
    assert _left(caplog) == [message]
    assert steps(path) == [0, 1, 2, 3, 4, 5, 6, 9]
    assert torch.equal(saved(path, 8)["x"], torch.full((4,), 4.0))
