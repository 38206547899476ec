"""Chunks written with a codec of the test's choice, whatever the product would have chosen."""

from __future__ import annotations

from typing import NamedTuple

from blake3 import blake3
from deltackpt_store import codecs
from deltackpt_store.coding.planes import encode_delta, encode_planes
from deltackpt_store.coding.sparse import encode_sparse
from deltackpt_store.coding.streams import Entropy
from deltackpt_store.pack import pack_path
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.store import Store


class Blob(NamedTuple):
    """One chunk to store: `width` of its elements; `reference` is the chunk it is coded against."""

    codec: int
    raw: bytes
    width: int = 1
    entropy: Entropy = "zstd"
    reference: bytes = b""


def encode(blob: Blob) -> codecs.Encoded:
    raw, reference = memoryview(blob.raw), memoryview(blob.reference)
    if blob.codec == codecs.RAW:
        return codecs.Encoded(codecs.RAW, b"", (), [raw])
    if blob.codec == codecs.PLANES:
        coded = encode_planes(raw, blob.width, blob.entropy)
    elif blob.codec == codecs.DELTA:
        coded = encode_delta(raw, reference, blob.width, blob.entropy)
    elif blob.codec == codecs.SPARSE:
        coded = encode_sparse(raw, reference, blob.width, blob.entropy)
    else:
        raise AssertionError(f"no test knows how to write codec {blob.codec}")
    assert coded is not None
    refs = () if blob.codec == codecs.PLANES else (blake3(blob.reference).digest(),)
    return codecs.Encoded(blob.codec, coded.params, refs, coded.payload)


def write_pack(store: Store, blobs: list[Blob], writer: str, seq: int = 1) -> str:
    """One durable pack with a record per blob; `writer` has 16 hex digits. Returns its name."""
    pack = PackWriter(
        store.io, pack_path(store.path, f"{writer}-{seq:08d}"), store.uuid, writer, seq
    )
    for blob in blobs:
        pack.append(blake3(blob.raw).digest(), len(blob.raw), encode(blob))
    pack.finish()
    return pack.name
