"""A guarded LMDB environment: what makes a memory-mapped cache safe enough to open at all.

LMDB checks nothing that it maps: a zeroed page aborts the process and a flipped bit is served as
data. Hence the rules here, all about files in one directory:

- ``data.mdb`` is opened only when the *seal*, written at the last clean close, matches its size
  and hash, or while another process has it open. Otherwise it is deleted and starts empty.
- ``users.lock`` is held shared (flock) by every process that has the environment open, so that
  the first to open and the last to close are known; ``gate.lock`` serialises opening and closing;
  ``write.lock`` is held while writing, because LMDB's own wait for a stopped writer has no end.
  Locks end with their process; where the file system has none, the environment is not opened.
- ``lock.mdb``, a mapped table that readers write to, is written out beforehand: storing into a
  hole of a mapped file kills the process (SIGBUS) when the disk is full.
- Files that a copy made of hard links has, too, are left to that copy.
- One environment per process and directory, shared by all who open it. After a fork the child may
  not use it, nor release it (that would free the parent's reader slots): it is leaked there.

Nothing here is needed to be durable; the file is synced only when it is sealed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Generator
from typing import BinaryIO

import lmdb
import msgspec
from xxhash import xxh3_128

from deltackpt_store.errors import StateError, StorageError
from deltackpt_store.fileio import TEMPORARY_PREFIX, open_regular

_log = logging.getLogger("deltackpt.store.index")

ENGINE = 1  # the engine that reports a truncated file instead of dying of SIGBUS
WAIT_SECONDS = 10.0
Describe = Callable[[lmdb.Environment], str]
_SEAL = "seal"
_DATA = "data.mdb"
_READERS = "lock.mdb"
_READERS_BYTES = 128 * 1024
"""More than the table of 1024 readers takes."""


class Seal(msgspec.Struct, frozen=True):
    """What ``data.mdb`` was at the last clean close."""

    size: int
    xxh3_128: str
    identity: str
    """Store uuid and garbage-collection generation, as the opener states them."""
    packs: str
    """Digest of the set of packs inside."""


_open: dict[str, Environment] = {}
_registry = threading.Lock()
_leaked: list[Environment] = []


class Environment:
    """One open environment. Use :func:`acquire` and :func:`release`.

    `lock` must be held around every transaction (growing the map needs that none is active).
    """

    def __init__(self, directory: str, identity: str, map_bytes: int, describe: Describe) -> None:
        self.directory = directory
        self.identity = identity
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.references = 1
        self.broken = False
        self._describe = describe
        self._locks: dict[str, int] = {}
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            _part(directory)
            with self._locked("gate.lock"):
                self._open(map_bytes)
        except (lmdb.Error, OSError) as error:
            self._close_locks()
            raise StorageError(
                f"cannot open the index in {directory}: {error}", kind="index",
                errno=getattr(error, "errno", None), path=directory,
            ) from error  # fmt: skip

    def _open(self, map_bytes: int) -> None:
        users = self._lock_file("users.lock")
        data = os.path.join(self.directory, _DATA)
        if _try_lock(users, fcntl.LOCK_EX):
            seal = self._sealed()
            if seal is None:
                self._delete()
            for name in (_SEAL, _READERS):  # nobody has it open: the reader table is stale
                _remove(os.path.join(self.directory, name))
            self._sweep()
            _write_readers(os.path.join(self.directory, _READERS))
        else:
            seal = None
        env = lmdb.Environment(  # bytes: it takes no str that the locale cannot spell
            os.fsencode(self.directory), map_size=max(map_bytes, _size(data)), max_readers=1024,
            sync=False, metasync=False, writemap=False, readahead=False, mode=0o600,
            lib_version=ENGINE,
        )  # fmt: skip
        try:
            if seal is not None and seal.packs != self._describe(env):
                raise OSError("the seal does not state the packs inside")
            fcntl.flock(users, fcntl.LOCK_SH)
            env.reader_check()
        except BaseException:
            env.close()
            raise
        self.env = env

    def _sealed(self) -> Seal | None:
        """The seal, if it matches the data file and this store."""
        try:
            with _opened(os.path.join(self.directory, _SEAL)) as file:
                seal = msgspec.json.decode(file.read(4096), type=Seal)
            data = os.path.join(self.directory, _DATA)
            if seal.identity == self.identity and seal.size == _size(data):
                return seal if seal.xxh3_128 == _hash(data) else None
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            pass
        return None

    def _delete(self) -> None:
        for name in (_SEAL, _DATA, _READERS):
            _remove(os.path.join(self.directory, name))

    def _sweep(self) -> None:
        """Remove what somebody who was killed, or could not, has left of a seal."""
        for name in os.listdir(self.directory):
            if name.startswith(TEMPORARY_PREFIX):
                with contextlib.suppress(OSError):
                    _remove(os.path.join(self.directory, name))

    # using ---------------------------------------------------------------------------------

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise StateError(
                "the index belongs to the process that opened it, not to a forked child",
                kind="forked", hint="open the store again in this process",
            )  # fmt: skip

    def grow(self, max_bytes: int) -> None:
        """Double the map. Raises lmdb.MapFullError beyond `max_bytes`. No transaction is active."""
        size = 2 * self.env.info()["map_size"]
        if size > max_bytes:
            raise lmdb.MapFullError(f"the index would need more than {max_bytes} bytes")
        self.env.set_mapsize(size)

    def adopt_size(self) -> None:
        """Take over the map size that another process has set."""
        self.env.set_mapsize(0)

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Hold the write lock; OSError when another process keeps it for too long."""
        with self._locked("write.lock"):
            yield

    # closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close; the last process to do so seals the data file unless something went wrong."""
        try:
            with self.lock, self._locked("gate.lock"):
                packs = ""
                if not self.broken:
                    packs = self._describe(self.env)
                    self.env.sync(True)
                self.env.close()
                if _try_lock(self._lock_file("users.lock"), fcntl.LOCK_EX):
                    if self.broken:
                        self._delete()
                    else:
                        self._seal(packs)
        except (lmdb.Error, OSError) as error:
            _log.warning("the index in %s was not sealed: %s", self.directory, error)
        finally:
            self.env.close()
            self._close_locks()

    def _seal(self, packs: str) -> None:
        data = os.path.join(self.directory, _DATA)
        seal = Seal(_size(data), _hash(data), self.identity, packs)
        temporary = os.path.join(self.directory, f"{TEMPORARY_PREFIX}{os.getpid()}-{_SEAL}")
        _remove(temporary)
        try:
            with open(temporary, "xb") as file:
                file.write(msgspec.json.encode(seal))
            os.replace(temporary, os.path.join(self.directory, _SEAL))
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(temporary)
            raise

    def leak(self) -> None:
        """In a forked child: keep the inherited environment from ever being closed there."""
        _leaked.append(self)
        self._close_locks()  # only this process's copies: the parent keeps its locks

    # locks ---------------------------------------------------------------------------------

    def _lock_file(self, name: str) -> int:
        handle = self._locks.get(name)
        if handle is None:
            path = os.path.join(self.directory, name)
            handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            self._locks[name] = handle
        return handle

    @contextlib.contextmanager
    def _locked(self, name: str) -> Generator[None]:
        handle = self._lock_file(name)
        deadline = time.monotonic() + WAIT_SECONDS
        while not _try_lock(handle, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise OSError(errno.EAGAIN, f"another process holds {name}")
            time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)

    def _close_locks(self) -> None:
        while self._locks:
            os.close(self._locks.popitem()[1])


def acquire(directory: str, identity: str, map_bytes: int, describe: Describe) -> Environment:
    """The process's environment of `directory`, opened if need be (StorageError).

    `describe` computes what the seal states about the content.
    """
    directory = os.path.realpath(directory)
    with _registry:
        environment = _open.get(directory)
        if any(leaked.directory == directory for leaked in _leaked):
            raise StorageError(
                f"the index in {directory} was open when this process was forked", kind="forked"
            )
        if environment is None:
            environment = _open[directory] = Environment(directory, identity, map_bytes, describe)
        elif environment.identity != identity:
            raise StorageError(
                f"the index in {directory} is open for another store or generation", kind="index"
            )
        else:
            environment.references += 1
        return environment


def release(environment: Environment) -> None:
    """Give back what `acquire` returned; the last one closes it."""
    if os.getpid() != environment.pid:
        return
    with _registry:
        environment.references -= 1
        if environment.references == 0:
            del _open[environment.directory]
            environment.close()


def _after_fork() -> None:
    global _registry
    _registry = threading.Lock()  # another thread may have held it at the fork
    for environment in _open.values():
        environment.leak()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _opened(path: str) -> BinaryIO:
    return os.fdopen(open_regular(path, os.O_RDONLY), "rb")


def _write_readers(path: str) -> None:
    """Make the table of readers, all zeros, with its space allocated. OSError (ENOSPC)."""
    handle = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        if os.pwrite(handle, bytes(_READERS_BYTES), 0) != _READERS_BYTES:
            raise OSError(errno.ENOSPC, "no space for the table of readers", path)
    finally:
        os.close(handle)


def _hash(path: str) -> str:
    state = xxh3_128()
    with _opened(path) as file:
        while block := file.read(4 << 20):
            state.update(block)
    return state.hexdigest()


def _part(directory: str) -> None:
    """Leave files to the copy that has them, too, made of hard links: two stores would map one file
    with a table of readers each."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                os.unlink(path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
