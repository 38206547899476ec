"""A state that no save could take is refused where it is written down, not at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import InvalidInputError
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import deltackpt
from deltackpt.capture import capture


class _Counting:
    """Has a state, and counts how often it is asked for it."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    ("state", "path", "advice"),
    [
        ({"loader": DataLoader([1, 2])}, "loader", "StatefulDataLoader"),
        ({"data": {"train": [DataLoader([1])]}}, "data/train/0", "StatefulDataLoader"),
        ({"sampler": RandomSampler([1])}, "sampler", "StatefulDataLoader"),
        ({"sampler": object()}, "sampler", "state_dict"),
        ({"n": 1, "seen": {object()}}, "seen", ""),
        ({"log": open}, "log", ""),
        ({"generator": torch.Generator()}, "generator", "get_state"),
        ({"ring": _cycle()}, "ring/0", "cycle"),
        ({"#rng": 1}, "#rng", "rename"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_the_constructor(
    tmp_path: Path, state: dict[str, Any], path: str, advice: str
) -> None:
    """Prevents: a training that ends at its first due save, hours after the mistake."""
    state = {"model": nn.Linear(2, 2), **state}
    with pytest.raises(InvalidInputError) as caught:
        deltackpt.Checkpointer(tmp_path / "store", state, writer="thread")
    assert repr(path) in caught.value.message
    assert advice in str(caught.value.hint)
    assert not (tmp_path / "store").exists()
    with pytest.raises(InvalidInputError) as again:
        capture(state, chunk_bytes=4096)
    assert again.value.message == caught.value.message


def test_objects_are_not_asked_for_their_state(tmp_path: Path) -> None:
    counting = _Counting()
    state = {"own": counting, "x": [torch.zeros(3)], "n": 1, "names": ("a", None)}
    with deltackpt.Checkpointer(tmp_path / "store", state, writer="thread") as ckpt:
        assert counting.asked == 0
        ckpt.save(0)
    assert counting.asked == 1


class _Metric(nn.Module):
    """As one of torchmetrics: what it has counted are plain attributes, kept only on demand."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.total, self.persistent = torch.zeros(()), persistent

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"total": self.total} if self.persistent else {}


@pytest.mark.parametrize("persistent", [False, True])
def test_modules_of_which_nothing_is_saved_are_named(
    tmp_path: Path, persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents: a metric that starts from nothing after a resume, without a word."""
    state = {"metrics": [_Metric(persistent=persistent)], "loss": nn.MSELoss(), "act": nn.ReLU()}
    with deltackpt.Checkpointer(tmp_path / "store", state, writer="thread"):
        pass
    told = [record.getMessage() for record in caplog.records if "is empty" in record.getMessage()]
    assert len(told) == (0 if persistent else 1)
    assert all("_Metric at 'metrics/0'" in line and "persistent(True)" in line for line in told)


class _Prepared(DataLoader[int]):
    """As accelerate's: it has a state_dict that not every loader below it can answer."""

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("'DataLoader' object has no attribute 'dl_state_dict'")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AttributeError


def test_a_loader_that_cannot_give_its_state_is_told_how_to(tmp_path: Path) -> None:
    state = {"loader": _Prepared([1, 2])}  # pyright: ignore[reportArgumentType]
    ckpt = deltackpt.Checkpointer(tmp_path / "store", state, writer="thread", final=False)
    with ckpt, pytest.raises(deltackpt.errors.StateError, match="StatefulDataLoader") as caught:
        ckpt.save(0)
    assert caught.value.context["path"] == "loader"


def test_a_state_that_has_become_empty_is_not_saved(tmp_path: Path) -> None:
    """A step of nothing was the newest one then, and no restore could take anything from it."""
    state: dict[str, Any] = {"x": torch.ones(2)}
    with deltackpt.Checkpointer(tmp_path / "s", state, writer="thread") as ckpt:
        ckpt.save(0)
        kept = state.pop("x")
        with pytest.raises(InvalidInputError, match="not empty") as caught:
            ckpt.save(1)
        assert caught.value.context["option"] == "state"
        state["x"] = kept
        ckpt.save(1)
    assert deltackpt.steps(tmp_path / "s") == [0, 1]
