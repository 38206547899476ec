"""All records of a store's packs as arrays, for those who go through a whole store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.manifest import ID_BYTES
from deltackpt_store.pack import pack_path, read_footer
from deltackpt_store.store import Store

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Ids = NDArray[np.uint8]


class Coded(NamedTuple):
    """Records that need other chunks: their rows, ascending, and the groups of what they need."""

    rows: Ints
    first: Ints
    """`needs[first[i] : first[i + 1]]` belong to `rows[i]`."""
    needs: Ints
    """Groups; -1 for a chunk that no pack holds."""


class Catalogue:
    """All records of the store's packs, grouped by chunk.

    A *row* is a record, in the order of packs and footers; a *group* all records of one chunk.
    Groups are numbered in the order of chunk ids' first eight bytes.
    """

    def __init__(
        self, store: Store, names: Sequence[str], told: Callable[[], None] | None = None
    ) -> None:
        """Read the footers of the packs, calling `told` after each.

        CorruptionError, StorageError when one is unreadable.
        """
        self.names = list(names)
        self.sizes: list[int] = []
        tables: list[Ids] = []
        stored: list[NDArray[np.uint32]] = []
        coded: list[Ints] = []
        counts: list[NDArray[np.uint8]] = []
        refs: list[Ids] = []
        lengths: list[int] = []
        total = 0
        for name in self.names:
            footer = read_footer(store.io, pack_path(store.path, name), store_uuid=store.uuid)
            if told is not None:
                told()
            entries = footer.entries
            tables.append(np.ascontiguousarray(entries.ids))
            stored.append(entries.table["stored"].astype(np.uint32))
            if len(entries.refs):
                rows = np.flatnonzero(entries.table["refs"])
                coded.append(rows + total)
                counts.append(entries.table["refs"][rows])
                refs.append(entries.refs)
            self.sizes.append(footer.size)
            lengths.append(len(entries))
            total += len(entries)
        self.first = np.cumsum([0, *lengths], dtype=np.int64)
        self.ids = _joined(tables, (0, ID_BYTES), np.uint8)
        tables.clear()
        self.stored = _joined(stored, (0,), np.uint32)
        self._group()
        number = _joined(counts, (0,), np.uint8)
        self.coded = Coded(
            _joined(coded, (0,), np.int64),
            np.concatenate([[0], np.cumsum(number, dtype=np.int64)]),
            self.find(_joined(refs, (0, ID_BYTES), np.uint8)),
        )

    def _group(self) -> None:
        keys = _prefixes(self.ids)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        self.order = order.astype(np.uint32)
        del order
        same = keys[1:] == keys[:-1]
        if same.any():
            self._sort_collisions(keys, same)
            at = np.flatnonzero(same)
            left, right = self.order[at], self.order[at + 1]
            same[at] = (self.ids[left] == self.ids[right]).all(axis=1)
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), np.bool_), ~same]))
        self.start = np.append(starts, len(keys)).astype(np.uint32)
        self._keys = keys[starts]

    def _sort_collisions(self, keys: NDArray[np.uint64], same: Bools) -> None:
        """Put equal ids next to each other where different ids begin with the same bytes."""
        at = np.flatnonzero(same)
        left, right = self.order[at], self.order[at + 1]
        if (self.ids[left] == self.ids[right]).all():
            return
        mixed = np.unique(keys[at])
        for key in mixed.tolist():
            low = int(np.searchsorted(keys, np.uint64(key)))
            high = int(np.searchsorted(keys, np.uint64(key), "right"))
            rows: list[int] = self.order[low:high].tolist()
            self.order[low:high] = [
                row for _, row in sorted((self.ids[row].tobytes(), row) for row in rows)
            ]

    @property
    def groups(self) -> int:
        return len(self._keys)

    def find(self, ids: Ids) -> Ints:
        """Group of each id (rows of shape (n, 32)); -1 for one that no pack holds."""
        result = np.full(len(ids), -1, np.int64)
        if not len(ids) or not self.groups:
            return result
        wanted = _prefixes(ids)
        at = np.searchsorted(self._keys, wanted)
        open_ = np.arange(len(ids))
        while len(open_):
            inside = at < self.groups
            open_, at = open_[inside], at[inside]
            near = self._keys[at] == wanted[open_]
            open_, at = open_[near], at[near]
            hit = (self.ids[self.order[self.start[at]]] == ids[open_]).all(axis=1)
            result[open_[hit]] = at[hit]
            open_, at = open_[~hit], at[~hit] + 1
        return result

    def pack_of(self, rows: NDArray[Any]) -> Ints:
        """Number of the pack that each row lies in."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def rows_of(self, group: int) -> Ints:
        """All records of a chunk."""
        return self.order[self.start[group] : self.start[group + 1]].astype(np.int64)

    def holders(self, chunk_ids: Collection[bytes]) -> set[str]:
        """Names of all packs with a record of any of these chunks."""
        table = np.frombuffer(b"".join(chunk_ids), np.uint8).reshape(-1, ID_BYTES)
        groups = self.find(table)
        rows = [self.rows_of(group) for group in groups[groups >= 0].tolist()]
        return {self.names[p] for r in rows for p in self.pack_of(r).tolist()}


def _joined(arrays: list[Any], empty: tuple[int, ...], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(empty, dtype)


def _prefixes(ids: Ids) -> NDArray[np.uint64]:
    return np.ascontiguousarray(ids[:, :8]).view(">u8").reshape(-1).astype(np.uint64)
