"""Whether the store that a writer opened is still where it was.

A store may be deleted, moved or replaced while training goes on. A writer then fails its saves with
an error that says so, makes nothing anew at the old path, and goes on when the store is back.
"""

from __future__ import annotations

import errno

from deltackpt_store.errors import CorruptionError, DeltackptError, NotFoundError, StorageError
from deltackpt_store.fileio import FileIO, make_directory, read_file
from deltackpt_store.format_file import FORMAT_NAME, MAX_FORMAT_BYTES, decode_format
from deltackpt_store.history import History
from deltackpt_store.oserror import storage_error

KIND = "store-vanished"
_NOT_THERE = frozenset((errno.ENOENT, errno.ENOTDIR))


def vanished(root: str, why: str = "it was deleted or moved") -> StorageError:
    """The error for a store that is not at `root` any more."""
    return StorageError(
        f"the store {root} is gone: {why} while it was in use",
        kind=KIND,
        hint="put it back where it was: saving goes on then; nothing was made anew there",
        path=root,
        errno=errno.ENOENT,
    )


def check_there(io: FileIO, root: str, uuid: bytes) -> None:
    """Raise StorageError (kind ``store-vanished``) unless the store `uuid` lies at `root`.

    Other StorageErrors and CorruptionError when FORMAT cannot be read.
    """
    name = f"{root}/{FORMAT_NAME}"
    try:
        found = decode_format(read_file(io, name, MAX_FORMAT_BYTES), name).uuid
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise vanished(root) from error
        raise storage_error(error, "look for the store, reading", name) from error
    if found != uuid:
        raise vanished(root, "another store was put in its place")


def check_not_empty(io: FileIO, root: str) -> None:
    """Raise StorageError (kind ``store-vanished``) when nothing at all is left at `root`, as after
    the store was moved or unmounted: what was looked for there is not damaged."""
    try:
        if io.list(root):
            return
    except OSError as error:
        if error.errno not in _NOT_THERE:
            return
    error = vanished(root)
    error.hint = "put it back where it was, or mount it again, and try again"
    raise error


def explain(io: FileIO, root: str, error: DeltackptError) -> DeltackptError:
    """`error`, or that the store is gone where that is what is behind it."""
    missing = isinstance(error, StorageError) and error.errno in _NOT_THERE
    if not missing and not isinstance(error, (NotFoundError, CorruptionError)):
        return error
    try:
        there = io.exists(f"{root}/{FORMAT_NAME}")
    except OSError as failure:
        there = failure.errno not in _NOT_THERE
    return error if there else vanished(root)


def make_empty_folders(io: FileIO, root: str, names: tuple[str, ...]) -> None:
    """Make those of the store's folders that a copy without empty ones has lost (StorageError).

    ``runs`` only where nothing was saved: CorruptionError as of `History.runs`.
    """
    try:
        present = set(io.list(root))
        if FORMAT_NAME not in present:
            raise vanished(root)
        if "runs" not in present:
            History(root, io).runs()
        for name in names:
            if name not in present:
                make_directory(io, f"{root}/{name}")
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if error.errno in _NOT_THERE:
            raise vanished(root) from error
        raise storage_error(error, "prepare for writing", root) from error
