"""Prevents: a commit file that is lost goes unnoticed, stays lost beside a copy of the store, and
its chunks are deleted as garbage."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import pytest
from authors import Author, Session, check_everything, words_in
from command_line import run
from deltackpt_store.compact import compact
from deltackpt_store.errors import ConflictError, CorruptionError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.generation import Generation, publish_generation, tidy_generations
from deltackpt_store.lineage import Lineage
from deltackpt_store.manifest import Commit, Snapshot
from deltackpt_store.manifest_io import encode_commit
from deltackpt_store.names import RETIRED_SUFFIX, number_name
from deltackpt_store.repair import repair
from deltackpt_store.repair_lost import LostRepair
from deltackpt_store.retention import retire
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from msgspec.structs import replace


def lose(store: Store, commit: Commit) -> str:
    name = f"runs/{commit.run}/{number_name(commit.number)}"
    os.unlink(f"{store.path}/{name}")
    return name


@pytest.fixture
def made(tmp_path: Path) -> tuple[Store, list[Commit]]:
    """Four steps, each with a chunk of its own; and a copy beside the store."""
    store = Store.create(tmp_path / "store")
    author = Author(store, "main")
    commits = [author.save(step, ["kept", f"own {step}"]) for step in range(1, 5)]
    author.close()
    shutil.copytree(store.path, store.path + "-copy")
    return store, commits


def test_a_lost_commit_is_found_and_comes_back(made: tuple[Store, list[Commit]]) -> None:
    store, commits = made
    names = [lose(store, commits[1]), lose(store, commits[3])]  # one that 3 names, and the newest
    report = verify(store)
    assert [(f.kind, f.name) for f in report.findings] == [("commit", names[0])]
    assert [(h.run, h.number) for h in report.findings[0].hits] == [("main", 2)]
    planned = repair(store, sources=[store.path + "-copy"], dry_run=True)
    assert verify(store).findings == verify(store).findings != ()
    done = repair(store, sources=[store.path + "-copy"])
    assert planned.ok
    assert done.ok
    assert done.mended == planned.mended
    assert sorted(m.name for m in done.mended) == names
    assert verify(store).ok
    check_everything(store, commits)
    assert repair(store, sources=[store.path + "-copy"]).found == 0


@pytest.mark.parametrize("retired", [False, True])
def test_a_pinned_commit_comes_back(made: tuple[Store, list[Commit]], retired: bool) -> None:
    store, commits = made
    store.pin("best", commits[1])
    if retired:
        retire(store, [commits[1]])
    name = lose(store, commits[1])
    planned = repair(store, sources=[store.path + "-copy"], dry_run=True)
    done = repair(store, sources=[store.path + "-copy"])
    assert planned.ok
    assert done.ok
    assert [m.name for m in done.mended] == [m.name for m in planned.mended] == [name]
    assert verify(store).ok
    assert store.pinned("best").digest == commits[1].digest
    assert collect(store).packs == []


def test_nothing_is_deleted_beside_a_lost_commit(made: tuple[Store, list[Commit]]) -> None:
    store, commits = made
    lose(store, commits[1])
    before = store.packs.names()
    for attempt in (
        lambda: collect(store), lambda: collect(store, dry_run=True), lambda: compact(store),
    ):  # fmt: skip
        with pytest.raises(CorruptionError, match="lost") as caught:
            attempt()
        assert caught.value.kind == "lost-commit"
        assert "--accept-lost" in str(caught.value.hint)
    assert store.packs.names() == before
    assert not repair(store).ok


def test_a_loss_can_be_accepted(made: tuple[Store, list[Commit]]) -> None:
    store, commits = made
    lose(store, commits[1])
    planned = collect(store, dry_run=True, accept_lost=True)
    assert planned.packs
    done = collect(store, accept_lost=True)
    assert done.packs == planned.packs
    assert done.accepted == planned.accepted == [("main", 2)]
    assert verify(store).ok
    assert collect(store).nothing
    check_everything(store, [commits[0], *commits[2:]])
    # What was given up does not come back by itself.
    assert repair(store, sources=[store.path + "-copy"]).found == 0


def test_the_command_accepts_a_loss(made: tuple[Store, list[Commit]]) -> None:
    store, commits = made
    lose(store, commits[1])
    assert run("verify", store.path).exit_code == 12
    refused = run("gc", store.path)
    assert refused.exit_code == 12
    accepted = run("gc", store.path, "--accept-lost")
    assert accepted.exit_code == 0, accepted.output
    assert "gave up 1 lost commit" in accepted.output
    assert run("verify", store.path).exit_code == 0


def test_what_was_collected_is_not_lost(made: tuple[Store, list[Commit]]) -> None:
    """Also by a collection that was killed between a record and its mark."""
    store, commits = made
    retire(store, commits[:2])
    assert verify(store).ok
    name = lose(store, commits[0])
    assert verify(store).ok, "its mark is there"
    assert collect(store).packs
    assert not os.path.exists(f"{store.path}/{name}{RETIRED_SUFFIX}")
    assert verify(store).ok
    assert collect(store).nothing
    assert repair(store, sources=[store.path + "-copy"]).found == 0


def spoil(record: Path, how: str) -> None:
    if how == "lost":
        record.unlink()
    elif how == "emptied":
        record.write_bytes(b"")
    else:
        record.write_bytes(record.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize("how", ["lost", "emptied", "changed"])
def test_what_was_collected_is_known_when_the_generation_record_is_damaged(
    made: tuple[Store, list[Commit]], how: str
) -> None:
    """Its copy tells, to readers, writers and the next collection; that one makes another copy."""
    store, commits = made
    retire(store, commits[:2])
    number = collect(store).generation
    record = Path(store.path, "gc", number_name(number))
    copy = Path(f"{record}.copy")
    content = record.read_bytes()
    for file in (copy, record):
        spoil(file, how)
        found = [(one.kind, one.name, one.hits) for one in verify(store).findings]
        told = [] if how == "lost" else [("generation", f"gc/{file.name}", ())]
        assert found == told, "nothing else counts as damaged or lost"
        copy.write_bytes(content)
    author = Author(store, "another")
    author.run = "main"
    with pytest.raises(ConflictError):
        author.save(9, ["below the boundary"], number=2)
    author.close()
    retire(store, commits[2:3])
    done = collect(store)
    assert done.generation == number + 1
    left = [name for name in os.listdir(f"{store.path}/gc") if name.startswith("0")]
    assert sorted(left) == [number_name(number + 1), f"{number_name(number + 1)}.copy"]
    assert verify(store).ok


@pytest.mark.parametrize("which", ["", ".copy"])
@pytest.mark.parametrize("how", ["emptied", "changed", "a directory"])
def test_a_damaged_generation_record_is_repaired_from_its_copy(
    made: tuple[Store, list[Commit]], how: str, which: str
) -> None:
    """Prevents: one of the two decays for years, unnoticed, until the other one does."""
    store, commits = made
    retire(store, commits[:2])
    name = f"gc/{number_name(collect(store).generation)}{which}"
    file = Path(store.path, name)
    content = file.read_bytes()
    if how == "a directory":
        file.unlink()
        file.mkdir()
    else:
        spoil(file, how)
    assert repair(store, dry_run=True).ok
    assert [one.name for one in verify(store).findings] == [name]
    done = repair(store)
    assert done.ok
    assert [(one.kind, one.name) for one in done.mended] == [("generation", name)]
    assert done.quarantined == (f"quarantine/{name}",)
    assert file.read_bytes() == content
    assert verify(store).ok


def test_a_generation_that_nothing_tells_any_more_is_followed_by_a_new_one(
    made: tuple[Store, list[Commit]],
) -> None:
    """Prevents: damage that nothing takes away, where a collection has nothing to delete."""
    store, _ = made
    publish_generation(store.io, store.path, Generation(number=1))
    tidy_generations(store.io, store.path, 1)
    for path in (f"{store.path}/gc/{number_name(1)}", f"{store.path}/gc/{number_name(1)}.copy"):
        spoil(Path(path), "changed")
    (left, other) = repair(store).left
    assert "deltackpt gc" in left.reason
    assert other.kind == "generation"
    assert collect(store).generation == 2
    assert verify(store).ok
    assert collect(store).generation == 2


def test_without_record_and_copy_what_was_collected_counts_as_lost(
    made: tuple[Store, list[Commit]],
) -> None:
    store, commits = made
    retire(store, commits[:2])
    record = Path(store.path, "gc", number_name(collect(store).generation))
    for path in (record, Path(f"{record}.copy")):
        spoil(path, "changed")
    assert not verify(store).ok
    with pytest.raises(CorruptionError, match="accept-lost"):
        collect(store)
    collect(store, accept_lost=True)
    assert verify(store).ok


def test_a_copy_that_is_missing_is_made_by_the_next_collection(
    made: tuple[Store, list[Commit]],
) -> None:
    """The one before was killed, or had no space."""
    store, commits = made
    retire(store, commits[:2])
    record = Path(store.path, "gc", number_name(collect(store).generation))
    copy = Path(f"{record}.copy")
    copy.unlink()
    assert collect(store).nothing
    assert copy.read_bytes() == record.read_bytes()


def test_what_a_fork_continues_is_missed(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    author, fork = Author(store, "main"), Author(store, "fork")
    fork.parent = author.save(1, ["a"])
    fork.save(2, ["b"])
    author.close()
    fork.close()
    assert fork.parent is not None
    name = "runs/main/" + number_name(1)
    os.unlink(f"{store.path}/{name}")
    assert [f.name for f in verify(store).findings] == [name]
    shutil.rmtree(f"{store.path}/runs/main")
    assert [f.name for f in verify(store).findings] == [name]
    collect(store, accept_lost=True)
    assert verify(store).ok


def test_a_commit_that_cannot_be_whole_does_not_come_back(
    made: tuple[Store, list[Commit]],
) -> None:
    """A newest step that cannot be restored would be worse than an older one that can."""
    store, commits = made
    (own,) = {*store.snapshot(commits[3]).packs} - {*store.snapshot(commits[2]).packs}
    lose(store, commits[3])
    for path in (store.path, store.path + "-copy"):
        os.unlink(f"{path}/packs/{own[:2]}/{own}.pack")
    report = repair(store, sources=[store.path + "-copy"])
    assert [left.name for left in report.left] == ["runs/main/" + number_name(4)]
    assert store.head("main").step == 3
    assert words_in(store, store.head("main")) == ["kept", "own 3"]


def test_a_copy_that_went_another_way_gives_nothing(made: tuple[Store, list[Commit]]) -> None:
    """The commits of a copy that continue what this store has otherwise are not of this history."""
    store, commits = made
    lose(store, commits[3])
    for commit in commits[2:3]:
        lose(store, commit)
    author = Author(store, "another")
    author.run, author.parent = "main", commits[1]
    author.save(3, ["kept", "other"])
    author.close()
    assert repair(store, sources=[store.path + "-copy"]).found == 0
    assert store.head("main").step == 3


def go_on(path: str, run: str, parent: Commit, *steps: tuple[int, str]) -> list[Commit]:
    """Steps that somebody saves who continues `parent`; each says a word of its own."""
    author = Author(Store.open(path), f"{run} {path} {steps}")
    author.run, author.parent = run, parent
    saved = [author.save(step, ["kept", word]) for step, word in steps]
    author.close()
    return saved


def test_a_copy_that_parted_and_went_back_gives_nothing(made: tuple[Store, list[Commit]]) -> None:
    """A later commit that continues what both have is of the copy's history all the same: were it
    made here, it would be the newest, and leave the steps of this store behind."""
    store, commits = made
    copy = store.path + "-copy"
    [mine] = go_on(store.path, "main", commits[3], (5, "here"))
    there = go_on(copy, "main", commits[3], (5, "there"), (6, "there"))
    go_on(copy, "main", commits[1], (3, "there again"), (4, "and on"))
    go_on(copy, "fork", there[-1], (7, "fork"))
    assert repair(store, sources=[copy]).found == 0
    assert store.head("main").digest == mine.digest
    assert store.runs() == ["main"]
    lose(store, mine)  # now nothing here differs from the copy
    assert repair(store, sources=[copy]).ok
    assert store.head("main").step == 4
    check_everything(store, commits)


def test_a_damaged_commit_does_not_come_from_a_copy_that_parted(
    made: tuple[Store, list[Commit]],
) -> None:
    store, commits = made
    copy = store.path + "-copy"
    mine = go_on(store.path, "main", commits[3], (5, "here"), (6, "here too"))
    go_on(copy, "main", commits[3], (5, "there"), (6, "there too"))
    name = f"runs/main/{number_name(mine[1].number)}"
    with open(f"{store.path}/{name}", "r+b") as file:
        file.truncate(40)
    for _ in range(2):
        report = repair(store, sources=[copy])
        assert [left.name for left in report.left] == [name]
        assert not report.mended
    assert store.head("main").digest == mine[0].digest


def test_each_record_is_read_a_few_times_however_many_are_lost(tmp_path: Path) -> None:
    """The work grows with the number of commits, not with its square."""

    def reads(count: int) -> int:
        store = Store.create(tmp_path / f"{count}")
        author = Author(store, "main")
        commits = [author.save(step, ["kept"]) for step in range(count)]
        author.close()
        copy = shutil.copytree(store.path, f"{store.path}-copy")
        for commit in commits[: count // 2]:
            lose(store, commit)
        for commit in commits[count // 2 :]:
            Path(store.path, f"runs/main/{number_name(commit.number)}").write_bytes(b"damaged")
        io = CountingIO()
        report = repair(Store.open(store.path, io=io), sources=[Store.open(copy, io=io)])
        assert report.ok
        assert len(report.mended) == count
        return io.opened

    assert reads(40) < 3 * reads(20)


def test_going_back_looks_only_at_what_is_there(made: tuple[Store, list[Commit]]) -> None:
    """A range of ancestors may be long, and hold few commits that were not collected."""
    store, commits = made
    io = CountingIO()
    lineage = Lineage(Store.open(store.path, io=io), "main")
    far = 10**6
    lineage.head = replace(commits[3], number=far + 1, step=9, ancestors=((1, far),),
                           parent=("main", far, bytes(32)))  # fmt: skip
    io.opened = 0
    found = lineage.parent_of(3)
    assert found is not None
    assert found.digest == commits[1].digest
    assert io.opened < 10


def test_commits_that_continue_each_other_are_damaged(
    made: tuple[Store, list[Commit]],
) -> None:
    """Whoever looks for what they continue would never come to an end."""
    store, commits = made
    for one, other in ((commits[2], commits[3]), (commits[3], commits[2])):
        lose(store, one)
        crafted = replace(one, parent=("main", other.number, other.digest), step=9, ancestors=())
        Path(store.path, f"runs/main/{number_name(one.number)}").write_bytes(encode_commit(crafted))
    assert [bad.path for bad in store.commits("main").damaged] == [f"runs/main/{3:020d}"]
    assert Lineage(store, "main").parent_of(3) is None


@pytest.mark.parametrize("number", [10**20 - 1, 10**18])
def test_files_with_impossible_numbers_are_no_commits(
    made: tuple[Store, list[Commit]], number: int
) -> None:
    """A commit after them could never be read."""
    store, commits = made
    Path(store.path, f"runs/main/{number:020d}").write_bytes(b"somebody's")
    Path(store.path, f"gc/{number:020d}").write_bytes(b"somebody's")
    [saved] = go_on(store.path, "main", commits[3], (5, "new"))
    assert saved.number == 5
    assert store.head("main").digest == saved.digest
    retire(store, [commits[0]])
    assert collect(store).generation == 1
    assert verify(store).ok


def test_no_number_is_made_that_could_not_be_read(made: tuple[Store, list[Commit]]) -> None:
    store, commits = made
    for folder in ("runs/main", "gc"):
        Path(store.path, folder, f"{10**18 - 1:020d}").write_bytes(b"somebody's")
    with pytest.raises(ConflictError, match="runs/main") as caught:
        go_on(store.path, "main", commits[3], (5, "new"))
    assert f"{10**18 - 1:020d}" in str(caught.value.hint)
    Path(store.path, f"runs/main/{10**18 - 1:020d}").unlink()
    retire(store, [commits[0]])
    with pytest.raises(ConflictError, match="in gc"):
        collect(store)
    check_everything(store, commits[1:])


def test_what_lost_commits_name_is_not_kept_in_memory(made: tuple[Store, list[Commit]]) -> None:
    store, commits = made
    for commit in commits:
        lose(store, commit)
        os.unlink(f"{store.path}/manifests/{commit.manifest.hex()}")
    gc.collect()
    before = sum(type(one) is Snapshot for one in gc.get_objects())
    lost = LostRepair(store, [Store.open(store.path + "-copy")], dry_run=False)
    assert len(lost.found) == 4
    assert sum(type(one) is Snapshot for one in gc.get_objects()) - before <= 2
    lost.bring_back(())
    assert not lost.lost
    check_everything(store, commits)


def test_a_copy_that_has_lost_its_runs_still_gives_chunks(
    made: tuple[Store, list[Commit]],
) -> None:
    store, commits = made
    copy = Path(store.path + "-copy")
    shutil.rmtree(copy / "runs")
    for pack in Path(store.path).glob("packs/*/*.pack"):
        pack.unlink()
    assert repair(store, sources=[copy]).ok
    check_everything(store, commits)


class CountingIO(FileIO):
    """Counts the files that are opened."""

    opened = 0

    def open(self, path: str) -> int:
        self.opened += 1
        return super().open(path)


def test_a_run_goes_with_its_folder(made: tuple[Store, list[Commit]]) -> None:
    """Prevents: a store that nobody can clean, since some run in it is not needed any more."""
    store, commits = made
    fork = Author(store, "fork")
    fork.parent = commits[-1]
    kept = fork.save(9, ["of the fork"])
    fork.close()
    other = Author(store, "gone")
    retire(store, [other.save(step, [f"gone {step}"]) for step in range(3)][:2])
    other.close()
    assert collect(store).packs
    shutil.rmtree(f"{store.path}/runs/gone")
    assert collect(store).packs
    assert verify(store).ok
    again = Session(store, "gone", FileIO())
    assert again.save(0, ["anew"]) is not None  # its name may be used again
    again.close()
    shutil.rmtree(f"{store.path}/runs/main")  # which another run was forked from
    with pytest.raises(CorruptionError, match="accept-lost"):
        collect(store)
    assert collect(store, accept_lost=True).accepted
    assert verify(store).ok
    check_everything(store, [kept])
