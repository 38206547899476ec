"""A misspelt metric of a retention rule is told, before it costs every other step."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from command_line import run
from saving import steps

import deltackpt


def _train(path: Path, keep: deltackpt.Keep, metrics: list[dict[str, float]]) -> None:
    state = {"x": torch.zeros(4)}
    with deltackpt.Checkpointer(path, state, keep=keep, writer="thread") as ckpt:
        last = ckpt.restore()
        for step, given in enumerate(metrics, last.step + 1 if last else 0):
            state["x"].fill_(step)
            ckpt.save(step, given)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "keep.best" in r.message]


@pytest.mark.parametrize("best", ["los", ("los", "max")])
def test_a_metric_that_no_step_has_is_told_once_with_those_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, best: str
) -> None:
    """Prevents: a misspelt metric for which every step but the newest is let go in silence."""
    metrics = [{"loss": 1.0, "accuracy": 0.5}] * 3
    with caplog.at_level(logging.WARNING, "deltackpt"):
        _train(tmp_path / "s", deltackpt.Keep(best=best), metrics)
    (message,) = _told(caplog)
    assert "'los'" in message
    assert "'accuracy', 'loss'" in message


def test_steps_without_metrics_are_told_how_to_have_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "deltackpt"):
        _train(tmp_path / "s", deltackpt.Keep(best="loss", last=2), [{}, {}])
    (message,) = _told(caplog)
    assert "pass metrics=" in message


def test_a_metric_that_an_earlier_step_has_is_no_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = deltackpt.Keep(best="loss", last=5)
    with caplog.at_level(logging.WARNING, "deltackpt"):
        _train(tmp_path / "s", keep, [{"loss": 1.0}, {"other": 1.0}])
        _train(tmp_path / "s", keep, [{"other": 1.0}])
    assert _told(caplog) == []


def test_the_command_refuses_a_metric_that_no_step_has(tmp_path: Path) -> None:
    """Prevents: a typing error on the command line that takes all steps but one off the list."""
    path = tmp_path / "s"
    _train(path, deltackpt.Keep(), [{"loss": 1.0, "accuracy": 0.5}, {"loss": 2.0}, {}])
    for more in ([], ["--dry-run"], ["--last", "1"]):
        done = run("retain", path, "main", "--best", "metricx", *more)
        assert done.exit_code != 0
        text = str(done.exception) + done.stderr
        assert "'metricx'" in text
        assert "its metrics are accuracy, loss" in text
    assert steps(path) == [0, 1, 2]
    done = run("retain", path, "--best", "loss")  # of the only run
    assert done.exit_code == 0, done.output
    assert steps(path) == [0, 2]


def test_the_command_refuses_a_metric_that_is_never_a_number(tmp_path: Path) -> None:
    """Prevents: all steps of a run whose loss was NaN taken off, as none of them is the best."""
    path = tmp_path / "s"
    nan = float("nan")
    _train(path, deltackpt.Keep(), [{"loss": nan, "x": 1.0}, {"x": 2.0}, {"loss": nan}])
    for more in ([], ["--dry-run"], ["--last", "1"]):
        done = run("retain", path, "main", "--best", "loss", *more)
        assert done.exit_code == 2
        assert "NaN in every step" in done.stderr
    assert steps(path) == [0, 1, 2]
