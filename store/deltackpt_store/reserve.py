"""A little space set aside in ``gc/``, so that the records that free space fit onto a full disk.

Leases, acknowledgements, generations and retirements are small, but a disk can be too full for
even those, and nothing could ever be deleted then.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import TypeVar

from deltackpt_store.fileio import FileIO, publish_bytes
from deltackpt_store.oserror import FULL

RESERVE = "gc/reserve"
RESERVE_BYTES = 512 * 1024
"""XFS makes no file, not even an empty one, unless about 60 blocks are free."""

_T = TypeVar("_T")


def make_reserve(io: FileIO, root: str) -> None:
    """Set space aside for records of a full disk, if there is ample space; best effort."""
    with contextlib.suppress(OSError):
        if _reserved(io, root) >= RESERVE_BYTES or io.free_bytes(root) < 8 * RESERVE_BYTES:
            return
        free_reserve(io, root)
        _set_aside(io, root, RESERVE_BYTES)


def free_reserve(io: FileIO, root: str) -> bool:
    """Give the reserve up; False when there is none."""
    try:
        io.unlink(f"{root}/{RESERVE}")
    except OSError:
        return False
    return True


def with_reserve(io: FileIO, root: str, action: Callable[[], _T]) -> _T:
    """Do `action`, once more without the reserve when the disk is full. OSError.

    What it leaves of the reserve is set aside again, for the next such record.
    """
    try:
        return action()
    except OSError as error:
        if error.errno not in FULL or not free_reserve(io, root):
            raise
    try:
        return action()
    finally:
        for eighths in range(8, 0, -1):
            if _set_aside(io, root, RESERVE_BYTES * eighths // 8):
                break


def _set_aside(io: FileIO, root: str, size: int) -> bool:
    # Random: a file system that compresses or leaves holes must set the space aside as well.
    try:
        publish_bytes(io, f"{root}/{RESERVE}", secrets.token_bytes(size))
    except OSError:
        return False
    return True


def _reserved(io: FileIO, root: str) -> int:
    """Bytes that are set aside. OSError."""
    try:
        handle = io.open(f"{root}/{RESERVE}")
    except FileNotFoundError:
        return 0
    try:
        return io.size(handle)
    finally:
        io.close(handle)
