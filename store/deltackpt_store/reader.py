"""Reading chunks out of packs: many at once, in parallel, every byte checked against its id.

A read is planned first, with arrays (look up, sort by place, cut into *units* of neighbouring
records), then units are worked off (`read_run`). What does not check out is tried again from
every other place that holds the same chunk before it counts as damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from deltackpt_store import codecs
from deltackpt_store.errors import (
    MENDING,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    UnsupportedFormatError,
)
from deltackpt_store.fetch import Fetcher, Request, Task, unreadable
from deltackpt_store.manifest import ID_BYTES
from deltackpt_store.pack_set import PackSet, is_damage
from deltackpt_store.read_run import Failure, Plan, Run

_SHARING = (codecs.CAST, codecs.ADAM)
"""Chunks with these codecs need many others, and the same ones as their neighbours."""


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
        the processors at hand, at most 8), by 2 * `UNIT_BYTES` (4 MiB) and what the references
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
        failures += Run(self._packs, self._hints, plan, threads).work()
        if failures:
            self._retry(failures)
        for chunk_id, dest in again:
            dest[:] = first[chunk_id]

    def _plan(self, wanted: dict[bytes, memoryview]) -> tuple[Plan, list[Failure]]:
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
        failures: list[Failure] = []
        for i in np.flatnonzero(~usable).tolist():
            if found.packs[i] < 0:
                error = unreadable(ids[i], "no intact pack holds it", "missing-chunk")
            else:
                held = int(found.entries["raw"][i])
                error = unreadable(ids[i], f"it has {held} bytes, not {lengths[i]}")
            failures.append(Failure(ids[i], dests[i], None, error))
        families = self._families(ids, usable & np.isin(found.entries["codec"], _SHARING), usable)
        return Plan(ids, dests, found.names, found.packs, found.entries, usable, families), failures

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

    def _retry(self, failures: list[Failure]) -> None:
        """Try every other place of what failed; raise for what fails everywhere."""
        lost: list[Failure] = []
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

    def _lost(self, lost: list[Failure]) -> DeltackptError:
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


def _flat(dest: memoryview) -> memoryview:
    if dest.readonly or not dest.c_contiguous:
        raise InvalidInputError("a chunk needs writable contiguous memory of its size")
    return dest.cast("B") if dest.nbytes else memoryview(bytearray())
