"""Checking records against their tables and ids: what one thread or process of a scrub does."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from deltackpt_store import codecs
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fetch import Fetcher, Task, mismatch, unreadable
from deltackpt_store.manifest import MAX_CHUNK_BYTES
from deltackpt_store.pack import (
    ID_BYTES,
    RECORD_BYTES,
    RECORD_MAGIC,
    Location,
    RecordHead,
    check_payload,
    decode_record,
    pack_path,
)
from deltackpt_store.pack_set import PackSet, is_damage
from deltackpt_store.scrub_order import (
    CODED,
    FRONT,
    RAW,
    Families,
    Kin,
    Pieces,
    Stretch,
    Table,
    Unit,
    front_bytes,
    pieces,
)

WINDOW_BYTES = 1024 * 1024
"""What is read at once of a stretch. Four times as much does not stay in the cache of a core."""
FILL_BYTES = 8 * 1024 * 1024
"""What is read at once of families, from all their packs."""
LENT_BYTES = 32 * 1024 * 1024
"""Chunks of one family that are kept decoded for others at most."""
_GAP_BYTES = 32 * 1024  # pieces with less between them are read together

_HEAD = np.dtype(
    [
        ("magic", "<u4"), ("crc", "<u4"), ("codec", "u1"), ("flags", "u1"), ("refs", "u1"),
        ("params", "u1"), ("skip", "<u4"), ("raw", "<u4"), ("stored", "<u4"), ("hash", "<u8"),
        ("id", "u1", (ID_BYTES,)),
    ]
)  # fmt: skip
assert _HEAD.itemsize == RECORD_BYTES
_COUNT_AT = 10  # of the number of references in a record's head
_MAGIC = int.from_bytes(RECORD_MAGIC, "little")


class BadRecord(NamedTuple):
    """A record that does not hold what it should. `offset` is where it starts in the pack.

    `readable`: only the front of a raw record is damaged, the chunk can still be read from it.
    `dangling`: the record itself is whole, and a chunk that it is coded against cannot be read.
    """

    pack: str
    offset: int
    id: bytes
    readable: bool
    error: DeltackptError
    dangling: bool = False


class Checked(NamedTuple):
    """What came of a unit: bytes of payload, bad records, and packs that could not be used."""

    bytes: int
    bad: list[BadRecord]
    lost: dict[str, DeltackptError]


class Checker:
    """Checks units for one thread, with buffers of its own: about `FILL_BYTES` and `LENT_BYTES`,
    or the largest record. Use as a context manager.

    Without `prove` what is stored is compared with the checksums that are stored with it, and
    nothing is decoded: that finds what a disk has changed.
    """

    def __init__(
        self, packs: PackSet, tables: Sequence[Table], kin: Families, *, prove: bool = True
    ) -> None:
        self._prove = prove
        self._packs = packs
        self._tables = tables
        self._kin = kin
        self._fetcher = Fetcher(packs)
        self._bad: list[BadRecord] = []
        self._told = set(packs.damaged)
        self._pieces: tuple[int, Pieces] | None = None
        self._sums: dict[int, int] = {}  # checksums of raw payloads of that table, by row
        self._lent: set[bytes] = set()
        self._lent_bytes = 0
        self._buffers: dict[int, list[memoryview]] = {}  # free ones, by length
        self._lending: list[memoryview] = []

    def __enter__(self) -> Checker:
        self._fetcher.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._fetcher.__exit__(*exception)

    def check(self, unit: Unit) -> Checked:
        """Check a unit. Damage is a result; what says nothing of a file (too many open files, a
        server that is away) is raised: nothing has been found out then."""
        self._bad = []
        size = self._stretch(unit) if isinstance(unit, Stretch) else self._family(unit)
        damaged = dict(self._packs.damaged)
        lost = {name: damaged[name] for name in damaged.keys() - self._told}
        self._told.update(lost)
        return Checked(size, self._bad, lost)

    # stretches -----------------------------------------------------------------------------

    def _stretch(self, unit: Stretch) -> int:
        found = self._pieces_of(unit.table)
        low, end = _ints(np.searchsorted(found.begin, [unit.first, unit.end]))
        first = low
        while first < end:
            begin = found.starts[first]
            last, stop = begin + found.lengths[first], first + 1
            while stop < end and found.starts[stop] <= last + _GAP_BYTES:
                after = max(last, found.starts[stop] + found.lengths[stop])
                if after > begin + WINDOW_BYTES:
                    break
                last, stop = after, stop + 1
            self._window(unit.table, found, first, stop, begin, last - begin)
            first = stop
        return sum(found.payloads[low:end])

    def _pieces_of(self, number: int) -> Pieces:
        if self._pieces is None or self._pieces[0] != number:
            kin = self._kin.row[self._kin.table == number]
            self._pieces = number, pieces(self._tables[number].entries, kin)
            self._sums = {}
        return self._pieces[1]

    def _window(
        self, number: int, found: Pieces, first: int, end: int, begin: int, length: int
    ) -> None:
        """Check neighbouring pieces, read at once."""
        pack, entries = self._tables[number]
        data = self._fetcher.room(length, WINDOW_BYTES)
        if not self._fill(pack, data, begin):
            for i in range(first, end):  # one by one, to find out which of them it is
                self._alone(number, found.rows[i], found.kinds[i], found.starts[i],
                            found.lengths[i])  # fmt: skip
            return
        fronts = [i for i in range(first, end) if found.kinds[i] == FRONT]
        if fronts:
            self._fronts(number, found, fronts, data, begin)
        for i in range(first, end):
            kind, row = found.kinds[i], found.rows[i]
            if kind == FRONT:
                continue
            start = found.starts[i] - begin
            piece = data[start : start + found.lengths[i]]
            if kind != RAW or not self._prove:
                self._piece(number, row, kind, piece)
            elif blake3(piece).digest() != entries.id(row):
                self._note(number, row, mismatch(entries.id(row), pack))

    def _fill(self, pack: str, data: memoryview, start: int) -> bool:
        try:
            self._fetcher.fill(pack, [data], start, len(data))
        except (DeltackptError, OSError):
            return False
        return True

    def _alone(self, number: int, row: int, kind: int, start: int, length: int) -> None:
        data = memoryview(bytearray(length))
        try:
            self._fetcher.fill(self._tables[number].pack, [data], start, length)
        except DeltackptError as error:
            if not is_damage(error):
                raise
            self._note(number, row, error, readable=kind == FRONT)
        else:
            self._piece(number, row, kind, data)

    def _fronts(
        self, number: int, found: Pieces, which: list[int], data: memoryview, begin: int
    ) -> None:
        """Compare fronts of raw records with the table: all together, as far as nothing is odd."""
        whole = [i for i in which if found.starts[i] - begin + RECORD_BYTES <= len(data)]
        rows, starts = [found.rows[i] for i in whole], [found.starts[i] - begin for i in whole]
        at = np.array(starts, np.int64)[:, None] + np.arange(RECORD_BYTES)
        heads = np.frombuffer(data, np.uint8)[at].reshape(-1).view(_HEAD)
        alike = _alike(heads, self._tables[number].entries.table[rows])
        good = {
            i
            for i, start, same, crc in zip(
                whole, starts, _ints(alike), _ints(heads["crc"]), strict=True
            )
            if same and zlib.crc32(data[start + 8 : start + RECORD_BYTES]) == crc
        }
        if not self._prove:
            sums = zip(whole, rows, _ints(heads["hash"]), strict=True)
            self._sums.update({row: total for i, row, total in sums if i in good})
        for i in which:
            if i not in good:
                start = found.starts[i] - begin
                self._piece(number, found.rows[i], FRONT, data[start : start + found.lengths[i]])

    # families ------------------------------------------------------------------------------

    def _family(self, unit: Kin) -> int:
        kin = self._kin.part(unit.first, unit.end)
        tables, rows = _ints(kin.table), _ints(kin.row)
        family, needed = _ints(kin.family), _ints(kin.needed)
        places = [self._place(number, row) for number, row in zip(tables, rows, strict=True)]
        first = 0
        while first < len(places):
            end, taken = first + 1, _span(places[first])[1]
            while end < len(places) and taken + _span(places[end])[1] <= FILL_BYTES:
                taken += _span(places[end])[1]
                end += 1
            data = self._gather(places[first:end])
            for i in range(first, end):
                if i and family[i] != family[i - 1]:
                    self._end_loan()
                self._member(tables[i], rows[i], places[i], data[i - first], bool(needed[i]))
            first = end
        self._end_loan()
        return int(kin.stored.sum(dtype=np.int64))

    def _place(self, number: int, row: int) -> Location:
        pack, entries = self._tables[number]
        return entries.location(pack, row)

    def _gather(self, places: list[Location]) -> list[memoryview | None]:
        """What is stored at `places`, in buffers; None for what must be read by itself."""
        order = sorted(range(len(places)), key=lambda i: (places[i].pack, _span(places[i])[0]))
        found: list[memoryview | None] = [None] * len(places)
        groups: list[list[int]] = []
        pack, last = "", 0
        for i in order:
            start, length = _span(places[i])
            if places[i].pack != pack or not 0 <= start - last <= _GAP_BYTES:
                groups.append([])
            groups[-1].append(i)
            pack, last = places[i].pack, start + length
        lengths = [sum(_span(places[g[-1]])) - _span(places[g[0]])[0] for g in groups]
        room = self._fetcher.room(sum(lengths), FILL_BYTES)
        for group, length in zip(groups, lengths, strict=True):
            data, room = room[:length], room[length:]
            begin = _span(places[group[0]])[0]
            if self._fill(places[group[0]].pack, data, begin):
                for i in group:
                    start, size = _span(places[i])
                    found[i] = data[start - begin :][:size]
        return found

    def _member(
        self, number: int, row: int, place: Location, data: memoryview | None, needed: bool
    ) -> None:
        """Check a member; what others need is kept until the end of the family."""
        kind = CODED if place.codec != codecs.RAW else RAW
        chunk_id = self._tables[number].entries.id(row)
        try:
            if data is None:
                start, length = _span(place)
                data = memoryview(bytearray(length))
                self._fetcher.fill(place.pack, [data], start, length)
            keep = needed and chunk_id not in self._lent
            keep = keep and self._lent_bytes + place.raw <= LENT_BYTES
            out = self._buffer(place.raw) if keep else self._fetcher.output(place.raw)
            if kind == CODED:
                self._decode(place, chunk_id, data, out)
            elif place.stored != place.raw or blake3(data).digest() != chunk_id:
                raise mismatch(chunk_id, place.pack)
            elif keep:
                out[:] = data
        except DeltackptError as error:
            if not is_damage(error):
                raise
            self._note(number, row, error)
        else:
            if keep:
                self._fetcher.lend(Task(chunk_id, out, place))
                self._lent.add(chunk_id)
                self._lent_bytes += place.raw

    def _buffer(self, length: int) -> memoryview:
        free = self._buffers.get(length)
        data = free.pop() if free else memoryview(bytearray(length))
        self._lending.append(data)
        return data

    def _end_loan(self) -> None:
        if not self._lending:
            return
        self._fetcher.end_loan()
        lengths = {len(data) for data in self._lending}
        self._buffers = {length: self._buffers.get(length, []) for length in lengths}
        for data in self._lending:
            self._buffers[len(data)].append(data)
        self._lending, self._lent, self._lent_bytes = [], set(), 0

    # pieces --------------------------------------------------------------------------------

    def _piece(self, number: int, row: int, kind: int, data: memoryview) -> None:
        """Check one piece that has been read."""
        pack, entries = self._tables[number]
        chunk_id, place = entries.id(row), entries.location(pack, row)
        try:
            if kind == FRONT:
                path = pack_path(self._packs.root, pack)
                _as_declared(decode_record(data, path, place.offset), chunk_id, place, path)
            elif kind == CODED:
                self._decode(place, chunk_id, data, self._fetcher.output(place.raw))
            elif place.stored != place.raw or not self._raw_holds(number, row, place, data):
                raise mismatch(chunk_id, pack)
        except DeltackptError as error:
            if not is_damage(error):
                raise
            self._note(number, row, error, readable=kind == FRONT)

    def _raw_holds(self, number: int, row: int, place: Location, data: memoryview) -> bool:
        """Whether a raw payload has its id; or, without `prove`, its checksum."""
        total = None if self._prove else self._sum(row, place)
        if total is not None:
            return xxh3_64_intdigest(data) == total
        return blake3(data).digest() == self._tables[number].entries.id(row)

    def _sum(self, row: int, place: Location) -> int | None:
        """The checksum of a raw payload; None when the front that has it is damaged."""
        if row not in self._sums:
            front = memoryview(bytearray(front_bytes(place.header, len(place.refs))))
            try:
                self._fetcher.fill(place.pack, [front], place.offset, len(front))
                self._sums[row] = decode_record(front).payload_hash
            except DeltackptError:
                return None
        return self._sums[row]

    def _decode(self, place: Location, chunk_id: bytes, data: memoryview, out: memoryview) -> None:
        refs = b"".join(place.refs)
        found = bytes(data[_COUNT_AT : _COUNT_AT + 1])
        held = bytes(data[RECORD_BYTES : RECORD_BYTES + len(refs)])
        if not self._prove or found != bytes([len(place.refs)]) or held != refs:
            path = pack_path(self._packs.root, place.pack)
            head = decode_record(data, path, place.offset)
            _as_declared(head, chunk_id, place, path)
            check_payload(head, data[place.header :], path)
            return
        self._fetcher.decode(Task(chunk_id, out, place), data[: place.header], data[place.header :])

    def _note(
        self, number: int, row: int, error: DeltackptError, *, readable: bool = False
    ) -> None:
        pack, entries = self._tables[number]
        chunk_id, offset = entries.id(row), int(entries.table["offset"][row])
        # What is wrong with a reference is said with the reference's own id.
        dangling = error.context.get("id") not in (None, chunk_id.hex())
        self._bad.append(BadRecord(pack, offset, chunk_id, readable, error, dangling))


def _as_declared(head: RecordHead, chunk_id: bytes, place: Location, path: str) -> None:
    """CorruptionError unless a record says what the table says of it."""
    found = (head.id, head.codec, head.skip, head.raw, head.stored, head.refs)
    declared = (place.codec, place.header, place.raw, place.stored, place.refs)
    if found != (chunk_id, *declared):
        raise unreadable(chunk_id, f"its record in {path} differs from the table")


def _span(place: Location) -> tuple[int, int]:
    """(offset, length) in the file of what is read to check a chunk."""
    if place.codec == codecs.RAW:
        return place.payload, place.stored
    return place.offset, place.header + place.stored


def _alike(heads: NDArray[Any], table: NDArray[Any]) -> NDArray[np.bool_]:
    """Which heads are those of plain records, and say what their rows of the table say."""
    same = (heads["magic"] == _MAGIC) & (heads["flags"] == 0) & (heads["params"] == 0)
    same &= (heads["refs"] == 0) & (table["refs"] == 0) & (heads["codec"] == table["codec"])
    same &= (heads["skip"] == table["header"]) & (heads["skip"] >= RECORD_BYTES)
    same &= (heads["raw"] == table["raw"]) & (heads["stored"] == table["stored"])
    same &= (heads["raw"] > 0) & (heads["raw"] <= MAX_CHUNK_BYTES)
    return same & (heads["id"] == table["id"]).all(axis=1)


def _ints(array: NDArray[Any]) -> list[int]:
    return cast("list[int]", array.tolist())
