"""All records of a store's packs as arrays, for those who go through a whole store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.id_keys import IdKeys, Keys
from deltackpt_store.manifest import ID_BYTES
from deltackpt_store.pack import PackFooter, pack_path, read_footer
from deltackpt_store.store import Store

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Ids = NDArray[np.uint8]

_T = TypeVar("_T", bound=np.generic)
_BLOCK = 1 << 16


class Coded(NamedTuple):
    """Records that need other chunks: their rows, ascending, and the groups of what they need."""

    rows: NDArray[np.uint32]
    first: NDArray[np.uint32]
    """`needs[first[i] : first[i + 1]]` belong to `rows[i]`."""
    needs: NDArray[np.int32]
    """Groups; -1 for a chunk that no pack holds."""


class Catalogue:
    """All records of the store's packs, grouped by chunk.

    A *row* is a record, in the order of packs and footers; a *group* all records of one chunk.
    Groups are numbered in the order of a hash of the chunk ids (`IdKeys`). Of an id this is kept,
    and its first eight bytes: what does not differ in them passes for one chunk. (Whoever deletes
    reads whole ids before; see `proof`.)

    Memory: 28 bytes per record, 13 more per record that is coded against one other.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        told: Callable[[], None] | None = None,
        *,
        ids: bool = False,
    ) -> None:
        """Read the footers of the packs, calling `told` after each. `ids`: keep whole ids too, 32
        bytes per record.

        CorruptionError, StorageError when one is unreadable.
        """
        self._store = store
        self._hash = IdKeys()
        self.names = list(names)
        self.sizes: list[int] = []
        self._ids: Ids | None = None
        keys: list[Keys] = []
        checks: list[Keys] = []
        stored: list[NDArray[np.uint32]] = []
        whole: list[Ids] = []
        lengths: list[int] = []
        coded: list[int] = []
        for number, name in enumerate(self.names):
            footer = self._footer(name)
            if told is not None:
                told()
            entries = footer.entries
            key, check = self._words(entries.ids)
            keys.append(key)
            checks.append(check)
            stored.append(entries.table["stored"].astype(np.uint32))
            if ids:
                whole.append(np.ascontiguousarray(entries.ids))
            if len(entries.refs):
                coded.append(number)
            self.sizes.append(footer.size)
            lengths.append(len(entries))
        self.first = np.cumsum([0, *lengths], dtype=np.int64)
        if ids:
            self._ids = _joined(whole, (0, ID_BYTES), np.uint8)
        self.stored = _joined(stored, (0,), np.uint32)
        self._group(_joined(keys, (0,), np.uint64), _joined(checks, (0,), np.uint64))
        self.coded = self._coded(coded)

    def _footer(self, name: str) -> PackFooter:
        store = self._store
        return read_footer(store.io, pack_path(store.path, name), store_uuid=store.uuid)

    def _words(self, ids: Ids) -> tuple[Keys, Keys]:
        """The two numbers that are kept of each id: (hash of all of it, first eight bytes)."""
        ids = np.ascontiguousarray(ids)
        begin = ids.view(np.uint64).reshape(-1, ID_BYTES // 8)[:, 0]
        return self._hash.of(ids), np.ascontiguousarray(begin)

    def _group(self, keys: Keys, checks: Keys) -> None:
        self.order = np.argsort(keys, kind="stable").astype(np.uint32)
        keys, checks = keys[self.order], checks[self.order]
        same = keys[1:] == keys[:-1]
        if same.any():
            self._sort_collisions(keys, checks, same)
            at = np.flatnonzero(same)
            same[at] = checks[at] == checks[at + 1]
            starts = np.flatnonzero(np.concatenate([np.ones(1, np.bool_), ~same]))
            keys, checks = keys[starts], checks[starts]
            self.start = np.append(starts, len(self.order)).astype(np.uint32)
        else:
            self.start = np.arange(len(keys) + 1, dtype=np.uint32)
        self._keys, self._checks = keys, checks

    def _sort_collisions(self, keys: Keys, checks: Keys, same: Bools) -> None:
        """Put equal ids next to each other where different ids have the same hash."""
        at = np.flatnonzero(same)
        for key in np.unique(keys[at[checks[at] != checks[at + 1]]]).tolist():
            low = int(np.searchsorted(keys, np.uint64(key)))
            high = int(np.searchsorted(keys, np.uint64(key), "right"))
            by_check = np.argsort(checks[low:high], kind="stable")
            self.order[low:high] = self.order[low:high][by_check]
            checks[low:high] = checks[low:high][by_check]

    def _coded(self, packs: Sequence[int]) -> Coded:
        """What the records of these packs need: their footers are read once more."""
        rows: list[NDArray[np.uint32]] = []
        counts: list[NDArray[np.uint8]] = []
        needs: list[NDArray[np.int32]] = []
        for number in packs:
            entries = self._footer(self.names[number]).entries
            mine = np.flatnonzero(entries.table["refs"])
            rows.append((mine + self.first[number]).astype(np.uint32))
            counts.append(entries.table["refs"][mine])
            needs.append(self.find(entries.refs).astype(np.int32))
        first = np.cumsum(_joined(counts, (0,), np.uint8), dtype=np.uint32)
        return Coded(
            _joined(rows, (0,), np.uint32),
            np.concatenate([np.zeros(1, np.uint32), first]),
            _joined(needs, (0,), np.int32),
        )

    @property
    def ids(self) -> Ids:
        """Whole ids by row; only when they were asked for."""
        assert self._ids is not None
        return self._ids

    @property
    def records(self) -> int:
        return len(self.order)

    @property
    def groups(self) -> int:
        return len(self._keys)

    def find(self, ids: Ids) -> Ints:
        """Group of each id (rows of shape (n, 32)); -1 for one that no pack holds."""
        result = np.full(len(ids), -1, np.int64)
        for begin in range(0, len(ids) if self.groups else 0, _BLOCK):
            wanted, check = self._words(ids[begin : begin + _BLOCK])
            at = np.searchsorted(self._keys, wanted)
            open_ = np.arange(len(wanted))
            while len(open_):
                inside = at < self.groups
                open_, at = open_[inside], at[inside]
                near = self._keys[at] == wanted[open_]
                open_, at = open_[near], at[near]
                hit = self._checks[at] == check[open_]
                result[begin + open_[hit]] = at[hit]
                open_, at = open_[~hit], at[~hit] + 1
        return result

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(first, end) of parts of all groups, to go through them in bounded memory."""
        for first in range(0, self.groups, _BLOCK):
            yield first, min(first + _BLOCK, self.groups)

    def per_row(self, by_group: NDArray[_T]) -> NDArray[_T]:
        """For each row the value that `by_group` has for its group."""
        result = np.empty(self.records, by_group.dtype)
        for first, end in self.blocks():
            counts = np.diff(self.start[first : end + 1])
            rows = self.order[self.start[first] : self.start[end]]
            result[rows] = np.repeat(by_group[first:end], counts)
        return result

    def ids_of(self, rows: Ints) -> Ids:
        """Whole ids of these rows, shape (n, 32), read from their footers.

        StorageError, CorruptionError.
        """
        result = np.empty((len(rows), ID_BYTES), np.uint8)
        packs = self.pack_of(rows)
        for pack in map(int, np.unique(packs)):
            mine = np.flatnonzero(packs == pack)
            local = rows[mine] - self.first[pack]
            result[mine] = self._footer(self.names[pack]).entries.ids[local]
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
    """One array of all, which are given up."""
    result = np.concatenate(arrays) if arrays else np.empty(empty, dtype)
    arrays.clear()
    return result
