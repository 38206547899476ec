"""A saver without the writer process: blobs, manifest (base, then deltas), commit.

The state is one tensor of six 1 KiB chunks, of which one changes each step, and one number.
"""

from __future__ import annotations

import msgspec
import numpy as np
from deltackpt_store.fileio import FileIO
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Snapshot, TensorView
from deltackpt_store.manifest_io import to_base, to_delta
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter

CHUNK = 1024
CHUNKS = 6
LAYOUT = Layout(
    structure=msgspec.msgpack.encode(["d", [["w", 0], ["n", 1]]]),
    paths=("w", "n"),
    tensors=(TensorView(0, 0, "uint8", (CHUNKS * CHUNK,), (1,), 0),),
    extents=(ExtentSpec(CHUNKS * CHUNK, CHUNK, "uint8"),),
    objects=(1,),
)


def state_at(step: int) -> np.ndarray:
    """The bytes of the tensor at `step`: one chunk changes each step."""
    data = np.random.default_rng(0).integers(0, 256, (CHUNKS, CHUNK), np.uint8)
    for s in range(1, step + 1):
        data[s % CHUNKS] = np.random.default_rng(s).integers(0, 256, CHUNK, np.uint8)
    return data


class Saver:
    """Saves steps into the store at `path`, which it creates if need be."""

    def __init__(self, path: str, io: FileIO, pack_bytes: int = 1 << 20) -> None:
        self.store = Store.create(path, io=io)
        self.writer = StoreWriter(self.store, codec="none", pack_bytes=pack_bytes)
        self.base: Snapshot | None = None
        self.parent: Commit | None = None

    def save(self, step: int) -> Commit:
        """Durable when it returns."""
        ids, packs = [], set[str]()
        for chunk in state_at(step):
            put = self.writer.put(memoryview(chunk.tobytes()))
            ids.append(np.frombuffer(put.id, np.uint8))
            packs.add(put.pack)
        self.writer.flush()
        snapshot = Snapshot(
            LAYOUT, {1: msgspec.msgpack.encode(step)}, {}, {0: np.stack(ids)},
            packs=tuple(sorted(packs)),
        )  # fmt: skip
        base, manifest = self.base, None
        if base is not None and base.digest is not None:
            manifest = to_delta(base.digest, base, snapshot, packs)
        if manifest is None:
            base, manifest = None, to_base(snapshot, packs)
        digest = self.writer.write_manifest(manifest)
        self.parent = self.writer.commit(
            run="main", step=step, parent=self.parent, manifest=digest,
            base=None if base is None else base.digest, root=manifest.root,
            packs={*manifest.packs, *(() if base is None else base.packs)},
        )  # fmt: skip
        if base is None:
            snapshot.digest = digest
            self.base = snapshot
        return self.parent


def read_step(store: Store, commit: Commit) -> np.ndarray:
    """The tensor of a step, every chunk verified."""
    snapshot = store.snapshot(commit)
    out = np.zeros((CHUNKS, CHUNK), np.uint8)
    requests = [(snapshot.chunks[0][i].tobytes(), memoryview(out[i])) for i in range(CHUNKS)]
    store.reader(snapshot.packs).read(requests, threads=1)
    return out


def check_whole(store: Store, acknowledged: set[int], where: object) -> set[int]:
    """Every acknowledged step is there; every step that is listed restores bit-exactly.

    Returns the steps listed.
    """
    commits = store.commits("main") if "main" in store.runs() else []
    assert not getattr(commits, "damaged", []), f"{where}: {commits}"
    steps = {commit.step for commit in commits}
    assert acknowledged <= steps, f"{where}: {acknowledged} durable, {steps} there"
    for commit in commits:
        assert np.array_equal(read_step(store, commit), state_at(commit.step)), where
    return steps
