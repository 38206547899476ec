"""The chunk index as a local, sealed, disposable LMDB cache.

It saves reading every footer when a store is opened for writing. Nothing depends on it: it may be
deleted at any time, and when it cannot be opened, breaks, or holds a wrong value, it is given up
with one warning and an in-memory index goes on. How the file is guarded is in `lmdb_env`.

Keys and values (little-endian)::

    chunk id (32 B)     pack number u32, codec u8, references u8, 0 u16, offset u64, header u32,
                        stored u32, raw u32, check u32 (xxh32 of key and all before), references
    0 (8 B) "p" name    pack number u32, records u32 of the pack called so
    0 (8 B) "n" u32     name of the pack with that number
    0 (8 B) "next"      next pack number u32
    0 (8 B) "garbage"   records of dropped packs u32
    0 (8 B) "live"      records of the other packs u32
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import lmdb
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from xxhash import xxh32_intdigest

from deltackpt_store import lmdb_env
from deltackpt_store.errors import CorruptionError, DeltackptError, StateError
from deltackpt_store.fileio import FileIO
from deltackpt_store.index import MemoryIndex, list_packs, refresh
from deltackpt_store.localfs import index_directory
from deltackpt_store.oserror import storage_error
from deltackpt_store.pack import ID_BYTES, Location, PackEntries, pack_path, read_footer

_log = logging.getLogger("deltackpt.store.index")

MAP_BYTES = 64 * 1024 * 1024
MAX_BYTES = 16 * 1024 * 1024 * 1024
_FORMAT = 2
_VALUE = struct.Struct("<IBBHQIIII")
_CHECKED = _VALUE.size - 4
_U32 = struct.Struct("<I")
_PACK = struct.Struct("<II")
_PACK_KEY = bytes(8) + b"p"
_NAME_KEY = bytes(8) + b"n"
_NEXT_KEY = bytes(8) + b"next"
_GARBAGE_KEY = bytes(8) + b"garbage"
_LIVE_KEY = bytes(8) + b"live"
_BATCH = 50_000
_SWEEP = 65_536
_VALUE_DTYPE = np.dtype(
    [
        ("id", "u1", (ID_BYTES,)), ("pack", "<u4"), ("codec", "u1"), ("refs", "u1"),
        ("zero", "<u2"), ("offset", "<u8"), ("header", "<u4"), ("stored", "<u4"),
        ("raw", "<u4"), ("check", "<u4"),
    ]
)  # fmt: skip

_T = TypeVar("_T")
_Txn: TypeAlias = "lmdb.Transaction[bytes]"


class LmdbIndex:
    """See the module. Thread-safe; usable only in the process that opened it (StateError)."""

    def __init__(
        self,
        directory: str,
        *,
        store_uuid: bytes,
        generation: int = 0,
        map_bytes: int = MAP_BYTES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Open or create the index in `directory`, which must be on a local file system.

        Contents of an index without a matching seal are thrown away. `generation` is that of the
        store's garbage collection: another one empties the index. Raises StorageError.
        """
        identity = f"{_FORMAT}-{store_uuid.hex()}-{generation}"
        self._max_bytes = max_bytes
        self._environment = lmdb_env.acquire(directory, identity, map_bytes, _digest)
        self._fallback: MemoryIndex | None = None
        self._closed = False

    def get(self, chunk_id: bytes) -> Location | None:
        def look(txn: _Txn) -> Location | None:
            value = txn.get(chunk_id)
            if value is None:
                return None
            pack, codec, nrefs, _, offset, header, stored, raw, check = _VALUE.unpack_from(value)
            refs = value[_VALUE.size :]
            covered = chunk_id + value[:_CHECKED] + refs
            if check != xxh32_intdigest(covered) or len(refs) != nrefs * ID_BYTES:
                raise CorruptionError("an index entry does not match its checksum", kind="index")
            name = txn.get(_NAME_KEY + _U32.pack(pack))
            if name is None:
                return None  # the pack was dropped
            ids = tuple(refs[i : i + ID_BYTES] for i in range(0, len(refs), ID_BYTES))
            return Location(name.decode(), offset, header, stored, raw, codec, ids)

        return self._read(look, lambda memory: memory.get(chunk_id))

    def absent(self, ids: Sequence[bytes]) -> set[bytes]:
        return self._read(
            lambda txn: {chunk_id for chunk_id in ids if txn.get(chunk_id) is None},
            lambda memory: memory.absent(ids),
        )

    def packs(self) -> frozenset[str]:
        return self._read(lambda txn: frozenset(n for n, _, _ in _packs(txn)), MemoryIndex.packs)

    def __len__(self) -> int:
        return self._read(lambda txn: _get_u32(txn, _LIVE_KEY), len)

    def add_pack(self, name: str, entries: PackEntries) -> None:
        self.add_packs([(name, entries)])

    def add_packs(self, packs: Sequence[tuple[str, PackEntries]]) -> None:
        """Learn many packs at once; far cheaper than one by one."""

        def start(txn: _Txn) -> list[tuple[str, PackEntries, int]]:
            new = [p for p in packs if txn.get(_PACK_KEY + p[0].encode()) is None]
            first = _get_u32(txn, _NEXT_KEY)
            txn.put(_NEXT_KEY, _U32.pack(first + len(new)))
            return [(name, entries, first + i) for i, (name, entries) in enumerate(new)]

        def finish(txn: _Txn, added: list[tuple[str, PackEntries, int]]) -> None:
            # Entries count only from here on: a pack is known whole or not at all.
            live = _get_u32(txn, _LIVE_KEY)
            for name, entries, number in added:
                txn.put(_NAME_KEY + _U32.pack(number), name.encode())
                known = txn.replace(_PACK_KEY + name.encode(), _PACK.pack(number, len(entries)))
                if known is None:  # else another process has just added it, too
                    live += len(entries)
            txn.put(_LIVE_KEY, _U32.pack(live))

        def add() -> None:
            self._environment.env.reader_check()
            added = self._write(start)
            rows = _rows(added)
            for at in range(0, len(rows), _BATCH):
                batch = rows[at : at + _BATCH]
                self._write(lambda txn, batch=batch: txn.cursor().putmulti(batch))
            self._write(lambda txn: finish(txn, added))

        def otherwise(memory: MemoryIndex) -> None:
            memory.add_packs(packs)

        self._change(add, otherwise)

    def drop_pack(self, name: str) -> None:
        def drop(txn: _Txn) -> bool:
            value = txn.pop(_PACK_KEY + name.encode())
            if value is None:
                return False
            number, records = _PACK.unpack(value)
            txn.delete(_NAME_KEY + _U32.pack(number))
            garbage = _get_u32(txn, _GARBAGE_KEY) + records
            live = max(0, _get_u32(txn, _LIVE_KEY) - records)
            txn.put(_LIVE_KEY, _U32.pack(live))
            if garbage <= max(_SWEEP, live):
                txn.put(_GARBAGE_KEY, _U32.pack(garbage))
                return False
            txn.put(_GARBAGE_KEY, _U32.pack(0))
            return True

        def change() -> None:
            if self._write(drop):
                self._sweep()

        self._change(change, lambda memory: memory.drop_pack(name))

    def _sweep(self) -> None:
        """Delete the entries of dropped packs, a batch at a time."""
        after: bytes | None = b""

        def batch(txn: _Txn) -> bytes | None:
            live = {number for _, number, _ in _packs(txn)}
            dead: list[bytes] = []
            last = None
            for key, value in _from(txn, after or b""):
                last = key
                if len(key) == ID_BYTES and _U32.unpack_from(value)[0] not in live:
                    dead.append(key)
                    if len(dead) >= _BATCH:
                        break
            else:
                last = None
            for key in dead:
                txn.delete(key)
            return last

        while after is not None:
            after = self._write(batch)

    def close(self) -> None:
        """Close, sealing the file when this was its last user. Does nothing in a forked child."""
        if not self._closed:
            self._closed = True
            lmdb_env.release(self._environment)

    # guarded access ------------------------------------------------------------------------

    def _read(self, look: Callable[[_Txn], _T], otherwise: Callable[[MemoryIndex], _T]) -> _T:
        self._check()
        with self._environment.lock:
            if not self._environment.broken:
                try:
                    return self._transaction(look, write=False)
                except (lmdb.Error, OSError, CorruptionError, struct.error) as error:
                    self._give_up(error)
            return otherwise(self._memory())

    def _change(self, change: Callable[[], None], otherwise: Callable[[MemoryIndex], None]) -> None:
        self._check()
        with self._environment.lock:
            if not self._environment.broken:
                try:
                    with self._environment.writing():
                        change()
                    return
                except (lmdb.Error, OSError, CorruptionError, struct.error) as error:
                    self._give_up(error)
            otherwise(self._memory())

    def _write(self, change: Callable[[_Txn], _T]) -> _T:
        return self._transaction(change, write=True)

    def _transaction(self, work: Callable[[_Txn], _T], *, write: bool) -> _T:
        """Run `work` in a transaction, again in a larger map when it was too small."""
        environment = self._environment
        while True:
            try:
                with environment.env.begin(write=write) as txn:
                    return work(txn)
            except lmdb.MapFullError:
                environment.grow(self._max_bytes)
            except lmdb.MapResizedError:
                environment.adopt_size()

    def _memory(self) -> MemoryIndex:
        if self._fallback is None:
            self._fallback = MemoryIndex()
        return self._fallback

    def _give_up(self, error: Exception) -> None:
        self._environment.broken = True
        _log.warning(
            "the index in %s is given up and will be rebuilt at the next start: %s",
            self._environment.directory, error,
        )  # fmt: skip

    def _check(self) -> None:
        self._environment.check_process()
        if self._closed:
            raise StateError("the index is closed", kind="closed")


def _get_u32(txn: _Txn, key: bytes) -> int:
    value = txn.get(key)
    return 0 if value is None else _U32.unpack(value)[0]


def _from(txn: _Txn, start: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All (key, value) pairs from the first key >= `start` on."""
    cursor = txn.cursor()
    if cursor.set_range(start) if start else cursor.first():
        yield from cursor


def _packs(txn: _Txn) -> Iterator[tuple[str, int, int]]:
    """(name, number, records) of every pack."""
    for key, value in _from(txn, _PACK_KEY):
        if not key.startswith(_PACK_KEY):
            break
        number, records = _PACK.unpack(value)
        yield key[len(_PACK_KEY) :].decode(), number, records


def _digest(env: lmdb.Environment) -> str:
    """Digest of the set of packs, as the seal states it."""
    with env.begin() as txn:
        names = sorted(name for name, _, _ in _packs(txn))
    return blake3("\n".join(names).encode()).hexdigest()


def _rows(packs: Sequence[tuple[str, PackEntries, int]]) -> list[tuple[bytes, bytes]]:
    """Keys and values of all records of the packs, nearly in key order."""
    rows: list[tuple[bytes, bytes]] = []
    plain: list[NDArray[Any]] = []
    for _, entries, number in packs:
        table = entries.table
        packed = np.zeros(len(table), _VALUE_DTYPE)
        for field in ("id", "codec", "refs", "offset", "header", "stored", "raw"):
            packed[field] = table[field]
        packed["pack"] = number
        coded = table["refs"] > 0
        for row in np.flatnonzero(coded):
            covered = packed[row].tobytes()[:-4] + b"".join(entries.references(int(row)))
            check = _U32.pack(xxh32_intdigest(covered))
            end = ID_BYTES + _CHECKED
            rows.append((covered[:ID_BYTES], covered[ID_BYTES:end] + check + covered[end:]))
        plain.append(packed[~coded])
    table = np.concatenate(plain) if plain else np.empty(0, _VALUE_DTYPE)
    size = _VALUE_DTYPE.itemsize
    # Key order makes insertion several times faster; its first eight bytes are order enough.
    raw = table.view(np.uint8).reshape(-1, size)
    prefix = np.ascontiguousarray(raw[:, :8]).view(">u8")[:, 0].astype(np.uint64)
    table = table[np.argsort(prefix, kind="stable")]
    data = memoryview(table.tobytes())
    checks = [xxh32_intdigest(data[i : i + size - 4]) for i in range(0, len(data), size)]
    table["check"] = checks
    data = table.tobytes()
    rows += [(data[i : i + ID_BYTES], data[i + ID_BYTES : i + size])
             for i in range(0, len(data), size)]  # fmt: skip
    return rows


class StorePlace(Protocol):
    """The part of a store that an index is for."""

    @property
    def path(self) -> str: ...
    @property
    def uuid(self) -> bytes: ...
    @property
    def io(self) -> FileIO: ...


_warned: set[str] = set()


def open_index(
    store: StorePlace, *, generation: int = 0, directory: str | None = None
) -> LmdbIndex | MemoryIndex:
    """The index for a process that writes to `store`, brought up to date with its packs.

    Kept in `directory` (default: chosen by `localfs.index_directory`); where it cannot be opened
    there, or no local place is known, an in-memory index takes its place, with one warning per
    process and store. Close it after use. Packs whose footer is unreadable are left out (logged).
    Raises StorageError only when the packs cannot be listed.
    """

    def load(name: str) -> PackEntries | None:
        try:
            path = pack_path(store.path, name)
            return read_footer(store.io, path, store_uuid=store.uuid).entries
        except DeltackptError as error:
            _log.warning("pack %s is left out of the index: %s", name, error)
            return None

    index: LmdbIndex | MemoryIndex = MemoryIndex(load)
    reason = "no local file system for it is known"
    where = directory or index_directory(store.path, store.uuid)
    if where is not None:
        try:
            index = LmdbIndex(where, store_uuid=store.uuid, generation=generation)
        except DeltackptError as error:
            reason = str(error)
    if isinstance(index, MemoryIndex) and store.path not in _warned:
        _warned.add(store.path)
        _log.warning("the index of %s is kept in memory only: %s", store.path, reason)
    try:
        refresh(index, store.io, store.path, list_packs(store.io, store.path),
                store_uuid=store.uuid)  # fmt: skip
    except OSError as error:
        index.close()
        raise storage_error(error, "list the packs of", store.path) from error
    return index
