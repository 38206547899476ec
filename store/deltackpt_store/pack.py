"""The pack file, format version 1: its structures, and reading them back.

A pack is written once and never changed. All integers are little-endian::

    header     64 B   magic, version, store uuid, writer, sequence number, crc32
    records           in any order, each found through its 64-byte record head
    footer            one 56-byte entry per record, then the reference ids (32 B each)
    trailer    64 B   magic, footer offset, counts, total length, BLAKE3 digest

A *record* is a head (magic, crc32, codec, lengths, chunk id, hash of the payload) followed by
reference ids and codec parameters, which the head's crc32 covers too, and a payload that starts
``skip`` bytes after the head. For encoded and for small records the payload follows at once, so
one read of ``skip + stored`` bytes fetches everything. Raw payloads of at least
`ALIGNED_BYTES` start on a 4 KiB boundary of the file; to keep the padding small their heads stand
together in front of a run of payloads, so that neighbouring payloads are contiguous on disk
(read them as one range, ordered by ``offset + header``) and ``skip`` may be megabytes.

Everything read from a pack is untrusted: lengths and offsets are checked against the file's size
before anything is allocated. Writing is in :mod:`deltackpt_store.pack_writer`.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from deltackpt_store.fileio import Buffer, FileIO
from deltackpt_store.manifest import ID_BYTES, MAX_CHUNK_BYTES
from deltackpt_store.names import is_pack_name, relative_pack_path
from deltackpt_store.oserror import storage_error

PACK_MAGIC = b"\x89DCKPAK\n"
TRAILER_MAGIC = b"\x89DCKEND\n"
RECORD_MAGIC = b"\xc5DcR"
VERSION = 1

ALIGNMENT = 4096
ALIGNED_BYTES = 64 * 1024
"""Raw payloads of at least this many bytes start on a multiple of `ALIGNMENT`."""
MAX_REFERENCES = 255
MAX_PARAMS = 255

# magic, version, flags, store uuid, writer, sequence number, zeros, crc32 of all before
HEADER = struct.Struct("<8sHH16s8sQ16xI")
# magic, crc32 of the rest of the head + references + parameters, codec, flags, references,
# parameter bytes, skip, raw length, stored length, xxh3_64 of the stored payload, chunk id
RECORD = struct.Struct("<4sIBBBBIIIQ32s")
# chunk id, record offset, skip, stored length, raw length, codec, references, flags
ENTRY = struct.Struct("<32sQIIIBBH")
# magic, footer offset, records, references, total length; then 32 bytes BLAKE3 of
# (header + footer + these first fields)
TRAILER = struct.Struct("<8sQIIQ")
HEADER_BYTES = HEADER.size
RECORD_BYTES = RECORD.size
ENTRY_BYTES = ENTRY.size
TRAILER_BYTES = TRAILER.size + 32

ENTRY_DTYPE = np.dtype(
    [
        ("id", "u1", (ID_BYTES,)), ("offset", "<u8"), ("header", "<u4"), ("stored", "<u4"),
        ("raw", "<u4"), ("codec", "u1"), ("refs", "u1"), ("flags", "<u2"),
    ]
)  # fmt: skip

_TAIL_GUESS = 32 * 1024


class Location(NamedTuple):
    """Where a blob lies: record at `offset` of `pack`, payload at ``offset + header``.

    `header` is the number of bytes from the start of the record to its payload, `stored` and `raw`
    are byte lengths of the payload and of the chunk, `refs` the chunk ids needed to decode it.
    """

    pack: str
    offset: int
    header: int
    stored: int
    raw: int
    codec: int
    refs: tuple[bytes, ...] = ()

    @property
    def payload(self) -> int:
        """File offset of the first payload byte."""
        return self.offset + self.header


class PackHeader(NamedTuple):
    version: int
    store_uuid: bytes
    writer: str
    seq: int

    @property
    def name(self) -> str:
        return pack_name(self.writer, self.seq)


class RecordHead(NamedTuple):
    """The parsed, crc-checked front of one record."""

    id: bytes
    codec: int
    flags: int
    skip: int
    raw: int
    stored: int
    payload_hash: int
    refs: tuple[bytes, ...]
    params: bytes


# names --------------------------------------------------------------------------------------


def pack_name(writer: str, seq: int) -> str:
    """The name by which manifests and indexes call a pack, e.g. ``00ff..-00000003``."""
    return f"{writer}-{seq:08d}"


@functools.lru_cache(4096)
def pack_path(root: str, name: str) -> str:
    """Path of the pack `name` in the store at `root`.

    Raises :class:`CorruptionError` when the name has not the form of a pack name (names come from
    untrusted manifests and must not lead elsewhere).
    """
    if not is_pack_name(name):
        raise CorruptionError(f"{name!r} is not a pack name", kind="pack-name", pack=name)
    return os.path.join(root, relative_pack_path(name))


# encoding -----------------------------------------------------------------------------------


def encode_header(store_uuid: bytes, writer: str, seq: int) -> bytes:
    """The 64-byte header. `store_uuid` 16 bytes, `writer` 16 lower-case hex digits."""
    if not is_pack_name(pack_name(writer, seq)) or len(store_uuid) != 16:
        raise InvalidInputError(f"writer {writer!r} or sequence number {seq} cannot name a pack")
    front = HEADER.pack(PACK_MAGIC, VERSION, 0, store_uuid, bytes.fromhex(writer), seq, 0)[:-4]
    return front + struct.pack("<I", zlib.crc32(front))


def encode_record(
    chunk_id: bytes,
    codec: int,
    raw: int,
    stored: int,
    payload_hash: int,
    refs: tuple[bytes, ...] = (),
    params: bytes = b"",
    skip: int | None = None,
) -> bytes:
    """Head + references + parameters. `skip` defaults to their length (payload follows at once)."""
    more = b"".join(refs) + params if refs or params else b""
    if skip is None:
        skip = RECORD_BYTES + len(more)
    front = RECORD.pack(
        RECORD_MAGIC, 0, codec, 0, len(refs), len(params), skip, raw, stored, payload_hash, chunk_id
    )[8:]
    crc = zlib.crc32(more, zlib.crc32(front)) if more else zlib.crc32(front)
    return b"".join((RECORD_MAGIC, crc.to_bytes(4, "little"), front, more))


def encode_trailer(header: bytes, footer: bytes, offset: int, records: int, refs: int) -> bytes:
    """The trailer of a pack whose `footer` (table + references) starts at `offset`."""
    total = offset + len(footer) + TRAILER_BYTES
    front = TRAILER.pack(TRAILER_MAGIC, offset, records, refs, total)
    return front + _footer_digest(header, footer, front)


def _footer_digest(header: Buffer, footer: Buffer, front: Buffer) -> bytes:
    digest = blake3(header)
    digest.update(footer)
    digest.update(front)
    return digest.digest()


# decoding -----------------------------------------------------------------------------------


def decode_header(data: Buffer, path: str) -> PackHeader:
    """Parse a pack header. Raises CorruptionError or UnsupportedFormatError naming `path`."""
    if len(data) < HEADER_BYTES:
        raise _damaged(path, "shorter than a pack header")
    magic, version, flags, uuid, writer, seq, crc = HEADER.unpack_from(data)
    if magic != PACK_MAGIC:
        raise _damaged(path, "does not start with the pack magic")
    if crc != zlib.crc32(memoryview(data)[: HEADER_BYTES - 4]):
        raise _damaged(path, "header checksum does not match")
    if version != VERSION or flags:
        raise UnsupportedFormatError(
            f"pack {path} has format version {version} (flags {flags:#x}); this release reads 1",
            hint="upgrade deltackpt", path=path, version=version,
        )  # fmt: skip
    return PackHeader(version, uuid, writer.hex(), seq)


def decode_record(data: Buffer, path: str = "", offset: int = 0) -> RecordHead:
    """Parse and check a record's front from the start of `data`.

    `data` must reach at least over head, references and parameters (it may be longer). `path` and
    `offset` only name the record in the CorruptionError raised when anything is wrong.
    """
    if len(data) < RECORD_BYTES:
        raise _damaged(path, f"record at {offset} is cut off")
    magic, crc, codec, flags, nrefs, nparams, skip, raw, stored, payload_hash, chunk_id = (
        RECORD.unpack_from(data)
    )
    if magic != RECORD_MAGIC:
        raise _damaged(path, f"no record at {offset}")
    end_refs = RECORD_BYTES + nrefs * ID_BYTES
    end = end_refs + nparams
    if len(data) < end:
        raise _damaged(path, f"record at {offset} is cut off")
    view = memoryview(data)
    if crc != zlib.crc32(view[8:end]):
        raise _damaged(path, f"record head at {offset} does not match its checksum")
    if skip < end or not 0 < raw <= MAX_CHUNK_BYTES or flags:
        raise _damaged(path, f"record at {offset} declares impossible lengths")
    refs = tuple(bytes(view[i : i + ID_BYTES]) for i in range(RECORD_BYTES, end_refs, ID_BYTES))
    return RecordHead(
        chunk_id, codec, flags, skip, raw, stored, payload_hash, refs, bytes(view[end_refs:end])
    )


def check_payload(head: RecordHead, payload: Buffer, path: str = "") -> None:
    """Raise CorruptionError unless `payload` is exactly what was stored under `head`."""
    if len(payload) != head.stored or xxh3_64_intdigest(payload) != head.payload_hash:
        raise CorruptionError(
            f"the stored payload of chunk {head.id.hex()} in {path} is damaged",
            kind="payload", path=path, id=head.id.hex(),
        )  # fmt: skip


class PackEntries:
    """The table of a pack: one row per record, in footer order.

    `table` is a C-contiguous array of `ENTRY_DTYPE` and `refs` an array (k, 32) of the reference
    ids of all rows one after the other; neither is ever written again.
    """

    __slots__ = ("_raw", "_starts", "refs", "table")

    def __init__(self, table: NDArray[Any], refs: NDArray[np.uint8]) -> None:
        self.table = table
        self.refs = refs
        self._raw = table.view(np.uint8).reshape(-1).data
        self._starts: NDArray[np.int64] | None = None
        if len(refs):
            self._starts = np.cumsum(table["refs"], dtype=np.int64) - table["refs"]

    @classmethod
    def from_bytes(cls, data: Buffer, records: int) -> PackEntries:
        """From footer bytes: `records` entries, then reference ids. Holds on to `data`."""
        table = np.frombuffer(data, ENTRY_DTYPE, records)
        refs = np.frombuffer(data, np.uint8, offset=records * ENTRY_BYTES).reshape(-1, ID_BYTES)
        return cls(table, refs)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays take."""
        starts = 0 if self._starts is None else self._starts.nbytes
        return self.table.nbytes + self.refs.nbytes + starts

    @property
    def ids(self) -> NDArray[np.uint8]:
        """Chunk ids, shape (n, 32)."""
        return self.table["id"]

    def id(self, row: int) -> bytes:
        start = row * ENTRY_BYTES
        return bytes(self._raw[start : start + ID_BYTES])

    def references(self, row: int) -> tuple[bytes, ...]:
        if self._starts is None:
            return ()
        start = int(self._starts[row])
        stop = start + int(self.table["refs"][row])
        return tuple(self.refs[i].tobytes() for i in range(start, stop))

    def location(self, pack: str, row: int) -> Location:
        """The location of row `row`, saying that this table belongs to the pack named `pack`."""
        _, offset, header, stored, raw, codec, nrefs, _ = ENTRY.unpack_from(
            self._raw, row * ENTRY_BYTES
        )
        refs = self.references(row) if nrefs else ()
        return Location(pack, offset, header, stored, raw, codec, refs)

    def items(self, pack: str) -> Iterator[tuple[bytes, Location]]:
        """(chunk id, location) of every row."""
        for row in range(len(self)):
            yield self.id(row), self.location(pack, row)

    def to_bytes(self) -> bytes:
        return bytes(self._raw) + self.refs.tobytes()


class PackFooter(NamedTuple):
    header: PackHeader
    entries: PackEntries
    size: int
    """Length of the whole file in bytes."""


def read_footer(io: FileIO, path: str, *, store_uuid: bytes | None = None) -> PackFooter:
    """Read and check header, footer and trailer of the pack at `path`.

    Every entry returned lies inside the file. Raises CorruptionError (damaged, cut off, foreign
    store when `store_uuid` is given, or not the pack its file name says), UnsupportedFormatError,
    StorageError. Payloads are not read. Memory is bounded by the file's size.
    """
    try:
        handle = io.open(path)
        try:
            return _read_footer(io, handle, path, store_uuid)
        finally:
            io.close(handle)
    except OSError as error:
        raise storage_error(error, "read the pack", path) from error


def _read_footer(io: FileIO, handle: int, path: str, store_uuid: bytes | None) -> PackFooter:
    size = io.size(handle)
    if size < HEADER_BYTES + TRAILER_BYTES:
        raise _damaged(path, f"only {size} bytes long")
    header_bytes = _read(io, handle, 0, HEADER_BYTES, path)
    header = decode_header(header_bytes, path)
    if os.path.basename(path) != header.name + ".pack":
        raise _damaged(path, f"holds the pack {header.name}")
    if store_uuid is not None and header.store_uuid != store_uuid:
        raise _damaged(path, f"belongs to another store ({header.store_uuid.hex()})")
    tail_start = max(HEADER_BYTES, size - _TAIL_GUESS)
    tail = memoryview(_read(io, handle, tail_start, size - tail_start, path))
    front = tail[-TRAILER_BYTES:-32]
    magic, offset, records, refs, total = TRAILER.unpack(front)
    if magic != TRAILER_MAGIC or total != size:
        raise _damaged(path, "has no trailer at its end (cut off or grown)")
    length = records * ENTRY_BYTES + refs * ID_BYTES
    if offset < HEADER_BYTES or offset + length + TRAILER_BYTES != size:
        raise _damaged(path, "trailer declares impossible lengths")
    if offset >= tail_start:
        footer = memoryview(bytes(tail[offset - tail_start : -TRAILER_BYTES]))  # not all of it
    else:
        footer = memoryview(_read(io, handle, offset, length, path))
    if _footer_digest(header_bytes, footer, front) != bytes(tail[-32:]):
        raise _damaged(path, "footer does not match its digest")
    entries = PackEntries.from_bytes(footer, records)
    table = entries.table
    end = table["offset"] + table["header"] + table["stored"]
    if len(table) and (
        int(table["refs"].sum(dtype=np.int64)) != refs
        or int(table["offset"].max()) >= offset
        or int(end.max()) > offset
        or int(table["offset"].min()) < HEADER_BYTES
        or int(table["header"].min()) < RECORD_BYTES
        or int(table["raw"].min()) < 1
        or int(table["raw"].max()) > MAX_CHUNK_BYTES
    ):
        raise _damaged(path, "footer entries lie outside the file")
    taken = int(table["stored"].sum(dtype=np.int64)) + RECORD_BYTES * records + ID_BYTES * refs
    if taken > offset - HEADER_BYTES:  # checking every record would read the same bytes for ever
        raise _damaged(path, "footer entries lie on top of each other")
    return PackFooter(header, entries, size)


def read_record_head(io: FileIO, handle: int, offset: int, path: str = "") -> RecordHead:
    """Read and check the front of the record at `offset` (OSError, CorruptionError)."""
    data = bytearray(RECORD_BYTES)
    if io.read_into(handle, [data], offset) == RECORD_BYTES:
        more = data[10] * ID_BYTES + data[11]
        if more:
            data += bytes(more)
            got = io.read_into(handle, [memoryview(data)[RECORD_BYTES:]], offset + RECORD_BYTES)
            del data[RECORD_BYTES + got :]
        return decode_record(data, path, offset)
    raise _damaged(path, f"record at {offset} is cut off")


def _read(io: FileIO, handle: int, offset: int, length: int, path: str) -> bytes:
    data = bytearray(length)
    if io.read_into(handle, [data], offset) != length:
        raise _damaged(path, "became shorter while it was read")
    return bytes(data)


def _damaged(path: str, what: str) -> CorruptionError:
    return CorruptionError(f"pack {path} is damaged: {what}", kind="pack", path=path)
