"""Which needed chunks cannot be read any more, given what the packs hold and what is damaged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.errors import DeltackptError
from deltackpt_store.fetch import Request
from deltackpt_store.manifest import ID_BYTES, Ids
from deltackpt_store.pack_set import PackSet, is_damage
from deltackpt_store.read_run import UNIT_BYTES
from deltackpt_store.reader import ChunkReader
from deltackpt_store.scrub_check import BadRecord

_BATCH_BYTES = 16 * UNIT_BYTES

Lost = dict[bytes, str]
"""Chunk id -> why it cannot be read."""


def lost_chunks(
    packs: PackSet,
    ids: Ids,
    lengths: NDArray[np.int64],
    bad: Iterable[BadRecord],
    *,
    scan: bool = True,
) -> Lost:
    """Chunks that no sound record holds, among those needed and those of the `bad` records.

    `ids` and `lengths` are the chunks needed. A chunk with another copy, in an intact pack or found
    by scanning a damaged one, is not lost. Without `scan` the damaged packs count for nothing:
    what then is lost in addition would go with them.
    """
    suspects: dict[bytes, int | None] = {}
    broken: set[tuple[str, int]] = set()
    for record in bad:
        if not record.readable:
            broken.add((record.pack, record.offset))
            suspects[record.id] = None
    if len(ids):
        found = packs.index.find(ids)
        doubtful = (found.packs < 0) | (found.entries["raw"] != lengths)
        for row in np.flatnonzero(doubtful).tolist():
            suspects[ids[row].tobytes()] = int(lengths[row])
    lost: Lost = {}
    for chunk_id, length in suspects.items():
        places = packs.index.locations(chunk_id)
        if scan:
            places += packs.salvage(chunk_id)
        sound = [place.raw for place in places if (place.pack, place.offset) not in broken]
        if not sound:
            lost[chunk_id] = "no intact record holds it"
        elif length is not None and length not in sound:
            lost[chunk_id] = f"it has {sound[0]} bytes where {length} are needed"
    _lose_dependents(packs, lost, scan)
    return lost


def _lose_dependents(packs: PackSet, lost: Lost, scan: bool) -> None:
    """Add chunks all of whose records are coded against chunks that are lost themselves."""
    coded: dict[bytes, list[tuple[bytes, ...]]] = {}
    for name in packs.index.packs():
        entries = packs.index.entries(name)
        if entries is not None and len(entries.refs):
            for row in np.flatnonzero(entries.table["refs"]).tolist():
                coded.setdefault(entries.id(row), []).append(entries.references(row))
    if not coded:
        return
    referenced = list({r for rows in coded.values() for refs in rows for r in refs})
    table = np.frombuffer(b"".join(referenced), np.uint8).reshape(-1, ID_BYTES)
    absent = np.flatnonzero(~packs.index.contains_many(table)).tolist()
    gone = {referenced[row] for row in absent if not (scan and packs.salvage(referenced[row]))}
    gone.update(lost)
    if not gone:
        return
    users: dict[bytes, list[tuple[bytes, int]]] = {}
    for chunk_id, rows in coded.items():
        for row, refs in enumerate(rows):
            for ref in set(refs):
                users.setdefault(ref, []).append((chunk_id, row))
    whole = {chunk_id: set(range(len(rows))) for chunk_id, rows in coded.items()}
    todo = list(gone)
    while todo:  # each chunk once: a chain of them may be of any length
        for chunk_id, row in users.get(todo.pop(), ()):
            whole[chunk_id].discard(row)
            if chunk_id in gone or whole[chunk_id]:
                continue
            if len(coded[chunk_id]) >= len(packs.index.locations(chunk_id)):
                gone.add(chunk_id)
                lost[chunk_id] = "what it is coded against is lost"
                todo.append(chunk_id)


def unaccounted(packs: PackSet, lost: Lost) -> set[bytes]:
    """Those of `lost` that are gone with a whole pack, or of which all records are coded against
    such: no record that lies in an intact pack and is damaged itself accounts for them."""
    told: set[bytes] = set()
    todo: list[bytes] = []
    waiting: dict[bytes, list[tuple[bytes, set[bytes]]]] = {}
    for chunk_id in lost:
        for place in packs.index.locations(chunk_id):
            needs = {ref for ref in place.refs if ref in lost}
            others = set(place.refs) - needs
            if not all(packs.index.get(ref) or packs.salvage(ref) for ref in others):
                continue
            for ref in needs:
                waiting.setdefault(ref, []).append((chunk_id, needs))
            if not needs and chunk_id not in told:
                told.add(chunk_id)
                todo.append(chunk_id)
    while todo:
        ref = todo.pop()
        for chunk_id, needs in waiting.get(ref, ()):
            needs.discard(ref)
            if not needs and chunk_id not in told:
                told.add(chunk_id)
                todo.append(chunk_id)
    return lost.keys() - told


def read_back(
    packs: PackSet, hints: Iterable[str], ids: Ids, lengths: NDArray[np.int64], known: Lost,
    threads: int | None,
) -> Lost:  # fmt: skip
    """Read every needed chunk that is not in `known` the way a restore does; return the failures.

    Memory is bounded by 64 MiB (or the largest chunk), and what a reader takes.
    """
    reader = ChunkReader(packs, hints)
    size = max(min(_BATCH_BYTES, int(lengths.sum())), int(lengths.max(initial=0)))
    buffer = memoryview(bytearray(size))
    failed: Lost = {}
    batch: list[Request] = []
    used = 0
    for row in _file_order(packs, ids):
        chunk_id, length = ids[row].tobytes(), int(lengths[row])
        if chunk_id in known:
            continue
        if used + length > len(buffer):
            _read(reader, batch, threads, failed)
            batch, used = [], 0
        batch.append((chunk_id, buffer[used : used + length]))
        used += length
    _read(reader, batch, threads, failed)
    return failed


def _file_order(packs: PackSet, ids: Ids) -> list[int]:
    if not len(ids):
        return []
    found = packs.index.find(ids)
    return np.lexsort((found.entries["offset"], found.packs)).tolist()


def _read(reader: ChunkReader, batch: list[Request], threads: int | None, failed: Lost) -> None:
    try:
        reader.read(batch, threads)
    except DeltackptError as error:
        if not is_damage(error):
            raise
        ids: Any = error.context.get("ids") or [chunk_id for chunk_id, _ in batch]
        failed.update(dict.fromkeys(ids, error.message))
