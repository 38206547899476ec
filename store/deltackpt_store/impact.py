"""From chunk ids to what uses them: which chunks steps need, and whom damage hits.

Steps that share a base share arrays, and only what a step does not share is looked at again, so
the work grows with what differs between the steps and not with their number times their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.manifest import (
    ID_BYTES,
    ExtentSpec,
    Ids,
    Layout,
    Snapshot,
    TensorView,
    element_bytes,
)

_COMPACT = 1 << 22


class NeededChunks:
    """The set of (chunk id, length) that a number of snapshots need. Used by one thread."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint8]] = []
        self._rows = 0
        self._previous: Mapping[int, Ids] = {}
        self._layout: Layout | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Count in what `snapshot` needs; what it shares with the one before is not repeated."""
        nothing: Mapping[int, Ids] = {}
        previous = self._previous if snapshot.layout is self._layout else nothing
        for extent, ids in snapshot.chunks.items():
            old = previous.get(extent)
            if old is ids:
                continue
            spec = snapshot.layout.extents[extent]
            rows = np.arange(len(ids))
            if old is not None and old.shape == ids.shape and len(ids) > 64:
                rows = np.flatnonzero((old != ids).any(axis=1))
            self._append(ids, rows, spec)
        self._previous, self._layout = snapshot.chunks, snapshot.layout
        if self._rows > _COMPACT:
            self._parts = [self._unique()]
            self._rows = 0

    def _append(self, ids: Ids, rows: NDArray[np.intp], spec: ExtentSpec) -> None:
        lengths = np.full(len(rows), spec.chunk_bytes, "<u4")
        if len(rows) and rows[-1] == len(ids) - 1:
            lengths[-1] = spec.chunk_length(len(ids) - 1)
        part = np.empty((len(rows), ID_BYTES + 4), np.uint8)
        part[:, :ID_BYTES] = ids[rows]
        part[:, ID_BYTES:] = lengths.view(np.uint8).reshape(-1, 4)
        self._parts.append(part)
        self._rows += len(part)

    def _unique(self) -> NDArray[np.uint8]:
        if not self._parts:
            return np.empty((0, ID_BYTES + 4), np.uint8)
        joined = np.concatenate(self._parts)
        rows = np.unique(joined.view(f"V{ID_BYTES + 4}").reshape(-1))
        return rows.view(np.uint8).reshape(-1, ID_BYTES + 4)

    def get(self) -> tuple[Ids, NDArray[np.int64]]:
        """All distinct (ids of shape (n, 32), lengths)."""
        rows = self._unique()
        lengths = np.ascontiguousarray(rows[:, ID_BYTES:]).view("<u4").reshape(-1)
        return np.ascontiguousarray(rows[:, :ID_BYTES]), lengths.astype(np.int64)


class DamageMap:
    """Finds which leaves of a snapshot need one of a set of chunks."""

    def __init__(self, ids: set[bytes]) -> None:
        self._ids = ids
        joined = np.frombuffer(b"".join(sorted(ids)), np.uint8).reshape(-1, ID_BYTES)
        self._prefixes = np.unique(_prefix(joined))

    def hits(self, snapshot: Snapshot) -> dict[bytes, list[str]]:
        """Chunk id -> paths of the tensors that lie (partly) in it, in the order of leaves."""
        damaged = self._damaged(snapshot)
        found: dict[bytes, list[str]] = {}
        for view in snapshot.layout.tensors if damaged else ():
            for chunk_id, _, _ in _within(view, damaged.get(view.extent, ())):
                paths = found.setdefault(chunk_id, [])
                path = snapshot.layout.paths[view.slot]
                if path not in paths[-1:]:
                    paths.append(path)
        return found

    def ranges(self, snapshot: Snapshot) -> dict[str, list[tuple[int, int]]]:
        """Path of each tensor hit -> the bytes (start, stop) of it that lie in those chunks.

        Counted from the tensor's first element, in the memory that it looks at; ascending.
        """
        damaged = self._damaged(snapshot)
        found: dict[str, list[tuple[int, int]]] = {}
        for view in snapshot.layout.tensors if damaged else ():
            for _, start, stop in _within(view, damaged.get(view.extent, ())):
                ranges = found.setdefault(snapshot.layout.paths[view.slot], [])
                if ranges and ranges[-1][1] == start:
                    start = ranges.pop()[0]
                ranges.append((start, stop))
        return found

    def _damaged(self, snapshot: Snapshot) -> dict[int, list[tuple[bytes, int, int]]]:
        """Extent -> (chunk id, start, end) of those of the chunks that lie in it."""
        damaged: dict[int, list[tuple[bytes, int, int]]] = {}
        for extent, ids in snapshot.chunks.items():
            for row in np.flatnonzero(np.isin(_prefix(ids), self._prefixes)).tolist():
                chunk_id = ids[row].tobytes()
                if chunk_id in self._ids:
                    spec = snapshot.layout.extents[extent]
                    start = row * spec.chunk_bytes
                    span = (chunk_id, start, start + spec.chunk_length(row))
                    damaged.setdefault(extent, []).append(span)
        return damaged


def _prefix(ids: Ids) -> NDArray[np.uint64]:
    words: NDArray[Any] = np.ascontiguousarray(ids).view(np.uint64)
    return words[:, 0]


def _within(view: TensorView, spans: Any) -> Iterator[tuple[bytes, int, int]]:
    """Of the chunks (id, start, end) those that the bytes spanned by `view` overlap, with the
    part of the view's bytes that lies in each."""
    if 0 in view.shape:
        return
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    end = view.offset + (last + 1) * element_bytes(view.dtype)
    for chunk_id, first, stop in spans:
        if first < end and view.offset < stop:
            yield chunk_id, max(first, view.offset) - view.offset, min(stop, end) - view.offset
