"""Prevents: a store on a file system where two writers can both win, or where nothing is durable,
found out only when steps are gone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from command_line import run
from deltackpt_store import location
from deltackpt_store import store as store_module
from deltackpt_store.errors import InvalidInputError, StorageError
from deltackpt_store.fileio import FileIO, publish_bytes
from deltackpt_store.gc import collect
from deltackpt_store.location import Primitive, check_location, probe
from deltackpt_store.oserror import storage_error
from deltackpt_store.store import Store


class Weak(FileIO):
    """A file system that lacks something."""

    def __init__(self, lacks: str) -> None:
        self._lacks = lacks

    def create(self, path: str, mode: int = 0o666) -> int:
        if self._lacks == "exclusive create":
            return os.open(path, os.O_WRONLY | os.O_CREAT, mode)
        return super().create(path, mode)

    def link(self, source: str, target: str) -> None:
        if self._lacks == "links":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), target)
        if self._lacks == "exclusive link" and os.path.exists(target):
            os.unlink(target)
        super().link(source, target)

    def mkdir(self, path: str) -> None:
        if self._lacks == "exclusive mkdir":
            os.makedirs(path, exist_ok=True)
        else:
            super().mkdir(path)

    def sync(self, handle: int) -> None:
        if self._lacks == "sync of a file":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().sync(handle)

    def sync_directory(self, path: str) -> None:
        if self._lacks == "sync of a directory" and location.PROBE_PREFIX in path:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().sync_directory(path)

    def list(self, path: str) -> list[str]:
        names = super().list(path)
        return [n.lower() for n in names] if self._lacks == "names as they are given" else names

    def unlink(self, path: str) -> None:
        if self._lacks == "names as they are given" and path.endswith("/name"):
            path = path.removesuffix("name") + "Name"
        super().unlink(path)

    def replace(self, source: str, target: str) -> None:
        if self._lacks == "replacing a name":
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        super().replace(source, target)

    def lock(self, path: str, *, create: bool = False) -> int:
        if self._lacks == "locks at all":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        if self._lacks == "locks":
            return os.open(path, os.O_RDWR | os.O_CREAT)
        return super().lock(path, create=create)


VITAL = {"exclusive create", "exclusive link", "links", "sync of a file", "sync of a directory",
         "names as they are given"}  # fmt: skip
LACKS = [*sorted(VITAL), "exclusive mkdir", "replacing a name", "locks", "locks at all"]
ROW = {"links": "exclusive link", "locks at all": "locks"}


@pytest.mark.parametrize("lacks", LACKS)
def test_what_is_missing_is_found_and_said(
    tmp_path: Path, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = probe(Weak(lacks), str(tmp_path))
    assert [p.name for p in found if not p.works] == [ROW.get(lacks, lacks)]
    assert not os.listdir(tmp_path), "nothing is left behind"
    if lacks in VITAL:
        with pytest.raises(StorageError, match=ROW.get(lacks, lacks)) as caught:
            check_location(Weak(lacks), str(tmp_path))
        assert caught.value.kind == "location"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(location, "probe", lambda io, path: found)
            with pytest.raises(StorageError, match=ROW.get(lacks, lacks)) as caught:
                Store.create(tmp_path / "store")
        assert caught.value.kind == "location"
        assert "deltackpt probe" in (caught.value.hint or "")
        return
    check_location(Weak(lacks), str(tmp_path))
    assert f"{ROW.get(lacks, lacks)} does not work" in caplog.text
    if lacks != "replacing a name":
        caplog.clear()
        check_location(Weak(lacks), str(tmp_path))
        assert not caplog.text, "once is enough"


class Scarce(FileIO):
    """The n-th file that is made, or directory that is synced, meets a limit of the moment."""

    def __init__(self, code: int, nth: int) -> None:
        self._code, self.left = code, nth

    def _count(self, path: str) -> None:
        self.left -= 1
        if not self.left:
            raise OSError(self._code, os.strerror(self._code), path)

    def create(self, path: str, mode: int = 0o666) -> int:
        self._count(path)
        return super().create(path, mode)

    def lock(self, path: str, *, create: bool = False) -> int:
        if not path.endswith("alive"):  # without that one a probe is not cleaned up after
            self._count(path)
        return super().lock(path, create=create)

    def sync_directory(self, path: str) -> None:
        self._count(path)
        super().sync_directory(path)


@pytest.mark.parametrize(
    "code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, errno.ENOSPC, errno.EDQUOT]
)
def test_a_limit_of_the_moment_is_not_held_against_the_place(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A training at its limit of open files was told to use another file system."""
    nth, io = 0, Scarce(code, 0)
    while io.left <= 0:  # until the probe makes fewer calls
        nth, io = nth + 1, Scarce(code, nth)
        if nth > 1:
            (tmp_path / "cache/location").unlink(missing_ok=True)
        check_location(io, str(tmp_path))
        assert not caplog.text
    assert nth > 10


def test_this_file_system_has_everything_that_is_vital(tmp_path: Path) -> None:
    found = probe(FileIO(), str(tmp_path), other_process=True)
    assert all(p.works for p in found if p.vital)
    assert {"locks between processes", "memory maps"} <= {p.name for p in found if p.works}


def counted_probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    real = probe

    def counting(io: FileIO, directory: str) -> list[Primitive]:
        calls.append(directory)
        return real(io, directory)

    monkeypatch.setattr(location, "probe", counting)
    return calls


def test_a_place_is_tried_once_and_another_place_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted_probes(monkeypatch)
    Store.create(tmp_path / "store")
    Store.create(tmp_path / "store")
    Store.open(tmp_path / "store")
    assert len(calls) == 1
    os.rename(tmp_path / "store", tmp_path / "moved")
    Store.create(tmp_path / "moved")
    Store.create(tmp_path / "moved")
    assert len(calls) == 2
    path = tmp_path / "moved/cache/location"
    path.write_bytes(path.read_bytes()[:-1])
    Store.create(tmp_path / "moved")
    assert len(calls) == 3


def test_any_path_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted_probes(monkeypatch)
    for _ in range(2):
        Store.create(os.fsencode(tmp_path) + b"/raw\xff\xfe")
    assert len(calls) == 1


def test_no_store_is_made_where_none_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileIO, "link", Weak("links").link)
    with pytest.raises(StorageError, match="exclusive link does not work") as caught:
        Store.create(tmp_path / "store")
    assert caught.value.kind == "location"
    assert not (tmp_path / "store/FORMAT").exists()
    monkeypatch.undo()
    Store.create(tmp_path / "store")  # what was left of the attempt is no hindrance


def test_a_creation_that_was_killed_while_it_tried_is_no_hindrance(tmp_path: Path) -> None:
    folder = tmp_path / "store/cache/probe-0123"
    folder.mkdir(parents=True)
    (folder / "a").touch()
    Store.create(tmp_path / "store")
    (tmp_path / "other/cache/mine").mkdir(parents=True)
    with pytest.raises(InvalidInputError):
        Store.create(tmp_path / "other")


def test_what_killed_probes_left_is_removed(tmp_path: Path) -> None:
    """Prevents: folders of probes that were killed stay for ever, or the one of a probe that is
    under way is taken from it, which then finds that names can be given twice."""
    store = Store.create(tmp_path / "store")
    cache = tmp_path / "store/cache"
    for name in ("probe-dead", "probe-live"):
        (cache / name / "dir").mkdir(parents=True)
        (cache / name / "a").touch()
        (cache / name / "alive").touch()
    held = FileIO().lock(f"{cache}/probe-live/alive")
    collect(store)
    assert {p.name for p in cache.iterdir() if p.is_dir()} == {"probe-live"}
    os.close(held)
    assert all(primitive.works for primitive in probe(FileIO(), str(cache)))
    assert not [p for p in cache.iterdir() if p.is_dir()]


@pytest.mark.parametrize("held", [True, False])
def test_probes_that_begin_together_do_not_take_each_other_for_dead(
    tmp_path: Path, held: bool
) -> None:
    """Prevents: one of two ranks that make a store being told that its disk cannot hold one."""
    overtaken: list[str] = []

    class Overtaken(FileIO):
        """Another process removes the folder as a dead one's before its lock is had; the lock is
        still `held` when it is tried, or has gone with its file."""

        def lock(self, path: str, *, create: bool = False) -> int:
            if not create or not path.endswith("/alive") or len(overtaken) == 3:
                return super().lock(path, create=create)
            overtaken.append(path)
            self.close(self.create(path))
            other = FileIO().lock(path)
            try:
                if held:
                    return super().lock(path, create=True)
            finally:
                shutil.rmtree(os.path.dirname(path))
                self.close(other)
            return super().lock(path, create=True)

    found = probe(Overtaken(), str(tmp_path))
    assert len(overtaken) == 3
    assert all(primitive.works for primitive in found if primitive.vital)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_store_that_cannot_be_written_now_is_opened_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    Store.create(tmp_path / "store")
    os.unlink(tmp_path / "store/cache/location")

    def refuse(self: FileIO, path: str, *_: object) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(FileIO, "mkdir", refuse)
    Store.create(tmp_path / "store")
    assert store_module.check_location is check_location


def test_probe_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.create(tmp_path / "store")

    result = run("probe", tmp_path / "store")
    assert result.exit_code in (0, 3)  # the machine's temporary directory may be on any file system
    assert "exclusive link" in result.output
    assert [p.name for p in (tmp_path / "store/cache").iterdir()] == ["location"]

    def overwriting(self: FileIO, source: str, target: str) -> None:
        Path(target).unlink(missing_ok=True)
        os.link(source, target)

    monkeypatch.setattr(FileIO, "link", overwriting)
    result = run("probe", tmp_path / "store")
    assert result.exit_code == 14
    assert "no store can be kept here" in result.output
    result = run("probe", tmp_path / "not yet")
    assert result.exit_code == 14
    assert not (tmp_path / "not yet").exists()


class Clinging(FileIO):
    """A file that is open stays, under another name, when it is removed: NFS, FUSE."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}

    def lock(self, path: str, *, create: bool = False) -> int:
        handle = super().lock(path, create=create)
        self._open[handle] = path
        return handle

    def close(self, handle: int) -> None:
        path = self._open.pop(handle, None)
        super().close(handle)
        if path is not None and os.path.exists(path + ".hidden"):
            os.unlink(path + ".hidden")

    def unlink(self, path: str) -> None:
        if path in self._open.values():
            os.rename(path, path + ".hidden")
        else:
            super().unlink(path)


def test_nothing_stays_where_open_files_do(tmp_path: Path) -> None:
    probe(Clinging(), str(tmp_path))
    assert not os.listdir(tmp_path)
    (tmp_path / "probe-0123456789ab").mkdir()  # left there all the same
    probe(FileIO(), str(tmp_path))
    assert not os.listdir(tmp_path)


def publish_in(store: Store) -> None:
    try:
        publish_bytes(store.io, f"{store.path}/pins/p", b"x")
    except OSError as error:
        raise storage_error(error, "write the pin", f"{store.path}/pins/p") from error


def test_a_place_without_hard_links_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT says "not permitted", which is no matter of anybody's permissions."""
    store = Store.create(tmp_path / "store")
    monkeypatch.setattr(FileIO, "link", Weak("links").link)
    with pytest.raises(StorageError, match="no hard links") as caught:
        publish_in(store)
    assert "deltackpt probe" in (caught.value.hint or "")
