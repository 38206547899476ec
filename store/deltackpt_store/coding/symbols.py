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

from deltackpt_store.coding import kernels
from deltackpt_store.fileio import Buffer

Bytes = NDArray[np.uint8]

CRUMBS, NIBBLES = 4, 2  # symbols per byte
_LISTED = {CRUMBS: 3, NIBBLES: 15}
_WORD = {CRUMBS: np.dtype("<u4"), NIBBLES: np.dtype("<u2")}
_CODES = {
    CRUMBS: np.arange(256)[:, None] >> np.array((0, 2, 4, 6)) & 3,
    NIBBLES: np.arange(256)[:, None] >> np.array((0, 4)) & 15,
}
"""The codes of each byte, in order."""
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
    if kernels.native is not None:
        per_byte, listed = kernels.native.suit(stream)
        return (per_byte, listed[: _LISTED[per_byte]]) if per_byte else None
    # The stride is odd, so that it does not fall in step with elements of several bytes.
    counts = np.bincount(stream[:: len(stream) // _SAMPLE | 1], minlength=256)
    order = np.argsort(-counts, kind="stable")[:15]
    covered = counts[order].cumsum().tolist()
    total = int(counts.sum())
    if 25 * covered[0] < total or 200 * covered[0] >= 199 * total:
        return None  # nothing stands out, or next to nothing but runs
    if 50 * covered[2] >= 37 * total:
        return CRUMBS, order[:3].astype(np.uint8).tobytes()
    if 4 * covered[14] >= 3 * total:
        return NIBBLES, order.astype(np.uint8).tobytes()
    return None


def pack_symbols(stream: Bytes, per_byte: int, listed: bytes) -> Symbols:
    """Replace each byte by its place in `listed`, packed; the codes are padded with zeros."""
    if kernels.native is not None:
        return Symbols(listed, *kernels.native.pack(stream, per_byte, listed))
    codes = np.zeros(-(-len(stream) // per_byte) * per_byte, np.uint8)
    body = codes[: len(stream)]
    if per_byte == CRUMBS:
        _crumbs(stream, listed, body)
    else:
        table = bytearray((len(listed),)) * 256
        for code, value in enumerate(listed):
            table[value] = code
        body[:] = np.frombuffer(stream.tobytes().translate(table), np.uint8)
    others = stream.take(np.flatnonzero(body == len(listed)))
    words = codes.view(_WORD[per_byte])
    # Of crumbs, code i of a word goes to bits 2i of its highest byte.
    packed = words * np.uint32(0x01041040) >> 24 if per_byte == CRUMBS else words | words >> 4
    return Symbols(listed, packed.astype(np.uint8), others)


def _crumbs(stream: Bytes, listed: bytes, codes: Bytes) -> None:
    """The codes by comparison, which is quicker than a table: each byte equals at most one."""
    np.not_equal(stream, listed[1], out=codes.view(np.bool_))
    codes *= 2  # of the values 0, 1, 2 and all others: 2, 0, 2, 2
    codes += stream != listed[2]  # 3, 1, 2, 3
    codes *= stream != listed[0]  # 0, 1, 2, 3


def count_others(packed: Buffer, per_byte: int, size: int) -> int:
    """How many of the first `size` packed codes stand for values that are not listed."""
    if kernels.native is not None:
        return kernels.native.others(packed, per_byte, size)
    codes = _CODES[per_byte].take(np.frombuffer(packed, np.uint8), axis=0).reshape(-1)[:size]
    return int(np.count_nonzero(codes == _LISTED[per_byte]))


def unpack_symbols(packed: Bytes, per_byte: int, listed: bytes, size: int, others: Bytes) -> Bytes:
    """The first `size` values of packed codes; `others` are those that are not listed, or one
    value that stands for all of them."""
    escape = next(value for value in range(256) if value not in listed)
    values = np.frombuffer(listed + bytes((escape,)), np.uint8)
    table = values.take(_CODES[per_byte]).view(_WORD[per_byte])[:, 0]
    stream = table.take(packed).view(np.uint8)[:size]
    stream[stream == escape] = others
    return stream
