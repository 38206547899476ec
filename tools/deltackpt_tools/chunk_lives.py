"""From when to when each stored chunk is needed, learned from what changes between two steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.intp]


class Change(NamedTuple):
    """What a step needs that the one before did not, and the other way round: distinct places."""

    born: Places
    gone: Places


class Lives:
    """Which chunks are needed now, by themselves or because others are coded against them.

    Chunks are numbered; `sources` and `targets` are the two ends of each reference. About 25 bytes
    per chunk and 16 per reference.
    """

    def __init__(self, size: int, sources: Places, targets: Places) -> None:
        order = np.argsort(sources, kind="stable")
        sources, targets = _without_circles(size, sources[order], targets[order])
        self._targets = targets
        self._first = np.searchsorted(sources, np.arange(size + 1))
        self._uses = np.zeros(size, np.int64)
        self._live = np.zeros(size, np.bool_)

    def grow(self, count: int) -> None:
        """Append that many chunks, coded against nothing."""
        self._first = np.concatenate([self._first, np.full(count, self._first[-1])])
        self._uses = np.concatenate([self._uses, np.zeros(count, np.int64)])
        self._live = np.concatenate([self._live, np.zeros(count, np.bool_)])

    def move(self, less: Places, more: Places) -> Change:
        """One use less of each of `less`, one more of each of `more` (which may repeat)."""
        live = self._live
        touched: list[Places] = []
        before: list[NDArray[np.bool_]] = []
        while len(less) or len(more):
            places, inverse = np.unique(np.concatenate([less, more]), return_inverse=True)
            change = np.bincount(inverse[len(less) :], minlength=len(places))
            change -= np.bincount(inverse[: len(less)], minlength=len(places))
            self._uses[places] += change
            touched.append(places)
            before.append(live[places])
            needed = self._uses[places] > 0
            born, gone = places[needed & ~before[-1]], places[~needed & before[-1]]
            live[places] = needed
            less, more = self._references(gone), self._references(born)
        if not touched:
            return Change(np.empty(0, np.intp), np.empty(0, np.intp))
        # What went and came back on the way has not changed: what it was at first is what counts.
        places, at = np.unique(np.concatenate(touched), return_index=True)
        first = np.concatenate(before)[at]
        return Change(places[live[places] & ~first], places[~live[places] & first])

    def _references(self, places: Places) -> Places:
        if not len(self._targets) or not len(places):
            return np.empty(0, np.intp)
        low = self._first[places]
        lengths = self._first[places + 1] - low
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self._targets[np.repeat(low, lengths) + within]


def _without_circles(size: int, sources: Places, targets: Places) -> tuple[Places, Places]:
    """The references but those of chunks that only lead into a circle, which nobody can decode."""
    open_ = np.zeros(size, np.bool_)
    open_[sources] = True
    while len(sources):
        blocked = np.zeros(size, np.bool_)
        blocked[sources[open_[targets]]] = True
        if np.array_equal(blocked, open_):
            keep = ~open_[sources]
            return sources[keep], targets[keep]
        open_ = blocked
    return sources, targets
