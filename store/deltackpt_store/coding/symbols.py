"""Few symbols, packed: streams in which 3 or 15 byte values make up nearly everything.

The exponent bytes of floats and the upper bytes of small differences look like that. Zstandard at
its quick levels takes 20 to 60 % more than their entropy, because it finds short accidental
matches; four (or two) symbols to a byte leave it no room for that, and a quarter (half) of the
bytes to look at. Values that are not among the listed ones take the last code, and their bytes
follow in a stream of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

CRUMBS, NIBBLES = 4, 2  # symbols per byte
_LISTED = {CRUMBS: 3, NIBBLES: 15}
_WORD = {CRUMBS: np.dtype("<u4"), NIBBLES: np.dtype("<u2")}
_SAMPLE = 2048


class Symbols(NamedTuple):
    """`listed` byte values (3 or 15), their packed codes, and the other bytes in order."""

    listed: bytes
    codes: Bytes
    others: Bytes


def listed_count(per_byte: int) -> int:
    return _LISTED[per_byte]


def suits(stream: Bytes) -> tuple[int, bytes] | None:
    """Symbols per byte and the values to list, judged on a sample; None when neither suits."""
    # The stride is odd, so that it does not fall in step with elements of several bytes.
    counts = np.bincount(stream[:: len(stream) // _SAMPLE | 1], minlength=256)
    if counts.max() < 0.04 * counts.sum():
        return None
    order = np.argsort(-counts, kind="stable")[:15]
    shares = counts[order].cumsum() / counts.sum()
    if shares[0] >= 0.995:
        return None  # next to nothing but runs
    if shares[2] >= 0.74:
        return CRUMBS, order[:3].astype(np.uint8).tobytes()
    if shares[14] >= 0.75:
        return NIBBLES, order.astype(np.uint8).tobytes()
    return None


def pack_symbols(stream: Bytes, per_byte: int, listed: bytes) -> Symbols:
    """Replace each byte by its place in `listed`, packed; the codes are padded with zeros."""
    escape = len(listed)
    table = bytearray((escape,)) * 256
    for code, value in enumerate(listed):
        table[value] = code
    codes = np.zeros(-(-len(stream) // per_byte) * per_byte, np.uint8)
    codes[: len(stream)] = np.frombuffer(stream.tobytes().translate(table), np.uint8)
    others = np.compress(codes[: len(stream)] == escape, stream)
    words = codes.view(_WORD[per_byte])
    # Of crumbs, code i of a word goes to bits 2i of its highest byte.
    packed = words * np.uint32(0x01041040) >> 24 if per_byte == CRUMBS else words | words >> 4
    return Symbols(listed, packed.astype(np.uint8), others)


def unpack_codes(packed: Bytes, per_byte: int, size: int) -> Bytes:
    """The first `size` codes (their number in `packed` is at least that), writable."""
    words = packed.astype(_WORD[per_byte])
    if per_byte == CRUMBS:
        words |= words << 12
        words &= 0x000F000F
        words |= words << 6
        words &= 0x03030303
    else:
        words |= words << 4
        words &= 0x0F0F
    return words.view(np.uint8)[:size]


def unpack_symbols(codes: Bytes, listed: bytes, others: Bytes) -> Bytes:
    """Undo `pack_symbols`; `others` has a byte for each code that is not listed."""
    table = listed + bytes(256 - len(listed))
    values = np.frombuffer(bytearray(codes.tobytes().translate(table)), np.uint8)
    values[np.flatnonzero(codes == len(listed))] = others
    return values
