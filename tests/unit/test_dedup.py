"""Prevents: a chunk that is not stored because something else, or nothing, is taken for it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence

import pytest
import xxhash
from blake3 import blake3
from deltackpt_store import open_packs
from deltackpt_store import pack as pk
from deltackpt_store.codecs import Encoded
from deltackpt_store.fileio import FileIO
from deltackpt_store.index import MemoryIndex
from deltackpt_store.lmdb_index import open_index
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.store import Store
from deltackpt_store.store_writer import Put, StoreWriter
from store_writing import blob, files, read, reopen, save


def test_a_chunk_is_stored_once(store: Store) -> None:
    raw = blob(100_000)
    with StoreWriter(store) as writer:
        first = writer.put(raw)
        again = writer.put(raw)  # within the unflushed pack
        assert (again.id, again.pack, again.written) == (first.id, first.pack, 0)
        writer.flush()
        later = writer.put(raw)  # flushed, not committed
        assert (later.pack, later.written) == (first.pack, 0)
        assert writer.flush() == []
    index = open_index(store)
    with StoreWriter(store, index=index) as writer:  # another session
        other = writer.put(raw)
        assert (other.pack, other.written) == (first.pack, 0)
        assert writer.flush() == []
    index.close()
    assert len(files(store, "packs")) == 1


def test_the_index_learns_packs_when_they_are_committed(store: Store) -> None:
    """An index that is ahead of the commit would promise chunks of a save that failed."""
    index = MemoryIndex()
    with StoreWriter(store, index=index) as writer:
        put = writer.put(b"abc")
        writer.flush()
        assert index.packs() == frozenset()
        save(writer, 1, [b"abc", b"def"])
        assert put.pack in index.packs()
        assert writer.put(b"def").written == 0


def wrong_location(**change: object) -> Callable[[Store, pk.Location], pk.Location]:
    return lambda _, where: where._replace(**change)


def cut_pack(store: Store, where: pk.Location) -> pk.Location:
    os.truncate(pk.pack_path(store.path, where.pack), where.payload + 10)
    return where


def remove_pack(store: Store, where: pk.Location) -> pk.Location:
    os.unlink(pk.pack_path(store.path, where.pack))
    return where


def break_head(store: Store, where: pk.Location) -> pk.Location:
    with open(pk.pack_path(store.path, where.pack), "r+b") as file:
        file.seek(where.offset + 20)
        file.write(b"\xff")
    return where


class OneHit(MemoryIndex):
    """An index that says what it is told."""

    def __init__(self, chunk_id: bytes, where: pk.Location) -> None:
        super().__init__()
        self.answer: dict[bytes, pk.Location] = {chunk_id: where}

    def get(self, chunk_id: bytes) -> pk.Location | None:
        return self.answer.get(chunk_id)

    def absent(self, ids: Sequence[bytes]) -> set[bytes]:
        return set(ids) - self.answer.keys()

    def drop_pack(self, name: str) -> None:
        self.answer = {i: w for i, w in self.answer.items() if w.pack != name}


@pytest.mark.parametrize(
    "lie",
    [
        wrong_location(offset=65), wrong_location(offset=1 << 40), wrong_location(raw=999),
        wrong_location(stored=999), wrong_location(header=65), wrong_location(codec=1),
        wrong_location(pack="0" * 16 + "-00000001"), wrong_location(pack="../evil"),
        cut_pack, remove_pack, break_head,
    ],
)  # fmt: skip
def test_a_lying_index_is_not_believed(
    store: Store, lie: Callable[[Store, pk.Location], pk.Location]
) -> None:
    """'Present' for a chunk that is gone makes the next checkpoint unrestorable."""  # case 116
    raw = blob(1000)
    with StoreWriter(store) as writer:
        put = writer.put(raw)
        writer.flush()
    where = reopen(store).index().get(put.id)
    assert where is not None
    index = OneHit(put.id, lie(store, where))
    with StoreWriter(store, index=index) as writer:
        again = writer.put(raw)
        assert again.written > 0
        assert again.pack != put.pack
        writer.flush()
    assert read(store, again, 1000) == raw
    assert index.answer == {}


def test_a_hit_for_another_chunk_is_not_believed(store: Store) -> None:
    with StoreWriter(store) as writer:
        put = writer.put(b"one!")
        writer.flush()
    where = reopen(store).index().get(put.id)
    assert where is not None
    index = OneHit(blake3(b"two!").digest(), where)
    with StoreWriter(store, index=index) as writer:
        assert writer.put(b"two!").written > 0


def test_a_hit_is_confirmed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = blob(1000)
    with StoreWriter(store) as writer:
        writer.put(raw)
        writer.flush()
    calls: list[int] = []
    read_head = open_packs.read_record_head

    def counted(io: FileIO, handle: int, offset: int, path: str = "") -> pk.RecordHead:
        calls.append(offset)
        return read_head(io, handle, offset, path)

    monkeypatch.setattr(open_packs, "read_record_head", counted)
    with StoreWriter(store, index=reopen(store).index()) as writer:
        for _ in range(5):
            assert writer.put(raw).written == 0
            writer.flush()
    assert len(calls) == 1


def test_a_chunk_whose_reference_is_gone_is_stored_again(store: Store) -> None:
    """A blob that nothing can decode any more is not a stored chunk."""
    raw, needed = blob(500), blob(500)
    chunk, reference = blake3(raw).digest(), blake3(needed).digest()
    path = pk.pack_path(store.path, pk.pack_name("ab" * 8, 1))
    out = PackWriter(FileIO(), path, store.uuid, "ab" * 8, 1)
    out.append(chunk, 500, Encoded(200, b"", (reference,), [b"delta"]))
    out.finish()
    index = reopen(store).index()
    index.add_pack(out.name, pk.read_footer(FileIO(), path).entries)
    with StoreWriter(store, index=index) as writer:
        assert writer.put(raw).written > 0
        writer.abort()
        kept = writer.put(needed)
        writer.flush()
        hit = writer.put(raw)
    assert kept.written > 0
    # Confirmed hits tell what else a manifest depends on.
    with StoreWriter(store, index=index) as writer:
        index.add_pack(
            kept.pack, pk.read_footer(FileIO(), pk.pack_path(store.path, kept.pack)).entries
        )
        hit = writer.put(raw)
        assert (hit.written, hit.pack, hit.refs) == (0, out.name, (reference,))


def flip_payload(store: Store, put: Put) -> None:
    where = reopen(store).index().get(put.id)
    assert where is not None
    with open(pk.pack_path(store.path, put.pack), "r+b") as file:
        file.seek(where.payload + 3)
        byte = file.read(1)[0]
        file.seek(where.payload + 3)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", ["raw", "encoded"])
def test_verify_dedup_compares_bytes(store: Store, kind: str) -> None:
    """With verify_dedup a rotten stored copy is replaced instead of relied upon."""  # case 119
    raw = blob(70_000) if kind == "raw" else b"abcdefgh" * 10_000
    with StoreWriter(store) as writer:
        put = writer.put(raw)
        writer.flush()
    with StoreWriter(store, index=reopen(store).index(), verify_dedup=True) as writer:
        assert writer.put(raw).written == 0
    flip_payload(store, put)
    with StoreWriter(store, index=reopen(store).index(), verify_dedup=True) as writer:
        again = writer.put(raw)
        assert again.written > 0
        writer.flush()
    assert read(store, again, len(raw)) == raw


# built collisions ---------------------------------------------------------------------------

P1, P2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
MASK = (1 << 64) - 1


def xxh64_collision(size: int = 4096) -> tuple[bytes, bytes]:
    """Two blocks with equal XXH64 (seed 0) that differ in two 8-byte words.

    In lane 0 a word w takes the accumulator from a to rotl(a + w*P2, 31)*P1. Change the first
    word at will, and choose the second so that the accumulator is the same again after it.
    """

    def step(a: int, w: int) -> int:
        a = (a + w * P2) & MASK
        return (((a << 31) | (a >> 33)) & MASK) * P1 & MASK

    start = (P1 + P2) & MASK
    first = bytearray(blob(size))
    second = bytearray(first)
    w1, w2 = struct.unpack_from("<Q24xQ", first)
    other1 = w1 ^ 0x4000
    gap = step(start, w1) - step(start, other1)
    other2 = (w2 + gap * pow(P2, -1, 1 << 64)) & MASK
    struct.pack_into("<Q", second, 0, other1)
    struct.pack_into("<Q", second, 32, other2)
    return bytes(first), bytes(second)


def xxh3_collision(size: int = 4096) -> tuple[bytes, bytes]:
    """Two blocks with equal XXH3-64 and XXH3-128 under the default secret.

    A lane adds lo32(w ^ secret) * hi32(w ^ secret), and w itself to its neighbour. With the low
    half equal to the secret's the product is zero: only the sum of the words counts.
    """
    low1, low2 = 0x2C81017C, 0xE96DD4DE  # bytes 8..11 and 16..19 of the default secret
    first = bytearray(blob(size))
    second = bytearray(first)
    struct.pack_into("<Q", first, 8, (1000 << 32) | low1)
    struct.pack_into("<Q", first, 72, (2000 << 32) | low2)
    struct.pack_into("<Q", second, 8, (1001 << 32) | low1)
    struct.pack_into("<Q", second, 72, (1999 << 32) | low2)
    return bytes(first), bytes(second)


@pytest.mark.parametrize("build", [xxh64_collision, xxh3_collision])
@pytest.mark.parametrize("size", [4096, 100_000])
def test_built_collisions_stay_apart(
    store: Store, build: Callable[[int], tuple[bytes, bytes]], size: int
) -> None:
    """A store that dedups on a fast hash would restore one tensor with the other's values."""
    # case 119
    one, two = build(size)
    assert one != two
    if build is xxh64_collision:
        assert xxhash.xxh64_digest(one) == xxhash.xxh64_digest(two)
    else:
        assert xxhash.xxh3_64_digest(one) == xxhash.xxh3_64_digest(two)
        assert xxhash.xxh3_128_digest(one) == xxhash.xxh3_128_digest(two)
    index = open_index(store)
    with StoreWriter(store, index=index) as writer:
        puts = [writer.put(one), writer.put(two)]
        writer.flush()
        save(writer, 1, [one, two])
    index.close()
    assert puts[0].id != puts[1].id
    assert all(put.written for put in puts)
    assert [read(store, put, size) for put in puts] == [one, two]
