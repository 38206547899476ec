"""Saving a few steps, and reading back every byte of one."""

from __future__ import annotations

import numpy as np
from deltackpt_store import Commit, Store
from small_store import SmallStore, pattern

TENSORS = {"w/a": pattern(5000), "w/b": pattern(3000, 1)}


def steps_of(small: SmallStore, run: str, steps: list[int], parent: Commit | None = None) -> Commit:
    """Save `steps` one after the other, each with content of its own."""
    for step in steps:
        parent = small.save(run, step, {**TENSORS, "step": np.array([step])}, parent=parent)
    assert parent is not None
    return parent


def content(store: Store, commit: Commit) -> dict[str, bytes]:
    """Raw bytes of every tensor of a step, read and verified."""
    snapshot = store.snapshot(commit)
    out: dict[str, bytes] = {}
    for view in snapshot.layout.tensors:
        spec = snapshot.layout.extents[view.extent]
        data = bytearray(snapshot.inline.get(view.extent, bytes(spec.nbytes)))
        if not spec.inline:
            pieces = [
                (row.tobytes(), memoryview(data)[i * spec.chunk_bytes :][: spec.chunk_length(i)])
                for i, row in enumerate(snapshot.chunks[view.extent])
            ]
            store.reader(snapshot.packs).read(pieces)
        out[snapshot.layout.paths[view.slot]] = bytes(data)
    return out
