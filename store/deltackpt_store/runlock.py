"""One writer per run: an advisory lock that the kernel releases when its holder dies.

The lock is flock(2) on ``runs/<run>/.lock``, so a killed writer never leaves a stale one. It
spares two writers wasted work and gives the second a clear message; what decides between them is
the commit record, which is created only if absent. Where the file system has no locks the writer
goes on without, and says so. The lock file is no part of the store's content, is never read back
except to name the holder, and stays behind; like the index cache it does not go through `FileIO`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable

from deltackpt_store.errors import ConflictError
from deltackpt_store.fileio import is_shared, open_regular, part, share_lock, still_named
from deltackpt_store.oserror import NO_LOCKS
from deltackpt_store.process_note import NOTE_BYTES, is_own, own_note, read_note

_log = logging.getLogger("deltackpt.writer")

LOCK_NAME = ".lock"
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 1.0  # before waiting is logged: finishing a last save takes less
_BUSY = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})

_HINT = (
    "end that trainer or give this one another run name; a writer that is only finishing its last"
    " save lets go by itself"
)
_OWN = (
    "that is this process: close() the Checkpointer of the run that is still open (in a notebook,"
    " the traceback of an error may keep it so)"
)
_SHARED = (
    "end that trainer; if it writes to another store, of which this one is a copy made of hard"
    " links (or the other way round), remove {}, which both have"
)


class RunLock:
    """The held lock. Release it with :meth:`release`; process death releases it too."""

    def __init__(self, fd: int, *, locked: bool) -> None:
        self._fd = fd
        self.locked = locked
        _locks.add(self)

    @classmethod
    def acquire(
        cls, directory: str, run: str, *, timeout: float, cancelled: Callable[[float], bool],
        hint: str = _HINT,
    ) -> RunLock:  # fmt: skip
        """Lock the run whose directory is `directory`, waiting up to `timeout` seconds.

        `cancelled(seconds)` sleeps at most that long and tells whether to give up waiting.
        Raises `ConflictError` naming the holder (and the way out, `hint`), and ``OSError`` when the
        lock file cannot be made (a read-only store, no permission).
        """
        path = os.path.join(directory, LOCK_NAME)
        begun = time.monotonic()
        deadline = begun + timeout
        parted = told = False
        while True:
            fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            share_lock(path, fd)
            try:
                locked = _lock(fd, path)
                if locked and not parted and part(path, fd):
                    parted = True
                elif locked is None or (locked and still_named(path, fd)):
                    _describe(fd)
                    return cls(fd, locked=locked is not None)
                note, shared = _note(fd), is_shared(fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if locked:
                continue  # the file was replaced under us: lock the new one
            now = time.monotonic()
            holder = read_note(note) or "another process"
            if not told and now >= begun + _PATIENCE_SECONDS:
                told = True
                _log.warning(
                    "run %r is being written by %s: nothing can be saved until that lets go, which"
                    " is waited for (lock_timeout=); two trainings need two run names",
                    run, holder,
                )  # fmt: skip
            if now >= deadline or cancelled(_POLL_SECONDS):
                raise ConflictError(
                    f"run {run!r} is being written by {holder}",
                    kind="run-locked",
                    hint=_SHARED.format(path) if shared else _OWN if is_own(note) else hint,
                    run=run,
                )

    def release(self) -> None:
        """Let the next writer in. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _lock(fd: int, path: str) -> bool | None:
    """True: locked. False: somebody else holds it. None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        if error.errno in NO_LOCKS:
            _log.warning(
                "no file locks on %s (%s): a second writer of this run would be noticed only when"
                " it commits",
                path, error.strerror,
            )  # fmt: skip
            return None
        raise
    return True


def _describe(fd: int) -> None:
    """Who holds it, for the message of the next one; not worth failing for."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, own_note(), 0)


def _note(fd: int) -> bytes:
    """What the holder has left of itself."""
    try:
        return os.pread(fd, NOTE_BYTES, 0)
    except OSError:
        return b""


_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: its copies of descriptors must not keep the parent's locks alive."""
    for lock in list(_locks):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_forked)
