"""Prevents: deleting a run takes what is pinned, read or written, or leaves a store that no other
run, and no run of that name, can be saved to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from authors import Author, Session, check_everything
from command_line import run
from deltackpt_store.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.leases import hold
from deltackpt_store.manifest import Commit
from deltackpt_store.names import number_name
from deltackpt_store.repair import repair
from deltackpt_store.run_deletion import delete_run
from deltackpt_store.runlock import RunLock
from deltackpt_store.store import Store
from deltackpt_store.verify import verify

Made = tuple[list[Commit], Commit]


@pytest.fixture
def made(store: Store) -> Made:
    """Three steps of run tune, and one of a run that was forked from it."""
    author = Author(store, "tune")
    commits = [author.save(step, ["same", f"step {step}"]) for step in (10, 20, 30)]
    author.close()
    fork = Author(store, "fork")
    fork.parent = commits[-1]
    kept = fork.save(40, ["same", "of the fork"])
    fork.close()
    return commits, kept


def listed(store: Store) -> list[int]:
    return store.numbers("tune")


def test_a_run_goes_and_its_name_may_be_used_again(store: Store, made: Made) -> None:
    _, kept = made
    assert delete_run(store, "tune", dry_run=True).retired == [(1, 10), (2, 20), (3, 30)]
    assert listed(store) == [1, 2, 3]
    assert delete_run(store, "tune").retired == [(1, 10), (2, 20), (3, 30)]
    assert listed(store) == []
    assert delete_run(store, "tune").retired == []
    check_everything(store, [kept])
    report = collect(store)
    assert report.commits == [("tune", 1), ("tune", 2), ("tune", 3)]
    assert report.packs
    assert verify(store).ok
    check_everything(store, [kept])
    assert store.resolve_name("latest") == kept  # a run without a step is not meant
    again = Session(store, "tune", FileIO())
    anew = again.save(1, ["from the start"])
    assert anew is not None
    assert anew.number == 4
    again.close()
    check_everything(store, [kept, store.head("tune")])


def test_what_was_collected_does_not_come_back_from_a_copy(
    store: Store, made: Made, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(store.path, tmp_path / "copy"))
    delete_run(store, "tune")
    assert repair(store, sources=[copy]).ok
    assert listed(store) == []
    collect(store)
    assert repair(store, sources=[copy]).ok
    assert listed(store) == []


def test_a_damaged_commit_goes_as_well(store: Store, made: Made) -> None:
    record = Path(store.path, "runs/tune", number_name(2))
    record.write_bytes(b"garbage")
    assert delete_run(store, "tune").retired == [(1, 10), (2, None), (3, 30)]
    collect(store)
    assert verify(store).ok


def test_nothing_goes_beside_a_writer_a_reader_or_a_pin(store: Store, made: Made) -> None:
    commits, _ = made
    directory = f"{store.path}/runs/tune"
    lock = RunLock.acquire(directory, "tune", timeout=0, cancelled=lambda _: True)
    Path(directory, ".lock").write_text('{"pid": 1, "host": "node3"}')  # not of this process
    with pytest.raises(ConflictError, match="is being written") as caught:
        delete_run(store, "tune")
    assert caught.value.kind == "run-locked"
    assert "end that trainer first" in str(caught.value.hint)
    lock.release()
    for commit in commits:
        held = hold(store.io, store.path, commit)
        with pytest.raises(ConflictError, match="is being read") as caught:
            delete_run(store, "tune")
        assert caught.value.kind == "held"
        held.release()
    store.pin("paper", commits[0])
    for dry_run in (False, True):
        with pytest.raises(InvalidInputError, match="as paper") as refused:
            delete_run(store, "tune", dry_run=dry_run)
        assert refused.value.kind == "pinned"
    pin = Path(store.path, "pins/paper")
    pin.write_bytes(pin.read_bytes()[:-1])
    with pytest.raises(CorruptionError):  # it may be of any step
        delete_run(store, "tune")
    pin.unlink()
    assert listed(store) == [1, 2, 3]
    with pytest.raises(NotFoundError, match="no run 'nobody'"):
        delete_run(store, "nobody")
    assert len(delete_run(store, "tune").retired) == 3


def test_a_deletion_that_was_killed_is_completed(store: Store, made: Made) -> None:
    """The newest steps are there to the end: a training that goes on continues them."""

    class Killed(FileIO):
        left = 0

        def create(self, path: str) -> int:
            if path.endswith(".retired"):
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
            return super().create(path)

    commits, _ = made
    for left in range(3):
        Killed.left = 1 if left else 0
        with pytest.raises(KeyboardInterrupt):
            delete_run(Store.open(store.path, io=Killed()), "tune")
        assert listed(store) == [1, 2, 3][left:]
        check_everything(store, [commits[-1]])
    assert delete_run(store, "tune").retired == [(3, 30)]


def test_the_command(store: Store, made: Made) -> None:
    plan = run("delete", store.path, "tune", "--dry-run")
    assert plan.output == "3 steps would be taken off the list of run tune: @10 to @30\n"
    done = json.loads(run("delete", store.path, "tune", "--json").stdout)
    assert [one["step"] for one in done["retired"]] == [10, 20, 30]
    assert run("delete", store.path, "tune").output == "run tune has no step\n"
    assert run("delete", store.path, "nobody").exit_code == 2
    store.pin("kept", store.head("fork"))
    refused = run("delete", store.path, "fork")
    assert refused.exit_code == 2
    assert "unpin` kept" in refused.stderr
