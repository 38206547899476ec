"""Stores of every released format stay readable for ever, and newer ones are refused, not damaged.

What the golden store must hold was written down from live objects when it was made; nothing here
takes an expected value from the code under test.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from deltackpt_store import Commit, Store, codecs
from deltackpt_store.errors import (
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.format_file import decode_format, encode_format
from deltackpt_store.gc import collect
from deltackpt_store.manifest_io import decode, decode_commit
from deltackpt_store.pack import read_footer
from deltackpt_store.retention import retire
from deltackpt_store.values_decode import DECODERS
from deltackpt_store.verify import verify
from golden_state import Describer, Training

import deltackpt
from deltackpt import Checkpointer, restore_into

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
TOOL = Path(__file__).parents[2] / "tools" / "read_store.py"
WRITING = ("create", "write", "sync", "link", "unlink", "sync_directory", "mkdir", "rmdir", "chmod")

_spec = importlib.util.spec_from_file_location("read_store_of_golden", TOOL)
assert _spec is not None
assert _spec.loader is not None
read_store: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(read_store)


class Golden:
    """One golden store and what it must hold. `path` is never written to."""

    def __init__(self, version: str) -> None:
        self.path = GOLDEN / version / "store"
        self.expected = json.loads((GOLDEN / version / "expected.json").read_text())
        self.values = (GOLDEN / version / "values.bin").read_bytes()

    def step(self, run: str, step: int) -> dict[str, Any]:
        return next(s for s in self.expected["steps"] if (s["run"], s["step"]) == (run, step))

    def check(self, state: Any, expected: dict[str, Any]) -> None:
        """`state` is bit for bit what was saved."""
        describer = Describer(self.values)
        assert json.loads(json.dumps(describer.state(state))) == expected["state"]
        assert bytes(describer.values) == self.values  # nothing that is not there already

    def bytes_of(self, ranges: list[list[int]]) -> bytes:
        return b"".join(self.values[at : at + n] * times for at, n, times in ranges)


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the newest golden store, to be changed; without empty folders, as git copies it."""
    path = Path(shutil.copytree(GOLDEN / VERSIONS[-1] / "store", tmp_path / "store"))
    for folder in path.iterdir():
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return path


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError(f"reading wrote something: {arguments[1:]}")

    for name in WRITING:
        monkeypatch.setattr(FileIO, name, refuse)


def listing(path: Path) -> list[tuple[str, int, int]]:
    found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sorted((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in found)


# reading ----------------------------------------------------------------------------------------


def test_every_step_loads_bit_for_bit(golden: Golden, read_only: None) -> None:
    # case 164
    before = listing(golden.path)
    for expected in golden.expected["steps"]:
        run, step = expected["run"], expected["step"]
        golden.check(deltackpt.load(golden.path, run, step), expected)
        commit = Store.open(golden.path).read_commit(run, expected["number"])
        assert commit.root.hex() == expected["root"]
        metrics = {name: value.hex() for name, value in commit.metrics.items()}
        assert metrics == expected["metrics"]
    assert listing(golden.path) == before


def test_history_names_and_pins(golden: Golden, read_only: None) -> None:
    # case 164
    store = Store.open(golden.path)
    assert store.runs() == sorted(golden.expected["lineages"])
    for run, steps in golden.expected["lineages"].items():
        assert store.steps(run) == steps
        assert store.head(run).step == steps[-1]
    for run, steps in golden.expected["abandoned"].items():
        assert [store.find(run, step).step for step in steps] == steps
    for run, steps in golden.expected["retired"].items():
        for step in steps:
            with pytest.raises(NotFoundError):
                store.find(run, step)
    pins = {name: [pin.run, pin.step] for name, pin in store.pins().items()}
    assert pins == golden.expected["pins"]
    for name, parent in golden.expected["parents"].items():
        commit = store.resolve_name(name)
        assert commit.parent is not None
        run, number, digest = commit.parent
        named = store.resolve_name(parent)
        assert (named.run, named.number, named.digest) == (run, number, digest)


def test_live_objects_get_it_back(golden: Golden) -> None:
    # case 164
    for run, step in (("main", 3), ("main", 9), ("fork-1", 3)):
        training = Training()
        for number in (31, 32):
            training.step(number)
        zeros = {"table": torch.zeros(7, 256), "buffer": torch.zeros(300)}
        state = {**training.objects, **zeros, "meta": {}}
        restored = restore_into(golden.path, state, run=run, step=step, rng=False)
        assert restored is not None
        golden.check(state, golden.step(run, step))
        assert restored.root == golden.step(run, step)["root"]


def test_random_generators_continue(golden: Golden) -> None:
    # case 164
    bools = [torch.zeros(5, dtype=torch.bool), torch.zeros(520, dtype=torch.bool)]
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        restored = restore_into(
            golden.path, {"dtypes": {"bool": bools}}, run="kinds", only=["dtypes/bool/*", "#rng"]
        )
        drawn = [random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64).item()]
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
    assert restored is not None
    assert restored.rng
    assert [float(value).hex() for value in drawn] == golden.step("kinds", 1)["random"]


def test_shard_fields(golden: Golden, read_only: None) -> None:
    # case 164
    shards = golden.expected["shards"]
    store = Store.open(golden.path)
    commit = store.head("shards")
    assert commit.root.hex() == shards["root"]
    snapshot = store.snapshot(commit)
    (view,) = snapshot.layout.tensors
    assert [list(view.global_shape or ()), list(view.shard_offsets or ())] == [
        shards["whole"], shards["offsets"],
    ]  # fmt: skip
    loaded = deltackpt.load(golden.path, "shards")["w"]
    assert loaded.numpy().tobytes() == golden.bytes_of(shards["w"])


def test_everything_verifies(golden: Golden, read_only: None) -> None:
    # case 164
    report = verify(Store.open(golden.path), level="restore")
    assert not report.findings


def test_without_lmdb(golden: Golden) -> None:
    """The index is a cache: where its package is missing or broken, reading goes on without it."""
    # case 164, case 116
    script = (
        "import sys; sys.modules['lmdb'] = None\n"
        "import deltackpt, torch\n"
        "from deltackpt_store.verify import verify\n"
        "from deltackpt_store.store import Store\n"
        "state = deltackpt.load(sys.argv[1], 'main', 3)\n"
        "assert not verify(Store.open(sys.argv[1]), level='restore').findings\n"
        "sys.stdout.buffer.write(state['table'].numpy().tobytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(golden.path)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    described = {key[1]: value for key, value in golden.step("main", 3)["state"][1]}
    assert done.stdout == golden.bytes_of(described["'table'"][-1])


def test_the_document_reads_it(golden: Golden) -> None:
    """The reader written from docs/format.md agrees, and so does the root, which covers it all."""
    # case 164
    for expected in golden.expected["steps"]:
        reader = read_store.Step(str(golden.path), expected["run"], expected["step"])
        assert reader.root().hex() == expected["root"]
    codec_run = golden.step("codecs", 1)
    reader = read_store.Step(str(golden.path), "codecs")
    for key, described in codec_run["state"][1]:
        assert reader.tensor(key[1].strip("'")) == golden.bytes_of(described[-1])


def test_it_covers_the_format() -> None:
    """A golden store that leaves a codec, a tag or a form out does not protect it."""
    store = Store.open(GOLDEN / "v1" / "store")
    used: set[int] = set()
    for name in store.packs.names():
        pack = store.path + f"/packs/{name[:2]}/{name}.pack"
        table = read_footer(store.io, pack).entries.table
        used |= set(table["codec"].tolist())
    assert used == {codec.id for codec in codecs.registered()}
    manifests = [decode(p.read_bytes()) for p in (GOLDEN / "v1/store/manifests").iterdir()]
    deltas = [manifest for manifest in manifests if manifest.base is not None]
    assert any(m.patches for m in deltas)
    assert any(m.objects and m.inline and m.chunks for m in deltas)
    nodes, values = set[str](), set[str]()
    for commit in itertools.chain.from_iterable(map(store.commits, store.runs())):
        snapshot = store.snapshot(commit)
        structure = msgspec.msgpack.decode(snapshot.layout.structure)
        walk(structure, nodes, values)
        for document in snapshot.objects.values():
            walk_value(msgspec.msgpack.decode(document), values)
    assert nodes == {
        "d", "od", "ctr", "dd", "l", "t", "dq", "nt", "coo", "csr", "csc", "bsr", "bsc", "np",
    }  # fmt: skip
    assert values == set(DECODERS)
    size = sum(path.stat().st_size for path in (GOLDEN / "v1").rglob("*") if path.is_file())
    assert size < 330_000


def walk(node: Any, nodes: set[str], values: set[str]) -> None:
    if isinstance(node, int):
        return
    nodes.add(node[0])
    if node[0] in ("d", "od", "ctr", "dd"):
        for key, item in node[2 if node[0] == "dd" else 1]:
            walk_value(key, values)
            walk(item, nodes, values)
        if node[0] == "od" and len(node) > 2:
            walk_value(node[2], values)
    elif node[0] in ("l", "t", "dq", "nt"):
        for item in node[-1]:
            walk(item, nodes, values)


def walk_value(node: Any, values: set[str]) -> None:
    if not isinstance(node, list):
        return
    values.add(node[0])
    if node[0] in ("l", "t", "set", "fset", "dq", "nt"):
        for item in node[-1]:
            walk_value(item, values)
    elif node[0] in ("d", "od", "ctr", "dd"):
        for item in itertools.chain.from_iterable(node[-1]):
            walk_value(item, values)


# versions ---------------------------------------------------------------------------------------


def change_format(store: Path, **fields: Any) -> None:
    line = (store / "FORMAT").read_bytes().splitlines()[0]
    line = json.dumps({**json.loads(line), **fields}).encode() + b"\n"
    (store / "FORMAT").write_bytes(line + blake3(line).hexdigest().encode() + b"\n")


def operations(path: Path) -> dict[str, list[Callable[[], object]]]:
    """What reads, writes and deletes, each in every way there is."""

    def open_checkpointer() -> None:
        with Checkpointer(path, {"w": torch.ones(3)}, writer="thread", run="new") as ckpt:
            ckpt.save(1).result(60)

    def pin() -> None:
        store = Store.open(path)
        store.pin("another", store.head("main"))

    return {
        "read": [
            lambda: Store.open(path),
            lambda: deltackpt.load(path, "main", 3),
            lambda: restore_into(path, {"table": torch.zeros(7, 256)}, only="table"),
        ],
        "write": [
            lambda: Store.create(path),
            open_checkpointer,
            pin,
            lambda: Store.open(path).unpin("best"),
            lambda: retire(Store.open(path), [Store.open(path).find("main", 2)]),
        ],
        "gc": [lambda: collect(Store.open(path))],
    }


@pytest.mark.parametrize(
    ("field", "refused"),
    [("read", ("read", "write", "gc")), ("write", ("write", "gc")), ("gc", ("gc",))],
)
def test_an_unknown_feature_refuses_what_needs_it(
    copied: Path, field: str, refused: tuple[str, ...]
) -> None:
    # case 164
    change_format(copied, **{field: ["holograms"]})
    before = listing(copied)
    for purpose, calls in operations(copied).items():
        for call in calls:
            if purpose in refused:
                with pytest.raises(UnsupportedFormatError, match="holograms") as caught:
                    call()
                assert caught.value.hint == "upgrade deltackpt"
                assert listing(copied) == before
    for purpose, calls in operations(copied).items():
        for call in calls:
            if purpose not in refused:
                call()


def test_a_newer_store_is_refused_whole(copied: Path) -> None:
    # case 164
    change_format(copied, deltackpt=2, unknown={"a": 1})
    before = listing(copied)
    for call in itertools.chain.from_iterable(operations(copied).values()):
        with pytest.raises(UnsupportedFormatError, match="format 2"):
            call()
    assert listing(copied) == before
    change_format(copied, deltackpt=1, digest="sha3-512")
    with pytest.raises(UnsupportedFormatError, match="sha3-512"):
        Store.open(copied)


def test_unknown_fields_of_format_are_ignored(copied: Path) -> None:
    # case 164
    change_format(copied, colour="blue", advice=["read", {"gc": 1}])
    assert Store.open(copied).steps("main") == Golden(VERSIONS[-1]).expected["lineages"]["main"]
    value = decode_format((copied / "FORMAT").read_bytes(), "FORMAT")
    assert decode_format(encode_format(value), "FORMAT") == value


FUTURE: dict[str, Any] = {"zz_future": [1, {"x": b"\0"}, None], "a_future": "text"}


def rewrite_commit(store: Path, commit: Commit, version: int = 1, **fields: Any) -> None:
    file = store / "runs" / commit.run / f"{commit.number:020d}"
    record = msgspec.msgpack.decode(file.read_bytes()[8:-32])
    body = b"DCKPTCM" + bytes([version]) + msgspec.msgpack.encode({**record, **fields})
    file.write_bytes(body + blake3(body).digest())


def write_manifest(store: Path, record: dict[str, Any], version: int = 1) -> bytes:
    data = b"DCKPTMF" + bytes([version]) + msgspec.msgpack.encode(record)
    digest = blake3(data).digest()
    (store / "manifests" / digest.hex()).write_bytes(data)
    return digest


def manifest_of(store: Path, digest: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode((store / "manifests" / digest.hex()).read_bytes()[8:])


def test_unknown_fields_of_manifests_commits_and_pins_are_ignored(copied: Path) -> None:
    """An optional field that a later release adds must not lock this one out."""
    # case 164
    golden = Golden(VERSIONS[-1])
    for run, step in (("kinds", 1), ("main", 3), ("fork-1", 3)):
        commit = Store.open(copied).find(run, step)
        manifest = {**manifest_of(copied, commit.manifest), **FUTURE}
        base = commit.base
        if base is not None:
            base = write_manifest(copied, {**manifest_of(copied, base), **FUTURE})
            manifest["base"] = base
        else:
            layout = manifest["layout"]
            layout |= {**FUTURE, "tensors": [[*view, "more", 7] for view in layout["tensors"]]}
            layout["extents"] = [[*extent, None] for extent in layout["extents"]]
        digest = write_manifest(copied, manifest)
        rewrite_commit(copied, commit, manifest=digest, base=base, **FUTURE)
        golden.check(deltackpt.load(copied, run, step), golden.step(run, step))
    pin = copied / "pins" / "best"
    record = msgspec.msgpack.decode(pin.read_bytes()[8:-32])
    body = b"DCKPTPN\x01" + msgspec.msgpack.encode({**record, **FUTURE})
    pin.write_bytes(body + blake3(body).digest())
    assert Store.open(copied).pins()["best"].step == 2


def test_a_newer_commit_is_not_passed_over_in_silence(copied: Path) -> None:
    """Restoring an older step than the newest because that one is unknown would lose training."""
    # case 164
    golden = Golden(VERSIONS[-1])
    rewrite_commit(copied, Store.open(copied).head("main"), version=2)
    state = {"table": torch.zeros(7, 256)}
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        restore_into(copied, state, only="table")
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        deltackpt.load(copied)
    golden.check(deltackpt.load(copied, step=3), golden.step("main", 3))
    with pytest.raises((UnsupportedFormatError, CorruptionError), match="version 2"):
        collect(Store.create(copied))


def test_newer_manifests_packs_pins_and_values_are_called_newer(copied: Path) -> None:
    """Called damaged, they would be repaired away."""
    # case 164
    store = Store.open(copied)
    commit = store.find("main", 3)
    record = manifest_of(copied, commit.manifest)
    rewrite_commit(copied, commit, manifest=write_manifest(copied, record, version=2))
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        deltackpt.load(copied, step=3)

    commit = store.head("codecs")
    pack = copied / "packs" / "c0" / "c0dec0dec0dec0de-00000001.pack"
    good = pack.read_bytes()
    data = bytearray(good)
    data[8] = 2
    data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    pack.write_bytes(data)
    with pytest.raises(UnsupportedFormatError):
        deltackpt.load(copied, "codecs")
    pack.write_bytes(good)

    pin = copied / "pins" / "best"
    body = b"DCKPTPN\x02" + pin.read_bytes()[8:-32]
    pin.write_bytes(body + blake3(body).digest())
    with pytest.raises(UnsupportedFormatError, match="newer"):
        Store.open(copied).read_pin("best")
    assert isinstance(Store.open(copied).pins().damaged[0].error, UnsupportedFormatError)


def test_a_newer_generation_stops_an_older_collector(copied: Path) -> None:
    """It would forget what the newer one has condemned and which numbers it has passed."""
    # case 164
    body = b"DCKPTGN\x02" + msgspec.msgpack.encode({"number": 7, "packs": [], "sieve": 1})
    record = copied / "gc" / f"{7:020d}"
    record.parent.mkdir(exist_ok=True)
    record.write_bytes(body + blake3(body).digest())
    before = listing(copied)
    with pytest.raises(UnsupportedFormatError, match="version"):
        collect(Store.open(copied))
    assert [f for f in listing(copied) if "/gc/lock" not in f[0]] == before


def test_a_copy_without_empty_folders_works(copied: Path) -> None:
    """Version control and object stores do not keep empty folders; nothing may depend on them."""
    # case 95
    assert not (copied / "gc").exists()
    (copied / "pins").rename(copied / "elsewhere")
    with pytest.raises(StorageError, match="pins"):  # what is pinned cannot be told
        collect(Store.open(copied))
    (copied / "elsewhere").rename(copied / "pins")
    with Checkpointer(copied, {"w": torch.ones(3)}, writer="thread", run="new") as ckpt:
        ckpt.save(1).result(60)
    assert collect(Store.open(copied)).commits == [("main", 1)]
    golden = Golden(VERSIONS[-1])
    for expected in golden.expected["steps"]:
        golden.check(deltackpt.load(copied, expected["run"], expected["step"]), expected)


def test_golden_commits_are_canonical() -> None:
    """What is written today has the form that was released: same fields, same order."""
    # case 164
    for file in (GOLDEN / "v1/store/runs").glob("*/[0-9]*"):
        if file.stat().st_size:
            record = msgspec.msgpack.decode(file.read_bytes()[8:-32])
            commit = decode_commit(file.read_bytes())
            assert [n for n in msgspec.structs.asdict(commit) if n in record] == list(record)
    with pytest.raises(InvalidInputError):
        Store.open(GOLDEN / "v1/store").resolve_name("main@x")
