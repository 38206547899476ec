"""Staging from a device, on simulated devices whose streams run as late as their events allow.

Prevents: bytes of another instant in a save (a missing wait), slots read before their copy is
complete, live memory read after it was unlocked, and saves that rely on one that failed.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from deltackpt_store.errors import CorruptionError, StateError, StorageError
from deltackpt_store.protocol import extent_keys
from staging_ring import SEED, MemoryRing, Tensors

from deltackpt.cuda.fallback import CopyStager
from deltackpt.cuda.stager import DeviceStager
from deltackpt.stage import HostStager, Job, Staging, versions_of
from deltackpt.witness import Witness

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))

from simulated import LateStreams, ModelKernels

CHUNK = 16384
SLOT = 1 << 18
HASTE = (0.0, 0.2, 0.5, 0.8, 0.95)


def tensors(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(300_000, generator=generator),
        "tail": torch.randn(CHUNK // 4 + 20, generator=generator),
        "half": torch.randn(70_000, generator=generator).to(torch.bfloat16),
        "odd": torch.randint(0, 255, (10_001,), generator=generator, dtype=torch.uint8),
    }


class Bench:
    """A stager on a simulated device, its ring, and the state it saves."""

    def __init__(self, *, slots: int = 64, keep: bool = True, gather: int = 4 * SLOT,
                 kind: type[Any] = DeviceStager, chunk: int = CHUNK, slot: int = SLOT,
                 **device: Any) -> None:  # fmt: skip
        self.device = LateStreams(ModelKernels(), **device)
        options = {"gather_bytes": gather} if kind is DeviceStager else {"half_bytes": gather // 4}
        self.stager: Any = kind(self.device, seed=SEED, **options)
        self.ring = MemoryRing(slots, slot, keep=keep)
        self.chunk = chunk
        self.state = tensors()
        self.described = Tensors(self.state, chunk_bytes=chunk)

    def save(self, table: Any = None, **options: Any) -> Staging:
        self.ring.chunks.clear()
        job, mark = self.job(table, **options), self.device.mark()
        return self.stager.finish(job, self.ring, self.stager.start(job, mark))

    def job(self, table: Any, *, unlock: Callable[[], None] = lambda: None,
            cancelled: Callable[[], bool] = lambda: False, versions: Any = None,
            seconds: float = 60.0) -> Job:  # fmt: skip
        described = self.described
        if versions is None:
            versions = versions_of(described.sources)
        return Job(save=1, layout=described.layout, sources=described.sources, table=table or {},
                   versions=versions, deadline=time.monotonic() + seconds, unlock=unlock,
                   cancelled=cancelled)  # fmt: skip

    def expected(
        self, state: dict[str, torch.Tensor] | None = None
    ) -> dict[tuple[int, int], bytes]:
        chunks: dict[tuple[int, int], bytes] = {}
        for extent, tensor in enumerate((state or self.state).values()):
            raw = tensor.detach().view(-1).view(torch.uint8).numpy().tobytes()
            for index in range(-(-len(raw) // self.chunk)):
                chunks[extent, index] = raw[index * self.chunk : (index + 1) * self.chunk]
        return chunks

    def host_table(self) -> Any:
        """The change table as the host's stager makes it."""
        return HostStager(seed=SEED, threads=1).stage(self.job(None), MemoryRing(64, SLOT)).table


def both(test: Any) -> Any:
    return pytest.mark.parametrize("kind", [DeviceStager, CopyStager])(test)


@both
def test_a_first_save_stages_everything(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    staging = bench.save()
    assert bench.ring.chunks == bench.expected()
    assert bench.ring.torn == []
    assert staging.table == bench.host_table()
    assert staging.changed_chunks == staging.chunks == len(bench.expected())
    assert staging.changed_bytes == sum(map(len, bench.expected().values()))


@both
def test_an_unchanged_state_stages_nothing(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    table = bench.save().table
    again = bench.save(table)
    assert again.changed_chunks == again.staged_bytes == 0
    assert bench.ring.chunks == {}
    assert again.table == table


# case 76
@both
@pytest.mark.parametrize("how", ["data", "no_grad", "raw"])
def test_changes_are_found_by_content(kind: type[Any], how: str) -> None:
    """Prevents lost updates by writes that no version counter sees."""
    bench = Bench(kind=kind)
    table = bench.save().table
    tensor = bench.state["big"]
    if how == "data":
        tensor.data[5] += 1
    elif how == "no_grad":
        with torch.no_grad():
            tensor[5] += 1
    else:
        tensor.numpy()[5] += 1
    staging = bench.save(table)
    assert staging.changed_chunks == 1
    assert bench.ring.chunks == {(0, 0): bench.expected()[0, 0]}
    assert bench.ring.torn == []


@both
def test_what_ought_to_be_still_and_is_not_fails_the_save(kind: type[Any]) -> None:
    """Prevents a later value of a frozen tensor that nothing but its bytes gives away. case 76"""
    bench = Bench(kind=kind)
    sources = bench.described.sources
    sources.update(
        {e: msgspec.structs.replace(s, still=True) for e, s in sources.items() if e % 2 == 0}
    )

    def save(table: Any) -> Staging:
        job = dataclasses.replace(bench.job(table), witness=Witness({}, {}))
        return bench.stager.finish(job, bench.ring, bench.stager.start(job, bench.device.mark()))

    with pytest.raises(StateError) as unknown:
        save(None)
    assert unknown.value.kind == "relative-failed"
    table = bench.save().table
    names = list(bench.state)
    bench.state[names[1]].data.view(-1)[0] += 1  # one that may change
    assert save(table).changed_chunks == 1
    bench.state[names[0]].data.view(-1)[0] += 1
    bench.state[names[2]].data.view(-1)[0] += 1
    with pytest.raises(CorruptionError) as torn:
        save(table)
    assert torn.value.kind == "torn"
    assert torn.value.context["tensors"] == (names[0], names[2])


@both
@pytest.mark.parametrize("seed", range(12))
def test_what_training_has_queued_is_saved(kind: type[Any], seed: int) -> None:
    """Prevents a save of the values before the optimizer step that is still running. case 52"""
    bench = Bench(kind=kind, haste=HASTE[seed % 5], seed=seed, gather=2 * SLOT)
    table: Any = None
    for _ in range(3):
        for tensor in bench.state.values():
            bench.device.submit(
                bench.device.main, lambda tensor=tensor: tensor.view(-1)[::7].add_(1)
            )
        job, mark = bench.job(table, versions={}), bench.device.mark()
        found = bench.stager.finish(job, bench.ring, bench.stager.start(job, mark))
        assert bench.ring.torn == []
        table = found.table
    assert bench.ring.chunks == bench.expected()


# case 69, case 70
@pytest.mark.parametrize("seed", range(12))
def test_live_memory_may_be_written_once_unlocked(seed: int) -> None:
    """Prevents torn saves: training scribbles the moment it is let go, with copies under way."""
    bench = Bench(haste=HASTE[seed % 5], seed=seed, gather=2 * SLOT, slots=3, keep=False)
    before = bench.expected()

    def scribble() -> None:
        for tensor in bench.state.values():
            tensor.fill_(7)

    bench.save(unlock=scribble, versions={})
    assert bench.ring.torn == []
    assert bench.ring.chunks == before


@both
def test_every_save_unlocks_once(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    unlocked: list[int] = []
    table = None
    for _ in range(2):
        table = bench.save(table, unlock=lambda: unlocked.append(1)).table
    assert unlocked == [1, 1]


def test_private_copies_do_not_keep_live_memory_locked() -> None:
    """Live chunks come first; the lock does not wait for what is private."""
    bench = Bench(slots=1, keep=False, gather=SLOT)
    live = Tensors(bench.state, chunk_bytes=CHUNK, live=True)
    private = Tensors(bench.state, chunk_bytes=CHUNK, live=False)
    bench.described.sources = {0: private.sources[0], 1: live.sources[1], 2: private.sources[2],
                               3: live.sources[3]}  # fmt: skip
    sent_at_unlock: list[int] = []
    bench.save(unlock=lambda: sent_at_unlock.append(len(bench.ring.sent)))
    assert bench.ring.chunks == bench.expected()
    assert sent_at_unlock[0] == 0
    assert len(bench.ring.sent) > 4


# case 74
@both
@pytest.mark.parametrize(("slots", "gather"), [(1, SLOT), (2, 64 * SLOT), (3, 4 * SLOT)])
def test_a_state_larger_than_ring_and_buffer_goes_in_waves(
    kind: type[Any], slots: int, gather: int
) -> None:
    bench = Bench(kind=kind, slots=slots, keep=False, gather=gather, haste=0.2)
    bench.save()
    assert bench.ring.waves >= 1
    assert bench.ring.torn == []
    assert bench.ring.chunks == bench.expected()


@pytest.mark.parametrize("most", [SLOT, 3 * SLOT])
@pytest.mark.parametrize("haste", HASTE)
def test_a_device_with_little_memory_left(
    most: int, haste: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents a failed save, and one attempt after the other to get memory, where a smaller
    buffer does."""
    bench = Bench(gather=64 * SLOT, haste=haste)
    bench.device.largest = most
    bench.save()
    assert bench.ring.chunks == bench.expected()
    warned = len(caplog.records)
    assert warned == len({record.message for record in caplog.records}) >= 1
    bench.save()
    assert bench.ring.chunks == bench.expected()
    assert bench.ring.torn == []
    assert len(caplog.records) == warned
    bench.stager.close()
    assert bench.stager.counters.device_bytes == 0


class GrudgingRing(MemoryRing):
    """Every second time it is asked, it has no slot just now."""

    asked = 0

    def acquire_slot(self, timeout: float | None) -> int:
        self.asked += 1
        if timeout == 0.0 and self.asked % 2 == 0:
            raise StorageError("no slot became free", kind="timeout")
        return super().acquire_slot(timeout)


@pytest.mark.parametrize("seed", range(6))
def test_a_buffer_is_filled_again_only_when_it_has_left(seed: int) -> None:
    """Prevents a batch that overwrites the one before it in the gather buffer."""
    bench = Bench(gather=64 * SLOT, haste=HASTE[seed % 5], seed=seed)
    bench.ring = GrudgingRing(64, SLOT)
    bench.save()
    assert bench.ring.torn == []
    assert bench.ring.chunks == bench.expected()


@both
def test_no_slot_in_time(kind: type[Any]) -> None:
    bench = Bench(kind=kind, slots=2)
    with pytest.raises(StorageError, match="no slot"):
        bench.save(seconds=0.0)
    assert bench.device.idle


@both
def test_a_save_that_was_given_up_gives_its_slots_back(kind: type[Any]) -> None:
    bench = Bench(kind=kind, slots=8)
    with pytest.raises(StateError, match="given up"):
        bench.save(cancelled=lambda: True)
    assert len(bench.ring.free) == 8
    assert bench.device.idle


def test_slots_are_given_back_only_when_no_copy_into_them_runs() -> None:
    """Prevents a late copy into a slot that another save fills already."""
    bench = Bench(gather=2 * SLOT)
    idle_when_released: list[bool] = []

    class WatchedRing(MemoryRing):
        def release_slot(self, slot: int) -> None:
            idle_when_released.append(bench.device.idle)
            super().release_slot(slot)

    bench.ring = WatchedRing(8, SLOT)
    calls = iter([False, False, True])
    with pytest.raises(StateError, match="given up"):
        bench.save(cancelled=lambda: next(calls))
    assert idle_when_released
    assert all(idle_when_released)


@both
def test_a_device_error_ends_the_save_alone(kind: type[Any]) -> None:
    bench = Bench(kind=kind, slots=8)
    table = bench.save().table
    bench.ring.free = list(range(8))
    bench.device.trouble = RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.save(table)
    bench.device.trouble = None
    assert sorted(bench.ring.free) == list(range(8))
    bench.state["big"][0] += 1
    assert bench.save(table).changed_chunks == 1


@both
def test_after_a_failed_save_the_next_compares_with_the_durable_one(kind: type[Any]) -> None:
    """Prevents a step that refers to chunks which a failed save never made durable."""
    bench = Bench(kind=kind)
    durable = bench.save().table
    bench.state["big"][0] += 1
    staged = bench.save(durable).table  # staged, then failed at the writer: never durable
    bench.state["odd"][0] ^= 1
    assert bench.save(durable).changed_chunks == 2
    assert bench.ring.chunks == {key: bench.expected()[key] for key in [(0, 0), (3, 0)]}
    del staged


@both
def test_after_a_save_that_broke_the_next_compares_with_its_table(kind: type[Any]) -> None:
    """Prevents a lost change: the device had already taken over the digests of the broken save."""
    bench = Bench(kind=kind, slots=8)
    table = bench.save().table
    bench.ring.free = []
    bench.state["big"][0] += 1
    with pytest.raises(StorageError):
        bench.save(table, seconds=0.0)
    bench.ring.free = list(range(8))
    assert bench.save(table).changed_chunks == 1
    assert bench.ring.chunks == {(0, 0): bench.expected()[0, 0]}


@both
def test_a_modified_tensor_is_named(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    versions = versions_of(bench.described.sources)
    bench.state["half"][3] += 1
    unlocked: list[int] = []
    with pytest.raises(CorruptionError, match="half") as caught:
        bench.save(versions=versions, unlock=lambda: unlocked.append(1))
    assert caught.value.kind == "torn"
    assert unlocked == []
    assert len(bench.ring.free) == 64 - len(bench.ring.sent)


# case 78
@both
def test_a_storage_freed_under_the_save_is_named(kind: type[Any]) -> None:
    """Prevents a read of memory that sharded training has given back."""
    bench = Bench(kind=kind)
    bench.state["half"].untyped_storage().resize_(0)
    with pytest.raises(CorruptionError, match="half"):
        bench.save()


@both
def test_moved_tensors_are_followed(kind: type[Any]) -> None:
    """Prevents reads of freed memory: storages are replaced between saves, layouts are not."""
    bench = Bench(kind=kind)
    table = bench.save().table
    moved = {name: tensor.clone() for name, tensor in bench.state.items()}
    moved["tail"][1] += 1
    for tensor in bench.state.values():
        tensor.fill_(0)
    fresh = Tensors(moved, chunk_bytes=CHUNK)
    bench.state, bench.described.sources = moved, fresh.sources
    assert bench.save(table).changed_chunks == 1
    assert bench.ring.chunks == {(1, 0): bench.expected()[1, 0]}


@both
def test_another_layout_keeps_what_is_known_by_key(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    table = bench.save().table
    bench.state = {"new": torch.randn(9000), **bench.state}
    bench.described = Tensors(bench.state, chunk_bytes=CHUNK)
    staging = bench.save(table)
    assert {extent for extent, _ in bench.ring.chunks} == {0}
    keys = extent_keys(bench.described.layout)
    assert set(staging.table) == set(keys)
    assert staging.table == bench.host_table()


@both
def test_another_shape_under_the_same_name_is_another_tensor(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    table = bench.save().table
    bench.state = {**bench.state, "tail": torch.randn(3 * CHUNK)}
    bench.described = Tensors(bench.state, chunk_bytes=CHUNK)
    assert bench.save(table).changed_chunks == 12
    assert bench.ring.chunks == {k: v for k, v in bench.expected().items() if k[0] == 1}


@both
@pytest.mark.parametrize("chunk", [1000, 4096, 65536, 262144])
def test_chunk_sizes(kind: type[Any], chunk: int) -> None:
    bench = Bench(kind=kind, chunk=chunk)
    table = bench.save().table
    assert bench.ring.chunks == bench.expected()
    bench.state["big"][77_777] += 1
    bench.state["odd"][-1] ^= 1
    assert bench.save(table).changed_chunks == 2
    assert bench.ring.chunks == {k: bench.expected()[k] for k in bench.ring.chunks}
    assert bench.ring.torn == []


@both
def test_every_chunk_with_its_hash(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    for tensor in bench.state.values():
        bench.device.submit(bench.device.main, lambda tensor=tensor: tensor.add_(1))
    keys = extent_keys(bench.described.layout)
    found: dict[tuple[int, int], bytes] = {}
    hashes: dict[Any, bytearray] = {}
    described, mark = bench.described, bench.device.mark()
    for key, index, digest, data in bench.stager.hash_all(
        described.layout, described.sources, mark
    ):
        found[keys.index(key), index] = bytes(data)
        hashes.setdefault(
            key, bytearray(16 * described.layout.extents[keys.index(key)].chunk_count)
        )
        hashes[key][16 * index : 16 * index + 16] = digest
    assert found == bench.expected()
    assert hashes == bench.host_table()
    table = {key: bytes(value) for key, value in hashes.items()}
    assert bench.save(table).changed_chunks == 0


def test_memory_that_cannot_be_locked_is_reached_by_a_detour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(lockable=False, slots=3, keep=False, gather=4 * SLOT)
    with caplog.at_level(logging.WARNING):
        table = bench.save().table
        bench.save(table)
    assert bench.ring.chunks == {}
    bench.save()
    assert bench.ring.chunks == bench.expected()
    assert bench.ring.torn == []
    assert [r.message for r in caplog.records] == [
        "staging memory cannot be page-locked (operation not supported): each save makes one more"
        " host copy"
    ]


def test_detours_of_saves_that_failed_are_used_again() -> None:
    """Prevents page-locked memory that grows with every failed save."""
    bench = Bench(lockable=False)
    bench.save()
    held = bench.stager.counters.pinned_bytes
    for _ in range(3):
        calls: list[int] = []
        with pytest.raises(StateError):
            bench.save(cancelled=lambda calls=calls: bool(calls.append(1)) or len(calls) > 1)
    bench.save()
    assert bench.ring.chunks == bench.expected()
    assert bench.stager.counters.pinned_bytes == held


def test_slots_are_locked_once_and_unlocked_with_their_ring() -> None:
    """Prevents locked memory that outlives its ring, and growth from save to save."""
    bench = Bench(slots=4, keep=False)
    table = bench.save().table
    assert len(bench.device.locked) == 4
    bench.save()
    assert len(bench.device.locked) == 4
    old = set(bench.device.locked)
    bench.ring = MemoryRing(2, SLOT, keep=False)
    bench.save()
    assert len(bench.device.locked) == 2
    assert not old & set(bench.device.locked)
    bench.stager.close()
    assert bench.device.locked == {}
    counters = bench.stager.counters
    assert counters.device_bytes == counters.pinned_bytes == 0
    del table


# case 72
@both
def test_memory_does_not_grow_with_saves(kind: type[Any]) -> None:
    bench = Bench(kind=kind, slots=3, keep=False)
    table = bench.save().table
    held = (bench.stager.counters.device_bytes, bench.stager.counters.pinned_bytes)
    for step in range(60):
        bench.state["big"].add_(step % 2)
        table = bench.save(table).table
    assert (bench.stager.counters.device_bytes, bench.stager.counters.pinned_bytes) == held


@both
def test_tensors_at_any_address(kind: type[Any]) -> None:
    bench = Bench(kind=kind)
    base = torch.randint(0, 255, (100_000,), dtype=torch.uint8)
    bench.state = {f"at {at}": base[at : at + 20_000 + at] for at in (0, 1, 2, 4, 8, 15)}
    bench.described = Tensors(bench.state, chunk_bytes=CHUNK)
    bench.save()
    assert bench.ring.chunks == bench.expected()
