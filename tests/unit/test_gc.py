"""Prevents: garbage collection deletes what is needed, forgets what is not, or cannot go on.

Each guard of the protocol has a test here, in test_gc_writers.py or test_gc_full_disk.py that fails
without it; see docs/durability.md.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from authors import CHUNK, Author, Session, check_everything, chunk_of, collected, id_of, words_in
from collecting import files, with_garbage
from deltackpt_store import leases
from deltackpt_store.catalogue import Catalogue
from deltackpt_store.codecs import Encoded
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import FileIO, temporary_name
from deltackpt_store.gc import collect
from deltackpt_store.generation import newest_number, read_generation
from deltackpt_store.id_keys import IdKeys
from deltackpt_store.leases import Lease, hold
from deltackpt_store.mark import mark
from deltackpt_store.names import number_name, relative_pack_path
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.retention import Keep, apply, retire
from deltackpt_store.roots import read_roots
from deltackpt_store.store import Store

IO = FileIO()


# what goes and what stays -----------------------------------------------------------------------


def test_what_nothing_reaches_goes(store: Store, new: Callable[..., Author]) -> None:
    with_garbage(store, new)
    garbage = store.packs.names()
    report = collect(store)
    assert report.commits == [("main", 1)]
    assert len(report.packs) == len(report.manifests) == 1
    assert set(report.packs) < set(garbage)
    assert report.pack_bytes > CHUNK
    assert len(files(store, "manifests")) == len(files(store, "packs")) == 1
    assert [f for f in files(store, "runs") if not f.endswith(".lock")] == [
        f"runs/main/{number_name(2)}"
    ]
    check_everything(store)


def test_a_store_without_garbage_stays_as_it_is(store: Store, new: Callable[..., Author]) -> None:
    new().save(1, ["a"])
    before = files(store)
    assert collected(store).nothing
    assert newest_number(IO, store.path) == 0
    assert set(before) - set(files(store)) == set()


def test_a_dry_run_tells_and_touches_nothing(store: Store, new: Callable[..., Author]) -> None:
    with_garbage(store, new)
    before = {f: os.stat(f"{store.path}/{f}").st_mtime_ns for f in files(store)}
    plan = collect(store, dry_run=True)
    assert {f: os.stat(f"{store.path}/{f}").st_mtime_ns for f in files(store)} == before
    done = collect(store)
    assert (plan.packs, plan.manifests, plan.commits) == (done.packs, done.manifests, done.commits)


def test_chunks_that_live_ones_are_coded_against_stay(
    store: Store, new: Callable[..., Author]
) -> None:
    """A reference that no manifest names is needed all the same."""
    author = new()
    author.save(1, ["reference"])
    author.save(2, ["coded"])
    author.close()
    reference, plain = store.packs.names()
    coded = _pack(store, "11" * 8, [("coded", ("reference",))])
    os.unlink(f"{store.path}/{relative_pack_path(plain)}")  # the coded record is the only one left
    retire(store, [store.read_commit("main", 1)])
    report = collect(store)
    assert report.commits == [("main", 1)]
    assert store.packs.names() == sorted([coded, reference])
    os.unlink(f"{store.path}/{relative_pack_path(reference)}")
    with pytest.raises(CorruptionError, match="coded against"):
        collect(store)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(
    store: Store, new: Callable[..., Author]
) -> None:
    """Else a crash leaves files for ever, or a pack vanishes while it is being written."""
    living = new("living")
    living.writer.put(memoryview(chunk_of("x")))
    names = {
        "dead": f"packs/00/{temporary_name('00112233445566aa-00000001.pack')}",
        "manifest": f"manifests/{temporary_name('ab' * 32)}",
        "commit": f"runs/main/{temporary_name(number_name(7))}",
        "top": temporary_name("FORMAT"),
        "cache": f"cache/{temporary_name('verified')}",
        "living": f"packs/00/{temporary_name(f'{living.writer.writer}-00000001.pack')}",
    }
    for name in names.values():
        path = Path(store.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    report = collected(store, living)
    assert set(report.leftovers) == set(names.values()) - {names["living"]}
    assert {n for n in names.values() if Path(store.path, n).exists()} == {names["living"]}


@pytest.mark.parametrize("by", ["pin", "hold"])
def test_a_retired_step_that_is_pinned_or_held_stays_whole(
    store: Store, new: Callable[..., Author], by: str
) -> None:
    """Guard: pins and holds are roots. Retention looked just before they came."""
    author = new()
    first = author.save(1, ["first"])
    author.save(2, ["second"])
    author.close()
    held = hold(IO, store.path, first) if by == "hold" else None
    if by == "pin":
        store.pin("good", first)
    retire(store, [first])
    assert collect(store).nothing
    assert words_in(store, first) == ["first"]
    if held is not None:
        held.release()
    else:
        store.unpin("good")
    assert len(collect(store).packs) == 1


def test_commit_numbers_are_never_used_again(store: Store, new: Callable[..., Author]) -> None:
    author = new()
    commits = [author.save(step, [str(step)]) for step in range(4)]
    retire(store, commits[:3])
    collected(store, author)
    assert author.save(9, ["x"]).number == 5
    author.close()
    assert new("again").save(10, ["y"]).number == 6


# anything unreadable ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["commit", "manifest", "pack", "pin", "base"])
def test_nothing_is_deleted_beside_damage(
    store: Store, new: Callable[..., Author], what: str
) -> None:
    """What a damaged record needs is not known, so nothing may be called unneeded."""
    with_garbage(store, new)
    head = store.head("main")
    store.pin("good", head)
    path = {
        "commit": f"runs/main/{number_name(head.number)}",
        "manifest": f"manifests/{head.manifest.hex()}",
        "base": f"manifests/{head.manifest.hex()}",
        "pack": relative_pack_path(store.snapshot(head).packs[0]),
        "pin": "pins/good",
    }[what]
    file = Path(store.path, path)
    if what == "base":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    before = files(store)
    for dry in (True, False):
        with pytest.raises(CorruptionError):
            collect(store, dry_run=dry)
    assert set(before) <= set(files(store))


@pytest.mark.parametrize("what", ["runs", "runs/main", "pins", "packs", "manifests", "gc/holds"])
def test_a_listing_that_fails_is_not_an_empty_one(
    store: Store, new: Callable[..., Author], what: str
) -> None:
    with_garbage(store, new)
    held = hold(IO, store.path, store.head("main"))
    assert held is not None

    class Unlistable(FileIO):
        def list(self, path: str) -> list[str]:
            if path == f"{store.path}/{what}":
                raise OSError(errno.ESTALE, "Stale file handle", path)
            return super().list(path)

    before = files(store)
    with pytest.raises(StorageError):
        collect(Store.open(store.path, io=Unlistable()))
    assert set(before) <= set(files(store))
    held.release()


@pytest.mark.parametrize("what", ["pack", "manifest", "commit"])
def test_the_way_out_of_damage_without_a_copy_is_told_and_works(
    store: Store, new: Callable[..., Author], what: str
) -> None:
    """Prevents: the newest step is damaged, nothing has a copy, and nothing is ever collected
    again, or files are deleted by hand to get there."""
    author = new()
    author.save(1, ["a"])
    newest = author.save(2, ["b"])
    place = store.index().get(id_of("b"))
    assert place is not None
    record = Path(store.path, "runs/main", number_name(newest.number))
    victim = {
        "pack": Path(store.packs.path(place.pack)),
        "manifest": Path(store.path, "manifests", newest.manifest.hex()),
        "commit": record,
    }[what]
    if what == "pack":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    author.close()
    with pytest.raises(CorruptionError) as caught:
        collect(store)
    hint = caught.value.hint or ""
    assert "deltackpt repair --from" in hint
    author = new("another")
    author.save(3, ["c"], number=newest.number + 1)
    author.close()
    if what == "commit":
        assert "--accept-lost" in hint
        record.unlink()
        collect(store, accept_lost=True)
    else:
        assert "deltackpt retain" in hint
        apply(Store.open(store.path), "main", Keep(last=1))
        collect(store)
    assert [commit.step for commit in Store.open(store.path).commits("main")][-1] == 3
    assert collect(store).nothing


def test_a_lost_directory_of_pins_is_not_an_empty_one(
    store: Store, new: Callable[..., Author]
) -> None:
    with_garbage(store, new)
    Path(store.path, "pins").rmdir()
    with pytest.raises(StorageError, match="pins"):
        collect(store)
    assert len(store.packs.names()) == 2


def test_a_listed_commit_that_cannot_be_found_stops_everything(
    store: Store, new: Callable[..., Author]
) -> None:
    """A stale directory of a network file system must not make a step count as withdrawn."""
    with_garbage(store, new)
    head = f"{store.path}/runs/main/{number_name(2)}"

    class Stale(FileIO):
        def open(self, path: str) -> int:
            if path == head:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            return super().open(path)

    with pytest.raises(CorruptionError, match="is listed and cannot be found"):
        collect(Store.open(store.path, io=Stale()))
    assert len(store.packs.names()) == 2


def test_a_store_that_needs_more_is_left_alone(store: Store) -> None:
    import msgspec

    store.format = msgspec.structs.replace(store.format, gc=("something-new",))
    with pytest.raises(UnsupportedFormatError, match="something-new"):
        collect(store)


# collections among themselves -------------------------------------------------------------------


def test_one_collection_at_a_time(store: Store, new: Callable[..., Author]) -> None:
    """Guard: the lock. Two that choose different copies would delete both."""
    with_garbage(store, new)
    author = new("living")
    author.writer.heed()
    turned_away: list[str] = []

    def second(_: object) -> bool:
        with pytest.raises(ConflictError) as caught:
            collect(store, timeout=0)
        turned_away.append(caught.value.kind)
        author.heed()
        return True

    collect(store, wait=second)
    assert turned_away == ["gc-running"]


def test_a_collection_that_was_overtaken_deletes_nothing(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: the check before the deletions, for file systems where both got the lock."""
    with_garbage(store, new)
    author = new("living")
    author.writer.heed()

    overtaken: list[bool] = []

    def overtake(_: object) -> bool:
        if overtaken:
            return True
        overtaken.append(True)
        os.unlink(f"{store.path}/gc/lock")
        author.heed()
        collected(store, author)
        author.save(3, ["garbage"])
        return True

    with pytest.raises(ConflictError, match="taken over"):
        collect(store, wait=overtake)
    check_everything(store)


def test_what_was_condemned_stays_the_copy_to_go(store: Store, new: Callable[..., Author]) -> None:
    """Guard: a collection that goes on after a killed one chooses the same copies."""
    one, two = new("one", "one"), new("two", "two")
    one.save(1, ["same"])
    two.save(1, ["same"])
    one.close()
    two.close()
    names = set(store.packs.names())
    writer = Lease.take(IO, store.path, "ee" * 8)  # never answers
    assert writer is not None
    for chosen in sorted(names):
        with pytest.raises(ConflictError):
            collect(store, avoid=[chosen], timeout=0)
        last = read_generation(IO, store.path, newest_number(IO, store.path))
        assert last.packs == {min(names)}
    writer.release()
    assert collect(store).packs == [min(names)]
    check_everything(store)


def test_writers_may_use_again_what_was_pardoned(store: Store, new: Callable[..., Author]) -> None:
    with_garbage(store, new)
    author = new("living")
    author.prepare(["garbage"])
    packs = store.packs.names()
    assert collected(store, author).pardoned
    author.finish(3)
    author.close()
    assert new("next").save(4, ["garbage"]).number == 4
    assert store.packs.names() == packs


# numbers, copies, circles -----------------------------------------------------------------------


def test_a_stalled_writer_cannot_take_a_number_that_was_collected(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: the boundary (a writer that stalled while others saved, retired and collected)."""
    stalled = new("stalled")
    first = stalled.save(1, ["a"])
    other = new("other")
    other.parent = first
    second, third = other.save(2, ["b"]), other.save(3, ["c"])
    assert (second.number, third.number) == (2, 3)
    retire(store, [second])
    other.close()

    def finish(_: object) -> bool:
        stalled.heed()
        return True

    collect(store, wait=finish)
    with pytest.raises(ConflictError):
        stalled.save(2, ["late"], number=2)
    assert store.steps("main") == [1, 3]


def test_the_boundary_of_earlier_collections_stays(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: else a writer that stalls over two collections takes a number that was collected."""
    author = new()
    first = author.save(1, ["a"])
    author.save(2, ["b"])
    retire(store, [first])
    collected(store, author)
    author.prepare(["never committed"])
    author.close()
    report = collect(store)
    assert report.packs
    assert read_generation(IO, store.path, report.generation).boundary == {"main": first.number}


def test_a_stalled_writer_notices_the_boundary_after_its_commit(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: the same, when the collection passes between look and creation."""
    stalled = new("stalled")
    first = stalled.save(1, ["a"])
    other = new("other")
    other.parent = first
    second = other.save(2, ["b"])
    other.save(3, ["c"])
    other.close()
    stalled.prepare(["late"])

    class Late(FileIO):
        done = False

        def exists(self, path: str) -> bool:
            found = super().exists(path)
            if path.endswith(f"{number_name(2)}.retired") and not self.done:
                self.done = True
                retire(store, [second])
                collected(store, stalled)
            return found

    stalled.writer._io = Late()  # pyright: ignore[reportPrivateUsage] - only its look-up is late
    with pytest.raises(ConflictError, match="made and collected before"):
        stalled.finish(2, number=2)
    assert store.steps("main") == [1, 3]
    check_everything(store)


def test_every_changed_byte_of_what_a_collection_writes_down_is_found(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: digests. Else a pack that is not condemned counts as such, or the other way round."""
    author = new()
    first = author.save(1, ["garbage"])
    author.save(2, ["kept"])
    retire(store, [first])
    author.prepare(["garbage"])
    acks: list[str] = []

    def wait(_: list[str]) -> bool:
        author.heed()
        acks.extend(os.listdir(f"{store.path}/gc/acks"))
        data = Path(store.path, "gc/acks", acks[0]).read_bytes()
        number, _, writer = acks[0].partition("-")
        for place in range(len(data)):
            changed = bytearray(data)
            changed[place] ^= 1 << place % 8
            Path(store.path, "gc/acks", f"{number}-{'ab' * 8}").write_bytes(changed)
            with pytest.raises(CorruptionError):
                leases.read_ack(IO, store.path, int(number), "ab" * 8)
        os.unlink(f"{store.path}/gc/acks/{number}-{'ab' * 8}")
        assert leases.read_ack(IO, store.path, int(number), writer)
        return True

    collect(store, wait=wait)
    assert acks
    generation = newest_number(IO, store.path)
    record = Path(store.path, "gc", number_name(generation))
    data = record.read_bytes()
    os.unlink(f"{record}.copy")
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        record.write_bytes(changed)
        with pytest.raises(CorruptionError):
            read_generation(IO, store.path, generation)


def test_a_copy_is_proved_before_the_other_one_goes(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: the proof. The copy to stay has a flipped bit that no table shows."""
    one, two = new("one", "one"), new("two", "two")
    one.save(1, ["same"])
    two.save(1, ["same"])
    one.close()
    two.close()
    stay, go = store.snapshot(store.head("one")).packs[0], store.snapshot(store.head("two")).packs
    path = Path(store.path, relative_pack_path(stay))
    data = bytearray(path.read_bytes())
    data[data.index(chunk_of("same")[:64]) + 70] ^= 1
    path.write_bytes(data)
    report = collect(store, avoid=go)
    assert report.packs == []
    assert list(go) == report.pardoned
    assert words_in(store, store.head("two")) == ["same"]


def _pack(store: Store, writer: str, records: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """A pack whose records claim to be coded against others."""
    from blake3 import blake3

    name = f"{writer}-00000001"
    pack = PackWriter(IO, f"{store.path}/{relative_pack_path(name)}", store.uuid, writer, 1)
    for word, refs in records:
        needs = tuple(blake3(chunk_of(ref)).digest() for ref in refs)
        pack.append(
            blake3(chunk_of(word)).digest(), CHUNK,
            Encoded(0 if not needs else 2, b"", needs, [chunk_of(word)]),
        )  # fmt: skip
    pack.finish()
    return name


def test_copies_are_not_chosen_in_a_circle(store: Store, new: Callable[..., Author]) -> None:
    """Guard: untangling. a is coded against b in one pack, b against a in another."""
    author = new()
    author.save(1, ["a", "b"])
    author.close()
    plain = store.packs.names()
    first = _pack(store, "11" * 8, [("a", ("b",))])
    second = _pack(store, "22" * 8, [("b", ("a",))])
    marking = mark(store, read_roots(store), avoid=plain)
    assert marking.keeping() == {first, second, *plain}
    assert mark(store, read_roots(store)).keeping() == set(plain)


def test_packs_that_claim_a_circle_do_not_end_a_session(
    store: Store, new: Callable[..., Author]
) -> None:
    """Prevents: a RecursionError where the writer asks which packs a step takes."""
    author = new()
    author.save(1, ["a", "b"])
    plain = store.packs.names()
    circle = [
        _pack(store, "ee" * 8, [("a", ("b",))]),
        _pack(store, "ff" * 8, [("b", ("a",))]),
    ]
    author.hints = circle
    commit = author.save(2, ["a", "b"])
    author.close()
    session = Session(store, "main", IO)
    third = session.save(3, ["a", "c"], commit=commit)
    assert third is not None
    fourth = session.save(4, ["a", "b"], relative=1)
    assert fourth is not None
    collected(store, session, avoid=plain)
    session.close()
    check_everything(store, [third, fourth])


def test_a_record_without_its_references_does_not_stand_for_the_chunk(
    store: Store, new: Callable[..., Author]
) -> None:
    """Prevents: a lost reference of one copy keeps a healthy store from ever being collected.

    x is stored by itself in one pack and, in another one that is needed for z, coded against y,
    which is nowhere; also against w, which is coded against y itself.
    """
    author = new()
    first = author.save(1, ["garbage"])
    author.save(2, ["x"])
    plain = store.snapshot(store.head("main")).packs
    author.close()
    retire(store, [first])
    copies = [
        _pack(store, "11" * 8, [("x", ("y",)), ("z", ())]),
        _pack(store, "22" * 8, [("x", ("w",)), ("w", ("y",))]),
        _pack(store, "33" * 8, [("x", ("v",)), ("v", ("x",))]),  # decodable, while x is
    ]
    other = new("other", "other")
    other.save(1, ["z"])
    other.close()
    assert mark(store, read_roots(store)).keeping() == {*plain, copies[0]}
    avoiding = mark(store, read_roots(store), avoid=plain, condemned=plain)
    assert set(plain) < avoiding.keeping()
    report = collected(store)
    assert report.commits == [("main", 1)]
    assert set(copies[1:]) < set(report.packs)
    check_everything(Store.open(store.path))
    assert collected(store).nothing


def test_a_chunk_without_any_record_that_can_be_decoded_stops_everything(store: Store) -> None:
    from blake3 import blake3

    author = Author(store, "main")
    author.save(1, ["x"])
    author.close()
    for name in store.packs.names():
        os.unlink(f"{store.path}/{relative_pack_path(name)}")
    _pack(store, "11" * 8, [("x", ("y",))])
    with pytest.raises(CorruptionError, match=blake3(chunk_of("x")).hexdigest()):
        collect(store)


@pytest.mark.parametrize("hashed_alike", [False, True])
def test_ids_that_begin_alike_are_told_apart(
    store: Store, monkeypatch: pytest.MonkeyPatch, hashed_alike: bool
) -> None:
    names = []
    ids = [bytes(8) + bytes([i % 3]) * 24 for i in range(12)]
    if hashed_alike:
        monkeypatch.setattr(IdKeys, "of", lambda self, ids: np.zeros(len(ids), np.uint64))
        ids = [chunk_id[::-1] for chunk_id in ids]
    for number in range(4):
        writer = f"{number}{number}" * 8
        path = f"{store.path}/{relative_pack_path(f'{writer}-00000001')}"
        pack = PackWriter(IO, path, store.uuid, writer, 1)
        for chunk_id in ids[number * 3 : number * 3 + 3]:
            pack.append(chunk_id, 10, Encoded(0, b"", (), [b"0123456789"]))
        pack.finish()
        names.append(f"{writer}-00000001")
    catalogue = Catalogue(store, names)
    assert catalogue.groups == 3
    wanted = np.frombuffer(b"".join([*ids[:3], b"\7" * 32]), np.uint8).reshape(-1, 32)
    found = catalogue.find(wanted)
    assert sorted(found[:3].tolist()) == [0, 1, 2]
    assert found[3] == -1
    for group, chunk_id in zip(found[:3].tolist(), ids[:3], strict=True):
        rows = catalogue.rows_of(group)
        assert len(rows) == 4
        assert {row.tobytes() for row in catalogue.ids_of(rows)} == {chunk_id}
