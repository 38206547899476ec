"""The metrics of the last step go with the save that closing makes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.store import Store
from saving import steps

import deltackpt
from deltackpt.options import check_metrics, note_metrics


def _metrics(path: Path) -> dict[int, dict[str, float]]:
    return {commit.step: dict(commit.metrics) for commit in Store.open(path).lineage("main")}


def test_the_save_at_close_has_the_metrics_of_its_step(path: Path) -> None:
    """Prevents: the last step of every run without its loss."""
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(path, state, every=2, writer="thread") as ckpt:
        for step in range(4):
            ckpt.step(step, {"loss": 1.0 / (step + 1)})
    assert _metrics(path) == {0: {"loss": 1.0}, 2: {"loss": 1 / 3}, 3: {"loss": 0.25}}


def test_the_best_step_is_kept_when_it_is_the_last(path: Path) -> None:
    """Prevents: retention that takes the best step for the last one lacks its metric."""
    state = {"x": torch.zeros(4)}
    keep = deltackpt.Keep(best="loss")
    with deltackpt.Checkpointer(path, state, every=2, keep=keep, writer="thread") as ckpt:
        for step in range(4):
            ckpt.step(step, {"loss": float(10 - step)})
    assert steps(path) == [3]


def test_metrics_of_an_earlier_step_are_not_given_to_the_last(path: Path) -> None:
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(path, state, every=10, writer="thread") as ckpt:
        ckpt.step(1, {"loss": 1.0})
        ckpt.step(2)
    assert _metrics(path) == {2: {}}


@pytest.mark.parametrize("every", [1, 10])
def test_a_save_after_the_last_step_is_the_last(path: Path, every: int) -> None:
    """Prevents: close fails, as it saves an older step again that a `save` has passed."""
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(path, state, every=every, writer="thread") as ckpt:
        ckpt.step(3, {"loss": 1.0})
        state["x"].add_(1)
        ckpt.save(4, {"loss": 0.5})
    assert _metrics(path) == ({3: {"loss": 1.0}} if every == 1 else {}) | {4: {"loss": 0.5}}


def test_a_signal_after_the_last_step_saves_it_with_its_metrics(path: Path) -> None:
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(
        path, state, every=10, writer="thread", save_on=(signal.SIGUSR1,)
    ) as ckpt:
        ckpt.step(1, {"loss": 0.5})
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ckpt.preempted
    assert _metrics(path) == {1: {"loss": 0.5}}


def test_metrics_are_those_of_the_call(path: Path) -> None:
    state, loss = {"x": torch.zeros(4)}, torch.tensor(0.5)
    given = {"loss": loss}
    with deltackpt.Checkpointer(path, state, every=10, writer="thread") as ckpt:
        ckpt.step(1, given)
        loss.fill_(7)
        given.clear()
    assert _metrics(path) == {1: {"loss": 0.5}}


def test_a_wrong_metric_is_told_where_it_is_given_and_loses_no_step(path: Path) -> None:
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(path, state, every=10, writer="thread") as ckpt:
        ckpt.step(1, {"loss": 1.0})
        with pytest.raises(InvalidInputError, match="'loss' is no number"):
            ckpt.step(2, {"loss": "low"})
    assert _metrics(path) == {2: {}}


def test_noted_metrics_keep_no_graph_alive() -> None:
    weight = torch.ones(1, requires_grad=True)
    noted = note_metrics({"loss": (weight * 2).sum(), "accuracy": 1})
    assert noted == {"loss": 2.0, "accuracy": 1.0}
    assert check_metrics(noted) == noted
    assert not any(isinstance(value, torch.Tensor) for value in noted.values())


def test_a_metric_beyond_floats_is_told_so() -> None:
    with pytest.raises(InvalidInputError, match="'loss' is larger than a float can be") as caught:
        check_metrics({"loss": 10**400})
    assert "logarithm" in str(caught.value.hint)
