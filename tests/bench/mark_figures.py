"""Time and memory of garbage collection's marking, on a store of a million small records.

    python tests/bench/mark_figures.py [RECORDS]

Prints one JSON object. Memory is that of arrays and objects (tracemalloc), the index is what
`Store.index` takes for the same packs. Nothing but this directory's store is touched.
"""

from __future__ import annotations

import gc as python_gc
import json
import os
import sys
import tempfile
import time
import tracemalloc

import numpy as np
from deltackpt_store.codecs import Encoded
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.index import MemoryIndex
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Manifest, TensorView
from deltackpt_store.manifest_io import digest_of, encode, encode_commit
from deltackpt_store.mark import mark
from deltackpt_store.names import number_name, pack_path
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.roots import read_roots
from deltackpt_store.store import Store

PACK_RECORDS = 4000
STEPS = 100


def build(store: Store, records: int) -> None:
    """`records` records in packs; one base that names half of them, and deltas for the rest."""
    io, mixture = store.io, np.random.default_rng(0)
    ids = mixture.integers(0, 256, (records, 32), np.uint8)
    for number, start in enumerate(range(0, records, PACK_RECORDS)):
        writer = f"{number:016x}"
        path = f"{store.path}/{pack_path(f'{writer}-00000001')}"
        make_directories(io, os.path.dirname(path))
        pack = PackWriter(io, path, store.uuid, writer, 1)
        for row in ids[start : start + PACK_RECORDS]:
            pack.append(row.tobytes(), 16, Encoded(0, b"", (), [b"0123456789abcdef"]))
        pack.finish()
    half = records // 2
    layout = Layout(b"\x00", ("w",), (TensorView(0, 0, "uint8", (half,), (1,), 0),),
                    (ExtentSpec(half * 1024, 1024, "uint8"),), ())  # fmt: skip
    base = Manifest(root=bytes(32), packs=(), layout=layout, environment=b"\x80",
                    chunks={0: ids[:half].tobytes()})  # fmt: skip
    make_directories(io, f"{store.path}/runs/main")
    first = write(store, base)
    each = (records - half) // STEPS
    for step in range(STEPS):
        rows = np.sort(mixture.choice(half, each, replace=False)).astype("<u4")
        fresh = ids[half + step * each : half + (step + 1) * each]
        delta = Manifest(root=bytes(32), packs=(), base=first,
                         patches={0: (rows.tobytes(), fresh.tobytes())})  # fmt: skip
        commit = Commit("main", step + 1, step, None, write(store, delta), first, bytes(32),
                        bytes(32), "0" * 16, b"", 0, 0.0, {})  # fmt: skip
        with open(f"{store.path}/runs/main/{number_name(step + 1)}", "xb") as file:
            file.write(encode_commit(commit))


def write(store: Store, manifest: Manifest) -> bytes:
    data = encode(manifest)
    with open(f"{store.path}/manifests/{digest_of(data).hex()}", "xb") as file:
        file.write(data)
    return digest_of(data)


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        store = Store.create(f"{directory}/store", io=FileIO())
        build(store, records)
        times: list[float] = []
        for _ in range(3):
            began = time.perf_counter()
            marking = mark(Store.open(store.path), read_roots(Store.open(store.path)))
            times.append(time.perf_counter() - began)
            kept = len(marking.keeping())
            del marking
        began = time.perf_counter()
        index = Store.open(store.path).index()
        index.contains_many(np.zeros((1, 32), np.uint8))
        index_seconds = time.perf_counter() - began
        del index
        tracemalloc.start()
        held: MemoryIndex = Store.open(store.path).index()
        held.contains_many(np.zeros((1, 32), np.uint8))
        index_bytes = tracemalloc.get_traced_memory()[0]
        del held
        python_gc.collect()
        tracemalloc.reset_peak()
        base = tracemalloc.get_traced_memory()[0]
        mark(Store.open(store.path), read_roots(Store.open(store.path)))
        peak = tracemalloc.get_traced_memory()[1] - base
    print(json.dumps({
        "records": records, "references": records // 2 * STEPS, "packs_kept": kept,
        "mark_seconds": round(sorted(times)[1], 3), "index_seconds": round(index_seconds, 3),
        "index_bytes": index_bytes, "mark_peak_bytes": peak,
        "mark_over_index": round(peak / index_bytes, 2),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
