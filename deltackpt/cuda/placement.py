"""Where changed chunks go in ring slots, worked out for all of them at once. Pure numpy."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from deltackpt_store.protocol import RECORD
from numpy.typing import NDArray

PAGE = 4096
SMALL_ALIGN = 64
PAGED_BYTES = 65536
"""Chunks of at least this many bytes start at a multiple of the page size."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Entries ``first <= entry < end`` of a :class:`Placement` share one slot.

    ``used`` are the bytes of the slot up to the end of its last chunk; ``longest`` is the length
    of its longest chunk.
    """

    first: int
    end: int
    used: int
    longest: int


class Placement:
    """Chunks packed into slots. ``order`` lists positions in the input, in the order of entries.

    Chunks that `first` marks come before all others (they belong to memory that training waits
    for), big ones before small ones within each group. ``offset`` is the place within the slot.
    """

    def __init__(
        self, length: NDArray[np.int32], first: NDArray[np.bool_], slot_bytes: int
    ) -> None:
        big = length >= PAGED_BYTES
        self.order: NDArray[np.int64] = np.lexsort((~big, ~first))
        size = length[self.order].astype(np.int64)
        big = big[self.order]
        room = np.where(big, -(-size // PAGE) * PAGE, -(-size // SMALL_ALIGN) * SMALL_ALIGN)
        # a big chunk after small ones starts a new page, as do the small ones after it
        turns = np.flatnonzero(big[1:] & ~big[:-1])
        for turn in turns:  # at most one: before the big chunks of the second group
            room[turn] += -int(room[: turn + 1].sum()) % PAGE
        start = np.cumsum(room) - room
        end = start + size
        self.offset = np.zeros(len(size), np.int64)
        self.slot = np.zeros(len(size), np.int64)
        self.first_count = int(first.sum())
        slots: list[SlotPlan] = []
        at = 0
        while at < len(size):
            base = int(start[at]) // PAGE * PAGE
            stop = bisect.bisect_right(end, base + slot_bytes)
            self.offset[at:stop] = start[at:stop] - base
            self.slot[at:stop] = len(slots)
            slots.append(SlotPlan(at, stop, int(end[stop - 1]) - base, int(size[at:stop].max())))
            at = stop
        self.slots = tuple(slots)


def records(
    extent: NDArray[np.int64],
    chunk: NDArray[np.int64],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    digests: NDArray[np.uint8],
) -> bytes:
    """The records of one slot as the writer expects them."""
    packed = np.empty(len(extent), RECORD)
    packed["extent"], packed["chunk"] = extent, chunk
    packed["offset"], packed["length"] = offset, length
    packed["hash"] = digests
    return packed.tobytes()
