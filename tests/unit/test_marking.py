"""Prevents: marking that takes memory for every chunk of a store many times over, or that takes one
chunk for another and lets the only copy go."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from authors import Author, check_everything
from deltackpt_store import catalogue as catalogue_module
from deltackpt_store import mark as mark_module
from deltackpt_store.catalogue import Catalogue, Ids, Keys
from deltackpt_store.codecs import DELTA, RAW, Encoded
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.gc import collect
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Manifest, TensorView
from deltackpt_store.manifest_io import digest_of, encode, encode_commit
from deltackpt_store.mark import Marking, mark
from deltackpt_store.names import number_name
from deltackpt_store.pack import pack_name, pack_path
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.retention import retire
from deltackpt_store.roots import read_roots
from deltackpt_store.store import Store

RECORDS, PACK = 24_000, 3_000


def big_store(path: Path, *, coded: bool) -> Store:
    """A step that names all of `RECORDS` chunks; with `coded` all but the first are deltas."""
    store, io = Store.create(path), FileIO()
    ids = np.random.default_rng(0).integers(0, 256, (RECORDS, 32), np.uint8)
    for number, start in enumerate(range(0, RECORDS, PACK)):
        writer = f"{number:016x}"
        file = pack_path(store.path, pack_name(writer, 1))
        make_directories(io, os.path.dirname(file))
        pack = PackWriter(io, file, store.uuid, writer, 1)
        for at in range(start, start + PACK):
            plain = at == 0 or not coded
            refs = () if plain else (ids[0].tobytes(),)
            encoded = Encoded(RAW if plain else DELTA, b"", refs, [b"0123456789abcdef"])
            pack.append(ids[at].tobytes(), 16, encoded)
        pack.finish()
    layout = Layout(b"\x00", ("w",), (TensorView(0, 0, "uint8", (RECORDS,), (1,), 0),),
                    (ExtentSpec(RECORDS * 1024, 1024, "uint8"),), ())  # fmt: skip
    base = Manifest(root=bytes(32), packs=(), layout=layout, environment=b"\x80",
                    chunks={0: ids.tobytes()})  # fmt: skip
    data = encode(base)
    (path / "manifests" / digest_of(data).hex()).write_bytes(data)
    commit = Commit("main", 1, 1, None, digest_of(data), None, bytes(32), bytes(32), "0" * 16, b"",
                    0, 0.0, {})  # fmt: skip
    make_directories(io, f"{store.path}/runs/main")
    (path / "runs" / "main" / number_name(1)).write_bytes(encode_commit(commit))
    return store


def peak(store: Store) -> tuple[Marking, float]:
    """The marking of all, and bytes per record that it took at most."""
    roots = read_roots(store)
    tracemalloc.start()
    try:
        marking = mark(store, roots)
        return marking, tracemalloc.get_traced_memory()[1] / RECORDS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "coded"])
def test_memory_per_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coded: bool) -> None:
    """The manifest alone is 32 bytes per record here."""
    monkeypatch.setattr(catalogue_module, "_BLOCK", 1024)
    monkeypatch.setattr(mark_module, "_BLOCK", 1024)
    store = big_store(tmp_path / "store", coded=coded)
    marking, taken = peak(store)
    assert marking.live.all()
    assert marking.kept.all()
    assert taken < (100 if coded else 80)


def test_chunks_that_pass_for_one_are_told_apart_before_any_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A catalogue keeps a part of each id: what it mixes up must not be lost by that."""
    store = Store.create(tmp_path / "store")
    commits: list[Commit] = []
    for step in range(4):
        author = Author(store, f"run-{step}")
        commits.append(author.save(step, [f"{step}.{i}" for i in range(3)]))
        author.close()

    def alike(self: Catalogue, ids: Ids) -> tuple[Keys, Keys]:
        return np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.uint64)

    retire(store, commits[:1])
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "_words", alike)
        report = collect(Store.open(store.path))
    assert len(report.pardoned) == 3
    check_everything(Store.open(store.path), commits[1:])
    collect(Store.open(store.path))
    check_everything(Store.open(store.path), commits[1:])
    assert len(store.packs.names()) == 3
