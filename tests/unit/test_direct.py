"""Large writes past the page cache: the same bytes, whatever lies where and whatever is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from deltackpt_store import direct
from deltackpt_store.fileio import Buffer, FileIO


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "LEAST_BYTES", direct.BLOCK)


class Noting(FileIO):
    """Notes which bytes were written directly; `refused` direct writes fail, others are short."""

    def __init__(self, refused: bool = False, limit: int = 1 << 30) -> None:
        self.refused, self.limit = refused, limit
        self.direct: list[tuple[int, int]] = []

    def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            if self.refused:
                raise OSError(errno.EINVAL, "Invalid argument")
            self.direct.append((offset, sum(map(len, views))))
        if self.limit < sum(map(len, views)):
            views = [memoryview(views[0])[: self.limit]]
        return super()._pwritev(handle, views, offset)


def buffers(seed: int) -> list[Buffer]:
    """Odd and even pieces, some of them on whole pages of memory."""
    draw = random.Random(seed)
    pieces: list[Buffer] = []
    for _ in range(draw.randint(1, 12)):
        blocks = draw.randint(1, 40)
        if draw.random() < 0.5:
            page = mmap.mmap(-1, blocks * mmap.PAGESIZE)
            page.write(draw.randbytes(len(page)))
            pieces.append(memoryview(page))
        else:
            pieces.append(draw.randbytes(draw.choice((0, 1, 17, 4096, 70_000, 5_000_000))))
        if draw.random() < 0.5:  # as packs are padded
            pieces.append(bytes(-sum(map(len, pieces)) % direct.BLOCK))
    return pieces


def written(path: Path, io: FileIO, pieces: list[Buffer], offset: int) -> bytes:
    handle = io.create(str(path))
    try:
        assert io.write(handle, pieces, offset) == sum(map(len, pieces))
        assert not fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
        io.sync(handle)
    finally:
        io.close(handle)
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("offset", [0, 100, 8192])
def test_the_bytes_are_as_given(tmp_path: Path, seed: int, offset: int) -> None:
    pieces = buffers(seed)
    expected = bytes(offset) + b"".join(pieces)
    for number, io in enumerate((Noting(), Noting(refused=True), Noting(limit=10_000))):
        assert written(tmp_path / str(number), io, pieces, offset) == expected


def test_pages_are_written_from_where_they_lie(tmp_path: Path) -> None:
    io = Noting()
    page = mmap.mmap(-1, 1 << 20)
    pieces: list[Buffer] = [b"head", bytes(direct.BLOCK - 4), *[memoryview(page)] * 3, b"tail"]
    runs = list(direct.runs([memoryview(piece) for piece in pieces], 0))
    assert [(run.direct, len(run.views)) for run in runs] == [(True, 1), (True, 3), (False, 1)]
    written(tmp_path / "file", io, pieces, 0)
    size = direct.BLOCK + 3 * len(page)
    assert sum(length for _, length in io.direct) in (size, 0)  # 0 where there is no such thing


def test_small_writes_go_the_normal_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    io = Noting()
    written(tmp_path / "file", io, [bytes(direct.LEAST_BYTES - 1)], 0)
    assert not io.direct


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    class Full(FileIO):
        def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", Full(), [bytes(1 << 20)], 0)


def test_threads_do_not_share_a_buffer(tmp_path: Path) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        pieces: list[Buffer] = [bytes((number,)) * 999_999] * 8
        if written(tmp_path / str(number), FileIO(), pieces, 0) != b"".join(pieces):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_forked_processes_do_not_share_a_buffer(tmp_path: Path) -> None:
    """Prevents: files of wrong bytes, where processes forked off one write at the same time."""
    whole = b"parent" * 500_000
    run = next(direct.runs([memoryview(whole)], 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads may be alive
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            written(tmp_path / "child", FileIO(), [b"child!" * 500_000], 0)
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    found = b"".join(run.views)
    assert found == whole[: len(found)]
