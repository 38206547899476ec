"""What steps consist of, chunk by chunk, in terms of the groups of a catalogue.

A step is a flat array with the group of each of its chunks, in the order of its extents. Steps of
one base share its *shape*; between shapes, chunks of equally called extents correspond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.catalogue import Catalogue, Ints
from deltackpt_store.manifest import ID_BYTES, Commit, Layout, Manifest
from deltackpt_store.manifest_io import damaged_manifest
from deltackpt_store.protocol import extent_keys
from deltackpt_store.store import Store


class Shape:
    """The places of a layout: one for each chunk of each extent that is not inline, in order."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.first: dict[int, int] = {}
        self.size = 0
        for extent, spec in enumerate(layout.extents):
            if not spec.inline:
                self.first[extent] = self.size
                self.size += spec.chunk_count

    def dtype_codes(self, names: dict[str, int]) -> NDArray[np.uint16]:
        """The number by which `names` knows the dtype at each place; new names are added to it."""
        extents = [self.layout.extents[extent] for extent in self.first]
        codes = [names.setdefault(extent.dtype, len(names)) for extent in extents]
        counts = [extent.chunk_count for extent in extents]
        return np.repeat(np.array(codes, np.uint16), counts)

    def places_in(self, other: Shape) -> Ints:
        """For each place the corresponding one of `other`, or -1."""
        if other.layout is self.layout or other.layout == self.layout:
            return np.arange(self.size)
        result = np.full(self.size, -1, np.int64)
        theirs = {key: extent for extent, key in enumerate(extent_keys(other.layout))}
        for extent, key in enumerate(extent_keys(self.layout)):
            match = theirs.get(key, -1)
            if extent in self.first and match in other.first:
                count = self.layout.extents[extent].chunk_count
                start = self.first[extent]
                result[start : start + count] = np.arange(count) + other.first[match]
        return result


class StepGroups(NamedTuple):
    """One step. `groups` has the group at each place of `shape`, -1 for a chunk that is nowhere."""

    commit: Commit
    shape: Shape
    groups: Ints


def step_groups(
    store: Store, catalogue: Catalogue, commits: Iterable[Commit]
) -> Iterator[StepGroups]:
    """The given steps, those of one base together. CorruptionError, StorageError.

    Arrays are the caller's to read; steps that are equal may share one.
    """
    users: dict[bytes, list[Commit]] = {}
    for commit in commits:
        users.setdefault(commit.base or commit.manifest, []).append(commit)
    for digest, mine in users.items():
        base = store.manifest(digest)
        if base.layout is None:
            raise damaged_manifest(digest, "is named as a base and is none")
        shape = Shape(base.layout)
        whole = np.full(shape.size, -1, np.int64)
        _put(catalogue, base, digest, shape, whole)
        for commit in mine:
            groups = whole
            if commit.manifest != digest:
                groups = whole.copy()
                _put(catalogue, store.manifest(commit.manifest), commit.manifest, shape, groups)
            yield StepGroups(commit, shape, groups)


def _put(
    catalogue: Catalogue, manifest: Manifest, digest: bytes, shape: Shape, groups: Ints
) -> None:
    """Write the groups of all chunks that the manifest itself names to their places."""
    places: list[Ints] = []
    parts: list[bytes] = []
    for extent, ids in manifest.chunks.items():
        start = shape.first.get(extent)
        if start is None or len(ids) != ID_BYTES * shape.layout.extents[extent].chunk_count:
            raise damaged_manifest(digest, "does not fit its layout")
        places.append(np.arange(start, start + len(ids) // ID_BYTES))
        parts.append(ids)
    for extent, (positions, ids) in manifest.patches.items():
        start = shape.first.get(extent)
        rows = np.frombuffer(positions, "<u4").astype(np.int64)
        if start is None or int(rows.max()) >= shape.layout.extents[extent].chunk_count:
            raise damaged_manifest(digest, "has a patch that does not fit its extent")
        places.append(start + rows)
        parts.append(ids)
    if places:
        table = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, ID_BYTES)
        groups[np.concatenate(places)] = catalogue.find(table)
