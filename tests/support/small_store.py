"""Small stores made without torch, for tests of what reads stores.

Content is deterministic, and with it every Merkle root; writer ids, times and digests of manifests
differ from store to store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from deltackpt_store import Commit, ExtentSpec, Layout, Snapshot, Store, TensorView
from deltackpt_store.manifest_io import to_base, to_delta
from deltackpt_store.store_writer import StoreWriter
from deltackpt_store.values import encode

CHUNK = 4096


def pattern(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """`count` float32 that look like weights and are the same everywhere."""
    return np.random.default_rng(seed).standard_normal(count, np.float32)


class SmallStore:
    """A store and the means to add steps to it. `views` may replace fields of a tensor's view."""

    def __init__(self, path: Path, codec: str = "none") -> None:
        self.store = Store.create(path)
        self.path = str(path)
        self.writer = StoreWriter(self.store, codec=codec, index=self.store.index())
        self._bases: dict[bytes, Snapshot] = {}

    def save(
        self,
        run: str,
        step: int,
        tensors: Mapping[str, np.ndarray[Any, Any]],
        values: Mapping[str, Any] | None = None,
        *,
        tied: Mapping[str, str] | None = None,
        views: Mapping[str, Mapping[str, Any]] | None = None,
        parent: Commit | None = None,
        base: Commit | None = None,
        metrics: Mapping[str, float] | None = None,
        stats: Mapping[str, float] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Commit one step. `tied` maps a path to the path whose bytes it shares; `base` (of equal
        layout) makes the manifest a delta."""
        layout, raw, objects = self._layout(tensors, values or {}, tied or {}, views or {})
        inline: dict[int, bytes] = {}
        chunks: dict[int, np.ndarray[Any, Any]] = {}
        packs: set[str] = set()
        written = 0
        for extent, data in enumerate(raw):
            if layout.extents[extent].inline:
                inline[extent] = data
                continue
            pieces = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
            puts = [self.writer.put(p, dtype=layout.extents[extent].dtype) for p in pieces]
            written += sum(put.written for put in puts)
            packs |= {put.pack for put in puts}
            ids = b"".join(put.id for put in puts)
            chunks[extent] = np.frombuffer(ids, np.uint8).reshape(-1, 32)
        self.writer.flush()
        record = msgspec.msgpack.encode(dict(environment or {}))
        snapshot = Snapshot(layout, objects, inline, chunks, record)
        if base is None:
            manifest, closure = to_base(snapshot, packs), packs
        else:
            old = self._bases[base.manifest]
            delta = to_delta(base.manifest, old, snapshot, packs)
            assert delta is not None
            manifest, closure = delta, packs | set(old.packs)
        digest = self.writer.write_manifest(manifest)
        if base is None:
            self._bases[digest] = self.store.snapshot(digest)
        return self.writer.commit(
            run=run, step=step, parent=parent, manifest=digest,
            base=None if base is None else base.manifest, root=manifest.root, packs=closure,
            metrics=metrics, versions={"deltackpt": "0.1.0"},
            stats={"state_bytes": float(sum(map(len, raw))), "written_bytes": float(written),
                   **(stats or {})},
        )  # fmt: skip

    @staticmethod
    def _layout(
        tensors: Mapping[str, np.ndarray[Any, Any]],
        values: Mapping[str, Any],
        tied: Mapping[str, str],
        views: Mapping[str, Mapping[str, Any]],
    ) -> tuple[Layout, list[bytes], dict[int, bytes]]:
        tree: dict[str, Any] = {}
        paths = [*tensors, *tied, *values]
        for slot, path in enumerate(paths):
            *outer, last = path.split("/")
            node = tree
            for key in outer:
                node = node.setdefault(key, {})
            node[last] = slot
        raw: list[bytes] = []
        specs: list[ExtentSpec] = []
        described: list[TensorView] = []
        for slot, path in enumerate([*tensors, *tied]):
            array = tensors[tied.get(path, path)]
            if path in tensors:
                raw.append(array.tobytes())
                specs.append(ExtentSpec(array.nbytes, CHUNK, array.dtype.name))
            extent = list(tensors).index(tied.get(path, path))
            stride = tuple(step // array.itemsize for step in array.strides)
            view = TensorView(slot, extent, array.dtype.name, array.shape, stride, 0)
            described.append(msgspec.structs.replace(view, **views.get(path, {})))
        first = len(tensors) + len(tied)
        objects = {first + i: encode(value) for i, value in enumerate(values.values())}
        layout = Layout(
            structure=msgspec.msgpack.encode(_node(tree)), paths=tuple(paths),
            tensors=tuple(described), extents=tuple(specs), objects=tuple(objects),
        )  # fmt: skip
        return layout, raw, objects

    def close(self) -> None:
        self.writer.close()


def _node(tree: Any) -> Any:
    if isinstance(tree, int):
        return tree
    return ["d", [[key, _node(child)] for key, child in tree.items()]]
