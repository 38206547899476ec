"""Writing what a compaction plan asks for: chunks read, proved by their ids, coded, stored again.

Bounded memory: about `BATCH_BYTES` of chunks at a time, beside what a store writer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from deltackpt_store import codecs, coding_policy
from deltackpt_store.catalogue import Catalogue, Ints
from deltackpt_store.coding.elements import element_width
from deltackpt_store.compact_plan import Plan, Recode
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fetch import HEAD_BYTES, SLACK_BYTES, Fetcher, Task, mismatch, unreadable
from deltackpt_store.pack import Location, decode_record
from deltackpt_store.pack_set import is_damage
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter

BATCH_BYTES = 16 * 1024 * 1024
FLUSH_BYTES = 256 * 1024 * 1024
WORTH = {"auto": 0.8, "small": codecs.WORTH}
"""By codec, the most that a chunk coded by itself may take of its size; see `coding_policy`."""

_SAMPLE = 8  # chunks of a family that decide what the family is coded against

Progress = Callable[[int, int], None]


class _Piece(NamedTuple):
    """A part of a family of chunks to recode: `first` to `end` of the plan's arrays."""

    first: int
    end: int
    family: int


class Rewriter:
    """Carries out one plan. Used by one thread; `between` is called every few megabytes."""

    def __init__(
        self,
        store: Store,
        writer: StoreWriter,
        catalogue: Catalogue,
        plan: Plan,
        *,
        codec: str,
        progress: Progress | None = None,
        between: Callable[[], None],
    ) -> None:
        self._store = store
        self._writer = writer
        self._catalogue = catalogue
        self._plan = plan
        self._codec = codec
        self._progress = progress
        self._between = between
        self._reader = store.reader()
        self._unflushed = 0
        self._done = 0
        self._families: Ints = np.empty(0, np.int64)
        self._against = (-1, -1)  # family, and the group that it is coded against
        self.raw_bytes = self.written_bytes = 0
        store.packs.load_all()
        self._raw = _raw_lengths(store, catalogue, plan)
        self.total = int(
            self._raw[plan.own].sum()
            + self._raw[plan.recode.groups].sum()
            + catalogue.stored[plan.copy].sum(dtype=np.int64)
        )

    def estimate(self) -> int:
        """Bytes that will be written, about."""
        plan, stored = self._plan, self._catalogue.stored
        return int(
            self._raw[plan.own].sum()
            + plan.recode.stored.sum()
            + stored[plan.copy].sum(dtype=np.int64)
        )

    def work(self) -> None:
        """Write everything, durable on return.

        CorruptionError when a chunk cannot be read anywhere, StorageError.
        """
        self._write_own()
        self._write_recoded(self._plan.recode)
        self._write_copies()
        self._writer.flush()

    # by themselves -------------------------------------------------------------------------

    def _write_own(self) -> None:
        groups = self._plan.own
        for first, end in _batches(self._raw[groups]):
            batch: list[int] = groups[first:end].tolist()
            chunks = self._read(batch)
            for group in batch:
                self._put(group, chunks[group], self._encode(group, chunks[group]))
            del chunks
            self._advance(int(self._raw[groups[first:end]].sum()))

    def _encode(
        self, group: int, raw: memoryview, reference: memoryview | None = None, against: int = -1
    ) -> codecs.Encoded:
        width = element_width(str(self._plan.dtypes[group]))
        tries = coding_policy.tries(self._codec, width, reference=reference is not None)
        # What was small beside the old base must not become raw because of a threshold.
        worth = WORTH[self._codec] if reference is None else codecs.WORTH
        plan = coding_policy.Plan(tries, width, "zstd", (0,) * len(tries), worth, probe=True)
        ref = b"" if reference is None else self._id(against)
        return coding_policy.encode(plan, raw, reference, ref).best

    # against the new base ------------------------------------------------------------------

    def _write_recoded(self, recode: Recode) -> None:
        for batch in self._piece_batches(recode):
            wanted: dict[int, None] = {}
            for piece in batch:
                wanted.update(dict.fromkeys(recode.groups[piece.first : piece.end].tolist()))
                wanted[self._base_of(recode, piece)] = None
            chunks = self._read(list(wanted))
            size = 0
            for piece in batch:
                self._recode(recode, piece, chunks)
                size += int(self._raw[recode.groups[piece.first : piece.end]].sum())
            del chunks
            self._advance(size)

    def _base_of(self, recode: Recode, piece: _Piece) -> int:
        family, against = self._against
        return against if family == piece.family else int(recode.base[piece.first])

    def _recode(self, recode: Recode, piece: _Piece, chunks: dict[int, memoryview]) -> None:
        """Code a family against the new base, or, where that would take more, its newest chunk.

        Decided once for each family, by its first chunks.
        """
        base = self._base_of(recode, piece)
        groups: list[int] = recode.groups[piece.first : piece.end].tolist()
        coded = {g: self._encode(g, chunks[g], chunks[base], base) for g in groups[:_SAMPLE]}
        if self._against[0] != piece.family:
            if self._is_dearer(recode, piece, coded):
                base = groups[0]
                coded = {base: self._encode(base, chunks[base])}
            self._against = (piece.family, base)
        for group in groups:
            encoded = coded.pop(group, None)
            if encoded is None:
                encoded = self._encode(group, chunks[group], chunks[base], base)
            self._put(group, chunks[group], encoded)

    def _is_dearer(self, recode: Recode, piece: _Piece, coded: dict[int, codecs.Encoded]) -> bool:
        size = int(np.searchsorted(self._families, piece.family, "right")
                   - np.searchsorted(self._families, piece.family))  # fmt: skip
        old = self._catalogue.order[self._catalogue.start[recode.old[piece.first]]]
        shared = int(self._catalogue.stored[old]) * len(coded) // size
        before = int(recode.stored[piece.first : piece.first + len(coded)].sum()) + shared
        return size > 1 and sum(one.stored for one in coded.values()) > before

    def _piece_batches(self, recode: Recode) -> Iterator[list[_Piece]]:
        """Families in their order, cut where they are too large, put together where small."""
        count = len(recode)
        if not count:
            return
        new = (recode.base[1:] != recode.base[:-1]) | (recode.old[1:] != recode.old[:-1])
        self._families = np.concatenate([[0], np.cumsum(new)])
        edges = [0, *(np.flatnonzero(new) + 1).tolist(), count]
        batch: list[_Piece] = []
        room = BATCH_BYTES
        for family, (start, stop) in enumerate(pairwise(edges)):
            base = int(self._raw[recode.base[start]])
            for first, end in _batches(self._raw[recode.groups[start:stop]], base):
                piece = _Piece(start + first, start + end, family)
                size = base + int(self._raw[recode.groups[piece.first : piece.end]].sum())
                if batch and size > room:
                    yield batch
                    batch, room = [], BATCH_BYTES
                batch.append(piece)
                room -= size
        yield batch

    # as they are ---------------------------------------------------------------------------

    def _write_copies(self) -> None:
        catalogue, rows = self._catalogue, self._plan.copy
        packs = catalogue.pack_of(rows)
        with Fetcher(self._store.packs) as fetcher:
            for first, end in _batches(catalogue.stored[rows]):
                batch = zip(rows[first:end].tolist(), packs[first:end].tolist(), strict=True)
                for row, pack in batch:
                    self._copy(fetcher, row, pack)
                self._advance(int(catalogue.stored[rows[first:end]].sum(dtype=np.int64)))

    def _copy(self, fetcher: Fetcher, row: int, pack: int) -> None:
        catalogue = self._catalogue
        name = catalogue.names[pack]
        chunk_id = catalogue.ids[row].tobytes()
        try:
            entries = self._store.packs.index.entries(name)
            if entries is None:
                raise unreadable(chunk_id, f"pack {name} cannot be used")
            place = entries.location(name, row - int(catalogue.first[pack]))
            raw, encoded = _record(fetcher, chunk_id, place)
        except DeltackptError as error:
            if not is_damage(error):
                raise
            group = int(catalogue.find(catalogue.ids[row : row + 1])[0])
            raw = self._read([group])[group]  # from another place, or not at all
            encoded = self._encode(group, raw)
        self._count(self._writer.put_encoded(chunk_id, raw, encoded).written, len(raw))

    # shared --------------------------------------------------------------------------------

    def _id(self, group: int) -> bytes:
        catalogue = self._catalogue
        return catalogue.ids[catalogue.order[catalogue.start[group]]].tobytes()

    def _read(self, groups: list[int]) -> dict[int, memoryview]:
        chunks = {group: memoryview(bytearray(int(self._raw[group]))) for group in groups}
        self._reader.read([(self._id(group), chunk) for group, chunk in chunks.items()])
        return chunks

    def _put(self, group: int, raw: memoryview, encoded: codecs.Encoded) -> None:
        put = self._writer.put_encoded(self._id(group), raw, encoded)
        self._count(put.written, len(raw))

    def _count(self, written: int, raw: int) -> None:
        self.written_bytes += written
        self.raw_bytes += raw
        self._unflushed += written

    def _advance(self, size: int) -> None:
        if self._unflushed >= FLUSH_BYTES:
            self._writer.flush()
            self._unflushed = 0
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self.total)
        self._between()


def _record(
    fetcher: Fetcher, chunk_id: bytes, place: Location
) -> tuple[memoryview, codecs.Encoded]:
    """The chunk and its record, proved by its id (CorruptionError, StorageError)."""
    if place.stored > place.raw + SLACK_BYTES:
        raise unreadable(chunk_id, "its record declares impossible lengths")
    if place.codec == codecs.RAW:
        raw = memoryview(bytearray(place.stored))
        fetcher.fill(place.pack, [raw], place.payload, place.stored)
        if blake3(raw).digest() != chunk_id:
            raise mismatch(chunk_id, place.pack)
        return raw, codecs.Encoded(codecs.RAW, b"", (), [raw])
    if place.header > HEAD_BYTES:
        raise unreadable(chunk_id, "its record declares impossible lengths")
    data = memoryview(bytearray(place.header + place.stored))
    fetcher.fill(place.pack, [data], place.offset, len(data))
    out = fetcher.output(place.raw)
    front, payload = data[: place.header], data[place.header :]
    fetcher.decode(Task(chunk_id, out, place), front, payload)
    head = decode_record(front, place.pack, place.offset)
    return out, codecs.Encoded(head.codec, head.params, head.refs, [payload])


def _raw_lengths(store: Store, catalogue: Catalogue, plan: Plan) -> Ints:
    """Bytes of the chunks that the plan concerns, by group."""
    copied = catalogue.find(catalogue.ids[plan.copy])
    groups = np.unique(np.concatenate([plan.own, plan.recode.groups, plan.recode.base, copied]))
    lengths = np.zeros(catalogue.groups, np.int64)
    rows = catalogue.order[catalogue.start[groups]]
    found = store.packs.index.find(catalogue.ids[rows])
    lengths[groups] = found.entries["raw"]
    return lengths


def _batches(sizes: Ints, used: int = 0) -> Iterator[tuple[int, int]]:
    """(first, end) of consecutive parts that fill a batch with `used` bytes, of one at least."""
    first, total, limit = 0, 0, BATCH_BYTES - used
    for at, size in enumerate(sizes.tolist()):
        if at > first and total + size > limit:
            yield first, at
            first, total = at, 0
        total += size
    if first < len(sizes):
        yield first, len(sizes)
