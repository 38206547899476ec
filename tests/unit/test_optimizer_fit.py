"""Prevents: moments of another optimizer, shape or dtype that are restored without a word."""

# case 41, case 43, case 45

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import MismatchError
from saving import bits, save
from torch import nn

from deltackpt.restore import Restored, restore_into

Make = Callable[[Any], torch.optim.Optimizer]
CLASSES: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


def stepped(parameters: Any, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.5 + number)
    optimizer.step()


def back(path: Path, state: dict[str, Any], *, strict: bool = True) -> Restored:
    restored = restore_into(path, state, strict=strict, rng=False)
    assert restored is not None
    return restored


@pytest.mark.parametrize("name", list(CLASSES))
def test_the_state_of_another_class_is_refused(tmp_path: Path, name: str) -> None:
    model = nn.Linear(6, 5)
    optimizer = CLASSES[name](model.parameters())
    stepped(model.parameters(), optimizer)
    save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    for other, make in CLASSES.items():
        for used in (False, True):
            target = make(model.parameters())
            if used:
                stepped(model.parameters(), target)
            before = copy.deepcopy(target.state_dict())
            if other == name:
                back(tmp_path / "s", {"model": model, "optimizer": target})
                continue
            with pytest.raises(MismatchError) as caught:
                back(tmp_path / "s", {"model": model, "optimizer": target})
            assert "optimizer: an optimizer" in str(caught.value)
            assert other in str(caught.value)
            restored = back(tmp_path / "s", {"model": model, "optimizer": target}, strict=False)
            assert not any(path.startswith("optimizer") for path in restored.loaded)
            assert [mismatch.path for mismatch in restored.mismatched] == ["optimizer"]
            same_state(target.state_dict(), before)


def same_state(left: Any, right: Any) -> None:
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, entry in left["state"].items():
        for key, value in entry.items():
            other = right["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype
                assert value.shape == other.shape
                assert bits(value) == bits(other)
            else:
                assert value == other


class Plain(torch.optim.Optimizer):
    """Somebody's own optimizer, whose moments torch does not know."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry["mine"] = entry.get("mine", torch.zeros_like(parameter)) + parameter.grad
                entry["count"] = torch.tensor(1.0)


class Owner(Plain):
    """One that loads in its own way: all or nothing."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Plain, Owner])
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_moments_that_do_not_fit_are_told_and_left_alone(
    tmp_path: Path, change: str, kind: Any, used: bool
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 20, bias=False), "b": nn.Linear(8, 8, bias=False)})
    optimizer = kind(model.parameters(), lr=0.25)
    stepped(model.parameters(), optimizer)
    save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    size, dtype = (24, torch.float32) if change == "shape" else (20, torch.bfloat16)
    other = nn.ModuleDict(
        {"a": nn.Linear(8, size, bias=False, dtype=dtype), "b": nn.Linear(8, 8, bias=False)}
    )
    target = kind(other.parameters(), lr=0.5)
    if used:
        stepped(other.parameters(), target)
        stepped(other.parameters(), target)
    state = {"model": other, "optimizer": target}
    before = copy.deepcopy(target.state_dict())
    key = "mine" if kind is not torch.optim.AdamW else "exp_avg"
    with pytest.raises(MismatchError, match=f"optimizer/state/0/{key}"):
        back(tmp_path / "s", state)
    same_state(target.state_dict(), before)

    restored = back(tmp_path / "s", state, strict=False)
    told = {mismatch.path for mismatch in restored.mismatched}
    assert {"model/a.weight", f"optimizer/state/0/{key}"} <= told
    loaded = {path for path in restored.loaded if path.startswith("optimizer/")}
    assert not any(path.startswith("optimizer/state/0/") for path in loaded)
    found, saved = target.state_dict(), optimizer.state_dict()
    if kind is Owner:
        same_state(found, before)
        assert not loaded
        return
    assert f"optimizer/state/1/{key}" in loaded
    assert bits(found["state"][1][key]) == bits(saved["state"][1][key])
    assert found["param_groups"][0]["lr"] == 0.25
    assert (0 in found["state"]) == used
    if used:
        assert bits(found["state"][0][key]) == bits(before["state"][0][key])
    stepped(other.parameters(), target)


def test_hyperparameters_of_newer_versions_and_of_schedulers_tell_nothing(tmp_path: Path) -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stepped(model.parameters(), optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.param_groups[0]["layer"] = "first"
    for key in ("decoupled_weight_decay", "fused", "capturable"):
        optimizer.param_groups[0].pop(key, None)
    save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    target = torch.optim.AdamW(model.parameters(), lr=0.2)
    back(tmp_path / "s", {"model": model, "optimizer": target})
    assert target.param_groups[0]["layer"] == "first"
    assert bits(target.state[model.weight]["exp_avg"]) == bits(
        optimizer.state[model.weight]["exp_avg"]
    )


def test_a_class_of_ones_own_that_lacks_a_hyperparameter_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(6, 5)
    optimizer = Plain(model.parameters(), sharpness=1.0)
    stepped(model.parameters(), optimizer)
    save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    target = Plain(model.parameters(), sharpness=1.0, flatness=2.0)
    with pytest.raises(MismatchError, match="flatness"):
        back(tmp_path / "s", {"model": model, "optimizer": target})


@pytest.mark.parametrize("low_memory", [False, True])
def test_an_optimizer_none_of_whose_parameters_fits_is_reported(
    tmp_path: Path, low_memory: bool
) -> None:
    """Prevents: a restore that breaks off for an optimizer of which no state can be taken."""
    model = nn.Linear(8, 8)
    optimizer = CLASSES["AdamW"](model.parameters())
    stepped(model.parameters(), optimizer)
    save(tmp_path / "s", {"model": model, "optimizer": optimizer, "n": 3})
    target = nn.Linear(8, 9)
    other = CLASSES["AdamW"](target.parameters())
    stepped(target.parameters(), other)
    before = copy.deepcopy((target.state_dict(), other.state_dict()["state"]))
    state: dict[str, Any] = {"model": target, "optimizer": other, "n": 0}
    with pytest.raises(MismatchError, match="optimizer/state/0/exp_avg"):
        restore_into(tmp_path / "s", state, rng=False, low_memory=low_memory)
    done = restore_into(tmp_path / "s", state, rng=False, strict=False, low_memory=low_memory)
    assert done is not None
    assert state["n"] == 3
    assert {m.path for m in done.mismatched} >= {"model/weight", "optimizer/state/0/exp_avg"}
    assert not any(path.startswith("optimizer/state") for path in done.loaded)
    after = (target.state_dict(), other.state_dict()["state"])
    for old, new in zip(before, after, strict=True):
        for key, value in old.items():
            values = value if isinstance(value, dict) else {"": value}
            for name, tensor in values.items():
                found = new[key][name] if name else new[key]
                assert bits(found) == bits(tensor)
    stepped(target.parameters(), other)
