"""Byte streams inside a payload: each with the method that suits it, and a table that says which.

A stream of known length is stored as one of

    0  raw       its bytes
    1  constant  one byte, which every byte of the stream equals
    2  lz4       one LZ4 block
    3  zstd      one Zstandard frame that declares its content size

The *table* has one entry per stream: the method as one byte and, for lz4 and zstd, the stored
length as an unsigned LEB128 number of at most 4 bytes. The stored streams follow each other in the
payload. Noise is kept raw, which costs nothing to write and next to nothing to read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from deltackpt_store.errors import CorruptionError
from deltackpt_store.fileio import Buffer

Entropy = Literal["lz4", "zstd"]
Bytes = NDArray[np.uint8]

RAW, CONSTANT, LZ4, ZSTD = 0, 1, 2, 3

_LEVEL = 1  # level 3 gains nothing on floats (docs/delta-coding.md)
_TINY = 16  # below this no method beats raw


class _Tools(threading.local):
    """Compression contexts, which belong to one thread each."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress
        self.decompress = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress


_tools = _Tools()


class Packed(NamedTuple):
    """Streams ready to be stored. `noise` has a bit for each stream that did not compress."""

    table: bytes
    payload: list[Buffer]
    stored: int
    noise: int


def pack(streams: Sequence[Bytes], entropy: Entropy, noise: int = 0) -> Packed:
    """Store each stream in the way that takes least; those with a bit in `noise` are kept raw.

    A raw stream is referred to, not copied.
    """
    table = bytearray()
    payload: list[Buffer] = []
    stored = found = 0
    for number, stream in enumerate(streams):
        method, data = _pack_one(stream, entropy, skip=bool(noise >> number & 1))
        table.append(method)
        if method in (LZ4, ZSTD):
            table += leb128(len(data))
        elif method == RAW:
            found |= 1 << number
        payload.append(data)
        stored += len(data)
    return Packed(bytes(table), payload, stored, found)


def _pack_one(stream: Bytes, entropy: Entropy, *, skip: bool) -> tuple[int, Buffer]:
    size = len(stream)
    if size and stream[0] == stream[-1] == stream[size // 2] and not (stream != stream[0]).any():
        return CONSTANT, stream[:1].tobytes()
    if size < _TINY or skip:
        return RAW, stream.data
    if entropy == "lz4":
        data = lz4.block.compress(stream.data, store_size=False)
    else:
        data = _tools.compress(stream.data)
    # Less than 1.5 % is not worth what decoding it costs.
    if len(data) > size - size // 64 - 2:
        return RAW, stream.data
    return (LZ4 if entropy == "lz4" else ZSTD), data


class Unpacker:
    """Reads streams one after the other; every length is checked before memory is taken.

    Raises `CorruptionError` for whatever is not exactly as `pack` leaves it.
    """

    def __init__(self, table: memoryview, payload: memoryview) -> None:
        self._table = table
        self._payload = payload
        self._at = self._taken = 0

    def number(self) -> int:
        """An unsigned LEB128 number of at most 5 bytes from the table."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value
            if shift > 28:
                raise damaged("a number in its parameters is too long")

    def byte(self) -> int:
        if self._at >= len(self._table):
            raise damaged("its parameters are cut off")
        self._at += 1
        return self._table[self._at - 1]

    def stream(self, size: int) -> Bytes:
        """The next stream, which has `size` bytes; may be a view of the payload."""
        method = self.byte()
        if method == RAW:
            return np.frombuffer(self.bytes(size), np.uint8)
        if method == CONSTANT:
            if not size:
                raise damaged("an empty stream has a value")
            return np.full(size, self.bytes(1)[0], np.uint8)
        if method not in (LZ4, ZSTD):
            raise damaged(f"method {method} is not one")
        data = self.bytes(self.number())
        raw = _unlz4(data, size) if method == LZ4 else _unzstd(data, size)
        if len(raw) != size:
            raise damaged("a stream has another length")
        return np.frombuffer(raw, np.uint8)

    def bytes(self, size: int) -> memoryview:
        """The next `size` bytes of the payload as they are."""
        data = self._payload[self._taken : self._taken + size]
        if len(data) != size:
            raise damaged("it is cut off")
        self._taken += size
        return data

    def end(self) -> None:
        """Nothing may be left."""
        if self._taken != len(self._payload) or self._at != len(self._table):
            raise damaged("bytes are left over")


def _unlz4(data: memoryview, size: int) -> bytes:
    if not size:
        raise damaged("an empty stream is compressed")
    try:
        return lz4.block.decompress(data, uncompressed_size=size)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise damaged("an LZ4 block does not decode") from error


def _unzstd(data: memoryview, size: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(data)
    except (zstandard.ZstdError, ValueError) as error:
        raise damaged("a Zstandard frame does not decode") from error
    if declared != size or not size:
        raise damaged("a Zstandard frame declares another length")
    try:
        return _tools.decompress(data, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise damaged("a Zstandard frame does not decode") from error


def leb128(value: int) -> bytes:
    """`value` as an unsigned LEB128 number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def damaged(what: str) -> CorruptionError:
    return CorruptionError(f"a stored payload does not decode: {what}", kind="payload")
