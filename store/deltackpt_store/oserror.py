"""Operating-system errors as this project's typed errors, with the way out."""

from __future__ import annotations

import errno

from deltackpt_store.errors import StorageError

_FOLDERS = ("/pins", "/manifests", "/packs")
_HINTS = {
    errno.ENOSPC: "free some space on that file system; earlier steps are intact",
    errno.EDQUOT: "the disk quota is used up; earlier steps are intact",
    errno.EROFS: "that file system is read-only: write to another place, or remount it",
    errno.EACCES: "check the owner and the permissions of that path",
    errno.EPERM: "check the owner and the permissions of that path",
    errno.EIO: "the disk or its connection fails: check the system log, and verify the store",
    errno.EMFILE: "too many open files in this process: raise `ulimit -n`",
    errno.ENXIO: "something else lies in its place: move that away",
    errno.EISDIR: "something else lies in its place: move that away",
    errno.ELOOP: "put the file or folder itself in place of the symbolic link",
    errno.ENAMETOOLONG: "that path is longer than the file system allows",
}

FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""A full disk, or a used-up quota."""

NO_LOCKS = frozenset(
    (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
)  # fmt: skip
"""What a file system without locks says."""

DAMAGE = frozenset((errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EFBIG, errno.ENXIO))
"""What opening or reading a file that exists says when that one file is bad."""


def storage_error(error: OSError, doing: str, path: str) -> StorageError:
    """The StorageError for `error`, met while `doing` ("read the manifest") something to `path`.

    When another file was in the way its path is told too.
    """
    code = error.errno
    reason = error.strerror or str(error)
    culprit = error.filename
    if isinstance(culprit, str) and culprit != path and "/.tmp-" not in culprit:
        reason = f"{culprit}: {reason}"
    hint = _HINTS.get(code) if code is not None else None
    if code == errno.ENOENT and str(culprit or path).endswith(_FOLDERS):
        hint = f"a store copied without its empty folders lacks it: mkdir {culprit or path}"
    elif code in (errno.ENOENT, errno.ENOTDIR) and doing.startswith("create a store"):
        hint = "no directory can be made there: name one on a disk that can be written to"
    return StorageError(
        f"cannot {doing} {path}: {reason}",
        hint=hint,
        errno=code,
        path=path,
    )
