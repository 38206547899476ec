"""Prevents: a repair that loses what was still good, believes a wrong copy, or says it is done when
steps stay hit."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from authors import CHUNK, Author, Session, check_everything, chunk_of, collected, words_in
from blake3 import blake3
from coded import Blob, write_pack
from deltackpt_store import repair as module
from deltackpt_store.codecs import RAW, SPARSE
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.index import list_packs, refresh
from deltackpt_store.manifest import Commit
from deltackpt_store.names import number_name
from deltackpt_store.pack import encode_header, pack_path
from deltackpt_store.repair import RepairReport
from deltackpt_store.retention import retire
from deltackpt_store.store import Store
from deltackpt_store.store_locks import collection_lock
from deltackpt_store.verify import verify
from small_store import SmallStore, pattern

_live: list[Author] = []


def repair(store: Any, **options: Any) -> RepairReport:
    """Repair beside the test's own writers, each of which gets its turn."""

    def wait(_: list[str]) -> bool:
        for author in _live:
            author.heed()
        return bool(_live)

    return module.repair(store, **{"wait": wait, **options})


@pytest.fixture
def new(store: Store) -> Iterator[Callable[..., Author]]:
    def make(run: str = "main") -> Author:
        _live.append(Author(store, run))
        return _live[-1]

    yield make
    while _live:
        _live.pop().close()


def copy_of(store: Store) -> Store:
    """A copy, before anything is damaged."""
    shutil.copytree(store.path, store.path + "-copy")
    return Store.open(store.path + "-copy")


def flip(path: str, offset: int) -> None:
    """Change one byte."""
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x40]))


def damage_chunk(store: Store, word: str) -> str:
    """Damage one record of the chunk; the name of its pack."""
    place = Store.open(store.path).index().get(blake3(chunk_of(word)).digest())
    assert place is not None
    flip(pack_path(store.path, place.pack), place.payload + 5)
    return place.pack


def commit_path(store: Store, commit: Commit) -> str:
    return f"{store.path}/runs/{commit.run}/{number_name(commit.number)}"


class Helper:
    """Has the chunks of these words."""

    name = "helper"

    def __init__(self, *words: str) -> None:
        self._chunks = {blake3(chunk_of(word)).digest(): chunk_of(word) for word in words}

    def find(self, wanted: Mapping[bytes, int]) -> Iterator[tuple[bytes, memoryview]]:
        for chunk_id in wanted:
            if chunk_id in self._chunks:
                yield chunk_id, memoryview(self._chunks[chunk_id])


def tree(path: str) -> dict[str, bytes]:
    return {os.path.join(d, n): Path(d, n).read_bytes() for d, _, names in os.walk(path)
            for n in names}  # fmt: skip


def check_whole(store: Store, *commits: Commit) -> None:
    fresh = Store.open(store.path)
    check_everything(fresh, commits)
    assert verify(fresh, level="chunks").findings == ()
    assert repair(fresh).found == 0


def sources_of(report: RepairReport) -> set[str]:
    return {mended.source for mended in report.mended if mended.kind == "chunk"}


# chunks ------------------------------------------------------------------------------------------


# case 112
def test_a_damaged_chunk_comes_from_another_pack(store: Store, new: Callable[..., Author]) -> None:
    a, b = new("a"), new("b")  # neither knows of the other's packs
    first, second = a.save(1, ["x", "y"]), b.save(1, ["x", "z"])
    bad = damage_chunk(store, "x")
    report = repair(store)
    assert report.ok
    assert report.copied == 1  # y or z
    assert f"quarantine/{pack_path('', bad).lstrip('/')}" in report.quarantined
    assert not os.path.exists(pack_path(store.path, bad))
    assert os.path.exists(pack_path(store.path + "/quarantine", bad))
    check_whole(store, first, second)


def test_a_damaged_chunk_comes_from_another_store(store: Store, new: Callable[..., Author]) -> None:
    author = new()
    commits = [author.save(step, ["x", f"{step}"]) for step in range(3)]
    other = copy_of(store)
    damage_chunk(store, "x")
    assert not repair(store, dry_run=True).ok
    report = repair(store, sources=[other.path])
    assert report.ok
    assert sources_of(report) == {other.path}
    check_whole(store, *commits)


def test_a_lost_pack_comes_from_another_store(store: Store, new: Callable[..., Author]) -> None:
    author = new()
    commits = [author.save(step, ["x", f"{step}"]) for step in range(3)]
    other = copy_of(store)
    os.unlink(pack_path(store.path, Store.open(store.path).packs.names()[0]))
    report = repair(store, sources=[other])
    assert report.ok
    assert report.packs
    check_whole(store, *commits)


def test_what_nothing_has_is_told_to_the_byte(store: Store, new: Callable[..., Author]) -> None:
    author = new()
    hit = author.save(1, ["a", "x", "b", "x", "x"])
    whole = author.save(2, ["a", "b"])
    damage_chunk(store, "x")
    for again in (False, True):
        report = repair(store)
        assert not report.ok
        assert [(lost.run, lost.step) for lost in report.lost] == [("main", 1)]
        (tensor,) = report.lost[0].tensors
        assert tensor.path == "w"
        assert tensor.ranges == ((CHUNK, 2 * CHUNK), (3 * CHUNK, 5 * CHUNK))
        assert bool(report.packs) is not again, "the second one has nothing more to write"
    fresh = Store.open(store.path)
    assert words_in(fresh, whole) == ["a", "b"]
    with pytest.raises(CorruptionError):
        words_in(fresh, hit)
    # What was set aside is not forgotten, and another source may come later.
    other = Store.create(store.path + "-other")
    helper = Author(other, "any")
    helper.save(1, ["x"])
    helper.close()
    assert repair(store, sources=[other]).ok
    check_whole(store, hit, whole)


def test_the_quarantine_is_a_source_too(store: Store, new: Callable[..., Author]) -> None:
    """A pack was set aside by hand, with records that were good."""
    author = new()
    commit = author.save(1, ["a", "b"])
    (name,) = Store.open(store.path).packs.names()
    target = pack_path(store.path + "/quarantine", name)
    os.makedirs(os.path.dirname(target))
    os.rename(pack_path(store.path, name), target)
    report = repair(store)
    assert report.ok
    check_whole(store, commit)
    assert os.path.exists(target)


@pytest.mark.parametrize("where", ["footer", "cut", "header"])
def test_a_pack_is_rebuilt_from_its_records(
    store: Store, new: Callable[..., Author], where: str
) -> None:
    author = new()
    commits = [author.save(1, ["a", "b", "c"]), author.save(2, ["a", "d"])]
    name = commits[0].writer + "-00000001"
    path = pack_path(store.path, name)
    if where == "cut":
        os.truncate(path, os.path.getsize(path) - 100)
    else:
        flip(path, -100 if where == "footer" else 20)
    report = repair(store)
    assert report.ok
    assert report.copied == 3
    assert [m.kind for m in report.mended] == ["pack"]
    check_whole(store, *commits)


def test_encoded_records_are_copied_as_they_are(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "store", codec="auto")
    weights = np.linspace(0, 1, 40_000, dtype=np.float32)
    parent = None
    for step in range(4):
        weights = weights.copy()
        weights[step * 100 : step * 100 + 50] += 1
        parent = small.save("main", step, {"w": weights}, parent=parent)
    small.close()
    store = Store.open(tmp_path / "store")
    other = copy_of(store)
    names = store.packs.names()
    size = sum(os.path.getsize(pack_path(store.path, n)) for n in names)
    for name in names[:-1]:
        flip(pack_path(store.path, name), -70)
    first = next(iter(other.index().entries(names[-1]).items(names[-1])))[1]
    flip(pack_path(store.path, names[-1]), first.payload + 3)
    report = repair(store, sources=[other])
    assert report.ok
    assert verify(Store.open(store.path), level="restore").findings == ()
    new_size = sum(os.path.getsize(pack_path(store.path, n)) for n in report.packs)
    assert new_size < size + 5000


def test_records_of_lost_references_are_repaired_when_those_are_found(tmp_path: Path) -> None:
    """A chunk is coded against one that is lost; a source has only the latter."""
    old = pattern(1000, 1)
    changed = old.copy()
    changed[::7] += 1
    small = SmallStore(tmp_path / "store")
    raw, reference = changed.tobytes(), old.tobytes()
    base = write_pack(small.store, [Blob(RAW, reference)], "a" * 16)
    write_pack(small.store, [Blob(SPARSE, raw, 4, "zstd", reference)], "b" * 16)
    small.store.index()
    refresh(small.store.packs.index, FileIO(), small.path, list_packs(FileIO(), small.path))
    commit = small.save("main", 1, {"w": changed})
    small.close()
    store = Store.open(small.path)
    other = SmallStore(tmp_path / "other")
    other.writer.put(memoryview(reference))
    other.writer.flush()
    other.close()
    os.unlink(pack_path(store.path, base))
    report = repair(store)
    assert [(lost.step, lost.tensors[0].path) for lost in report.lost] == [(1, "w")]
    report = repair(store, sources=[other.path])
    assert report.ok, report
    assert verify(Store.open(store.path), level="restore").findings == ()
    assert store.snapshot(commit).root == commit.root


def test_a_wrong_chunk_is_not_believed(store: Store, new: Callable[..., Author]) -> None:
    class Liar:
        name = "liar"

        def find(self, wanted: Mapping[bytes, int]) -> Iterator[tuple[bytes, memoryview]]:
            for chunk_id, length in wanted.items():
                yield chunk_id, memoryview(bytes(length))
                yield blake3(b"unasked").digest(), memoryview(b"unasked")

    author = new()
    author.save(1, ["x"])
    damage_chunk(store, "x")
    report = repair(store, sources=[Liar()])
    assert not report.ok
    assert report.lost


def test_a_pack_of_a_newer_version_is_left_alone(store: Store, new: Callable[..., Author]) -> None:
    author = new()
    author.save(1, ["x"])
    (name,) = Store.open(store.path).packs.names()
    path = pack_path(store.path, name)
    header = bytearray(encode_header(store.uuid, name[:16], 1))
    header[8] = 2
    import zlib

    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    with open(path, "r+b") as file:
        file.write(header)
    before = tree(store.path + "/packs")
    report = repair(store)
    assert not report.ok
    assert "version" in report.left[0].reason
    assert tree(store.path + "/packs") == before
    assert not report.quarantined


# records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "gone", "empty"])
def test_a_manifest_comes_from_a_copy(store: Store, new: Callable[..., Author], how: str) -> None:
    author = new()
    commits = [author.save(1, ["a"]), author.save(2, ["b"])]
    other = copy_of(store)
    path = f"{store.path}/manifests/{commits[0].manifest.hex()}"
    if how == "flipped":
        flip(path, 40)
    elif how == "gone":
        os.unlink(path)
    else:
        os.truncate(path, 0)
    report = repair(store)
    assert [(lost.step, lost.tensors) for lost in report.lost] == [(1, ())]
    assert report.left[0].name.startswith("manifests/")
    report = repair(store, sources=[other])
    assert report.ok
    assert len(report.quarantined) == (how != "gone")
    check_whole(store, *commits)


def test_a_commit_comes_from_a_copy_only_when_it_is_the_same(
    store: Store, new: Callable[..., Author]
) -> None:
    author = new()
    commits = [author.save(step, [f"{step}"]) for step in (1, 2, 3)]
    copy = copy_of(store)
    stranger = Store.create(store.path + "-stranger")
    imposter = Author(stranger, "main")
    for step in (7, 8, 9):
        imposter.save(step, ["7"])
    imposter.close()
    for commit in commits[1:]:
        flip(commit_path(store, commit), 60)
        report = repair(store, sources=[stranger])
        assert not report.ok
        assert report.lost[0].number == commit.number
        assert os.path.exists(commit_path(store, commit)), "its number must not become free"
        assert repair(store, sources=[stranger, copy]).ok
    check_whole(store, *commits)


def test_a_pin_comes_from_a_copy(store: Store, new: Callable[..., Author]) -> None:
    author = new()
    commits = [author.save(step, [f"{step}"]) for step in (1, 2)]
    store.pin("good", commits[0])
    other = copy_of(store)
    flip(f"{store.path}/pins/good", 20)
    report = repair(store)
    assert [left.kind for left in report.left] == ["pin"]
    assert not report.lost
    assert repair(store, sources=[other]).ok
    assert store.pinned("good") == commits[0]
    check_whole(store, *commits)


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_format_follows_from_the_packs(store: Store, new: Callable[..., Author], how: str) -> None:
    author = new()
    commit = author.save(1, ["a"])
    path = f"{store.path}/FORMAT"
    if how == "flipped":
        flip(path, 30)
    else:
        os.unlink(path)
    before = tree(store.path)
    report = repair(store.path, dry_run=True)
    assert report.ok
    assert tree(store.path) == before
    report = repair(store.path)
    assert [m.kind for m in report.mended] == ["format"]
    assert Store.open(store.path).uuid == store.uuid
    check_whole(store, commit)


@pytest.mark.parametrize("copied", [False, True])
def test_format_of_a_store_without_packs(tmp_path: Path, copied: bool) -> None:
    """Small tensors lie in manifests: no pack tells, and none needs to be told."""
    small = SmallStore(tmp_path / "store")
    commits = [small.save("main", step, {"w": pattern(4, step)}) for step in (1, 2)]
    small.close()
    store = small.store
    assert not store.packs.names()
    sources = [copy_of(store)] if copied else []
    os.truncate(f"{store.path}/FORMAT", 10)
    stranger = SmallStore(tmp_path / "stranger")
    stranger.save("main", 1, {"w": pattern(4, 1)})
    report = repair(store.path, sources=[stranger.store, *sources])
    assert report.ok
    assert [m.kind for m in report.mended] == ["format"]
    assert report.mended[0].source == (sources[0].path if copied else report.mended[0].source)
    again = Store.open(store.path)
    assert (again.uuid == store.uuid) == copied
    assert again.uuid != stranger.store.uuid
    assert verify(again, level="restore").ok
    assert again.commits("main") == commits
    stranger.close()


def test_format_is_not_guessed(tmp_path: Path, store: Store, new: Callable[..., Author]) -> None:
    """Packs that come back later from a copy must not turn out to be of another store."""
    new().save(1, ["a"])
    other = copy_of(store)
    os.truncate(f"{store.path}/FORMAT", 10)
    for name in list_packs(FileIO(), store.path):
        os.unlink(pack_path(store.path, name))
    with pytest.raises(CorruptionError, match="do not tell"):
        repair(store.path)
    assert os.path.getsize(f"{store.path}/FORMAT") == 10
    assert repair(store.path, sources=[other]).ok
    assert Store.open(store.path).uuid == store.uuid
    with pytest.raises(NotFoundError):
        repair(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# beside others -----------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing(store: Store, new: Callable[..., Author]) -> None:
    author = new()
    author.save(1, ["x", "y"])
    other = copy_of(store)
    damage_chunk(store, "x")
    before = tree(store.path)
    report = repair(store, sources=[other], dry_run=True)
    assert report.ok
    assert len(report.mended) == 1
    assert not report.packs
    assert tree(store.path) == before
    assert tree(other.path) == tree(other.path)


def test_a_live_writer_stores_again_what_was_damaged(
    store: Store, new: Callable[..., Author]
) -> None:
    """What nothing else has, a writer may have: its next put must not rely on the bad record."""
    author = new()
    first = author.save(1, ["x", "y"])
    damage_chunk(store, "x")
    report = repair(store)
    assert [lost.step for lost in report.lost] == [1]
    second = author.save(2, ["x", "z"])
    check_whole(store, first, second)  # and the first step is whole again as well


@pytest.mark.parametrize("helped", [True, False])
def test_a_training_goes_on_after_a_repair(store: Store, helped: bool) -> None:
    """What it builds upon and nothing else holds stays with it; its steps are told as hit."""
    session = Session(store, "main", FileIO())
    first = session.save(1, ["x", "y"])
    assert first is not None
    damage_chunk(store, "x")

    def wait(_: list[str]) -> bool:
        session.heed()
        return True

    report = repair(store, sources=[Helper("x")] if helped else [], wait=wait)
    assert report.ok is helped
    assert bool(report.left) is not helped
    second = session.save(2, ["x", "z"], relative=1)
    session.close()
    assert second is not None
    if not helped:
        report = repair(store)
        assert not report.left
        assert [lost.step for lost in report.lost] == [1, 2]
        later = Session(store, "main", FileIO(), name="later")
        assert later.save(3, ["x", "z"]) is not None  # the bad record is out of the way
        later.close()
    check_whole(store, session.commit_of(first), session.commit_of(second))


def test_a_save_in_flight_keeps_its_pack(store: Store) -> None:
    session = Session(store, "main", FileIO())
    assert session.save(1, ["x", "y"]) is not None
    bad = damage_chunk(store, "x")
    save = session.begin(2, ["x", "y", "z"], relative=1)

    def wait(_: list[str]) -> bool:
        session.heed()
        return True

    report = repair(store, sources=[], wait=wait)
    assert [left.kind for left in report.left] == ["pack"]
    assert os.path.exists(pack_path(store.path, bad))
    session.finish(save)
    session.heed()
    session.close()
    report = repair(store)
    assert not os.path.exists(pack_path(store.path, bad))
    assert not report.left


def test_a_writer_that_does_not_answer_leaves_the_pack_where_it_is(store: Store) -> None:
    session = Session(store, "main", FileIO())
    assert session.save(1, ["x", "y"]) is not None
    damage_chunk(store, "x")
    report = repair(store, wait=lambda _: False)
    assert "run the repair again" in report.left[0].reason
    session.close()
    assert not repair(store).left


def test_one_at_a_time(store: Store) -> None:
    with collection_lock(FileIO(), store.path), pytest.raises(ConflictError):
        repair(store)


def test_collection_works_after_a_repair_and_leaves_the_quarantine_alone(
    store: Store, new: Callable[..., Author]
) -> None:
    author = new()
    commits = [author.save(step, ["x", f"{step}"]) for step in range(3)]
    other = copy_of(store)
    damage_chunk(store, "x")
    report = repair(store, sources=[other])
    assert report.ok
    retire(store, commits[:1])
    assert collected(store, author).packs == []  # every pack keeps something
    author.close()
    collect(store)
    assert all(os.path.exists(f"{store.path}/{path}") for path in report.quarantined)
    check_whole(store, *commits[1:])


@pytest.mark.parametrize("folder", ["runs", "pins", "packs", "manifests"])
def test_a_lost_folder_comes_from_a_copy(
    store: Store, new: Callable[..., Author], folder: str
) -> None:
    """Prevents: a store that has lost a whole folder cannot be repaired, or it comes back empty and
    collection takes all that it kept."""
    author = new()
    first, second = author.save(1, ["a", "b"]), author.save(2, ["a", "c"])
    store.pin("best", first)
    author.close()
    copy = copy_of(store)
    whole = tree(store.path)
    shutil.rmtree(f"{store.path}/{folder}")
    if folder == "runs":
        with pytest.raises(CorruptionError, match="lost its directory runs"):
            repair(store)
    would = repair(store, sources=[copy], dry_run=True)
    assert not os.path.exists(f"{store.path}/{folder}")
    assert would.found
    report = repair(store, sources=[copy])
    assert report.ok, report
    assert would.ok
    check_whole(store, first, second)
    assert store.pinned("best") == first
    if folder != "packs":  # whose chunks come in packs of another name
        assert whole.items() <= tree(store.path).items()


@pytest.mark.parametrize("folder", ["runs", "pins"])
def test_a_folder_that_cannot_be_put_in_its_place_leaves_nothing(
    store: Store, new: Callable[..., Author], folder: str
) -> None:
    author = new()
    store.pin("best", author.save(1, ["a", "b"]))
    author.close()
    copy = copy_of(store)
    shutil.rmtree(f"{store.path}/{folder}")

    class Refusing(FileIO):
        def replace(self, source: str, target: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    with pytest.raises(StorageError):
        repair(Store(store.path, Refusing(), store.format), sources=[copy])
    assert not os.path.exists(f"{store.path}/{folder}")
    assert not any(".tmp-" in path for path in tree(store.path))
    assert os.listdir(f"{store.path}/quarantine") == []
    assert repair(store, sources=[copy]).ok


@pytest.mark.parametrize("kind", ["pack", "commit", "manifest", "pin"])
def test_a_directory_in_the_place_of_a_file_is_moved_aside(
    store: Store, new: Callable[..., Author], kind: str
) -> None:
    """What the plan says is what the repair does."""
    author = new()
    commits = [author.save(step, ["kept", f"own {step}"]) for step in range(3)]
    store.pin("best", commits[1])
    name = {
        "pack": sorted(f"packs/{p[:2]}/{p}.pack" for p in store.packs.names())[0],
        "commit": "runs/main/" + number_name(2),
        "manifest": f"manifests/{commits[1].manifest.hex()}",
        "pin": "pins/best",
    }[kind]
    copy = copy_of(store)
    os.unlink(f"{store.path}/{name}")
    os.mkdir(f"{store.path}/{name}")
    Path(store.path, name, "inside").write_text("somebody's")
    planned = repair(Store.open(store.path), sources=[copy], dry_run=True)
    done = repair(Store.open(store.path), sources=[copy])
    assert (planned.ok, planned.left) == (done.ok, done.left) == (True, ())
    assert [m.name for m in planned.mended] == [m.name for m in done.mended]
    assert Path(store.path, "quarantine", name, "inside").read_text() == "somebody's"
    assert verify(Store.open(store.path)).ok
    check_everything(store, commits)
    assert repair(store).found == 0


@pytest.mark.parametrize("after", [0, 1], ids=["tables", "chunks"])
def test_what_cannot_be_read_for_now_is_not_moved_away(
    store: Store, new: Callable[..., Author], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """It may be whole: a limit on open files, a server that is away for a moment."""
    commit = new().save(1, ["a", "b"])
    while _live:
        _live.pop().close()
    before = sorted(Path(store.path).rglob("*"))
    real, opened = FileIO.open, [0]

    def refusing(io: FileIO, path: str) -> int:
        if "/packs/" in path:
            opened[0] += 1
            if after < opened[0] <= after + 2:  # what fails once is tried again
                raise OSError(errno.EMFILE, "Too many open files", path)
        return real(io, path)

    monkeypatch.setattr(FileIO, "open", refusing)
    with pytest.raises(StorageError):
        repair(store)
    assert [path for path in sorted(Path(store.path).rglob("*")) if "gc" not in path.parts] == [
        path for path in before if "gc" not in path.parts
    ]
    check_everything(store, [commit])


@pytest.mark.parametrize("path", [5, "", "\0", "a\ud800", [], "s3://bucket/store"])
def test_what_can_be_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        module.repair(path)
    assert caught.value.kind == "bad-path"
