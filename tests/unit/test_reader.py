"""Reading chunks: exact bytes or an error, from any copy, in bounded memory."""

from __future__ import annotations

import errno
import os
import random
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from coded import Blob, rounded_blob, write_pack
from deltackpt_store import (
    CorruptionError,
    FileIO,
    InvalidInputError,
    StorageError,
    Store,
    UnsupportedFormatError,
    codecs,
    fetch,
    read_run,
)
from deltackpt_store.codecs import Codec, Encoded
from deltackpt_store.coding import cast
from deltackpt_store.fileio import Buffer
from deltackpt_store.pack import Location, pack_name, pack_path, read_footer
from deltackpt_store.pack_writer import PackWriter

WRITER = "00112233445566aa"
RNG = random.Random(11)


def id_of(raw: bytes) -> bytes:
    return blake3(raw).digest()


def noise(size: int) -> bytes:
    return RNG.randbytes(size)


def smooth(size: int) -> bytes:
    """Compressible bytes, never the same twice."""
    return np.cumsum(np.full(size // 4 + 1, RNG.random(), np.float32)).tobytes()[:size]


class Packs:
    """A store whose packs are written record by record."""

    def __init__(self, path: Path) -> None:
        self.store = Store.create(path)
        self._count = 0

    def add(self, *blobs: tuple[bytes, Encoded | None]) -> str:
        """A new pack of (raw bytes, encoding; None: raw). Returns its name."""
        self._count += 1
        name = pack_name(WRITER, self._count)
        path = pack_path(self.store.path, name)
        writer = PackWriter(self.store.io, path, self.store.uuid, WRITER, self._count)
        for raw, encoded in blobs:
            writer.append(id_of(raw), len(raw), encoded or Encoded(codecs.RAW, b"", (), [raw]))
        writer.finish()
        return name

    def raw(self, *chunks: bytes) -> str:
        return self.add(*((chunk, None) for chunk in chunks))

    def path(self, name: str) -> Path:
        return Path(pack_path(self.store.path, name))

    def damage(self, name: str, chunk: bytes, at: int = 0) -> None:
        """Flip a bit of the stored payload of `chunk`."""
        footer = read_footer(self.store.io, str(self.path(name)))
        for chunk_id, place in footer.entries.items(name):
            if chunk_id == id_of(chunk):
                data = bytearray(self.path(name).read_bytes())
                data[place.payload + at] ^= 1
                self.path(name).write_bytes(data)

    def fresh(self, io: FileIO | None = None) -> Store:
        return Store.open(self.store.path, io=io)


@pytest.fixture
def packs(tmp_path: Path) -> Packs:
    return Packs(tmp_path / "s")


def read(store: Store, chunks: Sequence[bytes], hints: Sequence[str] = (), **options: Any) -> None:
    """Read all chunks into fresh memory and compare."""
    dests = [memoryview(bytearray(b"\xee" * len(chunk))) for chunk in chunks]
    pairs = zip(chunks, dests, strict=True)
    store.reader(hints).read([(id_of(chunk), dest) for chunk, dest in pairs], **options)
    for chunk, dest in zip(chunks, dests, strict=True):
        assert dest == chunk


def xor(params: bytes, payload: memoryview, out: memoryview, refs: Sequence[memoryview]) -> None:
    """A codec for tests: the payload XOR all references."""
    data = np.frombuffer(payload, np.uint8).copy()
    for reference in refs:
        if len(reference) != len(out):
            raise CorruptionError("reference of another length")
        data ^= np.frombuffer(reference, np.uint8)
    out[:] = data.data


@pytest.fixture
def xor_codec() -> Iterator[int]:
    codecs.register(Codec(200, "xor", xor))
    yield 200
    codecs._codecs.pop(200)


def against(chunk: bytes, *references: bytes) -> Encoded:
    """`chunk` coded as its difference from `references`."""
    data = np.frombuffer(chunk, np.uint8).copy()
    for reference in references:
        data ^= np.frombuffer(reference, np.uint8)
    return Encoded(200, b"", tuple(map(id_of, references)), [data.tobytes()])


# what is read -----------------------------------------------------------------------------------

SIZES = [1, 7, 63, 512, 4095, 4096, 32767, 32768, 65535, 65536, 65537, 262144, 300_000, 5_000_000]


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_every_size_raw_and_encoded(packs: Packs, threads: int | None) -> None:
    """Short tails, alignment borders and neighbours of all kinds come back exactly."""
    chunks = [noise(size) for size in SIZES] + [smooth(size) for size in SIZES]
    blobs = [(c, codecs.choose(memoryview(c), "float32")) for c in chunks]
    assert {b.codec for _, b in blobs} == {codecs.RAW, codecs.PLANES}
    RNG.shuffle(blobs)
    names = [packs.add(*blobs[:20]), packs.add(*blobs[20:])]
    for hints in ([], names, names[:1], ["ffffffffffffffff-00000001"]):
        shuffled = [*chunks, *chunks[:3]]
        RNG.shuffle(shuffled)
        read(packs.fresh(), shuffled, hints, threads=threads)


def test_many_small_chunks(packs: Packs) -> None:
    """Thousands of small chunks are read in few large reads."""
    chunks = [noise(1024 + i % 3072) for i in range(5000)]
    name = packs.raw(*chunks)

    class Counting(FileIO):
        calls = 0

        def read_into(
            self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int
        ) -> int:
            self.calls += 1
            return super().read_into(handle, buffers, offset)

    io = Counting()
    RNG.shuffle(chunks)
    read(packs.fresh(io), chunks, [name])
    assert io.calls < 20


def test_large_chunks_are_read_straight_into_place(packs: Packs) -> None:
    """A restore must not need the state's size again in buffers."""
    chunks = [noise(256 * 1024) for _ in range(64)]
    name = packs.raw(*chunks)
    dests = [memoryview(bytearray(len(c))) for c in chunks]
    store = packs.fresh()
    tracemalloc.start()
    store.reader([name]).read([(id_of(c), d) for c, d in zip(chunks, dests, strict=True)],
                              threads=1)  # fmt: skip
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(d == c for c, d in zip(chunks, dests, strict=True))
    assert peak < 2 * read_run.UNIT_BYTES + (1 << 20)


def test_memory_is_bounded_for_scattered_and_encoded_chunks(packs: Packs) -> None:
    """Many small or encoded chunks need a window of scratch, not their sum."""
    chunks = [smooth(20_000) if i % 2 else noise(20_000) for i in range(2000)]
    blobs = [(c, codecs.choose(memoryview(c), "float32")) for c in chunks]
    name = packs.add(*blobs)
    dests = [memoryview(bytearray(len(c))) for c in chunks]
    store = packs.fresh()
    tracemalloc.start()
    store.reader([name]).read([(id_of(c), d) for c, d in zip(chunks, dests, strict=True)],
                              threads=1)  # fmt: skip
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(d == c for c, d in zip(chunks, dests, strict=True))
    assert peak < 2 * read_run.UNIT_BYTES + (2 << 20)


def test_one_id_many_times(packs: Packs) -> None:
    """Equal chunks of a state (zeros, tied copies) are stored and read once, delivered to all."""
    zeros = bytes(100_000)
    packs.raw(zeros)
    dests = [memoryview(bytearray(b"\1" * len(zeros))) for _ in range(50)]

    class Counting(FileIO):
        total = 0

        def read_into(
            self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int
        ) -> int:
            self.total += super().read_into(handle, buffers, offset)
            return sum(map(len, buffers))

    store = packs.fresh(Counting())
    store.index()
    before = store.io.total
    store.reader().read([(id_of(zeros), dest) for dest in dests])
    assert all(dest == zeros for dest in dests)
    assert store.io.total - before == len(zeros)


def test_destinations_of_any_format(packs: Packs) -> None:
    """Typed and multi-dimensional memory is filled as it lies."""
    chunk = noise(4096)
    packs.raw(chunk)
    array = np.zeros((32, 32), np.float32)
    packs.fresh().reader().read([(id_of(chunk), memoryview(array))])
    assert array.tobytes() == chunk
    buffer = bytearray(4096)
    packs.fresh().get_into(id_of(chunk), buffer)
    assert buffer == chunk


def test_destinations_that_cannot_be_filled(packs: Packs) -> None:
    """A read-only or strided destination is refused before anything is read."""
    chunk = noise(4096)
    packs.raw(chunk)
    wide = memoryview(bytearray(8192))
    for dest in (memoryview(chunk), wide[::2]):
        with pytest.raises(InvalidInputError):
            packs.fresh().reader().read([(id_of(chunk), dest)])
    with pytest.raises(InvalidInputError, match="two sizes"):
        packs.fresh().reader().read([(id_of(chunk), wide[:4096]), (id_of(chunk), wide[:4095])])
    for bad in (b"", b"x" * 31, b"x" * 33):
        with pytest.raises(InvalidInputError, match="32 bytes"):
            packs.fresh().reader().read([(bad, wide[:4096])])
    with pytest.raises(InvalidInputError, match="32 bytes"):
        packs.fresh().reader().read([(b"x" * 31, wide[:10]), (b"y" * 33, wide[:10])])
    packs.fresh().reader().read([])


# damage -----------------------------------------------------------------------------------------


def lost_ids(store: Store, chunks: Sequence[bytes], hints: Sequence[str] = ()) -> set[bytes]:
    """Ids reported as lost; everything else must have been read all the same."""
    dests = [memoryview(bytearray(len(chunk))) for chunk in chunks]
    requests = [(id_of(c), d) for c, d in zip(chunks, dests, strict=True)]
    with pytest.raises(CorruptionError) as caught:
        store.reader(hints).read(requests)
    assert caught.value.kind == "damaged-chunks"
    assert caught.value.hint
    ids = caught.value.context["ids"]
    several = f"{len(ids)} chunks cannot be read, among them: "
    one = "1 chunk cannot be read: "
    assert caught.value.message.startswith(one if len(ids) == 1 else several)
    lost = set(ids)
    for chunk, dest in zip(chunks, dests, strict=True):
        assert (id_of(chunk) in lost) or dest == chunk
    return lost


@pytest.mark.parametrize("size", [1000, 40_000, 100_000])
def test_all_damaged_chunks_are_reported_and_the_others_read(packs: Packs, size: int) -> None:
    """Whoever repairs needs the whole list, not the first entry."""  # case 114
    chunks = [smooth(size) if i % 3 == 0 else noise(size) for i in range(60)]
    name = packs.add(*((c, codecs.choose(memoryview(c), "float32")) for c in chunks))
    hurt = [chunks[i] for i in (0, 7, 8, 30, 59)]
    for chunk in hurt:
        packs.damage(name, chunk, 13)
    assert lost_ids(packs.fresh(), chunks) == set(map(id_of, hurt))


def test_another_copy_is_used_by_itself(packs: Packs) -> None:
    """A chunk that two packs hold survives the loss of either."""
    chunks = [noise(50_000), noise(100), smooth(70_000), noise(300_000)]
    encoded = [(c, codecs.choose(memoryview(c), "float32")) for c in chunks]
    first, second = packs.add(*encoded), packs.raw(*chunks)
    for chunk in chunks:
        packs.damage(first, chunk)
    for hints in ([first], [second], [], [first, second]):
        read(packs.fresh(), chunks, hints)
    packs.damage(second, chunks[1])
    assert lost_ids(packs.fresh(), chunks, [first]) == {id_of(chunks[1])}


def test_two_copies_in_one_pack(packs: Packs) -> None:
    """Even a copy in the same pack counts."""
    chunk = noise(5000)
    name = packs.raw(chunk, noise(100), chunk)
    packs.damage(name, chunk)  # both copies...
    data = bytearray(packs.path(name).read_bytes())
    places = [p for i, p in read_footer(FileIO(), str(packs.path(name))).entries.items(name)
              if i == id_of(chunk)]  # fmt: skip
    data[places[0].payload] ^= 1  # ...and one of them mended
    packs.path(name).write_bytes(data)
    read(packs.fresh(), [chunk])


def test_missing_pack(packs: Packs) -> None:
    """A pack that is gone takes only its own chunks with it."""
    kept, gone, both = noise(1000), noise(2000), noise(3000)
    one, two = packs.raw(kept, both), packs.raw(gone, both)
    store = packs.fresh()
    read(store, [kept, gone, both], [two])
    packs.path(two).unlink()
    assert lost_ids(store, [kept, gone, both], [two]) == {id_of(gone)}
    assert lost_ids(packs.fresh(), [kept, gone, both], [one, two]) == {id_of(gone)}
    assert lost_ids(packs.fresh(), [gone]) == {id_of(gone)}


@pytest.mark.parametrize("how", ["truncated", "footer", "trailer", "header"])
def test_a_pack_with_a_damaged_table_is_searched(packs: Packs, how: str) -> None:
    """Chunks whose bytes are intact are found again without the pack's table."""
    chunks = [noise(size) for size in (100, 5000, 70_000, 100_000, 200)] + [smooth(50_000)]
    name = packs.add(*((c, codecs.choose(memoryview(c), "float32")) for c in chunks))
    data = bytearray(packs.path(name).read_bytes())
    if how == "truncated":
        del data[-10:]
    elif how == "header":
        data[3] ^= 1
    else:
        data[-100 if how == "footer" else -40] ^= 1
    packs.path(name).write_bytes(data)
    for hints in ([], [name]):
        read(packs.fresh(), chunks, hints)
    packs.path(name).write_bytes(data[: len(data) // 2])
    lost = lost_ids(packs.fresh(), chunks)
    assert 0 < len(lost) < len(chunks)


def test_a_pack_that_appears_later_is_found(packs: Packs) -> None:
    """A reader opened before a save must be able to read what was saved since."""
    early, late = noise(1000), noise(1000)
    packs.raw(early)
    store = packs.fresh()
    chunk_reader = store.reader(["00112233445566aa-00000002"])
    with pytest.raises(CorruptionError):
        chunk_reader.read([(id_of(late), memoryview(bytearray(1000)))])
    packs.raw(late)
    dest = memoryview(bytearray(1000))
    chunk_reader.read([(id_of(late), dest)])
    assert dest == late


def test_wrong_size_is_damage(packs: Packs) -> None:
    """A chunk that has another length than the manifest says must not be cut or padded."""
    chunk = noise(1000)
    packs.raw(chunk)
    for size in (999, 1001, 1, 0):
        with pytest.raises(CorruptionError, match="1000 bytes"):
            packs.fresh().reader().read([(id_of(chunk), memoryview(bytearray(size)))])


def test_table_that_lies(packs: Packs) -> None:
    """A table is only a hint: what it points at must prove itself."""
    chunks = [smooth(20_000), noise(20_000), noise(100_000)]
    name = packs.add(*((c, codecs.choose(memoryview(c), "float32")) for c in chunks))
    store = packs.fresh()
    store.packs.load([name])
    entries = store.packs.index.entries(name)
    assert entries is not None
    for field, value in (
        ("offset", 64), ("offset", 1 << 62), ("header", 0), ("header", 1 << 31), ("stored", 1),
        ("stored", (1 << 32) - 1), ("raw", 5), ("codec", 1), ("codec", 0), ("codec", 77),
    ):  # fmt: skip
        table = entries.table.copy()
        table[field] = value
        lying = type(entries)(table, entries.refs)
        other = packs.fresh()
        other.packs.index.add_pack(name, lying)
        for chunk in chunks:
            dest = memoryview(bytearray(len(chunk)))
            try:
                other.reader([name]).read([(id_of(chunk), dest)])
            except (CorruptionError, UnsupportedFormatError):
                continue
            assert dest == chunk


class FailingIO(FileIO):
    """Reading payload bytes of a pack fails with `code` when `when` says so."""

    def __init__(self, code: int, when: Callable[[int], bool]) -> None:
        self.code, self.when = code, when

    def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        end = offset + sum(map(len, buffers))
        if any(self.when(at) for at in range(offset // 4096, -(-end // 4096))):
            raise OSError(self.code, os.strerror(self.code))
        return super().read_into(handle, buffers, offset)


def test_unreadable_sectors_hit_only_their_chunks(packs: Packs) -> None:
    """A bad sector is damage of what lies there, and another copy replaces it."""
    chunks = [noise(100_000) for _ in range(20)]
    name = packs.raw(*chunks)
    entries = read_footer(FileIO(), str(packs.path(name))).entries
    bad = next(p for i, p in entries.items(name) if i == id_of(chunks[7]))
    io = FailingIO(errno.EIO, lambda sector: sector == bad.payload // 4096 + 3)
    assert lost_ids(packs.fresh(io), chunks) == {id_of(chunks[7])}
    packs.raw(noise(64), chunks[7])
    read(packs.fresh(io), chunks)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.ENOMEM])
def test_a_disk_that_does_not_answer_is_not_damage(packs: Packs, code: int) -> None:
    """Falling back to an older step because of a network hiccup would lose progress."""
    chunks = [noise(100_000) for _ in range(200)]
    name = packs.raw(*chunks)
    io = FailingIO(code, lambda sector: sector == 500)
    with pytest.raises(StorageError) as caught:
        read(packs.fresh(io), chunks, [name])
    assert caught.value.errno == code


def test_unknown_codec_asks_for_an_upgrade(packs: Packs) -> None:
    """A newer writer's encoding is not damage."""
    chunk, plain = noise(1000), noise(1000)
    packs.add((chunk, Encoded(99, b"", (), [chunk])), (plain, None))
    with pytest.raises(UnsupportedFormatError, match="upgrade") as caught:
        read(packs.fresh(), [chunk, plain])
    assert caught.value.context["ids"] == (id_of(chunk),)


def test_a_pack_of_a_newer_version_asks_for_an_upgrade(packs: Packs) -> None:
    """Chunks in a pack that this release cannot read are not called lost."""
    chunk = noise(1000)
    name = packs.raw(chunk)
    data = bytearray(packs.path(name).read_bytes())
    data[8] += 1
    data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    packs.path(name).write_bytes(data)
    for hints in ([name], []):
        with pytest.raises(UnsupportedFormatError, match="upgrade") as caught:
            read(packs.fresh(), [chunk], hints)
        assert caught.value.context["ids"] == (id_of(chunk),)


def test_a_codec_that_writes_wrong_bytes_is_caught(packs: Packs, xor_codec: int) -> None:
    """Whatever a decoder does, bytes without their id are never handed out."""
    chunk = noise(10_000)
    packs.add((chunk, Encoded(200, b"", (), [noise(10_000)])))
    assert lost_ids(packs.fresh(), [chunk]) == {id_of(chunk)}


# references -------------------------------------------------------------------------------------


def test_references(packs: Packs, xor_codec: int) -> None:
    """A chunk coded against others needs them from wherever they lie."""
    base, second, third = noise(20_000), noise(20_000), noise(20_000)
    one = packs.raw(base)
    two = packs.add((second, against(second, base)), (third, against(third, second)))
    for hints in ([one, two], [two], []):
        read(packs.fresh(), [third], hints)
        read(packs.fresh(), [base, second, third], hints)
    packs.damage(one, base)
    assert lost_ids(packs.fresh(), [second, third, base]) == {*map(id_of, (base, second, third))}
    packs.raw(base)
    read(packs.fresh(), [second, third, base], [one, two])


def test_a_bad_reference_with_another_copy(packs: Packs, xor_codec: int) -> None:
    """A chunk coded against a damaged copy is decoded against the sound one."""
    bases = [noise(20_000) for _ in range(40)]
    chunks = [noise(20_000) for _ in range(40)]
    one = packs.raw(*bases)
    coded = [(c, against(c, b, bases[0])) for c, b in zip(chunks, bases, strict=True)]
    two = packs.add(*coded)
    for i in (0, 7, 39):
        packs.damage(one, bases[i], i)
    lost = lost_ids(packs.fresh(), chunks[1:], [one, two])
    assert lost == set(map(id_of, chunks[1:]))  # all of them need the first one
    packs.raw(bases[0])
    lost = lost_ids(packs.fresh(), chunks, [one, two])
    assert lost == {id_of(chunks[7]), id_of(chunks[39])}
    packs.raw(bases[7], bases[39])
    read(packs.fresh(), chunks, [one, two])
    read(packs.fresh(), chunks)


@pytest.mark.parametrize("cache", [0, 30_000, 1 << 20])
def test_buffers_of_references_are_not_mixed_up(
    packs: Packs, xor_codec: int, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is used again for the next reference must not be in use for the last one."""
    monkeypatch.setattr(fetch, "_CACHE_BYTES", cache)
    sizes = [10_000, 10_000, 5000]
    bases = [[noise(size) for _ in range(12)] for size in sizes]
    blobs: list[tuple[bytes, Encoded | None]] = [(b, None) for layer in bases for b in layer]
    chunks: list[bytes] = []
    for layer in bases:
        lower = layer
        for _ in range(3):
            upper = [noise(len(layer[0])) for _ in range(12)]
            blobs += [(c, against(c, *RNG.sample(lower, 3))) for c in upper]
            chunks += upper
            lower = upper
    packs.add(*blobs)
    RNG.shuffle(chunks)
    for threads in (1, 3):
        read(packs.fresh(), chunks, threads=threads)


def test_a_record_that_declares_far_more_than_its_chunk_is_not_read(packs: Packs) -> None:
    """A small chunk must not cost the memory of a whole pack."""
    packs.add((b"small", Encoded(codecs.PLANES, b"", (), [bytes(8 << 20)])))
    store = packs.fresh()
    tracemalloc.start()
    with pytest.raises(CorruptionError, match="impossible lengths"):
        read(store, [b"small"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_depth_of_references_is_bounded(packs: Packs, xor_codec: int) -> None:
    """A chain without end must not exhaust the stack."""
    chain = [noise(500) for _ in range(fetch.MAX_DEPTH + 2)]
    blobs = [(chain[0], None)]
    blobs += [(b, against(b, a)) for a, b in pairwise(chain)]
    packs.add(*blobs)
    read(packs.fresh(), [chain[fetch.MAX_DEPTH]])
    assert lost_ids(packs.fresh(), [chain[-1]]) == {id_of(chain[-1])}


def test_cycles_of_references(packs: Packs, xor_codec: int) -> None:
    """Records that refer to each other, or to themselves, end as damage."""
    a, b, c = noise(500), noise(500), noise(500)
    packs.add((a, against(a, b)), (b, against(b, a)), (c, against(c, c)))
    assert lost_ids(packs.fresh(), [a, b, c]) == {*map(id_of, (a, b, c))}


def test_what_references_may_cost_is_bounded(
    packs: Packs, xor_codec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crafted fan of references must not read for hours or fill the memory."""
    layers = [[noise(50) for _ in range(20)] for _ in range(8)]
    blobs: list[tuple[bytes, Encoded | None]] = [(chunk, None) for chunk in layers[0]]
    for below, layer in pairwise(layers):
        blobs += [(chunk, against(chunk, *below)) for chunk in layer]
    packs.add(*blobs)
    reads = 0
    original = fetch.Fetcher.fill

    def counted(self: fetch.Fetcher, *arguments: Any) -> None:
        nonlocal reads
        reads += 1
        original(self, *arguments)

    monkeypatch.setattr(fetch.Fetcher, "fill", counted)
    read(packs.fresh(), [layers[-1][0]])
    assert reads <= 160  # each reference once, from the cache after that
    monkeypatch.setattr(fetch, "_CACHE_BYTES", 0)
    reads = 0
    assert lost_ids(packs.fresh(), [layers[-1][0]]) == {id_of(layers[-1][0])}
    assert reads < 10_000
    monkeypatch.setattr(fetch, "_REFERENCE_BYTES", 900)
    assert lost_ids(packs.fresh(), [layers[1][0]]) == {id_of(layers[1][0])}


# threads ----------------------------------------------------------------------------------------


def test_readers_in_many_threads(packs: Packs) -> None:
    """A restore beside an inspection in one process must not disturb either."""
    chunks = [noise(30_000) for _ in range(100)]
    names = [packs.raw(*chunks[:50]), packs.raw(*chunks[50:])]
    store = packs.fresh()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        mine = chunks.copy()
        random.Random(seed).shuffle(mine)
        try:
            for _ in range(3):
                read(store, mine, names[: seed % 3], threads=3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_no_thread_and_no_file_is_left(packs: Packs) -> None:
    """Restoring again and again must not leak descriptors or threads."""
    chunks = [noise(100_000) for _ in range(100)]
    names = [packs.raw(*chunks[i : i + 10]) for i in range(0, 100, 10)]
    store = packs.fresh()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        read(store, chunks, names, threads=4)
        packs.damage(names[0], chunks[0])
        with pytest.raises(CorruptionError):
            read(store, chunks, names, threads=4)
        packs.damage(names[0], chunks[0])
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads


def test_an_interrupt_ends_the_read(packs: Packs) -> None:
    """Ctrl-C during a restore must not hang nor be swallowed."""
    chunks = [noise(100_000) for _ in range(200)]
    name = packs.raw(*chunks)

    class Interrupted(FileIO):
        def read_into(
            self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int
        ) -> int:
            if sum(map(len, buffers)) > 1_000_000:
                raise KeyboardInterrupt
            return super().read_into(handle, buffers, offset)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        read(packs.fresh(Interrupted()), chunks, [name], threads=3)
    assert threading.active_count() == before


def test_short_reads_are_continued(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may be short without the file being: the rest must be fetched, not left as zeros."""
    chunks = [noise(100_000) for _ in range(30)] + [noise(500) for _ in range(30)]
    name = packs.raw(*chunks)
    original = os.preadv

    def short(handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        first = memoryview(buffers[0])
        return original(handle, [first[: max(1, len(first) // 2)]], offset)

    monkeypatch.setattr("deltackpt_store.fileio.os.preadv", short)
    read(packs.fresh(), chunks, [name])  # case 24


def test_location_is_where_the_payload_is(packs: Packs) -> None:
    """The index and the file agree to the byte."""
    chunk = noise(100_000)
    name = packs.raw(noise(10), chunk)
    place = packs.fresh().index().get(id_of(chunk))
    assert isinstance(place, Location)
    data = packs.path(name).read_bytes()
    assert data[place.payload : place.payload + place.stored] == chunk


def test_a_tensor_and_its_rounding_are_decoded_once(
    packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that every restore of mixed-precision training decodes its masters twice."""
    count = 40_000
    base = np.cumsum(np.full(count, 1e-4, "<f4"))
    masters = [(base + 1e-6 * i).astype("<f4") for i in range(4)]
    blobs: list[Blob] = [Blob(codecs.RAW, base.tobytes())]
    for master in masters:
        blobs.append(Blob(codecs.DELTA, master.tobytes(), 4, reference=base.tobytes()))
    for first, second in (masters[:2], masters[2:]):
        raw = np.concatenate((first[count // 2 :], second[: count // 2])).view("<u4")
        rule = cast.RULES[cast.KINDS["bfloat16"]][0]
        rounded = cast.round_to(cast.KINDS["bfloat16"], raw, rule)[0].tobytes()
        parts = [first.tobytes(), second.tobytes()]
        blobs.append(rounded_blob(rounded, "bfloat16", parts, 4 * (count // 2)))
    write_pack(packs.store, blobs, WRITER)
    decoded: list[int] = []
    decode = codecs.decode

    def counted(codec: int, *arguments: Any) -> None:
        decoded.append(codec)
        decode(codec, *arguments)

    monkeypatch.setattr(codecs, "decode", counted)
    rooms = [bytearray(len(blob.raw)) for blob in blobs]
    requests = [
        (id_of(blob.raw), memoryview(room)) for blob, room in zip(blobs, rooms, strict=True)
    ]
    Store.open(packs.store.path).reader().read(requests, 2)
    assert [bytes(room) for room in rooms] == [blob.raw for blob in blobs]
    assert sorted(decoded) == [codecs.DELTA] * 4 + [codecs.CAST] * 2
