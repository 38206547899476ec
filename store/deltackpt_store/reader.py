"""Reading chunks out of packs: many at once, in parallel, every byte checked against its id.

A read is planned first (look up, sort by place, cut into *units* of neighbouring records), then
units are worked off by a few threads. Large raw payloads go from the file straight into the
caller's memory; small ones are read as one range into a scratch buffer of bounded size and
scattered; encoded ones are decoded from scratch. What does not check out is tried again from every
other place that holds the same chunk before it counts as damaged.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from deltackpt_store import codecs
from deltackpt_store.errors import CorruptionError, DeltackptError, InvalidInputError
from deltackpt_store.fileio import FileIO
from deltackpt_store.manifest import ID_BYTES
from deltackpt_store.oserror import storage_error
from deltackpt_store.pack import (
    Location,
    check_payload,
    decode_record,
    pack_path,
)
from deltackpt_store.pack_set import PackSet, is_damage

MAX_DEPTH = 8
"""References of references of ... a chunk that a reader follows."""
UNIT_BYTES = 4 * 1024 * 1024
"""Bytes that one thread reads at a time; also the size of its scratch buffer."""
MAX_THREADS = 8

_DIRECT_BYTES = 32 * 1024  # raw payloads of this size skip the scratch buffer
_GAP_BYTES = 64 * 1024  # neighbours with less between them are read as one range
_UNIT_RECORDS = 1024
_PARALLEL_BYTES = 4 * 1024 * 1024  # less is read by the caller's thread alone
_REFERENCE_CACHE = 16 * 1024 * 1024
_REFERENCE_BYTES = 512 * 1024 * 1024  # raw bytes of references read for one chunk
_REFERENCE_READS = 4096  # references read for one chunk, all depths together
_HANDLES = 8
_HEAD_BYTES = 64 * 1024  # the front of an encoded record is never longer
_SLACK_BYTES = 4096  # no payload is larger than its chunk by more than this

Request = tuple[bytes, memoryview]


class _Task(NamedTuple):
    """One distinct chunk of a read: where it goes, and where it lies."""

    id: bytes
    dest: memoryview
    place: Location


class _Failure(NamedTuple):
    id: bytes
    dest: memoryview
    place: Location | None
    error: DeltackptError


class ChunkReader:
    """Reads chunks of one store. Holds no open file between calls; any number of readers and
    threads may read at the same time. `packs` are looked into first; all others only for what
    those do not hold.
    """

    def __init__(self, packs: PackSet, hints: Iterable[str] = ()) -> None:
        self._packs = packs
        self._hints = tuple(hints)

    def read(self, requests: Sequence[Request], threads: int | None = None) -> None:
        """Fill every destination with its chunk, in parallel.

        A request is (chunk id, writable contiguous memory of exactly the chunk's size). One id may
        be asked for many times and is read once. On return every byte has been checked against the
        chunk id. Memory beyond the destinations is bounded by `UNIT_BYTES` (and the references of
        one chunk) for each of the `threads` (default: the processors at hand, at most
        `MAX_THREADS`).

        CorruptionError when any chunk is damaged or missing in every place that holds it: all
        others have been read by then, and ``context["ids"]`` is a tuple of the ids that were not;
        their destinations hold anything. StorageError when the files cannot be read at all, with
        the content of all destinations undefined.
        """
        first: dict[bytes, memoryview] = {}
        again: list[Request] = []
        for chunk_id, dest in requests:
            flat = _flat(dest)
            if chunk_id in first and len(first[chunk_id]) == len(flat):
                again.append((chunk_id, flat))
            elif chunk_id in first or len(chunk_id) != ID_BYTES:
                raise InvalidInputError(
                    f"chunk {chunk_id.hex()} is asked for in two sizes, or has no proper id"
                )
            else:
                first[chunk_id] = flat
        tasks, failures = self._locate(first)
        if tasks:
            failures += _Run(self._packs, tasks, threads).work()
        if failures:
            self._retry(failures)
        for chunk_id, dest in again:
            dest[:] = first[chunk_id]

    def _locate(self, wanted: dict[bytes, memoryview]) -> tuple[list[_Task], list[_Failure]]:
        ids = list(wanted)
        places = self._look_up(ids, self._hints)
        missing = [i for i, place in enumerate(places) if place is None]
        if missing:
            found = self._look_up([ids[i] for i in missing], None)
            for i, place in zip(missing, found, strict=True):
                places[i] = place
        tasks: list[_Task] = []
        failures: list[_Failure] = []
        for chunk_id, place in zip(ids, places, strict=True):
            dest = wanted[chunk_id]
            if place is None:
                error = _damaged(chunk_id, "no intact pack holds it", "missing-chunk")
                failures.append(_Failure(chunk_id, dest, None, error))
            elif place.raw != len(dest):
                error = _damaged(chunk_id, f"it has {place.raw} bytes, not {len(dest)}")
                failures.append(_Failure(chunk_id, dest, place, error))
            else:
                tasks.append(_Task(chunk_id, dest, place))
        return tasks, failures

    def _look_up(self, ids: list[bytes], packs: Iterable[str] | None) -> list[Location | None]:
        if packs is None:
            self._packs.load_all()
        else:
            self._packs.load(packs)
        table = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES)
        return self._packs.index.get_many(table)

    def _retry(self, failures: list[_Failure]) -> None:
        """Try every other place of what failed; CorruptionError for what fails everywhere."""
        self._packs.load_all()
        lost: list[_Failure] = []
        with _Worker(self._packs) as worker:
            for failure in failures:
                for place in self._others(failure):
                    try:
                        worker.read_one(_Task(failure.id, failure.dest, place))
                        break
                    except DeltackptError as error:
                        if not is_damage(error):
                            raise
                else:
                    lost.append(failure)
        if lost:
            raise CorruptionError(
                f"{len(lost)} chunks cannot be read, first: {lost[0].error.message}",
                kind="damaged-chunks",
                hint="restore another step, or verify the store to see what is hit",
                ids=tuple(failure.id for failure in lost),
                reasons=tuple(failure.error.message for failure in lost[:20]),
            )

    def _others(self, failure: _Failure) -> Iterator[Location]:
        known = self._packs.index.locations(failure.id)
        for place in [*known, *self._packs.salvage(failure.id)]:
            if place != failure.place and place.raw == len(failure.dest):
                yield place


class _Run:
    """One call of `read` being worked off by several threads."""

    def __init__(self, packs: PackSet, tasks: list[_Task], threads: int | None) -> None:
        self._packs = packs
        self._units = iter(_units(tasks))
        total = sum(task.place.stored for task in tasks)
        self._threads = _thread_count(threads, total)
        self._lock = threading.Lock()
        self._failures: list[_Failure] = []
        self._fatal: BaseException | None = None

    def work(self) -> list[_Failure]:
        """Read all tasks; return those that are damaged where they were looked for."""
        helpers = [
            threading.Thread(target=self._loop, name="deltackpt-read", daemon=True)
            for _ in range(self._threads - 1)
        ]
        for helper in helpers:
            helper.start()
        try:
            self._loop()
        finally:
            self._stop(None)
            for helper in helpers:
                helper.join()
        if self._fatal is not None:
            raise self._fatal
        return self._failures

    def _stop(self, error: BaseException | None) -> None:
        with self._lock:
            self._fatal = self._fatal or error
            self._units = iter(())

    def _next(self) -> list[_Task] | None:
        with self._lock:
            return next(self._units, None)

    def _loop(self) -> None:
        try:
            with _Worker(self._packs) as worker:
                while (unit := self._next()) is not None:
                    failures = worker.read_unit(unit)
                    if failures:
                        with self._lock:
                            self._failures += failures
        except BaseException as error:
            self._stop(error)


class _Worker:
    """What one thread needs to read: open files, scratch memory, references just read."""

    def __init__(self, packs: PackSet) -> None:
        self._packs = packs
        self._io: FileIO = packs.io
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._scratch = bytearray()
        self._references: OrderedDict[bytes, bytearray] = OrderedDict()
        self._cached = 0

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._handles:
            self._io.close(self._handles.popitem()[1])

    def read_unit(self, unit: list[_Task]) -> list[_Failure]:
        """Read neighbouring records of one pack; return those that are damaged."""
        if len(unit) > 1:
            try:
                if unit[0].place.codec == codecs.RAW and len(unit[0].dest) >= _DIRECT_BYTES:
                    self._read_direct(unit)
                else:
                    return self._read_scattered(unit)
            except (CorruptionError, OSError):
                pass  # once more, one by one, to tell which of them it is
            else:
                return _check(unit)
        failures: list[_Failure] = []
        for task in unit:
            try:
                self.read_one(task)
            except DeltackptError as error:
                if not is_damage(error):
                    raise
                failures.append(_Failure(task.id, task.dest, task.place, error))
        return failures

    def _read_direct(self, unit: list[_Task]) -> None:
        """One range of the file into the destinations, what lies between them into scratch."""
        buffers: list[memoryview] = []
        start = position = unit[0].place.payload
        scratch = memoryview(self._room(_GAP_BYTES))
        for task in unit:
            gap = task.place.payload - position
            if gap:
                buffers.append(scratch[:gap])
            buffers.append(task.dest)
            position = task.place.payload + len(task.dest)
        self._fill(unit[0].place.pack, buffers, start, position - start)

    def _read_scattered(self, unit: list[_Task]) -> list[_Failure]:
        start = _start(unit[0].place)
        end = max(task.place.payload + task.place.stored for task in unit)
        scratch = memoryview(self._room(end - start))[: end - start]
        self._fill(unit[0].place.pack, [scratch], start, end - start)
        failures: list[_Failure] = []
        for task in unit:
            place = task.place
            at = place.payload - start
            payload = scratch[at : at + place.stored]
            if place.codec == codecs.RAW:
                task.dest[:] = payload
                if blake3(task.dest).digest() != task.id:
                    failures.append(_mismatch(task))
            else:
                record = scratch[place.offset - start : at]
                try:
                    self._decode(task, record, payload, 0, _Budget())
                except DeltackptError as error:
                    if not is_damage(error):
                        raise
                    failures.append(_Failure(task.id, task.dest, place, error))
        return failures

    def read_one(self, task: _Task) -> None:
        """Read one chunk from its place and check it (CorruptionError, StorageError)."""
        self._read_at(task, 0, _Budget())

    def _read_at(self, task: _Task, depth: int, budget: _Budget) -> None:
        place = task.place
        if place.codec == codecs.RAW:
            if place.stored != len(task.dest):
                raise _damaged(task.id, "its record declares two lengths")
            self._fill(place.pack, [task.dest], place.payload, place.stored)
            if blake3(task.dest).digest() != task.id:
                raise _mismatch(task).error
            return
        if place.stored > len(task.dest) + _SLACK_BYTES or place.header > _HEAD_BYTES:
            raise _damaged(task.id, "its record declares impossible lengths")
        data = memoryview(bytearray(place.header + place.stored))
        self._fill(place.pack, [data], place.offset, len(data))
        self._decode(task, data[: place.header], data[place.header :], depth, budget)

    def _decode(
        self, task: _Task, front: memoryview, payload: memoryview, depth: int, budget: _Budget
    ) -> None:
        """Decode a record (its front, its payload) into its destination, and check the result."""
        place = task.place
        path = pack_path(self._packs.root, place.pack)
        head = decode_record(front, path, place.offset)
        declared = (head.id, head.codec, head.skip, head.raw, head.stored)
        if declared != (task.id, place.codec, place.header, len(task.dest), place.stored):
            raise _damaged(task.id, f"the table of {path} does not match its record")
        check_payload(head, payload, path)
        references = [self._reference(needed, depth + 1, budget) for needed in head.refs]
        codecs.decode(head.codec, head.params, payload, task.dest, references)
        if blake3(task.dest).digest() != task.id:
            raise _mismatch(task).error

    def _reference(self, chunk_id: bytes, depth: int, budget: _Budget) -> memoryview:
        """Raw bytes of a chunk that another is coded against, from any place that holds it."""
        if depth > MAX_DEPTH:
            raise _damaged(chunk_id, f"it is a reference {depth} deep")
        kept = self._references.get(chunk_id)
        if kept is not None:
            self._references.move_to_end(chunk_id)
            return memoryview(kept)
        error: DeltackptError = _damaged(chunk_id, "no intact pack holds it", "missing-chunk")
        for place in self._places(chunk_id):
            budget.take(place.raw, chunk_id)
            data = bytearray(place.raw)
            try:
                self._read_at(_Task(chunk_id, memoryview(data), place), depth, budget)
            except DeltackptError as failure:
                if not is_damage(failure):
                    raise
                error = failure
            else:
                self._keep(chunk_id, data)
                return memoryview(data)
        raise error

    def _places(self, chunk_id: bytes) -> Iterator[Location]:
        """Every place that holds a chunk; more effort is spent only when the first ones fail."""
        seen = self._packs.index.locations(chunk_id)
        yield from seen
        self._packs.load_all()
        for place in [*self._packs.index.locations(chunk_id), *self._packs.salvage(chunk_id)]:
            if place not in seen:
                yield place

    def _keep(self, chunk_id: bytes, data: bytearray) -> None:
        if len(data) > _REFERENCE_CACHE // 4:
            return
        self._references[chunk_id] = data
        self._cached += len(data)
        while self._cached > _REFERENCE_CACHE:
            self._cached -= len(self._references.popitem(last=False)[1])

    def _fill(self, pack: str, buffers: list[memoryview], offset: int, length: int) -> None:
        path = pack_path(self._packs.root, pack)
        try:
            got = self._io.read_into(self._open(pack, path), buffers, offset)
        except OSError as error:
            raise storage_error(error, "read the pack", path) from error
        if got != length:
            raise CorruptionError(f"pack {path} is cut off", kind="pack", path=path)

    def _open(self, pack: str, path: str) -> int:
        handle = self._handles.get(pack)
        if handle is None:
            while len(self._handles) >= _HANDLES:
                self._io.close(self._handles.popitem(last=False)[1])
            handle = self._handles[pack] = self._io.open(path)
        return handle

    def _room(self, length: int) -> bytearray:
        if len(self._scratch) < length:
            self._scratch = bytearray(max(length, UNIT_BYTES + _GAP_BYTES))
        return self._scratch


class _Budget:
    """Bounds what decoding one chunk may cost, whatever its references claim."""

    def __init__(self) -> None:
        self.bytes = _REFERENCE_BYTES
        self.reads = _REFERENCE_READS

    def take(self, size: int, chunk_id: bytes) -> None:
        self.bytes -= size
        self.reads -= 1
        if self.bytes < 0 or self.reads < 0:
            raise _damaged(chunk_id, "a chunk is coded against too much data")


def _units(tasks: list[_Task]) -> Iterator[list[_Task]]:
    """Cut the tasks into lists of neighbours in one pack that are read in the same manner."""
    tasks.sort(key=lambda task: (task.place.pack, _start(task.place)))
    unit: list[_Task] = []
    pack, direct, start, end = "", False, 0, 0
    for task in tasks:
        place = task.place
        begin, stop = _start(place), place.payload + place.stored
        straight = place.codec == codecs.RAW and place.raw >= _DIRECT_BYTES
        odd = place.stored > place.raw + _SLACK_BYTES or (
            place.codec == codecs.RAW and place.stored != place.raw
        )
        if unit and (
            odd
            or place.pack != pack
            or straight != direct
            or begin < end
            or begin - end > _GAP_BYTES
            or stop - start > UNIT_BYTES
            or len(unit) >= _UNIT_RECORDS
        ):
            yield unit
            unit = []
        if not unit:
            pack, direct, start = place.pack, straight, begin
        unit.append(task)
        end = stop
        if odd:
            yield unit
            unit = []
    if unit:
        yield unit


def _start(place: Location) -> int:
    """First byte that reading a record needs: raw payloads prove themselves without the front."""
    return place.payload if place.codec == codecs.RAW else place.offset


def _check(unit: list[_Task]) -> list[_Failure]:
    return [_mismatch(task) for task in unit if blake3(task.dest).digest() != task.id]


def _mismatch(task: _Task) -> _Failure:
    error = _damaged(task.id, f"its bytes in pack {task.place.pack} do not have that id")
    return _Failure(task.id, task.dest, task.place, error)


def _damaged(chunk_id: bytes, reason: str, kind: str = "damaged-chunk") -> CorruptionError:
    return CorruptionError(
        f"chunk {chunk_id.hex()} is unreadable: {reason}", kind=kind, id=chunk_id.hex()
    )


def _thread_count(threads: int | None, total: int) -> int:
    if threads is not None:
        return max(1, threads)
    if total < _PARALLEL_BYTES:
        return 1
    return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0))))


def _flat(dest: memoryview) -> memoryview:
    if dest.readonly or not dest.c_contiguous or not dest.nbytes:
        raise InvalidInputError("a chunk needs writable contiguous memory of its size")
    return dest if dest.ndim == 1 and dest.format == "B" else dest.cast("B")
