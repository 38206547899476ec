"""Large writes past the page cache.

What is written durably has to reach the disk anyway: going through the page cache only copies it
once more, into fresh pages, which takes as long as everything else a save does to a byte. Direct
writes want whole blocks, in memory and in the file: what lies otherwise goes through a small buffer
of the thread, and the first and last bytes of a run that do not fill a block are written normally.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt_store.copies import copy_bytes, whole_pages

BLOCK = 4096
LEAST_BYTES = 1024 * 1024
"""Less than this is not worth going past the page cache."""

_ROOM_BYTES = 4 * 1024 * 1024
_FLAG = getattr(os, "O_DIRECT", 0)


class Run(NamedTuple):
    """Consecutive bytes to be written at `offset`; `direct`: everything lies on whole blocks."""

    offset: int
    views: list[memoryview]
    direct: bool


def runs(views: Sequence[memoryview], offset: int) -> Iterator[Run]:
    """Cut a write into runs, in order. A direct run that was copied is only valid until the next
    one is asked for."""
    total = sum(map(len, views))
    start, end = -(-offset // BLOCK) * BLOCK, (offset + total) // BLOCK * BLOCK
    if not _FLAG or end - start < LEAST_BYTES:
        yield Run(offset, list(views), False)
        return
    if start > offset:
        yield Run(offset, _part(views, 0, start - offset), False)
    yield from _direct_runs(_part(views, start - offset, end - offset), start)
    if end < offset + total:
        yield Run(end, _part(views, end - offset, total), False)


def _direct_runs(views: list[memoryview], offset: int) -> Iterator[Run]:
    """Whole blocks at a block's boundary: from where they lie, or by way of the thread's buffer."""
    room = _rooms.view
    loose = 0  # bytes in the buffer
    aligned: list[memoryview] = []
    size = 0
    for whole in views:
        if not loose % BLOCK and _lies_on_blocks(whole):
            if loose:
                yield Run(offset, [room[:loose]], True)
                offset, loose = offset + loose, 0
            aligned.append(whole)
            size += len(whole)
            continue
        if aligned:
            yield Run(offset, aligned, True)
            offset, aligned, size = offset + size, [], 0
        view = whole
        while len(view):
            taken = view[: len(room) - loose]
            copy_bytes(room[loose : loose + len(taken)], taken)
            loose += len(taken)
            view = view[len(taken) :]
            if loose == len(room):
                yield Run(offset, [room], True)
                offset, loose = offset + loose, 0
    if aligned:
        yield Run(offset, aligned, True)
    if loose:
        yield Run(offset, [room[:loose]], True)


def _lies_on_blocks(view: memoryview) -> bool:
    if len(view) % BLOCK:
        return False
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0] % BLOCK == 0


def _part(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Bytes ``start ... end`` of the joined views."""
    part: list[memoryview] = []
    at = 0
    for view in views:
        piece = view[max(0, start - at) : max(0, end - at)]
        if len(piece):
            part.append(piece)
        at += len(view)
    return part


def switch(handle: int, *, on: bool) -> bool:
    """Write directly to an open file from here on, or not; False where that is not possible."""
    try:
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | _FLAG if on else flags & ~_FLAG)
    except OSError:
        return False
    return True


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.view = whole_pages(_ROOM_BYTES)


_rooms = _Rooms()
