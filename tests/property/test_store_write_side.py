"""Properties of codecs, packs and the store writer over arbitrary input, damage and failures."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Sequence

import pytest
from blake3 import blake3
from deltackpt_store import codecs
from deltackpt_store import pack as pk
from deltackpt_store.codecs import Encoded
from deltackpt_store.errors import CorruptionError, StorageError, UnsupportedFormatError
from deltackpt_store.fileio import Buffer, FileIO
from deltackpt_store.index import MemoryIndex
from deltackpt_store.lmdb_index import LmdbIndex
from deltackpt_store.pack_scan import scan_records
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from hypothesis import given, settings
from hypothesis import strategies as st

IO = FileIO()
DTYPES = ["float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex128", "new_dtype"]


@st.composite
def chunks(draw: st.DrawFn, largest: int = 20_000) -> bytes:
    """Bytes that compress well, badly, or in parts, of any length."""
    size = draw(st.integers(1, largest))
    pattern = draw(st.binary(min_size=1, max_size=40))
    raw = bytearray((pattern * (size // len(pattern) + 1))[:size])
    noise = draw(st.randoms(use_true_random=False))
    step = draw(st.sampled_from([0, 1, 2, 4, 8]))
    if step:
        raw[::step] = noise.randbytes(len(raw[::step]))
    return bytes(raw)


@settings(max_examples=200, deadline=None)
@given(chunks(), st.sampled_from(DTYPES), st.sampled_from(codecs.MODES))
def test_any_chunk_survives_its_encoding(raw: bytes, dtype: str, mode: str) -> None:
    """Lossy once is lossy for ever: the restored weights would be others."""
    encoded = codecs.choose(memoryview(raw), dtype, mode)
    stored = b"".join(bytes(b) for b in encoded.payload)
    assert len(stored) + len(encoded.params) <= len(raw)
    buffer = bytearray(b"\xaa" * (len(raw) + 32))
    out = memoryview(buffer)[16:-16]
    codecs.decode(encoded.codec, encoded.params, memoryview(stored), out)
    assert out == raw
    assert buffer[:16] + buffer[-16:] == b"\xaa" * 32


RECORDS = st.lists(
    st.tuples(
        st.integers(0, 255),
        st.binary(max_size=20),
        st.lists(st.binary(min_size=32, max_size=32), max_size=3),
        st.one_of(st.binary(min_size=1, max_size=300), st.integers(65_000, 140_000)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(RECORDS)
def test_footer_and_scan_tell_the_same(
    records: list[tuple[int, bytes, list[bytes], bytes | int]],
) -> None:
    with tempfile.TemporaryDirectory() as root:
        os.mkdir(os.path.join(root, "packs"))
        path = pk.pack_path(root, pk.pack_name("ab" * 8, 1))
        writer = PackWriter(IO, path, bytes(16), "ab" * 8, 1)
        written: dict[bytes, tuple[int, tuple[bytes, ...], bytes]] = {}
        for n, (codec, params, refs, content) in enumerate(records):
            payload = content if isinstance(content, bytes) else bytes([n]) * content
            plain = codec == codecs.RAW
            encoded = Encoded(codec, b"" if plain else params, () if plain else tuple(refs),
                              [payload])  # fmt: skip
            chunk_id = blake3(bytes([n])).digest()
            writer.append(chunk_id, len(payload), encoded)
            written[chunk_id] = (codec, encoded.refs, payload)
        writer.finish()
        places = dict(pk.read_footer(IO, path).entries.items(writer.name))
        assert set(places) == set(written)
        with open(path, "rb") as file:
            data = file.read()
        spans: list[tuple[int, int]] = []
        for chunk_id, where in places.items():
            codec, refs, payload = written[chunk_id]
            assert (where.codec, where.refs, where.stored) == (codec, refs, len(payload))
            assert data[where.payload : where.payload + where.stored] == payload
            if codec == codecs.RAW and len(payload) >= pk.ALIGNED_BYTES:
                assert where.payload % pk.ALIGNMENT == 0
            spans.append((where.offset, where.offset + pk.RECORD_BYTES))
            spans.append((where.payload, where.payload + where.stored))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        scanned = list(scan_records(IO, path))
        assert {r.id: r.location for r in scanned} == places
        assert all(r.intact for r in scanned)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_makes_a_footer_lie(data: st.DataObject) -> None:
    """Whatever is on disk: an error of ours, or a table that is exactly right."""
    with tempfile.TemporaryDirectory() as root:
        os.mkdir(os.path.join(root, "packs"))
        path = pk.pack_path(root, pk.pack_name("ab" * 8, 1))
        writer = PackWriter(IO, path, bytes(16), "ab" * 8, 1)
        for n in range(4):
            writer.append(bytes([n]) * 32, 9, Encoded(codecs.RAW, b"", (), [b"123456789"]))
        good = writer.finish().to_bytes()
        with open(path, "r+b") as file:
            content = bytearray(file.read())
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(0, len(content)))
                how = data.draw(st.sampled_from(["set", "cut", "insert"]))
                some = data.draw(st.binary(min_size=1, max_size=70))
                if how == "set":
                    content[at : at + len(some)] = some[: len(content) - at]
                elif how == "cut":
                    del content[at : at + len(some)]
                else:
                    content[at:at] = some
            file.seek(0)
            file.truncate()
            file.write(content)
        try:
            footer = pk.read_footer(IO, path)
        except (CorruptionError, UnsupportedFormatError):
            footer = None
        assert footer is None or footer.entries.to_bytes() == good
        for record in scan_records(IO, path):
            assert record.location.payload + record.location.stored <= len(content)


class Flaky(FileIO):
    """Fails the n-th next call that writes or publishes, once armed."""

    left = -1

    def _count(self) -> None:
        if self.left >= 0:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

    def create(self, path: str, mode: int = 0o666) -> int:
        self._count()
        return super().create(path, mode)

    def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
        self._count()
        return super()._pwritev(handle, views, offset)

    def sync(self, handle: int) -> None:
        self._count()
        super().sync(handle)

    def link(self, source: str, target: str) -> None:
        self._count()
        super().link(source, target)

    def sync_directory(self, path: str) -> None:
        self._count()
        super().sync_directory(path)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 11)),
        st.tuples(st.just("put"), st.integers(0, 11)),
        st.tuples(st.just("put"), st.integers(0, 11)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("abort"), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 8)),
        st.tuples(st.just("restart"), st.booleans()),
        st.tuples(st.just("lose"), st.just(0)),
    ),
    max_size=40,
)
BLOBS = [bytes([n]) * (n * n * 900 + 1) for n in range(6)] + [
    blake3(bytes([n])).digest(length=n * 11_000 + 600) for n in range(6)
]


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_what_was_flushed_is_there_and_nothing_pretends_to_be(
    actions: list[tuple[str, int]],
) -> None:
    """Flushed chunks stay readable through failures, aborts, restarts and a lost index."""
    with tempfile.TemporaryDirectory() as root:
        store = Store.create(os.path.join(root, "s"), io=Flaky())
        io = store.io
        assert isinstance(io, Flaky)
        cache = os.path.join(root, "cache")

        def new_index(memory: bool = True) -> MemoryIndex | LmdbIndex:
            if memory:
                return Store.open(store.path).index()
            return LmdbIndex(cache, store_uuid=store.uuid)

        index = new_index(False)
        writer = StoreWriter(store, index=index, pack_bytes=30_000)
        durable: set[int] = set()
        pending: set[int] = set()
        for what, value in actions:
            failure: StorageError | None = None
            try:
                if what == "put":
                    writer.put(BLOBS[value], dtype="float32")
                    pending.add(value)
                elif what == "flush":
                    writer.flush()
                    durable |= pending
                    pending = set()
                elif what == "abort":
                    writer.abort()
                    pending = set()
                elif what == "fail":
                    io.left = value
                elif what == "restart":
                    writer.close()
                    index.close()
                    index = new_index(bool(value))
                    writer = StoreWriter(store, index=index, pack_bytes=30_000)
                    pending = set()
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(cache, "seal"))
            except StorageError as error:
                failure = error
            if failure is not None:
                assert failure.errno == errno.ENOSPC
                writer.abort()
                pending = set()
        io.left = -1
        writer.abort()
        writer.put(b"the last one")
        writer.flush()
        writer.close()
        index.close()
        fresh = Store.open(store.path)
        for value in durable:
            out = bytearray(len(BLOBS[value]))
            fresh.get_into(blake3(BLOBS[value]).digest(), out)
            assert out == BLOBS[value]
        for folder, _, files in os.walk(os.path.join(store.path, "packs")):
            assert not [f for f in files if f.startswith(".tmp-")], folder
        if not durable:
            missing = blake3(b"never stored").digest()
            with pytest.raises(CorruptionError):
                fresh.get_into(missing, bytearray(1))
