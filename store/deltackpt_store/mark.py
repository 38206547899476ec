"""Marking: which chunks the roots reach, and which pack is to keep each of them.

Works with arrays: with the catalogue about 50 bytes per stored record at the peak, and a second or
two for a million records or a million references. Nothing is written.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.catalogue import Bools, Catalogue, Ints
from deltackpt_store.errors import CorruptionError, StorageError
from deltackpt_store.fetch import MAX_DEPTH
from deltackpt_store.fileio import Buffer
from deltackpt_store.manifest import ID_BYTES, Manifest
from deltackpt_store.manifest_io import damaged_manifest
from deltackpt_store.roots import Roots
from deltackpt_store.store import Store

_TRIES = 20
_BLOCK = 1 << 16  # chunk ids


class Marking:
    """The result: `live` says of each group whether anything needs it, `kept` of each row whether
    it is the record that is to serve its chunk."""

    def __init__(
        self,
        catalogue: Catalogue,
        avoid: Collection[str] = (),
        condemned: Collection[str] = (),
    ) -> None:
        """`avoid` are packs that keep a chunk only when no other pack holds it; `condemned` ones
        only when no other pack, nor one to be avoided, holds it."""
        self.catalogue = catalogue
        self.live: Bools = np.zeros(catalogue.groups, np.bool_)
        self.kept: Bools = np.zeros(catalogue.records, np.bool_)
        self._avoid = frozenset(avoid)
        self._condemned = frozenset(condemned)

    def reach(self, groups: Ints) -> None:
        """These are needed."""
        self.live[groups] = True

    def choose(self) -> None:
        """Choose who keeps what is needed, and what that needs in turn; call once, at the end.

        CorruptionError when a chunk is coded against one that no pack holds.
        """
        best = self._best()
        done = np.zeros(len(self.live), np.bool_)
        while True:
            fresh = self.live & ~done
            if not fresh.any():
                break
            done |= fresh
            for first, end in self.catalogue.blocks():
                rows = best[first:end][fresh[first:end]].astype(np.int64)
                self.kept[rows] = True
                self._need(rows)
        if len(self.catalogue.coded.rows):
            self._untangle(done)

    def _best(self) -> NDArray[np.uint32]:
        """Of each group the record that is kept most willingly.

        Records that can be decoded come first, then packs that are not condemned, then records
        that keep no further chunk alive, then packs not to be avoided, then records that need no
        other chunk, then the packs with the larger live share.
        """
        catalogue = self.catalogue
        if not catalogue.groups:
            return np.empty(0, np.uint32)
        packs = len(catalogue.names)
        dislike = np.array(
            [4 * (n in self._condemned) + (n in self._avoid) for n in catalogue.names], np.uint32
        )
        by_share = np.lexsort((np.arange(packs), -self.live_shares()))
        rank = np.empty(packs, np.uint32)
        rank[by_share] = np.arange(packs, dtype=np.uint32)
        # At most 32 times the number of packs: it fits.
        score = np.repeat(rank + dislike * np.uint32(2 * packs), np.diff(catalogue.first))
        coded = catalogue.coded
        score[coded.rows] += np.uint32(packs)
        score[coded.rows[~self.held_by(self.live)]] += np.uint32(4 * packs)
        score[coded.rows[~self._decodable()]] += np.uint32(16 * packs)
        best = np.empty(catalogue.groups, np.uint32)
        for first, end in catalogue.blocks():
            start = catalogue.start[first : end + 1]
            rows = catalogue.order[start[0] : start[-1]]
            scored = score[rows].astype(np.uint64) << np.uint64(32) | rows
            smallest = np.minimum.reduceat(scored, start[:-1] - start[0])
            best[first:end] = smallest.astype(np.uint32)  # the low half: the row
        return best

    def _decodable(self) -> Bools:
        """Of each coded record whether what it needs is held, and so on, as deep as readers go."""
        catalogue, coded = self.catalogue, self.catalogue.coded
        good = np.zeros(len(coded.rows), np.bool_)
        if not len(good):
            return good
        group = self._groups()[coded.rows]
        plain = np.ones(catalogue.records, np.bool_)
        plain[coded.rows] = False
        solved = np.zeros(catalogue.groups, np.bool_)
        for first, end in catalogue.blocks():
            start = catalogue.start[first : end + 1]
            alone = plain[catalogue.order[start[0] : start[-1]]]
            solved[first:end] = np.logical_or.reduceat(alone, start[:-1] - start[0])
        for _ in range(MAX_DEPTH):
            now = self.held_by(solved)
            if np.array_equal(now, good):
                break
            good = now
            solved[group[good]] = True
        return good

    def held_by(self, groups: Bools) -> Bools:
        """Of each coded record whether all that it needs is among `groups`."""
        coded = self.catalogue.coded
        if not len(coded.rows):
            return np.zeros(0, np.bool_)
        held = (coded.needs >= 0) & groups[coded.needs]
        return np.logical_and.reduceat(held, coded.first[:-1])

    def live_shares(self) -> NDArray[np.float64]:
        """Of each pack, which share of its payload bytes is of needed chunks."""
        catalogue = self.catalogue
        needed = catalogue.per_row(self.live)
        share = np.zeros(len(catalogue.names))
        for pack in range(len(share)):
            low, high = catalogue.first[pack], catalogue.first[pack + 1]
            sizes = catalogue.stored[low:high]
            total = int(sizes.sum(dtype=np.int64))
            share[pack] = int(sizes[needed[low:high]].sum(dtype=np.int64)) / max(1, total)
        return share

    def _need(self, rows: Ints) -> None:
        """What the records `rows` are coded against is needed too."""
        needs = self.needs_of(rows)[1]
        if len(needs) and int(needs.min()) < 0:
            self._missing(rows)
        self.live[needs] = True

    def needs_of(self, rows: Ints | NDArray[np.uint32]) -> tuple[Ints, Ints]:
        """(position within `rows`, group needed) for every reference of these records."""
        coded = self.catalogue.coded
        if not len(coded.rows) or not len(rows):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        at = np.searchsorted(coded.rows, rows.astype(np.uint32))
        at[at == len(coded.rows)] = 0
        which = np.flatnonzero(coded.rows[at] == rows)
        low, high = (coded.first[at[which] + i].astype(np.int64) for i in (0, 1))
        lengths = high - low
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        needs = coded.needs[np.repeat(low, lengths) + within].astype(np.int64)
        return np.repeat(which, lengths), needs

    def _untangle(self, live: Bools) -> None:
        """Where the chosen records need each other in a circle, or too deeply, keep every copy."""
        catalogue = self.catalogue
        rows = catalogue.coded.rows[self.kept[catalogue.coded.rows]]
        group = self._groups()[rows]
        solved = np.ones(len(live), np.bool_)
        solved[group] = False
        for _ in range(MAX_DEPTH):
            done = np.zeros(len(rows), np.bool_)
            for at in range(0, len(rows), _BLOCK):
                where, needs = self.needs_of(rows[at : at + _BLOCK])
                part = done[at : at + _BLOCK]
                part[:] = True
                part[where[~solved[needs]]] = False
            before = int(solved.sum())
            solved[group[done]] = True
            if int(solved.sum()) == before:
                break
        while True:
            tangled = np.flatnonzero(~solved & self.live)
            if not len(tangled):
                return
            solved[tangled] = True
            every = np.concatenate([catalogue.rows_of(g) for g in tangled.tolist()])
            self.kept[every] = True
            needs = self.needs_of(every)[1]
            self.live[needs[needs >= 0]] = True
            solved[np.flatnonzero(self.live & ~live)] = False
            live |= self.live

    def groups_of(self, rows: Ints) -> Ints:
        """The group of each row."""
        return self._groups()[rows].astype(np.int64)

    def _groups(self) -> NDArray[np.uint32]:
        return self.catalogue.per_row(np.arange(self.catalogue.groups, dtype=np.uint32))

    def _missing(self, rows: Ints) -> None:
        where, needs = self.needs_of(rows)
        row = rows[where[int(np.argmin(needs))]]
        chunk_id = self.catalogue.ids_of(row.reshape(1)).tobytes().hex()
        raise _lost(f"what chunk {chunk_id} is coded against")

    # results -------------------------------------------------------------------------------

    def keeping(self) -> set[str]:
        """Names of the packs that keep anything."""
        first = self.catalogue.first.tolist()
        ranges = zip(self.catalogue.names, pairwise(first), strict=True)
        return {name for name, (low, high) in ranges if self.kept[low:high].any()}

    def going_copies(self, doomed: Collection[str]) -> Ints:
        """The records, of chunks that are needed, that go with the packs `doomed`."""
        catalogue = self.catalogue
        going = np.array([name in doomed for name in catalogue.names], np.bool_)
        rows = np.repeat(going, np.diff(catalogue.first))
        rows &= catalogue.per_row(self.live)
        return np.flatnonzero(rows)


def mark(
    store: Store,
    roots: Roots,
    *,
    avoid: Collection[str] = (),
    condemned: Collection[str] = (),
    without: Collection[str] = (),
    ids: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Marking:
    """Mark from `roots` over all packs that lie in the store now, except those of `without`.

    `avoid` and `condemned` as of `Marking`, `ids` as of `Catalogue`. `progress` is called with
    (done, total), counting packs and manifests.

    CorruptionError when anything needed is missing or unreadable, StorageError.
    """
    by_base = _by_base(roots)
    done = total = 0

    def told(count: int = 1) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    names = _names(store, without)
    for attempt in range(_TRIES):
        done, total = 0, len(names) + sum(map(len, by_base.values()))
        try:
            catalogue = Catalogue(store, names, told, ids=ids)
            break
        except StorageError as error:
            # A concurrent collection deletes packs whose needed chunks other packs hold too.
            before, names = names, _names(store, without)
            gone = error.errno == errno.ENOENT and not set(before) <= set(names)
            if not gone or attempt == _TRIES - 1:
                raise
    else:
        raise AssertionError
    marking = Marking(catalogue, avoid, condemned)
    for base, users in by_base.items():
        _mark_base(store, base, users, marking)
        told(len(users))
    marking.choose()
    return marking


def _names(store: Store, without: Collection[str]) -> list[str]:
    return [name for name in store.packs.names() if name not in without]


def _by_base(roots: Roots) -> dict[bytes, set[bytes]]:
    """Base manifest -> the manifests of kept commits that are it or are deltas to it."""
    users: dict[bytes, set[bytes]] = {}
    for commit in roots.commits.values():
        users.setdefault(commit.base or commit.manifest, set()).add(commit.manifest)
    return users


def _mark_base(store: Store, base: bytes, users: Iterable[bytes], marking: Marking) -> None:
    """Mark what the manifests `users`, which are `base` or deltas to it, name."""
    catalogue = marking.catalogue
    whole = store.manifest(base, views=True)
    if whole.base is not None:
        raise damaged_manifest(base, "is named as a base and is none")
    extents = list(whole.chunks)
    lengths = [len(whole.chunks[extent]) // ID_BYTES for extent in extents]
    first = dict(zip(extents, np.cumsum([0, *lengths]).tolist(), strict=False))
    groups = np.empty(sum(lengths), np.int32)
    done = 0
    for found in _find(catalogue, whole.chunks.values()):
        groups[done : done + len(found)] = found
        done += len(found)
    del whole
    used = np.zeros(len(groups), np.bool_)
    for digest in sorted(users):
        if digest == base:
            used[:] = True
            continue
        delta = store.manifest(digest, views=True)
        if delta.base != base:
            raise damaged_manifest(digest, "has another base than its commit says")
        mine = np.ones(len(groups), np.bool_)
        parts: list[Buffer] = []
        for extent, start, length in _spans(delta, first, extents, lengths, digest):
            if extent in delta.chunks:
                mine[start : start + length] = False
                parts.append(delta.chunks[extent])
            else:
                positions, ids = delta.patches[extent]
                rows = np.frombuffer(positions, "<u4")
                if int(rows.max()) >= length:
                    raise damaged_manifest(digest, "has a patch that does not fit its extent")
                mine[start + rows.astype(np.int64)] = False
                parts.append(ids)
        used |= mine
        for found in _find(catalogue, parts):
            marking.reach(_known(found, digest))
    for at in range(0, len(groups), _BLOCK):
        part = groups[at : at + _BLOCK][used[at : at + _BLOCK]]
        marking.reach(_known(part.astype(np.int64), base))


def _spans(
    delta: Manifest, first: dict[int, int], extents: list[int], lengths: list[int], digest: bytes
) -> list[tuple[int, int, int]]:
    """(extent, place of its first chunk in the base, chunks) of every extent that differs."""
    size = dict(zip(extents, lengths, strict=True))
    changed = [*delta.chunks, *delta.patches]
    if not size.keys() >= set(changed):
        raise damaged_manifest(digest, "changes what its base does not have")
    return [(extent, first[extent], size[extent]) for extent in changed]


def _find(catalogue: Catalogue, lists: Iterable[Buffer]) -> Iterator[Ints]:
    """Groups of the chunk ids in `lists`, in their order, a bounded number at a time."""
    small: list[Buffer] = []
    size = 0
    for ids in chain(lists, [b""]):
        small.append(ids)
        size += len(ids)
        if size >= _BLOCK * ID_BYTES or not ids:
            joined = small[0] if len(small) == 1 else b"".join(small)
            small, size = [], 0
            table = np.frombuffer(joined, np.uint8).reshape(-1, ID_BYTES)
            for at in range(0, len(table), _BLOCK):
                yield catalogue.find(table[at : at + _BLOCK])


def _known(groups: Ints, digest: bytes) -> Ints:
    if len(groups) and int(groups.min()) < 0:
        raise _lost(f"a chunk that manifest {digest.hex()} needs")
    return groups


def _lost(what: str) -> CorruptionError:
    return CorruptionError(
        f"no pack holds {what}",
        kind="missing-chunk",
        hint="run `deltackpt verify` to see what is hit, and repair the store first",
    )
