"""The inner loops of the codecs, compiled from ``kernels.c`` when the package was built.

``native`` is None where there was no C compiler, or where the library does not come from the source
beside it: the callers then do the same with NumPy, in two to four times the time. All calls release
the GIL and may be made in any thread. Callers have checked all lengths; arrays are contiguous.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Elements = NDArray[Any]
Floats = NDArray[np.float32]

LIBRARY = "kernels.lib"
_SOURCE = "kernels.c"
_WIDTHS = (1, 2, 4, 8)
_LISTED = 15

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Native:
    """The compiled functions, for arrays."""

    def __init__(self, library: Any) -> None:
        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            return found

        self._split = {
            w: function(f"split_{w}", None, _POINTER, _POINTER, _SIZE, _POINTER) for w in _WIDTHS
        }
        self._join = {
            w: function(f"join_{w}", None, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER)
            for w in _WIDTHS
        }
        self._suit = function("symbols_suit", _INT, _POINTER, _SIZE, _POINTER)
        self._pack = function("symbols_pack", _SIZE, _POINTER, _SIZE, _INT, *(_POINTER,) * 3)
        self._others = function("symbols_others", _SIZE, _POINTER, _SIZE, _INT)
        self._unpack = function("symbols_unpack", None, _POINTER, _SIZE, _INT, *(_POINTER,) * 3)
        self._round = function("round_bfloat16", _INT, _POINTER, _SIZE, _POINTER)
        self._adam = function("adam_step", None, *(_POINTER,) * 6, _SIZE)

    def split(self, values: Elements, reference: Elements | None) -> list[Bytes]:
        """The byte planes of `values`, or of their zig-zag difference to as many of a reference."""
        count, width = len(values), values.itemsize
        planes = np.empty((width, count), np.uint8)
        self._split[width](_address(values), _address(reference), count, _address(planes))
        return list(planes)

    def join(self, planes: Sequence[Bytes], reference: Elements | None, out: Elements) -> None:
        """Undo `split` into `out`; a plane of stride 0 is one byte that stands for all."""
        places = (_POINTER * len(planes))(*map(_address, planes))
        strides = bytes(plane.strides[0] for plane in planes)
        self._join[out.itemsize](places, strides, len(out), _address(reference), _address(out))

    def suit(self, stream: Bytes) -> tuple[int, bytes]:
        """Symbols to a byte (0, 2 or 4), and the 15 most frequent values."""
        listed = ctypes.create_string_buffer(_LISTED)
        return self._suit(_address(stream), len(stream), listed), listed.raw

    def pack(self, stream: Bytes, per_byte: int, listed: bytes) -> tuple[Bytes, Bytes]:
        """Packed codes of `stream`, and the bytes that are not listed."""
        codes = np.empty(-(-len(stream) // per_byte), np.uint8)
        others = np.empty(len(stream), np.uint8)
        count = self._pack(
            _address(stream), len(stream), per_byte, listed, _address(codes), _address(others)
        )
        return codes, others[:count]

    def others(self, codes: Bytes, per_byte: int, size: int) -> int:
        """How many of the first `size` packed codes stand for bytes that are not listed."""
        return self._others(_address(codes), size, per_byte)

    def unpack(self, codes: Bytes, per_byte: int, listed: bytes, size: int, others: Bytes) -> Bytes:
        """Undo `pack`; as many `others` as :meth:`others` says."""
        stream = np.empty(size, np.uint8)
        self._unpack(_address(codes), size, per_byte, listed, _address(others), _address(stream))
        return stream

    def round_bfloat16(self, words: Elements, out: Elements) -> bool:
        """Round float32 bits; whether there is a NaN, whose result means nothing."""
        return bool(self._round(_address(words), len(words), _address(out)))

    def adam_step(
        self, numbers: Floats, before: Floats, after: Floats, second: Floats,
        weight: Floats | None, largest: Floats | None,
    ) -> None:  # fmt: skip
        """One optimizer step in place; `numbers` as in the source."""
        self._adam(
            _address(numbers), _address(before), _address(after), _address(second),
            _address(weight), _address(largest), len(second),
        )  # fmt: skip


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def load(folder: Path) -> Native | None:
    """The library in `folder`, None when there is none for the source in `folder`."""
    try:
        library = ctypes.CDLL(str(folder / LIBRARY))
        source = ctypes.c_uint32.in_dll(library, "kernels_source").value
        if source != zlib.crc32((folder / _SOURCE).read_bytes()):
            return None
        return Native(library)
    except (OSError, ValueError, AttributeError):
        return None


native = load(Path(__file__).parent)
