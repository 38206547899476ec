"""Runs, lineages, names and pins: the right step, whatever numbers, times and leftovers say."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltackpt_store import (
    Commit,
    ConflictError,
    CorruptionError,
    FileIO,
    InvalidInputError,
    NotFoundError,
    StorageError,
    Store,
)
from deltackpt_store.gc import collect
from deltackpt_store.manifest_io import encode_commit
from deltackpt_store.names import listed_numbers, number_name
from small_store import SmallStore
from step_content import TENSORS, content, steps_of

# runs and lineages ------------------------------------------------------------------------------


def test_steps_are_numbers(small: SmallStore) -> None:
    """Sorted as text, step 9 would be newer than step 1000000."""  # case 91
    steps = [9, 10, 99, 100, 1_000_000]
    steps_of(small, "main", steps)
    store = small.store
    assert store.steps("main") == steps
    assert store.head("main").step == 1_000_000
    assert [c.number for c in store.commits("main")] == sorted(
        c.number for c in store.commits("main")
    )
    assert store.find("main", 99).step == 99
    assert store.resolve_name("latest").step == 1_000_000


def test_times_do_not_matter(small: SmallStore) -> None:
    """Copying tools and clocks scramble times; the newest step must stay the newest."""  # case 92
    steps = list(range(10, 200, 10))
    steps_of(small, "main", steps)
    expected = {c.step: content(small.store, c) for c in small.store.commits("main")}
    rng = random.Random(4)
    for directory, _, files in os.walk(small.path):
        for name in files:
            moment = rng.choice([0, 1, 2**31, 4 * 10**9, rng.randrange(2**31)])
            os.utime(os.path.join(directory, name), (moment, moment))
    store = Store.open(small.path)
    assert store.steps("main") == steps
    assert store.head("main").step == 190
    assert {c.step: content(store, c) for c in store.lineage("main")} == expected


def test_created_times_do_not_matter(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back between two saves must not hide the later one."""  # case 92
    clock = iter([5000.0, 1400.0, 1400.0, 9e9])
    monkeypatch.setattr("deltackpt_store.store_writer.time.time", lambda: next(clock))
    steps_of(small, "main", [1, 2, 3, 4])
    assert [c.created for c in small.store.commits("main")] == [5000.0, 1400.0, 1400.0, 9e9]
    assert small.store.steps("main") == [1, 2, 3, 4]


def test_lineage_after_going_back(small: SmallStore) -> None:
    """The old branch's larger step numbers must not win over what training does now."""  # case 93
    steps_of(small, "main", list(range(100, 5001, 100)))
    back = small.store.find("main", 400)
    head = steps_of(small, "main", [450, 500], parent=back)
    store = small.store
    assert store.head("main").step == 500
    assert store.steps("main") == [100, 200, 300, 400, 450, 500]
    assert head.ancestors == ((1, 4), (51, 51))
    assert len(store.commits("main")) == 52
    # The new step 500 comes first; an abandoned step can still be asked for.
    assert store.find("main", 500).number == head.number
    assert store.find("main", 5000).number == 50
    with pytest.raises(NotFoundError, match=r"4900, 5000") as caught:
        store.find("main", 4999)
    assert caught.value.kind == "unknown-step"


def test_lineage_survives_retention(small: SmallStore) -> None:
    """Steps kept from far back belong to the run although those between are gone."""
    steps_of(small, "main", [10, 20, 30, 40, 50, 60])
    steps_of(small, "main", [35, 45], parent=small.store.find("main", 30))
    for number in (2, 3):  # the very commit that was gone back to included
        os.unlink(f"{small.path}/runs/main/{number_name(number)}")
    Path(f"{small.path}/runs/main/{number_name(7)}.retired").touch()
    store = Store.open(small.path)
    assert store.steps("main") == [10, 45]
    assert [c.number for c in store.commits("main")] == [1, 4, 5, 6, 8]
    Path(f"{small.path}/runs/main/{number_name(8)}.retired").touch()
    assert store.head("main").step == 60
    assert store.steps("main") == [10, 40, 50, 60]


def test_lineage_of_records_without_ancestors(small: SmallStore) -> None:
    """Commits that only name their parent are followed one by one."""
    parent: Commit | None = None
    for number, step in enumerate([1, 2, 3, 4], 1):
        commit = small.save("main", step, TENSORS, parent=parent)
        path = Path(small.path, "runs", "main", number_name(number))
        link = parent and (parent.run, parent.number, parent.digest)
        record = msgspec.structs.replace(commit, ancestors=(), parent=link)
        path.write_bytes(encode_commit(record))
        parent = small.store.read_commit("main", number)
    fork = msgspec.structs.replace(small.store.read_commit("main", 2), number=5, step=9)
    Path(small.path, "runs", "main", number_name(5)).write_bytes(encode_commit(fork))
    assert small.store.steps("main") == [1, 9]


def test_overwritten_step_counts_once(small: SmallStore) -> None:
    """A step saved again is listed once, as it was saved last."""  # case 99
    steps_of(small, "main", [1, 2, 3])
    again = small.save("main", 2, TENSORS, parent=small.store.find("main", 3))
    assert small.store.steps("main") == [1, 3, 2]
    assert small.store.find("main", 2).number == again.number
    assert small.store.resolve_name("latest").number == again.number


def test_a_run_that_starts_from_another(small: SmallStore) -> None:
    """A fork's lineage is its own; the step it came from stays where it was."""
    source = steps_of(small, "main", [100, 200])
    steps_of(small, "fork", [250], parent=source)
    store = small.store
    assert store.runs() == ["fork", "main"]
    assert store.steps("fork") == [250]
    assert store.head("fork").parent == ("main", source.number, source.digest)
    assert store.steps("main") == [100, 200]
    # Going over to another step of the other run leaves the fork's own steps behind.
    steps_of(small, "fork", [150], parent=store.find("main", 100))
    assert store.steps("fork") == [150]


def test_parent_that_was_replaced_is_not_in_the_lineage(small: SmallStore) -> None:
    """A commit put in the place of an ancestor is not what training continued."""
    steps_of(small, "main", [1, 2, 3])
    other = msgspec.structs.replace(small.store.read_commit("main", 2), step=2, metrics={"x": 1.0})
    Path(small.path, "runs", "main", number_name(2)).write_bytes(encode_commit(other))
    lineage = small.store.lineage("main")
    assert [c.step for c in lineage] == [1, 3]
    assert [d.path for d in lineage.damaged] == [f"runs/main/{number_name(2)}"]


def test_unknown_run_and_empty_run(small: SmallStore) -> None:
    """The error says which runs there are."""
    with pytest.raises(NotFoundError, match="holds no run yet"):
        small.store.steps("main")
    steps_of(small, "main", [1])
    (Path(small.path) / "runs" / "empty").mkdir()
    for call in (small.store.head, small.store.lineage, small.store.find, small.store.steps):
        with pytest.raises(NotFoundError, match="main") as caught:
            call("mian")
        assert caught.value.kind == "unknown-run"
        with pytest.raises(NotFoundError, match="no step yet"):
            call("empty")
    assert small.store.commits("empty") == []
    for name in ("", ".hidden", "-x", "a/b", "..", "x" * 101, "ü", "a\n"):
        with pytest.raises(InvalidInputError):
            small.store.commits(name)


def test_other_files_in_a_run_are_ignored(small: SmallStore) -> None:
    """Lock files, leftovers and what a file manager drops must not look like steps."""  # case 87
    steps_of(small, "main", [1])
    run = Path(small.path, "runs", "main")
    for name in (".lock", ".tmp-1234-x", "2", "00000000000000000002.bak", ".DS_Store",
                 "0000000000000000000\uff12"):  # fmt: skip
        (run / name).write_bytes(b"junk")
    for name in (".DS_Store", "desktop.ini", "Thumbs.db"):
        (Path(small.path) / "runs" / name).write_bytes(b"junk")
        (Path(small.path) / "pins" / name).write_bytes(b"junk")
    assert small.store.steps("main") == [1]
    assert small.store.runs() == ["main"]
    assert not small.store.pins()


# damage of what lists steps ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "flipped", "directory", "foreign", "huge"])
def test_damaged_newest_commit(
    small: SmallStore, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A torn newest record must not hide the steps before it, nor pass in silence."""  # case 87
    steps_of(small, "main", [1, 2, 3])
    path = Path(small.path, "runs", "main", number_name(3))
    good = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "foreign":
        path.write_bytes(Path(small.path, "runs", "main", number_name(1)).read_bytes())
    else:
        damaged = {"empty": b"", "flipped": good[:50] + b"\xff" + good[51:], "huge": bytes(2 << 20)}
        path.write_bytes(damaged[how])
    store = small.store
    commits = store.commits("main")
    assert [c.step for c in commits] == [1, 2]
    assert [d.path for d in commits.damaged] == [f"runs/main/{number_name(3)}"]
    assert isinstance(commits.damaged[0].error, CorruptionError)
    assert store.head("main").step == 2
    assert store.steps("main") == [1, 2]
    assert store.resolve_name("latest").step == 2
    assert number_name(3) in caplog.text
    with pytest.raises(CorruptionError):
        store.read_commit("main", 3)


def test_nothing_but_damaged_commits(small: SmallStore) -> None:
    """A run whose records are all damaged is damaged, not new."""
    steps_of(small, "main", [1])
    Path(small.path, "runs", "main", number_name(1)).write_bytes(b"")
    for call in (small.store.head, small.store.lineage, small.store.find):
        with pytest.raises(CorruptionError, match="no commit of run") as caught:
            call("main")
        assert f"runs/main/{number_name(1)}" in str(caught.value)
        for way in ("deltackpt verify", "deltackpt repair", "another run name"):
            assert way in str(caught.value)


@pytest.mark.parametrize("name", ["Main", "main2"], ids=["case", "another"])
@pytest.mark.parametrize("copied", [False, True], ids=["renamed", "copied"])
def test_a_run_whose_folder_has_another_name_is_told_where_it_belongs(
    small: SmallStore, name: str, copied: bool
) -> None:
    steps_of(small, "main", [1])
    runs = Path(small.path, "runs")
    (shutil.copytree if copied else os.rename)(runs / "main", runs / name)
    with pytest.raises(CorruptionError, match="no commit of run"):
        small.store.head(name)
    for call in (lambda: small.store.read_commit(name, 1), lambda: collect(small.store)):
        with pytest.raises(CorruptionError) as caught:
            call()
        assert caught.value.kind == "misplaced-commit"
        assert f"runs/main/{number_name(1)}" in str(caught.value)
        assert "name again" in str(caught.value.hint)  # and not: give it up


@pytest.mark.parametrize("bad", [(3,), (1,), (4,), (2, 3), (1, 2), (1, 2, 3)])
def test_a_damaged_step_that_is_asked_for_is_not_just_missing(
    small: SmallStore, bad: tuple[int, ...]
) -> None:
    """A step whose record is damaged must not read as one that never was."""
    steps_of(small, "main", [10, 20, 30, 40])
    steps_of(small, "other", [7])
    names = [f"runs/main/{number_name(number)}" for number in bad]
    for name in names:
        Path(small.path, name).write_bytes(b"torn")
    store = small.store
    for number in bad:
        for find in (lambda s: store.find("main", s), lambda s: store.resolve_name(f"@{s}")):
            with pytest.raises(CorruptionError) as caught:
                find(10 * number)
            assert caught.value.context["path"] in names
            assert str(caught.value.context["path"]) in str(caught.value)
            assert "verify" in str(caught.value)
            assert "repair" in str(caught.value)
    assert store.resolve_name("@7").run == "other"
    readable = [step for step in (10, 20, 30, 40) if step // 10 not in bad]
    for step in readable:
        assert store.find("main", step).step == step
    # A step that it cannot have been does not exist; the damage is told nevertheless.
    wrong = 45 if 4 not in bad else 5
    with pytest.raises(NotFoundError) as missing:
        store.find("main", wrong if not (wrong == 5 and 1 in bad) else 45)
    assert names[0] in str(missing.value)


def test_commit_that_disappears_while_listing(small: SmallStore) -> None:
    """Collection may remove a commit between listing and reading: that is not damage."""
    steps_of(small, "main", [1, 2, 3])

    class Vanishing(FileIO):
        def open(self, path: str) -> int:
            if path.endswith(number_name(2)):
                os.unlink(path)
            return super().open(path)

    commits = Store.open(small.path, io=Vanishing()).commits("main")
    assert [c.step for c in commits] == [1, 3]
    assert commits.damaged == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_listing_error_is_never_an_empty_store(small: SmallStore, code: int) -> None:
    """Starting afresh because the disk did not answer would abandon the whole run."""
    steps_of(small, "main", [1])

    class Failing(FileIO):
        def list(self, path: str) -> list[str]:
            raise OSError(code, os.strerror(code), path)

    store = Store.open(small.path, io=Failing())
    for call in (store.runs, store.pins, store.index, lambda: store.head("main")):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.errno == code


def test_lost_runs_directory_is_damage(small: SmallStore) -> None:
    """A store without its runs must not look like one that never had any."""
    steps_of(small, "main", [1])
    shutil.rmtree(f"{small.path}/runs")
    with pytest.raises(CorruptionError, match="runs"):
        small.store.runs()
    with pytest.raises(CorruptionError, match="runs"):
        small.store.head("main")


# names ------------------------------------------------------------------------------------------


def test_resolve_name(small: SmallStore) -> None:
    """Every way to name a step, and an error with the choices when a name is ambiguous."""
    steps_of(small, "main", [1, 2])
    store = small.store
    for text in ("main@2", "@2", "latest", "main", "main@latest", "@latest", "main@002"):
        assert store.resolve_name(text).step == 2, text
    assert store.resolve_name("@1").step == 1
    Path(store.path, "runs/begun").mkdir()  # its first save failed: no other run is meant
    assert store.resolve_name("latest").step == 2
    assert store.only_run() == "main"
    stray = Path(store.path, "runs/stray")
    stray.write_text("of somebody")
    with pytest.raises(InvalidInputError, match="main, stray"):
        store.resolve_name("latest")
    stray.unlink()
    steps_of(small, "b", [2, 7])
    with pytest.raises(InvalidInputError, match="runs b, main: one must be named"):
        store.only_run()
    assert store.resolve_name("@7").run == "b"
    assert store.resolve_name("b").step == 7
    for text in ("latest", "@latest", "@2"):
        with pytest.raises(InvalidInputError, match=r"b, main.*write b@") as caught:
            store.resolve_name(text)
        assert caught.value.kind == "ambiguous"
    with pytest.raises(NotFoundError, match=r"no run in .* has step 5"):
        store.resolve_name("@5")
    with pytest.raises(NotFoundError, match="nearest are 2, 7"):
        store.resolve_name("b@5")
    with pytest.raises(NotFoundError, match="no run or pin 'best'"):
        store.resolve_name("best")
    store.pin("best", store.find("main", 1))
    with pytest.raises(InvalidInputError, match="cannot be the name of a pin"):
        store.pin("main", store.find("main", 1))
    assert store.resolve_name("best").step == 1
    store.pin("c", store.find("main", 1))
    steps_of(small, "c", [9])
    with pytest.raises(InvalidInputError, match="both a run and a pin"):
        store.resolve_name("c")
    assert store.resolve_name("c@latest").step == 9
    assert store.resolve_name("b@latest").step == 7
    for text in ("", "@", "main@", "main@x", "main@-1", "main@1.0", "../x@1", "a@b@1", "@ 1"):
        with pytest.raises(InvalidInputError):
            store.resolve_name(text)


def test_resolve_name_in_an_empty_store(tmp_path: Path) -> None:
    """A store before its first save answers plainly."""
    store = Store.create(tmp_path / "s")
    for text in ("latest", "@1", "main", "main@1"):
        with pytest.raises(NotFoundError, match="no run"):
            store.resolve_name(text)
    with pytest.raises(NotFoundError, match="no run"):
        store.only_run()


# pins -------------------------------------------------------------------------------------------


def test_pins(small: SmallStore) -> None:
    """A pin names one commit until it is removed, and never moves by itself."""
    steps_of(small, "main", [1, 2])
    store = small.store
    one, two = store.commits("main")
    store.pin("best", one)
    store.pin("best", one)
    store.pin("last", two)
    assert {name: pin.step for name, pin in store.pins().items()} == {"best": 1, "last": 2}
    with pytest.raises(ConflictError, match="main@1"):
        store.pin("best", two)
    assert store.pinned("best") == one
    store.unpin("best")
    assert list(Store.open(small.path).pins()) == ["last"]
    with pytest.raises(NotFoundError, match="it has last"):
        store.unpin("best")
    for name in ("", "../x", ".x", "-x", "a b"):
        with pytest.raises(InvalidInputError):
            store.pin(name, one)
        with pytest.raises(InvalidInputError):
            store.unpin(name)
    with pytest.raises(InvalidInputError, match="it means the newest step"):
        store.pin("latest", one)


def test_damaged_pins(small: SmallStore) -> None:
    """A damaged pin is reported and hides no other; it never names another step."""
    head = steps_of(small, "main", [1])
    store = small.store
    store.pin("a", head)
    store.pin("b", head)
    path = Path(small.path, "pins", "a")
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        broken = bytearray(good)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        with pytest.raises(CorruptionError):
            store.read_pin("a")
    pins = store.pins()
    assert list(pins) == ["b"]
    assert [d.path for d in pins.damaged] == ["pins/a"]
    path.write_bytes(good)
    other = msgspec.structs.replace(head, metrics={"x": 1.0})
    Path(small.path, "runs", "main", number_name(1)).write_bytes(encode_commit(other))
    with pytest.raises(CorruptionError, match="not the one pinned"):
        store.resolve_name("a")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_pin_on_a_full_or_read_only_disk(small: SmallStore, code: int) -> None:
    """A pin that could not be written is an error, and leaves nothing behind."""
    head = steps_of(small, "main", [1])

    class Failing(FileIO):
        def write(self, handle: int, buffers: Any, offset: int) -> int:
            raise OSError(code, os.strerror(code))

    store = Store.open(small.path, io=Failing())
    with pytest.raises(StorageError):
        store.pin("best", head)
    assert os.listdir(f"{small.path}/pins") == []


def test_only_records_without_a_mark_are_on_the_list() -> None:
    """Marks without a record, names of other lengths or other things are nobody's commits."""
    names = [number_name(n) for n in (3, 1, 2, 7)] + [number_name(n) + ".retired" for n in (2, 5)]
    others = [".lock", "x" * 20, "\u0661" * 20, "1" * 19, "1" * 21, ".tmp-0123456789ab-000",
              "9" * 20, number_name(4) + ".retired.retired",
              number_name(1) + ".retire"]  # fmt: skip
    assert listed_numbers([*names, *others]) == [1, 3, 7]
    assert listed_numbers([]) == []
