"""Encodings of chunks: the registry, the built-in ones, and the choice among them.

An encoding never changes identity: a chunk's id is the hash of its raw bytes, and the reader
checks it after decoding. Codec ids are part of the format and never reused:

    0  raw           the chunk's bytes
    1  grouped-lz4   bytes grouped by significance, then one LZ4 block. Parameters: 1 byte, the
                     element width w. The grouped form is byte 0 of every element, then byte 1
                     of every element, ..., then the ``length % w`` bytes left over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import lz4.block
import numpy as np
from numpy.typing import NDArray

from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from deltackpt_store.fileio import Buffer

RAW = 0
GROUPED_LZ4 = 1

MODES = ("auto", "fast", "small", "none")

_SMALL = 4096  # below this an attempt costs more than it can save
_SAMPLE = 4096
_KEEP = 0.95  # an encoding must save at least 5 %

Decode = Callable[[bytes, memoryview, memoryview, Sequence[memoryview]], None]


class Encoded(NamedTuple):
    """One chunk ready to be stored. `payload` buffers are written one after the other."""

    codec: int
    params: bytes
    refs: tuple[bytes, ...]
    payload: list[Buffer]

    @property
    def stored(self) -> int:
        """Bytes of payload."""
        return sum(len(b) for b in self.payload)


@dataclass(frozen=True, slots=True)
class Codec:
    """A registered encoding. `decode(params, payload, out, references)` fills all of `out`."""

    id: int
    name: str
    decode: Decode


_codecs: dict[int, Codec] = {}


def register(codec: Codec) -> None:
    """Add a codec to the registry; its id must be new."""
    if not 0 <= codec.id <= 255 or codec.id in _codecs:
        raise InvalidInputError(f"codec id {codec.id} is taken or not in 0..255")
    _codecs[codec.id] = codec


def is_known(codec: int) -> bool:
    return codec in _codecs


def name_of(codec: int) -> str:
    """Display name of a codec id, also for ids this release does not know."""
    known = _codecs.get(codec)
    return known.name if known else f"codec-{codec}"


def decode(
    codec: int,
    params: bytes,
    payload: memoryview,
    out: memoryview,
    references: Sequence[memoryview] = (),
) -> None:
    """Decode `payload` into `out`, which has exactly the chunk's raw length, in bytes.

    Writes all of `out` and nothing else. Raises CorruptionError when the payload does not decode
    to exactly ``len(out)`` bytes, UnsupportedFormatError for an unknown codec. What `out` holds
    after an error is undefined. The caller checks the chunk id afterwards.
    """
    known = _codecs.get(codec)
    if known is None:
        raise UnsupportedFormatError(
            f"chunk is stored with codec {codec}, which this release does not know",
            kind="unknown-codec", hint="upgrade deltackpt", codec=codec,
        )  # fmt: skip
    known.decode(params, payload, out, references)


def choose(raw: memoryview, dtype: str = "uint8", mode: str = "auto") -> Encoded:
    """Encode one chunk without a reference: raw, or grouped + LZ4 when that saves at least 5 %.

    The result is never larger than raw. A raw result holds `raw` itself, not a copy: the caller
    keeps the buffer unchanged until the payload was written. `dtype` names the element type and
    only guides the choice; any length is fine. Whether encoding pays is judged on a sample of a
    large chunk first.
    """
    if mode not in MODES:
        raise InvalidInputError(f"codec must be one of {', '.join(MODES)}, not {mode!r}")
    if mode != "none" and len(raw) > _SMALL:
        width = element_width(dtype)
        if _sample_pays(raw, width):
            payload = _compress(raw, width)
            if len(payload) + 1 <= len(raw) * _KEEP:
                return Encoded(GROUPED_LZ4, bytes((width,)), (), [payload])
    return Encoded(RAW, b"", (), [raw])


def element_width(dtype: str) -> int:
    """Bytes per scalar of a dtype by name (1, 2, 4 or 8); 1 where the name says nothing.

    Complex types count as pairs of their real type. A wrong width costs compression, nothing else.
    """
    name, _, _ = dtype.partition("_")
    bits = name[len(name.rstrip("0123456789")) :]
    if name.startswith("complex"):
        return {"32": 2, "64": 4, "128": 8}.get(bits, 1)
    return {"16": 2, "32": 4, "64": 8}.get(bits, 1)


def _sample_pays(raw: memoryview, width: int) -> bool:
    if len(raw) <= 4 * _SAMPLE:
        return True
    middle = len(raw) // 2 & ~7
    last = (len(raw) - _SAMPLE) & ~7
    taken = packed = 0
    for start in (0, middle, last):
        piece = raw[start : start + _SAMPLE]
        taken += len(piece)
        packed += len(_compress(piece, width))
    return packed <= taken * _KEEP


def _compress(raw: memoryview, width: int) -> bytes:
    data = raw if width == 1 else _group(np.frombuffer(raw, np.uint8), width).data
    return lz4.block.compress(data, store_size=False)


def _group(data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    count = len(data) // width
    body = count * width
    out = np.empty(len(data), np.uint8)
    elements = data[:body].reshape(count, width)
    planes = out[:body].reshape(width, count)
    for k in range(width):
        planes[k] = elements[:, k]
    out[body:] = data[body:]
    return out


def _decode_raw(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    if params or references or len(payload) != len(out):
        raise _damaged("raw")
    out[:] = payload


def _decode_grouped_lz4(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    if len(params) != 1 or params[0] not in (1, 2, 4, 8) or references or not len(out):
        raise _damaged("grouped-lz4")
    width = params[0]
    try:
        data = lz4.block.decompress(payload, uncompressed_size=len(out))
    except lz4.block.LZ4BlockError as error:
        raise _damaged("grouped-lz4") from error
    if len(data) != len(out):
        raise _damaged("grouped-lz4")
    if width == 1:
        out[:] = data
        return
    count = len(out) // width
    body = count * width
    planes = np.frombuffer(data, np.uint8, body).reshape(width, count)
    target = np.frombuffer(out, np.uint8)
    elements = target[:body].reshape(count, width)
    for k in range(width):
        elements[:, k] = planes[k]
    out[body:] = data[body:]


def _damaged(name: str) -> CorruptionError:
    return CorruptionError(
        f"a stored {name} payload does not decode to the chunk's length", kind="payload"
    )


register(Codec(RAW, "raw", _decode_raw))
register(Codec(GROUPED_LZ4, "grouped-lz4", _decode_grouped_lz4))
