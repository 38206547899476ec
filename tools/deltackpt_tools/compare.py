"""Two snapshots compared by their manifests alone: no stored chunk is read.

Chunk ids are compared packed, all extents of the two steps in one go, so that a step of a million
chunks takes a fraction of a second. Extents that share one array (both steps are deltas against one
base) are equal without looking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from blake3 import blake3
from deltackpt_store.manifest import Snapshot, TensorView
from numpy.typing import NDArray

from deltackpt_tools.changes import Change, TensorChange, ValueChange
from deltackpt_tools.numeric import numeric_dtype
from deltackpt_tools.tensor_bytes import is_contiguous, span, tensor_nbytes
from deltackpt_tools.value_difference import render_both
from deltackpt_tools.value_text import render

Mask = NDArray[np.bool_]

RENAME_BYTES = 64
"""Tensors of fewer bytes are not recognised by their content: many are alike."""

_ATTRIBUTES = (
    "stride", "offset", "conj", "neg", "parameter", "requires_grad", "global_shape",
    "shard_offsets",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor that both steps have and that differs: what `values` need to read it."""

    old: TensorView
    new: TensorView
    chunks: NDArray[np.int64] | None
    """Numbers of the chunks of the extent that differ; None when chunks cannot be compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    tensors: list[TensorChange]
    pairs: dict[str, Pair]
    """By path, for tensors of equal dtype and shape whose bytes differ (or may)."""
    values: list[ValueChange]
    compared: list[tuple[str, int]]
    bytes: int
    changed_bytes: int
    chunks: int
    changed_chunks: int


class ChangedChunks:
    """Which chunks differ between two snapshots, for pairs of extents. Computed in one go."""

    def __init__(self, old: Snapshot, new: Snapshot, pairs: Iterable[tuple[int, int]]) -> None:
        self._old, self._new = old, new
        self._masks: dict[tuple[int, int], Mask | None] = {}
        before: list[NDArray[np.uint64]] = []
        after: list[NDArray[np.uint64]] = []
        open_: list[tuple[tuple[int, int], int]] = []
        for pair in dict.fromkeys(pairs):
            a, b = old.chunks.get(pair[0]), new.chunks.get(pair[1])
            if a is None or b is None or a is b:
                self._masks[pair] = None
                continue
            common = min(len(a), len(b))
            before.append(_words(a[:common]))
            after.append(_words(b[:common]))
            open_.append((pair, len(b) - common))
        if not open_:
            return
        differs = (np.concatenate(before) != np.concatenate(after)).any(axis=1)
        start = 0
        for (pair, grown), words in zip(open_, before, strict=True):
            mask = differs[start : start + len(words)]
            start += len(words)
            if grown:
                mask = np.concatenate([mask, np.ones(grown, np.bool_)])
            self._masks[pair] = mask if mask.any() else None

    def mask(self, old: int, new: int) -> Mask | None:
        """One flag per chunk of the extent `new`, None when none differs."""
        return self._masks[old, new]


def _words(ids: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(ids).view(np.uint64)


@dataclass(slots=True)
class _Extents:
    """Sums over the bytes of extents that were considered, each byte once however many tensors
    look at it."""

    spans: dict[int, list[tuple[int, int]]]

    def add(self, extent: int, start: int, stop: int) -> None:
        if start < stop:
            self.spans.setdefault(extent, []).append((start, stop))

    def merged(self, extent: int) -> list[tuple[int, int]]:
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self.spans.get(extent, [])):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
            else:
                joined.append((start, stop))
        return joined

    def bytes(self) -> int:
        return sum(stop - start for extent in self.spans for start, stop in self.merged(extent))

    def chunks(self, snapshot: Snapshot) -> int:
        total = 0
        for extent in self.spans:
            spec = snapshot.layout.extents[extent]
            if not spec.inline:
                size = spec.chunk_bytes
                total += sum(
                    -(-stop // size) - start // size for start, stop in self.merged(extent)
                )
        return total


def overlap(mask: Mask, chunk: int, start: int, stop: int) -> tuple[int, int]:
    """(chunks, bytes) of the flagged chunks of `chunk` bytes that lie in bytes `start`..`stop`."""
    if start >= stop:
        return 0, 0
    first, last = start // chunk, -(-stop // chunk)
    part = mask[first:last]
    count = int(part.sum())
    size = count * chunk
    if part[0]:
        size -= start - first * chunk
    if part[-1]:
        size -= last * chunk - stop
    return count, size


def compare(
    old: Snapshot, new: Snapshot, wanted: Callable[[str], bool] | None = None
) -> Comparison:
    """Compare the leaves whose path is `wanted` (None: all)."""
    return _Compare(old, new, wanted or (lambda path: True)).result()


class _Compare:
    def __init__(self, old: Snapshot, new: Snapshot, wanted: Callable[[str], bool]) -> None:
        self._old, self._new = old, new
        self._same_layout = old.layout is new.layout or old.layout == new.layout
        self._old_views = _views(old, wanted)
        same = self._same_layout
        self._new_views = self._old_views if same else _views(new, wanted)
        self._wanted = wanted
        self._common = [path for path in self._new_views if path in self._old_views]
        self._chunks = ChangedChunks(
            old, new,
            ((self._old_views[p].extent, self._new_views[p].extent) for p in self._common),
        )  # fmt: skip
        self._whole, self._changed_inline = _Extents({}), _Extents({})
        self._flags: dict[int, Mask] = {}
        self._tensors: list[TensorChange] = []
        self._pairs: dict[str, Pair] = {}
        self._compared: list[tuple[str, int]] = []
        self._ties_old = {} if same else _ties(old)
        self._ties_new = {} if same else _ties(new)

    def result(self) -> Comparison:
        for path, view in self._new_views.items():
            self._compared.append((path, tensor_nbytes(view)))
            self._whole.add(view.extent, *span(view))
        for path in self._common:
            self._tensor(path, self._old_views[path], self._new_views[path])
        if not self._same_layout:
            self._come_and_gone()
        changed_chunks = sum(int(flags.sum()) for flags in self._flags.values())
        return Comparison(
            tensors=self._tensors,
            pairs=self._pairs,
            values=self._values(),
            compared=self._compared,
            bytes=self._whole.bytes(),
            changed_bytes=self._changed_bytes(),
            chunks=self._whole.chunks(self._new),
            changed_chunks=changed_chunks,
        )

    # tensors ---------------------------------------------------------------------------------

    def _tensor(self, path: str, old: TensorView, new: TensorView) -> None:
        attributes = () if old is new else self._attributes(path, old, new)
        reshaped = (old.dtype, old.shape) != (new.dtype, new.shape)
        count, size, chunks = self._difference(old, new)
        if not (size or attributes or reshaped):
            return
        change: Change = "changed" if size and not attributes else "reshaped"
        if size and chunks is None and not reshaped and not self._both_inline(old, new):
            change = "unproven"
        if reshaped:
            change = "reshaped"
        self._add(path, change, path, old, new, size, count, attributes)
        self._mark(new, size, chunks)
        if size and not reshaped:
            self._pairs[path] = Pair(old, new, chunks)

    def _difference(
        self, old: TensorView, new: TensorView
    ) -> tuple[int, int, NDArray[np.int64] | None]:
        """(chunks, bytes, which chunks) of the new tensor that differ, as far as ids show."""
        start, stop = span(new)
        if start == stop and span(old)[0] == span(old)[1]:
            return 0, 0, None
        if self._both_inline(old, new):
            a = self._old.inline[old.extent][slice(*span(old))]
            return 0, 0 if a == self._new.inline[new.extent][start:stop] else stop - start, None
        spec = self._new.layout.extents[new.extent]
        before = self._old.layout.extents[old.extent]
        aligned = spec.chunk_bytes == before.chunk_bytes and not (spec.inline or before.inline)
        if aligned and old.offset == new.offset and _same_order(old, new):
            mask = self._chunks.mask(old.extent, new.extent)
            if mask is None:
                return 0, 0, None
            size = spec.chunk_bytes
            count, differing = overlap(mask, size, start, stop)
            first = start // size
            rows = np.flatnonzero(mask[first : -(-stop // size)]) + first
            return count, differing, rows
        if spec.inline:
            return 0, stop - start, None
        return -(-stop // spec.chunk_bytes) - start // spec.chunk_bytes, stop - start, None

    def _both_inline(self, old: TensorView, new: TensorView) -> bool:
        layouts = self._old.layout.extents[old.extent], self._new.layout.extents[new.extent]
        return layouts[0].inline and layouts[1].inline and _same_order(old, new)

    def _attributes(self, path: str, old: TensorView, new: TensorView) -> tuple[str, ...]:
        differing = [name for name in _ATTRIBUTES if getattr(old, name) != getattr(new, name)]
        if old.shape != new.shape and "stride" in differing:
            differing.remove("stride")  # follows from the shape
        before, after = self._old.layout.extents[old.extent], self._new.layout.extents[new.extent]
        if (old.dtype, old.shape) == (new.dtype, new.shape) and before.nbytes != after.nbytes:
            differing.append("storage")
        if self._ties_old.get(path) != self._ties_new.get(path):
            differing.append("tied")
        return tuple(differing)

    def _mark(self, view: TensorView, size: int, chunks: NDArray[np.int64] | None) -> None:
        """Count what differs towards the totals, once for all tensors that share it."""
        if not size:
            return
        spec = self._new.layout.extents[view.extent]
        start, stop = span(view)
        if spec.inline:
            self._changed_inline.add(view.extent, start, stop)
            return
        if chunks is None:
            chunks = np.arange(start // spec.chunk_bytes, -(-stop // spec.chunk_bytes))
        flags = self._flags.get(view.extent)
        if flags is None:
            flags = self._flags[view.extent] = np.zeros(spec.chunk_count, np.bool_)
        flags[chunks] = True

    def _changed_bytes(self) -> int:
        total = self._changed_inline.bytes()
        for extent, flags in self._flags.items():
            size = self._new.layout.extents[extent].chunk_bytes
            for start, stop in self._whole.merged(extent):
                total += overlap(flags, size, start, stop)[1]
        return total

    def _add(
        self,
        path: str,
        change: Change,
        old_path: str | None,
        old: TensorView | None,
        new: TensorView | None,
        size: int,
        chunks: int,
        attributes: Sequence[str] = (),
    ) -> None:
        view, snapshot = (new, self._new) if new is not None else (old, self._old)
        assert view is not None
        spec = snapshot.layout.extents[view.extent]
        start, stop = span(view)
        whole = 0
        if not spec.inline and start < stop:
            whole = -(-stop // spec.chunk_bytes) - start // spec.chunk_bytes
        self._tensors.append(
            TensorChange(
                path=path,
                change=change,
                old_path=old_path,
                old_dtype=None if old is None else old.dtype,
                dtype=None if new is None else new.dtype,
                old_shape=None if old is None else old.shape,
                shape=None if new is None else new.shape,
                attributes=tuple(attributes),
                bytes=tensor_nbytes(view),
                changed_bytes=min(size, tensor_nbytes(view)),
                chunks=whole,
                changed_chunks=chunks,
                old_value=None if old is None else _scalar(self._old, old),
                new_value=None if new is None else _scalar(self._new, new),
            )
        )

    def _come_and_gone(self) -> None:
        gone = {p: v for p, v in self._old_views.items() if p not in self._new_views}
        come = {p: v for p, v in self._new_views.items() if p not in self._old_views}
        for old_path, path in _renames(self._old, gone, self._new, come):
            old, new = gone.pop(old_path), come.pop(path)
            attributes = self._attributes(path, old, new)
            attributes = tuple(name for name in attributes if name not in ("tied", "storage"))
            self._add(path, "renamed", old_path, old, new, 0, 0, attributes)
        for path, view in gone.items():
            size = tensor_nbytes(view)
            self._add(path, "removed", path, view, None, size, 0)
            self._compared.append((path, size))
        for path, view in come.items():
            start, stop = span(view)
            spec = self._new.layout.extents[view.extent]
            rows = np.arange(start // spec.chunk_bytes, -(-stop // spec.chunk_bytes))
            self._add(path, "added", None, None, view, tensor_nbytes(view),
                      0 if spec.inline else len(rows))  # fmt: skip
            self._mark(view, tensor_nbytes(view), rows if len(rows) else None)

    # values ----------------------------------------------------------------------------------

    def _values(self) -> list[ValueChange]:
        if self._same_layout:
            paths = self._old.layout.paths
            return [
                ValueChange(paths[slot], *render_both(old, self._new.objects[slot]))
                for slot, old in self._old.objects.items()
                if old != self._new.objects[slot] and self._wanted(paths[slot])
            ]
        before, after = _documents(self._old, self._wanted), _documents(self._new, self._wanted)
        return [
            ValueChange(path, *_texts(old, new))
            for path in dict.fromkeys([*before, *after])
            if (old := before.get(path)) != (new := after.get(path))
        ]


def _texts(old: bytes | None, new: bytes | None) -> tuple[str | None, str | None]:
    if old is None or new is None:
        return None if old is None else render(old), None if new is None else render(new)
    return render_both(old, new)


def _scalar(snapshot: Snapshot, view: TensorView) -> str | None:
    """The value of a tensor of one element that lies in the manifest."""
    data = snapshot.inline.get(view.extent)
    dtype = numeric_dtype(view.dtype)
    if data is None or dtype is None or prod(view.shape) != 1 or view.conj or view.neg:
        return None
    start, stop = span(view)
    return str(np.frombuffer(data[start:stop], dtype)[0].item())


def _same_order(old: TensorView, new: TensorView) -> bool:
    """Whether equal bytes at equal places mean equal elements."""
    if (old.conj, old.neg) != (new.conj, new.neg):
        return False
    return (old.shape, old.stride) == (new.shape, new.stride) or (
        is_contiguous(old) and is_contiguous(new)
    )


def _views(snapshot: Snapshot, wanted: Callable[[str], bool]) -> dict[str, TensorView]:
    paths = snapshot.layout.paths
    return {paths[v.slot]: v for v in snapshot.layout.tensors if wanted(paths[v.slot])}


def _documents(snapshot: Snapshot, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    paths = snapshot.layout.paths
    return {paths[s]: d for s, d in sorted(snapshot.objects.items()) if wanted(paths[s])}


def _ties(snapshot: Snapshot) -> dict[str, frozenset[str]]:
    """For tensors that share bytes with others: the paths of all of them."""
    groups: dict[int, list[str]] = {}
    for view in snapshot.layout.tensors:
        groups.setdefault(view.extent, []).append(snapshot.layout.paths[view.slot])
    return {path: frozenset(g) for g in groups.values() if len(g) > 1 for path in g}


def _content(snapshot: Snapshot, view: TensorView) -> bytes:
    spec = snapshot.layout.extents[view.extent]
    hasher = blake3(
        f"{view.dtype} {view.shape} {view.stride} {view.offset} {view.conj} {view.neg} "
        f"{spec.nbytes} {spec.chunk_bytes} ".encode()
    )
    data = snapshot.chunks.get(view.extent)
    return hasher.update(
        snapshot.inline[view.extent] if data is None else data.reshape(-1).data
    ).digest()


def _renames(
    old: Snapshot, gone: dict[str, TensorView], new: Snapshot, come: dict[str, TensorView]
) -> list[tuple[str, str]]:
    """(old path, new path) of tensors with equal content; of several, those whose names end most
    alike."""
    if not gone or not come:
        return []
    by_content: dict[bytes, list[str]] = {}
    for path, view in gone.items():
        if tensor_nbytes(view) >= RENAME_BYTES:
            by_content.setdefault(_content(old, view), []).append(path)
    found: list[tuple[str, str]] = []
    for path, view in come.items():
        if tensor_nbytes(view) < RENAME_BYTES:
            continue
        candidates = by_content.get(_content(new, view))
        if candidates:
            best = max(candidates, key=lambda candidate: _alike(candidate, path))
            candidates.remove(best)
            found.append((best, path))
    return found


def _alike(a: str, b: str) -> int:
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count
