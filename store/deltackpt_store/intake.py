"""From staged chunks to stored ones: in which order, and with which recipes.

Chunks of one save arrive in any order, in slots. Some help to store others: ``exp_avg`` predicts
the other tensors of its parameter, float32 weights give their rounding to 16 bits. A chunk that
arrives before what it follows from is put aside, in its slot of the ring, until that has come or
the slots are to be released; it is then stored like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from deltackpt_store.derived import Derived
from deltackpt_store.pending_save import PendingSave
from deltackpt_store.prediction import Predictor
from deltackpt_store.protocol import Begin
from deltackpt_store.recipes import Recipe
from deltackpt_store.store_writer import Chunk, Put, StoreWriter

STREAM_CHUNKS = 16
"""Neighbouring chunks of a tensor for which one choice of encoding is learned."""

_MAX_STREAMS = 1 << 16


class Arrived(NamedTuple):
    """A staged chunk whose change hash holds. `raw` stays as it is until the slots are released."""

    extent: int
    chunk: int
    raw: memoryview
    id: bytes


class Intake:
    """Puts the chunks of saves into the store. Used by one thread.

    Recipes are for the save begun last; chunks of an earlier one that is still open go without.
    """

    def __init__(self, writer: StoreWriter, *, predict: bool) -> None:
        self._writer = writer
        self._derived = Derived()
        self._predictor = Predictor()
        self._predict = predict
        self._recipes = writer.encodes
        self._save: PendingSave | None = None
        self._aside: list[Arrived] = []
        self._met: set[str] = set()  # streams of which a chunk has been put

    def begin(self, save: PendingSave, begin: Begin) -> None:
        """A save starts."""
        if not self._recipes:
            return
        self.settle()
        self._save = save
        layout = save.table.layout
        self._derived.begin(layout)
        if self._predict:
            self._predictor.budget = sum(spec.nbytes for spec in layout.extents)
            self._predictor.begin(layout, begin.adam)

    def take(self, save: PendingSave, arrived: Sequence[Arrived]) -> None:
        """Put chunks, or put them aside. Raises what `StoreWriter.put_many` does."""
        if save is not self._save:
            self._put(save, arrived, plain=True)
            return
        waiting, self._aside = [*self._aside, *arrived], []
        ready, waiting = _parted(waiting, lambda one: self._predictor.is_first(one.extent))
        self._put(save, ready)
        while waiting:
            ready, waiting = _parted(waiting, lambda one: not self._waits(one))
            if not ready:
                break
            self._put(save, ready)  # perhaps what the others wait for
        self._aside = waiting

    def settle(self, *, complete: bool = False) -> None:
        """Put what is aside: the slots are about to be released, or the save is `complete`.

        Then, what has not arrived is known to be as it was.
        """
        save, waiting = self._save, self._aside
        if save is None or not waiting:
            return
        self._aside = []
        if not complete:
            self._put(save, waiting)
            return
        for one in waiting:
            self._predictor.unchanged(one.extent, one.chunk)
        missing = [bool(self._derived.missing(one.extent, one.chunk)) for one in waiting]
        self._put(save, [one for one, half in zip(waiting, missing, strict=True) if not half])
        halves = [one for one, half in zip(waiting, missing, strict=True) if half]
        for one in halves:
            self._fetch(save, one)
        self._put(save, halves)

    def end(self, save: PendingSave) -> None:
        """The save has been committed."""
        if save is self._save:
            self._predictor.end()
            self._save = None

    def failed(self, save: int) -> None:
        """The save has failed, and its blobs may be lost: what was built upon them is forgotten."""
        self._predictor.forget()
        if self._save is not None and self._save.id == save:
            self._aside.clear()
            self._save = None

    def _waits(self, one: Arrived) -> bool:
        place = one.extent, one.chunk
        return self._predictor.waits(*place) or bool(self._derived.missing(*place))

    def _fetch(self, save: PendingSave, one: Arrived) -> None:
        """Read float32 chunks that are as they were in the save before."""
        for extent, chunk in self._derived.missing(one.extent, one.chunk):
            chunk_id = save.table.id(extent, chunk)
            raw = None if chunk_id is None else self._writer.content(chunk_id)
            if raw is None or chunk_id is None:
                return
            self._derived.feed(chunk, chunk_id, self._derived.round(extent, chunk, raw))

    def _put(self, save: PendingSave, arrived: Sequence[Arrived], *, plain: bool = False) -> None:
        """Put chunks, first one of each stream of which nothing is known: the others are encoded as
        it shows. Put together, each of them would be tried."""
        first: list[tuple[Arrived, Chunk]] = []
        rest: list[tuple[Arrived, Chunk]] = []
        for one in arrived:
            chunk = self._chunk(save, one, plain=plain)
            (rest if chunk.stream in self._met else first).append((one, chunk))
            self._met.add(chunk.stream)
        if len(self._met) > _MAX_STREAMS:
            self._met.clear()
        for part in (first, rest) if self._recipes else (first + rest,):
            if part:
                self._store(save, part, plain=plain)

    def _store(
        self, save: PendingSave, pairs: Sequence[tuple[Arrived, Chunk]], *, plain: bool
    ) -> None:
        puts = self._writer.puts([chunk for _, chunk in pairs])
        for (one, chunk), put in zip(pairs, puts, strict=True):
            save.record(one.extent, one.chunk, len(one.raw), put)
            if chunk.recipes and chunk.learned is None:
                self._derived.learned(one.extent, put.id, chunk.recipes)
            if not plain and self._recipes:
                self._follow(one, put)

    def _chunk(self, save: PendingSave, one: Arrived, *, plain: bool) -> Chunk:
        extent, chunk, raw, chunk_id = one
        spec = save.table.layout.extents[extent]
        # Parts of a large tensor may behave differently: rows of rare and of frequent tokens.
        stream = f"{chunk // STREAM_CHUNKS}:{save.extent_name(extent)}"
        recipes: tuple[Recipe, ...] = ()
        learned = None
        if self._recipes and not plain:
            recipes = self._derived.recipes(extent, chunk, raw)
            if not recipes and (near := self._predictor.recipes(extent, chunk)):
                recipes, learned = near, partial(self._predictor.learned, extent)
        base = save.table.base(extent, chunk)
        return Chunk(raw, spec.dtype, stream, base, recipes, learned, chunk_id)

    def _follow(self, one: Arrived, put: Put) -> None:
        """Let what has been put help with what is to come."""
        self._derived.sample(one.extent, one.chunk, one.raw)
        self._predictor.put(one.extent, one.chunk, put.id, one.raw)
        if self._derived.feeds(one.extent):
            pieces = self._derived.round(one.extent, one.chunk, one.raw)
            self._derived.feed(one.chunk, put.id, pieces)


def _parted(
    arrived: Sequence[Arrived], condition: Callable[[Arrived], bool]
) -> tuple[list[Arrived], list[Arrived]]:
    """Those for which `condition` holds, and the others."""
    yes: list[Arrived] = []
    no: list[Arrived] = []
    for one in arrived:
        (yes if condition(one) else no).append(one)
    return yes, no
