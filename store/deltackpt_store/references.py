"""Raw bytes of chunks that others are coded against, as the writer gets them.

Read from the pack (the page cache, as a rule) and decoded, or kept in memory within a budget.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from blake3 import blake3

from deltackpt_store import codecs
from deltackpt_store.confirm import Confirmer
from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.pack import Location, RecordHead

CACHE_BYTES = 32 * 1024 * 1024
_MAX_PROVED = 1 << 18


class Stored(NamedTuple):
    """A reference as it lies in its pack, still to be decoded.

    `proved`: the same payload (by its hash, which has been checked) had the id when it was decoded
    before.
    """

    id: bytes
    head: RecordHead
    payload: memoryview
    proved: bool = False

    def decode(self) -> memoryview:
        """The chunk, proved by its id now or before (CorruptionError). May run in any thread."""
        if self.head.codec == codecs.RAW and len(self.payload) == self.head.raw:
            chunk = self.payload
        else:
            chunk = memoryview(bytearray(self.head.raw))
            codecs.decode(self.head.codec, self.head.params, self.payload, chunk)
        if not self.proved and blake3(chunk).digest() != self.id:
            raise CorruptionError(
                f"chunk {self.id.hex()} does not have that id any more", kind="damaged-chunk"
            )
        return chunk


class References:
    """Finds references for the encoder. Used by one thread.

    Only chunks that are stored without references themselves serve, so that what is coded against
    them is one step away from plain bytes. Whatever is wrong with a reference makes it unusable,
    never an error: the chunk at hand is then stored by itself.
    """

    def __init__(self, confirmer: Confirmer, budget: int = CACHE_BYTES) -> None:
        self._confirmer = confirmer
        self._kept: OrderedDict[bytes, memoryview] = OrderedDict()
        self._bytes = 0
        self._proved: dict[bytes, int] = {}  # chunk id -> hash of the payload that has it
        self.budget = budget
        """Bytes of chunks kept in memory, the ones used last."""
        self.read_bytes = 0
        """Payload bytes read from packs so far."""

    def locate(self, chunk_id: bytes) -> Location | None:
        """Where a usable reference lies, confirmed; None when there is none of this id."""
        location = self._confirmer.find(chunk_id)
        return location if location is not None and not location.refs else None

    def get(self, chunk_id: bytes, location: Location) -> Stored | memoryview | None:
        """The chunk or its record; None when it cannot be read."""
        kept = self._kept.get(chunk_id)
        if kept is not None:
            self._kept.move_to_end(chunk_id)
            return kept
        try:
            head, payload = self._confirmer.record(chunk_id, location)
        except (OSError, DeltackptError):
            self._confirmer.forget(chunk_id)
            return None
        self.read_bytes += len(payload)
        proved = self._proved.get(chunk_id) == head.payload_hash
        return Stored(chunk_id, head, payload, proved)

    def prove(self, stored: Stored) -> None:
        """Remember that a record has been decoded and had its id."""
        if len(self._proved) >= _MAX_PROVED:
            self._proved.clear()
        self._proved[stored.id] = stored.head.payload_hash

    def keep(self, chunk_id: bytes, chunk: memoryview, *, copy: bool) -> None:
        """Remember a chunk within the budget; `copy` it when its memory will be written again."""
        if len(chunk) > self.budget or chunk_id in self._kept:
            return
        self._kept[chunk_id] = memoryview(bytes(chunk)) if copy else chunk
        self._bytes += len(chunk)
        while self._bytes > self.budget:
            self._bytes -= len(self._kept.popitem(last=False)[1])
