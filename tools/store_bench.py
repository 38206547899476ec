"""Time and memory of the index and of garbage collection's marking, over a million records.

    python tools/store_bench.py [RECORDS]

Prints one JSON object. Seconds are of processor time, medians of three. Memory is that of arrays
and objects (tracemalloc); the index is what `Store.index` rebuilds from the footers of the same
packs. Only a temporary directory is touched.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from deltackpt_store.codecs import Encoded
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.index import MemoryIndex
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Manifest, TensorView
from deltackpt_store.manifest_io import digest_of, encode, encode_commit
from deltackpt_store.mark import Marking, mark
from deltackpt_store.names import number_name, relative_pack_path
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
        path = f"{store.path}/{relative_pack_path(f'{writer}-00000001')}"
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


def seconds_of(act: Callable[[], object]) -> float:
    """Processor time, the median of three: what else the machine does matters less to it."""
    times: list[float] = []
    for _ in range(3):
        began = time.process_time()
        act()
        times.append(time.process_time() - began)
    return sorted(times)[1]


def rebuilt(path: str) -> MemoryIndex:
    """The index of all packs, ready for look-ups."""
    index = Store.open(path).index()
    index.contains_many(np.zeros((1, 32), np.uint8))
    return index


def marked(path: str) -> Marking:
    store = Store.open(path)
    return mark(store, read_roots(store))


def memory(path: str) -> tuple[int, int]:
    """Bytes that the index takes, and that marking takes at its peak."""
    tracemalloc.start()
    held = rebuilt(path)
    index_bytes = tracemalloc.get_traced_memory()[0]
    del held
    gc.collect()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    marked(path)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return index_bytes, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=int, nargs="?", default=1_000_000)
    records: int = parser.parse_args().records
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/store"
        build(Store.create(path, io=FileIO()), records)
        kept = len(marked(path).keeping())
        mark_seconds = seconds_of(lambda: marked(path))
        index_seconds = seconds_of(lambda: rebuilt(path))
        index_bytes, peak = memory(path)
    print(json.dumps({
        "records": records, "references": records // 2 * STEPS, "packs_kept": kept,
        "mark_cpu_seconds": round(mark_seconds, 3),
        "index_cpu_seconds": round(index_seconds, 3),
        "mark_over_index_seconds": round(mark_seconds / index_seconds, 2),
        "index_bytes_per_record": round(index_bytes / records, 1),
        "mark_peak_bytes_per_record": round(peak / records, 1),
        "mark_over_index_memory": round(peak / index_bytes, 2),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
