"""Chunks of which few elements differ from the reference: their positions and differences.

Parameters: element width (1, 2, 4, 8), number of changed elements (LEB128), bytes per gap
(1, 2, 4), then the stream table. Payload: the planes of the gaps, the planes of the zig-zag
differences, then the rest as it is. A gap is the number of unchanged elements before a changed
one. The gaps' entropy is that of the positions, whatever share of the elements changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltackpt_store.coding.elements import (
    WIDTHS,
    elements_of,
    join,
    reference_elements,
    split,
)
from deltackpt_store.coding.planes import Coded
from deltackpt_store.coding.streams import Entropy, Unpacker, damaged, leb128, pack

MAX_SHARE = 0.5
"""Above this share of changed elements the planes of all differences are always smaller."""


def encode_sparse(
    raw: memoryview, reference: memoryview, width: int, entropy: Entropy
) -> Coded | None:
    """Code a chunk as changes of a reference; None when more than `MAX_SHARE` changed."""
    values = elements_of(raw, width)
    base = reference_elements(reference, len(values), width)
    places = np.flatnonzero(values != base)
    if len(places) > len(values) * MAX_SHARE:
        return None
    gaps = np.diff(places, prepend=-1) - 1
    widest = int(gaps.max()) if len(gaps) else 0
    gap_width = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4
    streams = split(gaps.astype(f"<u{gap_width}"))
    streams += split(values[places], base[places])
    packed = pack(streams, entropy)
    payload = packed.payload
    rest = raw[len(values) * width :]
    if len(rest):
        payload.append(rest)
    params = b"".join((bytes((width,)), leb128(len(places)), bytes((gap_width,)), packed.table))
    return Coded(params, payload, len(params) + packed.stored + len(rest))


def decode_sparse(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    """Undo `encode_sparse`."""
    if len(references) != 1:
        raise damaged("it needs one reference")
    unpacker = Unpacker(memoryview(params), payload)
    width = unpacker.byte()
    count = unpacker.number()
    gap_width = unpacker.byte()
    if width not in WIDTHS or gap_width not in (1, 2, 4):
        raise damaged("its parameters are not valid")
    values = elements_of(out, width)
    if count > len(values):
        raise damaged("more elements changed than there are")
    gaps = np.empty(count, f"<u{gap_width}")
    join([unpacker.stream(count) for _ in range(gap_width)], gaps)
    planes = [unpacker.stream(count) for _ in range(width)]
    rest = unpacker.bytes(len(out) - len(values) * width)
    unpacker.end()
    places = np.cumsum(gaps, dtype=np.int64) + np.arange(count)
    if count and int(places[-1]) >= len(values):
        raise damaged("a changed element lies outside the chunk")
    base = reference_elements(references[0], len(values), width)
    changes = np.empty(count, values.dtype)
    join(planes, changes, base[places])
    values[:] = base
    values[places] = changes
    out[len(values) * width :] = rest
