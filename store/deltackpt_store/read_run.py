"""Working off a planned read: units of neighbouring records, by threads or with helper processes.

Large raw payloads go from the file straight into the caller's memory; small ones are read as one
range into a scratch buffer of bounded size and scattered; encoded ones are decoded from scratch.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltackpt_store import codecs, read_crew
from deltackpt_store.cores import usable_cores
from deltackpt_store.errors import CorruptionError, DeltackptError, StorageError
from deltackpt_store.fetch import SLACK_BYTES, Fetcher, Request, Task, mismatch
from deltackpt_store.pack import Location
from deltackpt_store.pack_set import PackSet, is_damage
from deltackpt_store.read_crew import Helper

UNIT_BYTES = 4 * 1024 * 1024
"""Bytes that one thread reads at a time, about; its scratch buffer is no larger than twice this."""
MAX_THREADS = 8

_DIRECT_BYTES = 32 * 1024  # raw payloads of this size skip the scratch buffer
_ALONE_BYTES = 1024 * 1024  # encoded payloads of this size are read one by one
_GAP_BYTES = 64 * 1024  # neighbours with less between them are read as one range
_PARALLEL_BYTES = 4 * 1024 * 1024  # less is read by the caller's thread alone


class Failure(NamedTuple):
    """A chunk that could not be read from `place` (None: that has no place)."""

    id: bytes
    dest: memoryview
    place: Location | None
    error: DeltackptError


class Plan:
    """All distinct chunks of one read in file order, as parallel lists, cut into units."""

    def __init__(
        self,
        ids: list[bytes],
        dests: list[memoryview],
        names: list[str],
        packs: NDArray[np.int64],
        entries: NDArray[Any],
        usable: NDArray[np.bool_],
        families: list[list[int]],
    ) -> None:
        raw = entries["codec"] == codecs.RAW
        offset = entries["offset"].astype(np.int64)
        payload = offset + entries["header"]
        stored, size = entries["stored"].astype(np.int64), entries["raw"].astype(np.int64)
        # Raw payloads prove themselves by their id: their record's front is not read at all.
        start = np.where(raw, payload, offset)
        together = np.array([i for family in families for i in family], np.int64)
        usable = usable.copy()
        usable[together] = False
        order = np.lexsort((start, packs))
        order = order[usable[order]]
        direct = raw & (size >= _DIRECT_BYTES)
        alone = (stored > size + SLACK_BYTES) | (raw & (stored != size))
        alone |= ~direct & (payload + stored - start > _ALONE_BYTES)

        first = len(order)
        cuts = _cut(packs[order], start[order], (payload + stored)[order], direct[order],
                    alone[order])  # fmt: skip
        order = np.concatenate([order, together])
        chosen: list[int] = order.tolist()
        self.names = names
        self.ids = [ids[i] for i in chosen]
        self.dests = [dests[i] for i in chosen]
        self.packs: list[int] = packs[order].tolist()
        self.offset: list[int] = offset[order].tolist()
        self.payload: list[int] = payload[order].tolist()
        self.stored: list[int] = stored[order].tolist()
        self.codec: list[int] = entries["codec"][order].tolist()
        self.direct: list[bool] = direct[order].tolist()
        self.bytes = int(stored[order].sum())
        self.decoded = int(size[order].sum(where=~raw[order]))
        self.alone = first
        """From this chunk on units are families, read one by one."""
        self.units = cuts
        for family in families:
            self.units.append((first, first + len(family)))
            first += len(family)

    def location(self, i: int) -> Location:
        """The place of chunk `i`, for reading it by itself."""
        return Location(
            self.names[self.packs[i]],
            self.offset[i],
            self.payload[i] - self.offset[i],
            self.stored[i],
            len(self.dests[i]),
            self.codec[i],
        )

    def task(self, i: int) -> Task:
        return Task(self.ids[i], self.dests[i], self.location(i))


def _cut(
    packs: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    direct: NDArray[np.bool_],
    alone: NDArray[np.bool_],
) -> list[tuple[int, int]]:
    """(first, end) of runs of chunks that are near each other and read in the same manner."""
    if not len(packs):
        return []
    gap = start[1:] - end[:-1]
    cut = (packs[1:] != packs[:-1]) | (direct[1:] != direct[:-1]) | alone[1:] | alone[:-1]
    cut |= (gap < 0) | (gap > _GAP_BYTES) | (start[1:] // UNIT_BYTES != start[:-1] // UNIT_BYTES)
    edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(packs)]
    return list(pairwise(edges))


class Run:
    """One call of `read` being worked off by several threads, or by helper processes and one."""

    def __init__(
        self, packs: PackSet, hints: Sequence[str], plan: Plan, threads: int | None
    ) -> None:
        self._packs = packs
        self._hints = hints
        self._plan = plan
        self._left = deque(plan.units)
        self._own: list[tuple[int, int]] = []  # too large for a helper, or given back
        self._threads = min(thread_count(threads, plan.bytes, len(plan.ids)), len(plan.units))
        self._helped = threads is None and plan.decoded >= read_crew.CREW_BYTES
        self._lock = threading.Lock()
        self._failures: list[Failure] = []
        self._fatal: BaseException | None = None

    def work(self) -> list[Failure]:
        """Read everything; return what is damaged where it was looked for."""
        crew = read_crew.hire(self._packs, self._hints) if self._helped else []
        loops = [partial(self._lead, helper) for helper in crew]
        loops = loops or [self._loop] * (self._threads - 1)
        others: list[threading.Thread] = []
        try:
            with contextlib.suppress(RuntimeError):  # no more threads: go on with fewer
                for loop in loops:
                    other = threading.Thread(target=loop, name="deltackpt-read", daemon=True)
                    other.start()
                    others.append(other)
            self._loop()
            for helper in crew:
                if not helper.ready:
                    helper.end()
            for other in others:
                other.join()
            self._loop()  # what came back
        finally:
            self._stop(None)
            for helper in crew:
                helper.end()
            for other in others:
                other.join()
            for helper in crew:
                helper.close()
        if self._fatal is not None:
            raise self._fatal
        return self._failures

    def _stop(self, error: BaseException | None) -> None:
        with self._lock:
            self._fatal = self._fatal or error
            self._left.clear()
            self._own.clear()

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            if self._own:
                return self._own.pop()
            return self._left.popleft() if self._left else None

    def _lead(self, helper: Helper) -> None:
        try:
            helper.lead(self._take, self._requests, self._back)
        except BaseException as error:
            self._stop(error)

    def _take(self, limit: int) -> list[tuple[int, int]] | None:
        """Units, or parts of them, of at most that many bytes together."""
        taken: list[tuple[int, int]] = []
        with self._lock:
            while self._left:
                first, end = self._left.popleft()
                stop, room = first, limit
                while stop < end and len(self._plan.dests[stop]) <= room:
                    room -= len(self._plan.dests[stop])
                    stop += 1
                if stop > first:
                    taken.append((first, stop))
                elif not taken:
                    self._own.append((first, end))
                    continue
                if stop < end:
                    self._left.appendleft((stop, end))
                    break
                limit = room
        return taken or None

    def _requests(self, part: list[tuple[int, int]]) -> list[Request]:
        ids, dests = self._plan.ids, self._plan.dests
        return [(ids[i], dests[i]) for first, end in part for i in range(first, end)]

    def _back(self, part: list[tuple[int, int]]) -> None:
        with self._lock:
            self._own += part

    def _loop(self) -> None:
        try:
            with Fetcher(self._packs) as fetcher:
                while (unit := self._next()) is not None:
                    failures = self._read_unit(fetcher, *unit)
                    if failures:
                        with self._lock:
                            self._failures += failures
        except BaseException as error:
            self._stop(error)

    def _read_unit(self, fetcher: Fetcher, first: int, end: int) -> list[Failure]:
        """Read neighbouring records of one pack; return those that are damaged."""
        family = first >= self._plan.alone
        if end - first > 1 and not family:
            try:
                if self._plan.direct[first]:
                    return self._read_direct(fetcher, first, end)
                return self._read_scattered(fetcher, first, end)
            except (CorruptionError, StorageError):
                pass  # once more, one by one, to find out which of them it is
        failures: list[Failure] = []
        for i in range(first, end):
            task = self._plan.task(i)
            try:
                fetcher.fetch(task)
            except DeltackptError as error:
                if not is_damage(error):
                    raise
                failures.append(Failure(task.id, task.dest, task.place, error))
            else:
                if family:
                    fetcher.lend(task)
        fetcher.end_loan()
        return failures

    def _read_direct(self, fetcher: Fetcher, first: int, end: int) -> list[Failure]:
        """One range of the file into the destinations, what lies between them into scratch."""
        plan = self._plan
        ids, dests, payloads = plan.ids, plan.dests, plan.payload
        start = position = payloads[first]
        scratch = fetcher.room(_GAP_BYTES, UNIT_BYTES)
        buffers: list[memoryview] = []
        for i in range(first, end):
            gap = payloads[i] - position
            if gap:
                buffers.append(scratch[:gap])
            buffers.append(dests[i])
            position = payloads[i] + len(dests[i])
        fetcher.fill(plan.names[plan.packs[first]], buffers, start, position - start)
        return [self._mismatch(i) for i in range(first, end) if blake3(dests[i]).digest() != ids[i]]

    def _read_scattered(self, fetcher: Fetcher, first: int, end: int) -> list[Failure]:
        """One range of the file into scratch, then each chunk to its destination."""
        plan = self._plan
        ids, dests = plan.ids, plan.dests
        start = plan.payload[first] if plan.codec[first] == codecs.RAW else plan.offset[first]
        length = plan.payload[end - 1] + plan.stored[end - 1] - start
        scratch = fetcher.room(length, UNIT_BYTES)
        fetcher.fill(plan.names[plan.packs[first]], [scratch], start, length)
        failures: list[Failure] = []
        for i in range(first, end):
            dest = dests[i]
            at = plan.payload[i] - start
            payload = scratch[at : at + plan.stored[i]]
            if plan.codec[i] == codecs.RAW:
                dest[:] = payload
                if blake3(dest).digest() != ids[i]:
                    failures.append(self._mismatch(i))
                continue
            task = plan.task(i)
            try:
                fetcher.decode(task, scratch[plan.offset[i] - start : at], payload)
            except DeltackptError as error:
                if not is_damage(error):
                    raise
                failures.append(Failure(task.id, task.dest, task.place, error))
        return failures

    def _mismatch(self, i: int) -> Failure:
        task = self._plan.task(i)
        return Failure(task.id, task.dest, task.place, mismatch(task.id, task.place.pack))


def thread_count(threads: int | None, total: int, chunks: int) -> int:
    """Threads to read `total` bytes in `chunks` with, when `threads` does not say."""
    if threads is not None:
        return max(1, threads)
    if total < _PARALLEL_BYTES:
        return 1
    if total < chunks * _DIRECT_BYTES:
        return 2  # small chunks keep the interpreter busy: more threads only wait for each other
    return min(MAX_THREADS, max(2, usable_cores()))
