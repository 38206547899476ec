"""Locks of those who take packs away: one collection or repair at a time, and one compaction."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from deltackpt_store.errors import ConflictError, StorageError
from deltackpt_store.fileio import FileIO, make_directory
from deltackpt_store.leases import remove_acks
from deltackpt_store.oserror import NO_LOCKS, storage_error
from deltackpt_store.reserve import with_reserve


@contextlib.contextmanager
def collection_lock(io: FileIO, root: str) -> Generator[None]:
    """Hold the lock of garbage collection and repair.

    ConflictError (kind ``gc-running``) when somebody else does, StorageError (``no-locks``) where
    there are none.
    """
    with _locked(
        io, root, "gc/lock", kind="gc-running", who="garbage collection or repair",
        what="garbage collection", verb="collect",
    ):  # fmt: skip
        remove_acks(io, root)  # numbers start over where somebody has removed the generations
        yield


def compaction_lock(io: FileIO, root: str) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of compaction.

    ConflictError (kind ``compaction-running``) when somebody else does, StorageError (``no-locks``)
    where there are none.
    """
    return _locked(
        io, root, "gc/compact.lock", kind="compaction-running", who="compaction",
        what="compaction", verb="compact",
    )  # fmt: skip


@contextlib.contextmanager
def _locked(
    io: FileIO, root: str, name: str, *, kind: str, who: str, what: str, verb: str
) -> Generator[None]:
    path = f"{root}/{name}"
    try:
        make_directory(io, f"{root}/gc")
        handle = with_reserve(io, root, lambda: io.lock(path, create=True))
    except BlockingIOError as error:
        raise ConflictError(
            f"another {who} runs in {root}", kind=kind, hint="wait until it has ended"
        ) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise StorageError(
                f"{what} needs file locks, and there are none at {root}",
                kind="no-locks",
                hint=f"{verb} on a machine that mounts this file system with locks",
                errno=error.errno,
            ) from error
        raise storage_error(error, f"lock the store for {what}", path) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            io.close(handle)
