"""In which order the records of packs are checked, and by which units.

Most records are checked in the order of their file: *stretches* of a pack. Those that are coded
against other chunks, and the chunks they need, go by *families* instead: what is coded against the
same chunks, in whatever pack, stands together, what is needed before what needs it. So a base is
decoded once for all deltas to it, and a first moment once for all that follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltackpt_store import codecs
from deltackpt_store.fetch import HEAD_BYTES, MAX_DEPTH, SLACK_BYTES
from deltackpt_store.pack import ENTRY_BYTES, ID_BYTES, MAX_PARAMS, RECORD_BYTES, PackEntries

DECODING = 3
"""Times as much work as reading and hashing, about, per byte that is decoded."""
LEAST_WORK = 4 * 1024 * 1024
"""What is handed out at once, at least (`work_of`)."""
MOST_WORK = 128 * 1024 * 1024

FRONT, RAW, CODED, WRONG = range(4)
"""Kinds of pieces: the front of a raw record, its payload, an encoded record, a raw payload that
has not the length of its chunk."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Table(NamedTuple):
    """A pack and its table."""

    pack: str
    entries: PackEntries


class Stretch(NamedTuple):
    """What begins in bytes [first, end) of the file of ``tables[table]``, but for families."""

    table: int
    first: int
    end: int


class Kin(NamedTuple):
    """Members [first, end) of the families: whole families."""

    first: int
    end: int


Unit = Stretch | Kin


class Families(NamedTuple):
    """Records that are coded against others, or others against them, in the order of checking.

    Parallel arrays: number of the table, row in it, bytes of payload, the work they are, number of
    the family (ascending), and whether another member needs the chunk.
    """

    table: NDArray[np.int32]
    row: NDArray[np.int32]
    stored: NDArray[np.uint32]
    work: Ints
    family: NDArray[np.int32]
    needed: Bools

    def __len__(self) -> int:
        return len(self.table)

    def part(self, first: int, end: int) -> Families:
        """Members [first, end)."""
        which = slice(first, end)
        return Families(self.table[which], self.row[which], self.stored[which], self.work[which],
                        self.family[which], self.needed[which])  # fmt: skip


class Pieces(NamedTuple):
    """Pieces of one pack by their place in the file, as parallel lists: rows of the table, kinds
    (`FRONT` ...), places and lengths in bytes, and the bytes of payload that count as checked."""

    rows: list[int]
    kinds: list[int]
    starts: list[int]
    lengths: list[int]
    payloads: list[int]
    begin: Ints
    """`starts` again, to search in."""


def odd(table: NDArray[Any]) -> Bools:
    """Rows that declare lengths which no writer produces: they are not even read."""
    long = table["stored"].astype(np.int64) > table["raw"].astype(np.int64) + SLACK_BYTES
    return long | ((table["codec"] != codecs.RAW) & (table["header"] > HEAD_BYTES))


def work_of(table: NDArray[Any], prove: bool = True) -> Ints:
    """The work of checking each of these rows: bytes to be read, and `DECODING` times those to be
    decoded. Without `prove` nothing is."""
    stored = table["stored"].astype(np.int64)
    coded = table["codec"] != codecs.RAW
    return stored + DECODING * np.where(coded, table["raw"], 0) if prove else stored


def spans(table: NDArray[Any]) -> tuple[Ints, Ints]:
    """(start, length) of what is read to check the chunks of these rows."""
    raw = table["codec"] == codecs.RAW
    offset, header = table["offset"].astype(np.int64), table["header"].astype(np.int64)
    stored = table["stored"].astype(np.int64)
    return np.where(raw, offset + header, offset), np.where(raw, stored, header + stored)


def front_bytes(header: Any, refs: Any) -> Any:
    """Bytes of a record's front that have all it says: numbers, or arrays of them."""
    return np.minimum(header, RECORD_BYTES + refs * ID_BYTES + MAX_PARAMS)


def pieces(entries: PackEntries, kin: NDArray[np.int32]) -> Pieces:
    """All pieces of a pack but for what the rows `kin` hold of chunks."""
    table = entries.table
    good = ~odd(table)
    raw = table["codec"] == codecs.RAW
    fronts = np.flatnonzero(good & raw)
    good[kin] = False
    chunks = np.flatnonzero(good)
    start, length = spans(table[chunks])
    kind = np.where(raw[chunks], RAW, CODED)
    kind[raw[chunks] & (table["stored"] != table["raw"])[chunks]] = WRONG
    front = table[fronts]
    most = front_bytes(front["header"].astype(np.int64), front["refs"].astype(np.int64))
    row = np.concatenate([fronts, chunks])
    starts = np.concatenate([front["offset"].astype(np.int64), start])
    lengths = np.concatenate([most, length])
    kinds = np.concatenate([np.full(len(fronts), FRONT), kind])
    payload = np.concatenate([np.zeros(len(fronts), np.int64), table["stored"][chunks]])
    order = np.argsort(starts, kind="stable")
    row, kinds, starts, lengths, payload = (
        array[order] for array in (row, kinds, starts, lengths, payload)
    )
    return Pieces(
        row.tolist(), kinds.tolist(), starts.tolist(), lengths.tolist(), payload.tolist(), starts
    )


def families(tables: Sequence[Table]) -> Families:
    """Find the families among the records of `tables`. Memory: about 100 bytes per member."""
    wanted = [_keys(t.entries.refs) for t in tables if len(t.entries.refs)]
    if not wanted:
        none = np.empty(0, np.int32)
        some = np.empty(0, np.int64)
        return Families(none, none, np.empty(0, np.uint32), some, none, np.empty(0, np.bool_))
    needed = np.unique(np.concatenate(wanted))
    members = [_members(t.entries, needed) for t in tables]
    table = np.repeat(np.arange(len(tables)), [len(m.row) for m in members])
    row = np.concatenate([m.row for m in members])
    start = np.concatenate([m.start for m in members])
    stored = np.concatenate([m.stored for m in members])
    work = np.concatenate([m.work for m in members])
    key = np.concatenate([m.key for m in members])
    count = np.concatenate([m.counts for m in members])
    reference = np.concatenate([m.references for m in members])

    chunks, both = np.unique(np.concatenate([key, reference]), return_inverse=True)
    chunk, reference = both[: len(key)], both[len(key) :]  # numbers of chunks from now on
    user = np.repeat(chunk, count)
    family, depth = _kinship(len(chunks), chunk, count, user, reference)
    # Families in the order in which their first members lie, members after what they need.
    place = np.lexsort((start, table))
    rank = np.empty(len(chunk), np.int64)
    rank[place] = np.arange(len(chunk))
    first = np.full(len(chunks), len(chunk), np.int64)
    np.minimum.at(first, family[chunk], rank)
    order = np.lexsort((rank, depth[chunk], first[family[chunk]]))
    is_needed = np.zeros(len(chunks), np.bool_)
    is_needed[reference] = True
    of = first[family[chunk]][order]
    number = np.cumsum(np.diff(of, prepend=of[:1]) != 0)
    return Families(
        table[order].astype(np.int32),
        row[order].astype(np.int32),
        stored[order].astype(np.uint32),
        work[order],
        number.astype(np.int32),
        is_needed[chunk[order]],
    )


def _kinship(
    chunks: int, chunk: Ints, count: Ints, user: Ints, reference: Ints
) -> tuple[Ints, Ints]:
    """Of each chunk the number of its family, and how many references deep it is coded.

    Chunks belong together with what they are coded against. References may lie: circles and what
    is too deep end up in some order.
    """
    family = np.arange(chunks)
    depth = np.zeros(chunks, np.int64)
    first = np.cumsum(count) - count
    coded = count > 0
    parent = family.copy()
    parent[chunk[coded]] = reference[first[coded]]
    for _ in range(MAX_DEPTH.bit_length()):
        parent = parent[parent]
    for _ in range(MAX_DEPTH):
        one, other = parent[user], parent[reference]
        least = np.minimum(family[one], family[other])
        before = family.copy()
        np.minimum.at(family, one, least)
        np.minimum.at(family, other, least)
        if np.array_equal(before, family):
            break
    for _ in range(MAX_DEPTH):
        deeper = depth[reference] + 1
        if (depth[user] >= deeper).all():
            break
        np.maximum.at(depth, user, deeper)
    return family[parent], depth


def _keys(ids: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The first eight bytes of each id: what begins alike may pass for the same here."""
    return np.ascontiguousarray(ids[:, :8]).view(np.uint64).reshape(-1)


class _Members(NamedTuple):
    """Rows of one table that are members: `counts` and keys of their references."""

    row: Ints
    start: Ints
    stored: Ints
    work: Ints
    key: NDArray[np.uint64]
    counts: Ints
    references: NDArray[np.uint64]


def _members(entries: PackEntries, needed: NDArray[np.uint64]) -> _Members:
    """The rows that have references, or are one."""
    table = entries.table
    keys = _keys(table.view(np.uint8).reshape(-1, ENTRY_BYTES))
    mine = (np.isin(keys, needed) | (table["refs"] > 0)) & ~odd(table)
    rows = np.flatnonzero(mine)
    counts = table["refs"].astype(np.int64)
    reference = _keys(entries.refs)[np.repeat(mine, counts)]
    start, stored = spans(table[rows])[0], table["stored"][rows].astype(np.int64)
    return _Members(rows, start, stored, work_of(table[rows]), keys[rows], counts[rows], reference)


def units(
    tables: Sequence[Table], kin: Families, size: int, *, prove: bool = True
) -> Iterator[Unit]:
    """Cut everything into units of about `size` of work, or of one family where that is more."""
    if len(kin):
        starts = np.flatnonzero(np.diff(kin.family, prepend=-1))
        cuts = starts[_cuts(_before(kin.work)[starts], size)]
        yield from (Kin(*edge) for edge in pairwise([*cuts.tolist(), len(kin)]))
    for number, (_, entries) in enumerate(tables):
        if len(entries):
            table = entries.table[np.argsort(entries.table["offset"], kind="stable")]
            end = int(table["offset"][-1]) + int(table["header"].max()) + 1
            cuts = table["offset"][_cuts(_before(work_of(table, prove)), size)]
            yield from (Stretch(number, *edge) for edge in pairwise([*cuts.tolist(), end]))


def _before(work: Ints) -> Ints:
    return np.cumsum(work) - work


def _cuts(before: Ints, size: int) -> Ints:
    """Where another `size` begins."""
    return np.flatnonzero(np.diff(before // size, prepend=-1))
