"""Prevents: plain values that come back merged, stale, or in containers that nobody else sees."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from captured import same
from deltackpt_store.errors import MismatchError
from restoring import Keeper, back
from torch import nn


def test_a_list_that_grew_comes_back_exactly(keeper: Keeper) -> None:
    # case 28
    keeper.save({"hist": []}, 1)
    keeper.save({"hist": [{"a": torch.ones(2)}, {"a": torch.zeros(2)}]}, 2)
    hist: list[Any] = [{"a": torch.full((2,), 7.0)}, {"a": torch.full((2,), 8.0)}]
    kept = hist[0]["a"]
    state = {"hist": hist}
    done = back(keeper, state, step=1)
    assert state["hist"] is hist
    assert hist == []
    assert done.removed == ("hist/0/a", "hist/1/a")
    back(keeper, state, step=2)
    assert [item["a"].tolist() for item in hist] == [[1.0, 1.0], [0.0, 0.0]]
    assert kept.tolist() == [7.0, 7.0]


def test_containers_take_the_saved_form_in_place(keeper: Keeper) -> None:
    # case 28
    live = torch.zeros(3)
    saved = {"b": 1, "a": {"t": torch.ones(3), "new": (1, torch.ones(2))}, "l": [1, [2]], 3: {4}}
    keeper.save({"meta": saved}, 1)
    inner, listed = {"old": 5, "t": live}, [9, 9, 9]
    meta: dict[Any, Any] = {"a": inner, "l": listed, "b": 0, "gone": 1}
    done = back(keeper, {"meta": meta})
    assert list(meta) == ["b", "a", "l", 3]
    assert meta["a"] is inner
    assert list(inner) == ["t", "new"]
    assert inner["t"] is live
    assert live.tolist() == [1.0, 1.0, 1.0]
    assert meta["l"] is listed
    assert listed == [1, [2]]
    assert meta[3] == {4}
    assert type(inner["new"]) is tuple
    assert done.values == {}


def test_containers_of_another_kind_are_replaced(keeper: Keeper) -> None:
    """They kept the type they had here, a defaultdict its factory."""
    # case 28, case 29
    live = torch.zeros(2)
    saved: dict[str, Any] = {
        "od": OrderedDict(b=1, a=torch.ones(2)), "dd": defaultdict(list, x=[1]),
        "ctr": Counter("aab"), "d": {"k": 1}, "factory": defaultdict(int, n=2), "deep": [Counter()],
    }  # fmt: skip
    keeper.save({"meta": saved, "top": Counter("x")}, 1)
    factory = defaultdict[str, Any](list)
    meta: dict[str, Any] = {
        "od": {"a": live, "b": 0}, "dd": {"x": [5]}, "ctr": defaultdict(int),
        "d": OrderedDict(k=0), "factory": factory, "deep": [{"old": 1}],
    }  # fmt: skip
    state = {"meta": meta, "top": {"y": 2}}
    done = back(keeper, state)
    assert {key: type(value) for key, value in meta.items()} == {
        key: type(value) for key, value in saved.items()
    }
    assert meta["od"]["a"] is live
    assert live.tolist() == [1.0, 1.0]
    assert list(meta["od"]) == ["b", "a"]
    assert (meta["dd"], meta["dd"].default_factory) == ({"x": [1]}, list)
    assert (meta["ctr"], meta["d"], meta["deep"]) == (Counter("aab"), {"k": 1}, [Counter()])
    assert meta["factory"] is factory
    assert (factory, factory.default_factory) == ({"n": 2}, int)
    assert type(state["top"]) is Counter
    assert set(done.values) == {"top"}

    keeper.save({"model": nn.Linear(2, 2)}, 2)
    weights: dict[str, torch.Tensor] = {}  # a dict is filled with what a module holds
    back(keeper, {"model": weights})
    assert weights.keys() == {"weight", "bias"}

    class Own(dict[str, Any]):
        pass

    own, code = Own(z=1), defaultdict[str, Any](lambda: 5)
    back(keeper, {"meta": {**meta, "d": own, "factory": code}, "top": Counter()}, step=1)
    assert own == {"k": 1}
    assert (code, code["new"]) == ({"n": 2, "new": 5}, 5)


def test_what_cannot_change_in_place_is_returned_and_assigned(keeper: Keeper) -> None:
    keeper.save({"n": 5, "t": (1, torch.ones(2)), "s": "x", "none": None, "w": torch.ones(2)}, 1)
    inner = torch.zeros(2)
    state = {"n": 0, "t": (0, inner), "s": "", "none": 3, "w": torch.zeros(2)}
    done = back(keeper, state)
    assert set(done.values) == {"n", "t", "s", "none"}
    assert (state["n"], state["s"], state["none"]) == (5, "x", None)
    assert state["t"][0] == 1
    assert state["t"][1] is inner
    assert inner.tolist() == [1.0, 1.0]

    class Frozen(dict):
        def update(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    from types import MappingProxyType

    original = {"n": 0, "t": (0, inner), "s": "", "none": 3, "w": torch.zeros(2)}
    done = back(keeper, MappingProxyType(original))
    assert done.values["n"] == 5
    assert original["n"] == 0
    assert original["w"].tolist() == [1.0, 1.0]


def test_tensors_that_grow_from_nothing_and_back(keeper: Keeper) -> None:
    # case 17
    for step, shape in enumerate([(0, 3), (4, 3), (0, 3), (2, 0)]):
        keeper.save({"x": {"t": torch.ones(shape)}}, step)
    state: dict[str, Any] = {"x": {"t": torch.empty(0, 3)}}
    for step, shape in enumerate([(0, 3), (4, 3), (0, 3), (2, 0)]):
        back(keeper, state, step=step)
        assert state["x"]["t"].shape == shape
        assert state["x"]["t"].dtype == torch.float32


@pytest.mark.parametrize("low_memory", [False, True])
def test_bit_patterns_survive(keeper: Keeper, low_memory: bool) -> None:
    # case 23
    patterns = torch.tensor([0x7FC00001, 0x7F800001, 0xFF800123, 0x80000000, 0, 0x7F800000])
    saved = patterns.to(torch.int64).to(torch.int32).view(torch.float32)
    keeper.save({"x": {"t": saved, "big": saved.repeat(1000)}}, 1)
    target = {"t": torch.zeros(6), "big": torch.zeros(6000)}
    back(keeper, {"x": target}, low_memory=low_memory)
    assert same(target["t"], saved)
    assert same(target["big"], saved.repeat(1000))


def test_numpy_arrays_are_written_in_place(keeper: Keeper) -> None:
    big, small = np.arange(30_000.0), np.arange(5)
    keeper.save({"x": {"big": big, "small": small, "other": np.arange(3)}}, 1)
    target = {"big": np.zeros(30_000), "small": np.zeros(5, np.int64), "other": np.zeros(9)}
    kept = dict(target)
    back(keeper, {"x": target})
    assert target["big"] is kept["big"]
    assert np.array_equal(kept["big"], big)
    assert target["small"] is kept["small"]
    assert np.array_equal(kept["small"], small)
    assert target["other"].tolist() == [0, 1, 2]
    assert kept["other"].tolist() == [0] * 9
    target["other"][0] = 5  # writable, and its own


def test_sparse_tensors(keeper: Keeper) -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    sparse = torch.sparse_coo_tensor(indices, torch.arange(3.0), (2, 3), check_invariants=True)
    module = nn.Module()
    module.register_buffer("adj", sparse)
    keeper.save({"x": {"s": sparse}, "m": module}, 1)
    target = {"s": torch.zeros(2, 3).to_sparse()}
    other = nn.Module()
    other.register_buffer("adj", torch.eye(2, 3).to_sparse())
    live = other.adj
    back(keeper, {"x": target, "m": other})
    assert torch.equal(target["s"].to_dense(), sparse.to_dense())
    assert other.adj is live
    assert torch.equal(live.to_dense(), sparse.to_dense())
    wrong = nn.Module()
    wrong.register_buffer("adj", torch.eye(4).to_sparse())
    with pytest.raises(MismatchError, match="m/adj"):
        back(keeper, {"x": target, "m": wrong})


@pytest.mark.parametrize("low_memory", [False, True])
def test_tensors_that_do_not_fit_stay_as_they_are(keeper: Keeper, low_memory: bool) -> None:
    """Without strict they were replaced by the saved ones, and the log said that they were left."""
    # case 146
    saved = {
        "fits": torch.ones(2), "dtype": torch.ones(3), "number": 1, "list": [torch.ones(3), 5],
        "tuple": (torch.ones(3), torch.ones(2)), "dict": {"a": torch.ones(3), "b": torch.ones(2)},
        "sparse": torch.ones(3, 3).to_sparse(), "expanded": torch.arange(4.0),
    }  # fmt: skip
    keeper.save(saved, 1)
    left: dict[str, torch.Tensor] = {
        "dtype": torch.zeros(3, dtype=torch.float64), "number": torch.zeros(1),
        "list/0": torch.zeros(4), "tuple/0": torch.zeros(4), "dict/a": torch.zeros(2),
        "sparse": torch.zeros(3), "expanded": torch.zeros(1).expand(4),
    }  # fmt: skip
    before = {path: tensor.clone() for path, tensor in left.items()}
    state: dict[str, Any] = {
        "fits": torch.zeros(2), "dtype": left["dtype"], "number": left["number"],
        "list": [left["list/0"], 6], "tuple": (left["tuple/0"], torch.zeros(2)),
        "dict": {"a": left["dict/a"], "b": torch.zeros(2)}, "sparse": left["sparse"],
        "expanded": left["expanded"],
    }  # fmt: skip
    done = back(keeper, state, strict=False, low_memory=low_memory)
    assert {mismatch.path for mismatch in done.mismatched} == set(left)
    assert set(done.loaded) == {"fits", "list/1", "tuple/1", "dict/b"}
    there = [
        state["dtype"], state["number"], state["list"][0], state["tuple"][0], state["dict"]["a"],
        state["sparse"], state["expanded"],
    ]  # fmt: skip
    for (path, tensor), found in zip(left.items(), there, strict=True):
        assert found is tensor, path
        assert same(found, before[path]), path
    assert state["fits"].tolist() == state["tuple"][1].tolist() == [1.0, 1.0]
    assert (state["list"][1], state["dict"]["b"].tolist()) == (5, [1.0, 1.0])


def test_plain_tensors_of_which_none_fits_are_refused(keeper: Keeper) -> None:
    # case 146
    keeper.save({"a": torch.ones(3), "b": torch.arange(2.0)}, 1)
    wrong = torch.zeros(4)
    for state in ({"a": wrong}, {"b": torch.zeros(1).expand(2)}):
        with pytest.raises(MismatchError, match="nothing in it fits") as caught:
            back(keeper, state, strict=False)
        assert caught.value.kind == "no-match"
    assert wrong.tolist() == [0.0] * 4


def test_a_container_at_two_places_holds_one_content(keeper: Keeper) -> None:
    """The content that was saved for its last place came back at all of them."""
    # case 28
    saved = {
        "lists": [[1], [2, 3], [1]], "dicts": {"a": {"k": float("nan")}, "b": {"k": 2}},
        "queues": (deque([1.0], 5), deque([2.0], 5)), "outer": [[torch.ones(3)], [torch.ones(3)]],
    }  # fmt: skip
    keeper.save({"meta": saved, "top": [1], "other": [4]}, 1)
    keeper.save({"meta": {"dicts": {"a": {"k": 1, "l": 2}, "b": {"k": 1, "l": 3}}}}, 2)
    listed: list[Any] = [0]
    mapped: dict[str, Any] = {"k": 0}
    queue, tensors = deque([0.0], 5), [torch.zeros(3)]
    meta: dict[str, Any] = {
        "lists": [listed] * 3, "dicts": {"a": mapped, "b": mapped}, "queues": (queue, queue),
        "outer": [tensors, tensors],
    }  # fmt: skip
    state = {"meta": meta, "top": listed, "other": listed}
    done = back(keeper, state, step=1)
    assert meta["lists"] == [[1], [2, 3], [1]]
    assert meta["lists"][0] is listed
    assert meta["lists"][2] is listed
    assert (state["top"], state["other"], listed) == ([1], [4], [1])
    assert done.values.keys() == {"other"}
    assert meta["dicts"]["a"] is mapped
    assert str(meta["dicts"]) == "{'a': {'k': nan}, 'b': {'k': 2}}"
    assert meta["queues"] == (deque([1.0]), deque([2.0]))
    assert meta["outer"][0] is meta["outer"][1] is tensors
    assert tensors[0].tolist() == [1.0] * 3
    meta["dicts"]["b"] = mapped
    only = ["meta/dicts/a/k", "meta/dicts/b/l"]
    back(keeper, state, step=2, only=only, strict=False)
    assert meta["dicts"]["a"]["k"] == 1
    assert meta["dicts"]["b"]["l"] == 3


class Counted(dict[Any, Any]):
    """Counts how often all of it is gone through."""

    times = 0

    def keys(self) -> Any:
        self.times += 1
        return super().keys()

    def __iter__(self) -> Any:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("saved", [{"kept": 1}, {"kept": 1, "gone": 5}])
def test_what_goes_is_gone_through_once(keeper: Keeper, saved: dict[str, int]) -> None:
    """Prevents: a restore that takes minutes where a list of losses has become a long one."""
    keeper.save({"meta": saved}, 1)
    gone = Counted(dict.fromkeys(range(90)))
    meta: dict[str, Any] = {"kept": 0, "gone": gone}
    back(keeper, {"meta": meta})
    assert meta == saved
    assert gone.times < 20
