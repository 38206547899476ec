"""Prevents: a disk too full for collecting garbage."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from authors import Author, Session, check_everything, collected
from deltackpt_store import leases, reserve
from deltackpt_store.fileio import Buffer, FileIO, publish_bytes
from deltackpt_store.gc import collect
from deltackpt_store.names import number_name
from deltackpt_store.retention import retire
from deltackpt_store.store import Store

IO = FileIO()


class FullDisk(FileIO):
    """0 bytes free: data can be written only into what was freed by removing files."""

    def __init__(self) -> None:
        self.free = 0

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        size = sum(-(-len(b) // 4096) * 4096 for b in buffers)
        if size > self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.free -= size
        return super().write(handle, buffers, offset)

    def unlink(self, path: str) -> None:
        size = os.stat(path).st_size
        super().unlink(path)
        self.free += -(-size // 4096) * 4096

    def mkdir(self, path: str) -> None:
        if self.free < 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.free -= 4096
        super().mkdir(path)

    def free_bytes(self, path: str) -> int:
        return self.free


# case 81
@pytest.mark.parametrize("writer", [False, True], ids=["alone", "beside-a-writer"])
def test_a_full_disk_can_be_emptied(store: Store, new: Callable[..., Author], writer: bool) -> None:
    author = new()
    commits = [author.save(step, [f"{step}.{i}" for i in range(20)]) for step in range(5)]
    author.close()
    reserve.make_reserve(IO, store.path)
    full = FullDisk()
    on_full = Store.open(store.path, io=full)
    session = Session(store, "main", full) if writer else None
    retire(on_full, commits[:4])
    report = collected(on_full, *([session] if session else []))
    assert len(report.packs) == 4
    assert store.steps("main") == [4]
    check_everything(store)
    if session is not None:
        assert session.save(9, ["room", "again"]) is not None
        session.close()
    full.free = 1 << 30
    collect(on_full)
    assert os.path.getsize(f"{store.path}/gc/reserve") == reserve.RESERVE_BYTES


class NoInodes(FileIO):
    """No room for another file. Second names take none; a file that goes makes room for one."""

    free = 0

    def create(self, path: str) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        self.free -= 1
        return super().create(path)

    def unlink(self, path: str) -> None:
        last = os.stat(path).st_nlink == 1
        super().unlink(path)
        self.free += last


# case 81
def test_retention_takes_no_inodes_where_none_is_left(
    store: Store, new: Callable[..., Author]
) -> None:
    """Prevents: the reserve goes for the first mark, and nothing can ever be collected."""
    author = new()
    commits = [author.save(step, [f"{step}.{i}" for i in range(20)]) for step in range(5)]
    author.close()
    store.pin("kept", commits[1])
    reserve.make_reserve(IO, store.path)
    collect(store)
    full = Store.open(store.path, io=NoInodes())
    retire(full, commits[:4])
    retire(full, commits[:4])
    assert os.path.getsize(f"{store.path}/gc/reserve") == reserve.RESERVE_BYTES
    assert store.steps("main") == [4]
    check_everything(store, [commits[1]])
    assert len(collect(full).packs) == 3
    assert sorted(os.listdir(f"{store.path}/runs/main"))[-3:] == [
        number_name(2), f"{number_name(2)}.retired", number_name(5),
    ]  # fmt: skip
    check_everything(store, [commits[1], commits[4]])


# case 81
def test_what_a_record_leaves_of_the_reserve_is_there_for_the_next(store: Store) -> None:
    """A writer's acknowledgement must not take what the next collection needs."""
    reserve.make_reserve(IO, store.path)
    full = FullDisk()
    for name in "abc":
        reserve.with_reserve(
            full, store.path, lambda n=name: publish_bytes(full, f"{store.path}/gc/{n}", b"x")
        )
    assert os.path.getsize(f"{store.path}/gc/reserve") > reserve.RESERVE_BYTES // 2
    full.free = 1 << 30
    reserve.make_reserve(full, store.path)
    assert os.path.getsize(f"{store.path}/gc/reserve") == reserve.RESERVE_BYTES


# case 81
def test_leases_and_acknowledgements_take_their_folders_from_the_reserve(store: Store) -> None:
    """The first collection on a full disk must not wait for a writer that cannot answer."""
    reserve.make_reserve(IO, store.path)
    full = FullDisk()
    lease = leases.Lease.take(full, store.path, "0123456789abcdef")
    assert lease is not None
    full.free = 0
    lease.acknowledge(1, leases.NOTHING)
    assert leases.read_ack(IO, store.path, 1, lease.writer) == leases.NOTHING
    lease.release()


# case 81
def test_a_record_too_large_for_the_reserve_is_written_in_parts(
    store: Store, new: Callable[..., Author], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltackpt_store import gc

    author = new()
    commits = [author.save(step, [f"{step}.{i}" for i in range(4)]) for step in range(300)]
    author.close()
    retire(store, commits[:-1])
    monkeypatch.setattr(gc, "_FEW_PACKS", 20)
    full = FullDisk()
    full.free = 4096
    report = collect(Store.open(store.path, io=full))
    assert len(report.packs) == 299
    assert len(report.commits) == 299
    check_everything(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs takes root")
def test_a_really_full_file_system_can_be_emptied() -> None:
    # case 81
    mount = Path(tempfile.mkdtemp())  # what a killed test leaves mounted is in nobody's way here
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(mount)], check=False
    )
    if done.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        store = Store.create(mount / "store")
        reserve.make_reserve(IO, store.path)
        author = Author(store, "main")
        commits = [author.save(step, [f"{step}.{i}" for i in range(100)]) for step in range(8)]
        author.close()
        filler = os.open(mount / "filler", os.O_WRONLY | os.O_CREAT)
        while os.statvfs(mount).f_bavail:
            os.write(filler, bytes(4096))
        os.close(filler)
        assert os.statvfs(mount).f_bavail == 0
        retire(store, commits[:7])
        assert len(collect(store).packs) == 7
        assert os.statvfs(mount).f_bavail * 4096 > 500_000
        check_everything(store)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
        mount.rmdir()
