"""Chunks as byte planes, of the elements themselves or of their difference to a reference.

Parameters: the element width (1, 2, 4 or 8) as one byte, then the stream table. Payload: one
stream per byte plane, least significant first, then the rest as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltackpt_store.coding.elements import (
    WIDTHS,
    Elements,
    elements_of,
    join,
    reference_elements,
    split,
)
from deltackpt_store.coding.streams import Entropy, Unpacker, damaged, pack
from deltackpt_store.fileio import Buffer


class Coded(NamedTuple):
    """Parameters and payload of one chunk; `stored` is their size, `noise` as in `Packed`."""

    params: bytes
    payload: list[Buffer]
    stored: int
    noise: int = 0


def encode_planes(raw: memoryview, width: int, entropy: Entropy, noise: int = 0) -> Coded:
    """Code a chunk by itself. Planes with a bit in `noise` are stored as they are."""
    return _encode(raw, width, None, entropy, noise)


def encode_delta(
    raw: memoryview, reference: memoryview, width: int, entropy: Entropy, noise: int = 0
) -> Coded:
    """Code a chunk as the difference to a reference of any length."""
    base = reference_elements(reference, len(raw) // width, width)
    return _encode(raw, width, base, entropy, noise)


def _encode(
    raw: memoryview, width: int, base: Elements | None, entropy: Entropy, noise: int
) -> Coded:
    values = elements_of(raw, width)
    packed = pack(split(values, base), entropy, noise, chance=base is not None)
    payload = packed.payload
    rest = raw[len(values) * width :]
    if len(rest):
        payload.append(rest)
    params = bytes((width,)) + packed.table
    return Coded(params, payload, len(params) + packed.stored + len(rest), packed.noise)


def decode_planes(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    """Undo `encode_planes`."""
    if references:
        raise damaged("it has a reference")
    _decode(params, payload, out, None)


def decode_delta(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    """Undo `encode_delta`."""
    if len(references) != 1:
        raise damaged("it needs one reference")
    _decode(params, payload, out, references[0])


def _decode(
    params: bytes, payload: memoryview, out: memoryview, reference: memoryview | None
) -> None:
    unpacker = Unpacker(memoryview(params), payload)
    width = unpacker.byte()
    if width not in WIDTHS:
        raise damaged(f"elements cannot have {width} bytes")
    values = elements_of(out, width)
    planes = [unpacker.stream(len(values)) for _ in range(width)]
    rest = unpacker.bytes(len(out) - len(values) * width)
    unpacker.end()
    base = None if reference is None else reference_elements(reference, len(values), width)
    join(planes, values, base)
    out[len(values) * width :] = rest
