"""Prevents: compaction loses or changes a step, frees nothing, or does the same work again."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adam_trainer import AdamState, rounded
from authors import (
    CHUNK,
    Author,
    Session,
    check_everything,
    chunk_of,
    id_of,
    words_in,
)
from coded import Blob, rounded_blob, write_pack
from deltackpt_store import codecs, compact_plan, compact_run, compact_write, pack_output, proof
from deltackpt_store.client import WriterClient
from deltackpt_store.compact import compact
from deltackpt_store.compact_report import CompactReport
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.index import refresh
from deltackpt_store.leases import Lease
from deltackpt_store.names import relative_pack_path
from deltackpt_store.pack import Location
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.retention import Keep, apply, retire
from deltackpt_store.store import Store
from deltackpt_store.store_locks import collection_lock
from deltackpt_store.throttle import TokenBucket
from deltackpt_store.verify import verify
from dense_trainer import DenseState
from toy_trainer import CHUNK as TOY_CHUNK
from toy_trainer import SEED, ToyTrainer, read_arrays

IO = FileIO()
PLACES = [f"place {i}" for i in range(6)]
New = Callable[..., Author]


@pytest.fixture
def new(store: Store) -> Iterator[New]:
    authors: list[Author] = []

    def open_one(name: str = "main", run: str = "main", codec: str = "small") -> Author:
        author = Author(Store.open(store.path), name, codec=codec)
        author.run = run
        authors.append(author)
        return author

    yield open_one
    for author in authors:
        author.close()


def step(change: int, places: list[str] = PLACES) -> list[str]:
    """A state in which every chunk is a little changed; 0 is the base."""
    return [f"{place}~{change}" if change else place for place in places]


def train(new: New, steps: int, *, keep: int | None = None, **options: Any) -> None:
    """Steps 0 (the base) to `steps`, of which the last `keep` stay listed."""
    author = new(**options)
    for number in range(steps + 1):
        author.save(number, step(number))
    author.close()
    if keep is not None:
        apply(author.store, author.run, Keep(last=keep))
        collect(author.store)


def records(store: Store) -> dict[bytes, list[Location]]:
    index = Store.open(store.path, io=store.io).index()
    found: dict[bytes, list[Location]] = {}
    for pack in index.packs():
        entries = index.entries(pack)
        assert entries is not None
        for chunk_id, location in entries.items(pack):
            found.setdefault(chunk_id, []).append(location)
    return found


def places_of(store: Store, word: str) -> list[Location]:
    return records(store).get(id_of(word), [])


def files(store: Store, top: str = "") -> dict[str, int]:
    return {
        str(p.relative_to(store.path)): p.stat().st_mtime_ns
        for p in Path(store.path, top).rglob("*")
        if p.is_file()
    }


# a new base -------------------------------------------------------------------------------------


# case 102
@pytest.mark.parametrize("codec", ["auto", "fast", "small", "none"])
def test_every_listed_step_restores_bit_for_bit(tmp_path: Path, codec: str) -> None:
    """A dense training of which the last steps are kept; the base they were coded against goes."""
    path = tmp_path / "store"
    client = WriterClient(
        path, "main", seed=SEED, ring_bytes=64 * TOY_CHUNK, slot_bytes=4 * TOY_CHUNK, mode="thread",
        options=WriterOptions(codec=codec, keep=Keep(last=3)),
    )  # fmt: skip
    state = DenseState(lr=1e-5)
    trainer = ToyTrainer(client, state.layout())
    saved: dict[int, list[bytes]] = {}
    for _ in range(7):
        arrays = state.advance()
        saved[state.step] = arrays
        trainer.save_now(state.step, arrays)
    client.close(60)
    store = Store.open(path)
    collect(store)
    roots = {c.step: store.snapshot(c).root for c in store.commits("main")}
    plan = compact(store, dry_run=True)
    report = compact(store)
    assert done(plan) == done(report)
    store = Store.open(path)
    assert store.steps("main") == [5, 6, 7]
    for number in (5, 6, 7):
        commit = store.find("main", number)
        assert store.snapshot(commit).root == roots[number]
        assert read_arrays(store, commit) == saved[number]
    kinds = records(store)
    newest = store.snapshot(store.head("main"))
    for ids in newest.chunks.values():
        for row in ids:
            assert any(not place.refs for place in kinds[row.tobytes()])
    assert compact(store).nothing
    if codec == "small":
        assert report.chunks_own > 10
        assert report.chunks_recoded > 10
        assert report.bytes_after < report.bytes_before
        [base] = report.bases
        assert base.packs_after < base.packs_before
        assert base.bytes_after < base.bytes_before


def done(report: CompactReport) -> tuple[object, ...]:
    """What a dry run can know."""
    bases = [(b.run, b.step, b.number, b.packs_before, b.bytes_before) for b in report.bases]
    return (
        bases, report.not_due, report.chunks_own, report.chunks_recoded, report.chunks_copied,
        report.packs_before, report.bytes_before, sorted(report.removed),
    )  # fmt: skip


# case 102
def test_the_old_base_goes(store: Store, new: New) -> None:
    train(new, 9, keep=3)
    assert places_of(store, "place 0"), "the base that no listed step names is still needed"
    report = compact(store)
    assert (report.chunks_own, report.chunks_recoded) == (6, 12)
    assert not places_of(store, "place 0")
    assert [place.refs for place in places_of(store, "place 0~9")] == [()]
    assert [place.refs for place in places_of(store, "place 0~8")] == [(id_of("place 0~9"),)]
    check_everything(Store.open(store.path))
    assert Store.open(store.path).steps("main") == [7, 8, 9]
    assert report.lighter_steps == 3
    assert report.packs_after == len(store.packs.names()) == 1


def test_a_reader_that_knows_the_format_alone_reads_what_was_compacted(
    store: Store, new: New
) -> None:
    """Compaction moves chunks out of the packs that manifests name, and leaves records behind
    whose references are gone."""
    author = new()
    for number in range(5):
        author.save(number, [*step(number), f"kept {number % 2}", "a", "b", "c"])
    author.close()
    apply(store, "main", Keep(last=2))
    compact(store)
    tool = Path(__file__).parents[2] / "tools" / "read_store.py"
    for number in (3, 4):
        done = subprocess.run(
            [sys.executable, str(tool), store.path, f"main@{number}", "w"],
            capture_output=True, check=True,
        )  # fmt: skip
        words = [*step(number), f"kept {number % 2}", "a", "b", "c"]
        assert done.stdout == b"".join(map(chunk_of, words))


# case 149
def test_what_was_read_before_does_not_change(store: Store, new: New) -> None:
    """No file is changed in place: views of what was read, and open files, stay as they are."""
    train(new, 4, keep=2)
    maps = []
    for path in Path(store.path).glob("packs/*/*.pack"):
        with path.open("rb") as file:
            maps.append((path.read_bytes(), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    assert compact(store).removed
    for content, mapped in maps:
        assert mapped[:] == content
        mapped.close()


def test_a_second_compaction_has_nothing_to_do(store: Store, new: New) -> None:
    train(new, 5, keep=2)
    assert not compact(store).nothing
    before = files(store)
    report = compact(store)
    assert report.nothing
    assert not report.chunks
    after = files(store)
    assert {k: v for k, v in before.items() if "lock" not in k and "gc/" not in k} == {
        k: v for k, v in after.items() if "lock" not in k and "gc/" not in k
    }


def test_a_dry_run_touches_nothing_and_tells_what_is_done(store: Store, new: New) -> None:
    train(new, 6, keep=2)
    author = new("other", "other")
    author.save(1, ["thin", "other"])
    author.save(2, ["other"])
    retire(store, [store.read_commit("other", 1)])
    before = files(store)
    plan = compact(store, dry_run=True)
    assert files(store) == before
    author.close()
    assert done(plan) == done(compact(store))


def test_a_base_that_a_listed_step_names_stays(store: Store, new: New) -> None:
    """Its chunks cannot go, and what is coded against them may as well stay as it is."""
    train(new, 3)
    report = compact(store)
    assert (report.chunks_own, report.chunks_recoded) == (6, 0)
    assert [place.refs for place in places_of(store, "place 0~2")] == [(id_of("place 0"),)]
    check_everything(Store.open(store.path))


def test_what_follows_from_other_chunks_of_its_step_goes_on_so(store: Store, new: New) -> None:
    """Guard: 16-bit weights that are the rounded masters of the same step are not stored again."""
    mixture = np.random.default_rng(0)
    old = [mixture.standard_normal(CHUNK // 4, np.float32) for _ in range(2)]
    masters = [values + (np.arange(len(values)) < 5) * np.float32(1e-4) for values in old]
    author = new()
    for values in old:
        author.writer.put(values.tobytes(), dtype="float32")
    author.writer.flush()
    refresh(author.index, IO, store.path, store.packs.names())
    puts = [
        author.writer.put(new.tobytes(), dtype="float32", reference=_id(values.tobytes()))
        for values, new in zip(old, masters, strict=True)
    ]
    assert all(put.refs for put in puts)
    author.writer.flush()
    raw = b"".join(map(rounded, masters))
    derived = rounded_blob(raw, "bfloat16", [m.tobytes() for m in masters], 0)
    write_pack(store, [derived, Blob(codecs.RAW, chunk_of("waste"))], "cd" * 8)
    _commit_large(author, [*(put.id for put in puts), _id(raw)], CHUNK)
    author.close()
    report = compact(store)
    assert report.chunks_own == 2
    kinds = records(store)
    assert [place.codec for place in kinds[_id(raw)]] == [codecs.CAST]
    assert {place.codec for put in puts for place in kinds[put.id]} <= {codecs.RAW, codecs.PLANES}
    assert not any(_id(values.tobytes()) in kinds for values in old)
    assert not places_of(store, "waste"), "a record without a payload is a small part of its pack"
    [base] = report.bases
    assert base.bytes_after < base.bytes_before + CHUNK
    assert verify(Store.open(store.path), level="chunks").ok
    assert compact(store).nothing


def test_predicted_steps_stay_predicted_where_that_is_smaller(tmp_path: Path) -> None:
    """Guard: a chunk that follows from several others is small; coded anew it would not be."""
    path = tmp_path / "store"
    state = AdamState(2 * TOY_CHUNK // 4)
    client = WriterClient(
        path, "main", seed=SEED, ring_bytes=64 * TOY_CHUNK, slot_bytes=4 * TOY_CHUNK, mode="thread",
        options=WriterOptions(codec="auto", shadow=True, keep=Keep(last=4)),
    )  # fmt: skip
    trainer = ToyTrainer(client, state.layout())
    saved: dict[int, list[bytes]] = {}
    for _ in range(8):
        arrays = state.advance()
        saved[state.step] = arrays
        trainer.save_now(state.step, arrays, adam=state.hints())
    client.close(60)
    collect(Store.open(path))
    report = compact(Store.open(path))
    assert report.chunks_own
    store, kinds = Store.open(path), records(Store.open(path))
    for commit in store.commits("main"):
        assert read_arrays(store, commit) == saved[commit.step]
    weights = store.snapshot(store.find("main", 7)).chunks[1]
    assert {place.codec for row in weights for place in kinds[row.tobytes()]} == {codecs.ADAM}
    assert verify(Store.open(path)).ok
    assert compact(Store.open(path)).nothing


def test_one_run_alone(store: Store, new: New) -> None:
    """What only another run needs stays as it is, and so does an old base that both need."""
    train(new, 4, keep=1)
    fork = new("fork", "fork")
    fork.save(1, ["place 0~100", "place 1~100", "fork"])
    fork.save(2, ["place 0~101", "place 1~101", "fork"])
    fork.close()
    apply(store, "fork", Keep(last=1))
    collect(store)
    report = compact(store, run="main")
    assert [base.run for base in report.bases] == ["main"]
    assert places_of(store, "place 0"), "the fork needs it"
    assert not places_of(store, "place 2")
    assert [place.refs for place in places_of(store, "place 0~101")] == [(id_of("place 0"),)]
    check_everything(Store.open(store.path))
    report = compact(store)
    assert [base.run for base in report.bases] == ["fork"]
    assert () in [place.refs for place in places_of(store, "place 0~101")]
    check_everything(Store.open(store.path))


def test_steps_of_another_layout_keep_their_base(store: Store, new: New) -> None:
    """Places are found by the extents' names; what has no place in the new base stays coded."""
    author = new()
    author.save(0, step(0))
    author.save(1, step(1))
    author.save(2, step(2)[:4])  # another layout: the one tensor is shorter
    author.close()
    retire(store, [store.read_commit("main", 1)])
    collect(store)
    compact(store)
    check_everything(Store.open(store.path))
    assert places_of(store, "place 5"), "step 1 is coded against it"


@pytest.mark.parametrize(("ratio", "due"), [(0.0, True), (0.02, True), (5.0, False)])
def test_when_ratio(store: Store, new: New, ratio: float, due: bool) -> None:
    train(new, 4, keep=2)
    report = compact(store, when_ratio=ratio, min_live_share=0)
    assert bool(report.bases) == due
    assert report.not_due == ([] if due else ["main"])


def test_every(store: Store, new: New) -> None:
    """Counts from the last base, also when that is long retired."""
    author = new()
    for number in range(4):
        author.save(number, step(number))
    assert compact(store, every=4, dry_run=True).not_due == ["main"]
    assert compact(store, every=3, dry_run=True).bases
    compact(store, every=3, wait=let(author))
    author.save(4, step(4))
    author.save(5, step(5))
    retire(store, [c for c in store.commits("main") if c.step < 5])
    author.close()
    collect(store)
    assert compact(store, every=3, dry_run=True).not_due == ["main"]
    assert compact(store, every=2, dry_run=True).bases


def let(*others: Author | Session) -> Callable[[list[str]], bool]:
    """Others get their turn while the compaction waits for them; not for ever."""
    turns = 0

    def wait(_: list[str]) -> bool:
        nonlocal turns
        turns += 1
        for other in others:
            other.heed()
        return turns < 30

    return wait


def test_what_is_far_from_the_new_base_is_coded_against_its_neighbour(
    store: Store, new: New
) -> None:
    """Guard: a family is not coded against a base that it does not resemble."""
    author = new()
    near = ["x", "y"]
    author.save(0, near)
    for number in range(1, 5):
        author.save(number, [f"{word}~{number}" for word in near])
    author.save(5, ["quite", "different"])
    author.close()
    retire(store, [store.read_commit("main", 1)])
    collect(store)
    before = sum(place.stored for places in records(store).values() for place in places)
    report = compact(store)
    assert report.chunks_recoded == 8
    assert [place.refs for place in places_of(store, "x~4")] == [()]
    assert [place.refs for place in places_of(store, "x~1")] == [(id_of("x~4"),)]
    after = sum(place.stored for places in records(store).values() for place in places)
    assert after < before + CHUNK / 4
    assert compact(store).nothing


# packs ------------------------------------------------------------------------------------------


def test_packs_with_little_in_them_are_emptied(store: Store, new: New) -> None:
    author = new(codec="none")
    first = author.save(1, ["kept", "a", "b", "c"])
    author.save(2, ["kept", "d"])
    author.close()
    retire(store, [first])
    collect(store)
    full = store.packs.names()
    assert compact(store, min_live_share=0.2).nothing
    report = compact(store)
    assert report.chunks_copied == 1
    assert len(report.removed) == 1
    assert set(full) - set(store.packs.names()) == set(report.removed)
    assert report.bytes_after < report.bytes_before - 2 * CHUNK
    check_everything(Store.open(store.path))


def test_records_move_as_they_are(store: Store, new: New) -> None:
    """A coded record keeps its coding; what it is coded against is no reason to code it anew."""
    author = new()
    author.save(0, ["a", "b"])
    first = author.save(1, ["a~1", "b", "waste", "more waste"])
    author.save(2, ["a~1", "b"])
    author.close()
    retire(store, [first])
    collect(store)
    [old] = places_of(store, "a~1")
    compact(store, when_ratio=10)
    [moved] = places_of(store, "a~1")
    assert moved.pack != old.pack
    assert moved[3:] == old[3:]
    check_everything(Store.open(store.path))


def test_many_small_packs_are_merged(store: Store, new: New) -> None:
    author = new(codec="none")
    for number in range(compact_plan.MANY):
        author.save(number, [f"word {number}"])
    author.close()
    report = compact(store)
    assert report.packs_before == compact_plan.MANY
    assert report.packs_after == 1
    check_everything(Store.open(store.path))
    assert compact(store).nothing


def test_small_packs_do_not_count_when_there_are_few(store: Store, new: New) -> None:
    author = new(codec="none")
    for number in range(compact_plan.MANY - 1):
        author.save(number, [f"word {number}"])
    author.close()
    assert compact(store).nothing


def test_garbage_goes_by_the_way(store: Store, new: New) -> None:
    author = new(codec="none")
    first = author.save(1, ["garbage"])
    author.save(2, ["kept"])
    author.close()
    retire(store, [first])
    report = compact(store)
    assert not report.chunks
    assert len(report.removed) == 1


# damage -----------------------------------------------------------------------------------------


def damage(store: Store, place: Location) -> None:
    path = Path(store.path, relative_pack_path(place.pack))
    data = bytearray(path.read_bytes())
    data[place.payload] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("word", ["place 0", "place 0~5", "place 0~6"])
def test_nothing_goes_when_a_chunk_cannot_be_read(store: Store, new: New, word: str) -> None:
    train(new, 6, keep=2)
    [place] = places_of(store, word)
    damage(store, place)
    packs = set(store.packs.names())
    with pytest.raises(CorruptionError):
        compact(store)
    assert packs <= set(store.packs.names())


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_record_is_replaced_by_a_good_copy(store: Store, new: New, which: int) -> None:
    """Two packs to be emptied hold the same chunk, and one of the records is damaged."""
    author = new(codec="none")
    first = author.save(1, ["kept", "a", "b", "c"])
    author.save(2, ["kept"])
    author.close()
    retire(store, [first])
    write_pack(store, [Blob(codecs.RAW, chunk_of(w)) for w in ("kept", "d", "e", "f")], "ab" * 8)
    places = sorted(places_of(store, "kept"))
    damage(store, places[which])
    compact(store)
    check_everything(Store.open(store.path))
    assert compact(store).nothing
    assert verify(Store.open(store.path)).ok


# beside others ----------------------------------------------------------------------------------


def test_one_compaction_at_a_time(store: Store, new: New) -> None:
    train(new, 3, keep=1)
    handle = IO.lock(f"{store.path}/gc/compact.lock", create=True)
    with pytest.raises(ConflictError, match="another compaction runs") as caught:
        compact(store)
    assert caught.value.kind == "compaction-running"
    IO.close(handle)
    assert compact(store).chunks


def test_a_running_collection_is_waited_for(store: Store, new: New) -> None:
    """It gives way when that takes too long; what was written serves the next compaction."""
    train(new, 4, keep=2)
    with collection_lock(IO, store.path), pytest.raises(ConflictError) as caught:
        compact(store, timeout=0)
    assert caught.value.kind == "gc-running"
    check_everything(Store.open(store.path))
    again = compact(store)
    assert not again.chunks, "copies that were written before are used"
    assert again.removed
    assert not places_of(store, "place 0")
    check_everything(Store.open(store.path))


def test_a_writer_that_does_not_answer_stops_the_deletions(store: Store, new: New) -> None:
    train(new, 4, keep=2)
    lease = Lease.take(IO, store.path, "ab" * 8)
    assert lease is not None
    with pytest.raises(ConflictError) as caught:
        compact(store, timeout=0)
    assert caught.value.kind == "gc-busy"
    check_everything(Store.open(store.path))
    lease.release()
    assert compact(store).removed
    assert not places_of(store, "place 0")


def test_a_collection_in_between_leaves_what_was_written(
    store: Store, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: a compaction claims its packs, which nothing names yet."""
    author = new(codec="none")
    first = author.save(1, ["kept", "a", "b", "c"])
    author.save(2, ["kept"])
    author.close()
    retire(store, [first])
    real = compact_run.Compaction._collect

    def collecting(self: Any, writer: Any, *rest: Any) -> Any:
        mine = [name for name in store.packs.names() if name.startswith(writer.writer)]
        collect(Store.open(store.path), avoid=mine, wait=let(_Heeds(writer)))
        assert set(mine) < set(store.packs.names())
        return real(self, writer, *rest)

    monkeypatch.setattr(compact_run.Compaction, "_collect", collecting)
    assert compact(store).removed
    check_everything(Store.open(store.path))


class _Heeds(Author):
    def __init__(self, writer: Any) -> None:
        self.writer = writer


def test_a_training_codes_against_the_new_base(store: Store) -> None:
    """Guard: the new base is announced and adopted; else the old one would be needed for ever."""
    session = Session(store, "main", IO, codec="small", keep=Keep(last=3))
    for number in range(6):
        session.save(number, step(number), relative=number or None)
    assert compact(store, wait=let(session)).bases
    session.save(6, step(6), relative=6)
    [place] = places_of(store, "place 0~6")
    assert place.refs == (id_of("place 0~5"),)
    for number in (7, 8, 9):
        session.save(number, step(number), relative=number)
    session.close()
    collect(store)
    assert not places_of(store, "place 0")
    assert {p.refs for n in (7, 8, 9) for p in places_of(store, f"place 0~{n}")} == {
        (id_of("place 0~5"),)
    }
    check_everything(Store.open(store.path))


def test_what_was_saved_in_between_is_coded_anew(store: Store) -> None:
    """Guard: steps that were saved while compaction was writing do not keep the old base."""
    session = Session(store, "main", IO, codec="small", keep=Keep(last=4))
    for number in range(6):
        session.save(number, step(number), relative=number or None)
    saved: list[int] = []

    def wait(_: list[str]) -> bool:
        if not saved:  # the announcement is out, and this session has not seen it
            saved.append(6)
            session.writer._publisher._writer.heed = lambda: False
            session.save(6, step(6), relative=6)
            del session.writer._publisher._writer.heed
        session.heed()
        return len(saved) < 30

    report = compact(store, wait=wait)
    assert saved
    session.close()
    assert report.chunks_recoded > 6 * 2
    assert [p.refs for p in places_of(store, "place 0~6") if p.pack in store.packs.names()]
    assert not places_of(store, "place 0")
    check_everything(Store.open(store.path))


def test_a_stale_announcement_is_not_adopted(store: Store, new: New) -> None:
    """A session that begins later knows better bases than a compaction of long ago."""
    train(new, 3, keep=1)
    compact(store)
    author = new("later")
    author.parent = store.head("main")
    author.save(4, ["fresh 0", *step(3)[1:]])
    author.close()
    session = Session(store, "main", IO, codec="small")
    head = store.head("main")
    session.save(5, ["fresh 0~1", *step(3)[1:]], commit=head, parent=head)
    session.heed()
    tables = [table for table in session.writer._tables.values() if table is not None]
    assert {table.base(0, 0) for table in tables} == {id_of("fresh 0")}
    session.close()


def test_retention_does_not_take_the_base_in_the_making(
    store: Store, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the step that is to be the base is held; its chunks stay named until the end."""
    train(new, 4, keep=2)
    head = store.head("main")
    real = compact_run.Compaction._write

    def write(self: Any, *rest: Any) -> None:
        if not seen:
            author = new("meanwhile")
            author.parent = head
            author.save(5, step(5))
            seen.append([c.step for c in apply(store, "main", Keep(last=1)).retired])
            author.close()
        real(self, *rest)

    seen: list[list[int]] = []
    monkeypatch.setattr(compact_run.Compaction, "_write", write)
    compact(store)
    assert seen == [[3]]
    check_everything(Store.open(store.path), [head])
    assert [c.step for c in apply(store, "main", Keep(last=1)).retired] == [4]


def test_a_reader_goes_on_reading(store: Store, new: New) -> None:
    """It has looked up where chunks lie before these packs go."""
    train(new, 4, keep=2)
    reader = Store.open(store.path)
    commit = reader.head("main")
    assert words_in(reader, commit) == step(4)
    compact(store)
    assert words_in(reader, commit) == step(4)
    assert words_in(reader, reader.find("main", 3)) == step(3)


# bounds -----------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_state(
    store: Store, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact_write, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(pack_output, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(proof, "_BATCH_BYTES", 1 << 20)
    piece = 1 << 18
    chunks = [np.random.default_rng(i).bytes(piece) for i in range(4)]
    changed = [
        bytes(bytearray(c[:-8]) + np.random.default_rng(n).bytes(8)) for n in range(40)
        for c in chunks
    ]  # fmt: skip
    write_pack(store, [Blob(codecs.RAW, c) for c in chunks], "aa" * 8)
    author = new()
    puts = [author.writer.put(c, reference=_id(chunks[i % 4])) for i, c in enumerate(changed)]
    assert all(put.refs for put in puts)
    _commit_large(author, [put.id for put in puts], piece)
    author.close()
    tracemalloc.start()
    try:
        report = compact(store)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.chunks_own == 160
    assert report.read_bytes == 160 * piece == 40 << 20
    assert peak < 20 << 20


def _id(chunk: bytes) -> bytes:
    from blake3 import blake3

    return blake3(chunk).digest()


def _commit_large(author: Author, ids: list[bytes], piece: int) -> None:
    import msgspec
    from authors import layout_of
    from deltackpt_store.manifest import ExtentSpec, Snapshot
    from deltackpt_store.manifest_io import to_base

    layout = layout_of(len(ids))
    layout = msgspec.structs.replace(
        layout, extents=(ExtentSpec(len(ids) * piece, piece, "uint8"),),
        tensors=(msgspec.structs.replace(layout.tensors[0], shape=(len(ids) * piece,)),),
    )  # fmt: skip
    author.writer.flush()
    table = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 32)
    manifest = to_base(
        Snapshot(layout, {1: msgspec.msgpack.encode(1)}, {}, {0: table}), author.store.packs.names()
    )
    digest = author.writer.write_manifest(manifest)
    author.writer.commit(
        run="main", step=1, parent=None, manifest=digest, base=None, root=manifest.root,
        packs=manifest.packs,
    )  # fmt: skip


def test_the_rate_is_kept_by_a_clock_of_our_own(store: Store, new: New) -> None:
    train(new, 6, keep=3)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    bucket = TokenBucket(10_000, clock=lambda: now[0], sleep=sleep)
    report = compact(store, max_rate=bucket)
    assert bucket.taken > report.read_bytes / 2 + report.written_bytes
    assert now[0] == pytest.approx(bucket.taken / 10_000, abs=0.5)
    check_everything(Store.open(store.path))


def test_no_space_is_noticed_before_anything_is_written(store: Store, new: New) -> None:
    train(new, 4, keep=2)

    class Full(FileIO):
        def free_bytes(self, path: str) -> int:
            return 1000

    before = set(files(store, "packs"))
    with pytest.raises(StorageError) as caught:
        compact(Store.open(store.path, io=Full()))
    assert caught.value.kind == "no-space"
    assert caught.value.errno == errno.ENOSPC
    assert set(files(store, "packs")) == before


@pytest.mark.parametrize(
    "options",
    [{"when_ratio": -1}, {"every": 0}, {"min_live_share": 2}, {"codec": "best"}, {"max_rate": 0}],
)
def test_options_are_checked(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        compact(store, **options)
    assert next(iter(options)) in str(caught.value.context.get("option"))


def test_an_unknown_run(store: Store) -> None:
    with pytest.raises(NotFoundError):
        compact(store, run="nobody")


def test_an_empty_store(store: Store) -> None:
    report = compact(store)
    assert report.nothing
    assert dataclasses.asdict(report)["packs_after"] == 0
    os.rmdir(f"{store.path}/packs")
    assert compact(store, dry_run=True).nothing
