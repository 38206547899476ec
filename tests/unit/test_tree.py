"""Containers flattened to strings lose key types and lengths: a restore fills the wrong state."""

from __future__ import annotations

import collections
import dataclasses
import enum
import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from captured import bits, rebuild, roundtrip, same, saved_bytes, take
from deltackpt_store.errors import CorruptionError, InvalidInputError, MismatchError
from deltackpt_store.layout_check import check_structure
from torch import Tensor, nn

from deltackpt import building, params, tree
from deltackpt.paths import segments


class Pair(NamedTuple):
    left: Any
    right: Any


class Mode(enum.Enum):
    TRAIN = 1


def paths(state: dict[Any, Any]) -> list[str]:
    return [path for path in take(state).layout.paths if not path.startswith("#")]


def test_key_types_are_kept() -> None:
    # case 29
    inner = {0: "a", "0": "b", (1, 2): "c", True: "d", None: "e", Mode.TRAIN: "f", 2.5: "g"}
    back = roundtrip({"x": inner})["x"]
    assert list(back.items()) == list(inner.items())
    assert list(map(type, back)) == list(map(type, inner))
    assert paths({"x": inner}) == [
        "x/0", 'x/"0"', "x/(1, 2)", "x/True", "x/None", "x/<Mode.TRAIN: 1>", "x/2.5",
    ]  # fmt: skip


def test_a_key_of_another_type_is_noticed_by_the_next_capture() -> None:
    # case 29
    for before, after in [(1, True), (1, 1.0), ((1, 2), (True, 2.0)), ("1", 1)]:
        first = take({"x": {before: 5}})
        second = take({"x": {after: 5}}, previous=first)
        (key,) = rebuild(second)["x"]
        assert repr(key) == repr(after)


def test_containers_come_back_as_they_were() -> None:
    # case 28, case 36
    t = torch.arange(200.0)
    state: dict[str, Any] = {
        "list": [t, 1, [t[:3], "x"], []],
        "tuple": (t, (), (1, 2.5)),
        "named": Pair(t, Pair(1, [2])),
        "ordered": collections.OrderedDict(b=t, a=1),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([t, 1], maxlen=5),
        "numbers": collections.deque([1.0, 2.0], maxlen=3),
        "default": collections.defaultdict(list, {"k": [t]}),
        "empty": {},
        "empties": [[], (), {}, set()],
        "set": {1, 2},
        "path": Path("/tmp/x"),
        "dtype": torch.float16,
        "array": np.arange(5, dtype=np.uint32),
        "scalar": np.float32(2.5),
    }
    back = roundtrip(state)
    assert list(back) == list(state)

    def compare(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert same(a, b)
        elif isinstance(a, dict):
            assert list(a) == list(b)
            for key in a:
                compare(a[key], b[key])
        elif isinstance(a, (list, tuple, collections.deque)):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                compare(x, y)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
        else:
            assert a == b

    compare(back, state)
    assert back["deque"].maxlen == 5
    assert back["numbers"].maxlen == 3
    assert back["default"].default_factory is list


def test_lists_that_grow_and_shrink() -> None:
    # case 28
    previous = None
    for length in (0, 2, 5, 1, 0):
        hist = [{"step": i, "w": torch.full((300,), float(i))} for i in range(length)]
        previous = take({"hist": hist}, previous=previous)
        back = rebuild(previous)["hist"]
        assert len(back) == length
        assert all(
            same(a["w"], b["w"]) and a["step"] == b["step"] for a, b in zip(back, hist, strict=True)
        )


def test_paths_are_readable_and_scalar_sequences_are_one_leaf() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "rng": random.getstate()}
    assert paths(state) == [
        "model/weight", "model/bias",
        *(f"optimizer/param_groups/0/{k}" for k in optimizer.param_groups[0] if k != "params"),
        "optimizer/param_groups/0/params", "rng/0", "rng/1", "rng/2",
    ]  # fmt: skip


def test_odd_names_never_collide() -> None:
    # case 172
    names = [
        "", "/", "a/b", "a~1b", "a~b", "..", ":", "\0", "\n", "W", "w", "x" * 600, "x" * 601,
        '"', '""', '"0"', "0", "-1", "007", "1.5", "nan", "None", "True", "(1, 2)", "[1]", "b'x'",
        "<Mode.TRAIN: 1>", "é", "\ud800", "~ud800", "日本", " ", "\uff11", "1_0",
        "torch.float32", "1j", "frozenset({1})", "PosixPath('a')",
    ]  # fmt: skip
    keys: list[Any] = [
        *names, 0, -1, 7, 1.5, None, True, (1, 2), b"x", Mode.TRAIN, torch.float32, ("a/b",), 1j,
        frozenset({1}), Path("a"), float("nan"), float("nan"), 10,
    ]  # fmt: skip
    state = {"s": {key: torch.tensor([i]) for i, key in enumerate(keys)}}
    taken = take(state)
    shown = taken.layout.paths
    assert len(set(shown)) == len(shown)
    for path in shown:
        path.encode()  # valid Unicode
    assert all(path.startswith(("s/", "#")) and path.count("/") == 1 for path in shown)
    back = rebuild(taken)["s"]
    assert list(map(repr, back)) == list(map(repr, keys))
    assert [int(t) for t in back.values()] == list(range(len(keys)))
    top = take(dict.fromkeys(names, 1)).layout.paths
    assert len(set(top)) == len(names)


def test_nested_names_do_not_run_together() -> None:
    # case 172
    assert paths({"a": {"b/c": 1, "b": {"c": 2, "": 3}}, "a/b": {"c": 4}, "": {"": 5}}) == [
        "a/b~1c", "a/b/c", 'a/b/""', "a~1b/c", '""/""',
    ]  # fmt: skip
    assert segments(["x", 1, "1"]) == ["x", "1", '"1"']


def test_reserved_names() -> None:
    with pytest.raises(InvalidInputError, match="#rng"):
        take({"#rng": 1})
    assert roundtrip({"x": {"#rng": 1}}) == {"x": {"#rng": 1}}


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


@pytest.mark.parametrize("bad", [lambda: 1, Settings(), object(), torch.Generator(), nn.Linear])
def test_what_cannot_be_saved_is_named(bad: Any) -> None:
    # case 32, case 36
    state = {"scheduler": {"lr_lambdas": [None, bad]}, "w": torch.zeros(3)}
    with pytest.raises(InvalidInputError) as caught:
        take(state)
    assert caught.value.context["path"] == "scheduler/lr_lambdas/1"
    assert caught.value.hint


def test_a_namedtuple_that_no_load_would_find_is_refused() -> None:
    """It came back as a plain tuple: what holds a tensor, and what does not."""
    # case 36
    local: Any = collections.namedtuple("Local", "inner")
    for bad in (local(1), local(torch.ones(2)), local([1, {}]), local(local(None))):
        for state in ({"meta": {"p": bad}}, {"meta": {"p": {"q": [0, bad]}}}):
            with pytest.raises(InvalidInputError, match="top of a module") as caught:
                take(state)
            assert caught.value.context["path"] in ("meta/p", "meta/p/q/1")


@pytest.mark.parametrize("bad", [torch.zeros(3), nn.Linear, lambda: 1, (1, object())])
def test_a_key_that_cannot_be_saved_is_called_one(bad: Any) -> None:
    # case 29, case 36
    for state in ({"opt": {"state": {1: 2, bad: torch.zeros(3)}}}, {"opt": {"state": {bad: {}}}}):
        with pytest.raises(InvalidInputError, match="at 'opt/state': it has a key that") as caught:
            take(state)
        assert caught.value.context["path"] == "opt/state"
        assert "state_dict" in str(caught.value.hint)


def test_cycles_are_named() -> None:
    inner: dict[str, Any] = {}
    inner["back"] = [inner]
    with pytest.raises(InvalidInputError, match="x/a/back/0") as caught:
        take({"x": {"a": inner}})
    assert "'x/a'" in str(caught.value)
    deep: Any = 1
    for _ in range(100):
        deep = {"d": deep}
    with pytest.raises(InvalidInputError, match="64"):
        take({"x": deep})
    shared = {"v": torch.ones(3)}
    assert same(roundtrip({"a": shared, "b": [shared, shared]})["b"][1]["v"], shared["v"])


class Counter2:
    """A loader-like object whose state_dict is asked for exactly once per capture."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"position": self.asked, "buffer": [torch.ones(2)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a save never loads")


def test_objects_with_a_state_dict() -> None:
    # case 39
    loader = Counter2()
    first = take({"loader": loader, "list": [loader]})
    assert loader.asked == 2
    second = take({"loader": loader, "list": [loader]}, previous=first)
    assert loader.asked == 4
    assert rebuild(first)["loader"]["position"] == 1
    assert rebuild(second)["list"][0]["position"] == 4
    assert second.layout is first.layout


class Holder:
    """An object that lets its state_dict() return other objects."""

    def __init__(self, **inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inner)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = state


def test_an_object_inside_of_another_ones_state_is_refused() -> None:
    """A restore that raised nothing left a dict where the module (a projector, ...) had been."""
    # case 32
    holder = Holder(k=1)
    first = take({"t": holder})
    for inner in (nn.Linear(2, 2), Holder(k=1), [Holder()]):
        holder.inner["ema"] = inner
        for previous in (None, first):
            with pytest.raises(InvalidInputError, match=r"'t/ema.* get back a dict") as caught:
                take({"t": holder}, previous=previous)
            assert caught.value.hint is not None
            assert "hand it on" in caught.value.hint
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["projector"] = Holder(k=1)
    with pytest.raises(InvalidInputError, match="optimizer/state/0/projector"):
        take({"model": model, "optimizer": optimizer})
    assert roundtrip({"in": [Holder(k=1)]}) == {"in": [{"k": 1}]}  # which restores in its place


def test_module_metadata_comes_back() -> None:
    """Without its version entries, an old key layout would be 'upgraded' a second time."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    back = roundtrip({"m": model})["m"]
    assert type(back) is collections.OrderedDict
    assert back._metadata == model.state_dict()._metadata
    assert list(back) == list(model.state_dict())
    nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).load_state_dict(back)


class OwnState(nn.Linear):
    def state_dict(self) -> dict[str, Any]:  # the point of the test
        return {"weight": self.weight.detach(), "note": "mine", "scaled": self.bias.detach() * 2}


def test_modules_with_their_own_state_dict() -> None:
    model = OwnState(3, 2)
    taken = take({"m": model})
    back = rebuild(taken)["m"]
    assert back["note"] == "mine"
    assert same(back["weight"], model.weight)
    assert [(v.parameter, v.requires_grad) for v in taken.layout.tensors] == [
        (True, True), (False, False),
    ]  # fmt: skip
    patched = nn.Linear(2, 2)
    patched.state_dict = lambda: {"only": torch.ones(1)}
    assert list(roundtrip({"m": patched})["m"]) == ["only"]


def sparse_tensors() -> dict[str, Tensor]:
    indices = torch.tensor([[0, 1, 1, 0], [2, 0, 0, 2]])
    dense = torch.zeros(8, 8)
    dense[2:4, 4:6] = torch.randn(2, 2)
    dense[7, 7] = -0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return {
            "uncoalesced": torch.sparse_coo_tensor(
                indices, torch.tensor([1.0, 2.0, 3.0, -0.0]), (2, 3), is_coalesced=False
            ),
            "coalesced": dense.to_sparse().coalesce(),
            "hybrid": torch.sparse_coo_tensor(
                indices[:1], torch.randn(4, 200), (3, 200), is_coalesced=False
            ),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 2)),
            "bsc": dense.to_sparse_bsc((2, 2)),
            "empty": torch.zeros(3, 4).to_sparse(),
        }


def test_sparse_tensors_through_their_parts() -> None:
    # case 19
    state = sparse_tensors()
    taken = take({"s": state})
    back = rebuild(taken)["s"]
    for key, tensor in state.items():
        other = back[key]
        assert (other.layout, other.shape, other.dtype) == (
            tensor.layout,
            tensor.shape,
            tensor.dtype,
        )
        if tensor.layout == torch.sparse_coo:
            assert other.is_coalesced() == tensor.is_coalesced()
            assert bits(other._indices()) == bits(tensor._indices())
            assert bits(other._values()) == bits(tensor._values())
        else:
            assert bits(other.values()) == bits(tensor.values())
            assert bits(other.to_dense()) == bits(tensor.to_dense())
    assert "s/csr/crow_indices" in taken.layout.paths
    again = take({"s": sparse_tensors()}, previous=taken)
    assert again.layout is taken.layout
    del state["empty"]
    state["csr"] = state["csr"].to_dense()
    assert rebuild(take({"s": state}, previous=taken))["s"]["csr"].layout == torch.strided
    dense_first = take({"s": {"t": torch.zeros(8, 8)}})
    turned = take({"s": {"t": state["csc"]}}, previous=dense_first)
    assert rebuild(turned)["s"]["t"].layout == torch.sparse_csc


def test_sparse_parameters() -> None:
    # case 19
    sparse = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=True)
    back = roundtrip({"p": sparse})["p"]
    assert type(back) is nn.Parameter
    assert back.requires_grad
    assert back.is_coalesced()


def test_large_arrays_are_cut_like_tensors() -> None:
    array = np.arange(100_000, dtype=">i4").reshape(100, 1000)
    state = {
        "a": array, "t": array.T, "structured": np.zeros(9000, [("x", "<f8"), ("y", "<i2")]),
        "fixed": np.broadcast_to(np.float32(1), (200, 200)),
    }  # fmt: skip
    taken = take(state)
    assert not taken.objects
    assert saved_bytes(taken) == sum(a.nbytes for a in state.values())
    back = rebuild(taken)
    for key, value in state.items():
        assert type(back[key]) is np.ndarray
        assert (back[key].dtype, back[key].shape) == (value.dtype, value.shape)
        assert back[key].tobytes() == value.tobytes()
    array[0, 0] = 77
    second = take(state, previous=taken)
    assert second.layout is taken.layout
    assert rebuild(second)["a"][0, 0] == 77
    with pytest.raises(InvalidInputError, match="objs"):
        take({"objs": np.array([object()] * 20_000)})


def test_only_some_slots() -> None:
    state = {"a": {"x": 1, "y": {"z": 2}}, "l": [1, torch.ones(2)], "n": Pair(torch.ones(1), {}),
             "empty": {}, "s": torch.eye(2).to_sparse()}  # fmt: skip
    taken = take(state)
    slots = {path: slot for slot, path in enumerate(taken.layout.paths)}

    def built(*wanted: str) -> Any:
        return building.build(
            taken.layout.structure, lambda slot: slot, keep={slots[path] for path in wanted}
        )

    assert built("a/y/z") == {"a": {"y": {"z": slots["a/y/z"]}}, "empty": {}, "#params": {}}
    assert built("l/1")["l"] == [None, slots["l/1"]]
    assert "s" not in built("s/indices")
    assert built("n/left")["n"] == Pair(slots["n/left"], {})


def node(structure: Any) -> bytes:
    return msgspec.msgpack.encode(structure)


@pytest.mark.parametrize(
    "structure",
    [
        b"", b"\xc1", node(None), node("d"), node([]), node([1]), node(["zz", []]), node(["d"]),
        node(["d", 1]), node(["d", [[1]]]), node(["d", [["a", 99]]]), node(-1), node(["l", [-1]]),
        node(["d", [["a", 0], ["a", 1]]]), node(["d", [[["l", []], 0]]]), node(["l", [], 5]),
        node(["coo", [2], True, 0, 1, False]), node(["coo", [2, 2], True, 0, 1, False, False]),
        node(["csr", [2, 2], 0, 0, 0, False, False]), node(["np", 1, "<f4", [3]]),
        node(["np", 0, "O", [1]]), node(["np", 0, "<f4", [7]]), node(["dd", "eval", []]),
        node(["dq", "x", []]), node(["nt", "a", "b", ["x", "y"], [0]]), node({"a": 1}),
        b"\x92\xa1l\x91" * 400 + b"\x00",
    ],
    ids=lambda s: repr(s[:30]),
)  # fmt: skip
def test_damaged_structures_are_refused(structure: bytes) -> None:
    leaves = [torch.arange(8, dtype=torch.uint8), 5]
    with pytest.raises(CorruptionError):
        building.build(structure, lambda slot: leaves[slot])


def test_sparse_indices_are_checked() -> None:
    """Indices from a damaged file must not make a kernel read outside its memory."""
    parts = [torch.tensor([[0, 9]]), torch.ones(2)]
    with pytest.raises(CorruptionError):
        building.build(node(["coo", [3], False, 0, 1, False, False]), lambda slot: parts[slot])
    csr = [torch.tensor([0, 5, 1]), torch.tensor([0]), torch.ones(1)]
    with pytest.raises(CorruptionError):
        building.build(node(["csr", [2, 2], 0, 1, 2, False, False]), lambda slot: csr[slot])


# names of parameters ------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        for name in ("b", "a") if swapped else ("a", "b"):
            setattr(self, name, nn.Parameter(torch.randn(4)))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_names_of_parameters() -> None:
    # case 41, case 147
    model, loose = Two(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [model.b]}, {"params": [model.a, loose]}])
    taken = rebuild(take({"model": model, "opts": [optimizer]}))
    assert taken["#params"] == {"opts/0": ["model/b", "model/a", None]}
    named = {"model": model, "t": [{"x": loose}], "opts": [optimizer]}
    assert rebuild(take(named))["#params"] == {"opts/0": ["model/b", "model/a", "t/0/x"]}
    wrapped = {"model": Wrapper(nn.DataParallel(model)), "opts": [optimizer]}
    taken = rebuild(take(wrapped))
    assert taken["#params"] == {"opts/0": ["model/b", "model/a", None]}


def test_another_optimizer_over_the_same_state_is_noticed() -> None:
    """Names recorded from the previous save would put moments on the wrong parameters."""
    # case 41
    model, loose = Two(), [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))]

    def names(*parameters: nn.Parameter, previous: Any = None) -> tuple[list[str | None], Any]:
        taken = take({"m": model, "o": torch.optim.SGD(parameters)}, previous=previous)
        return rebuild(taken)["#params"]["o"], taken

    first, taken = names(model.a, model.b)
    second, _ = names(model.b, model.a, previous=taken)
    assert (first, second) == (["m/a", "m/b"], ["m/b", "m/a"])
    first, taken = names(loose[0], model.a)
    second, again = names(loose[1], model.a, previous=taken)
    assert first == second == [None, "m/a"]
    assert again.layout is taken.layout


def test_swapped_parameters_are_matched_by_name() -> None:
    # case 41
    saved_model, target = Two(), Two(swapped=True)
    saved_optimizer = torch.optim.AdamW(saved_model.parameters(), lr=0.1)
    for i, p in enumerate(saved_model.parameters()):
        p.grad = torch.full_like(p, i + 1.0)
    saved_optimizer.step()
    taken = rebuild(take({"model": saved_model, "optimizer": saved_optimizer}))
    optimizer = torch.optim.AdamW(target.parameters())
    present = rebuild(take({"model": target, "optimizer": optimizer}))["#params"]["optimizer"]
    aligned = params.align(taken["optimizer"], taken["#params"]["optimizer"], present, [2])
    optimizer.load_state_dict(aligned)
    for name in ("a", "b"):
        expected = saved_optimizer.state[getattr(saved_model, name)]["exp_avg"]
        assert same(optimizer.state[getattr(target, name)]["exp_avg"], expected)
    assert taken["optimizer"]["param_groups"][0]["params"] == [0, 1]


def test_parameters_that_do_not_match_are_refused_by_name() -> None:
    # case 41
    saved = {"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}
    names = ["m/a", "m/b", "m/c"]
    with pytest.raises(MismatchError, match=r"missing: m/z; unexpected: m/b"):
        params.align(saved, names, ["m/a", "m/z", "m/c"], [2, 1])
    with pytest.raises(MismatchError, match=r"in group 1 of .*, but in group 0 here: m/c"):
        params.align(saved, names, ["m/a", "m/c", "m/b"], [2, 1])
    with pytest.raises(MismatchError, match="2 parameter groups in the checkpoint, 1 here"):
        params.align(saved, names, names, [3])
    with pytest.raises(MismatchError, match="not in the state"):
        params.align(saved, ["m/a", "m/b", None], ["m/a", "m/b", "m/c"], [2, 1])
    with pytest.raises(MismatchError, match="recorded names"):
        params.align(saved, names[:2], names, [2, 1])
    nameless = params.align(saved, [None] * 3, [None] * 3, [2, 1])
    assert nameless["param_groups"] == saved["param_groups"]
    named = {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["a", "b"]}]}
    assert params.align(named, ["m/a", "m/b"], ["m/b", "m/a"], [2])["param_groups"] == [
        {"params": [1, 0], "param_names": ["b", "a"]}
    ]


@pytest.mark.parametrize("depth", [1, 40, 62, 63, 64])
@pytest.mark.parametrize("inner", [0, 10, 20, 24, 28, 32, 60])
def test_what_nests_too_deep_for_a_reader_is_refused(depth: int, inner: int) -> None:
    """Keys, dtypes and a module's metadata nest beside the containers that hold them."""
    key: Any = "k"
    for _ in range(inner):
        key = (key,)
    state: Any = {key: torch.zeros(1)}
    for _ in range(depth - 1):
        state = {"k": state}
    node: Any = ["d", [[_key_node(inner), 0]]]
    for _ in range(depth - 1):
        node = ["d", [["k", node]]]
    walker = tree.Walker()
    try:
        check_structure(msgspec.msgpack.encode(node), "of the state")
    except CorruptionError:
        with pytest.raises(InvalidInputError, match="nest too deeply"):
            walker.tree(state)
    else:
        assert walker.tree(state).structure == msgspec.msgpack.encode(node)


def _key_node(inner: int) -> Any:
    return "k" if inner == 0 else ["t", [_key_node(inner - 1)]]
