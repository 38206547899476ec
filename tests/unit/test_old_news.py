"""Names on a network file system: a client believes old news until a directory is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from deltackpt_store import fileio
from deltackpt_store.fileio import FileIO
from deltackpt_store.leases import LEASES, Lease


class Client:
    """`os` as an NFS client gives it: whether a name exists is remembered."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _ask(self, path: str) -> bool:
        return self._known.setdefault(path, os.path.lexists(path))

    def stat(self, path: str) -> os.stat_result:
        if not self._ask(path):
            raise FileNotFoundError(path)
        return os.stat(path) if os.path.lexists(path) else os.stat(os.path.dirname(path))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECTORY:
            for known in [name for name in self._known if os.path.dirname(name) == path]:
                del self._known[known]
        elif not flags & os.O_CREAT and not self._ask(path):
            raise FileNotFoundError(path)
        return os.open(path, flags, mode)


@pytest.fixture
def io(monkeypatch: pytest.MonkeyPatch) -> FileIO:
    monkeypatch.setattr(fileio, "os", Client())
    return FileIO()


def test_a_name_that_another_machine_has_made_is_seen(io: FileIO, tmp_path: Path) -> None:
    """A step retired by one machine must not be pinned by another that had looked before."""
    path = tmp_path / "record.retired"
    assert not io.exists(str(path))
    path.touch()
    assert io.exists(str(path))


def test_a_file_that_another_machine_has_made_is_opened(io: FileIO, tmp_path: Path) -> None:
    """A collection waits for acknowledgements by looking again and again."""
    path = tmp_path / "ack"
    with pytest.raises(FileNotFoundError):
        io.open(str(path))
    path.touch()
    io.close(io.open(str(path)))


def test_a_lease_that_another_machine_has_taken_away_is_missed(io: FileIO, tmp_path: Path) -> None:
    """The writer would not prove what was collected under it, and acknowledge a step with holes."""
    lease = Lease.take(io, str(tmp_path), "0123456789abcdef")
    assert lease is not None
    assert lease.intact()
    (tmp_path / LEASES / "0123456789abcdef").unlink()
    assert not lease.intact()
    lease.release()


def test_a_lock_is_that_of_the_file_that_is_there(io: FileIO, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    io.close(io.lock(str(path), create=True))
    io.exists(str(path))
    (tmp_path / "new").touch()
    (tmp_path / "new").rename(path)
    held = io.lock(str(path))
    assert os.fstat(held).st_ino == path.stat().st_ino
    io.close(held)
