"""Reading every record of packs from end to end: each physical copy is checked by itself.

A pack is read in file order, in windows that fit into the cache of a core. For every record the
front must match its checksum and the table, and the payload must decode to bytes that have the
chunk's id. Nothing is kept of what was read; damage is collected and never ends the scan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltackpt_store import codecs
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fetch import HEAD_BYTES, SLACK_BYTES, Fetcher, Task, mismatch, unreadable
from deltackpt_store.pack import (
    ID_BYTES,
    MAX_PARAMS,
    RECORD_BYTES,
    Location,
    PackEntries,
    decode_record,
    pack_path,
)
from deltackpt_store.pack_set import PackSet
from deltackpt_store.reader import thread_count

WINDOW_BYTES = 1024 * 1024
"""What is read at once, about. Four times as much does not stay in the cache: a tenth slower."""
_TAKEN = 4
"""Neighbouring windows that one thread takes: a kernel reads ahead of who goes straight on."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), by one thread at a time, not always the same."""


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


class _Window(NamedTuple):
    """Neighbouring pieces of one pack: `rows` of its table, and whether each is only a front.

    `stored` are the bytes of the payloads among them.
    """

    pack: str
    entries: PackEntries
    rows: list[int]
    fronts: list[bool]
    start: int
    length: int
    stored: int


def scrub(
    packs: PackSet,
    names: Sequence[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[BadRecord]:
    """Check every record of the packs `names` (known to `packs.index`); return the bad ones.

    Errors of reading (of any kind) count against the records they hit. Memory is bounded by two
    times `WINDOW_BYTES`, or the largest record, per thread.
    """
    return _Scrub(packs, names, threads, progress).run()


class _Scrub:
    def __init__(
        self, packs: PackSet, names: Sequence[str], threads: int | None, progress: Progress | None
    ) -> None:
        self._packs = packs
        self._tables = [(n, e) for n in names if (e := packs.index.entries(n)) is not None]
        stored = [int(e.table["stored"].sum(dtype=np.int64)) for _, e in self._tables]
        records = sum(len(e) for _, e in self._tables)
        self._total = sum(stored)
        self._threads = thread_count(threads, self._total, records)
        self._progress = progress
        self._done = 0
        self._bad = [bad for name, entries in self._tables for bad in _impossible(name, entries)]
        self._lock = threading.Lock()
        self._windows = self._all_windows()
        self._fatal: BaseException | None = None

    def run(self) -> list[BadRecord]:
        helpers = [
            threading.Thread(target=self._loop, name="deltackpt-scrub", daemon=True)
            for _ in range(self._threads - 1)
        ]
        for helper in helpers:
            helper.start()
        try:
            self._loop()
        finally:
            self._stop(None)
            for helper in helpers:
                helper.join()
        if self._fatal is not None:
            raise self._fatal
        # A record that is damaged twice counts once, with the worse of it.
        self._bad.sort(key=lambda bad: (bad.pack, bad.offset, not bad.readable))
        return list({(bad.pack, bad.offset): bad for bad in self._bad}.values())

    def _stop(self, error: BaseException | None) -> None:
        with self._lock:
            self._fatal = self._fatal or error
            self._windows = iter(())

    def _all_windows(self) -> Iterator[_Window]:
        for name, entries in self._tables:
            yield from _windows(name, entries)

    def _loop(self) -> None:
        try:
            with Fetcher(self._packs) as fetcher:
                while True:
                    with self._lock:
                        windows = list(islice(self._windows, _TAKEN))
                    if not windows:
                        return
                    for window in windows:
                        self._note(self._check(fetcher, window), window.stored)
        except BaseException as error:  # of the caller's progress function, or an interrupt
            self._stop(error)

    def _note(self, bad: list[BadRecord], done: int) -> None:
        with self._lock:
            self._bad += bad
            self._done += done
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _check(self, fetcher: Fetcher, window: _Window) -> list[BadRecord]:
        data: memoryview | None = fetcher.room(window.length, WINDOW_BYTES)
        try:
            fetcher.fill(window.pack, [data], window.start, window.length)
        except (DeltackptError, OSError):
            data = None  # read piece by piece, to tell which of them it is
        bad: list[BadRecord] = []
        path = pack_path(self._packs.root, window.pack)
        for row, front in zip(window.rows, window.fronts, strict=True):
            place = window.entries.location(window.pack, row)
            chunk_id = window.entries.id(row)
            try:
                start, length = _piece(place, front)
                if data is None:
                    piece = memoryview(bytearray(length))
                    fetcher.fill(window.pack, [piece], start, length)
                else:
                    piece = data[start - window.start :][:length]
                self._check_piece(fetcher, chunk_id, place, path, front, piece)
            except DeltackptError as error:
                # What is wrong with a reference is said with the reference's own id.
                dangling = error.context.get("id") not in (None, chunk_id.hex())
                bad.append(BadRecord(window.pack, place.offset, chunk_id, front, error, dangling))
        return bad

    def _check_piece(
        self, fetcher: Fetcher, chunk_id: bytes, place: Location, path: str, front: bool,
        piece: memoryview,
    ) -> None:  # fmt: skip
        if front:
            head = decode_record(piece, path, place.offset)
            found = (head.id, head.codec, head.skip, head.raw, head.stored, head.refs)
            if found != (chunk_id, *_declared(place)):
                raise unreadable(chunk_id, f"its record in {path} differs from the table")
        elif place.codec != codecs.RAW:
            head = decode_record(piece, path, place.offset)
            if head.refs != place.refs:
                raise unreadable(chunk_id, f"its record in {path} differs from the table")
            task = Task(chunk_id, fetcher.output(place.raw), place)
            fetcher.decode(task, piece[: place.header], piece[place.header :])
        elif place.stored != place.raw or blake3(piece).digest() != chunk_id:
            raise mismatch(chunk_id, place.pack)


def _declared(place: Location) -> tuple[int, int, int, int, tuple[bytes, ...]]:
    return place.codec, place.header, place.raw, place.stored, place.refs


def _piece(place: Location, front: bool) -> tuple[int, int]:
    """(offset, length) in the file of what is checked at once."""
    if front:
        return place.offset, min(place.header, _front_bytes(len(place.refs)))
    if place.codec == codecs.RAW:
        return place.payload, place.stored
    return place.offset, place.header + place.stored


def _front_bytes(refs: Any) -> Any:
    return RECORD_BYTES + refs * ID_BYTES + MAX_PARAMS


def _odd(table: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows that declare lengths which no writer produces: they are not even read."""
    long = table["stored"].astype(np.int64) > table["raw"].astype(np.int64) + SLACK_BYTES
    return long | ((table["codec"] != codecs.RAW) & (table["header"] > HEAD_BYTES))


def _impossible(pack: str, entries: PackEntries) -> Iterator[BadRecord]:
    for row in np.flatnonzero(_odd(entries.table)).tolist():
        chunk_id = entries.id(row)
        error = unreadable(chunk_id, f"its record in pack {pack} declares impossible lengths")
        yield BadRecord(pack, int(entries.table["offset"][row]), chunk_id, False, error)


def _windows(pack: str, entries: PackEntries) -> Iterator[_Window]:
    """Cut a pack into windows of about `WINDOW_BYTES` that hold whole pieces, in file order."""
    rows = np.flatnonzero(~_odd(entries.table))
    table = entries.table[rows]
    if not len(table):
        return
    raw = table["codec"] == codecs.RAW
    offset = table["offset"].astype(np.int64)
    header, stored = table["header"].astype(np.int64), table["stored"].astype(np.int64)
    fronts = rows[raw]
    front_length = np.minimum(header, _front_bytes(table["refs"].astype(np.int64)))[raw]
    row = np.concatenate([rows, fronts])
    is_front = np.concatenate([np.zeros(len(rows), np.bool_), np.ones(len(fronts), np.bool_)])
    start = np.concatenate([np.where(raw, offset + header, offset), offset[raw]])
    length = np.concatenate([np.where(raw, stored, header + stored), front_length])
    payload = np.concatenate([stored, np.zeros(len(fronts), np.int64)])
    order = np.argsort(start, kind="stable")
    row, is_front, start, length = row[order], is_front[order], start[order], length[order]
    payload = payload[order]
    block: NDArray[np.int64] = start // WINDOW_BYTES
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(row)]
    for first, end in pairwise(edges):
        begin = int(start[first])
        last = int((start[first:end] + length[first:end]).max())
        yield _Window(
            pack,
            entries,
            row[first:end].tolist(),
            is_front[first:end].tolist(),
            begin,
            last - begin,
            int(payload[first:end].sum()),
        )
