"""The store writer: nothing lost, nothing twice, nothing acknowledged too early."""

from __future__ import annotations

import errno
import os
import random
import struct
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import xxhash
from blake3 import blake3
from deltackpt_store import open_packs, store_writer
from deltackpt_store import pack as pk
from deltackpt_store.codecs import PLANES, RAW, Encoded
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    StateError,
    StorageError,
)
from deltackpt_store.fileio import Buffer, FileIO
from deltackpt_store.index import MemoryIndex
from deltackpt_store.io_thread import IoThread
from deltackpt_store.lmdb_index import open_index
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Manifest, Snapshot, TensorView
from deltackpt_store.manifest_io import decode_commit, digest_of, to_base
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.store import Store
from deltackpt_store.store_writer import Put, StoreWriter

NOISE = random.Random(17)


def blob(size: int) -> bytes:
    return NOISE.randbytes(size)


class Recording(FileIO):
    """Notes every call that changes or syncs something, and can fail the n-th call.

    What a writer does in ``gc/`` is left out: that is tested with garbage collection.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.counting = False
        self.count = 0
        self.fail_at = -1
        self.failed = ""
        self.fail_on = ""
        self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.persistent = False
        self._names: dict[int, str] = {}

    def _note(self, what: str, path: str) -> None:
        if "/gc/" in path or path.endswith("/gc"):
            return
        self.calls.append((what, path))
        if what == self.fail_on:
            raise self.error
        if self.counting:
            self.count += 1
            if self.count == self.fail_at or (self.persistent and self.count > self.fail_at >= 0):
                self.failed = what
                raise self.error

    def create(self, path: str, mode: int = 0o666) -> int:
        self._note("create", path)
        handle = super().create(path, mode)
        self._names[handle] = path
        return handle

    def lock(self, path: str, *, create: bool = False) -> int:
        handle = super().lock(path, create=create)
        self._names[handle] = path
        return handle

    def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
        self._note("write", self._names[handle])
        return super()._pwritev(handle, views, offset)

    def sync(self, handle: int) -> None:
        self._note("sync", self._names[handle])
        super().sync(handle)

    def close(self, handle: int) -> None:
        path = self._names.pop(handle, None)
        super().close(handle)
        if path is not None:
            self._note("close", path)

    def link(self, source: str, target: str) -> None:
        self._note("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._note("unlink", path)
        super().unlink(path)

    def sync_directory(self, path: str) -> None:
        self._note("sync_directory", path)
        super().sync_directory(path)

    def mkdir(self, path: str) -> None:
        self._note("mkdir", path)
        super().mkdir(path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "s", io=Recording())


def recorder(store: Store) -> Recording:
    assert isinstance(store.io, Recording)
    return store.io


def reopen(store: Store) -> Store:
    return Store.open(store.path)


def read(store: Store, put: Put, size: int) -> bytes:
    out = bytearray(size)
    reopen(store).get_into(put.id, out)
    return bytes(out)


def layout(sizes: Sequence[int]) -> Layout:
    sizes = [max(size, 513) for size in sizes]  # smaller ones would have to be inline
    extents = tuple(ExtentSpec(size, 1 << 26, "uint8") for size in sizes)
    views = tuple(TensorView(n, n, "uint8", (size,), (1,), 0) for n, size in enumerate(sizes))
    paths = tuple(map(str, range(len(sizes))))
    return Layout(structure=b"\xc0", paths=paths, tensors=views, extents=extents, objects=())


def base_manifest(puts: Sequence[Put], sizes: Sequence[int]) -> Manifest:
    import numpy as np

    chunks = {
        n: np.frombuffer(put.id, np.uint8).reshape(1, 32).copy() for n, put in enumerate(puts)
    }
    snapshot = Snapshot(layout(sizes), {}, {}, chunks)
    return to_base(snapshot, {put.pack for put in puts})


def save(
    writer: StoreWriter, step: int, blobs: Sequence[bytes], parent: Commit | None = None
) -> Commit:
    """A whole save: blobs, manifest, commit."""
    puts = [writer.put(raw) for raw in blobs]
    writer.flush()
    manifest = base_manifest(puts, [len(raw) for raw in blobs])
    digest = writer.write_manifest(manifest)
    return writer.commit(
        run="main", step=step, parent=parent, manifest=digest, base=None, root=manifest.root,
        packs=manifest.packs,
    )  # fmt: skip


def files(store: Store, under: str = "") -> list[str]:
    top = Path(store.path) / under
    return sorted(str(p.relative_to(store.path)) for p in top.rglob("*") if p.is_file())


def temporaries(store: Store) -> list[str]:
    return [f for f in files(store) if "/.tmp-" in f or f.startswith(".tmp-")]


# chunks -------------------------------------------------------------------------------------


SIZES = [513, 1000, 4096, 65535, 65536, 65537, 262144, 300_001, 1, 2, 3]


def test_every_size_and_kind_comes_back(store: Store) -> None:
    blobs = [blob(n) for n in SIZES] + [bytes(n) for n in SIZES] + [b"abcd" * 50_000]
    with StoreWriter(store) as writer:
        puts = [writer.put(raw, dtype="float32") for raw in blobs]
        writer.flush()
    for raw, put in zip(blobs, puts, strict=True):
        assert put.id == blake3(raw).digest()
        assert read(store, put, len(raw)) == raw
        assert put.written <= len(raw) + pk.RECORD_BYTES
    assert puts[-1].codec == PLANES
    assert temporaries(store) == []


@pytest.mark.parametrize("size", [0, pk.MAX_CHUNK_BYTES + 1])
def test_impossible_sizes_are_refused_and_hurt_nothing(store: Store, size: int) -> None:
    """A chunk size that no codec or record takes must fail by name, not corrupt a pack."""
    # case 26
    with StoreWriter(store) as writer:
        good = writer.put(b"good")
        with pytest.raises(InvalidInputError, match="1 to 67108864 bytes"):
            writer.put(bytes(size))
        writer.flush()
    assert read(store, good, 4) == b"good"


@pytest.mark.parametrize("option", [{"codec": "best"}, {"pack_bytes": 0}])
def test_bad_options_are_refused_when_configured(store: Store, option: dict[str, object]) -> None:
    """Not at the first save, hours into a run."""  # case 26
    with pytest.raises(InvalidInputError):
        StoreWriter(store, **option)  # pyright: ignore[reportArgumentType]


def test_other_buffers_and_layouts(store: Store) -> None:
    import array

    numbers = array.array("d", [1.5, -0.0, float("nan")] * 100)
    with StoreWriter(store) as writer:
        put = writer.put(memoryview(numbers), dtype="float64")
        assert writer.put(bytearray(numbers.tobytes())).id == put.id
        with pytest.raises((TypeError, BufferError, ValueError)):
            writer.put(memoryview(blob(100))[::2])
        writer.flush()
    assert read(store, put, 2400) == numbers.tobytes()


def test_large_raw_chunks_are_not_copied(store: Store) -> None:
    """The caller's memory goes to the kernel as it is: a copy would halve the speed."""
    seen: list[int] = []
    raw = bytearray(blob(1 << 20))

    class Looking(Recording):
        def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
            seen.extend(id(b.obj) for b in buffers if isinstance(b, memoryview))
            return super().write(handle, buffers, offset)

    looking = Store.open(store.path, io=Looking())
    with StoreWriter(looking) as writer:
        writer.put(raw)
        writer.flush()
    assert id(raw) in seen


# deduplication ------------------------------------------------------------------------------


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


# order of durability ------------------------------------------------------------------------


def kinds(store: Store, calls: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Calls with paths reduced to what they are: pack, manifest, commit, or a directory."""
    for what, path in calls:
        rest = os.path.relpath(path, store.path).split(os.sep)
        if rest[0] == "packs":
            yield what, {1: "packs", 2: "packs/xx", 3: "pack"}[len(rest)]
        elif rest[0] == "manifests":
            yield what, {1: "manifests", 2: "manifest"}[len(rest)]
        elif rest[0] == "runs":
            yield what, {1: "runs", 2: "runs/run", 3: "commit"}[len(rest)]
        else:
            yield what, rest[0]


def test_order_of_one_save(store: Store) -> None:
    """Any other order loses an acknowledged step at a power failure."""
    with StoreWriter(store) as writer:
        save(writer, 1, [blob(1000)])
        recorder(store).calls.clear()
        save(writer, 2, [blob(1000), blob(200_000)])
    calls = [c for c in kinds(store, recorder(store).calls) if c[0] not in ("write", "mkdir")]
    published = ["create", "sync", "close", "link", "unlink"]
    assert calls == [
        *((what, "pack") for what in published), ("sync_directory", "packs/xx"),
        *((what, "manifest") for what in published), ("sync_directory", "manifests"),
        *((what, "commit") for what in published), ("sync_directory", "runs/run"),
    ]  # fmt: skip


def test_new_directories_are_made_durable_in_their_parents(store: Store) -> None:
    """A pack in a directory that is gone after power loss is gone."""
    with StoreWriter(store) as writer:
        save(writer, 1, [blob(1000)])
    calls = list(kinds(store, recorder(store).calls))
    for directory, parent in (("packs/xx", "packs"), ("runs/run", "runs")):
        made = calls.index(("mkdir", directory))
        assert ("sync_directory", parent) in calls[made : made + 2]


def test_many_packs_share_one_directory_sync(store: Store) -> None:
    with StoreWriter(store, pack_bytes=100_000) as writer:
        recorder(store).calls.clear()
        for _ in range(10):
            writer.put(blob(60_000))
        names = writer.flush()
    assert len(names) == 5
    calls = list(kinds(store, recorder(store).calls))
    counts = Counter(c for c in calls if c != ("sync_directory", "packs"))
    assert counts["sync", "pack"] == 5
    assert counts["sync_directory", "packs/xx"] == 1
    # No name before all bytes are durable, and the names last.
    first_link = calls.index(("link", "pack"))
    assert Counter(calls[:first_link])["sync", "pack"] == 5
    assert calls[-1] == ("sync_directory", "packs/xx")


def test_names_of_packs_relied_upon_are_made_durable(store: Store) -> None:
    """Another writer may have died between naming its pack and syncing the directory."""
    raw = blob(1000)
    with StoreWriter(store) as writer:
        put = writer.put(raw)
        writer.flush()
    with StoreWriter(store, index=reopen(store).index()) as writer:
        recorder(store).calls.clear()
        for _ in range(3):
            assert writer.put(raw).written == 0
            writer.flush()
    directory = os.path.dirname(pk.pack_path(store.path, put.pack))
    folders = [store.path, f"{store.path}/packs", f"{store.path}/runs", directory]
    assert recorder(store).calls == [("sync_directory", folder) for folder in folders]


def test_a_manifest_or_commit_of_unflushed_packs_is_refused(store: Store) -> None:
    """A commit may refer only to what is durable."""
    with StoreWriter(store) as writer:
        put = writer.put(b"abc")
        manifest = base_manifest([put], [3])
        with pytest.raises(StateError, match="not durable"):
            writer.write_manifest(manifest)
        with pytest.raises(StateError, match="not durable"):
            writer.commit(run="main", step=1, parent=None, manifest=bytes(32), base=None,
                          root=bytes(32), packs=[put.pack])  # fmt: skip
        writer.flush()
        writer.write_manifest(manifest)


def test_large_blobs_leave_memory_while_the_pack_grows(store: Store) -> None:
    """Memory must not grow with the save."""
    with StoreWriter(store, pack_bytes=1 << 30) as writer:
        for _ in range(24):
            writer.put(blob(1 << 20))
        writer._output._thread.drain()  # pyright: ignore[reportPrivateUsage]
        assert sum(c[0] == "write" for c in recorder(store).calls) >= 2
        writer.abort()
    assert temporaries(store) == []


# failures -----------------------------------------------------------------------------------


def attempt(work: Callable[[], Commit]) -> tuple[Commit | None, StorageError | None]:
    """Result, or the StorageError; any other error fails the test."""
    try:
        return work(), None
    except StorageError as error:
        return None, error


ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("code", ERRORS)
def test_every_failing_call_leaves_older_steps_and_a_usable_writer(
    tmp_path: Path, code: int, persistent: bool
) -> None:
    """A full disk or a failed sync: loud, no leftovers, and the next save works."""  # case 79
    fail_at = 0
    passed = False
    while not passed:
        fail_at += 1
        io = Recording()
        io.error = OSError(code, os.strerror(code))
        io.persistent = persistent
        store = Store.create(tmp_path / str(fail_at), io=io)
        with StoreWriter(store, pack_bytes=100_000) as writer:
            old = [blob(1000), blob(80_000)]
            first = save(writer, 1, old)
            new = [blob(3000), blob(90_000), blob(70_000), blob(600)]
            io.counting, io.fail_at = True, fail_at
            second, error = attempt(partial(save, writer, 2, new, first))
            io.counting = False
            passed = error is None and io.count < fail_at
            if error is not None:
                assert error.errno == code
                writer.abort()
            if not persistent and io.failed != "unlink":
                assert temporaries(store) == []
            third = save(writer, 3, new, second or first)
            again = save(writer, 4, old, third)
        fresh = reopen(store)
        steps = {c.step: c for c in fresh.commits("main")}
        # A commit whose directory sync failed may or may not have come into being.
        assert set(steps) >= {1, 3, 4}
        assert again.digest == steps[4].digest
        for step, blobs in ((1, old), (3, new), (4, old)):
            snapshot = fresh.snapshot(steps[step])
            for extent, raw in enumerate(blobs):
                out = bytearray(len(raw))
                fresh.get_into(snapshot.chunks[extent][0].tobytes(), out)
                assert out == raw
    assert fail_at > 20


def test_nothing_is_synced_twice_after_a_failed_sync(store: Store) -> None:
    """After a failed fsync a second one succeeds although the data are lost."""
    io = recorder(store)
    with StoreWriter(store) as writer:
        io.counting, io.fail_at = True, -1
        io.calls.clear()
        writer.put(blob(1000))
        io.error = OSError(errno.EIO, "Input/output error")

        def failing(handle: int) -> None:
            io.calls.append(("sync", io._names[handle]))  # pyright: ignore[reportPrivateUsage]
            raise io.error

        io.sync = failing  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(StorageError) as caught:
            writer.flush()
        assert caught.value.errno == errno.EIO
        with pytest.raises(StorageError):
            writer.flush()
        del io.sync
        writer.abort()
        assert [c[0] for c in io.calls].count("sync") == 1
        assert temporaries(store) == []
        put = writer.put(b"new")
        assert put.pack not in {os.path.basename(c[1]) for c in io.calls}
        writer.flush()
    assert read(store, put, 3) == b"new"


def test_a_failure_sticks_until_abort(store: Store) -> None:
    """Blobs of another save, put before the failure, must not be taken for stored."""
    io = recorder(store)
    with StoreWriter(store) as writer:
        raw = blob(1000)
        writer.put(raw)
        io.counting, io.fail_at, io.persistent = True, 0, True
        with pytest.raises(StorageError):
            writer.flush()
        io.counting = False
        for use in (
            lambda: writer.put(raw),
            writer.flush,
            lambda: writer.write_manifest(base_manifest([], [])),
            lambda: writer.commit(run="m", step=1, parent=None, manifest=bytes(32), base=None,
                                  root=bytes(32), packs=[]),
        ):  # fmt: skip
            with pytest.raises(StorageError):
                use()
        writer.abort()
        assert writer.put(raw).written > 0
        writer.flush()


@pytest.mark.parametrize("call", ["create", "write", "sync", "link", "sync_directory"])
def test_no_failure_of_a_flush_is_forgotten(store: Store, call: str) -> None:
    """A second flush that succeeds would acknowledge what the first one lost."""
    io = recorder(store)
    with StoreWriter(store) as writer:
        save(writer, 1, [blob(1000)])
        raw = blob(1000)
        writer.put(raw)
        io.fail_on = call
        with pytest.raises(StorageError):
            writer.flush()
        io.fail_on = ""
        with pytest.raises(StorageError):
            writer.flush()
        writer.abort()
        assert writer.put(raw).written > 0


def test_a_failure_in_the_background_reaches_the_next_put(store: Store) -> None:
    io = recorder(store)
    with StoreWriter(store, pack_bytes=1000) as writer:
        writer.put(blob(10))
        writer.flush()
        io.counting, io.fail_at, io.persistent = True, 0, True
        writer.put(blob(2000))
        with pytest.raises(StorageError):  # the thread is drained: the error is there
            writer._output._thread.drain()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(StorageError):
            writer.put(blob(10))
        io.counting = False
        assert temporaries(store) == []


def test_abort_drops_only_what_is_not_flushed(store: Store) -> None:
    with StoreWriter(store, pack_bytes=50_000) as writer:
        kept = writer.put(b"kept")
        writer.flush()
        dropped = [writer.put(blob(60_000)) for _ in range(3)]
        writer.put(b"small")
        writer.abort()
        assert temporaries(store) == []
        assert len(files(store, "packs")) == 1
        assert writer.put(b"kept").written == 0
        again = writer.put(b"small")
        assert again.written > 0
        assert again.pack not in {p.pack for p in dropped}
        writer.flush()
    assert read(store, kept, 4) == b"kept"


# manifests and commits ----------------------------------------------------------------------


def test_a_save_can_be_read_back(store: Store) -> None:
    blobs = [blob(1000), blob(70_000)]
    with StoreWriter(store) as writer:
        first = save(writer, 10, blobs)
        second = save(writer, 20, blobs[::-1], first)
    fresh = reopen(store)
    assert [(c.number, c.step) for c in fresh.commits("main")] == [(1, 10), (2, 20)]
    assert fresh.commits("main") == [first, second]
    assert second.parent == ("main", 1, first.digest)
    data = (Path(store.path) / "runs" / "main" / f"{1:020d}").read_bytes()
    assert first.digest == data[-32:] == blake3(data[:-32]).digest()
    assert first.writer == second.writer != ""


def test_an_equal_manifest_is_written_once_and_made_durable(store: Store) -> None:
    """Whoever wrote it may have died before its name was durable."""
    with StoreWriter(store) as writer:
        save(writer, 1, [b"abc"])
        put = writer.put(b"abc")
        recorder(store).calls.clear()
        digest = writer.write_manifest(base_manifest([put], [3]))
        calls = [c for c in recorder(store).calls if c[0] == "sync_directory"]
        assert calls == [("sync_directory", os.path.join(store.path, "manifests"))]
        assert temporaries(store) == []
        path = Path(store.path) / "manifests" / digest.hex()
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="exists and is damaged"):
            writer.write_manifest(base_manifest([put], [3]))


def commit(writer: StoreWriter, step: int, number: int | None = None) -> Commit:
    return writer.commit(run="main", step=step, parent=None, manifest=bytes(32), base=None,
                         root=bytes(32), packs=[], number=number)  # fmt: skip


def test_two_writers_never_win_one_number(store: Store) -> None:
    """Two histories under one number would make 'latest' a matter of luck."""
    with StoreWriter(store) as one, StoreWriter(reopen(store)) as two:
        won = commit(one, 1, number=1)
        with pytest.raises(ConflictError) as caught:
            commit(two, 1, number=1)
        assert caught.value.context["number"] == 1
        assert commit(two, 2).number == 2
        assert commit(one, 3).number == 3
    assert temporaries(store) == []
    assert reopen(store).commits("main")[0] == won


def test_numbers_of_retired_commits_are_not_used_again(store: Store) -> None:
    """A number that returns after deletion lets a stalled writer commit into the past."""
    with StoreWriter(store) as writer:
        commit(writer, 1)
        commit(writer, 2)
        run = Path(store.path) / "runs" / "main"
        (run / f"{2:020d}.retired").touch()
        (run / f"{2:020d}").unlink()
        with pytest.raises(ConflictError):
            commit(writer, 3, number=2)
        assert commit(writer, 3).number == 3


def test_a_creation_whose_answer_was_lost_counts(store: Store) -> None:
    """Over NFS a repeated link says 'exists' for the writer's own success."""

    class Lossy(Recording):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            raise FileExistsError(errno.EEXIST, "File exists", target)

    lossy = Store.open(store.path, io=Lossy())
    with StoreWriter(lossy) as writer:
        made = commit(writer, 1, number=1)
    assert reopen(store).commits("main") == [made]


@pytest.mark.parametrize("run", ["", "../x", ".hidden", "a/b", "-x", "x" * 101])
def test_run_names_cannot_lead_elsewhere(store: Store, run: str) -> None:
    with StoreWriter(store) as writer, pytest.raises(InvalidInputError):
        writer.commit(run=run, step=1, parent=None, manifest=bytes(32), base=None,
                      root=bytes(32), packs=[])  # fmt: skip


def test_commits_record_what_they_are_told(store: Store) -> None:
    with StoreWriter(store) as writer:
        made = writer.commit(
            run="main", step=5, parent=None, manifest=b"m" * 32, base=b"b" * 32, root=b"r" * 32,
            packs=["b", "a", "a"], versions={"x": "1"}, metrics={"loss": 0.5},
            stats={"written": 3.0},
        )  # fmt: skip
    data = (Path(store.path) / "runs" / "main" / f"{1:020d}").read_bytes()
    got = decode_commit(data)
    assert got == made
    assert got.closure == blake3(b"a\nb").digest() == digest_of(b"a\nb")
    assert (got.step, got.manifest, got.base, got.root, got.generation) == (
        5, b"m" * 32, b"b" * 32, b"r" * 32, 0
    )  # fmt: skip
    assert (got.versions, got.metrics, got.stats) == ({"x": "1"}, {"loss": 0.5}, {"written": 3.0})
    assert len(got.nonce) == 16
    assert msgspec.structs.replace(got, digest=b"") != got


# processes ----------------------------------------------------------------------------------


def test_a_closed_or_forked_writer_says_so(store: Store) -> None:
    """A forked child that writes into its parent's pack would tear it."""  # case 64
    code = """
        import os, sys
        from deltackpt_store.errors import StateError
        from deltackpt_store.store import Store
        from deltackpt_store.store_writer import StoreWriter
        store = Store.open(sys.argv[1])
        writer = StoreWriter(store, pack_bytes=1000)
        writer.put(os.urandom(5000))
        pid = os.fork()
        if pid == 0:
            for use in (lambda: writer.put(b"x"), writer.flush, writer.abort):
                try:
                    use()
                except StateError as error:
                    assert error.kind == "forked"
                else:
                    os._exit(3)
            writer.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        writer.put(b"parent goes on")
        assert len(writer.flush()) == 2
        writer.close()
        try:
            writer.put(b"x")
        except StateError as error:
            assert error.kind == "closed"
        else:
            raise SystemExit("closed writer took a chunk")
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), store.path],
        check=True, timeout=60,
    )  # fmt: skip
    assert temporaries(store) == []


def test_a_process_that_ends_without_close_does_not_hang(store: Store) -> None:
    """A forgotten writer must not keep an interpreter from exiting; atexit may still save."""
    code = """
        import atexit, os, sys
        from deltackpt_store.store import Store
        from deltackpt_store.store_writer import StoreWriter
        writer = StoreWriter(Store.open(sys.argv[1]), pack_bytes=1000)
        late = StoreWriter(Store.open(sys.argv[1]), pack_bytes=1000)
        writer.put(os.urandom(5000))
        def save():
            late.put(b"late" * 1000)
            late.flush()
        atexit.register(save)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), store.path], check=True, timeout=60
    )
    out = bytearray(4000)
    reopen(store).get_into(blake3(b"late" * 1000).digest(), out)
    assert out == b"late" * 1000


def test_twenty_thousand_small_chunks_make_few_files_and_calls(store: Store) -> None:
    """One file or system call per small tensor would make every save slow."""
    raw = blob(1 << 20)
    with StoreWriter(store) as writer:
        recorder(store).calls.clear()
        for n in range(20_000):
            writer.put(memoryview(raw)[n * 40 : n * 40 + 1024 + n % 3072])
        writer.flush()
    assert len(files(store, "packs")) == 1
    assert len(recorder(store).calls) < 100


# the I/O thread -----------------------------------------------------------------------------


def test_jobs_run_in_order_and_stop_at_the_first_failure() -> None:
    done: list[int] = []
    thread = IoThread("t", depth=3)

    def job(n: int) -> None:
        if n == 5:
            raise ValueError("five")
        done.append(n)

    for n in range(100):
        thread.submit(lambda n=n: job(n))
    with pytest.raises(ValueError, match="five"):
        thread.drain()
    assert done == [0, 1, 2, 3, 4]
    thread.reset()
    thread.submit(lambda: job(6))
    thread.drain()
    assert done[-1] == 6
    thread.stop()
    thread.submit(lambda: job(7))  # starts again
    thread.drain()
    assert done[-1] == 7
    thread.stop()


def test_without_a_thread_jobs_run_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """At interpreter exit no thread can start; the last save still has to happen."""

    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    thread = IoThread("t")
    done: list[int] = []
    thread.submit(lambda: done.append(1))
    assert done == [1]
    thread.drain()
    thread.stop()


def test_raw_is_the_codec_when_told(store: Store) -> None:
    with StoreWriter(store, codec="none") as writer:
        assert writer.put(bytes(100_000)).codec == RAW
    assert store_writer.PACK_BYTES == 64 * 1024 * 1024
