"""Exported files read back by the programs they are for: safetensors and torch.load."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import os
import pathlib
import pickletools
import secrets
import stat
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from click.testing import Result
from command_line import run
from deltackpt_store.errors import CorruptionError, StorageError
from deltackpt_tools import publish, tensor_bytes
from deltackpt_tools.export_safetensors import export_safetensors
from deltackpt_tools.export_torch import export_torch
from deltackpt_tools.selection import select
from restoring import save_state
from safetensors import safe_open
from safetensors.torch import load_file
from small_store import SmallStore, pattern
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
            torch.uint16, torch.uint32, torch.uint64]  # fmt: skip


def exported(*arguments: str | Path, code: int = 0) -> Result:
    result = run("export", *arguments)
    assert result.exit_code == code, result.output
    return result


def export(store: Path, target: Path, *more: str, code: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        exported(store, "main", target, "--json", *more, code=code).stdout
    )
    return document


def bits(tensor: torch.Tensor) -> bytes:
    """dtype, shape and element bits, in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""
    return f"{dense.dtype} {tuple(dense.shape)} ".encode() + raw


def of_each_dtype(count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for dtype in [*FLOATS, *FP8]:
        state[str(dtype)[6:]] = torch.randn(count).to(dtype)
    for dtype in INTEGERS:
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        state[str(dtype)[6:]] = raw.view(dtype)
    state["bool"] = torch.rand(count) > 0.5
    state["complex64"] = torch.randn(count, dtype=torch.complex64)
    return state


@pytest.fixture(params=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test as usual, and with limits so small that everything is done in pieces."""
    if request.param == "pieces":
        monkeypatch.setattr(tensor_bytes, "WINDOW", 8192)
        monkeypatch.setattr(tensor_bytes, "BLOCK", 100)
        monkeypatch.setattr(tensor_bytes, "SCRATCH", 100)


def strided() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    base = torch.randn(60, 70)
    complex_ = torch.randn(600, dtype=torch.complex64)
    return {
        "transposed": base.t(),
        "sliced": torch.randn(50, 40)[::2, 3::3],
        "permuted": torch.randn(6, 7, 8, 9).permute(2, 0, 3, 1),
        "channels_last": torch.randn(4, 8, 9, 9).to(memory_format=torch.channels_last),
        "expanded": torch.arange(300.0).expand(20, 300),
        "column": torch.randn(3000, 2)[:, :1],
        "conj": complex_.conj(),
        "conj_transposed": torch.randn(30, 40, dtype=torch.complex64).mH,
        "neg": torch.randn(600, dtype=torch.complex64).conj().imag,
        "half": torch.randn(70, 60).bfloat16().t(),
        "wide": torch.randn(70, 60).double().t(),
        "empty": torch.empty(0, 3),
        "empty_transposed": torch.empty(3, 0).t(),
        "scalar": torch.tensor(2.5),
        "one": torch.randn(1, 1, 1).permute(2, 1, 0),
    }


# safetensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 2000])
def test_every_dtype_reads_back_from_safetensors(tmp_path: Path, count: int) -> None:
    state = of_each_dtype(count)
    save_state(tmp_path / "store", {"model": state})
    document = export(tmp_path / "store", tmp_path / "out.safetensors", "--prefix", "model/")
    loaded = load_file(tmp_path / "out.safetensors")
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }
    assert document["tensors"] == len(state)
    assert document["bytes"] == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.usefixtures("pieces")
def test_strided_tensors_are_written_as_their_values(tmp_path: Path) -> None:
    state = strided()
    save_state(tmp_path / "store", {"x": state})
    export(tmp_path / "store", tmp_path / "out.safetensors", "--prefix", "x/")
    loaded = load_file(tmp_path / "out.safetensors")
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }


def test_tied_tensors_come_out_under_each_name(tmp_path: Path) -> None:
    weight = torch.randn(40, 50)
    save_state(tmp_path / "store", {"m": {"embed": weight, "head": weight, "row": weight[7]}})
    document = export(tmp_path / "store", tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert bits(loaded["m/embed"]) == bits(loaded["m/head"]) == bits(weight)
    assert bits(loaded["m/row"]) == bits(weight[7])
    assert document["tied"] == [["m/embed", "m/head", "m/row"]]


def test_the_file_says_where_it_is_from_and_others_read_it(tmp_path: Path) -> None:
    commit = save_state(tmp_path / "store", {"m": {"w": torch.ones(3)}}, step=7)
    export(tmp_path / "store", tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt", "deltackpt.run": "main", "deltackpt.step": "7",
            "deltackpt.root": commit.root.hex(),
        }  # fmt: skip
        assert (file.get_slice("m/w")[1:] == torch.ones(2)).all()


def test_what_is_left_out_is_listed(tmp_path: Path) -> None:
    array = np.arange(100_000)
    save_state(tmp_path / "store", {"w": torch.ones(3), "lr": 0.1, "a": np.ones(3), "big": array})
    document = export(tmp_path / "store", tmp_path / "out.safetensors")
    assert {entry["path"]: entry["reason"] for entry in document["left_out"]} == {
        "lr": "not a tensor",
        "a": "not a tensor",
        "big": "a NumPy array",
        "#rng": "internal to the library",
    }
    assert set(load_file(tmp_path / "out.safetensors")) == {"w"}
    output = exported(tmp_path / "store", "main", tmp_path / "b.safetensors").output
    assert "  left out:\n" in output
    assert "    lr: not a tensor\n" in output


@pytest.mark.usefixtures("pieces")
def test_two_four_bit_floats_in_a_byte_are_what_the_format_calls_f4(tmp_path: Path) -> None:
    pairs = torch.arange(4 * 6 * 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    state = {
        "dense": pairs.reshape(4, 18),
        "turned": pairs.reshape(6, 12).t(),
        "column": pairs.reshape(72, 1).clone(),
        "empty": pairs[:0],
        "one": torch.tensor(7, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "w": torch.ones(3),
    }
    save_state(tmp_path / "store", state)
    document = export(tmp_path / "store", tmp_path / "out.safetensors", code=3)
    refused, = document["refused"]  # fmt: skip
    assert refused["path"] == "one"
    assert "without a dimension" in refused["reason"]
    loaded = load_file(tmp_path / "out.safetensors")
    assert set(loaded) == state.keys() - {"one"}
    for name, tensor in loaded.items():
        saved = state[name].view(torch.uint8)
        assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)
        assert torch.equal(tensor.view(torch.uint8), saved)
    whole = tmp_path / "out.pt"
    export(tmp_path / "store", whole)
    for name, tensor in torch.load(whole).items():
        assert torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8))


def test_a_dtype_the_format_lacks_is_reported_not_dropped_in_silence(tmp_path: Path) -> None:
    state = {"z": torch.randn(4, dtype=torch.complex128), "w": torch.ones(3)}
    save_state(tmp_path / "store", state)
    document = export(tmp_path / "store", tmp_path / "out.safetensors", code=3)
    assert document["refused"] == [{"path": "z", "reason": "the format has no dtype complex128"}]
    assert set(load_file(tmp_path / "out.safetensors")) == {"w"}
    assert (
        "not exported:"
        in exported(tmp_path / "store", "main", tmp_path / "b.safetensors", code=3).output
    )


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    """Two tensors under one name: one of them would be lost without a word."""
    save_state(tmp_path / "store", {"m": {1: torch.ones(3), "1": torch.zeros(3)}})
    result = exported(tmp_path / "store", "main", tmp_path / "out.safetensors", code=2)
    assert "would both be called 'm/1'" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["store"]
    export(tmp_path / "store", tmp_path / "out.safetensors", "--only", "m/1")
    assert bits(load_file(tmp_path / "out.safetensors")["m/1"]) == bits(torch.ones(3))


def test_escaped_keys_come_out_as_they_were(tmp_path: Path) -> None:
    keys = ["a/b", "~", "~1", "0", "plain.weight"]
    save_state(tmp_path / "store", {"m": {key: torch.ones(3) for key in keys}})
    export(tmp_path / "store", tmp_path / "out.safetensors", "--prefix", "m/")
    assert sorted(load_file(tmp_path / "out.safetensors")) == sorted(keys)


# torch.load -------------------------------------------------------------------------------------


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_training_state_loads_with_weights_only(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    save_state(tmp_path / "store", state)
    document = export(tmp_path / "store", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert document["weights_only"] is True
    assert list(loaded) == ["model", "optimizer", "epoch"]
    other = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))
    other.load_state_dict(loaded["model"])
    for (name, ours), (_, theirs) in zip(
        model.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert bits(ours) == bits(theirs), name
    assert loaded["model"]._metadata == model.state_dict()._metadata
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(loaded["optimizer"])
    assert loaded["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    mapped = torch.load(tmp_path / "out.pt", mmap=True, weights_only=True)
    assert bits(mapped["model"]["0.weight"]) == bits(model[0].weight)


def test_prefix_gives_the_part_itself(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    save_state(tmp_path / "store", {"model": model, "optimizer": optimizer})
    export(tmp_path / "store", tmp_path / "model.pt", "--prefix", "model/")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(loaded) == list(model.state_dict())
    assert isinstance(loaded["0.weight"], nn.Parameter)
    assert loaded["0.weight"].requires_grad
    assert not loaded["0.bias"].requires_grad
    export(tmp_path / "store", tmp_path / "first.pt", "--prefix", "model/", "--only", "*/0.*")
    assert list(torch.load(tmp_path / "first.pt")) == ["0.weight", "0.bias"]


NESTED = {
    "model": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))),
    "model2": nn.Linear(1, 1),
    "list": [{"a": torch.ones(1)}, {"a": torch.zeros(1)}],
    "scaler": torch.amp.GradScaler("cpu", enabled=False),  # its state is an empty dict
    "both": {"x/y": 1, "x.y": 2, "x": {"y": torch.ones(1)}},
}


@pytest.mark.parametrize(
    ("prefix", "names"),
    [("model/", ["0.bias", "0.weight", "1.0.bias", "1.0.weight"]),
     ("model", ["0.bias", "0.weight", "1.0.bias", "1.0.weight"]),
     ("model/1.", ["0.bias", "0.weight"]), ("model/1", ["0.bias", "0.weight"]),
     ("model/1.0", ["bias", "weight"]), ("list/1", ["a"]), ("both/x/", ["y"])],
)  # fmt: skip
def test_a_prefix_ends_where_a_part_does_and_is_taken_off(
    tmp_path: Path, prefix: str, names: list[str]
) -> None:
    """Names began with a slash, those of model2 came along, a torch file kept the beginning, an
    item of a list came with its neighbours, and empty parts made the state "malformed"."""
    save_state(tmp_path / "store", NESTED)
    export(tmp_path / "store", tmp_path / "out.pt", "--prefix", prefix)
    assert sorted(torch.load(tmp_path / "out.pt")) == names
    export(tmp_path / "store", tmp_path / "out.safetensors", "--prefix", prefix)
    assert sorted(load_file(tmp_path / "out.safetensors")) == names


@pytest.mark.parametrize(
    ("prefix", "told"),
    [("mod", "nothing in this step lies below 'mod'"), ("model/0.weight", "which is one leaf"),
     ("both/x", "may mean 'both/x/' or 'both/x.'")],
)  # fmt: skip
def test_a_prefix_that_ends_elsewhere_is_refused(tmp_path: Path, prefix: str, told: str) -> None:
    save_state(tmp_path / "store", NESTED)
    for name in ("out.pt", "out.safetensors"):
        result = exported(tmp_path / "store", "main", tmp_path / name, "--prefix", prefix, code=2)
        assert told in result.stderr
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Four terabytes of one repeated number filled the disk, and were then refused."""
    save_state(tmp_path / "store", {"x": torch.ones(1).expand(1 << 40), "y": torch.ones(1 << 20)})
    fields = [*os.statvfs(tmp_path)]
    fields[2:5] = [1000, 500, 500]
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(fields))
    only = "y" if name.endswith("pt") else "x"
    result = exported(
        tmp_path / "store", "main", tmp_path / name, "--only", only, "--json", code=14
    )
    error = json.loads(result.stdout)["error"]
    assert "are free" in error["message"]
    assert error["context"]["errno"] == 28
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    save_state(tmp_path / "store", {"x": torch.ones(1)})
    target = tmp_path / "out.pt"
    target.write_bytes(b"old")
    target.chmod(0o640)
    export(tmp_path / "store", target, "--force")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert torch.load(target)["x"].tolist() == [1.0]


@pytest.mark.usefixtures("pieces")
def test_every_dtype_and_stride_reads_back_from_torch_load(tmp_path: Path) -> None:
    state = {**of_each_dtype(2000), **strided(), "z": torch.randn(90, dtype=torch.complex128)}
    save_state(tmp_path / "store", {"x": state})
    export(tmp_path / "store", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)["x"]
    for name, tensor in state.items():
        assert bits(loaded[name]) == bits(tensor), name
        assert loaded[name].is_conj() == tensor.is_conj(), name
        assert loaded[name].is_neg() == tensor.is_neg(), name
    assert loaded["transposed"].stride() == state["transposed"].stride()


def test_tensors_that_shared_memory_share_it_again(tmp_path: Path) -> None:
    # case 3
    flat = torch.randn(5000)
    state = {
        "flat": flat, "part": flat[1000:2000].view(10, 100), "same": flat,
        "raw": flat.view(torch.uint8)[4:44], "odd": flat.view(torch.uint8)[5:45],
    }  # fmt: skip
    save_state(tmp_path / "store", state)
    document = export(tmp_path / "store", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name: bits(t) for name, t in loaded.items()} == {n: bits(t) for n, t in state.items()}
    loaded["flat"].zero_()
    assert all(not loaded[name].any() for name in state)
    assert document["tied"] == [["flat", "odd", "part", "raw", "same"]]
    export(tmp_path / "store", tmp_path / "part.pt", "--only", "part")
    assert bits(torch.load(tmp_path / "part.pt")["part"]) == bits(state["part"])
    assert (tmp_path / "part.pt").stat().st_size < 8000


def test_plain_values_keep_type_and_structure(tmp_path: Path) -> None:
    values = {
        1: "int key", "1": "str key", "none": None, "true": True, "big": 2**200, "neg": -(2**40),
        "float": 0.1, "nested": [1, (2, {"a": [3.5, b"bytes\x00\xff"]}), []], "empty": {},
        "set": {1, 2}, "complex": 1 + 2j, "bytearray": bytearray(b"xy"), "text": "\u00e9\u4e2d",
        "od": collections.OrderedDict(b=1, a=2), "counter": collections.Counter("aab"),
        "dtype": torch.bfloat16, "device": torch.device("cuda:1"), "size": torch.Size([2, 3]),
        "layout": torch.sparse_coo, "empty_tuple": (), "long_tuple": tuple(range(700)),
    }  # fmt: skip
    save_state(tmp_path / "store", {"v": values, "w": torch.ones(2)})
    document = export(tmp_path / "store", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)["v"]
    assert loaded == values
    assert list(loaded) == list(values)
    assert {key: type(value) for key, value in loaded.items()} == {
        key: type(value) for key, value in values.items()
    }
    assert document["needs_trust"] == []


def test_values_beyond_weights_only_are_kept_and_named(tmp_path: Path) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2), "X")
    values = {
        "array": np.arange(6, dtype=">i2").reshape(2, 3), "big": np.random.rand(20_000),
        "structured": np.zeros(3, [("a", "<f4"), ("b", "<i8", (2,))]), "scalar": np.float32(1.5),
        "npdtype": np.dtype("<u2"), "frozen": frozenset({1}), "path": pathlib.PurePosixPath("/a"),
        "deque": collections.deque([1, 2], 5), "dd": collections.defaultdict(list, a=[1]),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, zone), "day": datetime.date(2026, 1, 2),
        "there": datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("UTC")),
        "time": datetime.time(1, 2), "delta": datetime.timedelta(3, 4, 5),
        "format": torch.channels_last,
    }  # fmt: skip
    save_state(tmp_path / "store", {"v": values, "w": torch.ones(2)})
    document = export(tmp_path / "store", tmp_path / "out.pt")
    assert document["weights_only"] is False
    assert {"numpy.ndarray", "builtins.frozenset"} <= set(document["needs_trust"])
    with pytest.raises(Exception, match="weights_only"):
        torch.load(tmp_path / "out.pt", weights_only=True)
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)["v"]
    assert list(loaded) == list(values)
    for key, value in values.items():
        assert type(loaded[key]) is type(value), key
        if isinstance(value, np.ndarray):
            assert loaded[key].dtype == value.dtype
            assert loaded[key].tobytes() == value.tobytes()
        else:
            assert loaded[key] == value, key
    assert loaded["dd"].default_factory is list
    assert loaded["there"].fold == 1
    assert loaded["deque"].maxlen == 5
    assert "weights_only=False" in exported(tmp_path / "store", "main", tmp_path / "b.pt").output


def test_sparse_tensors_read_back(tmp_path: Path) -> None:
    dense = torch.eye(6) * torch.arange(6.0)
    state = {
        "coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)), "parameter": nn.Parameter(dense.to_sparse()),
    }  # fmt: skip
    save_state(tmp_path / "store", state)
    export(tmp_path / "store", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in state.items():
        assert loaded[name].layout == tensor.layout
        assert bits(loaded[name].detach().to_dense()) == bits(dense), name
    assert loaded["coo"].is_coalesced() == state["coo"].is_coalesced()
    assert isinstance(loaded["parameter"], nn.Parameter)


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: Any


def test_a_store_cannot_choose_what_the_exported_file_calls(tmp_path: Path) -> None:
    """A pickle is a program: a crafted store must not get its own callables into one."""
    state = {
        "nt": Point(1, 2), "outer": Point(3, torch.ones(2)), "colour": Colour.RED,
        "f": frozenset({1}), "d": datetime.date(2026, 1, 1), "w": nn.Parameter(torch.ones(2)),
        "coo": torch.eye(2).to_sparse(),
    }  # fmt: skip
    save_state(tmp_path / "store", state)
    document = export(tmp_path / "store", tmp_path / "out.pt", code=3)
    assert {entry["path"] for entry in document["changed"]} == {"nt", "outer", "colour"}
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)
    assert loaded["nt"] == (1, 2)
    assert type(loaded["nt"]) is tuple
    assert type(loaded["outer"]) is tuple
    assert loaded["colour"] == "RED"
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        pickled = archive.read("archive/data.pkl")
    named = {arg for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"}
    assert named == {
        "builtins frozenset", "datetime date", "torch.nn.parameter Parameter",
        "_codecs encode", "collections OrderedDict", "torch FloatStorage", "torch LongStorage",
        "torch Size", "torch._utils _rebuild_parameter", "torch._utils _rebuild_sparse_tensor",
        "torch._utils _rebuild_tensor_v2", "torch.serialization _get_layout",
    } - {"torch.nn.parameter Parameter"}  # fmt: skip


def test_python_verifies_the_archive(tmp_path: Path) -> None:
    save_state(tmp_path / "store", {"w": torch.randn(5000), "b": torch.ones(3).bfloat16()})
    export(tmp_path / "store", tmp_path / "out.pt")
    export(tmp_path / "store", tmp_path / "again.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
        for entry in archive.infolist():
            assert entry.compress_type == zipfile.ZIP_STORED
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "again.pt").read_bytes()


# files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_an_existing_file_is_kept_unless_forced(tmp_path: Path, name: str) -> None:
    """An export over the wrong file would destroy it."""
    save_state(tmp_path / "store", {"w": torch.ones(3)})
    target = tmp_path / name
    target.write_text("precious")
    assert "--force" in exported(tmp_path / "store", "main", target, code=2).stderr
    assert target.read_text() == "precious"
    exported(tmp_path / "store", "main", target, "--force")
    assert target.stat().st_size > 100
    assert sorted(os.listdir(tmp_path)) == sorted([name, "store"])


def test_a_link_beside_a_report_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: who may write to /tmp has a file of the user's overwritten."""
    save_state(tmp_path / "store", {"w": torch.ones(3)})
    opened: list[str] = []
    monkeypatch.setattr(secrets, "token_hex", lambda size: opened.append("guessed") or "ab" * size)
    (tmp_path / "victim").write_text("precious")
    for guess in (f"r.html.{os.getpid()}.part", f".deltackpt.tmp-{'ab' * 6}"):
        (tmp_path / guess).symlink_to("victim")
    run("report", tmp_path / "store", "-o", tmp_path / "r.html")
    assert (tmp_path / "victim").read_text() == "precious"
    assert opened


@pytest.mark.parametrize(
    "place", ["store/FORMAT", "store/new", "link/FORMAT", "store/packs/new", "to"]
)
def test_no_output_is_written_into_a_store(tmp_path: Path, place: str) -> None:
    """Prevents: a command that only reads replaces a file of the store: report -o STORE/FORMAT."""
    store, target = tmp_path / "store", str(tmp_path / place)
    save_state(store, {"w": torch.ones(3)})
    os.rename(store / "packs", tmp_path / "packs")
    (store / "packs").symlink_to(tmp_path / "packs")
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "to").symlink_to("store/FORMAT")
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    said = [exported(store, "main", target, "--format", "torch", "--force", code=2).stderr]
    for more in (["-o", target], ["-o", str(tmp_path / "r.html"), "--png", target]):
        result = run("report", store, *more)
        assert result.exit_code == 2
        said.append(result.stderr)
    assert {text.splitlines()[0] for text in said} == {
        f"deltackpt: {target} lies in the store {store}"
    }
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_damage_met_half_way_leaves_no_file(tmp_path: Path, name: str) -> None:
    """Half a file under the final name would be loaded by somebody."""
    save_state(tmp_path / "store", {"a": torch.randn(5000), "b": torch.randn(5000)})
    (pack,) = (tmp_path / "store").glob("packs/*/*")
    data = bytearray(pack.read_bytes())
    data[30_000] ^= 1
    pack.write_bytes(data)
    target = tmp_path / name
    told = exported(tmp_path / "store", "main", target, code=12).stderr
    assert "damaged in 'b': " in told  # case 112
    assert "'a'" not in told
    assert sorted(os.listdir(tmp_path)) == ["store"]
    target.write_text("precious")
    exported(tmp_path / "store", "main", target, "--force", code=12)
    assert target.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == sorted([name, "store"])


def test_a_tensor_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "store", {"w": torch.ones(1).expand(1 << 31, 1 << 31)})
    result = exported(tmp_path / "store", "main", tmp_path / "out.safetensors", code=2)
    assert "'w' repeats its elements" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["store"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    target = tmp_path / ("\u5b57" * 85)  # of three bytes each
    with publish.published(str(target), force=False) as file:
        file.write(b"x")
    assert target.read_bytes() == b"x"


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def race() -> None:
        with publish.published(str(target), force=False) as file:
            file.write(b"ours")
            target.write_bytes(b"theirs")

    with pytest.raises(publish.InvalidInputError, match="exists already"):
        race()
    assert target.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_file_systems_without_hard_links_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with publish.published(str(tmp_path / "out"), force=False) as file:
        file.write(b"x")
    assert os.listdir(tmp_path) == ["out"]


def test_a_name_that_cannot_be_made_durable_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an error of the disk that names no file, after all bytes have been written."""
    real = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(5, "Input/output error")
        real(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    target = tmp_path / "out"
    with (
        pytest.raises(StorageError, match=r"cannot write .*out: Input/output error"),
        publish.published(str(target), force=False) as file,
    ):
        file.write(b"x")
    assert target.read_bytes() == b"x"


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), publish.published(str(tmp_path / "out"), force=False):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_a_terminated_export_leaves_nothing(tmp_path: Path) -> None:
    """A job that is cancelled would leave a hidden file of many GB behind, each time."""
    script = (
        "import os, signal, sys\n"
        "from deltackpt_tools.publish import published\n"
        "with published(sys.argv[1], force=False) as file:\n"
        "    file.write(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    file.write(b'more')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert done.returncode == 143
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_memory_does_not_grow_with_the_state(tmp_path: Path, name: str) -> None:
    """A step larger than memory must be exportable on a small machine."""
    script = (
        "import sys\n"
        "from deltackpt_tools.cli import cli\n"
        "cli.main(standalone_mode=False)\n"
        "status = open('/proc/self/status').read()\n"
        "print(status.partition('VmHWM:')[2].split()[0], file=sys.stderr)\n"
    )
    peaks: list[int] = []
    for count in (1 << 10, 40 << 20):  # float32: 4 KiB and 160 MiB
        small = SmallStore(tmp_path / f"store{count}")
        small.save("main", 1, {"w": pattern(count)})
        small.close()
        arguments = ["export", str(tmp_path / f"store{count}"), "main", str(tmp_path / name)]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments, "--force"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(done.stderr.split()[-1]) << 10)
    assert (tmp_path / name).stat().st_size > 160 << 20
    assert peaks[1] - peaks[0] < 80 << 20


@pytest.mark.parametrize(
    "structure",
    [7, -1, "text", None, [], ["d"], ["d", 5], ["d", [["k"]]], ["x", []], [["d"]],
     ["coo", [2], True, 0], ["np", 0], ["nt", "os", "system", []], ["dd", "eval", []],
     ["d", [[["nt", "os", "system", ["a"], ["b"]], 0], [["x"], 0]]], {"d": 1}, [0, 1]],
)  # fmt: skip
def test_a_crafted_structure_is_refused(tmp_path: Path, structure: Any) -> None:
    small = SmallStore(tmp_path / "store")
    commit = small.save("main", 1, {"w": pattern(4)}, {"v": 1})
    snapshot = small.store.snapshot(commit)
    small.close()
    crafted = msgspec.structs.replace(snapshot.layout, structure=msgspec.msgpack.encode(structure))
    snapshot.layout = crafted
    chosen = select(snapshot, "", ())
    source = tensor_bytes.TensorBytes(snapshot, small.store.reader(), str(tmp_path))
    for export_as in (export_torch, partial(export_safetensors, commit=commit)):
        with open(tmp_path / "out", "w+b") as file:
            try:
                export_as(file, snapshot=snapshot, selection=chosen, source=source)
            except CorruptionError:
                continue
        assert export_as is not export_torch or not os.path.getsize(tmp_path / "out")
