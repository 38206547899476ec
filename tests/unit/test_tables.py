"""Chunk tables: what a save consists of, derived from the save it is relative to."""

from __future__ import annotations

from collections import Counter

import numpy as np
from deltackpt_store.index import Location, MemoryIndex
from deltackpt_store.manifest import ExtentSpec, Layout, Snapshot, TensorView
from deltackpt_store.pack import ENTRY_DTYPE, PackEntries
from deltackpt_store.tables import ChunkTable, packs_of
from hypothesis import given, settings
from hypothesis import strategies as st

CHUNK = 4096


def layout_of(**sizes: int) -> Layout:
    return Layout(
        structure=b"",
        paths=tuple(sizes),
        tensors=tuple(
            TensorView(i, i, "uint8", (n,), (1,), 0) for i, n in enumerate(sizes.values())
        ),
        extents=tuple(ExtentSpec(n, CHUNK, "uint8") for n in sizes.values()),
        objects=(),
    )


def ident(number: int) -> bytes:
    return number.to_bytes(32, "big")


Move = tuple[int, int, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 4)), max_size=12),
        min_size=1,
        max_size=6,
    )
)
def test_saves_share_what_they_do_not_change_and_count_packs_exactly(
    saves: list[list[Move]],
) -> None:
    # A pack counted as needed although nothing refers to it would never be reclaimed; one not
    # counted would be deleted under a step that needs it.
    layout = layout_of(a=3 * CHUNK, b=2 * CHUNK)
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    table = ChunkTable(layout)
    model: dict[tuple[int, int], tuple[bytes, tuple[str, ...]]] = {}
    history: list[tuple[ChunkTable, dict[tuple[int, int], tuple[bytes, tuple[str, ...]]]]] = []
    for place in places:
        assert table.first_missing() is not None
        table.set(*place, ident(99), ("p0",))
        model[place] = (ident(99), ("p0",))
    for moves in saves:
        for where, number, pack in moves:
            packs = (f"p{pack}",) if pack else ("p1", "p2")
            table.set(*places[where], ident(number), packs)
            model[places[where]] = (ident(number), packs)
        table.freeze()
        history.append((table, dict(model)))
        table = table.derive(layout)
    for old, expected in history:  # later saves changed nothing in earlier tables
        assert old.first_missing() is None
        for place in places:
            assert old.id(*place) == expected[place][0]
        assert old.packs() == {pack for _, packs in expected.values() for pack in packs}


def test_a_new_layout_inherits_by_path_and_size_not_by_position() -> None:
    old = layout_of(a=2 * CHUNK, b=2 * CHUNK, gone=CHUNK)
    table = ChunkTable(old)
    for extent, count in ((0, 2), (1, 2), (2, 1)):
        for chunk in range(count):
            table.set(extent, chunk, ident(10 * extent + chunk), (f"p{extent}",))
    table.freeze()
    new = table.derive(layout_of(b=2 * CHUNK, new=CHUNK, a=3 * CHUNK, small=100))
    assert [new.id(0, 0), new.id(0, 1)] == [ident(10), ident(11)]
    assert new.id(1, 0) is None
    assert new.id(2, 0) is None  # same path, other size
    assert new.packs() == {"p1"}
    assert new.first_missing() in {(1, 0), (2, 0)}
    for place in ((1, 0), (2, 0), (2, 1), (2, 2)):
        new.set(*place, ident(1), ("p9",))
    assert new.first_missing() is None
    assert new.packs() == {"p1", "p9"}
    assert 3 not in new.chunks  # inline


def footers_of(packs: dict[str, list[tuple[int, tuple[int, ...]]]]) -> MemoryIndex:
    """An index of packs given as (chunk number, numbers of its references)."""
    index = MemoryIndex()
    for name, chunks in packs.items():
        table = np.zeros(len(chunks), ENTRY_DTYPE)
        for row, (number, refs) in enumerate(chunks):
            table["id"][row] = np.frombuffer(ident(number), np.uint8)
            table["refs"][row] = len(refs)
        ids = [np.frombuffer(ident(r), np.uint8) for _, refs in chunks for r in refs]
        index.add_pack(name, PackEntries(table, np.array(ids, np.uint8).reshape(-1, 32)))
    return index


def test_table_of_a_committed_step() -> None:
    layout = layout_of(a=4 * CHUNK)
    ids = np.array([np.frombuffer(ident(n), np.uint8) for n in (1, 2, 3, 2)])
    snapshot = Snapshot(layout, {}, {}, {0: ids}, packs=("p1", "p2", "p3"))
    table = ChunkTable.from_snapshot(
        snapshot, footers_of({"p1": [(1, ()), (7, ())], "p3": [(2, (7,)), (3, ())]})
    )
    assert [table.id(0, c) for c in range(4)] == [ident(n) for n in (1, 2, 3, 2)]
    assert table.packs() == {"p1", "p3"}
    table = table.derive(layout)
    for chunk in (0, 1, 3):
        table.set(0, chunk, ident(4), ("p4",))
    assert table.packs() == {"p3", "p4"}  # p1 was needed by the references of chunk 2 only


def test_chunks_in_no_known_pack_need_all_packs_of_the_step() -> None:
    # A damaged footer must not make garbage collection think that its pack is not needed.
    layout = layout_of(a=2 * CHUNK)
    ids = np.array([np.frombuffer(ident(n), np.uint8) for n in (1, 2)])
    snapshot = Snapshot(layout, {}, {}, {0: ids}, packs=("p1", "p2"))
    table = ChunkTable.from_snapshot(snapshot, footers_of({"p1": [(1, ())]}))
    assert table.packs() == {"p1", "p2"}
    assert table.first_missing() is None


def test_unchanged_saves_cost_no_memory() -> None:
    layout = layout_of(a=1000 * CHUNK)
    table = ChunkTable(layout)
    for chunk in range(1000):
        table.set(0, chunk, ident(chunk), (f"p{chunk % 3}",))
    table.freeze()
    arrays = Counter[int]()
    for _ in range(50):
        table = table.derive(layout)
        table.freeze()
        arrays[id(table.chunks[0])] += 1
    assert len(arrays) == 1


class Told:
    """An index that says what it was told."""

    def __init__(self, refs: dict[int, tuple[int, ...]]) -> None:
        self.asked = 0
        self._refs = refs

    def get(self, chunk_id: bytes) -> Location | None:
        self.asked += 1
        number = int.from_bytes(chunk_id, "big")
        if number not in self._refs:
            return None
        refs = tuple(map(ident, self._refs[number]))
        return Location(f"p{number}", 64, 64, 10, 10, 2 if refs else 0, refs)


def test_references_in_a_circle_are_told_from_a_chain() -> None:
    # Prevents: an index that is wrong ends the writer with a RecursionError, or keeps it busy.
    chain = {n: (n + 1,) for n in range(8)} | {8: ()}
    assert packs_of(Told(chain), ident(0)) == tuple(f"p{n}" for n in range(9))
    assert packs_of(Told(chain | {8: (9,), 9: ()}), ident(0)) == ()
    assert packs_of(Told({1: (2,), 2: (1,)}), ident(1)) == ()
    assert packs_of(Told({1: (1,)}), ident(1)) == ()
    assert packs_of(Told({1: (2, 3), 2: ()}), ident(1)) == ()
    both = Told({1: (2, 3), 2: (4,), 3: (4,), 4: ()})
    assert packs_of(both, ident(1)) == ("p1", "p2", "p3", "p4")
    wide = {n: tuple(range(1, 100)) for n in range(100)}
    index = Told(wide)
    assert packs_of(index, ident(0)) == ()
    assert index.asked < 10 * 100
