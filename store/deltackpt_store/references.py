"""Raw bytes of chunks that others are coded against, as the writer gets them.

Read from the pack (the page cache, as a rule) and decoded, or kept in memory within a budget.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import NamedTuple

from blake3 import blake3

from deltackpt_store import codecs
from deltackpt_store.confirm import Confirmer
from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.open_packs import OpenPacks
from deltackpt_store.pack import Location

CACHE_BYTES = 32 * 1024 * 1024
_MAX_PROVED = 1 << 18


class Reference(NamedTuple):
    """A chunk to code another against.

    `proved` is the hash of a payload that had the id when it was decoded before, `kept` the chunk
    where it is in memory.
    """

    id: bytes
    location: Location
    proved: int | None = None
    kept: memoryview | None = None


class Read(NamedTuple):
    """A reference as it was read: the chunk, and the hash of the payload that it was decoded from,
    None when it was kept in memory."""

    chunk: memoryview
    payload_hash: int | None


def read_reference(packs: OpenPacks, reference: Reference) -> Read:
    """The chunk, proved by its id now or before (OSError, CorruptionError)."""
    if reference.kept is not None:
        return Read(reference.kept, None)
    head, payload = packs.record(reference.id, reference.location)
    if head.codec == codecs.RAW and len(payload) == head.raw:
        chunk = payload
    else:
        chunk = memoryview(bytearray(head.raw))
        codecs.decode(head.codec, head.params, payload, chunk)
    # The payload has its hash, so what it was decoded to before is what it is decoded to now.
    if reference.proved != head.payload_hash and blake3(chunk).digest() != reference.id:
        raise CorruptionError(
            f"chunk {reference.id.hex()} does not have that id any more", kind="damaged-chunk"
        )
    return Read(chunk, head.payload_hash)


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

    @property
    def root(self) -> bytes:
        """Path of the store."""
        return os.fsencode(self._confirmer.packs.root)

    @property
    def era(self) -> int:
        """As that of `Confirmer`."""
        return self._confirmer.era

    def find(self, chunk_id: bytes) -> Reference | None:
        """What is known of the chunk; None when it does not serve. Nothing is read.

        The location is confirmed only where the chunk will not be read any more.
        """
        kept = self._kept.get(chunk_id)
        if kept is not None:
            self._kept.move_to_end(chunk_id)
        confirmer = self._confirmer
        location = confirmer.unconfirmed(chunk_id) if kept is None else confirmer.find(chunk_id)
        if location is None or location.refs:
            return None
        return Reference(chunk_id, location, self._proved.get(chunk_id), kept)

    def read(self, reference: Reference) -> Read | None:
        """The chunk; None when it cannot be read, or is not what it was."""
        try:
            return read_reference(self._confirmer.packs, reference)
        except (OSError, DeltackptError):
            self._confirmer.forget(reference.id)
            self._confirmer.find(reference.id)  # drops what the index has wrong
            return None

    def learn(self, reference: Reference, payload_hash: int, chunk: memoryview | None) -> None:
        """The reference has been decoded from a payload of that hash, to `chunk` if it is here."""
        if len(self._proved) >= _MAX_PROVED:
            self._proved.clear()
        self._proved[reference.id] = payload_hash
        self._confirmer.confirm(reference.id, reference.location)
        if chunk is not None:
            self.keep(reference.id, chunk, copy=False)

    def keep(self, chunk_id: bytes, chunk: memoryview, *, copy: bool) -> None:
        """Remember a chunk within the budget; `copy` it when its memory will be written again."""
        if len(chunk) > self.budget or chunk_id in self._kept:
            return
        self._kept[chunk_id] = memoryview(bytes(chunk)) if copy else chunk
        self._bytes += len(chunk)
        while self._bytes > self.budget:
            self._bytes -= len(self._kept.popitem(last=False)[1])
