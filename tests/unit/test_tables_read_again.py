"""Tables of packs that an index does not keep: read again, and what is bad or gone by then."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from deltackpt_store import CorruptionError, FileIO, StorageError, Store, lmdb_index
from deltackpt_store import index as index_module
from deltackpt_store import verify as verify_module
from deltackpt_store.codecs import RAW, Encoded
from deltackpt_store.confirm import Confirmer
from deltackpt_store.fileio import make_directories
from deltackpt_store.pack import pack_name, pack_path
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.scrub import scrub
from deltackpt_store.verify import verify

WRITER = "ab" * 8
COUNT = 4


def chunk(pack: int, number: int) -> bytes:
    return b"chunk %d of pack %d " % (number, pack) * 40


def id_of(data: bytes) -> bytes:
    return blake3(data).digest()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Four packs of twenty chunks; of their tables only the one used last is kept."""
    made = Store.create(tmp_path / "s")
    for pack in range(COUNT):
        add(made, pack, [chunk(pack, number) for number in range(20)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_KEPT_BYTES", 1)
        yield Store.open(made.path)


def name_of(pack: int) -> str:
    return pack_name(WRITER, pack + 1)


def path_of(store: Store, pack: int) -> Path:
    return Path(pack_path(store.path, name_of(pack)))


def add(store: Store, pack: int, chunks: list[bytes]) -> None:
    path = path_of(store, pack)
    make_directories(store.io, str(path.parent))
    writer = PackWriter(store.io, str(path), store.uuid, WRITER, pack + 1)
    for data in chunks:
        writer.append(id_of(data), len(data), Encoded(RAW, b"", (), [data]))
    writer.finish()


def spoil_table(store: Store, pack: int) -> None:
    data = bytearray(path_of(store, pack).read_bytes())
    data[-100] ^= 1
    path_of(store, pack).write_bytes(data)


def read(store: Store, data: bytes) -> None:
    got = bytearray(len(data))
    store.get_into(id_of(data), got)
    assert got == data


def test_everything_is_found_with_one_table_kept(store: Store) -> None:
    """A store with more tables than are kept must read like any other."""
    index = store.index()
    assert len(index) == COUNT * 20
    for number in range(20):
        for pack in range(COUNT):  # a different table each time
            read(store, chunk(pack, number))
            place = index.get(id_of(chunk(pack, number)))
            assert place is not None
            assert place.pack == name_of(pack)
    assert index.get(id_of(b"another")) is None
    assert verify(store).ok


def test_a_table_that_has_gone_bad_counts_as_damage(store: Store) -> None:
    """The chunks are found by scanning, as when the table was bad from the beginning."""
    store.index()
    spoil_table(store, 1)
    read(store, chunk(1, 7))
    assert list(store.packs.damaged) == [name_of(1)]
    assert name_of(1) not in store.packs.index.packs()
    read(store, chunk(2, 7))


def test_a_pack_that_is_gone_is_forgotten(store: Store) -> None:
    """Another copy is found; without one it is said that nothing holds the chunk."""
    add(store, COUNT, [chunk(1, 3)])
    index = store.index()
    path_of(store, 1).unlink()
    read(store, chunk(1, 3))
    with pytest.raises(CorruptionError, match="no intact pack holds it"):
        read(store, chunk(1, 4))
    assert name_of(1) not in index.packs()


class Failing(FileIO):
    failing = False

    def open(self, path: str) -> int:
        if self.failing and path.endswith(".pack"):
            raise OSError(errno.ETIMEDOUT, "the server does not answer")
        return super().open(path)


def test_a_server_that_does_not_answer_loses_nothing(store: Store) -> None:
    """A time-out must not read as a chunk that is lost, and passes."""
    io = Failing()
    other = Store.open(store.path, io=io)
    index = other.index()
    io.failing = True
    with pytest.raises(StorageError, match="does not answer"):
        read(other, chunk(0, 1))
    with pytest.raises(StorageError):
        index.get(id_of(chunk(0, 1)))
    confirmer = Confirmer(io, other.path, index)
    assert confirmer.find(id_of(chunk(0, 1))) is None  # a save stores it again and goes on
    io.failing = False
    assert confirmer.find(id_of(chunk(0, 1))) is not None
    confirmer.close()
    read(other, chunk(0, 1))
    assert len(index) == COUNT * 20


def test_the_index_of_a_writer_only_forgets(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it misses is stored again; no failure to read a table fails a save."""

    def nowhere(path: str, uuid: bytes) -> None:
        """No local place for an index file is known."""

    monkeypatch.setattr(lmdb_index, "index_directory", nowhere)
    io = Failing()
    index = lmdb_index.open_index(Store.open(store.path, io=io))
    assert isinstance(index, index_module.MemoryIndex)
    io.failing = True
    assert index.get(id_of(chunk(0, 1))) is None
    assert name_of(0) in caplog.text
    io.failing = False
    assert index.get(id_of(chunk(2, 1))) is not None
    assert index.packs() == {name_of(pack) for pack in (1, 2, 3)}


def test_verification_tells_of_a_table_that_goes_bad_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that was not checked must not pass for one that was."""

    def spoiled(*arguments: object, **options: object) -> object:
        spoil_table(store, 1)
        return scrub(*arguments, **options)

    monkeypatch.setattr(verify_module, "scrub", spoiled)
    report = verify(store)
    assert [(finding.kind, finding.name) for finding in report.findings] == [
        ("pack", f"packs/ab/{name_of(1)}.pack")
    ]
