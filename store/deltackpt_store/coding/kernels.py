"""The inner loops of the codecs, compiled from ``kernels.c`` when the package was built.

``native`` is None where there was no C compiler, or where the library does not come from the source
beside it: the callers then do the same with NumPy, in two to four times the time. All calls release
the GIL and may be made in any thread. Callers have checked all lengths; arrays are contiguous.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.fileio import Buffer

Bytes = NDArray[np.uint8]
Elements = NDArray[Any]
Floats = NDArray[np.float32]

LIBRARY = "kernels.lib"
_SOURCE = "kernels.c"
_WIDTHS = (1, 2, 4, 8)

_STREAM = struct.Struct("<QQBBB15s6x")  # struct stream of the source
_CONSTANT = [_STREAM.pack(0, 0, byte, 0, 0, b"") for byte in range(256)]

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_BYTE = ctypes.c_char
_LISTED = ctypes.c_char * 15
_bytes_at = ctypes.pythonapi["PyBytes_AsString"]  # by [], as an attribute it is everybody's
_bytes_at.restype, _bytes_at.argtypes = _POINTER, (ctypes.py_object,)


class Stream(NamedTuple):
    """`size` bytes as they are stored: `data`, or if `per_byte` is not 0 packed codes of the values
    `listed`, and the `others` in order (see `symbols`). Of data of one byte, that stands for all;
    so does one other.
    """

    size: int
    data: Buffer
    per_byte: int = 0
    listed: bytes = b""
    others: Buffer = b""


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
            w: function(f"join_{w}", None, _POINTER, _SIZE, _POINTER, _POINTER) for w in _WIDTHS
        }
        self._key_counts, self._sort, self._unsort = (
            {w: function(f"{name}_{w}", None, *arguments) for w in _WIDTHS[1:]}
            for name, arguments in (
                ("key_counts", (_POINTER, _SIZE, _INT, _POINTER)),
                ("sort", (_POINTER, _POINTER, _SIZE, _INT, *(_POINTER,) * 3)),
                ("unsort", (_POINTER, _POINTER, _SIZE, _INT, *(_POINTER,) * 3)),
            )
        )
        self._suit = function("symbols_suit", _INT, _POINTER, _SIZE, _POINTER)
        self._pack = function("symbols_pack", _SIZE, _POINTER, _SIZE, _INT, *(_POINTER,) * 3)
        self._others = function("symbols_others", _SIZE, _POINTER, _SIZE, _INT)
        self._round = function("round_bfloat16", _INT, _POINTER, _SIZE, _POINTER)
        self._adam = function("adam_step", None, *(_POINTER,) * 6, _SIZE)

    def split(self, values: Elements, reference: Elements | None) -> list[Bytes]:
        """The byte planes of `values`, or of their zig-zag difference to as many of a reference."""
        count, width = len(values), values.itemsize
        planes = np.empty((width, count), np.uint8)
        self._split[width](_address(values), _address(reference), count, _address(planes))
        return list(planes)

    def join(self, streams: Sequence[Stream], reference: Elements | None, out: Elements) -> None:
        """Undo `split` into `out`, from streams as they are stored."""
        rows = b"".join([_row(stream) for stream in streams])
        self._join[out.itemsize](rows, len(out), _address(reference), _address(out))

    def key_counts(self, base: Elements, at: int) -> NDArray[np.uint32]:
        """How many elements have each key, the 8 bits from bit `at` on."""
        counts = np.empty(256, np.uint32)
        self._key_counts[base.itemsize](_address(base), len(base), at, _address(counts))
        return counts

    def sort(
        self, values: Elements, base: Elements, at: int, class_of: Bytes, starts: Sequence[int]
    ) -> Elements:
        """Zig-zag differences to `base`, by class of key; class k from ``starts[k]`` on."""
        return self._by_class(self._sort, values, base, at, class_of, starts, np.empty_like(values))

    def unsort(
        self, differences: Elements, base: Elements, at: int, class_of: Bytes,
        starts: Sequence[int], out: Elements,
    ) -> None:  # fmt: skip
        """Undo `sort` into `out`."""
        self._by_class(self._unsort, differences, base, at, class_of, starts, out)

    def _by_class(
        self, functions: dict[int, Any], values: Elements, base: Elements, at: int,
        class_of: Bytes, starts: Sequence[int], out: Elements,
    ) -> Elements:  # fmt: skip
        following = np.array(starts, np.uint32)
        functions[values.itemsize](
            _address(values), _address(base), len(values), at, _address(class_of),
            _address(following), _address(out),
        )  # fmt: skip
        return out

    def suit(self, stream: Bytes) -> tuple[int, bytes]:
        """Symbols to a byte (0, 2 or 4), and the 15 most frequent values."""
        listed = _LISTED()
        return self._suit(_address(stream), len(stream), listed), listed.raw

    def pack(self, stream: Bytes, per_byte: int, listed: bytes) -> tuple[Bytes, Bytes]:
        """Packed codes of `stream`, and the bytes that are not listed."""
        codes = np.empty(-(-len(stream) // per_byte), np.uint8)
        others = np.empty(len(stream), np.uint8)
        count = self._pack(
            _address(stream), len(stream), per_byte, listed, _address(codes), _address(others)
        )
        return codes, others[:count]

    def others(self, codes: Buffer, per_byte: int, size: int) -> int:
        """How many of the first `size` packed codes stand for bytes that are not listed."""
        return self._others(_address(codes), size, per_byte)

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


def _row(stream: Stream) -> bytes:
    _, data, per_byte, listed, others = stream
    if not per_byte and len(data) == 1:
        return _CONSTANT[data[0]]
    bytes_at, byte = _place(data)
    others_at, other = _place(others)
    return _STREAM.pack(bytes_at, others_at, byte, other, per_byte, listed)


def _place(data: Buffer) -> tuple[int, int]:
    """The address of several bytes, or 0 and the only one."""
    return (0, data[0]) if len(data) == 1 else (_address(data) or 0, 0)


def _address(data: Any) -> int | None:
    """Of an array or other buffer; None where there is nothing."""
    if data is None or not len(data):
        return None
    if type(data) is bytes:
        return _bytes_at(data)
    try:
        return ctypes.addressof(_BYTE.from_buffer(data))  # three times as quick as NumPy
    except TypeError:  # memory that is only to be read
        return np.frombuffer(data, np.uint8).ctypes.data
    except ValueError:  # planes of no bytes
        return None


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
