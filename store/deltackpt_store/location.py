"""What the file system at a location can do, found out by trying.

A store needs names that cannot be taken twice and syncs that are accepted; it gets along without
locks and without memory maps, and says what is lost by that. Probed once for each location, in the
store's ``cache``, and remembered there (``cache/location``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from deltackpt_store.errors import StorageError
from deltackpt_store.fileio import FileIO, is_link, make_directories, read_file, replace_bytes
from deltackpt_store.localfs import filesystem_type, may_map
from deltackpt_store.oserror import FULL
from deltackpt_store.sealed import seal, unseal

_log = logging.getLogger("deltackpt.store")

PROBE_PREFIX = "probe-"
_ALIVE = "alive"
_TRIES = 20
_MAGIC = b"DCKPTLC\x01"
_CANNOT_TRY = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
_SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, *FULL))
"""What tells of this process, or of this moment, and nothing of the place."""
_TRY_LOCK = (
    "import fcntl,os,sys\n"
    "fd=os.open(sys.argv[1],os.O_RDWR)\n"
    "try: fcntl.flock(fd,fcntl.LOCK_EX|fcntl.LOCK_NB)\n"
    "except OSError: sys.exit(3)\n"
)


class Primitive(NamedTuple):
    """One thing that was tried. `vital`: without it no store is made here; otherwise `without` says
    what is lost."""

    name: str
    works: bool
    detail: str
    vital: bool
    without: str


class Remembered(msgspec.Struct, frozen=True):
    """What `cache/location` holds."""

    place: bytes
    missing: list[str]


def check_location(io: FileIO, root: str) -> None:
    """Probe the location of a store about to be written, unless that was done before.

    StorageError (kind ``location``) when something vital is missing; what is lost otherwise is
    logged once. A place that cannot be written just now is passed over: the next write will notice.
    """
    place = os.fsencode(f"{filesystem_type(root)} {os.stat(root).st_dev} {root}")
    path = f"{root}/cache/location"
    if _remembered(io, path) == place:
        return
    try:
        make_directories(io, f"{root}/cache", within=root)
        primitives = probe(io, f"{root}/cache")
    except OSError as error:
        _log.debug("%s could not be probed: %s", root, error)
        return
    missing = [primitive for primitive in primitives if not primitive.works]
    refuse(root, missing)
    for primitive in missing:
        _log.warning(
            "%s: %s does not work (%s): %s",
            root, primitive.name, primitive.detail, primitive.without,
        )  # fmt: skip
    remembered = Remembered(place, [primitive.name for primitive in missing])
    with contextlib.suppress(OSError):
        replace_bytes(io, path, seal(_MAGIC, remembered))


def refuse(root: str, missing: list[Primitive]) -> None:
    """StorageError when anything vital is among what is missing."""
    vital = [primitive for primitive in missing if primitive.vital]
    if vital:
        raise StorageError(
            f"the file system at {root} cannot hold a store: "
            + "; ".join(f"{p.name} does not work ({p.detail})" for p in vital),
            kind="location",
            hint="use another file system; `deltackpt probe PATH` shows what one can do",
            path=root,
        )


def _remembered(io: FileIO, path: str) -> bytes | None:
    with contextlib.suppress(OSError, ValueError):
        return unseal(read_file(io, path, 64 * 1024), _MAGIC, Remembered).place
    return None


def probe(io: FileIO, directory: str, *, other_process: bool = False) -> list[Primitive]:
    """Try everything in a folder of its own below `directory` (made if need be), and remove it.

    `other_process` also tries whether a lock keeps another process out, which takes a moment.
    OSError when nothing can be tried there (read-only, no permission, full), or not now (too many
    open files, no memory).
    """
    make_directories(io, directory)
    remove_dead_probes(io, directory)
    folder, alive = _own_folder(io, directory)
    try:
        return _Probe(io, folder).run(other_process)
    finally:
        _remove(io, folder, alive)


def _own_folder(io: FileIO, directory: str) -> tuple[str, int | None]:
    """A new folder, and the lock in it; None where there are no locks: nobody removes it, then."""
    tries = _TRIES
    while True:
        folder = f"{directory}/{PROBE_PREFIX}{secrets.token_hex(6)}"
        io.mkdir(folder)
        tries -= 1
        try:
            return folder, io.lock(f"{folder}/{_ALIVE}", create=True)
        except OSError as error:
            # A concurrent probe may have removed the folder as that of a dead one.
            if not tries or not isinstance(error, (BlockingIOError, FileNotFoundError)):
                return folder, None
            _remove(io, folder, None)


def remove_dead_probes(io: FileIO, directory: str) -> None:
    """Remove what probes in `directory` left that were killed; best effort.

    One that is under way holds a lock in its folder: without its files it would find the file
    system wanting. One whose folder goes before it has that lock makes another.
    """
    with contextlib.suppress(OSError):
        for name in io.list(directory):
            folder = f"{directory}/{name}"
            if not name.startswith(PROBE_PREFIX) or is_link(folder):
                continue
            with contextlib.suppress(OSError):
                try:
                    handle = io.lock(f"{folder}/{_ALIVE}")
                except FileNotFoundError:
                    io.rmdir(folder)  # only where it is empty
                else:
                    _remove(io, folder, handle)


def _remove(io: FileIO, folder: str, alive: int | None) -> None:
    """Remove a folder with all that is in it, best effort; closes the lock in it."""
    with contextlib.suppress(OSError):
        for name in sorted(io.list(folder), key=_ALIVE.__eq__):  # the lock goes last
            with contextlib.suppress(OSError):
                (io.rmdir if name == "dir" else io.unlink)(f"{folder}/{name}")
    # Some file systems (NFS, FUSE) keep a file that is open under another name until it is closed.
    with contextlib.suppress(OSError):
        if alive is not None:
            io.close(alive)
    with contextlib.suppress(OSError):
        io.rmdir(folder)


class _Probe:
    def __init__(self, io: FileIO, folder: str) -> None:
        self._io = io
        self._folder = folder
        self._found: list[Primitive] = []

    def run(self, other_process: bool) -> list[Primitive]:
        two = "two writers could both win one step"
        self._try("exclusive create", self._create, True, two)
        self._try("exclusive link", self._link, True, two)
        self._try("exclusive mkdir", self._mkdir, False, "nothing that is used at present")
        self._try("names as they are given", self._spelling, True,
                  "a store's own files would not be found again")  # fmt: skip
        self._try("replacing a name", self._replace, False,
                  "repair cannot put commits, manifests and pins right")  # fmt: skip
        self._try("sync of a file", self._sync, True, "no step would be durable")
        self._try("sync of a directory", self._sync_directory, True, "no step would be durable")
        locks = "gc and repair refuse to delete or move; a second writer of a run is noticed late"
        self._try("locks", self._lock, False, locks)
        if type(self._io) is FileIO:
            if other_process:
                self._try("locks between processes", self._lock_elsewhere, False, locks)
            elsewhere = "the index lives in the user's cache directory, or in memory"
            self._try("memory maps", self._map, False, elsewhere)
            kind = filesystem_type(self._folder)
            relied = f"{elsewhere}; on a network, locks hold as far as the server keeps them"
            name = "a file system whose maps and locks are relied on"
            self._found.append(Primitive(name, may_map(self._folder), kind, False, relied))
        return self._found

    def _try(self, name: str, attempt: Callable[[], str], vital: bool, without: str) -> None:
        """`attempt` returns what is wrong, nothing when it works."""
        try:
            wrong = attempt()
        except OSError as error:
            if error.errno in _SCARCE or (error.errno in _CANNOT_TRY and not self._found):
                raise
            wrong = error.strerror or str(error)
        self._found.append(Primitive(name, not wrong, wrong or "works", vital, without))

    def _file(self, name: str, content: bytes = b"") -> str:
        path = f"{self._folder}/{name}"
        handle = self._io.create(path)
        try:
            if content:
                self._io.write(handle, [content], 0)
        finally:
            self._io.close(handle)
        return path

    def _create(self) -> str:
        path = self._file("a", b"a")
        try:
            self._io.close(self._io.create(path))
        except FileExistsError:
            return ""
        return "a name was given twice"

    def _link(self) -> str:
        first, second = self._file("b", b"b"), self._file("c", b"c")
        target = f"{self._folder}/linked"
        self._io.link(first, target)
        try:
            self._io.link(second, target)
        except FileExistsError:
            kept = read_file(self._io, target, 10)
            return "" if kept == b"b" else "it failed and took the name all the same"
        return "a name was given twice"

    def _mkdir(self) -> str:
        path = f"{self._folder}/dir"
        self._io.mkdir(path)
        try:
            self._io.mkdir(path)
        except FileExistsError:
            return ""
        return "a name was given twice"

    def _spelling(self) -> str:
        name = os.path.basename(self._file("Name"))
        return "" if name in self._io.list(self._folder) else "they come back in another spelling"

    def _replace(self) -> str:
        new, old = self._file("new", b"new"), self._file("old", b"old")
        self._io.replace(new, old)
        return "" if read_file(self._io, old, 10) == b"new" else "the old content is still there"

    def _sync(self) -> str:
        handle = self._io.create(f"{self._folder}/synced")
        try:
            self._io.write(handle, [b"x"], 0)
            self._io.sync(handle)
        finally:
            self._io.close(handle)
        return ""

    def _sync_directory(self) -> str:
        self._io.sync_directory(self._folder)
        return ""

    def _lock(self) -> str:
        path = f"{self._folder}/locked"
        handle = self._io.lock(path, create=True)
        try:
            self._io.close(self._io.lock(path))
        except BlockingIOError:
            return ""
        finally:
            self._io.close(handle)
        return "two hold it at once"

    def _lock_elsewhere(self) -> str:
        path = f"{self._folder}/shared"
        handle = self._io.lock(path, create=True)
        try:
            code = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _TRY_LOCK, path], timeout=60, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return "another process waits for ever"
        finally:
            self._io.close(handle)
        return "" if code == 3 else "two processes hold it at once"

    def _map(self) -> str:
        path = self._file("mapped", bytes(mmap.PAGESIZE))
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            with mmap.mmap(handle, mmap.PAGESIZE) as view:
                view[:4] = b"seen"
                seen = os.pread(handle, 4, 0)
        except (ValueError, OSError) as error:
            return str(error)
        finally:
            os.close(handle)
        return "" if seen == b"seen" else "what is written through a map is not read from the file"
