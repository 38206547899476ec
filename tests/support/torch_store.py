"""Commits a torch state to a store in this process, without writer or staging."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from deltackpt_store import Commit, Snapshot, Store
from deltackpt_store.manifest_io import to_base
from deltackpt_store.store_writer import StoreWriter

from deltackpt.capture import capture


def save_state(
    path: Path, state: Mapping[str, Any], *, run: str = "main", step: int = 1, chunk: int = 4096
) -> Commit:
    """Create the store if need be, and commit `state` as it is now."""
    store = Store.create(path)
    taken = capture(state, chunk_bytes=chunk)
    chunks: dict[int, np.ndarray[Any, Any]] = {}
    packs: set[str] = set()
    with StoreWriter(store, index=store.index()) as writer:
        for extent, source in taken.sources.items():
            data = source.data.numpy().tobytes()
            spec = taken.layout.extents[extent]
            puts = [
                writer.put(data[i : i + spec.chunk_bytes], dtype=spec.dtype)
                for i in range(0, len(data), spec.chunk_bytes)
            ]
            packs |= {put.pack for put in puts}
            ids = b"".join(put.id for put in puts)
            chunks[extent] = np.frombuffer(ids, np.uint8).reshape(-1, 32)
        writer.flush()
        manifest = to_base(Snapshot(taken.layout, taken.objects, taken.inline, chunks), packs)
        digest = writer.write_manifest(manifest)
        commit = writer.commit(
            run=run, step=step, parent=None, manifest=digest, base=None, root=manifest.root,
            packs=packs,
        )  # fmt: skip
    taken.release()
    return commit
