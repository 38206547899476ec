"""Byte streams inside a payload: each with the method that suits it, and a table that says which.

A stream of known length is stored as one of

    0  raw       its bytes
    1  constant  one byte, which every byte of the stream equals
    2  lz4       one LZ4 block
    3  zstd      one Zstandard frame that declares its content size
    4  nibbles   15 listed values, then the stream of the codes, two to a byte (the first in the low
                 bits), then the stream of the values that are not listed, whose code is 15
    5  crumbs    the same with 3 listed values, four codes to a byte, and code 3

The *table* has one entry per stream: the method as one byte and, for lz4 and zstd, the stored
length as an unsigned LEB128 number; for nibbles and crumbs the entries of their two streams, which
are of methods 0 to 3. The stored streams follow each other in the payload. Noise is kept raw, which
costs nothing to write and next to nothing to read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from deltackpt_store.coding import symbols
from deltackpt_store.coding.kernels import Stream
from deltackpt_store.coding.symbols import (
    count_others,
    listed_count,
    pack_symbols,
    suits,
    unpack_symbols,
)
from deltackpt_store.errors import CorruptionError
from deltackpt_store.fileio import Buffer

Entropy = Literal["lz4", "zstd"]
Bytes = NDArray[np.uint8]

RAW, CONSTANT, LZ4, ZSTD, NIBBLES, CRUMBS = 0, 1, 2, 3, 4, 5
PER_BYTE = {NIBBLES: symbols.NIBBLES, CRUMBS: symbols.CRUMBS}
Press = Callable[[Buffer], bytes]

_LEVEL = 1  # level 3 gains nothing on floats (docs/delta-coding.md)
_TINY = 16  # below this no method beats raw
_SYMBOLS = 1024  # below this lists of symbols are too dear


class _Tools(threading.local):
    """Compression contexts, which belong to one thread each."""

    def __init__(self) -> None:
        self.general = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress
        # Differences have no structure that repeats: the fewest and longest matches are best, up
        # to 5 % smaller than the general level and twice as fast.
        chance = zstandard.ZstdCompressionParameters(
            compression_level=_LEVEL, window_log=17, hash_log=6, min_match=7,
            strategy=zstandard.STRATEGY_FAST,
        )  # fmt: skip
        self.chance = zstandard.ZstdCompressor(compression_params=chance).compress
        self.decompress = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress


_tools = _Tools()


class Packed(NamedTuple):
    """Streams ready to be stored. `noise` has a bit for each stream that did not compress."""

    table: bytes
    payload: list[Buffer]
    stored: int
    noise: int


def pack(
    streams: Sequence[Bytes], entropy: Entropy, noise: int = 0, *, chance: bool = False
) -> Packed:
    """Store each stream in the way that suits it; those with a bit in `noise` are kept raw.

    `chance`: the streams are differences, in which nothing repeats but by chance. A raw stream is
    referred to, not copied.
    """
    press = lz4_block if entropy == "lz4" else _tools.chance if chance else _tools.general
    coded = LZ4 if entropy == "lz4" else ZSTD
    table = bytearray()
    payload: list[Buffer] = []
    found = 0
    for number, stream in enumerate(streams):
        if noise >> number & 1:
            table.append(RAW)
            payload.append(stream.data)
            found |= 1 << number
        elif not _pack_any(stream, coded, press, table, payload):
            found |= 1 << number
    stored = sum(map(len, payload))
    return Packed(bytes(table), payload, stored, found)


def lz4_block(data: Buffer) -> bytes:
    return lz4.block.compress(data, store_size=False)


def _pack_any(
    stream: Bytes, coded: int, press: Press, table: bytearray, payload: list[Buffer]
) -> bool:
    """Append a stream by the method that suits it; False when it is kept raw."""
    size = len(stream)
    found = suits(stream) if size >= _SYMBOLS else None
    if found is None:
        method, data = _pack_plain(stream, coded, press)
        _append(method, data, table, payload)
        return method != RAW
    per_byte, listed = found
    packed = pack_symbols(stream, per_byte, listed)
    codes = _pack_plain(packed.codes, coded, press)
    others = _pack_plain(packed.others, coded, press)
    if len(listed) + len(codes[1]) + len(others[1]) > size - size // 64:
        _append(RAW, stream.data, table, payload)
        return False
    table.append(NIBBLES if per_byte == PER_BYTE[NIBBLES] else CRUMBS)
    payload.append(listed)
    _append(*codes, table, payload)
    _append(*others, table, payload)
    return True


def _append(method: int, data: Buffer, table: bytearray, payload: list[Buffer]) -> None:
    table.append(method)
    if method in (LZ4, ZSTD):
        table += leb128(len(data))
    payload.append(data)


def _pack_plain(stream: Bytes, coded: int, press: Press) -> tuple[int, Buffer]:
    size = len(stream)
    if size and stream[0] == stream[-1] == stream[size // 2] and not (stream != stream[0]).any():
        return CONSTANT, stream[:1].tobytes()
    if size < _TINY:
        return RAW, stream.data
    data = press(stream.data)
    # Less than 1.5 % is not worth what decoding it costs.
    if len(data) > size - size // 64 - 2:
        return RAW, stream.data
    return coded, data


def spread(stream: Stream) -> Bytes:
    """The bytes of a stream; of a stride of 0 where one stands for all."""
    size, data, per_byte, listed, others = stream
    stored = np.frombuffer(data, np.uint8)
    if not per_byte:
        return stored if len(stored) == size else np.broadcast_to(stored, size)
    codes = np.broadcast_to(stored, -(-size // per_byte))
    return unpack_symbols(codes, per_byte, listed, size, np.frombuffer(others, np.uint8))


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

    def stream(self, size: int) -> Stream:
        """The next stream, which has `size` bytes; may be a view of the payload."""
        method = self.byte()
        if method not in PER_BYTE:
            return Stream(size, self._plain(method, size))
        per_byte = PER_BYTE[method]
        listed = bytes(self.bytes(listed_count(per_byte)))
        length = -(-size // per_byte)
        codes = self._plain(self.byte(), length)
        packed = codes if len(codes) == length else bytes(codes) * length
        others = self._plain(self.byte(), count_others(packed, per_byte, size))
        return Stream(size, codes, per_byte, listed, others)

    def _plain(self, method: int, size: int) -> Buffer:
        """`size` bytes, or one that stands for all."""
        if method == RAW:
            return self.bytes(size)
        if method == CONSTANT:
            if not size:
                raise damaged("an empty stream has a value")
            return self.bytes(1)
        if method not in (LZ4, ZSTD):
            raise damaged(f"method {method} is not one")
        data = self.bytes(self.number())
        raw = _unlz4(data, size) if method == LZ4 else _unzstd(data, size)
        if len(raw) != size:
            raise damaged("a stream has another length")
        return raw

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
