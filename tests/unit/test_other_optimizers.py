"""Prevents: optimizers of other libraries that come back with a state of another form, or never."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportIncompatibleVariableOverride=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from saving import assert_same, save
from torch import nn
from torch.optim import Optimizer

from deltackpt.errors import MismatchError
from deltackpt.restore import restore_into


class Scale(NamedTuple):
    value: torch.Tensor
    name: str


class Keeper(Optimizer):
    """Keeps gradients and notes of a parameter in containers of every kind."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                if not entry:
                    entry["queue"] = deque[torch.Tensor](maxlen=2)
                    entry["ordered"] = OrderedDict(b=torch.zeros(2), a="x")
                    entry["by_axis"] = defaultdict[str, Any](list, {"0": [torch.ones(2)]})
                    entry["counter"] = Counter("aab")
                    entry["pair"] = (torch.zeros(2), None)
                    entry["kind"] = "rotated"
                    entry["bytes"] = b"\x00\x01"
                    entry["array"] = np.arange(3)
                    entry["range"] = [np.float64(1.0), torch.Size([2, 3])]
                    entry["scale"] = Scale(torch.full((2,), 0.1), "row")
                    entry["nested"] = {"deep": [deque([1.0, torch.full((1,), 0.1)], maxlen=7)]}
                entry["queue"].append(parameter.grad.float() / 3)
                entry["last"] = "of step"


def stepped(model: nn.Module, optimizer: Optimizer, times: int = 3) -> None:
    for number in range(times):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.7 + number)
        optimizer.step()


def assert_same_form(left: Any, right: Any, path: str = "") -> None:
    """Equal types, too, and what containers hold besides their items."""
    assert type(left) is type(right), path
    assert getattr(left, "maxlen", None) == getattr(right, "maxlen", None), path
    factories = getattr(left, "default_factory", None), getattr(right, "default_factory", None)
    assert factories[0] is factories[1], path
    if isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same_form(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple, deque)):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_form(a, b, f"{path}/{index}")
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.tolist() == right.tolist(), path
    else:
        assert_same(left, right, path)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_state_comes_back_in_containers_of_the_saved_kinds(
    tmp_path: Path, used: bool, low_memory: bool
) -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Keeper(model.parameters())
    stepped(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    save(tmp_path / "s", {"model": model, "optimizer": optimizer})

    other = nn.Linear(3, 2).bfloat16()
    target = Keeper(other.parameters())
    if used:
        stepped(other, target, 1)
    state = {"model": other, "optimizer": target}
    restore_into(tmp_path / "s", state, rng=False, low_memory=low_memory)
    assert_same_form(target.state_dict()["state"], before["state"])
    stepped(model, optimizer, 2)
    stepped(other, target, 2)
    assert_same_form(target.state_dict()["state"], optimizer.state_dict()["state"])


class Averaging(Optimizer):
    """Wraps an optimizer, and has a state_dict of a form of its own."""

    def __init__(self, inner: Optimizer) -> None:  # as some do, without Optimizer.__init__
        self.inner = inner
        self.calls = 0

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.calls += 1

    def state_dict(self) -> Any:
        return {"calls": self.calls, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.calls = state_dict["calls"]
        self.inner.load_state_dict(state_dict["inner"])


class Delegating(Averaging):
    """Wraps an optimizer, and passes its state_dict on as it is."""

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [Averaging, Delegating])
def test_optimizers_that_wrap_another_one_are_restored(tmp_path: Path, kind: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(torch.optim.AdamW(model.parameters(), lr=0.1))
    stepped(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    stepped(model, optimizer, 2)

    other = nn.Linear(3, 2)
    target = kind(torch.optim.AdamW(other.parameters(), lr=0.2))
    restore_into(tmp_path / "s", {"model": other, "optimizer": target}, rng=False)
    assert_same(target.state_dict(), before)
    stepped(other, target, 2)
    assert_same(target.state_dict(), optimizer.state_dict())
    assert_same(other.state_dict(), model.state_dict())


def test_a_wrapped_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """Prevents: moments on the wrong parameters, where no name can be matched inside the state."""
    model = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    optimizer = Averaging(torch.optim.AdamW([m.weight for m in model]))
    stepped(nn.ModuleList(model), optimizer)
    save(tmp_path / "s", {"model": nn.ModuleList(model), "optimizer": optimizer})
    target = Averaging(torch.optim.AdamW([m.weight for m in reversed(model)]))
    state = {"model": nn.ModuleList(model), "optimizer": target}
    with pytest.raises(MismatchError, match=r"(?s)model/1\.weight, model/0\.weight.*same order"):
        restore_into(tmp_path / "s", state, rng=False)
    done = restore_into(tmp_path / "s", state, rng=False, strict=False)
    assert done is not None
    assert [mismatch.path for mismatch in done.mismatched] == ["optimizer"]
    assert not any(path.startswith("optimizer") for path in done.loaded)
    assert target.calls == 0
