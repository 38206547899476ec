"""Fetching chunks from their records: file ranges, decoding, references, and the proof by id.

A :class:`Fetcher` belongs to one thread and is bounded in memory: one scratch buffer, a small
cache of reference chunks, and for one chunk at a time what its references take.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from blake3 import blake3

from deltackpt_store import codecs
from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.oserror import storage_error
from deltackpt_store.pack import (
    Location,
    RecordHead,
    check_payload,
    decode_record,
)
from deltackpt_store.pack_set import PackSet, is_damage

MAX_DEPTH = 8
"""References of references of ... a chunk that a reader follows."""

SLACK_BYTES = 4096
"""No payload is larger than its chunk by more than this."""

HEAD_BYTES = 64 * 1024
"""The front of an encoded record is never longer."""

_CACHE_BYTES = 8 * 1024 * 1024  # reference chunks kept, or
_CACHE_CHUNKS = 12  # as many as a chunk that follows from eight steps needs
_REFERENCE_BYTES = 512 * 1024 * 1024  # raw bytes of references read for one chunk
_REFERENCE_READS = 4096  # references read for one chunk, all depths together
_HANDLES = 8


Request = tuple[bytes, memoryview]
"""A chunk's id, and memory of its size to be filled with it."""


class Task(NamedTuple):
    """One chunk to fetch: its id, the memory it fills, and the record to take it from."""

    id: bytes
    dest: memoryview
    place: Location


class Budget:
    """Bounds what decoding one chunk may cost, whatever its references claim.

    `prove`: references are checked against their ids before they are used. Without it only the
    chunk itself is, which proves them as well, unless it fails.
    """

    def __init__(self, *, prove: bool) -> None:
        self.prove = prove
        self.bytes = _REFERENCE_BYTES
        self.reads = _REFERENCE_READS

    def take(self, size: int, chunk_id: bytes) -> None:
        self.bytes -= size
        self.reads -= 1
        if self.bytes < 0 or self.reads < 0:
            raise unreadable(chunk_id, "a chunk is coded against too much data")


class Fetcher:
    """What one thread needs to read: open packs, scratch memory, references just read.

    Use as a context manager; leaving it closes the files.
    """

    def __init__(self, packs: PackSet) -> None:
        self._packs = packs
        self._io: FileIO = packs.io
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._scratch = bytearray()
        self._output = bytearray()
        self._records: list[bytearray] = []  # one for each depth of references
        self._references: OrderedDict[bytes, bytearray] = OrderedDict()
        self._cached = 0
        # Buffers that fell out of the cache: still in use by the chunk at hand, or free for reuse.
        self._dropped: list[bytearray] = []
        self._lent: dict[bytes, memoryview] = {}
        self._free: list[bytearray] = []

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._handles:
            self._close(self._handles.popitem()[1])

    def _close(self, handle: int) -> None:
        with contextlib.suppress(OSError):  # what was read has been proved, whatever this says
            self._io.close(handle)

    def fetch(self, task: Task) -> None:
        """Fill the destination and check it against the id (CorruptionError, StorageError)."""
        place = task.place
        if place.codec == codecs.RAW:
            self._fetch_raw(task, prove=True)
        else:
            data = self._read_record(task, 0)
            self.decode(task, data[: place.header], data[place.header :])

    def lend(self, task: Task) -> None:
        """What has just been fetched serves as a reference, until :meth:`end_loan`."""
        self._lent[task.id] = task.dest

    def end_loan(self) -> None:
        """Destinations are not looked at any more."""
        self._lent.clear()

    def decode(self, task: Task, front: memoryview, payload: memoryview) -> None:
        """Decode a record just read (its front, its payload) and check the result."""
        head = self._check_record(task, front, payload)
        if head.refs:
            try:
                self._decode(task, head, payload, 0, Budget(prove=False))
                return
            except CorruptionError:
                # One of the references may be bad: once more, each proven or replaced by a copy.
                self._forget()
        self._decode(task, head, payload, 0, Budget(prove=True))

    def _fetch_raw(self, task: Task, *, prove: bool) -> None:
        place = task.place
        if place.stored != len(task.dest):
            raise unreadable(task.id, "its record declares two lengths")
        self.fill(place.pack, [task.dest], place.payload, place.stored)
        if prove and blake3(task.dest).digest() != task.id:
            raise mismatch(task.id, place.pack)

    def _read_record(self, task: Task, depth: int) -> memoryview:
        """The record of a chunk at that depth of references, until the next one there."""
        place = task.place
        if place.stored > len(task.dest) + SLACK_BYTES or place.header > HEAD_BYTES:
            raise unreadable(task.id, "its record declares impossible lengths")
        length = place.header + place.stored
        while len(self._records) <= depth:
            self._records.append(bytearray())
        if len(self._records[depth]) < length:
            self._records[depth] = bytearray(length + SLACK_BYTES)
        data = memoryview(self._records[depth])[:length]
        self.fill(place.pack, [data], place.offset, length)
        return data

    def _check_record(self, task: Task, front: memoryview, payload: memoryview) -> RecordHead:
        """The parsed front of a record that is what its table says, with an intact payload."""
        place = task.place
        path = self._packs.path(place.pack)
        head = decode_record(front, path, place.offset)
        declared = (head.id, head.codec, head.skip, head.raw, head.stored)
        if declared != (task.id, place.codec, place.header, len(task.dest), place.stored):
            raise unreadable(task.id, f"the table of {path} does not match its record")
        check_payload(head, payload, path)
        return head

    def _decode(
        self, task: Task, head: RecordHead, payload: memoryview, depth: int, budget: Budget
    ) -> None:
        if depth == 0:
            self._free += self._dropped
            self._dropped.clear()
        references = [self._reference(needed, depth + 1, budget) for needed in head.refs]
        codecs.decode(head.codec, head.params, payload, task.dest, references)
        if (budget.prove or depth == 0) and blake3(task.dest).digest() != task.id:
            raise mismatch(task.id, task.place.pack)

    def _reference(self, chunk_id: bytes, depth: int, budget: Budget) -> memoryview:
        """Raw bytes of a chunk that another is coded against, from any place that holds it."""
        if depth > MAX_DEPTH:
            raise unreadable(chunk_id, f"it is a reference {depth} deep")
        lent = self._lent.get(chunk_id)
        if lent is not None:
            return lent
        kept = self._references.get(chunk_id)
        if kept is not None:
            self._references.move_to_end(chunk_id)
            return memoryview(kept)
        error: DeltackptError = unreadable(chunk_id, "no intact pack holds it", "missing-chunk")
        for place in self.places(chunk_id):
            budget.take(place.raw, chunk_id)
            data = self._buffer(place.raw)
            task = Task(chunk_id, memoryview(data), place)
            try:
                if place.codec == codecs.RAW:
                    self._fetch_raw(task, prove=budget.prove)
                else:
                    record = self._read_record(task, depth)
                    payload = record[place.header :]
                    head = self._check_record(task, record[: place.header], payload)
                    self._decode(task, head, payload, depth, budget)
            except DeltackptError as failure:
                if not is_damage(failure):
                    raise
                error = failure
            else:
                self._keep(chunk_id, data)
                return memoryview(data)
        raise error

    def places(self, chunk_id: bytes) -> Iterator[Location]:
        """Every place that holds a chunk; more effort is spent only when the first ones fail."""
        places = self._packs.index.locations(chunk_id)
        yield from places
        seen = set(places)  # there may be any number
        self._packs.load_all()
        for place in [*self._packs.index.locations(chunk_id), *self._packs.salvage(chunk_id)]:
            if place not in seen:
                yield place

    def _buffer(self, length: int) -> bytearray:
        """Memory for a reference: touched before, where possible, as fresh pages are slow."""
        for i, data in enumerate(self._free):
            if len(data) == length:
                return self._free.pop(i)
        self._free.clear()
        return bytearray(length)

    def _keep(self, chunk_id: bytes, data: bytearray) -> None:
        self._cached += len(data) - len(self._references.get(chunk_id, b""))
        self._references[chunk_id] = data
        room = max(_CACHE_BYTES, _CACHE_CHUNKS * len(data))
        while self._cached > room and self._references:
            dropped = self._references.popitem(last=False)[1]
            self._cached -= len(dropped)
            self._dropped.append(dropped)

    def _forget(self) -> None:
        self._references.clear()
        self._cached = 0

    def fill(self, pack: str, buffers: list[memoryview], offset: int, length: int) -> None:
        """Read `length` bytes of a pack into `buffers`; CorruptionError when it ends before."""
        path = self._packs.path(pack)
        try:
            got = self._io.read_into(self._open(pack, path), buffers, offset)
        except OverflowError as error:  # an offset that no file can have
            raise CorruptionError(f"pack {path} is cut off", kind="pack", path=path) from error
        except OSError as error:
            raise storage_error(error, "read the pack", path) from error
        if got != length:
            raise CorruptionError(f"pack {path} is cut off", kind="pack", path=path)

    def _open(self, pack: str, path: str) -> int:
        handle = self._handles.get(pack)
        if handle is None:
            while len(self._handles) >= _HANDLES:
                self._close(self._handles.popitem(last=False)[1])
            handle = self._handles[pack] = self._io.open(path)
        return handle

    def room(self, length: int, at_least: int) -> memoryview:
        """`length` bytes of the scratch buffer, whose content is anything."""
        if len(self._scratch) < length:
            self._scratch = bytearray(max(length, at_least))
        return memoryview(self._scratch)[:length]

    def output(self, length: int) -> memoryview:
        """`length` bytes of another buffer, to decode a chunk into that nobody keeps."""
        if len(self._output) < length:
            self._output = bytearray(length)
        return memoryview(self._output)[:length]


def unreadable(chunk_id: bytes, reason: str, kind: str = "damaged-chunk") -> CorruptionError:
    return CorruptionError(
        f"chunk {chunk_id.hex()} is unreadable: {reason}", kind=kind, id=chunk_id.hex()
    )


def mismatch(chunk_id: bytes, pack: str) -> CorruptionError:
    """The error for bytes that do not have the id under which they are stored."""
    return unreadable(chunk_id, f"its bytes in pack {pack} do not have that id")
