"""Where repair finds chunks: in the store itself, its quarantine, other stores, a live state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import numpy as np

from deltackpt_store.errors import CorruptionError, UnsupportedFormatError
from deltackpt_store.fetch import Request
from deltackpt_store.index import list_packs
from deltackpt_store.manifest import ID_BYTES
from deltackpt_store.names import relative_pack_path
from deltackpt_store.oserror import storage_error
from deltackpt_store.pack import Location
from deltackpt_store.pack_set import PackSet
from deltackpt_store.quarantine import QUARANTINE
from deltackpt_store.reader import ChunkReader
from deltackpt_store.store import Store

_BATCH_BYTES = 32 * 1024 * 1024

Wanted = Mapping[bytes, int]
"""Chunk id -> its length in bytes, 0 where that is not known."""


class ChunkSource(Protocol):
    """Something that may have lost chunks. What it gives is proved by the caller."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    def find(self, wanted: Wanted) -> Iterator[tuple[bytes, memoryview]]:
        """(id, raw bytes) of those it has. The bytes stay unchanged until the next one is asked
        for."""
        ...


class Everywhere(PackSet):
    """All packs of a store, those in its quarantine included."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.io, store.path, store.uuid)
        self._aside: frozenset[str] = frozenset()
        self._listed = False
        self.refresh()

    def refresh(self) -> None:
        """Learn of packs that came or went."""
        self._listed = False
        self.load_all()

    def load_all(self) -> None:
        if not self._listed:
            super().load_all()
            self._listed = True

    def names(self) -> list[str]:
        mine = super().names()
        try:
            aside = list_packs(self.io, f"{self.root}/{QUARANTINE}")
        except OSError as error:
            raise storage_error(error, "list the quarantine of", self.root) from error
        self._aside = frozenset(aside).difference(mine)
        return sorted({*mine, *aside})

    def path(self, name: str) -> str:
        if name in self._aside:
            return f"{self.root}/{QUARANTINE}/{relative_pack_path(name)}"
        return super().path(name)

    def is_aside(self, name: str) -> bool:
        return name in self._aside


class Without(PackSet):
    """The packs of a store without some, which are about to go."""

    def __init__(self, store: Store, without: Collection[str]) -> None:
        super().__init__(store.io, store.path, store.uuid)
        self._without = frozenset(without)

    def names(self) -> list[str]:
        return [name for name in super().names() if name not in self._without]


class StoreSource:
    """Another store, or a copy of this one. Only read."""

    def __init__(self, store: Store) -> None:
        self._packs = PackSet(store.io, store.path, store.uuid)
        self.name = store.path

    def find(self, wanted: Wanted) -> Iterator[tuple[bytes, memoryview]]:
        self._packs.load_all()
        lengths = {
            chunk_id: length or _length(self._packs, chunk_id)
            for chunk_id, length in wanted.items()
            if self.has(chunk_id)
        }
        yield from readable(self._packs, lengths)

    def has(self, chunk_id: bytes) -> bool:
        return bool(self._packs.index.locations(chunk_id) or self._packs.salvage(chunk_id))


def readable(packs: PackSet, lengths: Wanted) -> Iterator[tuple[bytes, memoryview]]:
    """Those of the chunks that can be read from `packs`, with their proved bytes.

    In bounded memory. StorageError when reading fails as such.
    """
    reader = ChunkReader(packs)
    batch: list[Request] = []
    size = 0
    for chunk_id, length in lengths.items():
        if length:
            batch.append((chunk_id, memoryview(bytearray(length))))
            size += length
        if size >= _BATCH_BYTES:
            yield from _read(reader, batch)
            batch, size = [], 0
    yield from _read(reader, batch)


def held(packs: PackSet, wanted: Wanted) -> dict[bytes, int]:
    """Those of the chunks that a table names, and the length to be read."""
    ids = list(wanted)
    if not ids:
        return {}
    table = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES)
    found = packs.index.find(table)
    raw: list[int] = found.entries["raw"].tolist()
    return {
        ids[row]: wanted[ids[row]] or raw[row] for row in np.flatnonzero(found.packs >= 0).tolist()
    }


def _read(reader: ChunkReader, batch: list[Request]) -> Iterator[tuple[bytes, memoryview]]:
    bad: frozenset[bytes] = frozenset()
    try:
        reader.read(batch)
    except (CorruptionError, UnsupportedFormatError) as error:
        bad = frozenset(error.context.get("ids") or [chunk_id for chunk_id, _ in batch])
    for chunk_id, data in batch:
        if chunk_id not in bad:
            yield chunk_id, data


def _length(packs: PackSet, chunk_id: bytes) -> int:
    places: list[Location] = packs.index.locations(chunk_id) or packs.salvage(chunk_id)
    return places[0].raw if places else 0
