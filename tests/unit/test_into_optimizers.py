"""Prevents a restore that leaves optimizers with the state of other parameters, or half of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captured import same
from deltackpt_store.errors import MismatchError
from restoring import Keeper, assert_equal, back, content, pair, stepped
from torch import nn

from deltackpt.load import load


@pytest.mark.parametrize("low_memory", [False, True])
def test_state_is_made_in_a_fresh_optimizer(keeper: Keeper, low_memory: bool) -> None:
    # case 37
    model, optimizer = pair(0)
    stepped(model, optimizer, 1)
    stepped(model, optimizer, 2)
    keeper.save({"m": model, "o": optimizer}, 2)
    expected = copy.deepcopy(optimizer.state_dict())
    other, fresh = pair(1)
    assert not fresh.state
    back(keeper, {"m": other, "o": fresh}, low_memory=low_memory)
    found = fresh.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for index, entry in expected["state"].items():
        assert list(found["state"][index]) == list(entry)
        assert all(same(found["state"][index][key], value) for key, value in entry.items())


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_state_keeps_its_saved_dtype(
    keeper: Keeper, parameters: torch.dtype, low_memory: bool
) -> None:
    # case 43
    moments = torch.float32 if parameters == torch.bfloat16 else torch.bfloat16
    model, optimizer = pair(0, parameters)
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(p.shape).to(moments),
            "exp_avg_sq": torch.rand(p.shape).to(moments),
        }
    keeper.save({"m": model, "o": optimizer}, 1)
    expected = [dict(optimizer.state[p]) for p in model.parameters()]
    for fresh in (True, False):
        other, target = pair(1, parameters)
        if not fresh:
            stepped(other, target, 7)
        back(keeper, {"m": other, "o": target}, low_memory=low_memory)
        for p, entry in zip(other.parameters(), expected, strict=True):
            assert all(same(target.state[p][key], value) for key, value in entry.items())


def test_state_of_two_owners_is_never_shared(keeper: Keeper) -> None:
    # case 44
    model, optimizer = pair(0)
    stepped(model, optimizer, 1)
    keeper.save({"m": model, "o": optimizer}, 1)
    expected = copy.deepcopy(optimizer.state_dict())
    (m1, a), (m2, b) = pair(1), pair(2)
    back(keeper, {"m": m1, "o": a})
    back(keeper, {"m": m2, "o": b})
    stepped(m1, a, 3)
    back(keeper, {"m": m2, "o": b})
    for index, entry in expected["state"].items():
        for key, value in entry.items():
            assert same(b.state_dict()["state"][index][key], value)
    addresses = [
        {t.data_ptr() for entry in o.state.values() for t in entry.values()} for o in (a, b)
    ]
    assert addresses[0].isdisjoint(addresses[1])


def test_objects_that_shared_a_tensor_do_not_after_restore(keeper: Keeper) -> None:
    # case 44
    class Box:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

        def state_dict(self) -> dict[str, Any]:
            return {"t": self.t, "again": self.t}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.t = state["t"]
            assert state["again"].data_ptr() == self.t.data_ptr()
            self.t.add_(1)  # what it was given is its own

    shared = torch.randn(1000)
    keeper.save({"a": Box(shared), "b": Box(shared), "c": {"t": shared}}, 1)
    a, b, c = Box(torch.zeros(1000)), Box(torch.zeros(1000)), {"t": torch.zeros(1000)}
    back(keeper, {"a": a, "b": b, "c": c})
    assert a.t.data_ptr() != b.t.data_ptr()
    assert same(a.t, shared + 1)
    assert same(b.t, shared + 1)
    assert same(c["t"], shared)


def test_state_is_matched_by_parameter_name(keeper: Keeper) -> None:
    # case 41
    def make(order: tuple[str, str]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("p", "q")})
        return model, torch.optim.SGD([model[n].weight for n in order], lr=0.1, momentum=0.9)

    model, optimizer = make(("p", "q"))
    stepped(model, optimizer, 1)
    keeper.save({"m": model, "o": optimizer}, 1)
    other, swapped = make(("q", "p"))
    back(keeper, {"m": other, "o": swapped})
    for name in ("p", "q"):
        found = swapped.state[other[name].weight]["momentum_buffer"]
        assert same(found, optimizer.state[model[name].weight]["momentum_buffer"])
    assert list(swapped.param_groups[0]["params"]) == [other["q"].weight, other["p"].weight]


def test_state_of_parameters_outside_of_modules_is_matched_by_path(keeper: Keeper) -> None:
    # case 41
    def make(order: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        trained = {name: nn.Parameter(torch.zeros(8)) for name in "pq"}
        return trained, torch.optim.SGD([trained[n] for n in order], lr=0.1, momentum=0.9)

    trained, optimizer = make("pq")
    for name, parameter in trained.items():
        parameter.grad = torch.full_like(parameter, float(ord(name)))
    optimizer.step()
    keeper.save({"trained": trained, "o": optimizer}, 1)
    other, swapped = make("qp")
    back(keeper, {"trained": other, "o": swapped})
    for name in "pq":
        found = swapped.state[other[name]]["momentum_buffer"]
        assert same(found, optimizer.state[trained[name]]["momentum_buffer"])
    strangers = torch.optim.SGD([nn.Parameter(torch.zeros(8)) for _ in "pq"], lr=0.1, momentum=0.9)
    with pytest.raises(MismatchError, match=r"not in the state.*unexpected: trained/p"):
        back(keeper, {"trained": other, "o": strangers})


def test_a_plain_state_dict_is_not_matched_by_position(keeper: Keeper) -> None:
    # case 41
    model, optimizer = pair(0)
    stepped(model, optimizer, 1)
    keeper.save({"m": model.state_dict(), "o": optimizer.state_dict()}, 1)
    other, target = pair(1)
    before = content(other)
    with pytest.raises(MismatchError, match="load_state_dict") as caught:
        back(keeper, {"m": other, "o": target})
    (told,) = caught.value.context["mismatched"]
    assert told.startswith("o: a plain state_dict, which names no parameters in the checkpoint")
    assert_equal(other, before)
    target.load_state_dict(load(keeper.path)["o"])  # the way out that it names
    back(keeper, {"m": other, "o": target.state_dict()})
    assert_equal(other, content(model))


def test_optimizer_over_other_parameters_is_refused(keeper: Keeper) -> None:
    # case 41, case 45
    model, optimizer = pair(0)
    stepped(model, optimizer, 1)
    keeper.save({"m": model, "o": optimizer}, 1)
    other, _ = pair(1)
    fewer = torch.optim.AdamW(list(other.parameters())[:3])
    before = content(other)
    with pytest.raises(MismatchError, match=r"unexpected: m/1\.bias") as caught:
        back(keeper, {"m": other, "o": fewer})
    assert "dtype" not in str(caught.value.hint)
    assert_equal(other, before)
    assert not fewer.state


def test_state_that_the_checkpoint_lacks_is_listed(keeper: Keeper) -> None:
    # case 45
    model, optimizer = pair(0)
    stepped(model, optimizer, 1)
    del optimizer.state[model[0].bias]
    keeper.save({"m": model, "o": optimizer}, 1)
    other, target = pair(1)
    stepped(other, target, 1)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(MismatchError) as caught:
        back(keeper, {"m": other, "o": target})
    assert caught.value.context["missing"] == (
        "o/state/1/step", "o/state/1/exp_avg", "o/state/1/exp_avg_sq")  # fmt: skip
    assert target.state_dict()["state"].keys() == before["state"].keys()
    back(keeper, {"m": other, "o": target}, strict=False)
    assert other[0].bias not in target.state
    # the checkpoint says what exists: state that only the target lacks is made
    keeper.save({"m": model, "o": target}, 2)
    stepped(model, optimizer, 2)
    keeper.save({"m": model, "o": optimizer}, 3)
    del target.state[other[1].bias]
    back(keeper, {"m": other, "o": target})
    assert target.state[other[1].bias]["step"] == 2


def test_state_of_another_shape_than_its_parameter_is_refused(keeper: Keeper) -> None:
    # case 41: without names, position and shape are all there is
    one = nn.Linear(4, 6)
    optimizer = torch.optim.AdamW(one.parameters())
    stepped(one, optimizer, 1)
    keeper.save({"o": optimizer}, 1)
    other = nn.Linear(6, 4)
    with pytest.raises(MismatchError, match=r"exp_avg.*parameter of shape \[4, 6\]"):
        back(keeper, {"o": torch.optim.AdamW(other.parameters())})


def test_rolling_back_before_the_first_step_empties_the_state(keeper: Keeper) -> None:
    model, optimizer = pair(0)
    keeper.save({"m": model, "o": optimizer}, 0)
    stepped(model, optimizer, 1)
    back(keeper, {"m": model, "o": optimizer})
    assert not optimizer.state


def test_groups_come_back_exactly_and_without_side_effects(keeper: Keeper) -> None:
    # case 28, case 37
    model, optimizer = pair(0)
    group = optimizer.param_groups[0]
    group.update(lr=0.25, hist=[{"lr": 0.5}, {"lr": 0.25}], initial_lr=0.5, tensor=torch.ones(3))
    keeper.save({"m": model, "o": optimizer}, 1)
    other, target = pair(1)
    target.param_groups[0]["hist"] = []
    steps: list[str] = []
    target.register_step_pre_hook(lambda *args: steps.append("step"))
    target.register_load_state_dict_pre_hook(lambda *args: steps.append("pre"))
    target.register_load_state_dict_post_hook(lambda *args: steps.append("post"))
    gradients = [torch.ones_like(p) for p in other.parameters()]
    for p, gradient in zip(other.parameters(), gradients, strict=True):
        p.grad = gradient
    back(keeper, {"m": other, "o": target})
    found = target.param_groups[0]
    assert found["hist"] == [{"lr": 0.5}, {"lr": 0.25}]
    assert (found["lr"], found["initial_lr"]) == (0.25, 0.5)
    assert same(found["tensor"], torch.ones(3))
    assert found["params"] == list(other.parameters())
    assert steps == ["pre", "post"]
    assert all(p.grad is g for p, g in zip(other.parameters(), gradients, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in other.parameters())


def test_lbfgs_and_sparse_states(keeper: Keeper) -> None:
    def run(optimizer: torch.optim.Optimizer, x: torch.Tensor, seed: int) -> None:
        target = torch.randn(10, generator=torch.Generator().manual_seed(seed))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (x - target).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    x = torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.LBFGS([x], max_iter=3)
    run(optimizer, x, 1)
    keeper.save({"x": x, "o": optimizer}, 1)
    run(optimizer, x, 2)
    y = torch.ones(10, requires_grad=True)
    other = torch.optim.LBFGS([y], max_iter=3)
    back(keeper, {"x": y, "o": other})
    run(other, y, 2)
    assert same(x, y)
