"""Prevents: a full output, a folder that may not be read, a cache that cannot be used, or a number
that is none ends a command or a save with a traceback, or with words that name no way out."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run
from deltackpt_store.errors import NotFoundError, StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.lmdb_index import open_index
from deltackpt_store.names import relative_pack_path
from deltackpt_store.oserror import storage_error
from deltackpt_store.store import Store
from deltackpt_tools.cli import COMMANDS
from small_store import SmallStore, pattern


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = SmallStore(tmp_path / "store")
    made.save("main", 1, {"w": pattern(3000)})
    made.close()
    return made.store


def deltackpt(*arguments: str, out: Any, err: Any = subprocess.PIPE) -> tuple[int, str]:
    code = "from deltackpt_tools.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=out, stderr=err, text=True, check=False)
    return done.returncode, done.stderr or ""


def test_a_full_output_is_told(store: Store) -> None:
    for arguments in (["log", store.path, "--json"], ["log", store.path], ["--help"]):
        with open("/dev/full", "w") as full:
            code, told = deltackpt(*arguments, out=full)
            assert code == 14
            assert "Traceback" not in told
            assert "the output: No space left on device" in told
            assert deltackpt(*arguments, out=full, err=full)[0] == 14


def test_the_exit_code_does_not_hang_on_the_output(tmp_path: Path) -> None:
    """Nobody reads the document of an error, or it finds no room."""
    nowhere = ["log", str(tmp_path / "none"), "--json"]
    with open("/dev/full", "w") as full:
        assert deltackpt(*nowhere, out=full)[0] == 10
    reader, writer = os.pipe()
    os.close(reader)
    code, told = deltackpt(*nowhere, out=writer)
    os.close(writer)
    assert code == 10
    assert "not a deltackpt store" in told


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_figures_of_a_commit_that_are_none_are_left_out(tmp_path: Path, figure: float) -> None:
    """They are whatever the store says."""
    made = SmallStore(tmp_path / "store")
    names = ("state_bytes", "written_bytes", "staged_bytes", "skipped", "stall_seconds")
    for step in (1, 2):
        made.save("main", step, {"w": pattern(3000, step)}, stats=dict.fromkeys(names, figure))
    made.close()
    page = str(tmp_path / "page.html")
    for more in (["log"], ["log", "--stat"], ["watch", "--once"], ["report", "-o", page]):
        result = run(more[0], made.path, *more[1:], "--json")
        assert result.exit_code == 0, result.output
        json.loads(result.stdout)
        assert run(more[0], made.path, *more[1:]).exit_code == 0


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300"])
def test_what_is_no_time_is_refused(store: Store, seconds: str) -> None:
    for arguments in (
        ["watch", store.path, "--interval", seconds], ["gc", store.path, "--timeout", seconds],
        ["repair", store.path, "--timeout", seconds], ["compact", store.path, "--timeout", seconds],
    ):  # fmt: skip
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert arguments[2] in result.stderr
    assert run("compact", store.path, "--watch", "--interval", "9999999999999d").exit_code == 2
    assert run("verify", store.path, "--budget", "9999999999999d").exit_code == 2


def refuse(monkeypatch: pytest.MonkeyPatch, ending: str, *calls: str) -> None:
    """Let the file system refuse these calls for paths with that ending."""
    for call in calls:
        real: Callable[..., Any] = getattr(FileIO, call)

        def refusing(io: FileIO, path: str, *more: Any, real: Callable[..., Any] = real) -> Any:
            if path.endswith(ending):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(io, path, *more)

        monkeypatch.setattr(FileIO, call, refusing)


@pytest.mark.parametrize("place", ["gc", "gc/reserve", "quarantine"])
def test_du_tells_what_it_could_not_look_at(
    store: Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    Path(store.path, "gc/reserve").write_bytes(b"room")
    refuse(monkeypatch, place, "list", "open")
    result = run("du", store.path, "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document["unreadable"] == [{"what": place, "reason": "Permission denied"}]
    assert document["files"]["packs"]["files"] == 1


@pytest.mark.parametrize("place", ["packs", "folder", "pack", "runs", "run", "pins", "manifests"])
def test_du_counts_the_rest(store: Store, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (pack,) = store.packs.names()
    store.pin("kept", store.head("main"))
    places = {"folder": f"packs/{pack[:2]}", "pack": relative_pack_path(pack), "run": "runs/main"}
    whole = json.loads(run("du", store.path, "--json").stdout)
    refuse(monkeypatch, place := places.get(place, place), "list", "open")
    result = run("du", store.path, "--json", "--depth", "1")
    assert result.exit_code == 3, result.output
    document = json.loads(result.stdout)
    assert place in [one["what"] for one in document["unreadable"]]
    assert len({one["what"] for one in document["unreadable"]}) == len(document["unreadable"])
    for name, files in whole["files"].items():
        if name != place.split("/")[0]:
            assert document["files"][name] == files
    assert f"not counted: {place}: " in run("du", store.path).stdout


def test_every_refusal_of_a_plan_is_the_stores_own_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "/gc", "list", "exists")
    with pytest.raises(StorageError, match=r"/gc: Permission denied") as caught:
        collect(store, dry_run=True)
    assert "permissions" in str(caught.value.hint)


def test_an_output_that_cannot_be_written_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    target = tmp_path / "out.safetensors"
    result = run("export", store.path, "main", str(target), "--json")
    assert result.exit_code == 14
    error = json.loads(result.stdout)["error"]
    assert error["message"] == f"cannot write {target}: No space left on device"
    assert "free some space" in error["hint"]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"probe"}))
def test_a_store_that_may_not_be_read_is_no_wrong_usage(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Prevents: exit code 2, no document and no way out where the file system refuses."""
    more = {
        "advise": ["--mtbf", "6h"],
        "blame": ["w"],
        "export": ["main", f"{tmp_path}/w.pt"],
        "pin": ["best", "main"],
        "report": ["-o", f"{tmp_path}/r.html"],
        "retain": ["main", "--last", "1"],
        "delete": ["main"],
        "unpin": ["best"],
        "watch": ["--once"],
    }

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), arguments[-1])

    monkeypatch.setattr(os, "access", lambda *arguments, **options: False)
    for call in ("open", "list"):
        monkeypatch.setattr(FileIO, call, refuse)
    result = run(command, store.path, *more.get(command, []), "--json")
    assert result.exit_code == 14
    error = json.loads(result.stdout)["error"]
    assert f"{store.path}/FORMAT: Permission denied" in error["message"]
    assert error["hint"] == "check the owner and the permissions of that path"


@pytest.mark.parametrize("command", ["report", "export"])
def test_only_files_are_replaced_by_an_output(store: Store, tmp_path: Path, command: str) -> None:
    """Root would take the name of a device away from everybody: -o /dev/null."""
    target = tmp_path / "target"

    def write() -> Any:
        more = ("-o", str(target)) if command == "report" else ("main", str(target), "--force")
        kind = () if command == "report" else ("--format", "torch")
        return run(command, store.path, *more, *kind)

    os.mkfifo(target)
    result = write()
    assert result.exit_code == 2
    assert f"{target} is a device, pipe or socket" in result.stderr
    assert target.is_fifo()
    target.unlink()
    (tmp_path / "file").write_bytes(b"")
    target.symlink_to("file")
    assert write().exit_code == 0
    assert target.is_symlink()
    assert (tmp_path / "file").stat().st_size > 1000


@pytest.mark.parametrize("place", ["cache", "cache/index"])
@pytest.mark.parametrize("kind", ["file", "link to itself"])
def test_a_cache_that_cannot_be_used_stops_no_save(store: Store, place: str, kind: str) -> None:
    path = Path(store.path, place)
    shutil.rmtree(f"{store.path}/cache", ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "file":
        path.write_bytes(b"")
    else:
        path.symlink_to(path.name)
    index = open_index(Store.open(store.path), directory=f"{store.path}/cache/index")
    assert len(index) == 3
    index.close()


def test_links_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "packs").symlink_to(tmp_path / "unmounted")
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", f"{tmp_path}/packs/aa")
    hint = storage_error(missing, "list", f"{tmp_path}/packs/aa").hint
    assert hint is not None
    assert hint.startswith(f"{tmp_path}/packs is a symbolic link that leads nowhere")
    made = Store.create(tmp_path / "store")
    pin = Path(made.path, "pins/best")
    pin.symlink_to("nowhere")
    with pytest.raises(NotFoundError) as caught:
        made.read_pin("best")
    assert str(caught.value.hint).startswith(f"{pin} is a symbolic link")
    for code in (errno.ENOTDIR, errno.EEXIST):
        found = OSError(code, os.strerror(code), str(tmp_path))
        assert "something else lies" in str(storage_error(found, "list", str(tmp_path)).hint)


def test_no_inodes_and_no_space_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(free: int) -> Callable[[str], SimpleNamespace]:
        return lambda _: SimpleNamespace(f_files=100, f_favail=free, f_bavail=5)

    path = str(tmp_path / "none" / "file")
    for free, inodes in ((0, True), (50, False)):
        monkeypatch.setattr(os, "statvfs", status(free))
        error = storage_error(OSError(errno.ENOSPC, "No space left on device"), "write", path)
        assert ("inodes" in str(error.hint)) == inodes
