"""Which chunks are lost with others that they are coded against, and the work it is to tell."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import pytest
from deltackpt_store.fetch import Fetcher
from deltackpt_store.index import MemoryIndex
from deltackpt_store.lost_chunks import Lost, lost_chunks, unaccounted
from deltackpt_store.pack import ENTRY_DTYPE, Location, PackEntries
from deltackpt_store.pack_set import PackSet

NONE = np.empty((0, 32), np.uint8), np.empty(0, np.int64)


class Packs:
    """One pack whose records are coded as `rows` say; counts the chunks that are looked up."""

    def __init__(self, rows: list[tuple[bytes, list[bytes]]]) -> None:
        table = np.zeros(len(rows), ENTRY_DTYPE)
        for row, (chunk_id, refs) in enumerate(rows):
            table[row]["id"] = np.frombuffer(chunk_id, np.uint8)
            table[row]["offset"] = 64 + row
            table[row]["raw"] = 1
            table[row]["refs"] = len(refs)
        flat = b"".join(ref for _, refs in rows for ref in refs)
        self.index = MemoryIndex()
        self.index.add_pack("a", PackEntries(table, np.frombuffer(flat, np.uint8).reshape(-1, 32)))
        self.looked = 0
        self._locations = self.index.locations
        cast("Any", self.index).locations = self._counted

    def _counted(self, chunk_id: bytes) -> list[Location]:
        self.looked += 1
        return self._locations(chunk_id)

    def salvage(self, chunk_id: bytes) -> list[Location]:
        return []

    def load_all(self) -> None:
        pass


def name(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def lost_of(packs: Packs) -> Lost:
    return lost_chunks(cast("PackSet", packs), *NONE, ())


def of_rows(rows: list[tuple[bytes, list[bytes]]]) -> set[bytes]:
    """What is lost, found by looking at everything as often as it takes."""
    held = {chunk_id for chunk_id, _ in rows}
    good: set[bytes] = set(held)
    while True:
        whole = {i for i, refs in rows if good.issuperset(refs)}
        if whole == good:
            return held - good
        good = whole


@pytest.mark.parametrize("seed", range(30))
def test_what_is_lost_with_others(seed: int) -> None:
    chance = random.Random(seed)

    def some() -> list[bytes]:
        return [name(chance.randrange(14)) for _ in range(chance.choice((0, 1, 1, 2)))]

    rows = [(name(chance.randrange(12)), some()) for _ in range(20)]
    assert set(lost_of(Packs(rows))) == of_rows(rows)


def test_a_long_chain_of_lost_chunks_is_gone_through_once() -> None:
    """Made-up references may form a chain through a whole store, in whatever order is worst."""
    length = 400
    for order in (range(length), reversed(range(length))):
        packs = Packs([(name(i), [name(i + 1)]) for i in order])
        lost = lost_of(packs)
        assert len(lost) == length
        assert packs.looked <= length
        packs.looked = 0
        assert unaccounted(cast("PackSet", packs), lost) == set(lost)
        assert packs.looked <= length


def test_any_number_of_copies_of_a_chunk_are_tried_once() -> None:
    fetcher = Fetcher.__new__(Fetcher)
    fetcher._packs = cast("PackSet", Packs([(name(1), [])] * 50))
    places = list(fetcher.places(name(1)))
    assert len(places) == len(set(places)) == 50
