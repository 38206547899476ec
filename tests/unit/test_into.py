"""Prevents a restore from leaving live objects half restored, cast, scrambled or untied."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from captured import same
from deltackpt_store.errors import InvalidInputError, MismatchError, StateError
from restoring import Keeper, assert_equal, back, content, pair, stepped
from torch import nn

from deltackpt.load import load

# modules ----------------------------------------------------------------------------------------


def test_tied_weights_stay_tied(keeper: Keeper) -> None:
    # case 3
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 40)
            self.head = nn.Linear(40, 50, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    keeper.save({"model": model}, 1)
    expected = content(model)
    other = Tied()
    back(keeper, {"model": other})
    assert other.head.weight is other.embed.weight
    assert_equal(other, expected)
    with torch.no_grad():
        other.embed.weight[0, 0] = 123.0
    assert other.head.weight[0, 0] == 123.0


@pytest.mark.parametrize("low_memory", [False, True])
def test_tied_target_refuses_two_values(keeper: Keeper, low_memory: bool) -> None:
    # case 3: the last one written would win silently
    def pair(tie: bool) -> nn.Module:
        model = nn.Module()
        model.a, model.b = nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False)
        if tie:
            model.b.weight = model.a.weight
        return model

    keeper.save({"model": pair(tie=False)}, 1)
    target = pair(tie=True)
    before = content(target)
    with pytest.raises(MismatchError, match="memory shared by both"):
        back(keeper, {"model": target}, low_memory=low_memory)
    assert_equal(target, before)
    equal = pair(tie=False)
    with torch.no_grad():
        equal.b.weight.copy_(equal.a.weight)
    keeper.save({"model": equal}, 2)
    back(keeper, {"model": target}, low_memory=low_memory)
    assert_equal(target, content(equal))


def test_tied_target_accepts_equal_values_of_other_layout(keeper: Keeper) -> None:
    a = torch.randn(30, 20)
    keeper.save({"t": {"a": a, "b": a.t().contiguous().t()}}, 1)
    shared = torch.zeros(30, 20)
    target = {"t": {"a": shared, "b": shared}}
    for low_memory in (False, True):
        shared.zero_()
        back(keeper, target, low_memory=low_memory)
        assert same(shared, a)
        assert target["t"]["b"] is shared


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("saved_last", [False, True])
def test_channels_last_and_back(keeper: Keeper, low_memory: bool, saved_last: bool) -> None:
    # case 5, case 7
    formats = torch.contiguous_format, torch.channels_last
    model = nn.Conv2d(16, 32, 3).to(memory_format=formats[saved_last])
    expected = content(model)
    keeper.save({"model": model}, 1)
    target = nn.Conv2d(16, 32, 3).to(memory_format=formats[not saved_last])
    strides = target.weight.stride()
    assert strides != model.weight.stride()
    back(keeper, {"model": target}, low_memory=low_memory)
    assert target.weight.stride() == strides
    assert_equal(target, expected)


@pytest.mark.parametrize("low_memory", [False, True])
def test_odd_layouts_on_both_sides(keeper: Keeper, low_memory: bool) -> None:
    # case 5
    base = torch.randn(40, 90)
    saved = {
        "transposed": torch.randn(30, 50).t(),
        "strided": base[:, ::3],
        "expanded": torch.randn(1, 70).expand(60, 70),
        "flipped": torch.randn(9, 8, 7).permute(2, 0, 1),
        "wide": torch.randn(20, 30, dtype=torch.complex128).t(),
    }
    keeper.save({"x": saved}, 1)
    backing = torch.zeros(40, 60)
    target = {
        "transposed": torch.zeros(50, 30),
        "strided": backing[:, ::2],
        "expanded": torch.zeros(60, 70),
        "flipped": torch.zeros(8, 9, 7).permute(2, 1, 0),
        "wide": torch.zeros(20, 30, dtype=torch.complex128).t(),
    }
    kept = dict(target)
    back(keeper, {"x": target}, low_memory=low_memory)
    for key, value in saved.items():
        assert target[key] is kept[key]
        assert same(target[key], value), key
    assert not backing[:, 1::2].any()


def test_expanded_target_takes_what_repeats_only(keeper: Keeper) -> None:
    row = torch.randn(1, 5)
    keeper.save({"x": {"t": row.expand(4, 5).clone()}}, 1)
    base = torch.zeros(1, 5)
    back(keeper, {"x": {"t": base.expand(4, 5)}})
    assert same(base, row)
    keeper.save({"x": {"t": torch.randn(4, 5)}}, 2)
    with pytest.raises(MismatchError, match="expanded"):
        back(keeper, {"x": {"t": base.expand(4, 5)}})
    assert same(base, row)


@pytest.mark.parametrize("low_memory", [False, True])
def test_mismatches_are_listed_in_full_and_nothing_changes(
    keeper: Keeper, low_memory: bool
) -> None:
    # case 146
    keeper.save({"model": nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 5)}), "n": 1}, 1)
    target = nn.ModuleDict({"a": nn.Linear(4, 3).double(), "c": nn.Linear(2, 2)})
    before = content(target)
    with pytest.raises(MismatchError) as caught:
        back(keeper, {"model": target, "n": 0}, low_memory=low_memory)
    error = caught.value
    assert set(error.context["missing"]) == {"model/c.weight", "model/c.bias"}
    assert set(error.context["unexpected"]) == {"model/b.weight", "model/b.bias"}
    assert len(error.context["mismatched"]) == 2
    text = str(error)
    for part in ("model/c.weight", "model/b.bias", "float32 of shape [3, 4]",
                 "float64 of shape [3, 4]", "nothing is cast", "strict=False"):  # fmt: skip
        assert part in text
    assert_equal(target, before)


def test_nothing_is_broadcast_or_cast(keeper: Keeper) -> None:
    # case 146
    keeper.save({"w": torch.ones(1), "h": torch.ones(5, dtype=torch.bfloat16)}, 1)
    target = {"w": torch.zeros(5), "h": torch.zeros(5)}
    with pytest.raises(MismatchError) as caught:
        back(keeper, target)
    assert "float32 of shape [1] in the checkpoint, float32 of shape [5] here" in str(caught.value)
    assert "bfloat16 of shape [5] in the checkpoint" in str(caught.value)
    assert not target["w"].any()
    assert not target["h"].any()


def test_not_strict_restores_what_fits_and_reports_the_rest(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    # case 146
    saved = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 5), "d": nn.Linear(2, 2)})
    keeper.save({"model": saved, "gone": 3}, 1)
    target = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 6), "c": nn.Linear(2, 2)})
    before = content(target)
    done = back(keeper, {"model": target, "new": 4}, strict=False)
    assert same(target["a"].weight, saved["a"].weight)
    assert same(target["b"].weight, before["b.weight"])
    assert same(target["c"].weight, before["c.weight"])
    assert set(done.loaded) == {"model/a.weight", "model/a.bias"}
    assert set(done.missing) == {"model/c.weight", "model/c.bias", "new"}
    assert set(done.unexpected) == {"model/d.weight", "model/d.bias", "gone"}
    assert [m.path for m in done.mismatched] == ["model/b.weight", "model/b.bias"]
    assert "model/c.weight" in caplog.text


@pytest.mark.parametrize("strict", [False, True])
def test_no_match_at_all_is_an_error_in_every_mode(keeper: Keeper, strict: bool) -> None:
    # case 146
    keeper.save({"model": nn.Linear(2, 2)}, 1)
    other = nn.ModuleDict({"x": nn.Linear(3, 3)})
    with pytest.raises(MismatchError, match="not one of the 2 entries") as caught:
        back(keeper, {"model": other}, strict=strict)
    assert caught.value.kind == "no-match"
    with pytest.raises(MismatchError, match="nothing in it fits"):
        back(keeper, {"net": other}, strict=strict)
    with pytest.raises(MismatchError, match="not one of the"):
        back(keeper, {"model": {"a": torch.zeros(2)}}, strict=strict)


def test_meta_and_inference_targets_are_refused(keeper: Keeper) -> None:
    keeper.save({"model": nn.Linear(3, 3)}, 1)
    with pytest.raises(MismatchError, match=r"a tensor that is a meta tensor") as caught:
        back(keeper, {"model": nn.Linear(3, 3, device="meta")})
    assert "to_empty" in str(caught.value.hint)
    with torch.inference_mode():
        frozen = nn.Linear(3, 3)
    with pytest.raises(MismatchError, match="inference mode"):
        back(keeper, {"model": frozen})


@pytest.mark.parametrize("low_memory", [False, True])
def test_training_goes_on_after_a_restore_in_inference_mode(
    keeper: Keeper, low_memory: bool
) -> None:
    """Prevents: the next optimizer step fails on moments that are inference tensors."""

    def make() -> tuple[nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(1)
        model = nn.Linear(200, 3)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    stepped(model, optimizer, 1)
    keeper.save({"model": model, "optimizer": optimizer, "x": {"y": torch.ones(300)}}, 1)
    stepped(model, optimizer, 2)
    other, fresh = make()
    extra: dict[str, Any] = {"y": None}
    with torch.inference_mode():
        state = {"model": other, "optimizer": fresh, "x": extra}
        back(keeper, state, low_memory=low_memory)
    stepped(other, fresh, 2)
    assert_equal(other, content(model))
    extra["y"].add_(1)


class Wrapped(nn.Module):
    """What DistributedDataParallel does to keys."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_wrapped_models_restore_with_a_key_map(keeper: Keeper) -> None:
    # case 147
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))

    inner = plain()
    keeper.save({"model": inner}, 1, rng=False)
    expected = content(inner)
    nested = plain()
    nested.load_state_dict(expected)
    nested[1] = torch.compile(nested[1])
    wrapped = Wrapped(torch.compile(Wrapped(nested)))
    assert "module._orig_mod.module.1._orig_mod.0.weight" in wrapped.state_dict()
    blobs = sum(f.stat().st_size for f in keeper.path.glob("packs/*/*"))
    keeper.save({"model": wrapped}, 2, rng=False)
    assert sum(f.stat().st_size for f in keeper.path.glob("packs/*/*")) == blobs
    for target, step in ((plain(), 2), (Wrapped(torch.compile(plain())), 1)):
        with pytest.raises(MismatchError, match='key_map="unwrap"'):
            back(keeper, {"model": target}, step=step)
        done = back(keeper, {"model": target}, step=step, key_map="unwrap")
        assert len(done.loaded) == 4
        for value, wanted in zip(target.state_dict().values(), expected.values(), strict=True):
            assert same(value, wanted)
    target = plain()
    back(keeper, {"model": target}, step=2, key_map=lambda key: key.replace("module.", "")
         .replace("_orig_mod.", ""))  # fmt: skip
    assert_equal(target, expected)


def test_prefix_key_map(keeper: Keeper) -> None:
    # case 147
    keeper.save({"model": nn.ModuleDict({"old": nn.Linear(3, 3)})}, 1)
    target = nn.ModuleDict({"new": nn.Linear(3, 3)})
    back(keeper, {"model": target}, key_map={"old.": "new."})
    with pytest.raises(MismatchError, match="one name"):
        back(keeper, {"model": target}, key_map=lambda key: "new.weight")
    with pytest.raises(InvalidInputError, match="key_map"):
        back(keeper, {"model": target}, key_map=3)


def test_key_map_also_renames_the_optimizer_s_parameters(keeper: Keeper) -> None:
    # case 147, case 41
    model = nn.ModuleDict({"old": nn.Linear(3, 3)})
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, 1)
    keeper.save({"model": model, "optimizer": optimizer}, 1)
    target = nn.ModuleDict({"new": nn.Linear(3, 3)})
    other = torch.optim.AdamW(target.parameters())
    with pytest.raises(MismatchError, match=r"new\.weight"):
        back(keeper, {"model": target, "optimizer": other})
    back(keeper, {"model": target, "optimizer": other}, key_map={"old.": "new."})
    assert other.state[target["new"].weight]["step"] == 1


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_key_map_ignores_wrappers_in_the_names_of_an_optimizer_s_parameters(
    keeper: Keeper, wrapped_first: bool
) -> None:
    """The module was restored, and its optimizer refused: its wrapper is no class of PyTorch's."""
    # case 147, case 41

    def made(wrapped: bool) -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        whole = nn.ModuleDict({"module": model}) if wrapped else model
        parameters = list(model.parameters())
        return whole, torch.optim.AdamW(parameters[::-1] if wrapped else parameters)

    model, optimizer = made(wrapped_first)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    keeper.save({"model": model, "optimizer": optimizer}, 1)
    target, other = made(not wrapped_first)
    with pytest.raises(MismatchError):
        back(keeper, {"model": target, "optimizer": other})
    adding: Any = {"module.": ""} if wrapped_first else {"": "module."}
    for key_map in ("unwrap", adding):
        other.state.clear()
        back(keeper, {"model": target, "optimizer": other}, key_map=key_map)
        for old, new in zip(model.parameters(), target.parameters(), strict=True):
            assert same(new, old)
            assert same(other.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])


def test_key_map_for_a_compiled_model_reaches_its_optimizer(keeper: Keeper) -> None:
    # case 147
    plain = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(plain.parameters())
    stepped(plain, optimizer, 1)
    keeper.save({"model": plain, "optimizer": optimizer}, 1)
    compiled = nn.ModuleDict({"_orig_mod": nn.Linear(3, 3)})  # as torch.compile names it
    other = torch.optim.AdamW(compiled.parameters())
    back(keeper, {"model": compiled, "optimizer": other}, key_map={"": "_orig_mod."})
    assert len(other.state) == 2


class Hooked(nn.Module):
    """Counts and extra state, as user modules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))
        self.note: Any = {"a": 1}
        self.calls = 0
        self.fail = False
        self.register_load_state_dict_post_hook(Hooked._loaded)

    def get_extra_state(self) -> Any:
        return {"note": self.note, "t": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        if self.fail:
            raise ValueError("I do not like it")
        self.note = state["note"]

    def _loaded(self, keys: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("low_memory", [False, True])
def test_modules_with_code_of_their_own_are_loaded_once(keeper: Keeper, low_memory: bool) -> None:
    model = Hooked()
    model.note = {"b": [1, (2, None)]}
    keeper.save({"model": model}, 1)
    target = Hooked()
    back(keeper, {"model": target}, low_memory=low_memory)
    assert target.calls == 1
    assert target.note == {"b": [1, (2, None)]}
    assert same(target.linear.weight, model.linear.weight)


# other objects ----------------------------------------------------------------------------------


class Part:
    """A user's object; `fail` makes its loading fail half-way."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.extra = 0
        self.fail = False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.fail:
            raise KeyError("extra")
        self.extra = state["extra"]


def everything(seed: int) -> dict[str, Any]:
    model, optimizer = pair(seed)
    stepped(model, optimizer, seed)
    hooked = Hooked()
    hooked.note = seed
    return {
        "hooked": hooked,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "part": Part([seed]),
        "meta": {"list": [seed, torch.full((3,), float(seed))], "n": seed},
        "n": seed,
        "last": Part({"x": seed}),
    }


def picture(state: dict[str, Any]) -> Any:
    """An independent copy of all values in the state."""
    return copy.deepcopy(
        {key: value.state_dict() if hasattr(value, "state_dict") else value
         for key, value in state.items()}
    )  # fmt: skip


def assert_alike(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert same(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_alike(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_alike(a, b)
    else:
        assert left == right


class Transposed(nn.Module):
    """Saves and loads its weight in another layout, as modules with a format of their own do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((20, 30), float(seed)))
        self.fail = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "turned"] = self.weight.t() * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if self.fail:
            raise ValueError("I do not like it")
        with torch.no_grad():
            self.weight.copy_(state[prefix + "turned"].t() / 2)


class Lookahead(torch.optim.SGD):
    """Its state_dict has a form of its own, with results of computations in it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__([parameter], lr=0.5)
        self.slow = parameter * 3

    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict(), "slow": (self.slow,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["fast"])
        (self.slow,) = state["slow"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_a_graph_is_restored_like_the_rest(keeper: Keeper, fails: bool) -> None:
    """Prevents a step that was saved and restores into nothing: of a module that computes its
    entries, and of an object or optimizer that keeps a loss with its graph."""

    def make(seed: int) -> dict[str, Any]:
        model = Transposed(seed)
        total = model.weight.sum() * seed
        return {
            "part": Part([total]),
            "optimizer": Lookahead(model.weight),
            "plain": {"total": model.weight.mean() + seed},
            "model": model,
        }

    saved, target = make(1), make(2)
    keeper.save(saved, 1)
    if fails:
        target["model"].fail = True
        with pytest.raises(StateError, match="as it was before"):
            back(keeper, target)
        saved = make(2)
    else:
        back(keeper, target)
    assert same(target["model"].weight, saved["model"].weight)
    assert same(target["part"].value[0], saved["part"].value[0])
    assert same(target["optimizer"].slow, saved["optimizer"].slow)
    assert same(target["plain"]["total"], saved["plain"]["total"])


class Noting(nn.Linear):
    """A module whose state_dict gives what its load_state_dict does not take."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def noting(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Noting(3, 2)


def hooked_only_one_way(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)

    def note(module: Any, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
        entries[prefix + "note"] = torch.full((3,), float(seed))

    module.register_state_dict_post_hook(note)
    return module


@pytest.mark.parametrize(
    ("make", "entry"), [(noting, "_extra_state"), (hooked_only_one_way, "note")]
)
def test_what_a_module_does_not_take_back_is_no_restore(
    keeper: Keeper, caplog: pytest.LogCaptureFixture, make: Callable[[int], nn.Module], entry: str
) -> None:
    """Prevents: state that is saved, reported as restored, and lost."""
    saved, target, untouched = make(1), make(2), make(2)
    keeper.save({"model": saved}, 1)
    with pytest.raises(StateError, match=f"does not take .* gives: {entry}; .*as it was before"):
        back(keeper, {"model": target})
    assert same(target.weight, untouched.weight)
    back(keeper, {"model": target}, strict=False)
    assert same(target.weight, saved.weight)
    assert f"does not take what state_dict gives: {entry}" in caplog.text


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_result_of_a_graph_comes_back_without_one(keeper: Keeper, low_memory: bool) -> None:
    """Prevents: a resumed run that fails at an in-place operation which the saved one could do, as
    a differentiable optimizer at its momentum."""

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        weight = torch.randn(400, requires_grad=True)
        fast = weight.clone()
        optimizer = torch.optim.SGD([fast], lr=0.1, momentum=0.9, differentiable=True)
        return {"w": weight, "fast": fast, "optimizer": optimizer, "object": Part([weight * 2])}

    def train(state: dict[str, Any]) -> None:
        state["fast"].grad = state["fast"].detach() * 2
        state["optimizer"].step()
        state["object"].value[0] += 1

    state, other = make(1), make(2)
    train(state)
    keeper.save(state, 1)
    back(keeper, other, low_memory=low_memory)
    assert [t.requires_grad for t in (other["w"], other["object"].value[0])] == [True, False]
    for one in (state, other):
        train(one)
    assert same(other["fast"], state["fast"])
    assert same(other["object"].value[0], state["object"].value[0])


@pytest.mark.parametrize("culprit", ["hooked", "part", "last"])
def test_a_failing_part_leaves_everything_as_it_was(keeper: Keeper, culprit: str) -> None:
    # case 152
    keeper.save(everything(1), 1)
    target = everything(2)
    live = dict(target), dict(target["optimizer"].state)
    before, generator = picture(target), torch.get_rng_state()
    target[culprit].fail = True
    with pytest.raises(StateError, match=f"restoring '{culprit}' failed") as caught:
        back(keeper, target)
    assert caught.value.kind == "apply-failed"
    assert "as it was before" in str(caught.value)
    target[culprit].fail = False
    assert_alike(picture(target), before)
    assert all(target[key] is value for key, value in live[0].items())
    assert target["optimizer"].state.keys() == live[1].keys()
    assert torch.equal(torch.get_rng_state(), generator)
    back(keeper, target)
    assert_alike(picture(target), picture(everything(1)))


@pytest.mark.parametrize("held", [list, deque])
def test_what_a_failing_part_holds_in_queues_is_put_back(
    keeper: Keeper, held: Callable[[Any], Any]
) -> None:
    """A replay buffer was put back, and the target called incomplete all the same."""
    # case 152

    def make(seed: int) -> Part:
        result = torch.full((4,), float(seed), requires_grad=True) * 2
        return Part({"buffer": held([torch.full((3,), seed), {"x": np.arange(3)}, result])})

    keeper.save({"part": make(1), "n": 1}, 1)
    target = {"part": make(2), "n": 2}
    target["part"].fail = True
    before = target["part"].value
    with pytest.raises(StateError, match="as it was before") as caught:
        back(keeper, target)
    assert caught.value.kind == "apply-failed"
    assert target["part"].value is before
    target["part"].fail = False
    back(keeper, target)
    assert target["part"].value["buffer"][0].tolist() == [1, 1, 1]


class Turned(Part):
    """Takes what it is given into the list that it has; fails at the first time."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value[:] = state["value"]
        if self.fail:
            del self.value[1:]
            self.value[0] = -self.value[0]
            raise KeyError("extra")


def test_a_zero_of_the_other_sign_is_not_put_back(keeper: Keeper) -> None:
    # case 23, case 152
    keeper.save({"part": Part([0.0, 1.0])}, 1)
    target = Turned([0.0])
    target.fail = True
    with pytest.raises(StateError) as caught:
        back(keeper, {"part": target})
    assert caught.value.kind == "incomplete-target"


@pytest.mark.parametrize("low_memory", [False, True])
def test_an_object_at_two_places_takes_one_state(keeper: Keeper, low_memory: bool) -> None:
    """The state saved for its last place won, without a word."""
    # case 41, case 146
    model, _ = pair(1)
    slow, fast = (torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.7))
    keeper.save({"m": model, "slow": slow, "fast": fast, "a": Part([1]), "l": [Part([2])]}, 1)
    keeper.save({"m": model, "slow": slow, "fast": slow, "a": Part([3]), "l": [Part([3])]}, 2)
    optimizer, part = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), Part([0])
    state = {"m": model, "slow": optimizer, "fast": optimizer, "a": part, "l": [part]}
    with pytest.raises(MismatchError) as caught:
        back(keeper, state, step=1, low_memory=low_memory)
    assert caught.value.context["mismatched"] == (
        "fast: another state than 'slow' in the checkpoint, one object at both places here",
        "l/0: another state than 'a' in the checkpoint, one object at both places here",
    )
    assert (part.value, optimizer.param_groups[0]["lr"]) == ([0], 0.3)
    done = back(keeper, state, step=1, strict=False, low_memory=low_memory)
    assert {mismatch.path for mismatch in done.mismatched} == {"fast", "l/0"}
    assert (part.value, optimizer.param_groups[0]["lr"]) == ([1], 0.1)
    back(keeper, state, step=1, only=["l/*", "fast"], low_memory=low_memory)
    assert (part.value, optimizer.param_groups[0]["lr"]) == ([2], 0.7)
    back(keeper, state, step=2, low_memory=low_memory)
    assert (part.value, optimizer.param_groups[0]["lr"]) == ([3], 0.1)


def test_no_object_looks_through_the_paths_of_all(keeper: Keeper) -> None:
    """Prevents: a restore of a part whose time grows with the square of the number of objects."""
    state = {"parts": [Part(number) for number in range(120)]}
    keeper.save(state, 1)
    asked = 0

    def count(frame: Any, event: str, called: Any) -> None:
        nonlocal asked
        asked += event == "c_call" and called.__name__ == "startswith"

    sys.setprofile(count)
    try:
        back(keeper, state, only="parts/*")
    finally:
        sys.setprofile(None)
    assert asked < 20 * 120


def test_what_an_object_holds_on_the_meta_device_comes_with_its_values(keeper: Keeper) -> None:
    # case 144
    with torch.device("meta"):
        target = Part({"t": (torch.zeros(3), [torch.zeros(3)]), "u": torch.zeros(2)})
    saved = {"t": (torch.ones(3), [torch.ones(3)]), "u": torch.ones(2)}
    keeper.save({"part": Part(saved)}, 1)
    back(keeper, {"part": target})
    assert_alike(target.value, saved)


def test_a_failing_part_of_a_streamed_restore_is_said_to_leave_pieces(keeper: Keeper) -> None:
    # case 152
    keeper.save(everything(1), 1)
    target = everything(2)
    target["last"].fail = True
    with pytest.raises(StateError, match="the target is incomplete") as caught:
        back(keeper, target, low_memory=True)
    assert caught.value.kind == "incomplete-target"


def test_a_failure_that_cannot_be_undone_is_said_to_leave_pieces(keeper: Keeper) -> None:
    # case 152
    class Stubborn(Part):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value.append(3)
            raise RuntimeError("never")

    keeper.save({"model": nn.Linear(3, 3), "part": Part([1])}, 1)
    with pytest.raises(StateError) as caught:
        back(keeper, {"model": nn.Linear(3, 3), "part": Stubborn([2])})
    assert caught.value.kind == "incomplete-target"
    assert caught.value.context["incomplete"] == ("part",)


def test_an_interrupt_during_the_last_copies_waits(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 152: Ctrl-C must not leave half a model
    import deltackpt.target_module as where

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    keeper.save({"model": model}, 1)
    target = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    real, calls = where.copy_bits, [0]

    def copying(a: torch.Tensor, b: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        real(a, b)

    monkeypatch.setattr(where, "copy_bits", copying)
    with pytest.raises(KeyboardInterrupt):
        back(keeper, {"model": target})
    assert_equal(target, content(model))


def test_objects_get_a_private_copy_with_exact_types(keeper: Keeper) -> None:
    value = {0: "a", "0": [1, (2, torch.float16)], (1, 2): OrderedDict(z=1, a=deque([1], 3))}
    keeper.save({"part": Part(value), "other": Part(value)}, 1)
    one, two = Part(None), Part(None)
    back(keeper, {"part": one, "other": two})
    assert one.value == value
    assert type(one.value[(1, 2)]) is OrderedDict
    assert one.value[(1, 2)]["a"].maxlen == 3
    one.value["0"].append(5)
    assert two.value == value


def test_an_object_with_nothing_to_say_is_still_asked(keeper: Keeper) -> None:
    class Quiet(Part):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == {}
            self.extra += 1

    keeper.save({"part": Quiet(1), "n": 1}, 1)
    target = Quiet(2)
    back(keeper, {"part": target, "n": 0})
    assert target.extra == 1


def test_an_object_that_cannot_be_restored_is_refused(keeper: Keeper) -> None:
    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    keeper.save({"x": Half()}, 1)
    with pytest.raises(InvalidInputError, match="no load_state_dict"):
        back(keeper, {"x": Half()})


def test_objects_that_raise_for_an_attribute(keeper: Keeper) -> None:
    """Prevents: `KeyError: 'load_state_dict'` of a dict whose items are its attributes."""

    class Attributes(dict[str, Any]):
        __getattr__ = dict.__getitem__

    class Broken:
        @property
        def load_state_dict(self) -> Any:
            raise RuntimeError("not ready")

    keeper.save({"x": {"lr": 0.1, "t": torch.ones(3)}}, 1)
    settings = Attributes(lr=0.2, t=torch.zeros(3))
    back(keeper, {"x": settings})
    assert settings.lr == 0.1
    assert settings.t.tolist() == [1, 1, 1]
    with pytest.raises(StateError, match="not ready"):
        back(keeper, {"x": Broken()})


def test_live_objects_inside_containers(keeper: Keeper) -> None:
    def make(seed: int) -> dict[str, Any]:
        (m1, o1), (m2, o2) = pair(seed), pair(seed + 1)
        stepped(m1, o1, seed)
        stepped(m2, o2, seed)
        return {"models": [m1, m2], "opt": {"a": o1, "b": o2}, "pair": (Part(seed), seed)}

    keeper.save(make(1), 1)
    target, live = make(10), make(10)
    live = {"models": list(target["models"]), "opt": dict(target["opt"]), "pair": target["pair"]}
    back(keeper, target)
    assert target["models"][1] is live["models"][1]
    assert target["opt"]["b"] is live["opt"]["b"]
    assert target["pair"][0] is live["pair"][0]
    assert target["pair"][1] == 1
    assert live["pair"][0].value == 1
    for left, right in zip(target["models"], make(1)["models"], strict=True):
        assert_equal(left, content(right))
    missing = make(3)
    missing["opt"]["c"] = missing["opt"].pop("b")
    with pytest.raises(MismatchError, match="opt/c"):
        back(keeper, missing)
    kept = missing["opt"]["c"]
    back(keeper, missing, strict=False)
    assert missing["opt"]["c"] is kept
    assert list(missing["opt"]) == ["a", "b", "c"]


# only -------------------------------------------------------------------------------------------


def test_only_touches_what_it_names(keeper: Keeper) -> None:
    keeper.save(everything(1), 1)
    target = everything(2)
    before, generator = picture(target), torch.get_rng_state()
    done = back(keeper, target, only="model/0.*")
    assert set(done.loaded) == {"model/0.weight", "model/0.bias"}
    assert not done.rng
    assert torch.equal(torch.get_rng_state(), generator)
    wanted = picture(everything(1))
    expected = {**before, "model": {**before["model"]}}
    for key in ("0.weight", "0.bias"):
        expected["model"][key] = wanted["model"][key]
    assert_alike(picture(target), expected)
    back(keeper, target, only=["optimizer", "meta/list/1", "n"])
    expected["optimizer"] = wanted["optimizer"]
    expected["meta"]["list"][1], expected["n"] = wanted["meta"]["list"][1], 1
    assert_alike(picture(target), expected)


def test_only_is_checked(keeper: Keeper) -> None:
    keeper.save(everything(1), 1)
    target = everything(2)
    with pytest.raises(InvalidInputError, match="matches nothing"):
        back(keeper, target, only=["model/*", "modle/*"])
    with pytest.raises(InvalidInputError, match="restored whole"):
        back(keeper, target, only="optimizer/state/0/*")
    for bad in ([], 3):
        with pytest.raises(InvalidInputError, match="glob"):
            back(keeper, target, only=bad)  # users' mistakes
    with pytest.raises(MismatchError, match="unexpected"):
        back(keeper, {"model": target["model"]}, only=["model/*", "n"])
    short = {"meta": {"list": [1], "n": 0}}
    with pytest.raises(MismatchError, match="2 items in the checkpoint, 1 items here"):
        back(keeper, short, only="meta/list/1")


def test_an_optimizer_is_not_restored_by_one_of_its_groups(keeper: Keeper) -> None:
    def groups() -> dict[str, Any]:
        parts = [{"params": nn.Linear(2, 2).parameters()} for _ in range(2)]
        return {"optimizer": torch.optim.SGD(parts, lr=0.1, momentum=0.9)}

    keeper.save(groups(), 1)
    with pytest.raises(InvalidInputError, match="restored whole"):
        back(keeper, groups(), only="optimizer/param_groups/0/*")


def test_only_with_generators(keeper: Keeper) -> None:
    torch.manual_seed(5)
    keeper.save({"n": 1}, 1)
    expected = torch.rand(3)
    torch.manual_seed(9)
    done = back(keeper, {"n": 0}, only=["n", "#rng"])
    assert done.rng
    assert torch.equal(torch.rand(3), expected)


def test_cycles_in_the_target_are_refused(keeper: Keeper) -> None:
    keeper.save({"x": {"a": 1}}, 1)
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(InvalidInputError, match="nests deeper"):
        back(keeper, {"x": loop})


# other ways to be odd ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Sparse")
@pytest.mark.parametrize("low_memory", [False, True])
def test_sparse_leaves_that_are_trained_are_written_in_place(
    keeper: Keeper, low_memory: bool
) -> None:
    # case 19
    def leaf(values: list[float]) -> torch.Tensor:
        indices = torch.tensor([list(range(len(values)))])
        return torch.sparse_coo_tensor(indices, torch.tensor(values), (5,)).requires_grad_()

    keeper.save({"x": {"t": leaf([1.0, 2.0])}}, 1)
    live = leaf([3.0, 4.0, 5.0])
    state = {"x": {"t": live}}
    back(keeper, state, low_memory=low_memory)
    assert state["x"]["t"] is live
    assert live.requires_grad
    assert live.detach().to_dense().tolist() == [1.0, 2.0, 0.0, 0.0, 0.0]
    other = torch.zeros(6).to_sparse().requires_grad_()
    with pytest.raises(MismatchError, match="x/t"):
        back(keeper, {"x": {"t": other}})


def test_an_optimizer_over_lazy_parameters_takes_its_state(keeper: Keeper) -> None:
    # case 37
    model = nn.Sequential(nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, 1)
    keeper.save({"m": model, "o": optimizer}, 1)
    lazy = nn.Sequential(nn.LazyLinear(5))
    other = torch.optim.AdamW(lazy.parameters())
    back(keeper, {"m": lazy, "o": other})
    assert_equal(lazy, content(model))
    stepped(model, optimizer, 2)
    stepped(lazy, other, 2)
    assert_equal(lazy, content(model))


def test_nothing_is_restored_where_memory_is_not_real(keeper: Keeper) -> None:
    # case 22
    model = nn.Linear(30, 30)
    keeper.save({"m": model}, 1)
    before = content(model)
    with torch._subclasses.FakeTensorMode():
        for call in (lambda: back(keeper, {"m": model}), lambda: load(keeper.store)):
            with pytest.raises(StateError, match="FakeTensor"):
                call()
    assert_equal(model, before)


def test_padding_of_numpy_fields_comes_back(keeper: Keeper) -> None:
    # case 36: two saves of one state would have two roots
    aligned = np.dtype([("a", "i1"), ("b", "<f8")], align=True)
    array = np.empty(10, aligned)
    array.view(np.uint8)[:] = range(160)
    state = {"x": {"n": array}}
    root = keeper.save(state, 1).root
    array["a"] = 0
    array.view(np.uint8)[:] = 0
    back(keeper, state)
    assert state["x"]["n"] is array
    assert array.tobytes() == bytes(range(160))
    assert keeper.save(state, 2).root == root
