"""Who is at work in a store: what garbage collection waits for, and what it leaves alone.

Files in ``gc/``, none of them needed to be durable (a power cut ends everybody they stand for)::

    leases/<writer id>            held locked by a live writer
    acks/<20 digits>-<writer id>  that writer has heeded the generation of that number
    holds/<id>-<20 digits>-<run>  held locked while that commit is read or built upon

A lock says who is alive: never a clock, an age or a process number. A lease or hold whose lock can
be taken is dead; only the collector removes it. Where locks lie (some network file systems), the
collector takes a live writer for dead and removes its lease, which the writer notices: see
:meth:`Lease.intact`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
import weakref
from typing import NamedTuple

import msgspec

from deltackpt_store.errors import CorruptionError
from deltackpt_store.fileio import FileIO, publish_bytes, read_file, share_as_above
from deltackpt_store.manifest import Commit
from deltackpt_store.names import is_name, number_name, parse_number
from deltackpt_store.oserror import FULL, NO_LOCKS, storage_error
from deltackpt_store.process_note import NOTE_BYTES, own_note, read_note
from deltackpt_store.records import is_listed, retired
from deltackpt_store.reserve import with_reserve
from deltackpt_store.sealed import seal, unseal

_log = logging.getLogger("deltackpt.store.gc")

LEASES = "gc/leases"
ACKS = "gc/acks"
HOLDS = "gc/holds"

_ACK_MAGIC = b"DCKPTAK\x01"
_PROBES = 1000
_MAX_ACK_BYTES = 256 * 1024 * 1024
_NO_WRITING = frozenset((errno.EROFS, errno.EACCES, errno.EPERM, *FULL, *NO_LOCKS))


class Claims(msgspec.Struct, frozen=True):
    """What a writer still builds upon although a generation condemns it."""

    packs: frozenset[str] = frozenset()
    manifests: frozenset[bytes] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.packs or self.manifests)


NOTHING = Claims()


class _LockedFile:
    """A file that is held locked as long as what it stands for is true, and removed then."""

    def __init__(self, io: FileIO, path: str, handle: int) -> None:
        self._io = io
        self._path = path
        self._handle: int | None = handle
        _held.add(self)

    def release(self) -> None:
        """Let go of it. Idempotent; never raises."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with contextlib.suppress(OSError):
            self._io.unlink(self._path)
        with contextlib.suppress(OSError):
            self._io.close(handle)

    def close_in_child(self) -> None:
        """Forget it in a forked child; the parent keeps it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError, KeyError):
                self._io.close(handle)


class Lease(_LockedFile):
    """A live writer's sign of life. Taken before the writer looks at anything it may build upon.

    Used by one thread. A forked child closes its copy at once.
    """

    def __init__(self, io: FileIO, root: str, writer: str, handle: int) -> None:
        super().__init__(io, f"{root}/{LEASES}/{writer}", handle)
        self.writer = writer
        self._root = root

    @classmethod
    def take(cls, io: FileIO, root: str, writer: str) -> Lease | None:
        """A lease for the writer (16 hex digits); None, logged, where there are no locks.

        Raises StorageError when the file cannot be made.
        """
        path = f"{root}/{LEASES}/{writer}"

        def create() -> int:
            _make(io, root, LEASES)
            return _lock_own(io, path)

        try:
            handle = with_reserve(io, root, create)
        except OSError as error:
            if error.errno in NO_LOCKS:
                _log.warning(
                    "no file locks at %s (%s): garbage collection must not run while this process"
                    " writes",
                    root, error.strerror,
                )  # fmt: skip
                return None
            raise storage_error(error, "take the lease", path) from error
        _describe(io, handle)
        return cls(io, root, writer, handle)

    def intact(self) -> bool:
        """Whether no collector has taken this writer for dead.

        As long as this is true, a collection whose generation this writer has not acknowledged
        has not come to its second marking, and so will see what is committed by now.
        """
        if self._handle is None:
            return False
        try:
            return self._io.exists(self._path)
        except OSError:
            return False

    def acknowledge(self, generation: int, claims: Claims) -> None:
        """Tell the collector that what `generation` condemns, except `claims`, is not built upon.

        StorageError when that cannot be said; the collector then goes on waiting.
        """
        path = f"{self._root}/{ACKS}/{number_name(generation)}-{self.writer}"

        def create() -> None:
            _make(self._io, self._root, ACKS)
            if claims:
                publish_bytes(self._io, path, seal(_ACK_MAGIC, claims))
            else:  # an empty file needs no space and is never half there
                self._io.close(self._io.create(path))

        try:
            with contextlib.suppress(FileExistsError):
                with_reserve(self._io, self._root, create)
        except OSError as error:
            raise storage_error(error, "acknowledge the collection", path) from error


class Hold(_LockedFile):
    """Keeps one commit from being retired or collected while it is held, where locks work."""


class Held(NamedTuple):
    """A commit that somebody holds."""

    run: str
    number: int


def hold(io: FileIO, root: str, commit: Commit) -> Hold | None:
    """Hold `commit`: from here on neither retention nor collection takes it.

    None where that cannot be said (a read-only store, no locks, a full disk, a copy of a store that
    nobody has written to since and that lacks its folders): readers go without, and are safe as
    long as nobody retires what they read. NotFoundError when the commit was retired before.
    """
    name = f"{secrets.token_hex(8)}-{number_name(commit.number)}-{commit.run}"
    path = f"{root}/{HOLDS}/{name}"
    try:
        if not io.exists(f"{root}/gc"):
            return None
        _make(io, root, HOLDS)
        handle = _lock_own(io, path)
    except OSError as error:
        if error.errno in _NO_WRITING:
            return None
        raise storage_error(error, "hold the commit by", path) from error
    held = Hold(io, path, handle)
    try:
        # After the hold: whoever retires it from now on sees the hold, and so does who collects.
        if not is_listed(io, root, commit.run, commit.number):
            raise retired(commit, "restore another step")
    except BaseException:
        held.release()
        raise
    return held


def live_leases(io: FileIO, root: str) -> tuple[list[str], list[str]]:
    """Writer ids with a held lease, and those whose lease is dead; removes nothing. OSError."""
    live: list[str] = []
    dead: list[str] = []
    for name in sorted(_names(io, f"{root}/{LEASES}")):
        (live if is_locked(io, f"{root}/{LEASES}/{name}") else dead).append(name)
    return live, dead


def held_commits(io: FileIO, root: str, *, clean: bool = False) -> set[Held]:
    """Commits that are held now; `clean` removes the holds of the dead. StorageError."""
    found: set[Held] = set()
    try:
        for name in _names(io, f"{root}/{HOLDS}"):
            parsed = _parse_hold(name)
            path = f"{root}/{HOLDS}/{name}"
            if is_locked(io, path):
                if parsed is not None:
                    found.add(parsed)
            elif clean:
                _remove(io, path)
    except OSError as error:
        raise storage_error(error, "read the holds of", root) from error
    return found


def is_locked(io: FileIO, path: str) -> bool:
    """Whether somebody holds the lock of the file. OSError where that cannot be determined."""
    try:
        handle = io.lock(path)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    io.close(handle)
    return False


def bury(io: FileIO, root: str, writer: str) -> bool:
    """Remove the lease of a dead writer; False when it turns out to be alive. OSError."""
    path = f"{root}/{LEASES}/{writer}"
    try:
        handle = io.lock(path)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    try:
        with contextlib.suppress(FileNotFoundError):  # it is just ending
            io.unlink(path)
    finally:
        io.close(handle)
    return True


def read_ack(io: FileIO, root: str, generation: int, writer: str) -> Claims | None:
    """What the writer claims of the generation; None when it has not acknowledged it yet.

    CorruptionError for a damaged one, OSError.
    """
    path = f"{root}/{ACKS}/{number_name(generation)}-{writer}"
    try:
        data = read_file(io, path, _MAX_ACK_BYTES)
    except FileNotFoundError:
        return None
    if not data:
        return NOTHING
    try:
        return unseal(data, _ACK_MAGIC, Claims)
    except ValueError as error:
        raise CorruptionError(
            f"acknowledgement {path} is damaged: {error}", kind="damaged-ack", path=path
        ) from error


def remove_acks(io: FileIO, root: str) -> None:
    """Remove all acknowledgements; best effort. Only when no collection waits for any."""
    with contextlib.suppress(OSError):
        for name in _names(io, f"{root}/{ACKS}"):
            _remove(io, f"{root}/{ACKS}/{name}")


def holder(io: FileIO, root: str, writer: str) -> str:
    """Words for who holds a lease."""
    try:
        note = read_note(read_file(io, f"{root}/{LEASES}/{writer}", NOTE_BYTES))
    except OSError:
        note = None
    return note or f"writer {writer[:16]}"


# shared -----------------------------------------------------------------------------------------


def _lock_own(io: FileIO, path: str) -> int:
    """Make and lock a file of one's own. Retries, since `is_locked` of another process holds the
    lock for a moment."""
    for _ in range(_PROBES):
        try:
            return io.lock(path, create=True)
        except BlockingIOError:
            time.sleep(0.001)
    return io.lock(path, create=True)


def _make(io: FileIO, root: str, directory: str) -> None:
    path = f"{root}/{directory}"
    if io.exists(path):
        return
    for missing in (os.path.dirname(path), path):
        if not io.exists(missing):
            with contextlib.suppress(FileExistsError):
                io.mkdir(missing)
                share_as_above(io, missing)


def _names(io: FileIO, path: str) -> list[str]:
    """Names in a directory, none when it is missing. OSError: an error never means "nobody"."""
    try:
        return io.list(path)
    except FileNotFoundError:
        return []


def _remove(io: FileIO, path: str) -> None:
    with contextlib.suppress(OSError):
        io.unlink(path)


def _parse_hold(name: str) -> Held | None:
    _, _, rest = name.partition("-")
    digits, _, run = rest.partition("-")
    number = parse_number(digits)
    return Held(run, number) if number is not None and is_name(run) else None


def _describe(io: FileIO, handle: int) -> None:
    """Who it is, for messages; not worth failing for."""
    with contextlib.suppress(OSError):
        io.write(handle, [own_note()], 0)


_held: weakref.WeakSet[_LockedFile] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: its copies of descriptors must not keep a dead parent's locks alive."""
    for one in list(_held):
        one.close_in_child()


os.register_at_fork(after_in_child=_forked)
