"""Chunks written with a codec of the test's choice, whatever the product would have chosen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from blake3 import blake3
from deltackpt_store import codecs
from deltackpt_store.coding import adam, cast
from deltackpt_store.coding.adam import Betas, Step
from deltackpt_store.coding.by_exponent import encode_by_exponent
from deltackpt_store.coding.planes import encode_delta, encode_planes
from deltackpt_store.coding.sparse import encode_sparse
from deltackpt_store.coding.streams import Entropy
from deltackpt_store.fileio import Buffer
from deltackpt_store.pack import pack_path
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.store import Store


class Blob(NamedTuple):
    """One chunk to store: `width` of its elements; `reference` is the chunk it is coded against.

    `made` is the encoding itself, for codecs that follow from several others.
    """

    codec: int
    raw: bytes
    width: int = 1
    entropy: Entropy = "zstd"
    reference: bytes = b""
    made: codecs.Encoded | None = None


def encode(blob: Blob) -> codecs.Encoded:
    raw, reference = memoryview(blob.raw), memoryview(blob.reference)
    if blob.made is not None:
        return blob.made
    if blob.codec == codecs.RAW:
        return codecs.Encoded(codecs.RAW, b"", (), [raw])
    if blob.codec == codecs.PLANES:
        coded = encode_planes(raw, blob.width, blob.entropy)
    elif blob.codec == codecs.DELTA:
        coded = encode_delta(raw, reference, blob.width, blob.entropy)
    elif blob.codec == codecs.SPARSE:
        coded = encode_sparse(raw, reference, blob.width, blob.entropy)
    elif blob.codec == codecs.SORTED:
        coded = encode_by_exponent(raw, reference, blob.width, blob.entropy)
    else:
        raise AssertionError(f"no test knows how to write codec {blob.codec}")
    assert coded is not None
    refs = () if blob.codec == codecs.PLANES else (blake3(blob.reference).digest(),)
    return codecs.Encoded(blob.codec, coded.params, refs, coded.payload)


def rounded_blob(raw: bytes, kind: str, references: list[bytes], start: int, rule: int = 0) -> Blob:
    """`raw` as the float32 elements of the references, rounded to 16 bits."""
    number = cast.KINDS[kind]
    params = cast.cast_params(number, cast.RULES[number][rule], start)
    refs = tuple(blake3(reference).digest() for reference in references)
    return Blob(codecs.CAST, raw, made=codecs.Encoded(codecs.CAST, params, refs, []))


def replayed_blob(
    raw: bytes, role: int, references: list[bytes], betas: Betas, steps: list[Step]
) -> Blob:
    """`raw` as the difference to what the steps make of the references."""
    front, views = adam.numbers(betas, steps), [memoryview(r) for r in references]

    def coded(reference: bytes) -> codecs.Encoded:
        parts = encode_delta(memoryview(raw), memoryview(reference), 4, "zstd")
        refs = tuple(blake3(r).digest() for r in references)
        payload: list[Buffer] = [front, *parts.payload]
        return codecs.Encoded(codecs.ADAM, bytes((role,)) + parts.params[1:], refs, payload)

    # What is decoded when `raw` itself is stored as the difference is `raw` and the prediction.
    plain, out = coded(bytes(len(raw))), bytearray(len(raw))
    payload = b"".join(map(bytes, plain.payload))
    codecs.decode(codecs.ADAM, plain.params, memoryview(payload), memoryview(out), views)
    whole = len(raw) // 4
    predicted = np.frombuffer(out, "<u4", whole) - np.frombuffer(raw, "<u4", whole)
    return Blob(codecs.ADAM, raw, made=coded(predicted.tobytes()))


def replayed_blobs(count: int, steps: int, seed: int = 0) -> list[Blob]:
    """Chunks of `count` floats of every role, and raw ones of all that they need; any bits."""
    noise = np.random.default_rng(seed)
    near = (0.01 * noise.standard_normal((steps + 4, count))).astype("<f4").view("<u4")
    near[:, ::7] = noise.integers(0, 1 << 32, near[:, ::7].shape, np.uint32)
    parts = [row.tobytes() for row in near]
    anchors, firsts = parts[:3], parts[3:]
    numbers = [Step(1 - 1e-5, 1e-3 * (1 + i), 0.5) for i in range(steps)]
    blobs = [Blob(codecs.RAW, part) for part in parts]
    for role, needed in adam.ANCHORS.items():
        raw = noise.integers(0, 1 << 32, count, np.uint32).astype("<u4").tobytes()
        references = [*anchors[-needed:], *firsts]
        blobs.append(replayed_blob(raw, role, references, Betas(0.9, 0.95, 1e-8), numbers))
    return blobs


def rounded_blobs(count: int, seed: int = 0) -> list[Blob]:
    """Chunks of `count` 16-bit floats, of both kinds and with every rule for NaNs, and float32 ones
    that they need."""
    noise = np.random.default_rng(seed)
    words = noise.integers(0, 1 << 32, count + 20, np.uint32).astype("<u4")
    words[1::2] = (noise.standard_normal(len(words[1::2])) * 8).astype("<f4").view("<u4")
    data = words.tobytes()
    parts = [data[: 2 * count], data[2 * count :]]
    blobs = [Blob(codecs.RAW, part) for part in parts]
    for kind, number in cast.KINDS.items():
        for at, rule in enumerate(cast.RULES[number]):
            start = 40 + 4 * at
            raw = cast.round_to(number, words[start // 4 :][:count], rule)[0].tobytes()
            blobs.append(rounded_blob(raw, kind, parts, start, at))
    return blobs


def write_pack(store: Store, blobs: list[Blob], writer: str, seq: int = 1) -> str:
    """One durable pack with a record per blob; `writer` has 16 hex digits. Returns its name."""
    pack = PackWriter(
        store.io, pack_path(store.path, f"{writer}-{seq:08d}"), store.uuid, writer, seq
    )
    for blob in blobs:
        pack.append(blake3(blob.raw).digest(), len(blob.raw), encode(blob))
    pack.finish()
    return pack.name
