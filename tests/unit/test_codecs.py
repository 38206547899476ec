"""Codecs: lossless for every dtype, length and reference, strict about what they decode."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable

import pytest
from deltackpt_store import codecs
from deltackpt_store.coding.by_exponent import encode_by_exponent
from deltackpt_store.coding.planes import Coded, encode_delta, encode_planes
from deltackpt_store.coding.sparse import encode_sparse
from deltackpt_store.coding.streams import Entropy
from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from deltackpt_store.manifest import MAX_CHUNK_BYTES
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTHS = {
    "float64": 8, "int64": 8, "uint64": 8, "complex128": 8, "float32": 4, "int32": 4,
    "uint32": 4, "complex64": 4, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "complex32": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "int8": 1,
    "uint8": 1, "bool": 1, "float4_e2m1fn_x2": 1, "somethingnew": 1, "": 1, "qint3": 1,
}  # fmt: skip

Encode = Callable[[memoryview, memoryview, int, Entropy], Coded | None]

# One entry per codec of the registry: a codec without one fails `test_every_codec_is_covered`.
ENCODERS: dict[int, Encode] = {
    codecs.RAW: lambda raw, ref, width, entropy: Coded(b"", [raw], len(raw)),
    codecs.PLANES: lambda raw, ref, width, entropy: encode_planes(raw, width, entropy),
    codecs.DELTA: encode_delta,
    codecs.SPARSE: encode_sparse,
    codecs.SORTED: encode_by_exponent,
}
WITH_REFERENCE = {codecs.DELTA, codecs.SPARSE, codecs.SORTED}
RAW_SIZE_SLACK = 64  # parameters and bytes of bookkeeping, never more than that above raw


def stored(coded: Coded) -> bytes:
    return b"".join(bytes(b) for b in coded.payload)


def decode_into_canary(
    codec: int, params: bytes, payload: bytes, length: int, *references: bytes
) -> bytes:
    """Decode into the middle of a larger buffer and see that nothing around it changes."""
    buffer = bytearray(b"\xee" * (length + 128))
    out = memoryview(buffer)[64 : 64 + length]
    try:
        codecs.decode(codec, params, memoryview(payload), out, [memoryview(r) for r in references])
    finally:
        assert buffer[:64] == b"\xee" * 64
        assert buffer[64 + length :] == b"\xee" * 64
    return bytes(out)


def references_of(codec: int, reference: bytes) -> tuple[bytes, ...]:
    return (reference,) if codec in WITH_REFERENCE else ()


def check_roundtrip(codec: int, raw: bytes, reference: bytes, width: int, entropy: Entropy) -> int:
    coded = ENCODERS[codec](memoryview(raw), memoryview(reference), width, entropy)
    if coded is None:
        return len(raw)
    payload = stored(coded)
    assert coded.stored in (len(payload), len(payload) + len(coded.params))
    assert len(coded.params) <= 255
    if codec != codecs.SPARSE:  # its candidate is dropped when it is larger than the others
        assert len(payload) + len(coded.params) <= len(raw) + RAW_SIZE_SLACK
    if raw:
        refs = references_of(codec, reference)
        assert decode_into_canary(codec, coded.params, payload, len(raw), *refs) == raw
    return coded.stored


def weights(length: int, seed: int = 1) -> bytes:
    """float32 bytes: a normal distribution, as weights have."""
    noise = random.Random(seed)
    return b"".join(struct.pack("<f", noise.gauss(0, 0.05)) for _ in range(length // 4))


def moved(raw: bytes, by: float = 2e-5, seed: int = 2) -> bytes:
    noise = random.Random(seed)
    values = struct.unpack(f"<{len(raw) // 4}f", raw)
    return b"".join(struct.pack("<f", v + noise.gauss(0, by)) for v in values)


# conformance -----------------------------------------------------------------------------------


def test_every_codec_is_covered() -> None:
    """Those that follow from several chunks have tests of their own: test_recipe_codecs.py."""
    by_recipe = {codecs.CAST, codecs.ADAM}
    assert {codec.id for codec in codecs.registered()} == set(ENCODERS) | by_recipe


@pytest.mark.parametrize("dtype", WIDTHS)
def test_width_comes_from_the_name(dtype: str) -> None:
    """A new dtype must not break saving: its name only guides the grouping."""
    assert codecs.element_width(dtype) == WIDTHS[dtype]


def chunks() -> st.SearchStrategy[bytes]:
    """Any bytes, and long ones with runs and noise made from a seed."""

    def long(seed: int, length: int, run: int) -> bytes:
        noise = random.Random(seed)
        return (noise.randbytes(run) + bytes(noise.randrange(1, 400)) + b"\x80" * run) * (
            length // (2 * run + 1)
        ) + noise.randbytes(seed % 8)

    return st.one_of(
        st.binary(max_size=80),
        st.builds(long, st.integers(0, 99), st.integers(0, 40_000), st.integers(1, 3000)),
    )


@settings(max_examples=150, deadline=None)
@given(
    raw=chunks(), other=chunks(),
    kind=st.sampled_from(["same", "unrelated", "short", "long", "few"]),
    width=st.sampled_from([1, 2, 4, 8]), entropy=st.sampled_from(["lz4", "zstd"]),
)  # fmt: skip
@pytest.mark.parametrize("codec", ENCODERS)
def test_any_bytes_with_any_reference(
    codec: int, raw: bytes, other: bytes, kind: str, width: int, entropy: Entropy
) -> None:
    """A codec that loses one bit of one odd chunk makes the whole step unreadable."""  # case 26
    few = bytearray(raw)
    few[::97] = bytes(b ^ 1 for b in few[::97])
    reference = {
        "same": raw, "unrelated": other, "short": raw[: len(raw) // 3], "long": raw + b"more",
        "few": bytes(few),
    }[kind]  # fmt: skip
    check_roundtrip(codec, raw, reference, width, entropy)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 9, 15, 16, 17, 31, 65535, 65537, 262139, 262144])
@pytest.mark.parametrize("codec", ENCODERS)
def test_odd_lengths(codec: int, length: int) -> None:
    """A tail that is no multiple of the element size must come back bit for bit."""  # case 26
    raw = (weights(262144) + b"tail")[-length:]
    for width in (1, 2, 4, 8):
        for entropy in ("lz4", "zstd"):
            check_roundtrip(codec, raw, raw[: length // 2] + bytes(length // 2), width, entropy)


SPECIAL = struct.pack(
    "<16I", 0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC12345,
    0xFFFFFFFF, 0x7F800001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x80000000,
)  # fmt: skip


@pytest.mark.parametrize("codec", ENCODERS)
def test_bits_that_are_not_ordinary_numbers(codec: int) -> None:
    """NaN payloads, negative zero, infinities and denormals are bits like all others."""
    turned = SPECIAL[32:] + SPECIAL[:32]
    for width in (1, 2, 4, 8):
        for raw, reference in ((SPECIAL * 400, turned * 400), (turned * 400, SPECIAL * 400)):
            check_roundtrip(codec, raw, reference, width, "zstd")
            check_roundtrip(codec, raw, reference, width, "lz4")


def test_the_layout_of_planes_is_as_documented() -> None:
    """A reader written from the format page must get the same bytes."""
    raw = b"".join(bytes((i & 0xFF, i * 37 & 0xFF, 7, i // 64)) for i in range(256)) + b"xyz"
    coded = encode_planes(memoryview(raw), 4, "zstd")
    import zstandard

    payload = stored(coded)
    assert coded.params[:2] == b"\x04\x00"  # plane 0 counts through all bytes: raw
    assert payload[:256] == raw[0:1024:4]
    assert coded.params[2:4] == b"\x00\x01"
    assert payload[256:513] == raw[1:1024:4] + b"\x07"
    assert coded.params[4] == 3
    frame = payload[513 : 513 + coded.params[5]]
    assert zstandard.ZstdDecompressor().decompress(frame) == raw[3:1024:4]
    assert payload[513 + coded.params[5] :] == b"xyz"


# what is gained ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 4096, 3 * 65536, 8 * 65536 + 13])
@pytest.mark.parametrize("changing", range(9))
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_upper_planes_of_one_value(width: int, changing: int, length: int) -> None:
    """Small integers leave most planes constant, of zeros or of any other byte."""
    random_ = random.Random(width * 10 + changing)
    for upper in (b"\x00", b"\xff", b"\x5a"):
        element = [random_.randbytes(64) if k < changing else upper * 64 for k in range(width)]
        period = b"".join(bytes(plane[i] for plane in element) for i in range(64))
        raw = (period * (length // len(period) + 1))[:length]
        check_roundtrip(codecs.PLANES, raw, b"", width, "zstd")
        check_roundtrip(codecs.DELTA, raw, raw[::-1], width, "zstd")


def test_small_steps_take_far_less_than_the_state() -> None:
    raw = weights(65536)
    after = moved(raw)
    alone = check_roundtrip(codecs.PLANES, after, b"", 4, "zstd") / 65536
    delta = check_roundtrip(codecs.DELTA, after, raw, 4, "zstd") / 65536
    quick = check_roundtrip(codecs.DELTA, after, raw, 4, "lz4") / 65536
    assert 0.80 < alone < 0.88
    assert 0.45 < delta < 0.55
    assert delta < quick < 0.62


def test_few_changes_take_a_few_bytes() -> None:
    raw = bytearray(weights(262144))
    reference = bytes(raw)
    for place in random.Random(1).sample(range(131072), 300):  # 0.23 % of 16-bit elements
        raw[2 * place] ^= 1
    sparse = check_roundtrip(codecs.SPARSE, bytes(raw), reference, 2, "zstd")
    delta = check_roundtrip(codecs.DELTA, bytes(raw), reference, 2, "zstd")
    assert sparse < 262144 / 400
    assert sparse < delta


@pytest.mark.parametrize("length", [1, 2, 7, 511, 4096, 4097, 20000, 262144])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_noise_is_stored_raw_and_not_copied(length: int, mode: str) -> None:
    """An encoding larger than raw would break the promise on bytes written."""
    raw = memoryview(random.Random(1).randbytes(length))
    encoded = codecs.choose(raw, "float32", mode)
    assert encoded.codec == codecs.RAW
    assert encoded.payload[0] is raw


def test_mode_none_never_encodes_and_unknown_modes_are_refused() -> None:
    zeros = memoryview(bytes(100_000))
    assert codecs.choose(zeros, "float32", "none").codec == codecs.RAW
    assert codecs.choose(zeros, "float32", "auto").stored < 1000
    with pytest.raises(InvalidInputError, match="auto, fast, small, none"):
        codecs.choose(zeros, "float32", "best")


def test_largest_chunk_is_far_below_what_lz4_takes() -> None:
    """lz4.block refuses inputs near 2 GiB at the first save, long after the run was set up."""
    assert MAX_CHUNK_BYTES < 0x7E000000  # case 26: LZ4_MAX_INPUT_SIZE


# damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", ["lz4", "zstd"])
@pytest.mark.parametrize("codec", ENCODERS)
def test_damage_ends_in_an_error_or_in_other_bytes(codec: int, entropy: Entropy) -> None:
    """Flipped, cut and overwritten payloads and parameters: never a crash, never out of bounds."""
    raw, reference = moved(weights(9000)) + b"abc", weights(9000)
    if codec == codecs.SPARSE:
        raw = reference[:4000] + raw[4000:4800] + reference[4800:] + b"abc"
    coded = ENCODERS[codec](memoryview(raw), memoryview(reference), 4, entropy)
    assert coded is not None
    payload, refs = stored(coded), references_of(codec, reference)
    noise = random.Random(3)
    for trial in range(1200):
        params, data = bytearray(coded.params), bytearray(payload)
        bad = params if trial % 2 and params else data
        kind, at = trial // 2 % 3, noise.randrange(len(bad))
        if kind == 0:
            bad[at] ^= 1 << noise.randrange(8)
        elif kind == 1:
            del bad[at:]
        else:
            bad[at : at + 16] = noise.randbytes(16)
        with contextlib.suppress(CorruptionError):
            decode_into_canary(codec, bytes(params[:255]), bytes(data), len(raw), *refs)


# Positions fit into a longer chunk: there its id is what tells.
WRONG_LENGTHS = [
    (codec, length)
    for codec in ENCODERS
    for length in (1, 8999, 9001, 20000)
    if codec != codecs.SPARSE or length < 9000
]


@pytest.mark.parametrize(("codec", "length"), WRONG_LENGTHS)
def test_wrong_declared_length_is_damage(codec: int, length: int) -> None:
    raw, reference = moved(weights(9000)), weights(9000)
    if codec == codecs.SPARSE:
        raw = raw[:800] + reference[800:]
    coded = ENCODERS[codec](memoryview(raw), memoryview(reference), 4, "zstd")
    assert coded is not None
    refs = references_of(codec, reference)
    with pytest.raises(CorruptionError):
        decode_into_canary(codec, coded.params, stored(coded), length, *refs)


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("params", [b"\x03", b"\x10", b"\x00" * 4, b"\x04\x09", b"\x04" * 255])
def test_wrong_parameters_are_damage(codec: int, params: bytes) -> None:
    reference = weights(9000)
    refs = references_of(codec, reference)
    with pytest.raises(CorruptionError):
        decode_into_canary(codec, params, weights(9000), 9000, *refs)
    with pytest.raises(CorruptionError):
        decode_into_canary(codec, b"", b"", 9000, *refs)


@pytest.mark.parametrize("codec", ENCODERS)
def test_the_number_of_references_is_checked(codec: int) -> None:
    raw, reference = moved(weights(9000))[:100] + weights(9000)[100:], weights(9000)
    coded = ENCODERS[codec](memoryview(raw), memoryview(reference), 4, "zstd")
    assert coded is not None
    wrong = (reference, reference) if codec in WITH_REFERENCE else (reference,)
    for refs in (wrong, () if codec in WITH_REFERENCE else wrong):
        with pytest.raises(CorruptionError):
            decode_into_canary(codec, coded.params, stored(coded), len(raw), *refs)


def test_a_frame_that_claims_gigabytes_allocates_nothing() -> None:
    """A hostile store must not exhaust memory: sizes are compared before anything is taken."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    assert len(bomb) < 1 << 14
    params = b"\x01\x03" + bytes((len(bomb) & 0x7F | 0x80, len(bomb) >> 7))
    with pytest.raises(CorruptionError, match="another length"):
        decode_into_canary(codecs.PLANES, params, bomb, 9000)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(9000))
    with pytest.raises(CorruptionError):
        decode_into_canary(codecs.PLANES, b"\x01\x03" + bytes((len(unsized),)), unsized, 9000)


def test_unknown_codec_says_upgrade() -> None:
    """A store written by a newer release must be refused, not misread."""
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        codecs.decode(250, b"", memoryview(b"abc"), memoryview(bytearray(3)))
    assert codecs.name_of(250) == "codec-250"
    assert codecs.name_of(codecs.DELTA) == "delta"


def test_codec_ids_are_never_taken_twice() -> None:
    with pytest.raises(InvalidInputError):
        codecs.register(codecs.Codec(codecs.RAW, "other", lambda *_: None))
