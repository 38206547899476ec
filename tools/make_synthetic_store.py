"""Make a store of any size without training anything, to try and to time the inspection tools on.

    python tools/make_synthetic_store.py DIR [--steps 1000] [--chunks 20000] [--changed 1000]

The state looks like a small language model: an embedding of which a few rows change, layers that
learn at different speeds, frozen ones, a head that always changes, one optimizer moment for each,
and a learning rate. Chunks are tiny (``--chunk-bytes``), so that a million of them fit anywhere.
Content, times and figures are made up but the same each time; every chunk, manifest and commit is
real and verifies.
"""

# pyright: basic

from __future__ import annotations

import argparse
import math
import os
import secrets
import time
from pathlib import Path

import msgspec
import numpy as np
from deltackpt_store import Commit, ExtentSpec, Layout, Snapshot, Store, TensorView
from deltackpt_store.fileio import make_directories, publish_bytes
from deltackpt_store.history import ancestors_after
from deltackpt_store.manifest_io import closure_digest, encode_commit, to_base, to_delta
from deltackpt_store.names import number_name
from deltackpt_store.store_writer import Chunk, StoreWriter
from deltackpt_store.values import encode

START = 1_767_225_600.0  # 2026-01-01
SECONDS = 90.0  # between two saves
BATCH = 8192


def layout_of(layers: int, chunks: int, chunk_bytes: int) -> Layout:
    """Tensors of float32: embedding, layers of four matrices, head; each with its moment."""
    per = max(1, chunks // (2 * (4 * layers + 3)))
    names = [("embed.weight", 2 * per)]
    for layer in range(layers):
        for part in ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight"):
            names.append((f"layers.{layer}.{part}", per))
    names.append(("head.weight", per))
    tensors: list[tuple[str, int]] = [(f"model/{name}", count) for name, count in names]
    tensors += [(f"optimizer/{name}/exp_avg", count) for name, count in names]
    tensors[0] = (tensors[0][0], tensors[0][1] + chunks - sum(count for _, count in tensors))
    tree: dict = {}
    paths = [*(name for name, _ in tensors), "optimizer/lr", "train/step"]
    for slot, path in enumerate(paths):
        *outer, last = path.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = slot

    def node_of(value: object) -> object:
        if isinstance(value, int):
            return value
        return ["d", [[key, node_of(child)] for key, child in value.items()]]  # type: ignore[union-attr] # else a dict

    extents, views = [], []
    for slot, (_, count) in enumerate(tensors):
        count = max(count, 513 // chunk_bytes + 1)  # smaller ones would lie in the manifest
        extents.append(ExtentSpec(count * chunk_bytes, chunk_bytes, "float32"))
        views.append(TensorView(slot, slot, "float32", (count * chunk_bytes // 4,), (1,), 0))
    return Layout(
        structure=msgspec.msgpack.encode(node_of(tree)), paths=tuple(paths), tensors=tuple(views),
        extents=tuple(extents), objects=(len(tensors), len(tensors) + 1),
    )  # fmt: skip


def appetite(path: str, layers: int) -> float:
    """How much of the changes of a step a tensor gets."""
    if "embed" in path:
        return 0.3
    if "head" in path:
        return 4.0
    layer = int(path.split("layers.")[1].split(".")[0])
    if layer < layers // 4:
        return 0.0  # frozen
    return 0.2 + 2.0 * layer / layers


class Maker:
    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.store = Store.create(path, exist_ok=False)
        self.layout = layout_of(options.layers, options.chunks, options.chunk_bytes)
        self.size = options.chunk_bytes
        self.rng = np.random.default_rng(7)
        rng = self.rng
        self.state = [
            rng.standard_normal(e.nbytes // 4, np.float32) * np.float32(0.02)
            for e in self.layout.extents
        ]
        self.ids = [np.zeros((e.chunk_count, 32), np.uint8) for e in self.layout.extents]
        weights = np.array(
            [appetite(self.layout.paths[v.slot], options.layers) for v in self.layout.tensors]
        ) * [e.chunk_count for e in self.layout.extents]
        self.shares = weights / weights.sum()
        self.changed = options.changed
        self.writer = StoreWriter(self.store, codec="none", index=self.store.index())
        self.packs: set[str] = set()
        self.base: Snapshot | None = None
        self.parent: Commit | None = None

    def put(self, extent: int, rows: np.ndarray) -> int:
        data = self.state[extent].view(np.uint8).reshape(-1, self.size)
        written = 0
        for first in range(0, len(rows), BATCH):
            some = rows[first : first + BATCH]
            raw = data[some]
            puts = self.writer.put_many([Chunk(row, "float32") for row in raw])
            written += sum(put.written for put in puts)
            self.packs |= {put.pack for put in puts}
            ids = np.frombuffer(b"".join(put.id for put in puts), np.uint8).reshape(-1, 32)
            self.ids[extent][some] = ids
        return written

    def save(self, run: str, number: int, step: int) -> Commit:
        written = staged = 0
        for extent, spec in enumerate(self.layout.extents):
            count = spec.chunk_count
            if self.parent is None:
                rows = np.arange(count)
            else:
                wanted = self.rng.poisson(self.shares[extent] * self.changed)
                rows = np.sort(self.rng.permutation(count)[: min(count, wanted)])
                if len(rows):
                    noise = self.rng.standard_normal(len(rows) * self.size // 4, np.float32)
                    elements = self.state[extent].reshape(-1, self.size // 4)
                    rate = np.float32(1e-3 * math.exp(-step / 20000))
                    elements[rows] += noise.reshape(len(rows), -1) * rate
            if len(rows):
                self.ids[extent] = self.ids[extent].copy()
                written += self.put(extent, rows)
                staged += len(rows) * self.size
        self.writer.flush()
        return self.commit(run, number, step, written, staged)

    def commit(self, run: str, number: int, step: int, written: int, staged: int) -> Commit:
        lr = 1e-3 * min(1.0, step / 500) * math.exp(-step / 20000)
        slots = self.layout.objects
        objects = {slots[0]: encode(lr), slots[1]: encode(step)}
        chunks = dict(enumerate(self.ids))
        snapshot = Snapshot(self.layout, objects, {}, chunks, packs=tuple(sorted(self.packs)))
        manifest = None
        if self.base is not None and self.base.digest is not None:
            manifest = to_delta(self.base.digest, self.base, snapshot, self.packs)
        base = self.base if manifest is not None else None
        manifest = manifest or to_base(snapshot, self.packs)
        digest = self.writer.write_manifest(manifest)
        closure = {*manifest.packs, *(base.packs if base else ())}
        total = sum(e.nbytes for e in self.layout.extents)
        jitter = float(self.rng.random())
        stats = {
            "state_bytes": total, "staged_bytes": staged, "changed_bytes": staged,
            "written_bytes": written, "dedup_bytes": staged - written, "skipped": 0,
            "chunks": sum(e.chunk_count for e in self.layout.extents),
            "staged_chunks": staged // self.size, "changed_chunks": staged // self.size,
            "dedup_chunks": (staged - written) // self.size,
            "codec.raw.chunks": written // self.size, "codec.raw.raw_bytes": written,
            "codec.raw.written_bytes": written,
            "stall_seconds": 0.02 + 0.01 * jitter, "staged_seconds": 0.05 + 0.03 * jitter,
            "encode_seconds": 0.1 + 0.1 * jitter, "flush_seconds": 0.2 + 0.3 * jitter,
            "writer_seconds": 0.4 + 0.4 * jitter,
        }  # fmt: skip
        loss = 2 + 6 * math.exp(-step / 3000) + 0.1 * jitter
        commit = Commit(
            run=run, number=number, step=step,
            parent=None if self.parent is None
            else (self.parent.run, self.parent.number, self.parent.digest),
            manifest=digest, base=None if base is None else base.digest, root=manifest.root,
            closure=closure_digest(closure), writer=self.writer.writer,
            nonce=secrets.token_bytes(16), generation=0, created=START + number * SECONDS,
            versions={"deltackpt": "0"}, metrics={"loss": loss, "lr": lr},
            stats={key: float(value) for key, value in stats.items()},
            ancestors=ancestors_after(self.parent, run),
        )  # fmt: skip
        data = encode_commit(commit)
        folder = os.path.join(self.store.path, "runs", run)
        make_directories(self.store.io, folder)
        publish_bytes(self.store.io, os.path.join(folder, number_name(number)), data)
        self.parent = msgspec.structs.replace(commit, digest=data[-32:])
        if base is None:
            snapshot.digest = digest
            self.base = snapshot
        return self.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=10, help="training steps between two saves")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=20_000, help="in one step")
    parser.add_argument("--changed", type=int, default=1000, help="chunks, per step, about")
    parser.add_argument("--chunk-bytes", type=int, default=256)
    parser.add_argument("--run", default="synthetic")
    options = parser.parse_args()
    began = time.perf_counter()
    maker = Maker(options.path, options)
    for number in range(1, options.steps + 1):
        maker.save(options.run, number, number * options.every)
    maker.writer.close()
    total = len(maker.store.index())
    print(f"{options.steps} steps, {total} chunks in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
