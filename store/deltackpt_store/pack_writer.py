"""Writing one pack: laying out records in batches, and the file that becomes durable.

`PackBuilder` only computes (any thread, no I/O); `PackFile` only performs I/O. The store writer
runs the two in different threads; `PackWriter` joins them for callers that want neither.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from deltackpt_store.codecs import RAW, Encoded
from deltackpt_store.copies import copy_bytes, whole_pages
from deltackpt_store.errors import DeltackptError, InvalidInputError, StateError
from deltackpt_store.fileio import (
    Buffer,
    FileIO,
    discard,
    make_subdirectory,
    temporary_name,
)
from deltackpt_store.oserror import storage_error, sync_directory
from deltackpt_store.pack import (
    ALIGNED_BYTES,
    ALIGNMENT,
    ENTRY,
    ID_BYTES,
    MAX_CHUNK_BYTES,
    MAX_PARAMS,
    MAX_REFERENCES,
    RECORD_BYTES,
    PackEntries,
    encode_header,
    encode_record,
    encode_trailer,
    pack_name,
)

BATCH_BYTES = 8 * 1024 * 1024
_ROOM_BYTES = 1024 * 1024
_ZEROS = bytes(ALIGNMENT)


class Batch(NamedTuple):
    """Consecutive bytes of a pack: `buffers`, `size` bytes in all, to be written at `offset`.

    `rooms` is the memory of what was laid out, to be given back.
    """

    offset: int
    buffers: list[Buffer]
    size: int
    rooms: Sequence[memoryview] = ()


class Rooms:
    """Memory to lay records out in: pieces on page boundaries, used again and again, by any thread.

    Were it new each time, the system would have to make it page by page.
    """

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque()

    def take(self) -> memoryview:
        """A piece, whatever is in it. MemoryError."""
        try:
            return self._free.pop() if self._free else whole_pages(_ROOM_BYTES)
        except OSError as error:
            raise MemoryError(str(error)) from error

    def give_back(self, rooms: Iterable[memoryview]) -> None:
        self._free.extend(rooms)


class _Big(NamedTuple):
    id: bytes
    payload: list[Buffer]
    size: int
    payload_hash: int


class PackBuilder:
    """The layout of one pack under construction.

    Records are laid out in memory whose page boundaries are those of the file, so that nothing has
    to be copied again in order to be written past the page cache. Large raw payloads are referred
    to where they lie: the caller keeps them unchanged until the batch that holds them is written.
    """

    def __init__(
        self, store_uuid: bytes, writer: str, seq: int, rooms: Rooms | None = None
    ) -> None:
        self.name = pack_name(writer, seq)
        self._header = encode_header(store_uuid, writer, seq)
        self._offset = 0  # file bytes handed out in batches
        self._rooms = Rooms() if rooms is None else rooms
        self._taken: list[memoryview] = []  # rooms of the present batch; the last one has ...
        self._left = memoryview(b"")  # ... this left
        self._laid_out = 0  # bytes
        self._big: list[_Big] = []
        self._big_bytes = 0
        self._entries: list[bytes] = []
        self._refs: list[bytes] = []
        self.records = 0
        self._lay_out(self._header)

    @property
    def pending(self) -> int:
        """Bytes added and not yet taken in a batch."""
        return self._laid_out + self._big_bytes

    @property
    def size(self) -> int:
        """Bytes of the file so far, without footer and trailer."""
        return self._offset + self.pending

    def add(self, chunk_id: bytes, raw: int, encoded: Encoded) -> int:
        """Append the blob of a chunk of `raw` bytes; return what it takes (head + payload).

        Raises InvalidInputError for lengths that the format cannot hold.
        """
        codec, params, refs, payload = encoded
        if len(payload) == 1:
            stored = len(payload[0])
            payload_hash = xxh3_64_intdigest(payload[0])
        else:
            stored, payload_hash = _hash_all(payload)
        if (
            not 0 < raw <= MAX_CHUNK_BYTES
            or stored > MAX_CHUNK_BYTES
            or len(refs) > MAX_REFERENCES
            or len(params) > MAX_PARAMS
            or len(chunk_id) != ID_BYTES
        ):
            raise InvalidInputError(
                f"a chunk of {raw} bytes stored in {stored} does not fit into a record",
                hint=f"a chunk has 1 to {MAX_CHUNK_BYTES} bytes",
            )
        self.records += 1
        if codec == RAW and stored >= ALIGNED_BYTES:
            self._big.append(_Big(chunk_id, payload, stored, payload_hash))
            self._big_bytes += RECORD_BYTES + stored
            return RECORD_BYTES + stored
        head = encode_record(chunk_id, codec, raw, stored, payload_hash, refs, params)
        offset = self._offset + self._laid_out
        self._lay_out(head)
        for part in payload:
            self._lay_out(part)
        self._entries.append(
            ENTRY.pack(chunk_id, offset, len(head), stored, raw, codec, len(refs), 0)
        )
        self._refs.extend(refs)
        return len(head) + stored

    def _lay_out(self, data: Buffer) -> None:
        """Put bytes behind those laid out so far."""
        rest = memoryview(data)
        self._laid_out += len(rest)
        while len(rest):
            if not len(self._left):
                room = self._rooms.take()
                self._left = room if self._taken else room[self._offset % ALIGNMENT :]
                self._taken.append(room)
            size = min(len(rest), len(self._left))
            copy_bytes(self._left[:size], rest[:size])
            rest, self._left = rest[size:], self._left[size:]

    def take(self) -> Batch:
        """Lay out everything pending: encoded and small records first, then the aligned ones."""
        body: list[Buffer] = []
        end = self._offset + self._laid_out
        if self._big:
            end = self._lay_out_big(body, end)
        start, rooms = self._offset, self._taken
        laid_out = list(rooms)
        if rooms:
            laid_out[-1] = rooms[-1][: len(rooms[-1]) - len(self._left)]
            laid_out[0] = laid_out[0][start % ALIGNMENT :]
        self._taken, self._left, self._laid_out = [], memoryview(b""), 0
        self._big, self._big_bytes = [], 0
        self._offset = end
        return Batch(start, [*laid_out, *body], end - start, rooms)

    def _lay_out_big(self, body: list[Buffer], heads_at: int) -> int:
        """Lay out the heads of large raw records, and list their payloads; where they end."""
        # Payloads that end on a boundary come first, so that only odd ones cost padding.
        big = sorted(self._big, key=lambda b: b.size % ALIGNMENT != 0)
        end = heads_at + RECORD_BYTES * len(big)
        gaps: list[int] = []
        for i, (chunk_id, _, size, payload_hash) in enumerate(big):
            gap = -end % ALIGNMENT
            position = end + gap
            offset = heads_at + RECORD_BYTES * i
            skip = position - offset
            self._lay_out(encode_record(chunk_id, RAW, size, size, payload_hash, skip=skip))
            self._entries.append(ENTRY.pack(chunk_id, offset, skip, size, size, RAW, 0, 0))
            gaps.append(gap)
            end = position + size
        self._lay_out(_ZEROS[: gaps[0]])
        for one, gap in zip(big, [0, *gaps[1:]], strict=True):
            if gap:
                body.append(_ZEROS[:gap])
            body.extend(one.payload)
        return end

    def take_footer(self) -> Batch:
        """Footer and trailer; everything pending must have been taken before."""
        if self.pending:
            raise StateError("records are pending: take them first")
        footer = b"".join(self._entries) + b"".join(self._refs)
        trailer = encode_trailer(self._header, footer, self._offset, self.records, len(self._refs))
        return Batch(self._offset, [footer, trailer], len(footer) + len(trailer))

    def entries(self) -> PackEntries:
        """The table of all records taken so far."""
        footer = b"".join(self._entries) + b"".join(self._refs)
        return PackEntries.from_bytes(footer, len(self._entries))


def _hash_all(payload: Sequence[Buffer]) -> tuple[int, int]:
    state = xxh3_64()
    for buffer in payload:
        state.update(buffer)
    return sum(len(b) for b in payload), state.intdigest()


class PackFile:
    """The file of one pack, from temporary name to published. Used by one thread at a time.

    Any failure discards the temporary file and poisons the object: nothing is ever written or
    synced again on a file whose write or sync failed.
    """

    def __init__(
        self, io: FileIO, path: str, check_place: Callable[[], None] | None = None
    ) -> None:
        """`check_place` raises when nothing may be made at `path`; it is asked before the first
        write."""
        self.path = path
        self._io = io
        self._check_place = check_place
        self._temporary = os.path.join(
            os.path.dirname(path), temporary_name(os.path.basename(path))
        )
        self._handle: int | None = None
        self._state = "new"

    def write(self, batch: Batch) -> None:
        """Write the batch (StorageError)."""
        try:
            if self._state == "new" and self._check_place is not None:
                self._check_place()
        except DeltackptError:
            self.discard()
            raise
        try:
            if self._state == "new":
                make_subdirectory(self._io, os.path.dirname(self.path))
                self._handle = self._io.create(self._temporary)
                self._state = "open"
            if self._handle is None:
                raise StateError(f"pack {self.path} failed or is complete")
            self._io.write(self._handle, batch.buffers, batch.offset)
        except OSError as error:
            self.discard()
            raise storage_error(error, "write the pack", self.path) from error

    def seal(self) -> None:
        """Make the bytes durable and close the file, still under its temporary name."""
        handle, self._handle = self._handle, None
        if handle is None:
            raise StateError(f"pack {self.path} failed or is complete")
        try:
            try:
                self._io.sync(handle)
            finally:
                self._io.close(handle)
        except OSError as error:
            self.discard()
            raise storage_error(error, "make durable the pack", self.path) from error
        self._state = "sealed"

    def publish(self) -> None:
        """Give the sealed file its final name. Durable only when the directory is synced next."""
        if self._state != "sealed":
            raise StateError(f"pack {self.path} is not sealed")
        try:
            self._io.link(self._temporary, self.path)
        except OSError as error:
            self.discard()
            raise storage_error(error, "publish the pack", self.path) from error
        self._state = "published"
        discard(self._io, self._temporary)

    def discard(self) -> None:
        """Remove the temporary file, best effort. A published pack stays."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                self._io.close(handle)
        if self._state in ("open", "sealed"):
            discard(self._io, self._temporary)
        if self._state != "published":
            self._state = "failed"


class PackWriter:
    """Builder and file in one, for a single thread: `append` blobs, then `finish`.

    Holds at most about `BATCH_BYTES` of payload beside what it was given.
    """

    def __init__(self, io: FileIO, path: str, store_uuid: bytes, writer: str, seq: int) -> None:
        self._io = io
        self._rooms = Rooms()
        self._builder = PackBuilder(store_uuid, writer, seq, self._rooms)
        self._file = PackFile(io, path)

    @property
    def name(self) -> str:
        return self._builder.name

    @property
    def size(self) -> int:
        """Bytes so far, without footer and trailer."""
        return self._builder.size

    def append(self, chunk_id: bytes, raw: int, encoded: Encoded) -> int:
        """Add a blob and return the bytes it takes. What is raw stays unchanged until `finish`.

        Where it lies is known when its batch is laid out: see the entries that `finish` returns.
        """
        size = self._builder.add(chunk_id, raw, encoded)
        if self._builder.pending >= BATCH_BYTES:
            self._write_batch()
        return size

    def _write_batch(self) -> None:
        batch = self._builder.take()
        self._file.write(batch)
        self._rooms.give_back(batch.rooms)

    def finish(self) -> PackEntries:
        """Write what is left, make the pack durable and publish it, durably (StorageError)."""
        self._write_batch()
        self._file.write(self._builder.take_footer())
        self._file.seal()
        self._file.publish()
        sync_directory(self._io, os.path.dirname(self._file.path))
        return self._builder.entries()

    def abort(self) -> None:
        """Give up an unfinished pack and remove its temporary file."""
        self._file.discard()
