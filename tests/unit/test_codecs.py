"""Codecs: lossless for every dtype and length, strict about what they decode."""

from __future__ import annotations

import contextlib
import random

import pytest
from deltackpt_store import codecs
from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from deltackpt_store.manifest import MAX_CHUNK_BYTES

WIDTHS = {
    "float64": 8, "int64": 8, "uint64": 8, "complex128": 8, "float32": 4, "int32": 4,
    "uint32": 4, "complex64": 4, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "complex32": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "int8": 1,
    "uint8": 1, "bool": 1, "float4_e2m1fn_x2": 1, "somethingnew": 1, "": 1, "qint3": 1,
}  # fmt: skip


def stored(encoded: codecs.Encoded) -> bytes:
    return b"".join(bytes(b) for b in encoded.payload)


def grouped_by_hand(raw: bytes, width: int) -> bytes:
    body = len(raw) // width * width
    return b"".join(raw[k:body:width] for k in range(width)) + raw[body:]


def decode_into_canary(encoded: codecs.Encoded, length: int) -> bytes:
    """Decode into the middle of a larger buffer and see that nothing around it changes."""
    buffer = bytearray(b"\xee" * (length + 128))
    out = memoryview(buffer)[64 : 64 + length]
    codecs.decode(encoded.codec, encoded.params, memoryview(stored(encoded)), out)
    assert buffer[:64] == b"\xee" * 64
    assert buffer[64 + length :] == b"\xee" * 64
    return bytes(out)


def smooth(length: int, width: int) -> bytes:
    """Bytes whose high ones vary slowly and whose low ones are noise, like weights."""
    noise = random.Random(length)
    out = bytearray(noise.randbytes(length))
    for k in range(width // 2, width):
        out[k::width] = bytes(len(out[k::width]))
    return bytes(out)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_width_comes_from_the_name(dtype: str) -> None:
    """A new dtype must not break saving: its name only guides the grouping."""
    assert codecs.element_width(dtype) == WIDTHS[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "uint8", "complex64"])
@pytest.mark.parametrize("length", [4097, 4098, 4099, 4103, 8192, 65537, 262144, 262139])
def test_roundtrip_and_layout(dtype: str, length: int) -> None:
    """A tail that is no multiple of the element size must come back bit for bit."""  # case 26
    width = codecs.element_width(dtype)
    raw = smooth(length, width) if width > 1 else bytes(length // 2) + b"\x01" * -(-length // 2)
    encoded = codecs.choose(memoryview(raw), dtype)
    assert encoded.codec == codecs.GROUPED_LZ4
    assert encoded.params == bytes([width])
    assert encoded.stored == len(stored(encoded)) <= 0.95 * length
    assert decode_into_canary(encoded, length) == raw
    import lz4.block

    grouped = lz4.block.decompress(stored(encoded), uncompressed_size=length)
    assert grouped == grouped_by_hand(raw, width)


@pytest.mark.parametrize("length", [1, 2, 7, 511, 4096, 4097, 20000, 262144])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_noise_is_stored_raw_and_not_copied(length: int, mode: str) -> None:
    """An encoding larger than raw would break the promise on bytes written."""
    raw = memoryview(random.Random(1).randbytes(length))
    encoded = codecs.choose(raw, "float32", mode)
    assert encoded.codec == codecs.RAW
    assert encoded.payload[0] is raw
    assert decode_into_canary(encoded, length) == raw


def test_mode_none_never_encodes_and_unknown_modes_are_refused() -> None:
    zeros = memoryview(bytes(100_000))
    assert codecs.choose(zeros, "float32", "none").codec == codecs.RAW
    assert codecs.choose(zeros, "float32", "auto").stored < 1000
    with pytest.raises(InvalidInputError, match="auto, fast, small, none"):
        codecs.choose(zeros, "float32", "best")


def test_largest_chunk_is_far_below_what_lz4_takes() -> None:
    """lz4.block refuses inputs near 2 GiB at the first save, long after the run was set up."""
    assert MAX_CHUNK_BYTES < 0x7E000000  # case 26: LZ4_MAX_INPUT_SIZE


def test_sample_saying_no_is_not_overruled() -> None:
    """A chunk that only compresses outside the sample may be stored raw, never wrongly."""
    raw = bytearray(random.Random(2).randbytes(262144))
    raw[10_000:120_000] = bytes(110_000)
    encoded = codecs.choose(memoryview(raw), "uint8")
    assert decode_into_canary(encoded, len(raw)) == raw


def test_damaged_payloads_never_write_outside_or_crash() -> None:
    """A flipped or cut payload must end in an error or in bytes the chunk id refuses."""
    raw = smooth(9001, 4)
    good = codecs.choose(memoryview(raw), "float32")
    payload = stored(good)
    noise = random.Random(3)
    for trial in range(600):
        bad = bytearray(payload)
        if trial % 3 == 0:
            bad[noise.randrange(len(bad))] ^= 1 << noise.randrange(8)
        elif trial % 3 == 1:
            del bad[noise.randrange(len(bad)) :]
        else:
            at = noise.randrange(len(bad))
            bad[at : at + 16] = noise.randbytes(16)
        damaged = good._replace(payload=[bytes(bad)])
        with contextlib.suppress(CorruptionError):
            assert len(decode_into_canary(damaged, len(raw))) == len(raw)


@pytest.mark.parametrize("length", [0, 1, 9000, 9002, 20000])
def test_wrong_declared_length_is_damage(length: int) -> None:
    encoded = codecs.choose(memoryview(smooth(9001, 4)), "float32")
    with pytest.raises(CorruptionError):
        decode_into_canary(encoded, length)
    with pytest.raises(CorruptionError):
        codecs.decode(codecs.RAW, b"", memoryview(bytes(9001)), memoryview(bytearray(length)))


@pytest.mark.parametrize("params", [b"", b"\x00", b"\x03", b"\x10", b"\x04\x04"])
def test_wrong_parameters_are_damage(params: bytes) -> None:
    encoded = codecs.choose(memoryview(smooth(9001, 4)), "float32")._replace(params=params)
    with pytest.raises(CorruptionError):
        decode_into_canary(encoded, 9001)
    with pytest.raises(CorruptionError):
        codecs.decode(codecs.RAW, b"x", memoryview(b"abc"), memoryview(bytearray(3)))


def test_unknown_codec_says_upgrade() -> None:
    """A store written by a newer release must be refused, not misread."""
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        codecs.decode(250, b"", memoryview(b"abc"), memoryview(bytearray(3)))
    assert not codecs.is_known(250)
    assert codecs.name_of(250) == "codec-250"
    assert codecs.name_of(codecs.GROUPED_LZ4) == "grouped-lz4"


def test_codec_ids_are_never_taken_twice() -> None:
    with pytest.raises(InvalidInputError):
        codecs.register(codecs.Codec(codecs.RAW, "other", lambda *_: None))
