"""The LMDB cache: right while it lives, harmless when damaged, shared, full, forked or absent."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store import lmdb_env, lmdb_index, localfs
from deltackpt_store import pack as pk
from deltackpt_store.codecs import RAW, Encoded
from deltackpt_store.errors import StateError, StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.index import MemoryIndex
from deltackpt_store.lmdb_index import LmdbIndex, open_index
from deltackpt_store.pack import ENTRY_DTYPE, Location, PackEntries
from deltackpt_store.pack_writer import PackWriter

UUID = bytes(range(16))
IO = FileIO()
NOISE = random.Random(13)


def entries(ids: list[bytes], refs: tuple[bytes, ...] = ()) -> PackEntries:
    """A table of records of 100 + row bytes; the first one has the references."""
    table = np.zeros(len(ids), ENTRY_DTYPE)
    if ids:
        table["id"] = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 32)
        table["offset"] = 64 + 200 * np.arange(len(ids))
        table["header"] = 64 + 32 * len(refs)
        table["stored"] = table["raw"] = 100 + np.arange(len(ids))
        table[0]["refs"] = len(refs)
    return PackEntries(table, np.frombuffer(b"".join(refs), np.uint8).reshape(-1, 32))


def name(number: int) -> str:
    return f"{number:016x}-00000001"


def ids_of(number: int, count: int = 50) -> list[bytes]:
    return [blake3(f"{number}/{row}".encode()).digest() for row in range(count)]


def open_at(path: Path | str, **options: int) -> LmdbIndex:
    return LmdbIndex(str(path), store_uuid=UUID, **options)


def fill(index: LmdbIndex, numbers: range, count: int = 50) -> None:
    for number in numbers:
        index.add_pack(name(number), entries(ids_of(number, count)))


def check(index: LmdbIndex | MemoryIndex, numbers: range, count: int = 50) -> None:
    for number in numbers:
        for row, chunk in enumerate(ids_of(number, count)):
            expected = Location(name(number), 64 + 200 * row, 64, 100 + row, 100 + row, 0, ())
            assert index.get(chunk) == expected
        assert index.absent([*ids_of(number, count), bytes(32)]) == {bytes(32)}


def run_python(code: str, *args: str) -> str:
    """Run `code` in a process of its own; a crash of it fails the test, not the test runner."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return done.stdout


HELPERS = """
import os, signal, sys, logging
import numpy as np
from blake3 import blake3
from deltackpt_store.lmdb_index import LmdbIndex
from deltackpt_store.pack import ENTRY_DTYPE, PackEntries
UUID = bytes(range(16))
def entries(number, count=50):
    table = np.zeros(count, ENTRY_DTYPE)
    for row in range(count):
        table[row]["id"] = np.frombuffer(blake3(f"{number}/{row}".encode()).digest(), np.uint8)
    table["offset"] = 64 + 200 * np.arange(count)
    table["header"] = 64
    table["stored"] = table["raw"] = 100 + np.arange(count)
    return PackEntries(table, np.empty((0, 32), np.uint8))
def name(number):
    return f"{number:016x}-00000001"
"""


# plain use ----------------------------------------------------------------------------------


def test_remembers_packs_and_their_chunks(tmp_path: Path) -> None:
    index = open_at(tmp_path / "i")
    assert index.packs() == frozenset()
    assert index.get(bytes(32)) is None
    fill(index, range(5))
    index.add_pack(name(0), entries(ids_of(77)))  # known already: nothing changes
    refs = (b"r" * 32, b"s" * 32)
    index.add_pack(name(9), entries(ids_of(9, 3), refs))
    check(index, range(5))
    assert index.get(ids_of(77)[0]) is None
    assert index.get(ids_of(9)[0]) == Location(name(9), 64, 128, 100, 100, 0, refs)
    assert len(index) == 253
    index.drop_pack(name(2))
    index.drop_pack(name(2))
    index.drop_pack("never heard of")
    assert index.get(ids_of(2)[0]) is None
    check(index, range(2))
    assert index.packs() == {name(n) for n in (0, 1, 3, 4, 9)}
    index.close()
    again = open_at(tmp_path / "i")
    check(again, range(3, 5))
    assert again.get(ids_of(2)[0]) is None
    assert again.get(ids_of(9)[0]) == Location(name(9), 64, 128, 100, 100, 0, refs)
    again.close()


def test_a_copy_made_of_hard_links_has_an_index_of_its_own(tmp_path: Path) -> None:
    """Two stores with one mapped file and two tables of readers overwrite each other's pages."""
    first = open_at(tmp_path / "i")
    fill(first, range(3))
    first.close()
    shutil.copytree(tmp_path / "i", tmp_path / "j", copy_function=os.link)
    second = open_at(tmp_path / "j")
    fill(second, range(3, 6))
    first = open_at(tmp_path / "i")
    assert first.packs() == {name(n) for n in range(3)}
    check(first, range(3))
    first.close()
    second.close()
    again = open_at(tmp_path / "j")
    check(again, range(3, 6))
    again.close()


def test_a_closed_index_says_so(tmp_path: Path) -> None:
    index = open_at(tmp_path / "i")
    index.close()
    index.close()
    with pytest.raises(StateError, match="closed"):
        index.get(bytes(32))


def test_dropping_a_pack_looks_at_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a collection thousands of packs are dropped one by one: a walk through all that are
    left for each of them kept the next trainer waiting for half a minute."""
    index = open_at(tmp_path / "i")
    fill(index, range(20))
    index.add_pack(name(3), entries(ids_of(3)))
    with monkeypatch.context() as patch:
        patch.setattr(
            lmdb_index, "_packs", lambda txn: pytest.fail("all packs were walked through")
        )
        for number in (*range(15), 3):
            index.drop_pack(name(number))
        assert len(index) == 250
        fill(index, range(2))
        assert len(index) == 350
    assert index.packs() == {name(n) for n in (0, 1, *range(15, 20))}
    index.close()
    again = open_at(tmp_path / "i")
    assert len(again) == 350
    again.close()


def test_dropped_packs_are_swept_and_the_file_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of deleted packs must not pile up for the life of a store."""
    monkeypatch.setattr(lmdb_index, "_SWEEP", 100)
    monkeypatch.setattr(lmdb_index, "_BATCH", 64)
    index = open_at(tmp_path / "i")
    fill(index, range(4))
    for number in range(4, 200):
        fill(index, range(number, number + 1))
        index.drop_pack(name(number))
    check(index, range(4))
    assert len(index) == 200
    assert index.packs() == {name(n) for n in range(4)}
    index.close()
    env = lmdb.open(str(tmp_path / "i"), lib_version=1)
    with env.begin() as txn:
        assert txn.stat()["entries"] < 200 + 250 + 20
    env.close()
    assert (tmp_path / "i" / "data.mdb").stat().st_size < 1 << 20


# damage -------------------------------------------------------------------------------------


DAMAGE = """
import random
path = sys.argv[1] + "/data.mdb"
data = bytearray(open(path, "rb").read())
noise = random.Random(int(sys.argv[3]))
what = sys.argv[2]
if what == "cut": data = data[:len(data) // 2]
elif what == "zeros": data = bytes(len(data))
elif what == "noise": data = noise.randbytes(len(data))
elif what == "page":
    at = noise.randrange(len(data) // 4096) * 4096
    data[at:at + 4096] = bytes(4096)
elif what == "flip": data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
elif what == "empty": data = b""
elif what == "grown": data += bytes(4096)
if what == "missing": os.unlink(path)
else: open(path, "wb").write(data)
if what == "noseal": os.unlink(sys.argv[1] + "/seal")
elif what == "badseal": open(sys.argv[1] + "/seal", "w").write("{]")
index = LmdbIndex(sys.argv[1], store_uuid=UUID)
assert index.packs() == frozenset(), "damage was not noticed"
for number in range(20): index.add_pack(name(number), entries(number))
index.close()
"""


@pytest.mark.parametrize(
    "what",
    ["cut", "zeros", "noise", "page", "flip", "empty", "grown", "missing", "noseal", "badseal"],
)
def test_a_damaged_file_is_never_mapped(tmp_path: Path, what: str) -> None:
    """A truncated or zeroed LMDB file kills the process that reads it."""  # case 116, case 122
    index = open_at(tmp_path / "i")
    fill(index, range(20))
    index.close()
    for seed in range(1 if what not in ("page", "flip") else 3):
        run_python(HELPERS + DAMAGE, str(tmp_path / "i"), what, str(seed))
    index = open_at(tmp_path / "i")
    check(index, range(20))
    index.close()


def test_an_unclean_end_discards_the_cache(tmp_path: Path) -> None:
    """What a killed writer left was never synced: trusting it would trust luck."""
    run_python(
        HELPERS + """
index = LmdbIndex(sys.argv[1], store_uuid=UUID)
index.add_pack(name(1), entries(1))
os._exit(0)
""",
        str(tmp_path / "i"),
    )  # fmt: skip
    index = open_at(tmp_path / "i")
    assert index.packs() == frozenset()
    index.close()


@pytest.mark.parametrize("change", ["uuid", "generation"])
def test_another_store_or_generation_starts_empty(tmp_path: Path, change: str) -> None:
    """After garbage collection an old index would promise chunks that are gone."""
    index = open_at(tmp_path / "i", generation=1)
    fill(index, range(2))
    index.close()
    if change == "uuid":
        other = LmdbIndex(str(tmp_path / "i"), store_uuid=bytes(16), generation=1)
    else:
        other = open_at(tmp_path / "i", generation=2)
    assert len(other) == 0
    with pytest.raises(StorageError, match="another store or generation"):
        open_at(tmp_path / "i", generation=1)
    other.close()


def test_a_wrong_entry_gives_the_index_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LMDB serves flipped bits as data: each value checks itself."""  # case 116
    index = open_at(tmp_path / "i")
    fill(index, range(3))
    environment = index._environment  # pyright: ignore[reportPrivateUsage]
    with environment.env.begin(write=True) as txn:
        value = bytearray(txn.get(ids_of(1)[7]) or b"")
        value[10] ^= 4
        txn.put(ids_of(1)[7], bytes(value))
    assert index.get(ids_of(1)[0]) is not None
    assert index.get(ids_of(1)[7]) is None
    assert caplog.text.count("given up") == 1
    # From here on an in-memory index goes on, and the file is not trusted again.
    assert index.packs() == frozenset()
    fill(index, range(5, 7))
    check(index, range(5, 7))
    index.drop_pack(name(5))
    assert index.packs() == {name(6)}
    assert len(index) == 50
    index.close()
    assert not (tmp_path / "i" / "data.mdb").exists()
    index = open_at(tmp_path / "i")
    assert len(index) == 0
    index.close()


def test_an_error_while_writing_gives_the_index_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk under the cache must not fail a save."""  # case 79
    index = open_at(tmp_path / "i", map_bytes=1 << 16, max_bytes=1 << 18)
    for number in range(100):
        index.add_pack(name(number), entries(ids_of(number)))
    assert caplog.text.count("given up") == 1
    assert index.packs()
    index.close()


# growing and sharing ------------------------------------------------------------------------


def test_two_processes_grow_one_map(tmp_path: Path) -> None:
    """MapFull and MapResized must lose no entry."""  # case 120
    code = (
        HELPERS
        + """
index = LmdbIndex(sys.argv[1], store_uuid=UUID, map_bytes=1 << 20)
print("open", flush=True)
sys.stdin.readline()
first = int(sys.argv[2])
for number in range(first, first + 50):
    index.add_pack(name(number), entries(number, 1000))
    assert index.get(blake3(f"{number}/999".encode()).digest()).pack == name(number)
index.close()
"""
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "i"), str(first)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for first in (0, 50)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "open\n"
    for worker in workers:
        worker.communicate("go\n", timeout=120)
        assert worker.returncode == 0
    index = open_at(tmp_path / "i")
    assert len(index) == 100_000
    check(index, range(100), 1000)
    index.close()


def test_one_environment_is_shared_within_a_process(tmp_path: Path) -> None:
    """LMDB refuses a second open, and closing it would release the first one's locks."""
    # case 126
    first = open_at(tmp_path / "i")
    (tmp_path / "link").symlink_to(tmp_path / "i")
    second = open_at(tmp_path / "link")
    fill(first, range(2))
    check(second, range(2))
    first.close()
    fill(second, range(2, 4))
    check(second, range(4))
    second.close()
    third = open_at(tmp_path / "i")
    check(third, range(4))
    third.close()


def test_sixteen_processes_at_once(tmp_path: Path) -> None:
    """Processes that race to open, write and close must neither fail nor lose entries."""
    # case 126
    keep = open_at(tmp_path / "i")
    run_python(
        HELPERS + """
children = []
for number in range(16):
    pid = os.fork()
    if pid == 0:
        try:
            index = LmdbIndex(sys.argv[1], store_uuid=UUID)
            index.add_pack(name(number), entries(number))
            assert index.get(blake3(f"{number}/3".encode()).digest()).pack == name(number)
            assert name(number) in index.packs()
            index.close()
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
""",
        str(tmp_path / "i"),
    )  # fmt: skip
    check(keep, range(16))
    keep.close()
    index = open_at(tmp_path / "i")
    check(index, range(16))
    index.close()


def test_killed_readers_do_not_make_the_file_grow(tmp_path: Path) -> None:
    """A reader killed in a transaction pins every page freed since, for ever."""  # case 124

    def thousand_saves(index: LmdbIndex, directory: Path) -> int:
        for number in range(1000):
            fill(index, range(number, number + 1), 3)
            if number >= 20:
                index.drop_pack(name(number - 20))
        return (directory / "data.mdb").stat().st_size

    plain = open_at(tmp_path / "plain")
    expected = thousand_saves(plain, tmp_path / "plain")
    plain.close()
    index = open_at(tmp_path / "i")
    fill(index, range(2000, 2010))
    run_python(
        HELPERS + """
import lmdb
children = []
for _ in range(100):
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        env = lmdb.open(sys.argv[1], lib_version=1, map_size=64 << 20, max_readers=1024)
        txn = env.begin()
        cursor = txn.cursor()
        cursor.first()
        os.write(told, b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(told)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    children.append(pid)
assert all(os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL for pid in children)
""",
        str(tmp_path / "i"),
    )  # fmt: skip
    assert thousand_saves(index, tmp_path / "i") <= 1.5 * expected + 65536
    index.close()


def test_a_stopped_writer_does_not_hang_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB waits for its write lock without end; training must not wait with it."""
    monkeypatch.setattr(lmdb_env, "WAIT_SECONDS", 0.0)
    index = open_at(tmp_path / "i")
    handle = os.open(tmp_path / "i" / "write.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    fill(index, range(2))
    check(index, range(2))  # held in memory
    os.close(handle)
    index.close()


# forks --------------------------------------------------------------------------------------


def test_a_forked_child_can_neither_use_nor_release_it(tmp_path: Path) -> None:
    """A child that closes an inherited environment frees the parent's reader slots."""  # case 64
    out = run_python(
        HELPERS + """
from deltackpt_store.errors import StateError, StorageError
index = LmdbIndex(sys.argv[1], store_uuid=UUID)
index.add_pack(name(0), entries(0))
key = blake3(b"0/0").digest()
assert index.get(key)
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        for use in (lambda: index.get(key), lambda: index.add_pack(name(1), entries(1)),
                    index.packs, lambda: index.drop_pack(name(0))):
            try:
                use()
            except StateError as error:
                assert error.kind == "forked"
            else:
                os._exit(3)
        index.close()
        del index
        try:
            LmdbIndex(sys.argv[1], store_uuid=UUID)
        except StorageError as error:
            assert "forked" in str(error)
        else:
            os._exit(4)
        sys.exit(0)  # with all of the interpreter's clean-up
    children.append(pid)
for number in range(5, 9):
    index.add_pack(name(number), entries(number))
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
for number in (0, 5, 6, 7, 8):
    assert index.get(blake3(f"{number}/0".encode()).digest()).pack == name(number)
index.close()
print("fine")
""",
        str(tmp_path / "i"),
    )  # fmt: skip
    assert out == "fine\n"
    index = open_at(tmp_path / "i")
    check(index, range(5, 9))
    index.close()


# places and absence -------------------------------------------------------------------------


MOUNTS = r"""22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/my\040data rw - nfs4 server:/x rw
31 22 0:41 / /mnt/over rw - ext4 /dev/sdb rw
32 22 0:42 / /mnt/over rw shared:3 - fuse.sshfs host rw
33 22 0:43 / /mnt/lus rw - lustre mds rw
34 22 0:44 / /mnt/tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/u", "ext4"), ("/mnt/my data/s", "nfs4"), ("/mnt/my data", "nfs4"),
        ("/mnt/my datax", "ext4"), ("/mnt/over/s", "fuse.sshfs"), ("/mnt/lus/s", "lustre"),
        ("/mnt/tmp", "tmpfs"),
    ],
)  # fmt: skip
def test_file_system_types_are_told(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert localfs.filesystem_type(path, str(tmp_path / "mounts")) == kind
    assert localfs.filesystem_type(path, str(tmp_path / "absent")) == "unknown"


def test_the_table_of_readers_has_no_holes(tmp_path: Path) -> None:
    """Storing into a hole of a mapped file on a full disk kills the process: SIGBUS."""
    environment = lmdb_env.acquire(str(tmp_path / "index"), "x", 1 << 20, lambda _: "")
    try:
        with open(tmp_path / "index" / "lock.mdb", "rb") as file:
            size = os.fstat(file.fileno()).st_size
            assert size >= 1024 * 64
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == size
    finally:
        lmdb_env.release(environment)


@pytest.mark.parametrize("taken", ["folder of another user", "link"])
def test_the_index_does_not_lie_where_another_user_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """Who owns the folder could put an index there that ends the writer, or a record by which
    damaged packs count as verified."""
    store, shared = tmp_path / "store", tmp_path / "tmp"
    store.mkdir()
    shared.mkdir()
    monkeypatch.setattr(
        localfs, "filesystem_type", lambda p: "ext4" if p.startswith(str(shared)) else "nfs4"
    )
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = shared / f"deltackpt-{os.getuid()}"
    where = localfs.index_directory(str(store), UUID)
    assert where is not None
    assert where.startswith(f"{own}/deltackpt/")
    if taken == "link":
        own.symlink_to(store)
    else:
        own.mkdir()
        assert localfs.index_directory(str(store), UUID) == where
        uid = os.getuid()
        real = os.lstat
        monkeypatch.setattr(
            localfs.os, "lstat",
            lambda p: SimpleNamespace(st_uid=uid + 1, st_mode=real(p).st_mode),
        )  # fmt: skip
    assert localfs.index_directory(str(store), UUID) is None


def test_no_folder_for_temporary_files_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: saves that all fail in a container that is read-only but for its store."""
    monkeypatch.setattr(localfs, "filesystem_type", lambda p: "nfs4")

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert localfs.index_directory(str(tmp_path), UUID) is None
    monkeypatch.setattr(localfs, "filesystem_type", lambda p: "ext4")
    monkeypatch.setattr(localfs.os, "access", lambda *a: False)  # a store that is only read
    where = localfs.index_directory(str(tmp_path / "store"), UUID)
    assert where is not None
    assert where.startswith(f"{tmp_path}/deltackpt/")


def test_the_index_never_lies_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB over NFS fails for the second client, or worse."""  # case 123
    store, cache = tmp_path / "store", tmp_path / "cache"
    store.mkdir()
    assert localfs.index_directory(str(store), UUID) == str(store / "cache" / "index")
    kinds = {str(store): "nfs4"}
    monkeypatch.setattr(
        localfs, "filesystem_type",
        lambda p: next((k for top, k in kinds.items() if p.startswith(top)), "ext4"),
    )  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    where = localfs.index_directory(str(store), UUID)
    assert where is not None
    assert where.startswith(f"{cache}/deltackpt/{UUID.hex()}-")
    copy = localfs.index_directory(str(store) + "2", UUID)
    assert copy != where
    kinds[str(store)] = "btrfs"
    assert localfs.index_directory(str(store), UUID) == where
    kinds[str(tmp_path)] = "nfs"
    kinds["/"] = "cifs"
    assert localfs.index_directory(str(store), UUID) is None
    with Warnings() as records:
        index = open_index(SimpleNamespace(path=str(store), uuid=UUID, io=IO))
    assert isinstance(index, MemoryIndex)
    assert len(records) == 1
    assert not cache.exists()


class Warnings(logging.Handler):
    """Collect the messages of the index logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("deltackpt.store.index").addHandler(self)
        return self.records

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("deltackpt.store.index").removeHandler(self)


def make_store(root: Path) -> SimpleNamespace:
    (root / "packs").mkdir(parents=True)
    for seq in (1, 2):
        path = pk.pack_path(str(root), pk.pack_name("ab" * 8, seq))
        out = PackWriter(IO, path, UUID, "ab" * 8, seq)
        raw = bytes([seq]) * 1000
        out.append(blake3(raw).digest(), 1000, Encoded(RAW, b"", (), [raw]))
        out.finish()
    return SimpleNamespace(path=str(root), uuid=UUID, io=IO)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_without_locks_there_is_no_index_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Writing without a lock would be silent damage: go without the cache, and say it once."""
    # case 123
    store = make_store(tmp_path)

    def no_locks(handle: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StorageError) as caught:
        open_at(tmp_path / "i")
    assert caught.value.errno == code
    with Warnings() as records:
        for _ in range(2):
            index = open_index(store)
            assert isinstance(index, MemoryIndex)
            assert index.get(blake3(b"\1" * 1000).digest()) is not None
            index.close()
    assert len(records) == 1
    assert "memory only" in records[0]


def test_lmdb_unable_to_open_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing or refusing LMDB must cost time, never a save."""  # case 116
    store = make_store(tmp_path)

    def refuse(*args: object, **options: object) -> None:
        raise lmdb.LockError("no")

    monkeypatch.setattr(lmdb, "Environment", refuse)
    with Warnings() as records:
        index = open_index(store)
    assert isinstance(index, MemoryIndex)
    assert len(index) == 2
    assert len(records) == 1


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_path_has_its_index_on_disk(tmp_path: Path, locale: str) -> None:
    """Prevents that a store whose name is no UTF-8, or none of the locale, reads all tables of its
    packs again for every writer."""  # case 171
    work = """
        import os, sys
        from deltackpt_store.lmdb_index import LmdbIndex
        path = os.fsencode(sys.argv[1]) + b"/\\xc3\\xbc\\xff"
        LmdbIndex(os.fsdecode(path), store_uuid=bytes(16)).close()
        assert os.path.getsize(path + b"/data.mdb") > 0
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(work), str(tmp_path)],
        env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        check=True,
    )


@pytest.mark.parametrize("what", ["file", "pipe", "folder is a file"])
def test_something_else_in_the_place_of_the_index(tmp_path: Path, what: str) -> None:
    """Prevents: saves fail because of a thing that may be deleted at any time."""  # case 116
    store = make_store(tmp_path)
    place = tmp_path / "cache" / "index"
    place.parent.mkdir()
    if what == "pipe":
        os.mkfifo(place)
    else:
        (place if what == "file" else place.parent.with_name("c")).write_text("x")
        place = place if what == "file" else tmp_path / "c" / "index"
    with Warnings():
        index = open_index(store, directory=str(place))
    assert isinstance(index, MemoryIndex)
    assert len(index) == 2


def test_open_index_follows_the_packs_of_the_store(tmp_path: Path) -> None:
    """The cache may be older or newer than the store: packs decide."""  # case 116
    store = make_store(tmp_path)
    index = open_index(store)
    assert isinstance(index, LmdbIndex)
    one, two = (blake3(bytes([seq]) * 1000).digest() for seq in (1, 2))
    assert index.get(one)
    assert index.get(two)
    index.close()
    os.unlink(pk.pack_path(store.path, pk.pack_name("ab" * 8, 1)))
    index = open_index(store)
    assert index.get(one) is None
    assert index.get(two)
    index.close()
    make_store(tmp_path / "again")
    os.rename(
        pk.pack_path(str(tmp_path / "again"), pk.pack_name("ab" * 8, 1)),
        pk.pack_path(store.path, pk.pack_name("ab" * 8, 1)),
    )
    index = open_index(store)
    assert index.get(one)
    assert index.get(two)
    index.close()


def test_a_seal_that_cannot_be_put_in_its_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents: a file left in the cache by every writer that fails to seal it."""
    index = open_at(tmp_path / "i")
    fill(index, range(3))

    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        index.close()
    assert "was not sealed" in caplog.text
    assert [n for n in os.listdir(tmp_path / "i") if "seal" in n] == []
    (tmp_path / "i" / ".tmp-1-seal").write_text("{")  # of somebody who was killed
    index = open_at(tmp_path / "i")
    assert index.packs() == frozenset()
    other = open_at(tmp_path / "i")
    fill(other, range(3))
    other.close()
    index.close()
    assert [n for n in os.listdir(tmp_path / "i") if "seal" in n] == ["seal"]
