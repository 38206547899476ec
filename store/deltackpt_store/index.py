"""Chunk id -> where the blob lies: the role, and the in-memory index rebuilt from pack footers.

An index is derived data. It may be missing, stale or wrong at any time; a hit is only a hint until
the record in the pack (for deduplication) or the chunk id of the decoded bytes (for reading)
confirms it.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.id_keys import IdKeys
from deltackpt_store.names import is_pack_folder, is_pack_name
from deltackpt_store.pack import (
    ENTRY_DTYPE,
    ID_BYTES,
    Location,
    PackEntries,
    pack_path,
    read_footer,
)

_log = logging.getLogger("deltackpt.store.index")
_SMALL = 32768
_GROUP = 500_000
_KEPT_BYTES = 16 * 1024 * 1024

Load = Callable[[str], PackEntries | None]
"""Reads the table of a published pack again; None when it is gone or damaged."""


class ChunkIndex(Protocol):
    """What deduplication and reading need. Implementations may be used from several threads."""

    def get(self, chunk_id: bytes) -> Location | None:
        """One location of the chunk, or None. A miss may be wrong, a hit must be confirmed."""
        ...

    def absent(self, ids: Sequence[bytes]) -> set[bytes]:
        """Those of `ids` of which nothing is known, at less cost than one by one."""
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


class _Hits(NamedTuple):
    """Records in one pack: row `rows[i]` of `entries` is of the id in row `found[i]`."""

    number: int
    entries: PackEntries
    found: NDArray[np.int64]
    rows: NDArray[np.int64]


class MemoryIndex:
    """Twelve bytes per record: a hash of its id (`IdKeys`), sorted, and its row; whole ids are
    compared in the table of the pack.

    With `load` only the tables used last are kept, `_KEPT_BYTES` of them; others are asked for
    again: ``load(name)`` reads the table from the footer, or returns None to have the pack
    forgotten, as one that is gone or damaged. What it raises goes to the caller of the look-up.
    Without `load` all tables (56 bytes per record) are kept.

    Thread-safe; tables are read while the lock is held. The packs added last, up to `_SMALL`
    records, are in a dict until a bulk look-up merges them. All locations of a chunk are kept.
    """

    def __init__(self, load: Load | None = None) -> None:
        self._lock = threading.RLock()
        self._load = load
        self._hash = IdKeys()
        self._names: list[str | None] = []
        self._numbers: dict[str, int] = {}
        self._starts = [0]  # first row of every pack, and the end of the last
        self._tables: OrderedDict[str, PackEntries] = OrderedDict()  # the one used last comes last
        self._kept = 0  # bytes of them
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._rows: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._fresh: list[NDArray[np.uint64]] = []  # of the last packs, which are not in _keys
        self._recent: dict[int, list[int]] = {}  # rows by key, of the first
        self._indexed = 0  # packs of _fresh
        self._live = 0
        self._dropped = False  # since memory was last given back

    # changing ------------------------------------------------------------------------------

    def add_pack(self, name: str, entries: PackEntries) -> None:
        with self._lock:
            if name in self._numbers:
                return
            self._numbers[name] = len(self._names)
            self._names.append(name)
            self._starts.append(self._starts[-1] + len(entries))
            self._fresh.append(self._hash.of(entries.ids))
            self._live += len(entries)
            self._keep(name, entries)

    def add_packs(self, packs: Sequence[tuple[str, PackEntries]]) -> None:
        for name, entries in packs:
            self.add_pack(name, entries)

    def drop_pack(self, name: str) -> None:
        with self._lock:
            self._drop(name)
            self._give_back()

    def _drop(self, name: str) -> None:
        number = self._numbers.pop(name, None)
        if number is None:
            return
        self._live -= self._starts[number + 1] - self._starts[number]
        self._names[number] = None
        self._dropped = True
        entries = self._tables.pop(name, None)
        self._kept -= 0 if entries is None else entries.nbytes

    def _give_back(self) -> None:
        """Give up the memory of dropped packs when it is worth it; rows get other numbers."""
        self._dropped = False
        if self._starts[-1] <= 2 * self._live + _SMALL:
            return
        self._merge()
        starts = np.array(self._starts, np.int64)
        alive = np.array([name is not None for name in self._names], np.bool_)
        lengths = np.diff(starts) * alive
        rows = self._rows.astype(np.int64)
        pack = starts.searchsorted(rows, "right") - 1
        shift = starts[:-1] - (np.cumsum(lengths) - lengths)
        left = alive[pack]
        self._keys = self._keys[left]
        self._rows = (rows - shift[pack])[left].astype(np.uint32)
        self._names = [name for name in self._names if name is not None]
        self._starts = [0, *_ints(np.cumsum(lengths[alive]))]
        self._numbers = {name: i for i, name in enumerate(self._names) if name is not None}

    def _prepare(self, *, merge: bool = False) -> None:
        """Bring packs added since the last look-up into the dict or into the sorted arrays."""
        if self._dropped:
            self._give_back()
        if self._indexed == len(self._fresh) and not (merge and self._fresh):
            return
        if merge or self._starts[-1] - len(self._keys) > _SMALL:
            self._merge()
            return
        first = len(self._names) - len(self._fresh)
        for number in range(self._indexed, len(self._fresh)):
            start = self._starts[first + number]
            for row, key in enumerate(_ints(self._fresh[number]), start):
                self._recent.setdefault(key, []).append(row)
        self._indexed = len(self._fresh)

    def _merge(self) -> None:
        if self._fresh:
            keys = np.concatenate(self._fresh)
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], (order + len(self._keys)).astype(np.uint32)
            if len(self._keys):
                at = self._keys.searchsorted(keys, "right")
                keys, rows = np.insert(self._keys, at, keys), np.insert(self._rows, at, rows)
            self._keys, self._rows = keys, rows
        self._fresh, self._recent, self._indexed = [], {}, 0

    # tables --------------------------------------------------------------------------------

    def _keep(self, name: str, entries: PackEntries) -> None:
        self._tables[name] = entries
        self._kept += entries.nbytes
        while self._load is not None and self._kept > _KEPT_BYTES and len(self._tables) > 1:
            self._kept -= self._tables.popitem(last=False)[1].nbytes

    def _table(self, name: str) -> PackEntries | None:
        """The table of a known pack, read again where need be; None when that is not possible."""
        entries = self._tables.get(name)
        if entries is not None:
            self._tables.move_to_end(name)
        elif self._load is not None:
            entries = self._load(name)
            number = self._numbers[name]
            length = self._starts[number + 1] - self._starts[number]
            if entries is None or len(entries) != length:
                self._drop(name)
                return None
            self._keep(name, entries)
        return entries

    def entries(self, name: str) -> PackEntries | None:
        """The table of one pack, or None when it is not known."""
        with self._lock:
            return self._table(name) if name in self._numbers else None

    # looking up ----------------------------------------------------------------------------

    def get(self, chunk_id: bytes) -> Location | None:
        with self._lock:
            return next(self._locations(chunk_id), None)

    def locations(self, chunk_id: bytes) -> list[Location]:
        """Every known location of the chunk, the packs added last first."""
        with self._lock:
            return list(self._locations(chunk_id))

    def _locations(self, chunk_id: bytes) -> Iterator[Location]:
        self._prepare()
        key = self._hash.one(chunk_id)
        rows: Sequence[int] = self._recent.get(key, ())
        if len(self._keys):
            at, end = (
                int(self._keys.searchsorted(np.uint64(key), side)) for side in ("left", "right")
            )
            if end > at:
                rows = (*_ints(self._rows[at:end]), *rows)
        for row in reversed(rows):
            number = bisect_right(self._starts, row) - 1
            name, local = self._names[number], row - self._starts[number]
            entries = None if name is None else self._table(name)
            if name is not None and entries is not None and entries.id(local) == chunk_id:
                yield entries.location(name, local)

    def get_many(self, ids: NDArray[np.uint8]) -> list[Location | None]:
        """One location (or None) for each row of `ids`, an array of shape (n, 32)."""
        with self._lock:
            result: list[Location | None] = [None] * len(ids)
            for number, entries, found, rows in self._search(ids):
                name = self._names[number] or ""
                for i, row in zip(_ints(found), _ints(rows), strict=True):
                    result[i] = entries.location(name, row)
            return result

    def find(self, ids: NDArray[np.uint8]) -> Found:
        """Where one record of each id lies, as arrays, for rows of `ids` (shape (n, 32))."""
        with self._lock:
            packs = np.full(len(ids), -1, np.int64)
            table = np.zeros(len(ids), ENTRY_DTYPE)
            for number, entries, found, rows in self._search(ids):
                packs[found] = number
                table[found] = entries.table[rows]
            return Found([name or "" for name in self._names], packs, table)

    def contains_many(self, ids: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """For each row of `ids` (shape (n, 32)) whether the chunk is known."""
        with self._lock:
            known = np.zeros(len(ids), np.bool_)
            for _, _, found, _ in self._search(ids):
                known[found] = True
            return known

    def absent(self, ids: Sequence[bytes]) -> set[bytes]:
        if not self._numbers or not ids:
            return set(ids)
        known = self.contains_many(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES))
        return {chunk_id for chunk_id, here in zip(ids, known.tolist(), strict=True) if not here}

    def _search(self, ids: NDArray[np.uint8]) -> Iterator[_Hits]:
        """A live record of each id that has one, pack by pack: each table is needed once."""
        self._prepare(merge=True)
        ids = np.ascontiguousarray(ids, np.uint8).reshape(-1, ID_BYTES)
        wanted = self._hash.of(ids)
        at = self._keys.searchsorted(wanted)
        open_ = np.arange(len(ids))
        starts = np.array(self._starts, np.int64)
        while True:
            inside = at < len(self._keys)
            open_, at = open_[inside], at[inside]
            same = self._keys[at] == wanted[open_]
            open_, at = open_[same], at[same]
            if not len(open_):
                return
            rows = self._rows[at].astype(np.int64)
            numbers = starts.searchsorted(rows, "right") - 1
            missed = np.ones(len(open_), np.bool_)
            for part in _by_value(numbers):
                number = int(numbers[part[0]])
                name = self._names[number]
                entries = None if name is None else self._table(name)
                if entries is None:
                    continue
                local = rows[part] - starts[number]
                hit = (entries.ids[local] == ids[open_[part]]).all(axis=1)
                missed[part[hit]] = False
                yield _Hits(number, entries, open_[part[hit]], local[hit])
            open_, at = open_[missed], at[missed] + 1

    def packs(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._numbers)

    def close(self) -> None:
        """Nothing to release."""

    def __len__(self) -> int:
        return self._live


def _by_value(numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """For each value among `numbers` (which are not none) the places where it stands."""
    order = np.argsort(numbers, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _ints(array: NDArray[np.integer[Any]]) -> list[int]:
    return cast("list[int]", array.tolist())


def list_packs(io: FileIO, root: str, refused: dict[str, OSError] | None = None) -> list[str]:
    """Sorted names of all published packs of the store at `root`.

    A listing error is raised as it is (``OSError``), never read as "no packs"; only a missing
    ``packs`` directory (nothing was ever written) counts as empty. With `refused` folders that
    cannot be listed are left out, and told there by their path in the store.
    """
    names: list[str] = []
    for prefix in filter(is_pack_folder, _listed(io, root, "packs", refused)):
        for file in _listed(io, root, f"packs/{prefix}", refused):
            name = file.removesuffix(".pack")
            if file.endswith(".pack") and is_pack_name(name) and name[:2] == prefix:
                names.append(name)
    return sorted(names)


def _listed(io: FileIO, root: str, folder: str, refused: dict[str, OSError] | None) -> list[str]:
    try:
        return io.list(f"{root}/{folder}")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and folder == "packs":
            return []
        if refused is None:
            raise
        refused[folder] = error
        return []


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
