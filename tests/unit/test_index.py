"""The in-memory index against a plain dict, and its rebuild from footers."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store import index as index_module
from deltackpt_store import pack as pk
from deltackpt_store.codecs import RAW, Encoded
from deltackpt_store.errors import CorruptionError, StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.id_keys import IdKeys
from deltackpt_store.index import MemoryIndex, list_packs, refresh
from deltackpt_store.pack import ENTRY_DTYPE, Location, PackEntries
from deltackpt_store.pack_writer import PackWriter
from hypothesis import given, settings
from hypothesis import strategies as st

UUID = bytes(16)
IO = FileIO()
NOISE = random.Random(11)


def entries(ids: list[bytes], refs: dict[bytes, list[bytes]] | None = None) -> PackEntries:
    table = np.zeros(len(ids), ENTRY_DTYPE)
    for row, chunk in enumerate(ids):
        table[row]["id"] = np.frombuffer(chunk, np.uint8)
        table[row]["offset"] = 64 + 200 * row
        table[row]["header"] = 64
        table[row]["stored"] = table[row]["raw"] = 100 + row
        table[row]["refs"] = len((refs or {}).get(chunk, []))
    flat = b"".join(b"".join((refs or {}).get(chunk, [])) for chunk in ids)
    return PackEntries(table, np.frombuffer(flat, np.uint8).reshape(-1, 32))


def place(pack: str, row: int, refs: tuple[bytes, ...] = ()) -> Location:
    return Location(pack, 64 + 200 * row, 64, 100 + row, 100 + row, 0, refs)


def as_rows(ids: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 32)


# Few distinct ids, many of them with equal first eight bytes: duplicates and prefix clashes.
IDS = [bytes(8) + n.to_bytes(24, "big") for n in range(6)] + [
    blake3(bytes([n])).digest() for n in range(6)
]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7), st.lists(st.sampled_from(IDS), max_size=6)),
        st.tuples(st.just("drop"), st.integers(0, 7), st.just([])),
        st.tuples(st.just("many"), st.just(0), st.lists(st.sampled_from(IDS), max_size=20)),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS, st.sampled_from([0, 3, 65536]), st.booleans())
def test_behaves_like_a_dict(
    operations: list[tuple[str, int, list[bytes]]], small: int, reloading: bool
) -> None:
    """An index that forgets or invents chunks loses dedup or, unconfirmed, data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_SMALL", small)
        patch.setattr(index_module, "_KEPT_BYTES", 200)  # a table or two
        model: dict[str, list[bytes]] = {}
        index = MemoryIndex((lambda name: entries(model[name])) if reloading else None)
        for what, number, ids in operations:
            name = f"pack{number}"
            if what == "add":
                index.add_pack(name, entries(ids))
                model.setdefault(name, ids)
            elif what == "drop":
                index.drop_pack(name)
                model.pop(name, None)
            else:
                known = {i for held in model.values() for i in held}
                assert index.contains_many(as_rows(ids)).tolist() == [i in known for i in ids]
                assert index.absent(ids) == set(ids) - known
                got = index.get_many(as_rows(ids))
                for chunk, location in zip(ids, got, strict=True):
                    assert (location is not None) == (chunk in known)
                    if location is not None:
                        row = (location.offset - 64) // 200
                        assert model[location.pack][row] == chunk
            assert index.packs() == set(model)
            assert len(index) == sum(map(len, model.values()))
            for chunk in IDS:
                expected = {
                    place(pack, row)
                    for pack, held in model.items()
                    for row, other in enumerate(held)
                    if other == chunk
                }
                assert set(index.locations(chunk)) == expected
                location = index.get(chunk)
                assert location in expected if expected else location is None


@pytest.mark.parametrize("same", [slice(0, 8), slice(24, 32), slice(0, 28), slice(4, 32)])
def test_ids_that_somebody_made_up_are_not_looked_at_for_each_other(
    monkeypatch: pytest.MonkeyPatch, same: slice
) -> None:
    """A footer may name any ids. Were all of them tried for each that is looked up, a small store
    would hold its reader up for hours."""
    ids = np.random.default_rng(0).integers(0, 256, (300, 32), np.uint8)
    ids[:, same] = 7
    looked: list[str] = []
    table = MemoryIndex._table

    def counted(self: MemoryIndex, name: str) -> PackEntries | None:
        looked.append(name)
        return table(self, name)

    monkeypatch.setattr(MemoryIndex, "_table", counted)
    index = MemoryIndex()
    index.add_pack("a", entries([row.tobytes() for row in ids]))
    for merged in (False, True):
        del looked[:]
        assert all(index.get(row.tobytes()) is not None for row in ids)
        assert len(looked) == len(ids)
        if not merged:
            assert index.contains_many(ids).all()
    del looked[:]
    assert index.contains_many(ids).all()
    assert len(looked) == 1
    assert IdKeys().of(ids).tolist() != IdKeys().of(ids).tolist()


def test_references_survive_merging() -> None:
    ids = [NOISE.randbytes(32) for _ in range(50)]
    refs = {ids[3]: [ids[0], ids[1]], ids[40]: [ids[2]]}
    index = MemoryIndex()
    index.add_pack("a", entries(ids[:25], refs))
    index.add_pack("b", entries(ids[25:], refs))
    for _ in range(2):
        for row, chunk in enumerate(ids):
            pack, at = ("a", row) if row < 25 else ("b", row - 25)
            assert index.get(chunk) == place(pack, at, tuple(refs.get(chunk, [])))
        index.contains_many(as_rows(ids))  # merges; the answers stay


def test_the_pack_added_last_wins_and_dropping_it_shows_the_other() -> None:
    chunk = NOISE.randbytes(32)
    index = MemoryIndex()
    for name in ("a", "b", "c"):
        index.add_pack(name, entries([chunk]))
    assert [where.pack for where in index.locations(chunk)] == ["c", "b", "a"]
    index.contains_many(as_rows([chunk]))
    assert [where.pack for where in index.locations(chunk)] == ["c", "b", "a"]
    index.drop_pack("c")
    assert index.get(chunk) == place("b", 0)


def many_packs(index: MemoryIndex, count: int, each: int) -> dict[str, PackEntries]:
    """Packs of `each` records, added one by one, with a look-up after each."""
    tables = {
        f"p{number}": entries([blake3(b"%d-%d" % (number, row)).digest() for row in range(each)])
        for number in range(count)
    }
    for name, table in tables.items():
        index.add_pack(name, table)
        assert index.get(table.id(0)) == place(name, 0)
    return tables


@pytest.mark.parametrize("reloading", [True, False])
def test_memory_per_entry_is_bounded(monkeypatch: pytest.MonkeyPatch, reloading: bool) -> None:
    """A million chunks must not cost hundreds of megabytes in every writer."""
    kept = 20_000
    monkeypatch.setattr(index_module, "_KEPT_BYTES", kept)
    monkeypatch.setattr(index_module, "_SMALL", 500)
    tables: dict[str, PackEntries] = {}
    index = MemoryIndex(tables.get if reloading else None)
    tables |= many_packs(index, 20, 100)
    state = vars(index)
    assert len(state["_recent"]) <= 500  # also when nothing is looked up in bulk
    for name, table in tables.items():
        found = index.find(table.ids)
        assert {found.names[pack] for pack in found.packs.tolist()} == {name}
        assert np.array_equal(found.entries, table.table)
    assert state["_keys"].nbytes + state["_rows"].nbytes == 12 * 2000
    held = sum(table.nbytes for table in state["_tables"].values())
    assert held == state["_kept"] <= (kept if reloading else 56 * 2000)
    index.drop_pack("p19")
    assert state["_kept"] == held - tables["p19"].nbytes
    assert not state["_recent"]


def test_a_table_is_read_once_for_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up a whole step would otherwise read every footer for every chunk."""
    monkeypatch.setattr(index_module, "_KEPT_BYTES", 1)
    tables: dict[str, PackEntries] = {}
    loads: list[str] = []

    def load(name: str) -> PackEntries:
        loads.append(name)
        return tables[name]

    index = MemoryIndex(load)
    tables |= many_packs(index, 5, 40)
    loads.clear()
    mixed = np.concatenate([table.ids for table in tables.values()])
    np.random.default_rng(1).shuffle(mixed)
    assert index.contains_many(mixed).all()
    assert sorted(loads) in (sorted(tables), sorted(tables)[:-1])  # one may be kept from before


@pytest.mark.parametrize("merged", [True, False])
def test_a_table_that_is_gone_or_another_has_its_pack_forgotten(
    monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    """A row of one table, taken for one of another, would be a wrong place."""
    monkeypatch.setattr(index_module, "_KEPT_BYTES", 1)
    monkeypatch.setattr(index_module, "_SMALL", 0 if merged else 1000)
    chunk, other = NOISE.randbytes(32), NOISE.randbytes(32)
    tables = {
        "a": entries([chunk]), "b": entries([chunk, other]), "c": entries([chunk]),
        "d": entries([other]),
    }  # fmt: skip
    index = MemoryIndex(tables.get)
    for name, table in tables.items():
        index.add_pack(name, table)
    assert [where.pack for where in index.locations(chunk)] == ["c", "b", "a"]
    del tables["c"]
    tables["b"] = entries([other, chunk, chunk])
    assert index.locations(chunk) == [place("a", 0)]
    assert index.packs() == {"a", "d"}
    assert len(index) == 2
    assert index.entries("b") is None
    del tables["a"]
    assert index.get(other) == place("d", 0)  # and its table is the one that is kept
    assert index.get_many(as_rows([other, chunk])) == [place("d", 0), None]
    assert index.find(as_rows([chunk])).packs.tolist() == [-1]


def test_an_error_of_reading_a_table_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that fails for a moment must not read as a chunk that is lost."""
    monkeypatch.setattr(index_module, "_KEPT_BYTES", 1)
    tables: dict[str, PackEntries] = {}
    failing = False

    def load(name: str) -> PackEntries:
        if failing:
            raise StorageError("the network is gone", path=name)
        return tables[name]

    index = MemoryIndex(load)
    tables |= many_packs(index, 3, 10)
    first = tables["p0"]
    failing = True
    with pytest.raises(StorageError):
        index.get(first.id(3))
    with pytest.raises(StorageError):
        index.locations(first.id(3))
    with pytest.raises(StorageError):
        index.contains_many(first.ids)
    failing = False
    assert index.get(first.id(3)) == place("p0", 3)
    assert len(index) == 30


def test_many_dropped_packs_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_SMALL", 10)
    index = MemoryIndex()
    ids = [n.to_bytes(4, "big") * 8 for n in range(1000)]
    for at in range(0, 1000, 10):
        index.add_pack(f"p{at}", entries(ids[at : at + 10]))
    assert index.contains_many(as_rows(ids)).all()
    for at in range(0, 990, 10):
        index.drop_pack(f"p{at}")
    assert len(vars(index)["_names"]) < 30
    assert len(vars(index)["_keys"]) < 300
    assert index.contains_many(as_rows(ids)).tolist() == [False] * 990 + [True] * 10


# rebuilding ---------------------------------------------------------------------------------


def write_pack(root: Path, seq: int, chunks: list[bytes], writer: str = "ab" * 8) -> str:
    path = pk.pack_path(str(root), pk.pack_name(writer, seq))
    (root / "packs").mkdir(exist_ok=True)
    out = PackWriter(IO, path, UUID, writer, seq)
    for raw in chunks:
        out.append(blake3(raw).digest(), len(raw), Encoded(RAW, b"", (), [raw]))
    out.finish()
    return out.name


def test_rebuild_from_footers_finds_everything(tmp_path: Path) -> None:
    """The index is derived data: losing it must lose nothing."""  # case 116
    chunks = [NOISE.randbytes(n) for n in (10, 3000, 70_000, 65536, 1)]
    first = write_pack(tmp_path, 1, chunks[:3])
    second = write_pack(tmp_path, 1, chunks[2:], writer="cd" * 8)
    (tmp_path / "packs" / "ab" / ".tmp-123-leftover.pack").write_bytes(b"half")
    (tmp_path / "packs" / "lost+found").mkdir()
    (tmp_path / "packs" / "cd" / f"{first}.pack").write_bytes(b"in the wrong folder")
    assert list_packs(IO, str(tmp_path)) == sorted([first, second])
    index = MemoryIndex()
    assert refresh(index, IO, str(tmp_path), [first, second], store_uuid=UUID) == []
    for raw in chunks:
        for where in index.locations(blake3(raw).digest()):
            handle = IO.open(pk.pack_path(str(tmp_path), where.pack))
            got = bytearray(where.stored)
            IO.read_into(handle, [got], where.payload)
            IO.close(handle)
            assert got == raw
    assert len(index.locations(blake3(chunks[2]).digest())) == 2
    refresh(index, IO, str(tmp_path), [second])
    assert index.packs() == {second}


def test_a_damaged_pack_is_left_out_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad footer must not keep a store from being opened."""  # case 116
    good = write_pack(tmp_path, 1, [b"a"])
    bad = write_pack(tmp_path, 2, [b"b"])
    path = pk.pack_path(str(tmp_path), bad)
    os.truncate(path, os.path.getsize(path) - 3)
    index = MemoryIndex()
    errors = refresh(index, IO, str(tmp_path), list_packs(IO, str(tmp_path)))
    assert [type(e) for e in errors] == [CorruptionError]
    assert index.packs() == {good}
    assert bad in caplog.text


class Unlistable(FileIO):
    def list(self, path: str) -> list[str]:
        if path.endswith("packs"):
            return super().list(path)
        raise OSError(5, "Input/output error")


def test_a_listing_error_never_reads_as_empty(tmp_path: Path) -> None:
    """A listing error taken for 'no packs' is how backup tools deleted everything."""
    assert list_packs(IO, str(tmp_path)) == []
    write_pack(tmp_path, 1, [b"a"])
    with pytest.raises(OSError, match="Input/output"):
        list_packs(Unlistable(), str(tmp_path))
