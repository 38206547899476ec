"""What collection and repair have in common: one of them at a time, and waiting for live writers.

Both take packs away that writers may be building upon. Whoever does that holds the lock, publishes
a generation that condemns them, and waits here until every live writer has acknowledged it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from deltackpt_store import leases
from deltackpt_store.errors import ConflictError, StorageError
from deltackpt_store.fileio import FileIO, make_directory
from deltackpt_store.generation import newest_number
from deltackpt_store.oserror import storage_error

LOCK = "gc/lock"
ACK_SECONDS = 60.0
_POLL_SECONDS = 0.05

Wait = Callable[[list[str]], bool]
"""Called with the writers that have not acknowledged yet; False: give up waiting."""


@contextlib.contextmanager
def collection_lock(io: FileIO, root: str) -> Generator[None]:
    """Hold the lock of garbage collection.

    ConflictError (kind ``gc-running``) when somebody else does, StorageError (``no-locks``) where
    there are none.
    """
    path = f"{root}/{LOCK}"
    try:
        make_directory(io, f"{root}/gc")
        handle = leases.with_reserve(io, root, lambda: io.lock(path, create=True))
    except BlockingIOError as error:
        raise ConflictError(
            f"another garbage collection or repair runs in {root}",
            kind="gc-running",
            hint="wait until it has ended",
        ) from error
    except OSError as error:
        if error.errno in leases.NO_LOCKS:
            raise StorageError(
                f"garbage collection needs file locks, and there are none at {root}",
                kind="no-locks",
                hint="collect on a machine that mounts this file system with locks",
                errno=error.errno,
            ) from error
        raise storage_error(error, "lock the store for garbage collection", path) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            io.close(handle)


def settle(io: FileIO, root: str, generation: int, wait: Wait) -> tuple[leases.Claims, int]:
    """Wait for the living, bury the dead; what is claimed, and how many were waited for.

    ConflictError ``gc-busy`` when `wait` gives up, ``gc-running`` when there is a newer generation;
    OSError, CorruptionError.
    """
    packs: set[str] = set()
    manifests: set[bytes] = set()
    settled: set[str] = set()
    while True:
        live, dead = leases.live_leases(io, root)
        for writer in dead:
            if not leases.bury(io, root, writer):
                live.append(writer)
        missing: list[str] = []
        for writer in live:
            if writer in settled:
                continue
            claims = leases.read_ack(io, root, generation, writer)
            if claims is None:
                missing.append(writer)
            else:
                settled.add(writer)
                packs |= claims.packs
                manifests |= claims.manifests
        if not missing:
            return leases.Claims(frozenset(packs), frozenset(manifests)), len(settled)
        if not wait(missing):
            raise _busy(io, root, missing)
        check_newest(io, root, generation)


def check_newest(io: FileIO, root: str, generation: int) -> None:
    """ConflictError when somebody has published a generation after this one. OSError."""
    if newest_number(io, root) != generation:
        raise overtaken()


def overtaken() -> ConflictError:
    """The error for two collections at once, which locks that lie make possible."""
    return ConflictError(
        "another garbage collection has taken over",
        kind="gc-running",
        hint="run one at a time, on one machine",
    )


def patience(seconds: float) -> Wait:
    """Wait by the monotonic clock of this process: it bounds the wait and decides nothing else."""
    end = time.monotonic() + seconds

    def wait(writers: list[str]) -> bool:
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
        return True

    return wait


def _busy(io: FileIO, root: str, writers: list[str]) -> ConflictError:
    who = ", ".join(leases.holder(io, root, writer) for writer in writers[:5])
    return ConflictError(
        f"{len(writers)} live writers have not let go of what may be deleted: {who}",
        kind="gc-busy",
        hint="nothing was deleted; run it again when they get on, or have ended",
        writers=len(writers),
    )
