"""Salvage: finding the records of a pack whose footer is lost or damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from deltackpt_store.errors import CorruptionError
from deltackpt_store.fileio import FileIO
from deltackpt_store.oserror import storage_error
from deltackpt_store.pack import (
    MAX_CHUNK_BYTES,
    RECORD_MAGIC,
    Location,
    RecordHead,
    read_record_head,
)

_WINDOW = 4 * 1024 * 1024
_REREAD = 4  # payload bytes read, in multiples of the file's size, before a scan gives up


class ScannedRecord(NamedTuple):
    """A record found by scanning. `intact` says whether its payload matches the stored hash."""

    id: bytes
    location: Location
    intact: bool


def scan_records(io: FileIO, path: str) -> Iterator[ScannedRecord]:
    """Find records in a damaged or cut-off pack by their magic, without footer or trailer.

    Yields every record whose head is undamaged and whose payload lies inside the file, in file
    order. What lies in payloads is searched too, so a stored copy of a pack yields its records as
    well; they are chunks like others, and their ids say what they hold. Reads in windows of
    `_WINDOW` bytes, plus one payload at a time, skips holes, and stops in a file built to make it
    read the same bytes over and over. Raises StorageError.
    """
    try:
        handle = io.open(path)
        try:
            yield from _scan(io, handle, path, os.path.basename(path).removesuffix(".pack"))
        finally:
            io.close(handle)
    except OSError as error:
        raise storage_error(error, "read the pack", path) from error


def _scan(io: FileIO, handle: int, path: str, pack: str) -> Iterator[ScannedRecord]:
    size = io.size(handle)
    budget = _REREAD * size
    for offset in _candidates(io, handle, size):
        try:
            head = read_record_head(io, handle, offset, path)
        except CorruptionError:
            continue
        if offset + head.skip + head.stored > size or head.stored > MAX_CHUNK_BYTES:
            continue
        budget -= head.stored
        if budget < 0:
            return
        payload = bytearray(head.stored)
        io.read_into(handle, [payload], offset + head.skip)
        intact = xxh3_64_intdigest(payload) == head.payload_hash
        yield ScannedRecord(head.id, _location(pack, offset, head), intact)


def _candidates(io: FileIO, handle: int, size: int) -> Iterator[int]:
    """Offsets at which the record magic stands."""
    position = 0
    overlap = len(RECORD_MAGIC) - 1
    while (position := _skip_hole(io, handle, position, size)) < size:
        window = bytearray(min(_WINDOW, size - position))
        del window[io.read_into(handle, [window], position) :]
        at = window.find(RECORD_MAGIC)
        while at >= 0:
            yield position + at
            at = window.find(RECORD_MAGIC, at + 1)
        position += max(len(window) - overlap, 1)


def _skip_hole(io: FileIO, handle: int, position: int, size: int) -> int:
    """Where data begins from `position` on: a hole of a file costs its maker nothing, and must not
    cost its reader the time to read so many zeros. `position` itself where holes are not reported.
    """
    if type(io) is not FileIO:
        return position
    try:
        return os.lseek(handle, position, os.SEEK_DATA)
    except (OSError, AttributeError) as error:
        return size if getattr(error, "errno", None) == errno.ENXIO else position


def _location(pack: str, offset: int, head: RecordHead) -> Location:
    return Location(pack, offset, head.skip, head.stored, head.raw, head.codec, head.refs)
