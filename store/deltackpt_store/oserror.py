"""Operating-system errors as this project's typed errors, with the way out."""

from __future__ import annotations

import errno
import os

from deltackpt_store.errors import StorageError
from deltackpt_store.fileio import FileIO, is_link

_FOLDERS = ("/manifests", "/packs")
_NO_INODES = (
    "no file can be made there, as all inodes are in use (`df -i`): delete files there, or, while"
    " nothing has the store open, its folder cache; earlier steps are intact"
)
_FEW_INODES = 3  # a file that is made durable takes two for a moment
_DISK = "the disk or its connection fails: check the system log, and verify the store"
_SERVER = "the file server, or the connection to it, is gone: look at the mount, then try again"
_HINTS = {
    errno.ENOSPC: "free some space on that file system; earlier steps are intact",
    errno.EDQUOT: "the disk quota (of bytes, or of files) is used up; earlier steps are intact",
    errno.EROFS: "that file system is read-only: write to another place, or remount it",
    errno.EACCES: "check the owner and the permissions of that path",
    errno.EPERM: "check the owner and the permissions of that path",
    errno.ESTALE: _SERVER,
    errno.ENOTCONN: _SERVER,
    errno.ETIMEDOUT: _SERVER,
    errno.EHOSTDOWN: _SERVER,
    errno.EHOSTUNREACH: _SERVER,
    errno.EMFILE: "too many open files in this process: raise `ulimit -n`",
    errno.EFBIG: "larger than files may become there: raise `ulimit -f`, or use another disk",
    errno.ENOMEM: "more memory is needed: raise the limit on it, or end what else uses it",
    errno.ENXIO: "something else lies in its place: move that away",
    errno.EISDIR: "something else lies in its place: move that away",
    errno.ENOTDIR: "something else lies in the place of a folder: move that away",
    errno.EEXIST: "something else lies in its place: move that away",
    errno.ELOOP: "put the file or folder itself in place of the symbolic link",
    errno.EOPNOTSUPP: "a store can only be read there: `deltackpt probe` shows what is lacking",
    errno.ENAMETOOLONG: "that path is longer than the file system allows",
}

FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""A full disk, or a used-up quota."""

NO_LOCKS = frozenset(
    (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
)  # fmt: skip
"""What a file system without locks says."""

_BAD_MEDIUM = frozenset(
    getattr(errno, name)
    for name in ("EIO", "EUCLEAN", "EBADMSG", "EILSEQ", "ENODATA", "EREMOTEIO")
    if hasattr(errno, name)
)
"""A block that cannot be read, or one of which the file system or the disk knows that it is bad."""

DAMAGE = _BAD_MEDIUM | {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EFBIG, errno.ENXIO}
"""What opening or reading a file that exists says when that one file is bad."""


def hint_for(error: OSError, path: str = "") -> str | None:
    """The way out of `error`, met at `path` where it does not name another one; None if unknown."""
    if error.errno is None:
        return None
    where = str(error.filename or path)
    if error.errno == errno.ENOENT:
        link = _broken_link(where)
        if link is not None:
            return (
                f"{link} is a symbolic link that leads nowhere: mount what it leads to, or put the"
                " file or folder itself in its place"
            )
        if where.endswith(_FOLDERS):
            return f"a store copied without its empty folders lacks it: mkdir {where}"
        if where.endswith("/pins"):
            return (
                "run `deltackpt repair --from` a copy of the store; if there were no pins (copying"
                f" leaves an empty folder out): mkdir {where}"
            )
        if where.endswith("/runs"):
            return "the commits lie there: put that folder back from a copy of the store"
    if error.errno == errno.ENOSPC and _no_inodes(where):
        return _NO_INODES
    return _DISK if error.errno in _BAD_MEDIUM else _HINTS.get(error.errno)


def _no_inodes(path: str) -> bool:
    """Whether the file system of `path` has space, and no room for another file."""
    while path not in ("", "/") and not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_files > 0 and status.f_favail < _FEW_INODES and status.f_bavail > 0


def _broken_link(path: str) -> str | None:
    """The symbolic link, `path` or a folder above it, because of which there is nothing."""
    while len(path) > 1:
        if is_link(path):
            return path
        if os.path.lexists(path):
            return None
        path = os.path.dirname(path)
    return None


def storage_error(error: OSError, doing: str, path: str) -> StorageError:
    """The StorageError for `error`, met while `doing` ("read the manifest") something to `path`.

    When another file was in the way its path is given too.
    """
    code = error.errno
    reason = error.strerror or str(error)
    if code == errno.ENOENT and is_link(path):
        reason = "it is a symbolic link that leads nowhere"
    culprit = error.filename
    if isinstance(culprit, str) and culprit != path and "/.tmp-" not in culprit:
        reason = f"{culprit}: {reason}"
    hint = hint_for(error, path)
    if code in (errno.ENOENT, errno.ENOTDIR) and doing.startswith("create a store"):
        hint = "no directory can be made there: name one on a disk that can be written to"
    return StorageError(
        f"cannot {doing} {path}: {reason}",
        hint=hint,
        errno=code,
        path=path,
    )


def sync_directory(io: FileIO, path: str) -> None:
    """Make the names in `path` durable (StorageError)."""
    try:
        io.sync_directory(path)
    except OSError as error:
        raise storage_error(error, "make durable the directory", path) from error
