"""Encodings of chunks: the registry, the built-in ones, and the plain choice without a reference.

An encoding never changes identity: a chunk's id is the hash of its raw bytes, and the reader
checks it after decoding. Codec ids are part of the format and never reused:

    0  raw     the chunk's bytes
    1  planes  byte planes, each stored raw, as a constant, or compressed  (coding/planes.py)
    2  delta   the same of the zig-zag integer difference to one reference  (coding/planes.py)
    3  sparse  positions and differences of the elements that differ from one reference
               (coding/sparse.py)
    4  cast    nothing: the elements are float32 ones of the references, rounded to 16 bits
               (coding/cast.py)
    5  adam    the difference to what optimizer steps make of the references  (coding/adam.py)
    6  sorted  delta with elements sorted by the exponents of the reference
               (coding/by_exponent.py)

What is tried for a chunk that resembles an earlier one is decided in
:mod:`deltackpt_store.coding_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltackpt_store.coding.adam import decode_adam
from deltackpt_store.coding.by_exponent import decode_by_exponent
from deltackpt_store.coding.cast import decode_cast
from deltackpt_store.coding.elements import element_width as element_width
from deltackpt_store.coding.planes import decode_delta, decode_planes, encode_planes
from deltackpt_store.coding.sparse import decode_sparse
from deltackpt_store.coding.streams import Entropy
from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from deltackpt_store.fileio import Buffer

RAW = 0
PLANES = 1
DELTA = 2
SPARSE = 3
CAST = 4
ADAM = 5
SORTED = 6

MODES = ("auto", "fast", "small", "none")

WORTH = 0.97
"""An encoding that takes more than this share of the raw bytes is not worth decoding."""

_SMALL = 4096  # below this an attempt without a reference costs more than it can save

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


def registered() -> tuple[Codec, ...]:
    """All codecs that this release can decode, by id."""
    return tuple(_codecs[number] for number in sorted(_codecs))


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

    Writes all of `out` and nothing else; memory beyond it is bounded by a few times its length.
    Raises CorruptionError when the payload does not decode to exactly ``len(out)`` bytes,
    UnsupportedFormatError for an unknown codec. What `out` holds after an error is undefined. The
    caller checks the chunk id afterwards. May be called from any thread.
    """
    known = _codecs.get(codec)
    if known is None:
        raise UnsupportedFormatError(
            f"chunk is stored with codec {codec}, which this release does not know",
            kind="unknown-codec", hint="upgrade deltackpt", codec=codec,
        )  # fmt: skip
    known.decode(params, payload, out, references)


def check_mode(mode: str) -> None:
    """Raise InvalidInputError unless `mode` is one of `MODES`."""
    if mode not in MODES:
        raise InvalidInputError(
            f"codec must be one of {', '.join(MODES)}, not {mode!r}", option="codec"
        )


def choose(raw: memoryview, dtype: str = "uint8", mode: str = "auto") -> Encoded:
    """Encode one chunk without a reference: raw, or byte planes when they save at least 3 %.

    The result is never larger than raw. A raw result holds `raw` itself, not a copy, and a coded
    one may refer to its bytes: the caller keeps the buffer unchanged until the payload was
    written. `dtype` names the element type and only guides the choice; any length is fine. Noise
    costs little: both entropy coders give up on it within 10 GB/s.
    """
    check_mode(mode)
    if mode != "none" and len(raw) > _SMALL:
        width = element_width(dtype)
        entropy: Entropy = "lz4" if mode == "fast" else "zstd"
        coded = encode_planes(raw, width, entropy)
        if coded.stored <= len(raw) * WORTH:
            return Encoded(PLANES, coded.params, (), coded.payload)
    return Encoded(RAW, b"", (), [raw])


def _decode_raw(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    if params or references or len(payload) != len(out):
        raise CorruptionError(
            "a stored raw payload does not have the chunk's length", kind="payload"
        )
    out[:] = payload


register(Codec(RAW, "raw", _decode_raw))
register(Codec(PLANES, "planes", decode_planes))
register(Codec(DELTA, "delta", decode_delta))
register(Codec(SPARSE, "sparse", decode_sparse))
register(Codec(CAST, "cast", decode_cast))
register(Codec(ADAM, "adam", decode_adam))
register(Codec(SORTED, "sorted", decode_by_exponent))
