"""The difference to a reference, with elements sorted by the exponents of the reference.

A step moves large and small weights by about as much: that changes few bits of large floats and
many of small ones. So elements whose references have exponents in one range, a *class*, stand
together, and each class has streams, and statistics, of its own. What that gains over
`planes.encode_delta` stands in docs/delta-coding.md.

Parameters: element width (2, 4, 8), number of bounds (1 to 15), the bounds (bytes, ascending), then
the stream table. Payload: for each class that has elements the planes of its zig-zag differences,
then the rest as it is. The *key* of an element is bits 7 to 14, 23 to 30 or 52 to 59 of its
reference, by width: the exponent of bfloat16 and float32, the lower bits of that of float64, and
that of float16 with three bits more. Class *k* has the keys from bound *k* - 1 on and below bound
*k*; within a class elements keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.coding import kernels
from deltackpt_store.coding.elements import (
    Elements,
    difference,
    elements_of,
    join,
    reference_elements,
    split,
    undo_difference,
)
from deltackpt_store.coding.planes import Coded
from deltackpt_store.coding.streams import Entropy, Unpacker, damaged, pack
from deltackpt_store.fileio import Buffer

Numbers = NDArray[np.int64]

_MAX_BOUNDS = 15

_KEY_AT = {2: 7, 4: 23, 8: 52}  # lowest bit of the key, by width
_CLASSES = {2: 8, 4: 8, 8: 4}  # each costs tables of its own
_MOST_PARAMETERS = 255


def encode_by_exponent(
    raw: memoryview, reference: memoryview, width: int, entropy: Entropy
) -> Coded | None:
    """Code a chunk as differences to a reference; None where all elements are of one class."""
    if width not in _KEY_AT:
        return None
    values = elements_of(raw, width)
    base = reference_elements(reference, len(values), width)
    counts = _key_counts(base)
    bounds = _bounds(counts, _CLASSES[width])
    if not len(bounds):
        return None
    classes = _Classes(bounds, counts)
    differences = _sort(values, base, classes)
    params = bytes((width, len(bounds), *bounds.tolist()))
    payload: list[Buffer] = []
    for start, end in classes.spans():
        packed = pack(split(differences[start:end]), entropy, chance=True)
        params += packed.table
        payload += packed.payload
    if len(params) > _MOST_PARAMETERS:
        return None
    rest = raw[len(values) * width :]
    if len(rest):
        payload.append(rest)
    return Coded(params, payload, len(params) + sum(map(len, payload)))


def decode_by_exponent(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    """Undo `encode_by_exponent`."""
    if len(references) != 1:
        raise damaged("it needs one reference")
    unpacker = Unpacker(memoryview(params), payload)
    width, count = unpacker.byte(), unpacker.byte()
    if width not in _KEY_AT or not 0 < count <= _MAX_BOUNDS:
        raise damaged("its parameters are not valid")
    bounds = np.array([unpacker.byte() for _ in range(count)], np.int64)
    if (np.diff(bounds, prepend=0) <= 0).any():
        raise damaged("its bounds do not ascend")
    values = elements_of(out, width)
    base = reference_elements(references[0], len(values), width)
    classes = _Classes(bounds, _key_counts(base))
    differences = np.empty(len(values), values.dtype)
    for start, end in classes.spans():
        join([unpacker.stream(end - start) for _ in range(width)], differences[start:end])
    rest = unpacker.bytes(len(out) - len(values) * width)
    unpacker.end()
    _unsort(differences, base, classes, values)
    out[len(values) * width :] = rest


def _bounds(counts: Numbers, classes: int) -> Numbers:
    """Bounds between about equally many elements; none where they all have one key."""
    below = counts.cumsum()  # elements with this key or a lower one
    wanted = int(below[-1]) * np.arange(1, classes) / classes
    bounds = np.unique(np.searchsorted(below, wanted)) + 1
    return bounds[below[bounds - 1] < below[-1]]


class _Classes:
    """`of` is the class of each key, `edges` where each class begins among the sorted elements,
    with their number."""

    def __init__(self, bounds: Numbers, counts: Numbers) -> None:
        self.of = np.searchsorted(bounds, np.arange(256), "right").astype(np.uint8)
        sizes = np.bincount(self.of, counts, len(bounds) + 1).astype(np.int64)
        self.edges: list[int] = [0, *sizes.cumsum().tolist()]

    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of the classes that have elements."""
        return [(start, end) for start, end in pairwise(self.edges) if start < end]


def _key_counts(base: Elements) -> Numbers:
    """Of each of the 256 keys."""
    if kernels.native is not None:
        return kernels.native.key_counts(base, _KEY_AT[base.itemsize]).astype(np.int64)
    return np.bincount(_keys(base), minlength=256)


def _sort(values: Elements, base: Elements, classes: _Classes) -> Elements:
    """The differences, by class."""
    if kernels.native is not None:
        at = _KEY_AT[base.itemsize]
        return kernels.native.sort(values, base, at, classes.of, classes.edges)
    return difference(values, base)[_order(base, classes)]


def _unsort(differences: Elements, base: Elements, classes: _Classes, out: Elements) -> None:
    """Undo `_sort` into `out`."""
    if kernels.native is not None:
        at = _KEY_AT[base.itemsize]
        kernels.native.unsort(differences, base, at, classes.of, classes.edges, out)
        return
    coded = np.empty(len(out), out.dtype)
    coded[_order(base, classes)] = differences
    undo_difference(coded, base, out)


def _order(base: Elements, classes: _Classes) -> Numbers:
    return np.argsort(classes.of[_keys(base)], kind="stable")


def _keys(base: Elements) -> NDArray[np.uint8]:
    return (base >> _KEY_AT[base.itemsize]).astype(np.uint8)
