"""What a save consists of while it is being made: chunk ids and the packs that hold them.

A :class:`ChunkTable` derives from the table of the save (or commit) it is relative to and shares
every array it does not change, so a save costs memory for the extents that changed only (68 bytes
per chunk of those), and nothing accumulates from save to save.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deltackpt_store import codecs
from deltackpt_store.fetch import MAX_DEPTH
from deltackpt_store.index import ChunkIndex, MemoryIndex
from deltackpt_store.manifest import ID_BYTES, Ids, Layout, Snapshot
from deltackpt_store.protocol import extent_keys

_NOWHERE = 0


class ChunkTable:
    """Ids of all chunks of one save, and how many of them each pack holds.

    Used by one thread. Once :meth:`freeze` was called its arrays are never written again.
    """

    def __init__(self, layout: Layout) -> None:
        """A table with every chunk missing."""
        self.layout = layout
        self.chunks: dict[int, Ids] = {}
        self._bases: dict[int, Ids] = {}
        self._where: dict[int, NDArray[np.uint32]] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._counts: dict[int, int] = {}
        self._next = _NOWHERE + 1
        self._own: set[int] = set()
        self._missing = 0
        for extent, spec in enumerate(layout.extents):
            if not spec.inline:
                self._add_empty(extent, spec.chunk_count)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, footers: MemoryIndex) -> ChunkTable:
        """The table of a committed step; `footers` knows the packs of that step.

        Chunks that are in none of them (a damaged footer) are taken to need every pack of the step.
        """
        table = cls(snapshot.layout)
        for extent, ids in snapshot.chunks.items():
            found = footers.find(ids)
            plain = (found.packs >= 0) & (found.entries["refs"] == 0)
            where = np.zeros(len(ids), np.uint32)
            numbers = np.zeros(len(found.names), np.uint32)
            for pack in map(int, np.unique(found.packs[plain])):
                numbers[pack] = table._number((found.names[pack],))
            where[plain] = numbers[found.packs[plain]]
            for row in np.flatnonzero(~plain).tolist():
                packs = packs_of(footers, ids[row].tobytes()) or snapshot.packs
                where[row] = table._number(packs)
            table._count(where)
            bases = np.zeros_like(ids)
            bases[plain] = ids[plain]
            for row in np.flatnonzero((found.packs >= 0) & ~plain).tolist():
                base = _base_of(footers, ids[row].tobytes())
                if base is not None:
                    bases[row] = np.frombuffer(base, np.uint8)
            table._bases[extent] = bases
            table.chunks[extent], table._where[extent] = ids, where
        table._missing = 0
        table.freeze()
        return table

    def derive(self, layout: Layout) -> ChunkTable:
        """A table for the next save: chunks of extents that both layouts have are as here."""
        new = ChunkTable.__new__(ChunkTable)
        new.layout = layout
        new._numbers, new._names = dict(self._numbers), dict(self._names)
        new._next, new._own, new._missing = self._next, set(), 0
        if layout is self.layout or layout == self.layout:
            new.chunks, new._where = dict(self.chunks), dict(self._where)
            new._bases = dict(self._bases)
            new._counts = dict(self._counts)
            return new
        new.chunks, new._where, new._bases, new._counts = {}, {}, {}, {}
        mine = {key: extent for extent, key in enumerate(extent_keys(self.layout))}
        for extent, key in enumerate(extent_keys(layout)):
            spec = layout.extents[extent]
            if spec.inline:
                continue
            source = mine.get(key)
            if source is None:
                new._add_empty(extent, spec.chunk_count)
                continue
            new.chunks[extent], new._where[extent] = self.chunks[source], self._where[source]
            new._bases[extent] = self._bases[source]
            new._count(self._where[source])
        for number in [n for n in new._names if n not in new._counts]:
            new._drop(number)
        return new

    def id(self, extent: int, chunk: int) -> bytes | None:
        """The chunk's present id; None while it is missing."""
        if self._where[extent][chunk] == _NOWHERE:
            return None
        return self.chunks[extent][chunk].tobytes()

    def base(self, extent: int, chunk: int) -> bytes | None:
        """The last id of this position that was stored without a reference, or None."""
        base = self._bases[extent][chunk]
        return base.tobytes() if base.any() else None

    def set(
        self, extent: int, chunk: int, chunk_id: bytes, packs: tuple[str, ...], *, base: bool = True
    ) -> None:
        """Record that the chunk has this id and needs `packs` (at least one) to be restored.

        `base`: it is stored without a reference, and what comes next may be coded against it.
        """
        if extent not in self._own:
            self.chunks[extent] = self.chunks[extent].copy()
            self._bases[extent] = self._bases[extent].copy()
            self._where[extent] = self._where[extent].copy()
            self._own.add(extent)
        where = self._where[extent]
        number = self._number(packs)
        old = int(where[chunk])
        if old != number:
            if old == _NOWHERE:
                self._missing -= 1
            else:
                self._counts[old] -= 1
                if not self._counts[old]:
                    del self._counts[old]
                    self._drop(old)
            where[chunk] = number
            self._counts[number] = self._counts.get(number, 0) + 1
        self.chunks[extent][chunk] = np.frombuffer(chunk_id, np.uint8)
        if base:
            self._bases[extent][chunk] = self.chunks[extent][chunk]

    def first_missing(self) -> tuple[int, int] | None:
        """(extent, chunk) of a chunk that is neither staged nor inherited."""
        if not self._missing:
            return None
        for extent, where in self._where.items():
            rows = np.flatnonzero(where == _NOWHERE)
            if len(rows):
                return extent, int(rows[0])
        return None

    def packs(self) -> set[str]:
        """All packs that restoring this save takes."""
        return {name for number in self._counts for name in self._names[number]}

    def leave(self, packs: frozenset[str], footers: MemoryIndex) -> set[str]:
        """Look elsewhere for what lies in `packs`, which are to be deleted.

        `footers` knows packs that stay. Returns those of `packs` that chunks of this save still
        need because no other pack holds them.
        """
        leaving = [n for n, names in self._names.items() if not packs.isdisjoint(names)]
        if not leaving:
            return set()
        for extent, where in list(self._where.items()):
            rows = np.flatnonzero(np.isin(where, np.array(leaving, np.uint32)))
            if not len(rows):
                continue
            moved = where.copy()
            ids = self.chunks[extent]
            found = footers.find(ids[rows])
            plain = (found.packs >= 0) & (found.entries["refs"] == 0)
            for i, row in enumerate(rows.tolist()):
                if plain[i]:
                    names = (found.names[int(found.packs[i])],)
                else:
                    names = packs_of(footers, ids[row].tobytes())
                if names:
                    moved[row] = self._number(names)
            if extent not in self._own:
                moved.flags.writeable = False
            self._where[extent] = moved
        self._recount()
        return {name for names in self._names.values() for name in packs.intersection(names)}

    def adopt(self, layout: Layout, chunks: Mapping[int, Ids]) -> None:
        """Code what comes next against these chunks, which are stored without references.

        `chunks` are of a step of `layout`. Positions whose present chunk is stored without
        reference itself keep that one. May be called after :meth:`freeze`.
        """
        theirs = {key: extent for extent, key in enumerate(extent_keys(layout))}
        for extent, key in enumerate(extent_keys(self.layout)):
            ids = chunks.get(theirs.get(key, -1))
            if extent not in self._bases or ids is None:
                continue
            old = self._bases[extent]
            own = (old == self.chunks[extent]).all(axis=1)
            new = np.where(own[:, None], old, ids)
            new.flags.writeable = extent in self._own
            self._bases[extent] = new

    def _recount(self) -> None:
        self._counts = {}
        for where in self._where.values():
            self._count(where)
        self._counts.pop(_NOWHERE, None)
        for number in [n for n in self._names if n not in self._counts]:
            self._drop(number)

    def freeze(self) -> None:
        """Nothing is written into the arrays from here on; they may be shared."""
        for extent in self._own:
            self.chunks[extent].flags.writeable = False
            self._bases[extent].flags.writeable = False
            self._where[extent].flags.writeable = False
        self._own.clear()

    def _add_empty(self, extent: int, count: int) -> None:
        self.chunks[extent] = np.zeros((count, ID_BYTES), np.uint8)
        self._bases[extent] = np.zeros((count, ID_BYTES), np.uint8)
        self._where[extent] = np.zeros(count, np.uint32)
        self._own.add(extent)
        self._missing += count

    def _number(self, packs: tuple[str, ...]) -> int:
        """The number by which this table calls these packs."""
        number = self._numbers.get(packs)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[packs] = number
            self._names[number] = packs
        return number

    def _count(self, where: NDArray[np.uint32]) -> None:
        numbers, counts = np.unique(where, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._counts[number] = self._counts.get(number, 0) + count

    def _drop(self, number: int) -> None:
        del self._numbers[self._names.pop(number)]


def packs_of(index: ChunkIndex, chunk_id: bytes) -> tuple[str, ...]:
    """The packs that a stored chunk takes; empty when the index does not say.

    It does not when it lacks one of the chunks needed, and when they need each other in a circle or
    more deeply than a reader follows: what an index says is not to be trusted.
    """
    packs: set[str] = set()
    needed = {chunk_id}
    for _ in range(MAX_DEPTH + 1):
        deeper: set[bytes] = set()
        for one in needed:
            location = index.get(one)
            if location is None:
                return ()
            packs.add(location.pack)
            deeper.update(location.refs)
        if not deeper:
            return tuple(sorted(packs))
        needed = deeper
    return ()


def _base_of(index: ChunkIndex, chunk_id: bytes) -> bytes | None:
    """What a chunk that is coded against earlier content of its place goes back to; else None.

    The first reference of every codec but ``cast`` is of the same place.
    """
    for _ in range(MAX_DEPTH):
        location = index.get(chunk_id)
        if location is None or location.codec == codecs.CAST:
            return None
        if not location.refs:
            return chunk_id
        chunk_id = location.refs[0]
    return None
