"""What a writer may build upon: chunks that the store holds, and those that it has put itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltackpt_store.codecs import Encoded
from deltackpt_store.confirm import Confirmer
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fetch import MAX_DEPTH
from deltackpt_store.index import ChunkIndex, MemoryIndex
from deltackpt_store.pack import Location, PackEntries


class Put(NamedTuple):
    """What became of one chunk.

    `written` is 0 when the store already held it, else the bytes of its record in `pack`. `packs`
    are all that it takes to read it, with the chunks in `refs`: a manifest that names `id` must
    list them.
    """

    id: bytes
    pack: str
    written: int
    codec: int
    refs: tuple[bytes, ...]
    packs: tuple[str, ...]


class Holdings:
    """Used by one thread.

    A chunk passes three states: put and not flushed, published and not committed, committed; only
    in the last one is it in `index`, whose word is taken only when `confirmer` confirms it. With
    `verify` chunks that are found are read back, too, and compared.
    """

    def __init__(self, index: ChunkIndex, confirmer: Confirmer, *, verify: bool) -> None:
        self._index = index
        self._confirmer = confirmer
        self._verify = verify
        self._unflushed: dict[bytes, Put] = {}
        self._uncommitted = MemoryIndex()
        self._durable: set[str] = set()  # packs whose name is known to be durable
        self.doubtful: set[str] = set()
        """Packs relied upon since the last flush whose names may not be durable yet."""
        self.relied: set[str] = set()
        """Packs of what was put and found since the last commit. Always the same object."""

    # looking up ----------------------------------------------------------------------------

    def find(self, chunk_id: bytes, raw: memoryview) -> Put | None:
        """The chunk as one that need not be stored, from here on relied upon; else None."""
        put = self._unflushed.get(chunk_id)
        if put is not None:
            return put
        location = self._place(chunk_id)
        if location is None or (self._verify and not self._same(chunk_id, raw)):
            return None
        packs = self._rely(location.pack, location.refs)
        return Put(chunk_id, location.pack, 0, location.codec, location.refs, packs)

    def find_all(self, ids: Sequence[bytes], raws: Sequence[memoryview]) -> list[Put | None]:
        """`find` for many: what is nowhere, as most of what has changed, is looked for at once."""
        open_ = [i for i in ids if i not in self._unflushed and not self._confirmer.confirmed(i)]
        new = self._confirmer.absent(list(self._uncommitted.absent(open_)))
        return [
            None if chunk_id in new else self.find(chunk_id, raw)
            for chunk_id, raw in zip(ids, raws, strict=True)
        ]

    def unflushed(self, chunk_id: bytes) -> Put:
        """A chunk that was put since the last flush, as one that is held already."""
        return self._unflushed[chunk_id]

    def depth(self, refs: tuple[bytes, ...], known: dict[bytes, int]) -> int:
        """How deep a record's references go; more than is allowed when one is not there.

        `known` is what has been found out so far, by chunk.
        """
        deepest = 0
        for ref in refs:
            depth = known.get(ref)
            if depth is None:
                known[ref] = depth = 2 * MAX_DEPTH  # stays for what goes round in a circle
                held = self._held(ref)
                if held is not None:
                    known[ref] = depth = self.depth(held.refs, known)
            deepest = max(deepest, 1 + depth)
        return deepest

    def content(self, chunk_id: bytes) -> memoryview | None:
        """A chunk that the store holds, decoded and not yet proved; None when it cannot be had."""
        location = self._place(chunk_id)
        if location is None or self._confirmer.find(chunk_id) is None:
            return None
        try:
            return memoryview(self._confirmer.content(chunk_id, location))
        except (OSError, DeltackptError):
            return None

    def _held(self, chunk_id: bytes) -> Put | Location | None:
        """A chunk that is stored or has been put; None when neither."""
        return self._unflushed.get(chunk_id) or self._place(chunk_id)

    def _place(self, chunk_id: bytes) -> Location | None:
        """Where the chunk is stored, whole with what it is coded against; None when it is not."""
        location = self._confirmer.confirmed(chunk_id)
        if location is not None:
            return location
        location = self._uncommitted.get(chunk_id)
        if location is not None and all(self._place(ref) for ref in location.refs):
            return location
        return self._confirmer.find(chunk_id)

    def _packs_of(self, refs: tuple[bytes, ...]) -> set[str]:
        """Packs of these chunks and of all they need; each chunk is looked at once."""
        packs: set[str] = set()
        seen: set[bytes] = set()
        open_ = list(refs)
        while open_:
            ref = open_.pop()
            if ref in seen:
                continue
            seen.add(ref)
            held = self._held(ref)
            if held is not None:
                packs.add(held.pack)
                open_ += held.refs
        return packs

    def _same(self, chunk_id: bytes, raw: memoryview) -> bool:
        location = self._confirmer.find(chunk_id)
        if location is None:
            return True  # stored by this very writer a moment ago
        try:
            return memoryview(self._confirmer.content(chunk_id, location)) == raw
        except (OSError, DeltackptError):
            self._confirmer.forget(chunk_id)
            self._index.drop_pack(location.pack)
            return False

    # changing ------------------------------------------------------------------------------

    def _rely(self, pack: str, refs: tuple[bytes, ...]) -> tuple[str, ...]:
        """All packs of a chunk that lies in `pack` and is coded against `refs`: from here on they
        are relied upon."""
        packs = {pack, *self._packs_of(refs)} if refs else {pack}
        self.relied |= packs
        self.doubtful |= packs - self._durable
        return tuple(sorted(packs))

    def add(self, chunk_id: bytes, pack: str, encoded: Encoded) -> tuple[str, ...]:
        """A chunk has been put; all packs that it takes to read it."""
        packs = self._rely(pack, encoded.refs)
        self._unflushed[chunk_id] = Put(chunk_id, pack, 0, encoded.codec, encoded.refs, packs)
        return packs

    def drop_unflushed(self) -> None:
        """What was put since the last flush is not stored after all."""
        self._unflushed = {}
        self.doubtful = set()

    def flushed(self, packs: Sequence[tuple[str, PackEntries]]) -> None:
        """What was put is durable in these packs, and so are their names and the doubtful ones."""
        self._durable.update(self.doubtful, (name for name, _ in packs))
        self.doubtful = set()
        self._unflushed = {}
        for name, entries in packs:
            self._uncommitted.add_pack(name, entries)

    def committed(self) -> None:
        """There is a commit: the index learns the packs flushed so far."""
        self.relied.clear()
        fresh, self._uncommitted = self._uncommitted, MemoryIndex()
        packs = [(name, fresh.entries(name)) for name in sorted(fresh.packs())]
        if packs:
            self._index.add_packs([(name, entries) for name, entries in packs if entries])

    def condemn(self, packs: frozenset[str], *, all_unindexed: bool) -> None:
        """From here on these packs, and no others, count as absent.

        With `all_unindexed` so does everything that was put since the last commit: whoever puts it
        again stores it.
        """
        self._confirmer.ban(packs)
        for name in packs:
            self._uncommitted.drop_pack(name)
        if all_unindexed:
            self._uncommitted = MemoryIndex()
            self._unflushed = {}
        self._durable -= packs
        while gone := [  # what they are coded against is going
            chunk_id
            for chunk_id, put in self._unflushed.items()
            if any(self._held(ref) is None for ref in put.refs)
        ]:
            for chunk_id in gone:
                del self._unflushed[chunk_id]

    def doubt_all(self, absent: frozenset[str]) -> None:
        """Forget all that was known of the store, except that these packs are absent."""
        self._confirmer.ban(absent)
        self._uncommitted = MemoryIndex()
        self._durable.clear()
