"""Confirming index hits: is the chunk really where the index says, before anyone relies on it?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from deltackpt_store import codecs
from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.fetch import MAX_DEPTH
from deltackpt_store.fileio import FileIO
from deltackpt_store.index import ChunkIndex
from deltackpt_store.open_packs import OpenPacks
from deltackpt_store.pack import Location, RecordHead

_log = logging.getLogger("deltackpt.store.index")
_MAX_REMEMBERED = 1 << 18


class Confirmer:
    """Checks hits of `index` against the packs of the store at `root`. One thread at a time.

    A hit counts when the pack file holds, at that place, an undamaged record head with this chunk
    id and these lengths, the payload lies inside the file, and the same is true of every chunk the
    record refers to. A confirmed hit is remembered. A wrong one makes the index forget that pack
    and counts as a miss, and so does any error: the chunk is then simply stored again.
    """

    def __init__(self, io: FileIO, root: str, index: ChunkIndex) -> None:
        self.packs = OpenPacks(io, root)
        self._index = index
        self._confirmed: dict[bytes, Location] = {}
        self._absent: frozenset[str] = frozenset()
        self.era = 0
        """Changes when packs that were found before may be gone: none is to be held open then."""

    def ban(self, packs: frozenset[str]) -> None:
        """From here on these packs, and no others, count as absent, whatever the index says."""
        self._absent = packs
        self._confirmed.clear()
        self.era += 1
        self.close()  # what is open may have been deleted

    def confirmed(self, chunk_id: bytes) -> Location | None:
        """The location of the chunk if it is confirmed already."""
        return self._confirmed.get(chunk_id)

    def unconfirmed(self, chunk_id: bytes) -> Location | None:
        """Where the chunk is said to be, for somebody who reads it and then calls `confirm`."""
        location = self._confirmed.get(chunk_id)
        if location is not None:
            return location
        with contextlib.suppress(DeltackptError):
            location = self._index.get(chunk_id)
        if location is not None and location.pack in self._absent:
            return self.find(chunk_id)  # it may have been moved
        return location

    def absent(self, ids: Sequence[bytes]) -> set[bytes]:
        """Those of `ids` that the index does not know; none when it cannot tell."""
        try:
            return self._index.absent(ids)
        except DeltackptError:
            return set()  # to be looked up one by one

    def confirm(self, chunk_id: bytes, location: Location) -> None:
        """The chunk, which has no references, has been read from there."""
        if location.pack not in self._absent:
            self._remember(chunk_id, location)

    def find(self, chunk_id: bytes, depth: int = 0) -> Location | None:
        """The confirmed location of the chunk, or None."""
        known = self._confirmed.get(chunk_id)
        if known is not None:
            return known
        for _ in range(4):  # another location of the same chunk may be good
            try:
                location = self._index.get(chunk_id)
            except DeltackptError as error:
                _log.warning("chunk %s cannot be looked up: %s", chunk_id.hex(), error)
                return None
            if location is None or depth > MAX_DEPTH:
                return None
            if location.pack in self._absent:
                self._index.drop_pack(location.pack)
                continue
            try:
                self.packs.head(chunk_id, location)
            except (OSError, DeltackptError) as error:
                _log.warning(
                    "pack %s does not hold chunk %s as indexed; storing it again: %s",
                    location.pack, chunk_id.hex(), error,
                )  # fmt: skip
                self._index.drop_pack(location.pack)
                continue
            if any(self.find(ref, depth + 1) is None for ref in location.refs):
                return None
            self._remember(chunk_id, location)
            return location
        return None

    def _remember(self, chunk_id: bytes, location: Location) -> None:
        if len(self._confirmed) >= _MAX_REMEMBERED:
            self._confirmed.clear()
        self._confirmed[chunk_id] = location

    def content(self, chunk_id: bytes, location: Location) -> bytearray:
        """Read and decode the chunk, to compare bytes (OSError, CorruptionError)."""
        head, payload = self.record(chunk_id, location)
        references: list[memoryview] = []
        for ref in head.refs:
            where = self.find(ref, 1)
            if where is None:
                raise CorruptionError(f"reference {ref.hex()} is missing", kind="missing-chunk")
            references.append(memoryview(self.content(ref, where)))
        out = bytearray(head.raw)
        codecs.decode(head.codec, head.params, payload, memoryview(out), references)
        return out

    def record(self, chunk_id: bytes, location: Location) -> tuple[RecordHead, memoryview]:
        """Head and payload, unchanged since they were written (OSError, CorruptionError).

        `location` must be one that :meth:`find` returned for this chunk.
        """
        return self.packs.record(chunk_id, location)

    def forget(self, chunk_id: bytes) -> None:
        """Confirm this chunk, and what may be coded against it, anew at the next look-up."""
        if self._confirmed.pop(chunk_id, None) is not None:
            self._confirmed.clear()

    def close(self) -> None:
        """Close the pack files held open; the object stays usable."""
        self.packs.close()
