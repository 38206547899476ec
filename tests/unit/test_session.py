"""Saves through the writer, in thread mode: what is committed, what fails, and what goes on."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from deltackpt_store import coding_policy, lmdb_env, open_run, runlock, session
from deltackpt_store.client import WriterClient
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    NotFoundError,
    StateError,
    StorageError,
    WriterError,
)
from deltackpt_store.fileio import Buffer, FileIO
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from msgspec.structs import replace
from toy_trainer import (
    CHUNK,
    SEED,
    SIZES,
    ToyTrainer,
    check_run,
    layout_of,
    read_arrays,
    state_at,
)

Start = Callable[..., ToyTrainer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clients: list[WriterClient] = []

    def begin(run: str = "main", *, slots: int = 4, layout: Any = None, **options: Any):
        options.setdefault("mode", "thread")
        client = WriterClient(
            tmp_path / "store", run, seed=SEED, ring_bytes=slots * 4 * CHUNK, slot_bytes=4 * CHUNK,
            **options,
        )  # fmt: skip
        clients.append(client)
        return ToyTrainer(client, layout)

    yield begin
    for client in clients:
        client.close(60)


def store_of(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def files(tmp_path: Path, *, kind: str = "") -> list[str]:
    found = [os.path.join(d, f) for d, _, names in os.walk(tmp_path / "store") for f in names]
    return sorted(f for f in found if kind in f)


# what is committed ---------------------------------------------------------------------------


def test_every_step_reads_back_bit_for_bit(start: Start, tmp_path: Path) -> None:
    trainer = start()
    for step in range(6):
        trainer.save_now(step)
    assert check_run(str(tmp_path / "store")) == [0, 1, 2, 3, 4, 5]


def test_only_changed_chunks_are_staged_and_deltas_name_their_base(
    start: Start, tmp_path: Path
) -> None:
    trainer = start()
    first = trainer.save_now(1)
    second = trainer.save_now(1 + 1)
    unchanged = trainer.save_now(3, state_at(2)[:-1])
    assert first.base
    assert not second.base
    assert first.stats["staged_chunks"] == first.stats["chunks"] == 6 + 3 + 41 + 1
    assert unchanged.stats["staged_chunks"] == unchanged.stats["written_bytes"] == 0
    store = store_of(tmp_path)
    assert store.manifest(unchanged.manifest).base == first.manifest
    assert os.path.getsize(tmp_path / "store/manifests" / unchanged.manifest.hex()) < 20 * 1024


def test_commit_records_the_figures_of_the_save(start: Start, tmp_path: Path) -> None:
    trainer = start()
    first = trainer.save_now(0)
    again = trainer.client.begin(step=1, layout=trainer.encoded, relative=trainer.relative)
    trainer.stage(again, state_at(0), only={(0, 0), (1, 2)})  # staged, yet nothing is new
    trainer.finish(again, 1, changed_by_trainer=2.0)
    second = trainer.client.result(again, 60)
    total = float(sum(SIZES))
    assert first.stats["state_bytes"] == total + 24
    assert first.stats["staged_bytes"] == first.stats["changed_bytes"] == total
    assert first.stats["written_bytes"] >= total
    assert first.stats["codec.raw.chunks"] + first.stats["dedup_chunks"] == 51
    assert second.stats["staged_bytes"] == second.stats["dedup_bytes"] == 2 * CHUNK
    assert second.stats["staged_chunks"] == second.stats["dedup_chunks"] == 2
    assert second.stats["changed_chunks"] == second.stats["written_bytes"] == 0
    commit = store_of(tmp_path).head("main")
    assert commit.stats["stall_seconds"] == 0.5
    assert commit.stats["changed_by_trainer"] == 2.0
    assert (commit.step, commit.number, commit.digest) == (1, second.number, second.digest)
    assert commit.root == second.root == first.root or commit.root == second.root


def test_a_save_larger_than_the_ring_goes_in_waves(start: Start, tmp_path: Path) -> None:
    # case 74: staging all before the first write would need the whole state in memory
    trainer = start(slots=1)
    trainer.save_now(0)
    assert trainer.client.slots_used == 1
    assert check_run(str(tmp_path / "store")) == [0]


def test_warm_slots_are_reused(start: Start) -> None:
    trainer = start(slots=64)
    trainer.save_now(0)
    used = trainer.client.slots_used
    for step in range(1, 6):
        trainer.save_now(step)
    assert trainer.client.slots_used == used


def test_packs_that_nothing_needs_any_more_leave_the_closure(start: Start, tmp_path: Path) -> None:
    # A closure that only grows would keep every pack alive and every manifest growing.
    trainer = start()
    trainer.save_now(0)
    for step in range(1, 5):
        arrays = [bytes([step]) * len(a) for a in state_at(0)]
        trainer.save_now(step, arrays)
    snapshot = store_of(tmp_path).snapshot(store_of(tmp_path).find("main", 4))
    reader = store_of(tmp_path).reader(snapshot.packs)
    buffer = bytearray(CHUNK)
    reader.read([(snapshot.chunks[1][0].tobytes(), memoryview(buffer))])
    assert buffer == bytes([4]) * CHUNK
    assert len(snapshot.packs) <= 2


def test_memory_of_the_session_does_not_grow_with_saves(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[session.RunWriter] = []
    original = open_run.RunWriter

    def remember(*args: Any, **kwargs: Any) -> session.RunWriter:
        sessions.append(original(*args, **kwargs))
        return sessions[0]

    monkeypatch.setattr(open_run, "RunWriter", remember)
    trainer = start()
    for step in range(30):
        trainer.save_now(step)
    state = vars(sessions[0])
    assert len(state["_tables"]) <= 2 * session.KEPT_TABLES
    assert not state["_active"]
    assert not state["_held"]
    assert not state["_dirty"]
    assert len(vars(trainer.client)["_outcomes"]) <= 64
    assert trainer.client.pending == 0


# relative saves ------------------------------------------------------------------------------


def test_a_new_writer_continues_from_a_commit(start: Start, tmp_path: Path) -> None:
    trainer = start()
    trainer.save_now(0)
    last = trainer.save_now(1)
    trainer.client.close(60)
    resumed = start()
    resumed.table = trainer.table
    parent = store_of(tmp_path).head("main")
    third = resumed.save_now(2, relative=None, relative_commit=("main", last.number), parent=parent)
    assert not third.base  # a delta against the base that the earlier writer made
    assert third.stats["staged_chunks"] < 51
    assert check_run(str(tmp_path / "store")) == [0, 1, 2]


def test_a_run_may_start_from_a_commit_of_another_run(start: Start, tmp_path: Path) -> None:
    # case 107
    trainer = start()
    trainer.save_now(5)
    source = trainer.save_now(6)
    fork = start("fork")
    fork.table = trainer.table
    parent = store_of(tmp_path).head("main")
    made = fork.save_now(7, relative=None, relative_commit=("main", source.number), parent=parent)
    assert made.stats["staged_chunks"] < 51
    assert check_run(str(tmp_path / "store"), "fork") == [7]
    assert store_of(tmp_path).head("fork").parent == ("main", source.number, source.digest)


def test_a_layout_that_grows_stages_only_what_is_new(start: Start, tmp_path: Path) -> None:
    trainer = start(layout=layout_of(["a", "b"], (2 * CHUNK, 3 * CHUNK)))
    arrays = state_at(3)
    a, b = arrays[2][: 2 * CHUNK], arrays[2][: 3 * CHUNK]
    first = trainer.save(0, [a, b])
    assert trainer.client.result(first, 60).base
    grown = ToyTrainer(trainer.client, layout_of(["new", "b", "a"], (CHUNK, 3 * CHUNK, 2 * CHUNK)))
    save = grown.begin(1, relative=first)
    grown.stage(save, [b[:CHUNK], b, a], only={(0, 0)})
    grown.finish(save, 1)
    result = trainer.client.result(save, 60)
    assert result.base
    assert result.stats["staged_chunks"] == 1
    store = store_of(tmp_path)
    assert read_arrays(store, store.head("main"))[:-1] == [b[:CHUNK], b, a]


def test_a_chunk_that_was_never_staged_is_not_committed(start: Start, tmp_path: Path) -> None:
    trainer = start()
    save = trainer.begin(0)
    trainer.stage(save, state_at(0), only={(0, 0), (1, 1)})
    trainer.finish(save, 0)
    with pytest.raises(InvalidInputError, match="'array0'") as info:
        trainer.client.result(save, 60)
    assert info.value.kind == "incomplete"
    with pytest.raises(NotFoundError):
        store_of(tmp_path).head("main")


@pytest.mark.parametrize("what", ["objects", "inline"])
def test_missing_objects_and_inline_values_are_refused(start: Start, what: str) -> None:
    # case 54: one commit covers tensors and all other state, or there is no commit
    trainer = start()
    save = trainer.begin(0)
    trainer.stage(save, state_at(0))
    values: dict[str, Any] = {"objects": {5: b"\x00"}, "inline": {4: bytes(24)}}
    trainer.client.finish(save, **{**values, what: {}})
    with pytest.raises(InvalidInputError, match=what):
        trainer.client.result(save, 60)
    trainer.save_now(0)


def test_a_wrong_inline_length_is_refused(start: Start) -> None:
    trainer = start()
    save = trainer.begin(0)
    trainer.stage(save, state_at(0))
    trainer.client.finish(save, objects={5: b"\x00"}, inline={4: bytes(23)})
    with pytest.raises(InvalidInputError, match="inline"):
        trainer.client.result(save, 60)


def test_records_outside_layout_or_slot_are_refused(start: Start) -> None:
    trainer = start()
    for record in (
        (9, 0, 0, CHUNK),
        (0, 6, 0, 100),
        (0, 0, 0, CHUNK - 1),
        (0, 5, 0, CHUNK),
        (4, 0, 0, 24),
        (0, 0, 4 * CHUNK - 1, CHUNK),
        (0, 0, 2**32 - 1, CHUNK),
    ):
        save = trainer.begin(0)
        slot = trainer.client.acquire_slot(60)
        data = b"".join(n.to_bytes(4, "little") for n in record) + bytes(16)
        trainer.client.slot(save, slot, data)
        with pytest.raises(InvalidInputError):
            trainer.client.result(save, 60)
    trainer.save_now(0)


def test_invalid_layouts_are_refused(start: Start) -> None:
    trainer = start()
    for layout in (b"\xc1", b"\x90", trainer.encoded.replace(b"array0", b"array1")):
        save = trainer.client.begin(step=0, layout=layout)
        with pytest.raises(InvalidInputError, match="layout"):
            trainer.client.result(save, 60)
    trainer.save_now(0)


# torn and failed saves -----------------------------------------------------------------------


def test_bytes_that_changed_after_hashing_are_never_committed(start: Start, tmp_path: Path) -> None:
    # case 52
    trainer = start()
    trainer.save_now(0)
    save = trainer.begin(1)
    table = trainer.stage(save, state_at(1), torn=(0, 0))
    trainer.finish(save, 1)
    trainer.table, trainer.relative = table, save
    with pytest.raises(CorruptionError, match="'array0'") as info:
        trainer.client.result(save, 60)
    assert info.value.kind == "torn"
    assert info.value.context["key"] == "array0"
    follower = trainer.save(2)
    with pytest.raises(StateError, match="relative to it") as failed:
        trainer.client.result(follower, 60)
    assert failed.value.kind == "relative-failed"
    trainer.forget()
    trainer.save_now(2)
    assert check_run(str(tmp_path / "store")) == [0, 2]


def test_a_torn_first_save_leaves_no_pack_behind(start: Start, tmp_path: Path) -> None:
    trainer = start(slots=64)
    save = trainer.begin(0)
    trainer.stage(save, state_at(0), torn=(3, 0))  # the last chunk
    with pytest.raises(CorruptionError):
        trainer.client.result(save, 60)
    trainer.client.close(60)
    assert files(tmp_path, kind="pack") == []


def test_an_aborted_save_gives_its_slots_back(start: Start, tmp_path: Path) -> None:
    trainer = start(slots=2)
    for step in range(3):
        save = trainer.begin(step)
        trainer.stage(save, state_at(step))
        trainer.client.abort(save)
        with pytest.raises(StateError) as info:
            trainer.client.result(save, 60)
        assert info.value.kind == "aborted"
    trainer.save_now(3)
    assert check_run(str(tmp_path / "store")) == [3]


class FailingIO(FileIO):
    """Fails the k-th call of those that change a store, and every one while `broken`."""

    def __init__(self, at: int | None = None, code: int = errno.ENOSPC) -> None:
        self.at = at
        self.code = code
        self.calls = 0
        self.armed = False
        self.names: list[str] = []
        self._lock = threading.Lock()

    def _count(self, name: str) -> None:
        if not self.armed:
            return
        with self._lock:
            self.calls += 1
            self.names.append(name)
            if self.calls == self.at:
                raise OSError(self.code, os.strerror(self.code))

    def create(self, path: str, mode: int = 0o666) -> int:
        self._count("create")
        return super().create(path, mode)

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._count("write")
        return super().write(handle, buffers, offset)

    def sync(self, handle: int) -> None:
        self._count("sync")
        super().sync(handle)

    def link(self, source: str, target: str) -> None:
        self._count("link")
        super().link(source, target)

    def sync_directory(self, path: str) -> None:
        self._count("sync_directory")
        super().sync_directory(path)

    def mkdir(self, path: str) -> None:
        self._count("mkdir")
        super().mkdir(path)


def test_a_full_disk_at_any_call_fails_that_save_only(tmp_path: Path) -> None:
    # case 79, case 97: ENOSPC at the k-th call for all k; the same step can be saved again
    def run(name: str, at: int | None) -> FailingIO:
        io = FailingIO(at)
        path = tmp_path / name
        with WriterClient(
            path, "main", seed=SEED, ring_bytes=8 * CHUNK, slot_bytes=4 * CHUNK, mode="thread",
            io=io,
        ) as client:  # fmt: skip
            trainer = ToyTrainer(client)
            trainer.save_now(0)
            table, relative = trainer.table, trainer.relative
            io.armed = True
            save = trainer.save(1)
            if at is None:
                client.result(save, 60)
                return io
            with pytest.raises(StorageError) as info:
                client.result(save, 60)
            assert info.value.errno == errno.ENOSPC
            io.armed = False
            trainer.table, trainer.relative = table, relative
            trainer.save_now(1)
            trainer.save_now(2)
        assert check_run(str(path)) == [0, 1, 2]
        assert not [f for _, _, names in os.walk(path) for f in names if f.startswith(".tmp-")]
        return io

    calls = run("counted", None)
    assert {"create", "write", "sync", "link", "sync_directory"} <= set(calls.names)
    for at in range(1, calls.calls + 1):
        run(f"failing-{at}", at)


def test_a_commit_whose_number_may_be_taken_is_not_retried_under_it(
    start: Start, tmp_path: Path
) -> None:
    # The directory sync after the commit's link fails: the number is used, the save has failed.
    class LateIO(FileIO):
        fail = False

        def sync_directory(self, path: str) -> None:
            if self.fail and path.endswith("runs/main"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().sync_directory(path)

    io = LateIO()
    trainer = start(io=io)
    trainer.save_now(0)
    table, relative = trainer.table, trainer.relative
    io.fail = True
    save = trainer.save(1)
    with pytest.raises(StorageError):
        trainer.client.result(save, 60)
    io.fail = False
    assert (tmp_path / "store/runs/main" / f"{2:020d}").exists()
    trainer.table, trainer.relative = table, relative
    assert trainer.save_now(1).number == 3
    trainer.save_now(2)
    assert check_run(str(tmp_path / "store")) == [0, 1, 2]


def test_a_failure_in_any_thread_commits_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # case 58: the encoder, and the thread that writes packs, die of an unexpected exception
    trainer = start()
    trainer.save_now(0)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("encoder bug")

    for target, name in ((coding_policy, "encode"), (FailingIO, "write")):
        with monkeypatch.context() as patch:
            if target is coding_policy:
                patch.setattr(target, name, broken)
            else:
                patch.setattr(FileIO, name, broken)
            trainer.forget()
            arrays = [bytes(reversed(a)) for a in state_at(7)]
            with caplog.at_level(logging.CRITICAL, "deltackpt"):
                save = trainer.save(1, arrays)
                with pytest.raises(DeltackptError, match="encoder bug"):
                    trainer.client.result(save, 60)
        trainer.forget()
    trainer.save_now(1)
    assert check_run(str(tmp_path / "store")) == [0, 1]


# order, lineage, overwrite -------------------------------------------------------------------


@pytest.mark.parametrize("step", [10, 5])
def test_a_step_that_is_not_later_is_refused_by_default(
    start: Start, tmp_path: Path, step: int
) -> None:
    # case 99
    trainer = start()
    trainer.save_now(10)
    save = trainer.save(step)
    with pytest.raises(ConflictError, match="step 10") as info:
        trainer.client.result(save, 60)
    assert info.value.kind == "step-order"
    assert store_of(tmp_path).steps("main") == [10]


def test_overwrite_keeps_the_old_step_until_the_new_one_is_committed(
    start: Start, tmp_path: Path
) -> None:
    # case 99
    trainer = start()
    for step in (5, 10, 15):
        trainer.save_now(step)
    save = trainer.begin(10, overwrite=True)
    changed = [bytes(reversed(a)) for a in state_at(10)]
    table = trainer.stage(save, changed)
    store = store_of(tmp_path)
    assert store.steps("main") == [5, 10, 15]
    assert read_arrays(store, store.find("main", 10)) == state_at(10)
    trainer.finish(save, 10)
    trainer.client.result(save, 60)
    trainer.table, trainer.relative = table, save
    assert store.steps("main") == [5, 10]
    assert read_arrays(store, store.find("main", 10))[:-1] == changed[:-1]
    trainer.save_now(11)
    assert store.steps("main") == [5, 10, 11]
    old = [commit for commit in store.commits("main") if commit.step == 15]
    assert read_arrays(store, old[0]) == state_at(15)  # abandoned, not destroyed


def test_going_back_makes_a_branch_that_is_the_latest(start: Start, tmp_path: Path) -> None:
    # case 93: the old run's larger step numbers must not win
    trainer = start()
    early = trainer.save_now(400)
    trainer.save_now(5000)
    trainer.client.close(60)
    resumed = start()
    save = resumed.save(500, parent=store_of(tmp_path).find("main", early.step))
    resumed.client.result(save, 60)
    assert store_of(tmp_path).steps("main") == [400, 500]
    resumed.save_now(600)
    assert store_of(tmp_path).steps("main") == [400, 500, 600]


def test_a_fresh_trainer_does_not_silently_continue_an_old_run(start: Start) -> None:
    trainer = start()
    trainer.save_now(100)
    trainer.client.close(60)
    fresh = start()
    save = fresh.save(0)
    with pytest.raises(ConflictError, match="restore first"):
        fresh.client.result(save, 60)


def test_a_parent_whose_place_another_commit_has_is_refused(start: Start, tmp_path: Path) -> None:
    trainer = start()
    trainer.save_now(1)
    parent = replace(store_of(tmp_path).head("main"), digest=bytes(32))
    save = trainer.client.begin(step=2, layout=trainer.encoded, parent=parent)
    with pytest.raises(ConflictError, match="not the one that was restored"):
        trainer.client.result(save, 60)


def test_steps_are_ordered_as_numbers(start: Start, tmp_path: Path) -> None:
    # case 91
    trainer = start()
    for step in (9, 10, 99, 100, 1000000):
        trainer.save_now(step)
    assert store_of(tmp_path).steps("main") == [9, 10, 99, 100, 1000000]


def test_a_commit_made_by_somebody_else_is_a_conflict(start: Start, tmp_path: Path) -> None:
    # Where locks do not work two writers may meet: neither may win the other's number.
    trainer = start()
    trainer.save_now(0)
    store = store_of(tmp_path)
    head = store.head("main")
    with StoreWriter(store) as other:
        other.commit(
            run="main", step=1, parent=head, manifest=head.manifest, base=head.base,
            root=head.root, packs=store.snapshot(head).packs,
        )  # fmt: skip
    save = trainer.save(1)
    with pytest.raises(ConflictError, match="somebody else"):
        trainer.client.result(save, 60)
    assert read_arrays(store, store.head("main")) == state_at(0)


# several saves at once -----------------------------------------------------------------------


class SlowIO(FileIO):
    """Waits for a permit before every sync: a disk of any slowness, without a clock."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.free = False
        self.waiting = threading.Event()

    def sync(self, handle: int) -> None:
        if not self.free:
            self.waiting.set()
            self.permits.acquire()
        super().sync(handle)


def test_a_slow_disk_bounds_what_is_in_flight_and_keeps_the_order(
    start: Start, tmp_path: Path
) -> None:
    # case 56: buffers in flight are never overwritten, commits come in step order
    io = SlowIO()
    io.free = True
    outcomes: list[int] = []
    trainer = start(slots=60, io=io, on_result=lambda save, outcome: outcomes.append(save))
    trainer.save_now(0)
    io.free = False
    saves = [trainer.save(1), trainer.save(2)]
    with pytest.raises(StateError) as info:
        trainer.save(3)
    assert info.value.kind == "busy"
    assert trainer.client.pending == 2
    assert not trainer.client.wait_room(0)
    assert io.waiting.wait(60)
    with pytest.raises(StorageError) as info2:
        trainer.client.result(saves[0], 0)
    assert info2.value.kind == "timeout"
    io.free = True
    for _ in range(100):
        io.permits.release()
    for step in range(3, 21):
        assert trainer.client.wait_room(60)
        trainer.save(step)
    trainer.client.close(60)
    assert outcomes == sorted(outcomes)
    assert check_run(str(tmp_path / "store")) == list(range(21))


def test_readers_see_whole_steps_only(start: Start, tmp_path: Path) -> None:
    # case 55: listing and reading while a save is under way
    io = SlowIO()
    io.free = True
    trainer = start(io=io, slots=60)
    trainer.save_now(0)
    io.free = False
    save = trainer.save(1)
    assert io.waiting.wait(60)
    assert check_run(str(tmp_path / "store")) == [0]
    io.free = True
    for _ in range(100):
        io.permits.release()
    trainer.client.result(save, 60)
    assert check_run(str(tmp_path / "store")) == [0, 1]


def test_interleaved_saves_fail_alone(start: Start, tmp_path: Path) -> None:
    # A torn save must not take blobs with it that another save counts on.
    trainer = start(slots=60)
    trainer.save_now(0)
    good, bad = trainer.begin(1), trainer.begin(2)
    trainer.stage(bad, state_at(1), only={(0, 0), (1, 0)})
    table = trainer.stage(good, state_at(1))
    trainer.stage(bad, state_at(2), only={(0, 1)}, torn=(0, 1))
    with pytest.raises(CorruptionError):
        trainer.client.result(bad, 60)
    trainer.finish(good, 1)
    trainer.client.result(good, 60)
    trainer.table, trainer.relative = table, good
    trainer.save_now(2)
    assert check_run(str(tmp_path / "store")) == [0, 1, 2]


def test_a_storage_error_fails_every_save_that_lost_blobs(start: Start, tmp_path: Path) -> None:
    io = FailingIO(code=errno.EIO)
    trainer = start(io=io, slots=60)
    trainer.save_now(0)
    first, second = trainer.begin(1), trainer.begin(2)
    trainer.stage(first, state_at(1))
    trainer.stage(second, state_at(1), only={(0, 0)})
    io.armed, io.at = True, 1
    trainer.finish(first, 1)
    for save in (first, second):
        with pytest.raises(StorageError) as info:
            trainer.client.result(save, 60)
        assert info.value.errno == errno.EIO
    trainer.save_now(1)
    assert check_run(str(tmp_path / "store")) == [0, 1]


def test_a_save_that_lost_nothing_is_committed_when_blobs_of_another_are_lost(start: Start) -> None:
    """Prevents: a save of which nobody hears again."""
    io = FailingIO(code=errno.EIO)
    trainer = start(io=io, slots=60)
    trainer.save_now(0)
    first, second = trainer.begin(1), trainer.begin(2)
    trainer.stage(first, state_at(1))
    io.armed, io.at = True, 1
    trainer.finish(second, 2)  # nothing has changed
    assert trainer.client.result(second, 60).step == 2
    with pytest.raises(StorageError):
        trainer.client.result(first, 60)


# opening -------------------------------------------------------------------------------------


def test_a_second_writer_of_the_run_is_told_who_holds_it(start: Start) -> None:
    trainer = start()
    trainer.client.ready(60)
    second = start(options=WriterOptions(lock_timeout=0))
    with pytest.raises(ConflictError, match=f"process {os.getpid()} ") as info:
        second.client.ready(60)
    assert info.value.kind == "run-locked"
    with pytest.raises(ConflictError):
        second.client.begin(step=0, layout=b"")
    with pytest.raises(ConflictError):
        second.client.acquire_slot(60)
    trainer.save_now(0)
    start("other").save_now(0)  # another run of the same store is free


def test_the_next_writer_waits_for_one_that_is_finishing(start: Start) -> None:
    first = start()
    first.client.ready(60)
    second = start(slots=60)
    save = second.save(1)
    assert not second.client.done(save)
    first.client.close(60)
    second.client.result(save, 60)


def test_waiting_for_an_earlier_writer_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runlock, "_PATIENCE_SECONDS", 0)
    lock = runlock.RunLock.acquire(str(tmp_path), "r", timeout=0, cancelled=lambda _: False)
    rounds = iter([False, False, True])
    with pytest.raises(ConflictError):
        runlock.RunLock.acquire(str(tmp_path), "r", timeout=60, cancelled=lambda _: next(rounds))
    lock.release()
    (message,) = [record.message for record in caplog.records]
    assert f"'r' is being written by process {os.getpid()} " in message
    assert "lock_timeout" in message


def test_of_a_writer_process_the_trainer_is_named(tmp_path: Path) -> None:
    """Ending its writer, whose number was told, ends nothing: the trainer starts another."""
    lock = runlock.RunLock.acquire(str(tmp_path), "r", timeout=0, cancelled=lambda _: False)
    (tmp_path / ".lock").write_text('{"pid": 2, "host": "node3", "trainer": 1}')
    with pytest.raises(
        ConflictError, match=r"process 1 on 'node3' \(its writer: process 2\)"
    ) as info:
        runlock.RunLock.acquire(str(tmp_path), "r", timeout=0, cancelled=lambda _: True)
    lock.release()
    assert info.value.hint is not None
    assert "end that trainer" in info.value.hint


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_without_file_locks_the_writer_works_and_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    # case 123
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(runlock.fcntl, "flock", unsupported)
    trainer = start()
    trainer.save_now(0)
    assert "no file locks" in caplog.text


def test_a_replaced_lock_file_is_locked_anew(tmp_path: Path) -> None:
    lock = runlock.RunLock.acquire(str(tmp_path), "r", timeout=0, cancelled=lambda _: False)
    os.unlink(tmp_path / ".lock")
    other = runlock.RunLock.acquire(str(tmp_path), "r", timeout=0, cancelled=lambda _: False)
    with pytest.raises(ConflictError):
        runlock.RunLock.acquire(str(tmp_path), "r", timeout=0, cancelled=lambda _: False)
    lock.release()
    other.release()
    other.release()


def test_a_directory_that_is_no_store_is_refused_untouched(start: Start, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/thesis.tex").write_text("precious")
    trainer = start()
    with pytest.raises(InvalidInputError, match="not empty"):
        trainer.client.ready(60)
    assert files(tmp_path) == [str(tmp_path / "store/thesis.tex")]


def test_a_missing_store_is_not_created_on_request(start: Start) -> None:
    trainer = start(options=WriterOptions(create=False))
    with pytest.raises(NotFoundError):
        trainer.client.ready(60)


def test_a_bad_run_name_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="run"):
        start("../escape").client.ready(60)
    assert not (tmp_path / "store").exists()


def test_a_read_only_store_is_a_storage_error(start: Start) -> None:
    class ReadOnlyIO(FileIO):
        def mkdir(self, path: str) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    trainer = start()
    trainer.save_now(0)
    second = start("other", io=ReadOnlyIO())
    with pytest.raises(StorageError, match="read-only") as info:
        second.client.ready(60)
    assert info.value.errno == errno.EROFS


def test_a_newer_format_is_refused_and_left_alone(start: Start, tmp_path: Path) -> None:
    from blake3 import blake3
    from deltackpt_store.errors import UnsupportedFormatError

    start().save_now(0)
    path = tmp_path / "store/FORMAT"
    line = path.read_bytes().split(b"\n")[0].replace(b'"deltackpt":1', b'"deltackpt":2') + b"\n"
    path.unlink()
    path.write_bytes(line + blake3(line).hexdigest().encode() + b"\n")
    before = files(tmp_path)
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        start("new").client.ready(60)
    assert files(tmp_path) == before


def test_a_broken_message_ends_the_writer_with_its_reason(start: Start) -> None:
    trainer = start()
    trainer.client.ready(60)
    connection = vars(trainer.client)["_connection"]
    vars(connection)["_outbox"].put(b"\x01\x00\x00\x00\xc1")
    save = trainer.begin(0)
    with pytest.raises(WriterError, match="undecodable"):
        trainer.client.result(save, 60)


def test_a_run_without_a_readable_commit_says_how_to_go_on(start: Start, tmp_path: Path) -> None:
    # Prevents: all saves refused, and no word on which file it is and what can be done.
    trainer = start()
    trainer.save_now(1)
    trainer.client.close(60)
    (record,) = files(tmp_path, kind="/runs/main/0")
    Path(record).write_bytes(b"torn")
    with pytest.raises(CorruptionError) as caught:
        start().save_now(2)
    told = str(caught.value)
    assert os.path.relpath(record, tmp_path / "store") in told
    assert all(way in told for way in ("verify", "repair", "another run name"))
    assert not [path for path in lmdb_env._open if path.startswith(str(tmp_path))]
    assert start("other").save_now(2).step == 2
