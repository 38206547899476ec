"""The chunks that one step after another needs, as keys, without building whole snapshots.

A *key* is the first eight bytes of a chunk's id, which is far more than counting needs. Manifests
are proved by their digests; that a step has the root its commit records is for ``verify``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from deltackpt_store.manifest import ID_BYTES, Commit, Manifest
from deltackpt_store.store import Store
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
_BASES_KEPT = 2


class _Base:
    """Keys of all chunks of a base manifest, one extent after the other."""

    def __init__(self, manifest: Manifest) -> None:
        ids = manifest.chunks
        self.first: dict[int, int] = {}
        self.length: dict[int, int] = {}
        at = 0
        for extent, data in ids.items():
            self.first[extent], self.length[extent] = at, len(data) // ID_BYTES
            at += self.length[extent]
        self.keys = keys_of(b"".join(ids.values()))


class ChunkStates:
    """Keys of the chunks of steps. Fastest in the order of commits; holds two bases at most."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bases: OrderedDict[bytes, _Base] = OrderedDict()

    def keys(self, commit: Commit) -> Keys:
        """Key of every chunk of the step, equal ones included, always in one order for one layout.

        CorruptionError, UnsupportedFormatError, StorageError when the step cannot be read.
        """
        if commit.base is None or commit.base == commit.manifest:
            base = self._base(commit.manifest)
            return base.keys if base is not None else self._slowly(commit)
        delta = self._store.manifest(commit.manifest)
        base = self._base(commit.base)
        keys = None if base is None or delta.base != commit.base else _patched(base, delta)
        return self._slowly(commit) if keys is None else keys

    def _base(self, digest: bytes) -> _Base | None:
        found = self._bases.get(digest)
        if found is None:
            manifest = self._store.manifest(digest)
            if manifest.base is not None:
                return None
            found = self._bases[digest] = _Base(manifest)
            while len(self._bases) > _BASES_KEPT:
                self._bases.popitem(last=False)
        self._bases.move_to_end(digest)
        return found

    def _slowly(self, commit: Commit) -> Keys:
        """Of a step that is not as steps are: its snapshot says what it is, or what is wrong."""
        ids = self._store.snapshot(commit).chunks.values()
        return keys_of(b"".join(array.tobytes() for array in ids))


def _patched(base: _Base, delta: Manifest) -> Keys | None:
    """The keys of `base` with what `delta` changes; None for one that does not fit."""
    keys = base.keys.copy()
    for extent, data in delta.chunks.items():
        if base.length.get(extent) != len(data) // ID_BYTES:
            return None
        first = base.first[extent]
        keys[first : first + base.length[extent]] = keys_of(data)
    if not delta.patches:
        return keys
    if not base.first.keys() >= delta.patches.keys():
        return None
    rows = np.frombuffer(b"".join(p for p, _ in delta.patches.values()), "<u4").astype(np.int64)
    counts = np.array([len(p) // 4 for p, _ in delta.patches.values()])
    sizes = np.array([base.length[extent] for extent in delta.patches])
    starts = np.array([base.first[extent] for extent in delta.patches])
    fresh = keys_of(b"".join(ids for _, ids in delta.patches.values()))
    if (rows >= np.repeat(sizes, counts)).any():
        return None
    keys[rows + np.repeat(starts, counts)] = fresh
    return keys


def keys_of(ids: Any) -> Keys:
    """The first eight bytes of each of the ids that lie one after the other in `ids`."""
    return np.frombuffer(ids, np.uint64)[:: ID_BYTES // 8].copy()
