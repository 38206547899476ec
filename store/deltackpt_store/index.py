"""Chunk id -> where the blob lies: the role, and the in-memory index rebuilt from pack footers.

An index is derived data. It may be missing, stale or wrong at any time; a hit is only a hint until
the record in the pack (for deduplication) or the chunk id of the decoded bytes (for reading)
confirms it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.names import is_pack_name
from deltackpt_store.pack import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    ID_BYTES,
    Location,
    PackEntries,
    pack_path,
    read_footer,
)

__all__ = ["ChunkIndex", "Location", "MemoryIndex", "list_packs", "refresh"]

_log = logging.getLogger("deltackpt.store.index")
_SMALL = 65536
_GROUP = 500_000


class ChunkIndex(Protocol):
    """What deduplication and reading need. Implementations may be used from several threads."""

    def get(self, chunk_id: bytes) -> Location | None:
        """One location of the chunk, or None. A miss may be wrong, a hit must be confirmed."""
        ...

    def add_pack(self, name: str, entries: PackEntries) -> None:
        """Learn all records of a published pack. Adding a known name again changes nothing."""
        ...

    def add_packs(self, packs: Sequence[tuple[str, PackEntries]]) -> None:
        """`add_pack` for many."""
        ...

    def drop_pack(self, name: str) -> None:
        """Forget a pack; unknown names are ignored."""
        ...

    def packs(self) -> frozenset[str]: ...

    def close(self) -> None:
        """Release files and locks held. The index is not used afterwards."""
        ...

    def __len__(self) -> int:
        """Number of records known (a chunk held by two packs may count twice)."""
        ...


class Found(NamedTuple):
    """Answer to a bulk look-up: row i is about id i.

    `packs[i]` numbers a name in `names`, or is -1 when the chunk is unknown; `entries[i]` is its
    row in the table of that pack (`ENTRY_DTYPE`).
    """

    names: list[str]
    packs: NDArray[np.int64]
    entries: NDArray[Any]


class MemoryIndex:
    """Sorted arrays of about 68 bytes per record, plus a small dict for what came last.

    Thread-safe. Bulk additions are merged at the next look-up; building a million records from
    their footers takes well under a second. All locations of a chunk are kept.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: list[str | None] = []
        self._numbers: dict[str, int] = {}
        self._entries: list[PackEntries] = []
        self._merged = 0  # packs [0, _merged) are in the sorted arrays
        self._indexed = 0  # packs [_merged, _indexed) are in the dict
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._rows: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._table: NDArray[Any] = np.empty(0, ENTRY_DTYPE)
        self._first: NDArray[np.int64] = np.empty(0, np.int64)  # row of each pack in _table
        self._recent: dict[bytes, list[tuple[int, int]]] = {}
        self._live = 0

    # changing ------------------------------------------------------------------------------

    def add_pack(self, name: str, entries: PackEntries) -> None:
        with self._lock:
            if name in self._numbers:
                return
            self._numbers[name] = len(self._names)
            self._names.append(name)
            self._entries.append(entries)
            self._live += len(entries)

    def add_packs(self, packs: Sequence[tuple[str, PackEntries]]) -> None:
        for name, entries in packs:
            self.add_pack(name, entries)

    def drop_pack(self, name: str) -> None:
        with self._lock:
            number = self._numbers.pop(name, None)
            if number is None:
                return
            self._live -= len(self._entries[number])
            self._names[number] = None
            total = sum(len(e) for e in self._entries)
            if total > 2 * self._live + _SMALL:
                self._rebuild()

    def _rebuild(self) -> None:
        """Start again from the packs that are left, giving up the memory of dropped ones."""
        kept = [(n, e) for n, e in zip(self._names, self._entries, strict=True) if n is not None]
        self._names = [n for n, _ in kept]
        self._entries = [e for _, e in kept]
        self._numbers = {n: i for i, (n, _) in enumerate(kept)}
        self._merged = self._indexed = 0
        self._recent = {}
        self._keys = np.empty(0, np.uint64)
        self._rows = np.empty(0, np.uint32)
        self._table = np.empty(0, ENTRY_DTYPE)
        self._first = np.empty(0, np.int64)

    def _prepare(self, *, merge: bool = False) -> None:
        """Bring packs added since the last look-up into the dict or into the sorted arrays."""
        packs = len(self._names)
        if self._indexed == packs and not (merge and self._merged < packs):
            return
        fresh = sum(len(e) for e in self._entries[self._merged :])
        if merge or fresh > max(_SMALL, len(self._table) // 8):
            self._merge()
            return
        for number in range(self._indexed, packs):
            entries = self._entries[number]
            ids = entries.ids.tobytes()
            for row in range(len(entries)):
                key = ids[row * ID_BYTES : (row + 1) * ID_BYTES]
                self._recent.setdefault(key, []).append((number, row))
        self._indexed = packs

    def _merge(self) -> None:
        tables = [e.table for e in self._entries]
        lengths = np.array([len(t) for t in tables], np.int64)
        self._first = np.cumsum(lengths) - lengths
        self._table = np.concatenate(tables) if tables else np.empty(0, ENTRY_DTYPE)
        # Views into the one big table replace the packs' own arrays: no row is held twice.
        self._entries = [
            PackEntries(self._table[start : start + n], e.refs)
            for start, n, e in zip(_ints(self._first), _ints(lengths), self._entries, strict=True)
        ]
        prefix = _prefixes(self._table)
        order = np.argsort(prefix, kind="stable").astype(np.uint32)
        self._keys = prefix[order]
        self._rows = order
        self._merged = self._indexed = len(self._names)
        self._recent = {}

    # looking up ----------------------------------------------------------------------------

    def get(self, chunk_id: bytes) -> Location | None:
        for location in self.locations(chunk_id):
            return location
        return None

    def locations(self, chunk_id: bytes) -> list[Location]:
        """Every known location of the chunk, the packs added last first."""
        with self._lock:
            self._prepare()
            found: list[Location] = []
            for number, row in reversed(self._recent.get(chunk_id) or []):
                name = self._names[number]
                if name is not None:
                    found.append(self._entries[number].location(name, row))
            if len(self._keys):
                key = np.uint64(int.from_bytes(chunk_id[:8], "big"))
                at = int(self._keys.searchsorted(key))
                matches: list[int] = []
                while at < len(self._keys) and self._keys[at] == key:
                    matches.append(int(self._rows[at]))
                    at += 1
                for row in reversed(matches):
                    location = self._merged_location(row, chunk_id)
                    if location is not None:
                        found.append(location)
            return found

    def _merged_location(self, row: int, chunk_id: bytes) -> Location | None:
        number = int(self._first.searchsorted(row, "right")) - 1
        name = self._names[number]
        entries = self._entries[number]
        local = row - int(self._first[number])
        if name is None or entries.id(local) != chunk_id:
            return None
        return entries.location(name, local)

    def get_many(self, ids: NDArray[np.uint8]) -> list[Location | None]:
        """One location (or None) for each row of `ids`, an array of shape (n, 32)."""
        with self._lock:
            rows = self._find(ids)
            result: list[Location | None] = [None] * len(rows)
            hits = np.flatnonzero(rows >= 0)
            numbers = self._first.searchsorted(rows[hits], "right") - 1
            within = rows[hits] - self._first[numbers]
            for i, number, local in zip(_ints(hits), _ints(numbers), _ints(within), strict=True):
                name = self._names[number]
                if name is not None:
                    result[i] = self._entries[number].location(name, local)
            return result

    def find(self, ids: NDArray[np.uint8]) -> Found:
        """Where one record of each id lies, as arrays, for rows of `ids` (shape (n, 32))."""
        with self._lock:
            rows = self._find(ids)
            packs = self._first.searchsorted(rows, "right") - 1
            entries = np.zeros(len(rows), ENTRY_DTYPE)
            known = rows >= 0
            entries[known] = self._table[rows[known]]
            return Found([name or "" for name in self._names], packs, entries)

    def contains_many(self, ids: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """For each row of `ids` (shape (n, 32)) whether the chunk is known."""
        with self._lock:
            return self._find(ids) >= 0

    def _find(self, ids: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Row in the merged table of a live record of each id, or -1."""
        self._prepare(merge=True)
        ids = np.ascontiguousarray(ids, np.uint8).reshape(-1, ID_BYTES)
        result = np.full(len(ids), -1, np.int64)
        if not len(self._keys) or not len(ids):
            return result
        wanted = ids.view(">u8")[:, 0].astype(np.uint64)
        at = self._keys.searchsorted(wanted)
        open_ = np.arange(len(ids))
        alive = np.array([name is not None for name in self._names], dtype=np.bool_)
        while len(open_):
            inside = at < len(self._keys)
            open_, at = open_[inside], at[inside]
            same = self._keys[at] == wanted[open_]
            open_, at = open_[same], at[same]
            rows = self._rows[at].astype(np.int64)
            hit = (self._table["id"][rows] == ids[open_]).all(axis=1)
            hit &= alive[self._first.searchsorted(rows, "right") - 1]
            result[open_[hit]] = rows[hit]
            open_, at = open_[~hit], at[~hit] + 1
        return result

    def packs(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._numbers)

    def close(self) -> None:
        """Nothing to release."""

    def entries(self, name: str) -> PackEntries | None:
        """The table of one pack, or None when it is not known."""
        with self._lock:
            number = self._numbers.get(name)
            return None if number is None else self._entries[number]

    def __len__(self) -> int:
        return self._live


def _ints(array: NDArray[np.integer[Any]]) -> list[int]:
    return cast("list[int]", array.tolist())


def _prefixes(table: NDArray[Any]) -> NDArray[np.uint64]:
    """The first eight bytes of every id as a number that sorts like the bytes."""
    if not len(table):
        return np.empty(0, np.uint64)
    raw = table.view(np.uint8).reshape(-1, ENTRY_BYTES)
    return np.ascontiguousarray(raw[:, :8]).view(">u8")[:, 0].astype(np.uint64)


def list_packs(io: FileIO, root: str) -> list[str]:
    """Sorted names of all published packs of the store at `root`.

    A listing error is raised as it is (``OSError``), never read as "no packs"; only a missing
    ``packs`` directory (nothing was ever written) counts as empty.
    """
    top = f"{root}/packs"
    try:
        prefixes = io.list(top)
    except FileNotFoundError:
        return []
    names: list[str] = []
    for prefix in prefixes:
        if len(prefix) != 2:
            continue
        for file in io.list(f"{top}/{prefix}"):
            name = file.removesuffix(".pack")
            if file.endswith(".pack") and is_pack_name(name) and name[:2] == prefix:
                names.append(name)
    return sorted(names)


def refresh(
    index: ChunkIndex,
    io: FileIO,
    root: str,
    names: Iterable[str],
    *,
    store_uuid: bytes | None = None,
) -> list[DeltackptError]:
    """Make `index` know exactly the packs `names`: add missing ones from footers, drop the rest.

    A pack whose footer cannot be read is left out, logged, and its error is in the result.
    """
    wanted = set(names)
    known = index.packs()
    for name in sorted(known - wanted):
        index.drop_pack(name)
    errors: list[DeltackptError] = []
    read: list[tuple[str, PackEntries]] = []
    records = 0
    for name in sorted(wanted - known):
        try:
            footer = read_footer(io, pack_path(root, name), store_uuid=store_uuid)
        except DeltackptError as error:
            _log.warning("pack %s is left out of the index: %s", name, error)
            errors.append(error)
        else:
            read.append((name, footer.entries))
            records += len(footer.entries)
            if records >= _GROUP:
                index.add_packs(read)
                read, records = [], 0
    if read:
        index.add_packs(read)
    return errors
