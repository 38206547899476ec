"""What collection and repair have in common: waiting for live writers.

Both take packs away that writers may be building upon. Whoever does that holds the lock, publishes
a generation that condemns them, and waits here until every live writer has acknowledged it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deltackpt_store import leases
from deltackpt_store.errors import ConflictError
from deltackpt_store.fileio import FileIO
from deltackpt_store.generation import newest_number

ACK_SECONDS = 60.0
_POLL_SECONDS = 0.05

Wait = Callable[[list[str]], bool]
"""Called with the writers that have not acknowledged yet; False: give up waiting."""


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
