"""docs/format.md is enough to read a store: a reader written from it agrees with the product."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captured import bits
from coded import Blob, encode, replayed_blobs, rounded_blobs, write_pack
from deltackpt_store import codecs
from deltackpt_store.coding import streams
from deltackpt_store.merkle import root
from deltackpt_store.store import Store
from restoring import Keeper
from saving import Training
from small_store import SmallStore
from torch import nn

from deltackpt import Checkpointer

TOOL = Path(__file__).parents[2] / "tools" / "read_store.py"
_spec = importlib.util.spec_from_file_location("read_store", TOOL)
assert _spec is not None
assert _spec.loader is not None
read_store: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(read_store)

CHUNK = 4096


def leaves(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Path -> tensor of a state of dicts, lists and modules with plain keys."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    pairs: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    out: dict[str, torch.Tensor] = {}
    for key, item in pairs:
        out |= leaves(item, f"{path}/{key}" if path else str(key))
    return out


def stored(tensor: torch.Tensor) -> bytes:
    """The elements as they lie in memory, in C order: without conj and neg."""
    plain = tensor.detach()
    if plain.is_conj():
        plain = torch.conj(plain)
    if plain.is_neg():
        plain = torch._neg_view(plain)
    return bits(plain)


def agree(path: Path, state: Any, run: str = "main", step: int | None = None) -> Any:
    """Every tensor of `state` is what the independent reader finds, and nothing is missing."""
    reader = read_store.Step(str(path), run, step)
    expected = leaves(state)
    found = {reader.layout["paths"][slot] for slot in reader.views}
    assert {name for name in found if not name.startswith("#")} == set(expected)
    for name, tensor in expected.items():
        view = reader.views[reader.layout["paths"].index(name)]
        assert view[2] == str(tensor.dtype).removeprefix("torch.")
        assert view[3] == list(tensor.shape)
        assert reader.tensor(name) == stored(tensor), name
    return reader


def dtypes() -> dict[str, torch.Tensor]:
    noise = torch.randn(40, 70)
    out = {
        str(dtype): noise.to(dtype)
        for dtype in (
            torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
            torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
            torch.complex128,
        )
    }  # fmt: skip
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool):
        out[str(dtype)] = (noise.abs() * 2).to(torch.int64).to(dtype)
    out["scale"] = torch.arange(700, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return out


def test_dtypes_and_layouts(tmp_path: Path) -> None:
    """A dtype or stride that the document describes wrongly would be scrambled by strangers."""
    torch.manual_seed(0)
    big = torch.randn(64, 96)
    tied = torch.randn(50, 50)
    state: Any = {
        "dtypes": dtypes(),
        "scalars": {"step": torch.tensor(7), "half": torch.tensor(0.5, dtype=torch.bfloat16)},
        "empty": [torch.zeros(0), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(2, 0)],
        "transposed": big.t(),
        "strided": torch.randn(64, 99)[:, ::3],
        "channels_last": torch.randn(4, 6, 9, 9).contiguous(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 800).expand(30, 800),
        "views": [big[:10], big[5:20], big],
        "tied": {"a": tied, "b": tied, "c": nn.Parameter(tied)},
        "conj": torch.conj(torch.randn(40, 40, dtype=torch.complex64)),
        "neg": torch.randn(40, 40, dtype=torch.complex64).conj().imag,
    }
    Keeper(tmp_path / "store", chunk=CHUNK).save(state, 3)
    reader = agree(tmp_path / "store", state)
    slots = {path: slot for slot, path in enumerate(reader.layout["paths"])}
    extents = [reader.views[slots[f"tied/{name}"]][1] for name in "abc"]
    assert len(set(extents)) == 1


def test_runs_of_a_checkpointer(tmp_path: Path) -> None:
    """Delta manifests, patches, dedup and whatever the writer chose to encode, at every step."""
    path, training = tmp_path / "store", Training(64)
    extra = {"frozen": torch.randn(300, 300), "rows": torch.zeros(4000, 16)}
    states: dict[int, Any] = {}
    with Checkpointer(path, {**training.objects, **extra}, writer="thread", chunk_bytes=CHUNK,
                      final=False) as ckpt:  # fmt: skip
        for step in range(1, 7):
            training.step()
            extra["rows"][step * 37] += 1
            ckpt.save(step).result(60)
            states[step] = {**training.copy(), "frozen": extra["frozen"].clone(),
                            "rows": extra["rows"].clone()}  # fmt: skip
    kinds = {Store.open(path).find("main", step).base is None for step in states}
    assert kinds == {True, False}
    for step, state in states.items():
        agree(path, state, step=step)


def test_objects_and_structure(tmp_path: Path) -> None:
    """The root covers every value document and the tree, so a wrong description fails here."""
    state = {
        "lr": 1e-3, "big": 1 << 80, "text": "ä/~", 0: "int", "0": "str", None: -1, "nan": np.nan,
        "nested": OrderedDict(a=[1, (2, {3}), {"deep": torch.ones(3)}], b=b"\0"),
        "array": np.arange(9, dtype=">f4").reshape(3, 3), "large": np.arange(20_000),
        "sparse": torch.eye(30).to_sparse(),
    }  # fmt: skip
    keeper = Keeper(tmp_path / "store")
    commit = keeper.save(state, 1)
    reader = read_store.Step(str(tmp_path / "store"), "main")
    snapshot = keeper.store.snapshot(commit)
    assert reader.root() == commit.root == root(snapshot)
    assert reader.objects == snapshot.objects
    assert tuple(reader.layout["paths"]) == snapshot.layout.paths
    assert reader.tensor("large") == np.arange(20_000).tobytes()
    listed = read_store.unpack(read_store.BytesIO(reader.layout["structure"]))
    assert listed[0] == "d"


def skewed(rng: np.random.Generator, size: int, values: int) -> bytes:
    """Random bytes of which nearly all are one of a few values."""
    data = rng.integers(100, 100 + values, size, np.uint8)
    data[::37] = rng.integers(0, 256, len(data[::37]), np.uint8)
    return data.tobytes()


def coded_blobs() -> list[Blob]:
    """Every codec, element width and stream method, odd lengths, references of other lengths."""
    rng = np.random.default_rng(1)
    blobs: list[Blob] = []
    for width in (1, 2, 4, 8):
        for size in (3000, 2997):
            for entropy in ("lz4", "zstd"):
                values = rng.normal(0, 3, 3100).astype(f"<i{width}")
                first, longer = values.tobytes()[:size], values.tobytes()[: size + 17]
                shorter, near, few = first[: size // 2], bytearray(first), bytearray(first)
                near[::211] = rng.bytes(len(near[::211]))
                few[width * 9 : width * 10] = rng.bytes(width)
                few[-1] ^= 255
                blobs += [Blob(codecs.RAW, data) for data in (first, longer, shorter)]
                blobs += [
                    Blob(codecs.PLANES, bytes(near), width, entropy),
                    Blob(codecs.PLANES, rng.bytes(1) * size, width, entropy),
                    Blob(codecs.PLANES, (rng.bytes(90) * 99)[:size], 1, entropy),
                    Blob(codecs.PLANES, skewed(rng, size, 3), 1, entropy),
                    Blob(codecs.PLANES, skewed(rng, size, 15), 1, entropy),
                    Blob(codecs.SPARSE, bytes(few), width, entropy, first),
                    Blob(codecs.DELTA, bytes(few[::-1]), width, entropy, bytes(few)),
                ]
                for reference in (shorter, longer):
                    near[1] ^= 1
                    blobs.append(Blob(codecs.DELTA, bytes(near), width, entropy, reference))
                    near[2] ^= 1
                    if width > 1:
                        near[3] ^= 1
                        blobs.append(Blob(codecs.SORTED, bytes(near), width, entropy, reference))
                    if reference is longer:
                        blobs.append(Blob(codecs.SPARSE, bytes(near), width, entropy, reference))
    return [*blobs, *rounded_blobs(600), *replayed_blobs(301, 3)]


def test_every_codec(tmp_path: Path) -> None:
    """A codec that the document describes wrongly loses everything that is stored with it."""
    small = SmallStore(tmp_path / "store")
    blobs = coded_blobs()
    assert {blob.codec for blob in blobs} == {codec.id for codec in codecs.registered()}
    methods = {encode(b).params[1] for b in blobs if b.codec == codecs.PLANES}
    assert methods == {streams.RAW, streams.CONSTANT, streams.LZ4, streams.ZSTD, *streams.PER_BYTE}
    write_pack(small.store, blobs, "ab" * 8)
    small.writer.close()
    commit_with_index(small, {f"t{i}": blob.raw for i, blob in enumerate(blobs)})
    reader = read_store.Step(str(tmp_path / "store"), "main")
    for i, blob in enumerate(blobs):
        assert reader.tensor(f"t{i}") == blob.raw, (blob.codec, blob.width, blob.entropy)


def commit_with_index(small: SmallStore, raw: dict[str, bytes]) -> None:
    """Commit the tensors; their chunks are those that lie in the store already."""
    again = SmallStore(Path(small.path))
    tensors = {name: np.frombuffer(data, np.uint8) for name, data in raw.items()}
    again.save("main", 1, tensors)
    again.close()
    assert len(list(Path(small.path).glob("packs/*/*.pack"))) == 1


def test_damage_is_noticed(tmp_path: Path) -> None:
    """The reader of the document checks what the document says must be checked."""
    keeper = Keeper(tmp_path / "store", codec="none")
    keeper.save({"w": torch.randn(4000)}, 1)
    (pack,) = (tmp_path / "store").glob("packs/*/*.pack")
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    reader = read_store.Step(str(tmp_path / "store"), "main")
    with pytest.raises(ValueError, match="damaged"):
        reader.tensor("w")


def test_command_line_without_the_product(tmp_path: Path) -> None:
    """Independent means independent: nothing of the product is imported, and it is short."""
    weights = torch.randn(600)
    Keeper(tmp_path / "store").save({"w": weights, "lr": 0.5}, 4)
    Keeper(tmp_path / "store").save({"w": weights + 1, "lr": 0.25}, 5)
    guard = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], None, '__main__');"
        "assert not [m for m in sys.modules if m.startswith(('deltackpt', 'torch', 'msgspec'))]"
    )
    command = [sys.executable, "-c", guard, str(TOOL), str(tmp_path / "store")]
    listed = subprocess.run([*command, "main@5"], capture_output=True, check=True, text=True)
    assert "w\tfloat32\t[600]\nlr\t0.25\n" in listed.stdout
    data = subprocess.run([*command, "main@4", "w"], capture_output=True, check=True)
    assert data.stdout == weights.numpy().tobytes()
    newest = subprocess.run([*command, "main", "w"], capture_output=True, check=True)
    assert newest.stdout == (weights + 1).numpy().tobytes()
    for tool in (TOOL, TOOL.with_name("read_codecs.py")):
        assert len(tool.read_text().splitlines()) < 200
