"""Chunks of 16-bit floats that are the rounding of float32 chunks: nothing is stored for them.

References: the float32 chunks that cover the elements, one after the other. Parameters: kind
(1: bfloat16, 2: float16), what becomes of a NaN (two 16-bit numbers, see :class:`Rule`), and, as
LEB128, where in the referenced bytes the first element lies. The payload is empty.

Rounding is to the nearest, ties to even, in integers (bfloat16) or by NumPy (float16): the same on
every machine. NaNs are what programs differ in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.coding import kernels
from deltackpt_store.coding.streams import Unpacker, damaged, leb128

KINDS = {"bfloat16": 1, "float16": 2}
MAX_PARTS = 255

_BLOCK = 8 * 1024  # elements
_HEAD = struct.Struct("<HH")

Halves = NDArray[np.uint16]
Words = NDArray[np.uint32]


class Rule(NamedTuple):
    """A NaN becomes `pattern`, with those bits of the shortened NaN that `keep` has."""

    pattern: int
    keep: int


RULES: dict[int, tuple[Rule, ...]] = {
    # what torch does one by one, in vectors, on CUDA; what the instructions of processors do
    1: (Rule(0x7FC0, 0), Rule(0xFFFF, 0), Rule(0x7FFF, 0), Rule(0x7FC0, 0xFFFF)),
    2: (Rule(0x7E00, 0x8000), Rule(0x7FFF, 0), Rule(0x7E00, 0x83FF)),
}


def round_to(kind: int, values: Words, rule: Rule) -> tuple[Halves, bool]:
    """The bits of float32 `values` as 16-bit floats, and whether a NaN was among them."""
    out = np.empty(len(values), np.uint16)
    return out, _round_into(out, kind, values, rule)


def _round_into(out: Halves, kind: int, values: Words, rule: Rule) -> bool:
    if kind == 1 and kernels.native is not None and not kernels.native.round_bfloat16(values, out):
        return False
    room = np.empty(min(len(values), _BLOCK), np.uint32)
    met = False
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        target = out[start : start + len(block)]
        floats = block.view(np.float32)
        if kind == 1:
            rounded = room[: len(block)]
            np.right_shift(block, np.uint32(16), out=rounded)
            rounded &= np.uint32(1)
            rounded += np.uint32(0x7FFF)
            rounded += block
            rounded >>= np.uint32(16)
            np.copyto(target, rounded, casting="unsafe")
        else:
            with np.errstate(all="ignore"):
                target[:] = floats.astype(np.float16).view(np.uint16)
        wrong = np.isnan(floats)
        if wrong.any():
            met = True
            target[wrong] = rule.pattern | (_shortened(kind, block[wrong]) & rule.keep)
    return met


def _shortened(kind: int, nans: Words) -> Any:
    top = nans >> np.uint32(16)
    if kind == 2:
        top = (top & np.uint32(0x8000)) | ((nans >> np.uint32(13)) & np.uint32(0x3FF))
    return top.astype(np.uint16)


def cast_params(kind: int, rule: Rule, start: int) -> bytes:
    """Parameters of a chunk whose first element lies `start` bytes into what is referred to."""
    return bytes((kind,)) + _HEAD.pack(*rule) + leb128(start)


def decode_cast(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    """Fill `out` with the rounded elements."""
    unpacker = Unpacker(memoryview(params), payload)
    kind = unpacker.byte()
    rule = Rule(*_HEAD.unpack(bytes(unpacker.byte() for _ in range(_HEAD.size))))
    start = unpacker.number()
    unpacker.end()
    if kind not in RULES:
        raise damaged(f"{kind} is no kind of rounding")
    if not references or len(out) % 2:
        raise damaged("it needs references, and whole elements")
    size = 2 * len(out)
    if start + size > sum(map(len, references)):
        raise damaged("what it refers to is too short")
    halves = np.frombuffer(out, "<u2")
    for part in _range(references, start, size):
        values = np.frombuffer(part, "<u4")
        _round_into(halves[: len(values)], kind, values, rule)
        halves = halves[len(values) :]


def _range(parts: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """`size` bytes from `start` of what the parts are together, in pieces of whole elements."""
    pieces: list[memoryview] = []
    end = start + size
    for part in parts:
        piece = part[max(0, start) : max(0, end)]
        start, end = start - len(part), end - len(part)
        if len(piece):
            pieces.append(piece)
    if any(len(piece) % 4 for piece in pieces):  # elements that lie in two parts
        return [memoryview(b"".join(pieces))]
    return pieces
