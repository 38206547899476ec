"""Elements of a chunk: their width, difference to a reference, and byte planes.

A chunk is taken as ``length // width`` little-endian unsigned integers and ``length % width``
bytes left over (the *rest*). *Planes* are byte 0 (least significant) of every element, then byte 1
of every element, and so on. The loops are compiled (kernels.py); what is written here with NumPy is
for where they are not. There, work goes in blocks that stay in a core's cache; shifts and narrowing
casts do it 2.5 times as fast as strided copies.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.coding import kernels
from deltackpt_store.coding.kernels import Stream
from deltackpt_store.coding.streams import spread

Elements = NDArray[Any]
Bytes = NDArray[np.uint8]

WIDTHS = (1, 2, 4, 8)
_BLOCK = 32 * 1024  # elements
_JOINED = 64 * 1024  # elements
_UNSIGNED = {w: np.dtype(f"<u{w}") for w in WIDTHS}
_SIGNED = {w: np.dtype(f"<i{w}") for w in WIDTHS}

if sys.byteorder != "little":  # planes are cut with shifts of native integers
    raise ImportError("deltackpt needs a little-endian machine")


def element_width(dtype: str) -> int:
    """Bytes per scalar of a dtype by name (1, 2, 4 or 8); 1 where the name says nothing.

    Complex types count as pairs of their real type. A wrong width costs compression, nothing else.
    """
    name, _, _ = dtype.partition("_")
    bits = name[len(name.rstrip("0123456789")) :]
    if name.startswith("complex"):
        return {"32": 2, "64": 4, "128": 8}.get(bits, 1)
    return {"16": 2, "32": 4, "64": 8}.get(bits, 1)


def elements_of(data: memoryview, width: int) -> Elements:
    """The whole elements of `data` as integers, without a copy; the rest is left out."""
    return np.frombuffer(data, _UNSIGNED[width], len(data) // width)


def reference_elements(reference: memoryview, count: int, width: int) -> Elements:
    """`count` elements of a reference of any length: cut off, or continued with zeros."""
    have = min(len(reference) // width, count)
    elements = np.frombuffer(reference, _UNSIGNED[width], have)
    if have == count:
        return elements
    return np.concatenate((elements, np.zeros(count - have, _UNSIGNED[width])))


def split(values: Elements, reference: Elements | None = None) -> list[Bytes]:
    """The planes of `values`, or of their `difference` to a reference, least significant first."""
    if kernels.native is not None:
        return kernels.native.split(values, reference)
    return _split(values if reference is None else difference(values, reference))


def join(planes: Sequence[Stream], out: Elements, reference: Elements | None = None) -> None:
    """Undo `split` into `out`."""
    if kernels.native is not None:
        kernels.native.join(planes, reference, out)
        return
    _join([spread(plane) for plane in planes], out)
    if reference is not None:
        undo_difference(out, reference, out)


def difference(values: Elements, reference: Elements) -> Elements:
    """Zig-zag coded ``values - reference``: small for small steps up or down (0, -1, 1, -2, ...).

    Integer subtraction of the bit patterns, modulo the width, so it can always be undone.
    """
    width = values.itemsize
    out = np.empty(len(values), _UNSIGNED[width])
    sign = np.empty(min(len(values), _BLOCK), _SIGNED[width])
    for start in range(0, len(values), _BLOCK):
        step = out[start : start + _BLOCK]
        signs = sign[: len(step)]
        np.subtract(values[start : start + _BLOCK], reference[start : start + _BLOCK], out=step)
        np.right_shift(step.view(_SIGNED[width]), 8 * width - 1, out=signs)
        np.left_shift(step, 1, out=step)
        np.bitwise_xor(step, signs.view(_UNSIGNED[width]), out=step)
    return out


def undo_difference(coded: Elements, reference: Elements, out: Elements) -> None:
    """Write ``reference + difference`` into `out` (which may be `coded` itself)."""
    width = coded.itemsize
    sign = np.empty(min(len(coded), _BLOCK), _UNSIGNED[width])
    for start in range(0, len(coded), _BLOCK):
        step = coded[start : start + _BLOCK]
        signs = sign[: len(step)]
        np.bitwise_and(step, 1, out=signs)
        np.negative(signs, out=signs)
        np.bitwise_xor(np.right_shift(step, 1), signs, out=signs)
        np.add(reference[start : start + _BLOCK], signs, out=out[start : start + _BLOCK])


def _split(values: Elements) -> list[Bytes]:
    width = values.itemsize
    if width == 1:
        return [values.view(np.uint8)]
    planes = [np.empty(len(values), np.uint8) for _ in range(width)]
    shifted = np.empty(min(len(values), _BLOCK), _UNSIGNED[width])
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        stop = start + len(block)
        np.copyto(planes[0][start:stop], block, casting="unsafe")
        for k in range(1, width):
            np.right_shift(block, 8 * k, out=shifted[: len(block)])
            np.copyto(planes[k][start:stop], shifted[: len(block)], casting="unsafe")
    return planes


def _join(planes: Sequence[Bytes], out: Elements) -> None:
    """Planes become halves of half the width, and two halves an element, which moves half as many
    bytes as widening each plane to the full width. Upper planes that are constant (of stride 0)
    are added as one number.
    """
    low = _lower(planes)
    top = sum(int(plane[0]) << 8 * k for k, plane in enumerate(planes) if k >= low)
    for start in range(0, len(out), _JOINED):
        block = out[start : start + _JOINED]
        part = [plane[start : start + len(block)] for plane in planes[:low]]
        if low == out.itemsize > 1:
            _pair(part, block)
            continue
        if low > 1:
            joined = _rooms.elements(low, len(block), 3)
            _pair(part, joined)
            np.copyto(block, joined)
        else:
            np.copyto(block, part[0])
        if top:
            np.bitwise_or(block, out.dtype.type(top), out=block)


def _lower(planes: Sequence[Bytes]) -> int:
    """How many planes (1, 2, 4 or all) hold all that are not constant."""
    changing = len(planes)
    while changing > 1 and len(planes[-1]) and not planes[changing - 1].strides[0]:
        changing -= 1
    return 1 << (changing - 1).bit_length()


def _pair(planes: Sequence[Bytes], out: Elements) -> None:
    half = len(planes) // 2
    low, high = planes[0], planes[-1]
    if half > 1:
        low, high = _rooms.halves(half, len(out))
        _pair(planes[:half], low)
        _pair(planes[half:], high)
    room = _rooms.elements(2 * half, len(out))
    np.copyto(out, low)
    np.copyto(room, high)
    np.left_shift(room, 8 * half, out=room)
    np.bitwise_or(out, room, out=out)


class _Rooms(threading.local):
    """Memory of one thread for `_join`, kept because fresh pages cost as much as the work."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Elements] = {}

    def elements(self, width: int, count: int, number: int = 0) -> Elements:
        """Room for `count` elements (at most `_JOINED`) of `width` bytes."""
        room = self._kept.get((width, number))
        if room is None:
            room = self._kept[width, number] = np.empty(_JOINED, _UNSIGNED[width])
        return room[:count]

    def halves(self, width: int, count: int) -> tuple[Elements, Elements]:
        return self.elements(width, count, 1), self.elements(width, count, 2)


_rooms = _Rooms()
