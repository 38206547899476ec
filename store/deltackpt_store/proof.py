"""Proving, before a copy of a chunk is deleted, that the copy which stays can be read."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from deltackpt_store.chunk_sources import Without
from deltackpt_store.errors import CorruptionError
from deltackpt_store.fetch import Request
from deltackpt_store.manifest import ID_BYTES
from deltackpt_store.mark import Marking
from deltackpt_store.reader import ChunkReader
from deltackpt_store.store import Store

_BATCH_BYTES = 32 * 1024 * 1024


def unreadable_after(
    store: Store,
    marking: Marking,
    doomed: Collection[str],
    progress: Callable[[int, int], None] | None = None,
) -> set[bytes]:
    """Chunks that are needed, lie in a pack of `doomed`, and cannot be read from the others.

    `progress` is called with (done, total), counting chunks.

    Reads every such chunk once, in bounded memory. StorageError when reading fails as such.
    """
    rows = marking.going_copies(doomed)
    if not len(rows):
        return set()
    packs = Without(store, doomed)
    packs.load_all()
    reader = ChunkReader(packs)
    # The ids of the very records that go: a catalogue takes for one chunk what begins alike.
    ids = np.unique(marking.catalogue.ids_of(rows), axis=0).reshape(-1, ID_BYTES)
    found = packs.index.find(ids)
    lengths = found.entries["raw"].astype(np.int64)
    lost: set[bytes] = {ids[i].tobytes() for i in np.flatnonzero(found.packs < 0).tolist()}
    batch: list[Request] = []
    size = 0
    for done, i in enumerate(np.flatnonzero(found.packs >= 0).tolist()):
        length = int(lengths[i])
        batch.append((ids[i].tobytes(), memoryview(bytearray(length))))
        size += length
        if size >= _BATCH_BYTES:
            lost |= _unreadable(reader, batch)
            batch, size = [], 0
            if progress is not None:
                progress(done + 1, len(lengths))
    return lost | _unreadable(reader, batch)


def _unreadable(reader: ChunkReader, batch: list[Request]) -> set[bytes]:
    try:
        reader.read(batch)
    except CorruptionError as error:
        return set(error.context.get("ids", ())) or {chunk_id for chunk_id, _ in batch}
    return set()
