"""Prevents: retention takes the step that the next restore needs, or one of somebody else."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from authors import Author, Session, check_everything, collected, words_in
from deltackpt_store.errors import CorruptionError, InvalidInputError, NotFoundError, StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.leases import hold
from deltackpt_store.manifest import Commit
from deltackpt_store.mark import mark
from deltackpt_store.names import RETIRED_SUFFIX, number_name
from deltackpt_store.protocol import Retired
from deltackpt_store.retention import Keep, apply, keep_of, retire
from deltackpt_store.roots import read_roots
from deltackpt_store.store import Store

HOUR = 3600.0


@pytest.fixture
def author(store: Store) -> Iterator[Author]:
    made = Author(store, "main")
    yield made
    made.close()


def saved(author: Author, steps: Sequence[int]) -> list[Commit]:
    return [author.save(step, ["same", f"step {step}"]) for step in steps]


def others(store: Store, runs: int) -> list[str]:
    """Runs of one step each; the packs of the last one's."""
    for number in range(runs):
        author = Author(store, f"other{number}")
        author.save(1, [f"other {number}"])
        author.close()
    return sorted(store.snapshot(store.head(f"other{runs - 1}")).packs) if runs else []


def left(store: Store, run: str = "main") -> list[int]:
    return [commit.step for commit in store.commits(run)]


def taken(store: Store, keep: object, **options: Any) -> list[int]:
    return [commit.step for commit in apply(store, "main", keep, **options).retired]


# rules ------------------------------------------------------------------------------------------


def test_the_newest_stay(store: Store, author: Author) -> None:
    saved(author, range(6))
    assert taken(store, Keep(last=2)) == [0, 1, 2, 3]
    assert left(store) == store.steps("main") == [4, 5]


def test_a_step_stays_when_any_rule_keeps_it(store: Store, author: Author) -> None:
    saved(author, range(1, 12))
    plan = apply(store, "main", Keep(last=2, every=4))
    assert [(c.step, why) for c, why in plan.kept] == [
        (4, ("every",)), (8, ("every",)), (10, ("last",)), (11, ("last", "newest")),
    ]  # fmt: skip


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 1)])
def test_the_best_step_stays(store: Store, mode: Any, best: int) -> None:
    """NaN is no best value, a step without the metric neither, and of equals the newest stays."""
    session = Session(store, "main", FileIO())
    for step, loss in enumerate([2.0, 9.0, 1.0, 1.0, float("nan"), None]):
        metrics = {} if loss is None else {"loss": loss}
        assert session.save(step, ["same", str(step)], metrics=metrics) is not None
    session.close()
    apply(store, "main", Keep(best=("loss", mode)))
    assert left(store) == [best, 5]


def saved_at(author: Author, hours: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 0, 1, ... saved when the clock showed so many hours."""
    for step, hour in enumerate(hours):
        monkeypatch.setattr(time, "time", lambda hour=hour: 1e9 + hour * HOUR)
        author.save(step, ["same", f"step {step}"])


def test_within_counts_training_time_before_the_newest_step(
    store: Store, author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_at(author, [0, 1, 2, 3, 3.5], monkeypatch)
    assert taken(store, Keep(within=1.6 * HOUR)) == [0, 1]


# case 129
def test_a_clock_that_jumps_keeps_more_and_never_less(
    store: Store, author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose clock is hours behind must not make fresh steps look old."""
    saved_at(author, [0, 0.5, 1, -5, -4.5], monkeypatch)
    assert taken(store, Keep(within=1.2 * HOUR)) == [0]


# case 129
def test_a_clock_that_is_set_ahead_in_a_session_ages_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Years are not what lay between two steps; `retain` knows that later, too."""
    session = Session(store, "main", FileIO(), keep=Keep(within=HOUR))
    for step, hour in enumerate([0, 0.1, 50_000, 50_000.1]):
        monkeypatch.setattr(time, "time", lambda hour=hour: 1e9 + hour * HOUR)
        assert session.save(step, ["same", f"step {step}"]) is not None
    session.close()
    assert left(store) == [0, 1, 2, 3]
    assert taken(store, Keep(within=HOUR)) == []
    again = Session(store, "main", FileIO(), name="again")
    monkeypatch.setattr(time, "time", lambda: 1e9 + 50_010 * HOUR)
    assert again.save(4, ["same", "step 4"]) is not None
    again.close()
    assert taken(store, Keep(within=HOUR)) == [0, 1, 2, 3]  # a pause, for all that anybody knows


def test_no_rule_keeps_everything(store: Store, author: Author) -> None:
    saved(author, range(3))
    assert taken(store, Keep()) == []


# case 100
@pytest.mark.parametrize(
    "wrong",
    [{"last": 0}, {"last": -1}, {"last": True}, {"last": 1.5}, {"every": 0}, {"within": 0},
     {"within": float("nan")}, {"within": float("inf")}, {"best": ("loss", "low")},
     {"best": ("", "min")}],
    ids=str,
)  # fmt: skip
def test_rules_that_could_keep_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="keep"):
        Keep(**wrong)


# case 100
def test_keep_last_one_keeps_the_last_good_one(store: Store, author: Author) -> None:
    saved(author, range(4))
    apply(store, "main", Keep(last=1))
    collected(store, author)
    assert left(store) == [3]
    check_everything(Store.open(store.path))


def test_rules_may_come_as_any_object_with_these_fields() -> None:
    @dataclasses.dataclass
    class Rules:
        last: int | None = 3
        every: int | None = None
        best: Any = "loss"
        within: float | None = None

    assert keep_of(Rules()) == Keep(last=3, best=("loss", "min"))


def test_a_dry_run_changes_nothing(store: Store, author: Author) -> None:
    saved(author, range(4))
    before = sorted(p.name for p in Path(store.path).rglob("*"))
    assert taken(store, Keep(last=1), dry_run=True) == [0, 1, 2]
    assert sorted(p.name for p in Path(store.path).rglob("*")) == before


def test_retiring_twice_is_the_same(store: Store, author: Author) -> None:
    commits = saved(author, range(3))
    retire(store, commits[:1])
    retire(store, commits[:1])
    assert left(store) == [1, 2]


# what never goes --------------------------------------------------------------------------------


def test_a_newest_step_that_cannot_be_restored_protects_no_other(
    store: Store, author: Author
) -> None:
    """The newest step that verifies stays, and so does the damaged one that is newer."""
    commits = saved(author, range(4))
    (Path(store.path) / "manifests" / commits[3].manifest.hex()).unlink()
    assert taken(store, Keep(last=1)) == [0, 1]
    assert [c.step for c in store.commits("main")] == [2, 3]


def test_nothing_goes_when_nothing_can_be_restored(store: Store, author: Author) -> None:
    commits = saved(author, range(3))
    for commit in commits:
        (Path(store.path) / "manifests" / commit.manifest.hex()).unlink()
    with pytest.raises(CorruptionError, match="nothing is taken off"):
        apply(store, "main", Keep(last=1))
    assert left(store) == [0, 1, 2]


def test_pinned_steps_stay_and_restore(store: Store, author: Author) -> None:
    commits = saved(author, range(4))
    store.pin("good", commits[1])
    assert taken(store, Keep(last=1)) == [0, 2]
    collected(store, author)
    assert words_in(store, store.pinned("good")) == ["same", "step 1"]


def test_a_pin_comes_too_late_for_a_retired_step(store: Store, author: Author) -> None:
    """Else the pin would point at what is being deleted."""
    commits = saved(author, range(3))
    retire(store, commits[:1])
    with pytest.raises(NotFoundError, match="removed by retention"):
        store.pin("late", commits[0])
    assert not store.pins()
    collected(store, author)
    check_everything(store)


def test_a_damaged_pin_stops_retention(store: Store, author: Author) -> None:
    """It may be of any step."""
    commits = saved(author, range(3))
    store.pin("good", commits[0])
    (Path(store.path) / "pins" / "good").write_bytes(b"?")
    with pytest.raises(CorruptionError, match="pin"):
        apply(store, "main", Keep(last=1))
    assert left(store) == [0, 1, 2]


def test_a_step_that_is_being_read_stays(store: Store, author: Author) -> None:
    commits = saved(author, range(4))
    reading = hold(store.io, store.path, commits[1])
    assert reading is not None
    assert taken(store, Keep(last=1)) == [0, 2]
    collected(store, author)
    assert words_in(store, commits[1]) == ["same", "step 1"]
    reading.release()
    assert taken(store, Keep(last=1)) == [1]


def test_a_retired_step_cannot_be_held(store: Store, author: Author) -> None:
    commits = saved(author, range(3))
    retire(store, commits[:1])
    with pytest.raises(NotFoundError, match="removed by retention"):
        hold(store.io, store.path, commits[0])


def test_readers_of_a_read_only_store_go_without_a_hold(store: Store, author: Author) -> None:
    commits = saved(author, range(1))

    class ReadOnly(FileIO):
        def lock(self, path: str, *, create: bool = False) -> int:
            raise OSError(30, "Read-only file system")

    assert hold(ReadOnly(), store.path, commits[0]) is None


# case 93
def test_steps_of_an_abandoned_branch_do_not_outrank_newer_saves(store: Store) -> None:
    """The run stood at step 5000, went back to 400, and saved 500: that one is the newest."""
    session = Session(store, "main", FileIO(), keep=Keep(last=2))
    session.save(400, ["a"])
    session.save(5000, ["b"])
    first = store.find("main", 400)
    session.close()
    again = Session(store, "main", FileIO(), name="again", keep=Keep(last=2))
    assert again.save(500, ["c"], parent=first, overwrite=True) is not None
    assert store.head("main").step == 500
    assert store.steps("main") == [400, 500]
    again.close()
    collect(store)
    check_everything(store)


# case 107
def test_a_fork_leaves_the_run_that_it_came_from_alone(store: Store, author: Author) -> None:
    commits = saved(author, range(3))
    fork = Session(store, "fork", FileIO(), keep=Keep(last=1))
    for step in (3, 4, 5):
        assert fork.save(step, ["same", str(step)], parent=commits[2]) is not None
    fork.close()
    assert left(store) == [0, 1, 2]
    assert left(store, "fork") == [5]


# case 107
def test_what_a_fork_was_restored_from_stays_until_the_fork_has_saved(
    store: Store, author: Author
) -> None:
    commits = saved(author, range(3))
    fork = Session(store, "fork", FileIO())
    save = fork.begin(9, ["same", "fork"], parent=commits[0], commit=commits[0])
    assert taken(store, Keep(last=1)) == [1]
    collected(store, fork, author)
    assert fork.finish(save) is not None
    assert taken(store, Keep(last=1)) == [0]
    collected(store, fork, author)
    fork.close()
    check_everything(store)


# by the writer ----------------------------------------------------------------------------------


# case 88
def test_the_writer_retires_only_after_the_commit(store: Store) -> None:
    """A save that fails, or a crash before it is durable, must leave the step before it."""
    session = Session(store, "main", FileIO(), keep=Keep(last=1))
    session.save(1, ["a"])
    save = session.begin(2, ["b"])
    assert left(store) == [1]
    session.finish(save)
    assert left(store) == [2]
    assert [m for m in session.sent if isinstance(m, Retired)] == [Retired(2, [1])]
    session.close()


def test_a_save_that_fails_retires_nothing(store: Store) -> None:
    session = Session(store, "main", FileIO(), keep=Keep(last=1))
    session.save(5, ["a"])
    assert session.save(4, ["b"]) is None  # not after step 5
    assert left(store) == [5]
    session.close()


def test_retention_that_fails_does_not_fail_the_save(store: Store) -> None:
    class Refusing(FileIO):
        def create(self, path: str, mode: int = 0o666) -> int:
            if path.endswith(".retired"):
                raise OSError(5, "Input/output error")
            return super().create(path, mode)

    session = Session(Store.open(store.path), "main", Refusing(), keep=Keep(last=1))
    assert session.save(1, ["a"]) is not None
    assert session.save(2, ["b"]) is not None
    assert left(store) == [1, 2]
    session.close()


def test_the_writer_reads_each_record_once(store: Store) -> None:
    """Retention after every save must not read thousands of records every time."""
    opened: list[str] = []

    class Counting(FileIO):
        def open(self, path: str) -> int:
            opened.append(path)
            return super().open(path)

    session = Session(Store.open(store.path), "main", Counting(), keep=Keep(last=1, every=1))
    for step in range(10):
        session.save(step, ["same", str(step)])
    opened.clear()
    session.save(10, ["same", "10"])
    assert not [path for path in opened if "/runs/" in path]
    session.close()


def retired_long_ago(store: Store, count: int) -> None:
    """As many steps, which nobody has collected yet."""
    run = Path(store.path, "runs", "main")
    run.mkdir()
    for number in range(1, count + 1):
        (run / number_name(number)).touch()
        (run / f"{number_name(number)}{RETIRED_SUFFIX}").touch()


def test_steps_retired_long_ago_are_not_listed_at_every_save(store: Store) -> None:
    """A training that nobody collects after must not save ever slower."""
    listed: list[str] = []

    class Counting(FileIO):
        def list(self, path: str) -> list[str]:
            listed.append(path)
            return super().list(path)

    retired_long_ago(store, 1000)
    session = Session(store, "main", Counting(), keep=Keep(last=2))
    listed.clear()
    for step in range(60):
        session.save(step, ["same", str(step)])
    assert left(store) == [58, 59]
    assert sum(path.endswith("/runs/main") for path in listed) == 2
    session.close()


def test_a_step_that_somebody_else_retires_is_noticed_without_a_listing(store: Store) -> None:
    """One that is off the list already must not stay in place of one that is on it."""
    retired_long_ago(store, 1000)
    session = Session(store, "main", FileIO(), keep=Keep(last=3))
    for step in range(1, 6):
        session.save(step, ["same", str(step)])
    retire(store, [commit for commit in store.commits("main") if commit.step == 4])
    session.save(6, ["same", "6"])
    assert left(store) == [3, 5, 6]
    session.close()


# case 103
def test_a_step_in_the_middle_may_go(store: Store, author: Author) -> None:
    commits = saved(author, range(1, 10))
    retire(store, [commits[2]])
    collected(store, author)
    assert left(store) == store.steps("main") == [1, 2, 4, 5, 6, 7, 8, 9]
    check_everything(store)


# case 102
def test_what_kept_deltas_need_of_a_retired_base_stays(store: Store) -> None:
    session = Session(store, "main", FileIO(), keep=Keep(last=3))
    words = [f"word {i}" for i in range(16)]
    bases = 0
    for step in range(10):
        words[step] = f"changed {step}"
        report = session.save(step, words, **({"relative": step} if step else {}))
        assert report is not None
        bases += report.base
    assert bases < 10
    session.close()
    report = collect(store)
    assert report.commits == [("main", number) for number in range(1, 8)]
    assert left(store) == [7, 8, 9]
    check_everything(store)


# case 111
def test_a_second_name_or_an_identical_step_costs_no_blob(store: Store, author: Author) -> None:
    commit = author.save(1, ["a", "b"])
    before = sorted(store.packs.names())
    store.pin("best", commit)
    store.pin("last", commit)
    author.save(2, ["a", "b"])
    assert sorted(store.packs.names()) == before
    collected(store, author)
    assert sorted(store.packs.names()) == before


def test_a_pack_that_is_collected_meanwhile_is_not_missed(store: Store, author: Author) -> None:
    """A collection deletes packs between their listing and their opening."""
    packs = Path(store.path) / "packs" / "00"
    packs.mkdir(exist_ok=True)
    superseded = [packs / f"{0:016x}-{number:08d}.pack" for number in range(1, 4)]

    class Collected(FileIO):
        def open(self, path: str) -> int:
            if Path(path) in superseded:
                os.unlink(path)
            return super().open(path)

    saved(author, range(3))
    for path in superseded:
        path.write_bytes(b"of no matter")
    marking = mark(Store.open(store.path, io=Collected()), read_roots(store))
    assert not any(path.exists() for path in superseded)
    assert marking.keeping() == set(Store.open(store.path).packs.names())
    assert taken(store, Keep(last=1)) == [0, 1]


def test_a_pack_that_is_listed_and_not_there_stops_retention(store: Store, author: Author) -> None:
    class Lies(FileIO):
        def open(self, path: str) -> int:
            if path.endswith(".pack"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return super().open(path)

    saved(author, range(3))
    with pytest.raises(StorageError):
        taken(Store.open(store.path, io=Lies()), Keep(last=1))
    assert left(store) == [0, 1, 2]


# other runs -------------------------------------------------------------------------------------


class Opened(FileIO):
    def __init__(self) -> None:
        self.packs = 0

    def open(self, path: str) -> int:
        self.packs += path.endswith(".pack")
        return super().open(path)


def test_retention_reads_the_packs_of_its_run_alone(store: Store, author: Author) -> None:
    """Prevents: with hundreds of runs, each run's retention reads the packs of all of them, and
    damage of any of them says that no step of this run can be restored."""
    saved(author, range(3))
    opened: list[int] = []
    for count in (0, 12):
        packs = others(store, count)
        io = Opened()
        assert taken(Store.open(store.path, io=io), Keep(last=2), dry_run=True) == [0]
        opened.append(io.packs)
    assert opened[0] == opened[1]
    victim = Path(store.packs.path(packs[-1]))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert taken(store, Keep(last=2)) == [0]
    with pytest.raises(CorruptionError):
        apply(store, "other11", Keep(last=1))
