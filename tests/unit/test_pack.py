"""The pack format: to the byte against an independent parse, and under damage."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash
from blake3 import blake3
from deltackpt_store import direct, pack_scan
from deltackpt_store import pack as pk
from deltackpt_store.codecs import RAW, Encoded, choose
from deltackpt_store.errors import (
    CorruptionError,
    InvalidInputError,
    StateError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import Buffer, FileIO
from deltackpt_store.pack_scan import scan_records
from deltackpt_store.pack_writer import PackBuilder, PackFile, PackWriter, Rooms

UUID = bytes(range(16))
WRITER = "0123456789abcdef"
NOISE = random.Random(7)
IO = FileIO()


@pytest.fixture(autouse=True)
def packs(tmp_path: Path) -> None:
    """What a store has from its creation on: a writer does not make a vanished one anew."""
    for root in (tmp_path, tmp_path / "other"):
        (root / "packs").mkdir(parents=True)


def chunk_id(raw: bytes) -> bytes:
    return blake3(raw).digest()


def raw_blob(raw: bytes) -> Encoded:
    return Encoded(RAW, b"", (), [raw])


SIZES = [1, 100, 4096, 65535, 65536, 65537, 70000, 131072, 262144, 262144, 5000, 1000]
CHUNKS = [NOISE.randbytes(size) for size in SIZES] + [bytes(200_000), b"ab" * 40_000]


def write_pack(root: Path, chunks: Sequence[bytes] = CHUNKS, seq: int = 3) -> Path:
    path = Path(pk.pack_path(str(root), pk.pack_name(WRITER, seq)))
    writer = PackWriter(IO, str(path), UUID, WRITER, seq)
    for raw in chunks:
        writer.append(chunk_id(raw), len(raw), choose(memoryview(raw), "float32"))
    writer.finish()
    return path


def parse_by_hand(data: bytes) -> list[tuple[bytes, int, bytes, bytes]]:
    """Read a pack from its documented layout alone: (id, codec, params, payload) per record."""
    magic, version, flags, uuid, writer, seq = struct.unpack_from("<8sHH16s8sQ", data)
    assert (magic, version, flags, uuid) == (b"\x89DCKPAK\n", 1, 0, UUID)
    assert (writer.hex(), seq) == (WRITER, 3)
    assert zlib.crc32(data[:60]) == struct.unpack_from("<I", data, 60)[0]
    end, offset, records, refs, total, digest = struct.unpack("<8sQIIQ32s", data[-64:])
    assert (end, total) == (b"\x89DCKEND\n", len(data))
    footer = data[offset:-64]
    assert len(footer) == 56 * records + 32 * refs
    assert digest == blake3(data[:64] + footer + data[-64:-32]).digest()
    result: list[tuple[bytes, int, bytes, bytes]] = []
    for row in range(records):
        entry = struct.unpack_from("<32sQIIIBBH", footer, 56 * row)
        name, at, header, stored, raw, codec, nrefs, zero = entry
        head = struct.unpack_from("<4sIBBBBIIIQ32s", data, at)
        assert head[0] == b"\xc5DcR"
        params = data[at + 64 + 32 * nrefs : at + 64 + 32 * nrefs + head[5]]
        covered = data[at + 8 : at + 64 + 32 * nrefs + head[5]]
        assert head[1] == zlib.crc32(covered)
        payload = data[at + header : at + header + stored]
        assert head[2:] == (codec, 0, nrefs, len(params), header, raw, stored,
                            xxhash.xxh3_64_intdigest(payload), name)  # fmt: skip
        assert zero == 0
        result.append((name, codec, params, payload))
    return result


def test_file_is_as_documented(tmp_path: Path) -> None:
    """A format that only its own code can read is lost with that code."""
    records = parse_by_hand(write_pack(tmp_path).read_bytes())
    assert {r[0] for r in records} == {chunk_id(raw) for raw in CHUNKS}
    by_id = {r[0]: r for r in records}
    for raw in CHUNKS:
        _, codec, _, payload = by_id[chunk_id(raw)]
        if codec == RAW:
            assert payload == raw
    assert sum(r[1] != RAW for r in records) == 2


def test_footer_tells_the_same_as_the_records(tmp_path: Path) -> None:
    path = write_pack(tmp_path)
    footer = pk.read_footer(IO, str(path), store_uuid=UUID)
    assert footer.header.name == path.stem
    assert footer.size == path.stat().st_size
    handle = IO.open(str(path))
    seen: set[bytes] = set()
    for name, where in footer.entries.items(path.stem):
        head = pk.read_record_head(IO, handle, where.offset)
        assert (head.id, head.skip, head.stored, head.raw, head.codec, head.refs) == (
            name, where.header, where.stored, where.raw, where.codec, where.refs
        )  # fmt: skip
        payload = bytearray(where.stored)
        IO.read_into(handle, [payload], where.payload)
        pk.check_payload(head, payload)
        seen.add(name)
    IO.close(handle)
    assert len(seen) == len(CHUNKS) == len(footer.entries)
    assert footer.entries.to_bytes() == path.read_bytes()[-64 - len(seen) * 56 : -64]


def test_large_raw_payloads_are_aligned_and_contiguous(tmp_path: Path) -> None:
    """Direct I/O needs alignment, and padding must not eat the promise of 1.001x raw."""
    chunks = [NOISE.randbytes(262144) for _ in range(128)]
    path = write_pack(tmp_path, chunks)
    footer = pk.read_footer(IO, str(path))
    places = sorted((where for _, where in footer.entries.items("p")), key=lambda w: w.payload)
    assert all(where.payload % 4096 == 0 for where in places)
    joints = [b.payload - a.payload - a.stored for a, b in itertools.pairwise(places)]
    assert sum(gap > 0 for gap in joints) <= 3
    assert path.stat().st_size <= 1.001 * 128 * 262144
    odd = write_pack(tmp_path, [NOISE.randbytes(65536 + n) for n in (0, 1, 4095)], seq=4)
    for _, where in pk.read_footer(IO, str(odd)).entries.items("p"):
        assert where.payload % 4096 == 0


def test_references_and_parameters_survive(tmp_path: Path) -> None:
    path = Path(pk.pack_path(str(tmp_path), pk.pack_name(WRITER, 1)))
    writer = PackWriter(IO, str(path), UUID, WRITER, 1)
    refs = tuple(NOISE.randbytes(32) for _ in range(255))
    writer.append(b"a" * 32, 10, Encoded(9, b"p" * 255, refs, [b"one", bytearray(b"two")]))
    writer.append(b"b" * 32, 10, Encoded(8, b"", refs[:2], [b""]))
    writer.append(b"c" * 32, 3, raw_blob(b"xyz"))
    entries = writer.finish()
    footer = pk.read_footer(IO, str(path))
    assert footer.entries.to_bytes() == entries.to_bytes()
    places = dict(footer.entries.items("p"))
    assert places[b"a" * 32].refs == refs
    assert places[b"b" * 32].refs == refs[:2]
    assert places[b"c" * 32].refs == ()
    handle = IO.open(str(path))
    head = pk.read_record_head(IO, handle, places[b"a" * 32].offset)
    IO.close(handle)
    assert (head.params, head.refs, head.stored) == (b"p" * 255, refs, 6)
    assert head.payload_hash == xxhash.xxh3_64_intdigest(b"onetwo")


@pytest.mark.parametrize(
    ("raw", "encoded"),
    [
        (0, raw_blob(b"")),
        (pk.MAX_CHUNK_BYTES + 1, raw_blob(b"x")),
        (5, Encoded(1, bytes(256), (), [b"x"])),
        (5, Encoded(1, b"", (bytes(32),) * 256, [b"x"])),
    ],
)
def test_what_the_format_cannot_hold_is_refused(raw: int, encoded: Encoded) -> None:
    """A length that does not fit must fail at the call, not wrap around on disk."""  # case 26
    builder = PackBuilder(UUID, WRITER, 1)
    with pytest.raises(InvalidInputError):
        builder.add(bytes(32), raw, encoded)
    with pytest.raises(InvalidInputError):
        builder.add(bytes(31), 5, raw_blob(b"12345"))


@pytest.mark.parametrize("name", ["../../etc/passwd", "0" * 16 + "-1", "", "A" * 16 + "-00000001",
                                  "0" * 16 + "-00000001\n", "0" * 16 + "-0000000a"])  # fmt: skip
def test_pack_names_cannot_lead_elsewhere(name: str) -> None:
    """A manifest is untrusted: a pack name in it must not name a file outside the store."""
    with pytest.raises(CorruptionError):
        pk.pack_path("/store", name)


# damage -------------------------------------------------------------------------------------


def test_every_changed_byte_of_header_footer_and_trailer_is_found(tmp_path: Path) -> None:
    """A silently damaged table would send readers to wrong places."""
    path = write_pack(tmp_path, CHUNKS[:4])
    good = path.read_bytes()
    offset = struct.unpack_from("<Q", good, len(good) - 56)[0]
    for at in [*range(64), *range(offset, len(good))]:
        bad = bytearray(good)
        bad[at] ^= 1 << NOISE.randrange(8)
        path.write_bytes(bad)
        with pytest.raises((CorruptionError, UnsupportedFormatError)):
            pk.read_footer(IO, str(path))


def read_record(record: memoryview) -> bytes:
    head = pk.decode_record(record)
    payload = record[head.skip : head.skip + head.stored]
    pk.check_payload(head, payload)
    return bytes(payload)


def test_every_changed_byte_of_a_record_is_found(tmp_path: Path) -> None:
    raw = bytes(5000)
    path = write_pack(tmp_path, [raw])
    good = path.read_bytes()
    where = pk.read_footer(IO, str(path)).entries.location("p", 0)
    for at in range(where.offset, where.payload + where.stored):
        bad = bytearray(good)
        bad[at] ^= 1 << NOISE.randrange(8)
        record = memoryview(bad)[where.offset :]
        with pytest.raises(CorruptionError):
            read_record(record)


def test_cut_or_grown_packs_are_found(tmp_path: Path) -> None:
    path = write_pack(tmp_path, CHUNKS[:4])
    good = path.read_bytes()
    lengths = [*range(200), *(NOISE.randrange(len(good)) for _ in range(100)), len(good) - 1]
    for length in lengths:
        path.write_bytes(good[:length])
        with pytest.raises(CorruptionError):
            pk.read_footer(IO, str(path))
    path.write_bytes(good + b"\0")
    with pytest.raises(CorruptionError):
        pk.read_footer(IO, str(path))


def forge(path: Path, data: bytes, footer: bytes, records: int, refs: int, at: int) -> None:
    """Write `data` with another footer and a trailer whose digest is right."""
    path.write_bytes(data[:at] + footer + pk.encode_trailer(data[:64], footer, at, records, refs))


def test_forged_footers_cannot_point_outside(tmp_path: Path) -> None:
    """An attacker can compute digests: only the bounds keep readers inside the file."""
    path = write_pack(tmp_path, CHUNKS[:2])
    data = path.read_bytes()
    at = struct.unpack_from("<Q", data, len(data) - 56)[0]
    size = at

    def entry(offset: int, header: int, stored: int, raw: int, refs: int = 0) -> bytes:
        return struct.pack("<32sQIIIBBH", bytes(32), offset, header, stored, raw, 0, refs, 0)

    bad = [
        entry(size, 64, 1, 1),
        entry(64, 64, size, size),
        entry(64, 2**32 - 1, 1, 1),
        entry(2**64 - 64, 64, 1, 1),
        entry(2**64 - 1, 64, 100, 1),
        entry(0, 64, 1, 1),
        entry(64, 63, 1, 1),
        entry(64, 64, 1, 0),
        entry(64, 64, 1, 2**32 - 1),
        entry(64, 64, 1, 1, refs=1),
    ]
    for footer in bad:
        forge(path, data, footer, 1, 0, at)
        with pytest.raises(CorruptionError, match="outside"):
            pk.read_footer(IO, str(path))
    forge(path, data, entry(64, 64, 1, 1), 2**32 - 1, 2**32 - 1, at)
    with pytest.raises(CorruptionError, match="impossible"):
        pk.read_footer(IO, str(path))
    forge(path, data, entry(64, 64, 1, 1), 1, 0, at)
    assert len(pk.read_footer(IO, str(path)).entries) == 1


def test_forged_records_cannot_lie_on_top_of_each_other(tmp_path: Path) -> None:
    """Who checks every record would read one payload as often as the table names it."""
    path = write_pack(tmp_path, [NOISE.randbytes(100_000)])
    data = path.read_bytes()
    at = struct.unpack_from("<Q", data, len(data) - 56)[0]
    entry = data[at : at + 56]
    forge(path, data, entry, 1, 0, at)
    assert len(pk.read_footer(IO, str(path)).entries) == 1
    forge(path, data, 2 * entry, 2, 0, at)
    with pytest.raises(CorruptionError, match="on top of each other"):
        pk.read_footer(IO, str(path))


def test_foreign_renamed_and_newer_packs_are_refused(tmp_path: Path) -> None:
    path = write_pack(tmp_path, CHUNKS[:1])
    with pytest.raises(CorruptionError, match="another store"):
        pk.read_footer(IO, str(path), store_uuid=bytes(16))
    other = path.with_name(pk.pack_name(WRITER, 9) + ".pack")
    other.write_bytes(path.read_bytes())
    with pytest.raises(CorruptionError, match="holds the pack"):
        pk.read_footer(IO, str(other))
    data = bytearray(path.read_bytes())
    data[8] = 2
    data[60:64] = struct.pack("<I", zlib.crc32(data[:60]))
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        pk.read_footer(IO, str(path))
    with pytest.raises(StorageError) as caught:
        pk.read_footer(IO, str(path) + "x")
    assert caught.value.errno == 2


def test_records_are_found_again_in_a_damaged_pack(tmp_path: Path) -> None:
    """A lost footer must not lose the chunks before it."""
    path = write_pack(tmp_path)
    places = dict(pk.read_footer(IO, str(path)).entries.items(path.stem))
    data = bytearray(path.read_bytes())
    del data[-64:]
    path.write_bytes(data)
    found = list(scan_records(IO, str(path)))
    assert {r.id: r.location for r in found} == places
    assert all(r.intact for r in found)
    # Now also zero one head and damage one payload.
    headless, hurt = chunk_id(CHUNKS[8]), chunk_id(CHUNKS[7])
    start = places[headless].offset
    data[start : start + 64] = bytes(64)
    data[places[hurt].payload + 5] ^= 1
    path.write_bytes(data)
    found = list(scan_records(IO, str(path)))
    assert {r.id for r in found} == set(places) - {headless}
    assert [r.id for r in found if not r.intact] == [hurt]
    path.write_bytes(data[:1000])
    assert {r.id for r in scan_records(IO, str(path))} == {
        i for i, w in places.items() if w.payload + w.stored <= 1000
    }


def test_scan_finds_magic_across_window_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pack(tmp_path, CHUNKS[:3] + [b"q" * n for n in range(1, 40)])
    expected = {i for i, _ in pk.read_footer(IO, str(path)).entries.items("p")}
    for window in (97, 128, 1001):
        monkeypatch.setattr(pack_scan, "_WINDOW", window)
        found = [r.id for r in scan_records(IO, str(path))]
        assert set(found) == expected


def test_a_scan_does_not_read_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a file that takes no space on a disk keeps its reader busy for hours."""
    # case 162
    path = write_pack(tmp_path, CHUNKS)
    expected = {i for i, _ in pk.read_footer(IO, str(path)).entries.items("p")}
    os.truncate(path, 8 << 30)
    reads, real = itertools.count(), os.preadv

    def preadv(handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        next(reads)
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert {record.id for record in scan_records(IO, str(path))} == expected
    assert next(reads) < 500  # windows of 4 MiB would be 2048


def test_a_scan_of_a_built_file_ends(tmp_path: Path) -> None:
    """Heads that all claim the same large payload must not make a scan read for days."""
    reads: list[int] = []

    class Counting(FileIO):
        def read_into(
            self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int
        ) -> int:
            got = super().read_into(handle, buffers, offset)
            reads.append(got)
            return got

    count, body = 5000, 1 << 20
    path = tmp_path / "x.pack"
    heads = b"".join(
        pk.encode_record(bytes(32), 0, body, body, 0, skip=64 * (count - n)) for n in range(count)
    )
    path.write_bytes(heads + bytes(body))
    found = list(scan_records(Counting(), str(path)))
    assert 0 < len(found) < 10
    assert sum(reads) < 10 * path.stat().st_size


# writing ------------------------------------------------------------------------------------


class Recording(FileIO):
    """Notes every call that changes something, and can fail or be short."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, OSError] = {}
        self.short = False

    def _note(self, what: str) -> None:
        self.calls.append(what)
        if what in self.fail:
            raise self.fail[what]

    def create(self, path: str, mode: int = 0o666) -> int:
        self._note("create")
        return super().create(path, mode)

    def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
        self._note("write")
        if self.short:
            first = memoryview(views[0])
            return os.pwrite(handle, first[: max(1, len(first) // 3)], offset)
        return super()._pwritev(handle, views, offset)

    def sync(self, handle: int) -> None:
        self._note("sync")
        super().sync(handle)

    def link(self, source: str, target: str) -> None:
        self._note("link")
        super().link(source, target)

    def sync_directory(self, path: str) -> None:
        self._note("sync_directory")
        super().sync_directory(path)


def left_behind(root: Path) -> list[str]:
    return [p.name for p in root.rglob("*") if p.is_file()]


def test_short_writes_lose_nothing(tmp_path: Path) -> None:
    """A write that takes only part of the bytes must go on where it stopped."""  # case 24
    io = Recording()
    io.short = True
    path = pk.pack_path(str(tmp_path), pk.pack_name(WRITER, 3))
    writer = PackWriter(io, path, UUID, WRITER, 3)
    for raw in CHUNKS:
        writer.append(chunk_id(raw), len(raw), choose(memoryview(raw), "float32"))
    writer.finish()
    assert io.calls.count("write") > 20
    assert Path(path).read_bytes() == write_pack(tmp_path / "other").read_bytes()


def test_a_pack_is_synced_before_it_is_named_and_its_name_after(tmp_path: Path) -> None:
    """Without this order an acknowledged chunk is gone after power loss."""
    io = Recording()
    path = pk.pack_path(str(tmp_path), pk.pack_name(WRITER, 1))
    os.makedirs(os.path.dirname(path))
    writer = PackWriter(io, path, UUID, WRITER, 1)
    writer.append(bytes(32), 3, raw_blob(b"abc"))
    writer.finish()
    assert io.calls == ["create", "write", "write", "sync", "link", "sync_directory"]


@pytest.mark.parametrize("call", ["create", "write", "sync", "link"])
def test_a_failed_pack_is_poisoned_and_removed(tmp_path: Path, call: str) -> None:
    """After a failed fsync the kernel may have dropped the pages: syncing again proves nothing."""
    io = Recording()
    io.fail[call] = OSError(28, "No space left on device")
    path = pk.pack_path(str(tmp_path), pk.pack_name(WRITER, 1))
    file = PackFile(io, path)
    builder = PackBuilder(UUID, WRITER, 1)
    builder.add(bytes(32), 3, raw_blob(b"abc"))

    def write_all() -> None:
        file.write(builder.take())
        file.write(builder.take_footer())
        file.seal()
        file.publish()

    with pytest.raises(StorageError) as caught:
        write_all()
    assert caught.value.errno == 28
    assert left_behind(tmp_path) == []
    io.fail.clear()
    before = list(io.calls)
    for again in (lambda: file.write(builder.take()), file.seal, file.publish):
        with pytest.raises(StateError):
            again()
    assert io.calls == before


def test_a_published_name_is_never_overwritten(tmp_path: Path) -> None:
    path = write_pack(tmp_path, CHUNKS[:1])
    before = path.read_bytes()
    writer = PackWriter(IO, str(path), UUID, WRITER, 3)
    writer.append(bytes(32), 3, raw_blob(b"abc"))
    with pytest.raises(StorageError) as caught:
        writer.finish()
    assert caught.value.errno == 17
    assert path.read_bytes() == before
    assert left_behind(tmp_path) == [path.name]


def test_memory_is_bounded_by_batches(tmp_path: Path) -> None:
    """A pack must go to disk as it grows, not be built in memory."""
    io = Recording()
    path = pk.pack_path(str(tmp_path), pk.pack_name(WRITER, 1))
    writer = PackWriter(io, path, UUID, WRITER, 1)
    blob = memoryview(NOISE.randbytes(1 << 20))
    for n in range(40):
        writer.append(n.to_bytes(32, "big"), len(blob), Encoded(RAW, b"", (), [blob]))
    assert io.calls.count("write") >= 4
    writer.abort()
    assert left_behind(tmp_path) == []


def test_offsets_beyond_four_gib(tmp_path: Path) -> None:
    """32-bit offsets would send the reader of a large file to the wrong bytes."""  # case 24
    builder = PackBuilder(UUID, WRITER, 1)
    builder._offset = 5 << 32  # pyright: ignore[reportPrivateUsage]
    builder.add(bytes(32), 100_000, raw_blob(bytes(100_000)))
    builder.add(b"1" * 32, 3, raw_blob(b"abc"))
    builder.take()
    places = [w for _, w in builder.entries().items("p")]
    assert all(w.offset >= 5 << 32 for w in places)


def test_batches_are_written_from_where_they_are_laid_out() -> None:
    """Prevents: a disk that waits while what it is to write is copied to where it can be taken."""
    rooms = Rooms()
    builder = PackBuilder(UUID, WRITER, 1, rooms)
    page = memoryview(mmap.mmap(-1, 1 << 19))
    written = bytearray()
    for number in range(12):
        for n in range(9):
            coded = NOISE.randbytes((100, 70_001, 400_000)[n % 3])
            payload: list[Buffer] = [coded[:99], coded[99:]]
            chunk_id = blake3(bytes((number, n))).digest()
            builder.add(chunk_id, 500_000, Encoded(1, b"", (), payload))
        if number % 3:
            builder.add(bytes((number,)) * 32, len(page), Encoded(RAW, b"", (), [page]))
        batch = builder.take()
        assert batch.offset == len(written)
        views = [memoryview(buffer) for buffer in batch.buffers]
        for run in direct.runs(views, batch.offset):
            assert {view.obj for view in run.views} <= {view.obj for view in views}
            assert run.direct or sum(map(len, run.views)) < direct.BLOCK
        written += b"".join(views)
        rooms.give_back(batch.rooms)
    table = builder.entries().table
    ids = [bytes(row["id"]) for row in table]
    heads = [written.index(chunk_id) + pk.ID_BYTES - pk.RECORD_BYTES for chunk_id in ids]
    assert table["offset"].tolist() == heads
