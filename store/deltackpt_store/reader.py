"""Reading chunks out of packs: many at once, in parallel, every byte checked against its id.

A read is planned first, with arrays (look up, sort by place, cut into *units* of neighbouring
records), then units are worked off by a few threads. Large raw payloads go from the file straight
into the caller's memory; small ones are read as one range into a scratch buffer of bounded size
and scattered; encoded ones are decoded from scratch. What does not check out is tried again from
every other place that holds the same chunk before it counts as damaged.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltackpt_store import codecs, read_crew
from deltackpt_store.errors import (
    MENDING,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fetch import SLACK_BYTES, Fetcher, Task, mismatch, unreadable
from deltackpt_store.manifest import ID_BYTES
from deltackpt_store.pack import Location
from deltackpt_store.pack_set import PackSet, is_damage
from deltackpt_store.read_crew import Helper, Request

UNIT_BYTES = 4 * 1024 * 1024
"""Bytes that one thread reads at a time, about; its scratch buffer is no larger than twice this."""
MAX_THREADS = 8

_DIRECT_BYTES = 32 * 1024  # raw payloads of this size skip the scratch buffer
_ALONE_BYTES = 1024 * 1024  # encoded payloads of this size are read one by one
_GAP_BYTES = 64 * 1024  # neighbours with less between them are read as one range
_PARALLEL_BYTES = 4 * 1024 * 1024  # less is read by the caller's thread alone

_SHARING = (codecs.CAST, codecs.ADAM)
"""Chunks with these codecs need many others, and the same ones as their neighbours."""

__all__ = ["ChunkReader", "Request"]


class _Failure(NamedTuple):
    """A chunk that could not be read from `place` (None: that has no place)."""

    id: bytes
    dest: memoryview
    place: Location | None
    error: DeltackptError


class ChunkReader:
    """Reads chunks of one store. Holds no open file between calls; any number of readers and
    threads may read at the same time. `hints` are packs to look into first; all others are
    considered only for what those do not hold.
    """

    def __init__(self, packs: PackSet, hints: Iterable[str] = ()) -> None:
        self._packs = packs
        self._hints = tuple(hints)

    def read(self, requests: Sequence[Request], threads: int | None = None) -> None:
        """Fill every destination with its chunk, in parallel.

        A request is (chunk id, writable contiguous memory of exactly the chunk's size). One id may
        be asked for many times and is read once. On return every byte has been checked against the
        chunk id. Memory beyond the destinations is bounded, for each of the `threads` (default:
        the processors at hand, at most `MAX_THREADS`), by 2 * `UNIT_BYTES` and what the references
        of one chunk take. Where there is much to decode (`read_crew.CREW_BYTES`), processes of
        their own do a part of it, unless `threads` is given.

        CorruptionError when any chunk is damaged or missing in every place that holds it: all
        others have been read by then, and ``context["ids"]`` is a tuple of the ids that were not;
        their destinations hold anything. UnsupportedFormatError when one is stored in a way that
        this package does not know. StorageError when the files cannot be read at all; then the
        content of all destinations is undefined.
        """
        first: dict[bytes, memoryview] = {}
        again: list[Request] = []
        for chunk_id, dest in requests:
            if dest.format != "B" or dest.ndim != 1 or dest.readonly or not dest.contiguous:
                dest = _flat(dest)
            known = first.setdefault(chunk_id, dest)
            if known is not dest:
                if len(known) != len(dest):
                    raise InvalidInputError(f"chunk {chunk_id.hex()} is asked for in two sizes")
                again.append((chunk_id, dest))
        if not first:
            return
        plan, failures = self._plan(first)
        failures += _Run(self._packs, self._hints, plan, threads).work()
        if failures:
            self._retry(failures)
        for chunk_id, dest in again:
            dest[:] = first[chunk_id]

    def _plan(self, wanted: dict[bytes, memoryview]) -> tuple[_Plan, list[_Failure]]:
        ids, dests = list(wanted), list(wanted.values())
        joined = b"".join(ids)
        if len(joined) != len(ids) * ID_BYTES or {*map(len, ids)} != {ID_BYTES}:
            raise InvalidInputError(f"a chunk id has {ID_BYTES} bytes")
        table = np.frombuffer(joined, np.uint8).reshape(-1, ID_BYTES)
        self._packs.load(self._hints)
        found = self._packs.index.find(table)
        if int(found.packs.min()) < 0:
            self._packs.load_all()
            found = self._packs.index.find(table)
        lengths = np.fromiter(map(len, dests), np.int64, len(dests))
        usable = (found.packs >= 0) & (found.entries["raw"] == lengths)
        failures: list[_Failure] = []
        for i in np.flatnonzero(~usable).tolist():
            if found.packs[i] < 0:
                error = unreadable(ids[i], "no intact pack holds it", "missing-chunk")
            else:
                held = int(found.entries["raw"][i])
                error = unreadable(ids[i], f"it has {held} bytes, not {lengths[i]}")
            failures.append(_Failure(ids[i], dests[i], None, error))
        families = self._families(ids, usable & np.isin(found.entries["codec"], _SHARING), usable)
        return _Plan(
            ids, dests, found.names, found.packs, found.entries, usable, families
        ), failures

    def _families(
        self, ids: Sequence[bytes], coded: NDArray[np.bool_], usable: NDArray[np.bool_]
    ) -> list[list[int]]:
        """Chunks that need the same others to be decoded: read together, these are read once.

        Those are what optimizer steps with the same new first moment make, their rounding to 16
        bits, and that first moment itself; and other tensors with their rounding to 16 bits.
        """
        if not coded.any():
            return []
        index = self._packs.index
        families: dict[bytes, list[int]] = {}
        needed: dict[bytes, bytes] = {}  # chunk -> the family that needs it
        members: set[int] = set()
        for i in np.flatnonzero(coded).tolist():
            place = index.get(ids[i])
            refs = () if place is None else place.refs
            if place is not None and place.codec == codecs.CAST and refs:
                place = index.get(refs[0])
                if place is not None and place.codec == codecs.ADAM:
                    refs = place.refs
            if not refs:
                continue
            if place is not None and place.codec == codecs.ADAM:
                refs = refs[-1:]
            families.setdefault(refs[0], []).append(i)
            members.add(i)
            for ref in refs:
                needed.setdefault(ref, refs[0])
        for i, chunk_id in enumerate(ids):
            if chunk_id in needed and usable[i] and i not in members:
                families[needed[chunk_id]].insert(0, i)
        return list(families.values())

    def _retry(self, failures: list[_Failure]) -> None:
        """Try every other place of what failed; raise for what fails everywhere."""
        lost: list[_Failure] = []
        with Fetcher(self._packs) as fetcher:
            for failure in failures:
                tried = failure.place and (failure.place.pack, failure.place.offset)
                for place in fetcher.places(failure.id):
                    if (place.pack, place.offset) == tried or place.raw != len(failure.dest):
                        continue
                    try:
                        fetcher.fetch(Task(failure.id, failure.dest, place))
                        break
                    except DeltackptError as error:
                        if not is_damage(error):
                            raise
                else:
                    lost.append(failure)
        if lost:
            raise self._lost(lost)

    def _lost(self, lost: list[_Failure]) -> DeltackptError:
        """The error for chunks that failed everywhere: damage, unless an upgrade would help."""
        errors = [failure.error for failure in lost]
        if any(failure.place is None for failure in lost):
            errors += self._packs.damaged.values()  # any of these may hold what is missing
        newer = next((e for e in errors if isinstance(e, UnsupportedFormatError)), None)
        cause = newer or errors[0]
        why = cause.message
        if newer is None and len(errors) > len(lost):
            why += f"; {errors[len(lost)].message}"
        some = f"{len(lost)} chunks cannot be read, among them"
        return (UnsupportedFormatError if newer else CorruptionError)(
            f"{'1 chunk cannot be read' if len(lost) == 1 else some}: {why}",
            kind=newer.kind if newer else "damaged-chunks",
            hint=cause.hint or MENDING,
            ids=tuple(failure.id for failure in lost),
            reasons=tuple(failure.error.message for failure in lost[:20]),
        )


class _Plan:
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


class _Run:
    """One call of `read` being worked off by several threads, or by helper processes and one."""

    def __init__(
        self, packs: PackSet, hints: Sequence[str], plan: _Plan, threads: int | None
    ) -> None:
        self._packs = packs
        self._hints = hints
        self._plan = plan
        self._left = deque(plan.units)
        self._own: list[tuple[int, int]] = []  # too large for a helper, or given back
        self._threads = min(thread_count(threads, plan.bytes, len(plan.ids)), len(plan.units))
        self._helped = threads is None and plan.decoded >= read_crew.CREW_BYTES
        self._lock = threading.Lock()
        self._failures: list[_Failure] = []
        self._fatal: BaseException | None = None

    def work(self) -> list[_Failure]:
        """Read everything; return what is damaged where it was looked for."""
        crew = read_crew.hire(self._packs, self._hints) if self._helped else []
        loops = [partial(self._lead, helper) for helper in crew]
        loops = loops or [self._loop] * (self._threads - 1)
        others: list[threading.Thread] = []
        try:
            with contextlib.suppress(RuntimeError):  # no more threads: without the others then
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
        """Units, or parts of them, of so many bytes together."""
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

    def _read_unit(self, fetcher: Fetcher, first: int, end: int) -> list[_Failure]:
        """Read neighbouring records of one pack; return those that are damaged."""
        family = first >= self._plan.alone
        if end - first > 1 and not family:
            try:
                if self._plan.direct[first]:
                    return self._read_direct(fetcher, first, end)
                return self._read_scattered(fetcher, first, end)
            except (CorruptionError, StorageError):
                pass  # once more, one by one, to tell which of them it is
        failures: list[_Failure] = []
        for i in range(first, end):
            task = self._plan.task(i)
            try:
                fetcher.fetch(task)
            except DeltackptError as error:
                if not is_damage(error):
                    raise
                failures.append(_Failure(task.id, task.dest, task.place, error))
            else:
                if family:
                    fetcher.lend(task)
        fetcher.end_loan()
        return failures

    def _read_direct(self, fetcher: Fetcher, first: int, end: int) -> list[_Failure]:
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

    def _read_scattered(self, fetcher: Fetcher, first: int, end: int) -> list[_Failure]:
        """One range of the file into scratch, then each chunk to its destination."""
        plan = self._plan
        ids, dests = plan.ids, plan.dests
        start = plan.payload[first] if plan.codec[first] == codecs.RAW else plan.offset[first]
        length = plan.payload[end - 1] + plan.stored[end - 1] - start
        scratch = fetcher.room(length, UNIT_BYTES)
        fetcher.fill(plan.names[plan.packs[first]], [scratch], start, length)
        failures: list[_Failure] = []
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
                failures.append(_Failure(task.id, task.dest, task.place, error))
        return failures

    def _mismatch(self, i: int) -> _Failure:
        task = self._plan.task(i)
        return _Failure(task.id, task.dest, task.place, mismatch(task.id, task.place.pack))


def thread_count(threads: int | None, total: int, chunks: int) -> int:
    """Threads to read `total` bytes in `chunks` with, when `threads` does not say."""
    if threads is not None:
        return max(1, threads)
    if total < _PARALLEL_BYTES:
        return 1
    if total < chunks * _DIRECT_BYTES:
        return 2  # small chunks keep the interpreter busy: more threads only wait for each other
    return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0))))


def _flat(dest: memoryview) -> memoryview:
    if dest.readonly or not dest.c_contiguous:
        raise InvalidInputError("a chunk needs writable contiguous memory of its size")
    return dest.cast("B") if dest.nbytes else memoryview(bytearray())
