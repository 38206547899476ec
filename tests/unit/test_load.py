"""Prevents a load from changing types, keys, ties, layouts or bits, or from obeying the store."""

from __future__ import annotations

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from captured import bits, same
from deltackpt_store.errors import CorruptionError, InvalidInputError, NotFoundError
from deltackpt_store.manifest import Snapshot
from deltackpt_store.manifest_io import to_base
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from restoring import Keeper
from torch import nn

from deltackpt.load import load, steps

Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1


def roundtrip(keeper: Keeper, state: dict[Any, Any], **options: Any) -> Any:
    keeper.save(state, 1)
    return load(keeper.path, **options)


def test_containers_and_keys_keep_their_types(keeper: Keeper) -> None:
    # case 28
    saved: dict[Any, Any] = {
        "od": OrderedDict(b=1, a=2),
        "dd": defaultdict(list, {"x": [1]}),
        "counter": Counter("aab"),
        "deque": deque([1, torch.ones(2)], maxlen=4),
        "nt": Point(1, torch.zeros(2)),
        "keys": {0: "a", "0": "b", (1, 2): "c", True: "d", None: "e", 1.5: "f", b"x": "g"},
        "plain": [None, True, 2**70, 1.5, float("-inf"), "ü\ud800", b"\0", 1j, {1}, frozenset("a")],
        "more": (torch.float16, torch.device("cuda:3"), torch.Size([2]), PurePosixPath("a/b")),
        "enum": Color.RED,
        "np": (np.float32(1.5), np.arange(3, dtype=np.uint16)),
        "empty": {"d": {}, "l": [], "t": ()},
    }
    found = roundtrip(keeper, saved)
    assert list(found) == list(saved)

    def check(left: Any, right: Any) -> None:
        assert type(left) is type(right)
        if isinstance(left, torch.Tensor):
            assert same(left, right)
        elif isinstance(left, dict):
            assert list(map(repr, left)) == list(map(repr, right))
            for a, b in zip(left.values(), right.values(), strict=True):
                check(a, b)
        elif isinstance(left, (list, tuple, deque)):
            assert len(left) == len(right)
            for a, b in zip(left, right, strict=True):
                check(a, b)
        elif isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)
        else:
            assert left == right

    check(found, saved)
    assert found["deque"].maxlen == 4
    assert found["dd"].default_factory is list
    assert found["enum"] is Color.RED


def test_objects_come_back_as_their_state_dict(keeper: Keeper) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    found = roundtrip(keeper, {"model": model, "optimizer": optimizer})
    assert list(found) == ["model", "optimizer"]
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    other.load_state_dict(found["model"])
    fresh = torch.optim.AdamW(other.parameters())
    fresh.load_state_dict(found["optimizer"])
    for left, right in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert same(left, right)
    assert isinstance(found["model"]["0.weight"], nn.Parameter)
    assert not isinstance(found["model"]["1.running_mean"], nn.Parameter)
    assert found["optimizer"]["state"][0]["step"] == 1


def test_shared_memory_is_shared_again(keeper: Keeper) -> None:
    # case 3
    base = torch.arange(100.0)
    saved = {
        "base": base,
        "head": base[:10],
        "matrix": base.view(10, 10).t(),
        "other": base.clone(),
    }
    found = roundtrip(keeper, saved)
    for key, value in saved.items():
        assert same(found[key], value)
        assert found[key].stride() == value.stride()
    found["base"][1] = -1
    assert found["head"][1] == -1
    assert found["matrix"][1, 0] == -1
    assert found["other"][1] == 1
    assert base[1] == 1


def test_a_kept_view_does_not_hold_the_whole_state(keeper: Keeper) -> None:
    found = roundtrip(keeper, {"a": torch.ones(1000), "b": torch.ones(1000)})
    assert found["a"].untyped_storage().nbytes() == 4000


def test_layouts_are_kept(keeper: Keeper) -> None:
    # case 5
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = roundtrip(keeper, {"image": image, "t": torch.randn(3, 4).t()})
    assert found["image"].is_contiguous(memory_format=torch.channels_last)
    assert same(found["image"], image)
    assert found["t"].stride() == (1, 4)


def test_empty_tensors_keep_shape_and_dtype(keeper: Keeper) -> None:
    # case 17
    for step, shape in enumerate([(0,), (0, 3), (2, 0), (4, 3), (0, 3)]):
        saved = {"x": torch.ones(shape, dtype=torch.bfloat16), "y": torch.ones(0)}
        keeper.save(saved, step)
        found = load(keeper.path)
        assert found["x"].shape == shape
        assert found["x"].dtype == torch.bfloat16
    assert [tuple(load(keeper.path, step=s)["x"].shape) for s in steps(keeper.path)] == [
        (0,), (0, 3), (2, 0), (4, 3), (0, 3)]  # fmt: skip


def test_bits_are_kept(keeper: Keeper) -> None:
    # case 23
    nan = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000], dtype=torch.int64).to(torch.int32)
    saved = {"nan": nan.view(torch.float32), "conj": torch.tensor([1 + 2j]).conj()}
    found = roundtrip(keeper, saved)
    assert bits(found["nan"]) == nan.numpy().tobytes()
    assert found["conj"].is_conj()
    assert found["conj"].tolist() == [1 - 2j]


def test_only_leaves_the_rest_out(keeper: Keeper) -> None:
    saved = {
        "model": {"a.w": torch.ones(2), "b.w": torch.zeros(2)},
        "l": [1, torch.ones(1)],
        "n": 4,
    }
    found = roundtrip(keeper, saved, only="model/a.*")
    assert list(found) == ["model"]
    assert list(found["model"]) == ["a.w"]
    found = load(keeper.path, only=["l/1", "n"])
    assert list(found) == ["l", "n"]
    assert found["l"][0] is None
    assert same(found["l"][1], torch.ones(1))
    assert list(load(keeper.path, only="model")["model"]) == ["a.w", "b.w"]
    with pytest.raises(InvalidInputError, match="model, l, n"):
        load(keeper.path, only="models/*")


def test_only_takes_every_path_as_it_is(keeper: Keeper) -> None:
    """Prevents: a name with brackets that means another tensor, or none at all."""
    # case 146, case 172
    keys = ["layers[0]", "layers0", "b[!a]", "a*b", "new\nline[1]", "x?"]
    keeper.save({"m": {key: {"w": torch.full((2,), float(i))} for i, key in enumerate(keys)}}, 0)
    for i, key in enumerate(keys):
        for path in (f"m/{key}", f"m/{key}/w"):
            assert same(load(keeper.path, only=path)["m"][key]["w"], torch.full((2,), float(i)))


def test_only_reads_only_what_it_names(keeper: Keeper) -> None:
    keeper.save({"a": torch.ones(5000)}, 1)
    before = set(keeper.path.glob("packs/*/*"))
    keeper.save({"a": torch.ones(5000), "b": torch.arange(5000.0)}, 2)
    for path in set(keeper.path.glob("packs/*/*")) - before:
        path.write_bytes(b"gone")
    assert same(load(keeper.path, step=2, only="a")["a"], torch.ones(5000))
    with pytest.raises(CorruptionError, match="damaged in b"):
        load(keeper.path, step=2)
    assert list(load(keeper.path)) == ["a"]


def test_the_saved_device_is_a_hint(keeper: Keeper) -> None:
    # case 144: recorded on cuda:1, loaded where there is none
    keeper.save({"w": torch.arange(5.0), "v": torch.arange(5000.0)}, 1, rng=False)
    store = Store.open(keeper.path)
    old = store.snapshot(store.head("main"))
    views = [msgspec.structs.replace(view, device="cuda:1") for view in old.layout.tensors]
    layout = msgspec.structs.replace(old.layout, tensors=tuple(views))
    with StoreWriter(store, index=store.index()) as writer:
        manifest = to_base(Snapshot(layout, old.objects, old.inline, old.chunks), old.packs)
        digest = writer.write_manifest(manifest)
        writer.commit(run="main", step=2, parent=store.head("main"), manifest=digest, base=None,
                      root=manifest.root, packs=manifest.packs)  # fmt: skip
    found = load(keeper.path, step=2)
    assert found["w"].device.type == "cpu"
    assert same(found["v"], torch.arange(5000.0))


def test_device_moves(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    # case 144
    base = torch.arange(10.0)
    found = roundtrip(keeper, {"a": base, "b": base[2:]}, device="cpu")
    assert same(found["b"], base[2:])
    moved = {"cpu": load(keeper.path, device="cpu:0")}
    with monkeypatch.context() as patch:  # a device that any machine has, in place of a GPU
        patch.setattr(sys.modules["deltackpt.load"], "_device", torch.device)
        moved["meta"] = load(keeper.path, device="meta")
    for device, state in moved.items():
        assert state["a"].device.type == device
        assert state["a"].untyped_storage()._cdata == state["b"].untyped_storage()._cdata


def test_a_device_that_cannot_hold_the_step_is_refused(keeper: Keeper) -> None:
    """One without memory would give tensors without values, and call a sparse one damaged."""
    keeper.save({"a": torch.arange(10.0), "s": torch.eye(3).to_sparse(), "n": np.arange(3)}, 1)
    maps: Any = [{"cuda:0": "cpu"}, ["cpu"], 1.5, True, torch.float32]
    wrong = ["meta", torch.device("meta"), "meta:0", "gpu", "", "cpu:-1", "cpu:x", -1, 10**30]
    missing = [] if torch.cuda.is_available() else ["cuda", "cuda:0", torch.device("cuda", 9), 0]
    for device in [*maps, *wrong, *missing, "hpu"]:
        with pytest.raises(InvalidInputError, match="device") as caught:
            load(keeper.path, device=device)
        assert caught.value.context["option"] == "device"
        assert "leave it out" in str(caught.value)
    with pytest.raises(InvalidInputError, match="without its values"):
        load(keeper.path, device="meta")


def test_a_full_device_is_named(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper.save({"a": torch.arange(1000.0)}, 1)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 KB\nmore")

    monkeypatch.setattr(sys.modules["deltackpt.load"], "_device", torch.device)
    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(InvalidInputError, match="moved to cuda:3: CUDA out of memory") as caught:
        load(keeper.path, device="cuda:3")
    assert (caught.value.kind, caught.value.context["option"]) == ("memory", "device")


def test_steps_and_what_is_unknown(keeper: Keeper, tmp_path: Path) -> None:
    keeper.save({"n": 1}, 3)
    keeper.save({"n": 2}, 10)
    keeper.save({"n": 2}, 4, run="other")
    assert steps(keeper.path) == [3, 10]
    assert steps(Store.open(keeper.path), run="other") == [4]
    assert load(keeper.store, "other") == {"n": 2}
    assert load(keeper.path, step=3) == {"n": 1}
    with pytest.raises(NotFoundError, match="3, 10"):
        load(keeper.path, step=4)
    with pytest.raises(NotFoundError, match="main, other"):
        load(keeper.path, "third")
    with pytest.raises(NotFoundError, match="main, other"):
        steps(keeper.path, "third")
    with pytest.raises(NotFoundError, match="not a deltackpt store"):
        load(tmp_path)


def test_more_than_fits_into_memory_is_refused(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 143
    keeper.save({"w": torch.ones(5000), "v": torch.ones(50)}, 1)
    monkeypatch.setattr(sys.modules["deltackpt.load"], "available_bytes", lambda: 1000)
    with pytest.raises(InvalidInputError, match="only="):
        load(keeper.path)
    assert same(load(keeper.path, only="v")["v"], torch.ones(50))


def test_states_are_new_at_every_load(keeper: Keeper) -> None:
    found = roundtrip(keeper, {"w": torch.ones(5000), "l": [1, {"a": 2}]})
    found["w"].zero_()
    found["l"][1]["a"] = 9
    again = load(keeper.path)
    assert same(again["w"], torch.ones(5000))
    assert again["l"] == [1, {"a": 2}]


def test_what_is_loaded_in_inference_mode_can_be_changed_outside_of_it(keeper: Keeper) -> None:
    """Training on what was loaded would fail at the first step."""
    keeper.save({"x": torch.ones(900), "y": [nn.Parameter(torch.ones(3))]}, 1)
    with torch.inference_mode():
        state = load(keeper.store)
    state["x"].add_(1)
    (state["y"][0] * state["y"][0]).sum().backward()
    assert state["y"][0].grad is not None
