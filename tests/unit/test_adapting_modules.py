"""Prevents: a quantisation-aware training that is saved, and that a freshly made model refuses."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saving import assert_same, save
from torch import nn

from deltackpt.errors import MismatchError, StateError
from deltackpt.restore import restore_into


class Observer(nn.Module):
    """As torch.ao's: the shape of a buffer is that of the data it has seen, also when loading."""

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([]))
        self.register_buffer("count", torch.zeros(1))
        self.deaf = deaf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.least.resize_(x.shape[1]).copy_(x.detach().amin(0))
        self.count += 1
        return x

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}least", self.least)
        if self.deaf:
            state_dict = {**state_dict, f"{prefix}least": self.least}
        else:
            self.least.resize_(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Refusing:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError("no")


def model(*, deaf: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), Observer(deaf=deaf), nn.BatchNorm1d(5))


@pytest.mark.parametrize("low_memory", [False, True])
def test_buffers_whose_module_adapts_them_are_restored_into_a_fresh_one(
    tmp_path: Path, low_memory: bool
) -> None:
    trained = model()
    trained(torch.randn(4, 3))
    save(tmp_path / "s", {"model": trained})
    fresh = model()
    restore_into(tmp_path / "s", {"model": fresh}, rng=False, low_memory=low_memory)
    assert_same(dict(fresh.state_dict()), dict(trained.state_dict()))


def test_a_failure_after_it_puts_their_shape_back(tmp_path: Path) -> None:
    trained = model()
    trained(torch.randn(4, 3))
    save(tmp_path / "s", {"model": trained, "last": Refusing()})
    fresh = model()
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    with pytest.raises(StateError, match="everything is as it was"):
        restore_into(tmp_path / "s", {"model": fresh, "last": Refusing()}, rng=False)
    assert_same(dict(fresh.state_dict()), before)


def test_a_module_that_does_not_take_them_fails_the_restore(tmp_path: Path) -> None:
    trained = model()
    trained(torch.randn(4, 3))
    save(tmp_path / "s", {"model": trained})
    with pytest.raises(StateError, match=r"1\.least has not taken"):
        restore_into(tmp_path / "s", {"model": model(deaf=True)}, rng=False)


def test_the_shapes_of_all_other_buffers_are_compared(tmp_path: Path) -> None:
    trained = model()
    trained(torch.randn(4, 3))
    save(tmp_path / "s", {"model": trained})
    other = model()
    other[2] = nn.BatchNorm1d(6)
    with pytest.raises(MismatchError, match=r"model/2\.running_mean") as caught:
        restore_into(tmp_path / "s", {"model": other}, rng=False)
    assert "model/1.least" not in str(caught.value)
    done = restore_into(tmp_path / "s", {"model": model()}, rng=False, strict=False)
    assert done is not None
    assert [mismatch.path for mismatch in done.mismatched] == ["model/1.least"]
