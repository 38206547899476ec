"""Repairing chunks: everything that damaged packs hold, and everything that is missing, is written
into new packs, proved there, and only then are the damaged packs set aside.

What can be read from a damaged pack is copied as it is stored; what cannot is taken from the other
sources. Every chunk is proved by its id when it is taken, and again by reading it the way a restore
does from the packs that stay, before anything is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltackpt_store import codecs
from deltackpt_store.chunk_sources import (
    ChunkSource,
    Everywhere,
    Wanted,
    Without,
    held,
    readable,
)
from deltackpt_store.codecs import Encoded
from deltackpt_store.errors import DeltackptError, UnsupportedFormatError
from deltackpt_store.fetch import Fetcher, Task
from deltackpt_store.manifest import ID_BYTES, Ids
from deltackpt_store.pack import Location, decode_record, pack_path
from deltackpt_store.pack_set import is_damage
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.store import Store
from deltackpt_store.store_writer import PACK_BYTES

_ROUNDS = 8  # as deep as chunks may be coded against one another


class PackRepair:
    """The work on the packs `damaged`. Used by one thread.

    `writer` is the id in the new packs' names; `written` are the new packs, durable; `origin` says
    of each chunk written where it was taken from (a pack of this store, or the name of a source);
    `lost` are chunks that nothing has, with their lengths (0: unknown); `unknown` are packs that
    hold what this package cannot decode.
    """

    def __init__(
        self, store: Store, damaged: Iterable[str], sources: Sequence[ChunkSource], writer: str
    ) -> None:
        self.written: list[str] = []
        self.origin: dict[bytes, str] = {}
        self.lost: dict[bytes, int] = {}
        self.unknown: set[str] = set()
        self._store = store
        self._damaged = frozenset(damaged)
        self._sources = sources
        self.writer = writer
        self._sequence = 0
        self._everywhere = Everywhere(store)

    def work(self, ids: Ids, lengths: NDArray[np.int64], *, dry_run: bool = False) -> None:
        """Make readable from other packs what the damaged ones hold, and the needed chunks `ids`.

        With `dry_run` nothing is written, and what a source has counts as repaired. StorageError,
        OSError; then the packs written so far stay, which harms nothing.
        """
        pending = self._unproved(self._todo(ids, lengths))
        for attempt in range(_ROUNDS):
            if not pending:
                break
            pending.update(self._unproved(self._references(pending)))
            taken = self._take(pending, verbatim=attempt == 0, dry_run=dry_run)
            if dry_run:
                pending = {i: length for i, length in pending.items() if i not in taken}
                break
            if not taken:
                break
            self._everywhere.refresh()
            pending = self._unproved(pending)
        self.lost = pending

    def places_elsewhere(self, chunk_id: bytes) -> str | None:
        """A pack that is not to be set aside and names the chunk."""
        for place in self._everywhere.index.locations(chunk_id):
            if place.pack not in self._damaged and not self._everywhere.is_aside(place.pack):
                return place.pack
        return None

    # what there is to do -------------------------------------------------------------------

    def _todo(self, ids: Ids, lengths: NDArray[np.int64]) -> dict[bytes, int]:
        """Everything that damaged packs hold, what is needed and nowhere, and what chunks that
        stay are coded against and is nowhere."""
        todo: dict[bytes, int] = {}
        for name in sorted(self._damaged):
            for chunk_id, location in self._records(name):
                todo.setdefault(chunk_id, location.raw)
        staying = self._staying()
        if len(ids):
            absent = np.flatnonzero(staying.index.find(ids).packs < 0).tolist()
            todo.update((ids[row].tobytes(), int(lengths[row])) for row in absent)
        for name in sorted(staying.index.packs()):
            entries = staying.index.entries(name)
            if entries is not None and len(entries.refs):
                refs = np.unique(entries.refs.view(f"V{ID_BYTES}").reshape(-1))
                table = refs.view(np.uint8).reshape(-1, ID_BYTES)
                for row in np.flatnonzero(staying.index.find(table).packs < 0).tolist():
                    todo.setdefault(table[row].tobytes(), 0)
        return todo

    def _references(self, pending: Wanted) -> dict[bytes, int]:
        """What any record of these chunks is coded against, and what that is, and so on."""
        found: dict[bytes, int] = {}
        stack = list(pending)
        while stack:
            chunk_id = stack.pop()
            places = self._everywhere.index.locations(chunk_id)
            for place in [*places, *self._everywhere.salvage(chunk_id)]:
                fresh = [ref for ref in place.refs if ref not in pending and ref not in found]
                found.update(dict.fromkeys(fresh, 0))
                stack += fresh
        return found

    def _records(self, name: str) -> Iterator[tuple[bytes, Location]]:
        entries = self._everywhere.index.entries(name)
        if entries is not None:
            yield from entries.items(name)
        elif name in self._everywhere.damaged:
            for chunk_id, places in self._everywhere.salvaged(name).items():
                yield from ((chunk_id, place) for place in places)

    def _staying(self) -> Without:
        staying = Without(self._store, self._damaged)
        staying.load_all()
        return staying

    def _unproved(self, wanted: Wanted) -> dict[bytes, int]:
        """Those that cannot be read from the packs that stay; each is read."""
        staying = self._staying()
        proved = {chunk_id for chunk_id, _ in readable(staying, held(staying, wanted))}
        return {i: length for i, length in wanted.items() if i not in proved}

    # writing -------------------------------------------------------------------------------

    def _take(self, wanted: Wanted, *, verbatim: bool, dry_run: bool) -> set[bytes]:
        """Write what any source has; the ids of that."""
        taken: set[bytes] = set()
        packs = None if dry_run else _Packs(self)
        try:
            for chunk_id, raw, encoded, origin in self._find(wanted, verbatim):
                taken.add(chunk_id)
                self.origin[chunk_id] = origin
                if packs is not None:
                    packs.append(chunk_id, raw, encoded)
            if packs is not None:
                packs.finish()
        except BaseException:
            if packs is not None:
                packs.abort()
            raise
        return taken

    def _find(self, wanted: Wanted, verbatim: bool) -> Iterator[tuple[bytes, int, Encoded, str]]:
        rest = dict(wanted)
        with Fetcher(self._everywhere) as fetcher:
            for chunk_id in self._in_file_order(wanted):
                found = self._here(fetcher, chunk_id, rest[chunk_id], verbatim)
                if found is not None:
                    del rest[chunk_id]
                    yield (chunk_id, *found)
        for source in self._sources:
            if not rest:
                return
            for chunk_id, data in source.find(dict(rest)):
                length = rest.get(chunk_id)
                if length is None or length not in (0, len(data)):
                    continue
                if blake3(data).digest() == chunk_id:
                    del rest[chunk_id]
                    raw = bytes(data)
                    yield chunk_id, len(raw), Encoded(codecs.RAW, b"", (), [raw]), source.name

    def _in_file_order(self, wanted: Wanted) -> list[bytes]:
        def place(chunk_id: bytes) -> tuple[str, int]:
            found = self._everywhere.index.get(chunk_id)
            return (found.pack, found.offset) if found else ("", 0)

        return sorted(wanted, key=place)

    def _here(
        self, fetcher: Fetcher, chunk_id: bytes, length: int, verbatim: bool
    ) -> tuple[int, Encoded, str] | None:
        """The chunk from any record of this store or its quarantine that decodes to it."""
        for place in fetcher.places(chunk_id):
            if length not in (0, place.raw):
                continue
            data = bytearray(place.raw)
            try:
                fetcher.fetch(Task(chunk_id, memoryview(data), place))
                if verbatim and place.codec != codecs.RAW:
                    return place.raw, _as_stored(fetcher, place), place.pack
            except UnsupportedFormatError:
                self.unknown.add(place.pack)
            except DeltackptError as error:
                if not is_damage(error):
                    raise
            else:
                return place.raw, Encoded(codecs.RAW, b"", (), [data]), place.pack
        return None

    def next_pack(self) -> PackWriter:
        """A new pack of this repair."""
        self._sequence += 1
        store = self._store
        name = f"{self.writer}-{self._sequence:08d}"
        return PackWriter(
            store.io, pack_path(store.path, name), store.uuid, self.writer,
            self._sequence,
        )  # fmt: skip


class _Packs:
    """Records going into one new pack after the other."""

    def __init__(self, repair: PackRepair) -> None:
        self._repair = repair
        self._open: PackWriter | None = None

    def append(self, chunk_id: bytes, raw: int, encoded: Encoded) -> None:
        if self._open is None:
            self._open = self._repair.next_pack()
        self._open.append(chunk_id, raw, encoded)
        if self._open.size >= PACK_BYTES:
            self.finish()

    def finish(self) -> None:
        pack, self._open = self._open, None
        if pack is not None:
            try:
                pack.finish()
            except BaseException:
                pack.abort()
                raise
            self._repair.written.append(pack.name)

    def abort(self) -> None:
        if self._open is not None:
            self._open.abort()


def _as_stored(fetcher: Fetcher, place: Location) -> Encoded:
    """An encoded record as it lies there, which has just been proved."""
    data = memoryview(bytearray(place.header + place.stored))
    fetcher.fill(place.pack, [data], place.offset, len(data))
    head = decode_record(data[: place.header], place.pack, place.offset)
    return Encoded(head.codec, head.params, head.refs, [data[place.header :]])
