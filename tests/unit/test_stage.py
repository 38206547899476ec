"""Staging: changed chunks only, packed into leased slots, and never a mixture of two instants."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from deltackpt_store.errors import CorruptionError, StateError, StorageError
from deltackpt_store.protocol import extent_keys
from staging_ring import SEED, MemoryRing, Tensors, stage

import deltackpt.stage as stage_module
from deltackpt.detect import HASH_BYTES
from deltackpt.stage import HostStager, Packer
from deltackpt.witness import Notary


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


State = tuple[dict[str, torch.Tensor], Tensors]


def random_state(chunk_bytes: int = 65536, *, live: bool = True) -> State:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "big": torch.randn(300_000, generator=generator),
        "row": torch.randn(129, generator=generator),
        "half": torch.randn(70_001, generator=generator).to(torch.bfloat16),
        "flags": torch.rand(5000, generator=generator) < 0.5,
    }
    return tensors, Tensors(tensors, chunk_bytes=chunk_bytes, live=live)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("chunk_bytes", [1024, 65536, 1 << 18])
def test_every_byte_is_staged_once_and_verifies(threads: int, chunk_bytes: int) -> None:
    tensors, state = random_state(chunk_bytes)
    stager = HostStager(seed=SEED, threads=threads, unit_bytes=1 << 17)
    ring = MemoryRing()
    result = stage(ring, state, stager=stager)
    for extent, tensor in enumerate(tensors.values()):
        count = state.layout.extents[extent].chunk_count
        staged = b"".join(ring.chunks[extent, index] for index in range(count))
        assert staged == bytes_of(tensor)
    assert not ring.torn
    assert len(ring.places) == len(ring.chunks) == result.chunks == result.changed_chunks
    assert result.staged_bytes == sum(len(bytes_of(t)) for t in tensors.values())


def test_places_in_a_slot_are_aligned_and_apart() -> None:
    _, state = random_state(65536)
    ring = MemoryRing()
    stage(ring, state, threads=1)
    end = 0
    for start, length in ring.places:
        assert start % (4096 if length >= 65536 else 64) == 0
        assert start >= end or start == 0  # the next slot begins
        end = start + length


def test_only_changed_chunks_are_staged_again() -> None:
    tensors, state = random_state(4096)
    stager = HostStager(seed=SEED, threads=2)
    first = stage(MemoryRing(), state, stager=stager)
    ring = MemoryRing()
    again = stage(ring, state, first.table, stager=stager)
    assert not ring.chunks
    assert not ring.sent
    assert again.table == first.table
    tensors["big"][1024] += 1  # chunk 1 of 4096 bytes
    tensors["flags"][4999] ^= True
    ring = MemoryRing()
    result = stage(ring, state, first.table, stager=stager)
    assert set(ring.chunks) == {(0, 1), (3, 1)}
    assert result.changed_bytes == 4096 + 904


def test_comparison_is_by_bits() -> None:
    """Prevents: NaNs that look changed for ever, and sign or payload changes that are lost."""
    # case 23
    values = torch.zeros(4 * 1024)
    values[5] = float("nan")
    state = Tensors({"x": values}, chunk_bytes=4096)
    first = stage(MemoryRing(), state)
    ring = MemoryRing()
    stage(ring, state, first.table)
    assert not ring.chunks
    values[1024] = -0.0
    values.view(torch.int32)[5] = 0x7FC00001  # another NaN payload
    ring = MemoryRing()
    stage(ring, state, first.table)
    assert set(ring.chunks) == {(0, 0), (0, 1)}


def test_changes_that_no_version_counter_sees_are_found() -> None:
    """Prevents: a step that silently keeps old weights because a counter was trusted."""
    # case 76
    parameter = torch.nn.Parameter(torch.zeros(4096))
    state = Tensors({"p": parameter}, chunk_bytes=1024)
    table = stage(MemoryRing(), state).table
    version = parameter._version
    parameter.data[0] = 1.0
    parameter.detach().numpy()[300] = 1.0
    torch.from_numpy(parameter.detach().numpy()).add_(0)
    stage_module.memory(state.sources[0].data)  # a reader changes nothing
    assert parameter._version == version
    ring = MemoryRing()
    stage(ring, state, table)
    assert set(ring.chunks) == {(0, 0), (0, 1)}


def test_a_table_of_another_shape_dtype_or_chunk_size_is_not_used() -> None:
    state = Tensors({"x": torch.zeros(4096)}, chunk_bytes=1024)
    table = stage(MemoryRing(), state).table
    others = [
        Tensors({"x": torch.zeros(4096)}, chunk_bytes=2048),
        Tensors({"x": torch.zeros(4096, dtype=torch.int32)}, chunk_bytes=1024),
        Tensors({"x": torch.zeros(4097)}, chunk_bytes=1024),
        Tensors({"y": torch.zeros(4096)}, chunk_bytes=1024),
    ]
    for other in others:
        ring = MemoryRing()
        assert stage(ring, other, table).changed_chunks == other.layout.extents[0].chunk_count
    ring = MemoryRing()
    assert stage(ring, Tensors({"x": torch.zeros(4096)}, chunk_bytes=1024), table).chunks == 16
    assert not ring.chunks


def test_a_source_that_changes_between_hash_and_copy_does_not_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents: committing bytes that are not the bytes whose hash was recorded."""
    # case 52
    tensors, state = random_state()
    real, numbers = Packer.copy, iter(range(1000))

    def late(self: Packer, slot: int, at: int, data: memoryview) -> None:
        if next(numbers) == 2:
            tensors["big"].data.add_(1)  # phase two: after the hash, before the copy
        real(self, slot, at, data)

    monkeypatch.setattr(Packer, "copy", late)
    ring = MemoryRing()
    stage(ring, state, threads=1)
    assert ring.torn  # what the writer does: it hashes the staged bytes again


def _doubled(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def _moved(tensor: torch.Tensor) -> None:
    """Same bytes, same version, but the memory that is being read is freed."""
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes())


@pytest.mark.parametrize("modify", [_doubled, _moved])
def test_a_modified_live_tensor_fails_the_save_by_name(
    monkeypatch: pytest.MonkeyPatch, modify: Callable[[torch.Tensor], None]
) -> None:
    """Prevents: a checkpoint that mixes the weights of two steps."""
    # case 48, case 78
    tensors, state = random_state()
    real, once = Packer.copy, iter([True])

    def meanwhile(self: Packer, slot: int, at: int, data: memoryview) -> None:
        if next(once, False):
            modify(tensors["half"])  # another tensor, long before its turn
        real(self, slot, at, data)

    monkeypatch.setattr(Packer, "copy", meanwhile)
    ring, unlocked = MemoryRing(), list[bool]()
    with pytest.raises(CorruptionError, match="half") as caught:
        stage(ring, state, unlocked=unlocked)
    assert caught.value.kind == "torn"
    assert "lock()" in str(caught.value)
    assert not unlocked
    assert len(ring.free) + len(ring.sent) == len(ring.slots)  # no lease is lost


def test_the_note_of_a_tensor_has_its_first_word() -> None:
    """Prevents: memory that was freed and given out again being saved as the tensor's."""
    # case 78
    tensors, state = random_state()
    notary = Notary(SEED)
    for _ in range(8):  # the other words are at random places
        note = notary.note(state.layout, state.sources)
        assert note.agrees(0, state.sources[0], 0, 65536)
        tensors["big"].data[0] += 1
        assert not note.agrees(0, state.sources[0], 0, 65536)


def test_private_copies_may_change_owner_and_unlock_at_once() -> None:
    _, state = random_state(live=False)
    unlocked: list[bool] = []
    stage(MemoryRing(), state, unlocked=unlocked)
    assert unlocked == [True]


def test_live_tensors_are_staged_before_private_ones() -> None:
    tensors, state = random_state()
    state.sources[0] = Tensors({"big": tensors["big"]}, live=False).sources[0]
    stager = HostStager(seed=SEED, threads=1)
    unlocked_after: list[int] = []
    ring = MemoryRing(slot_bytes=65536 * 4)
    stage(ring, state, stager=stager, unlocked=unlocked_after)  # only its length counts
    first_private = next(i for i, (_, records) in enumerate(ring.sent)
                         if any(int.from_bytes(records[at : at + 4], "little") == 0
                                for at in range(0, len(records), 32)))  # fmt: skip
    last_live = max(i for i, (_, records) in enumerate(ring.sent)
                    if any(int.from_bytes(records[at : at + 4], "little") != 0
                           for at in range(0, len(records), 32)))  # fmt: skip
    assert last_live <= first_private


def test_a_storage_that_was_resized_away_is_an_error_not_a_crash() -> None:
    # case 78
    tensor = torch.randn(100_000)
    state = Tensors({"offloaded": tensor})
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CorruptionError, match="offloaded"):
        stage(MemoryRing(), state)
    stager = HostStager(seed=SEED, threads=1)
    with pytest.raises(StateError, match="offloaded"):
        list(stager.hash_all(state.layout, state.sources))


def test_a_state_larger_than_the_ring_goes_through_in_waves() -> None:
    """Prevents: staging that wants as much memory as the state."""
    # case 74
    tensors = {f"t{i}": torch.randn(65536) for i in range(16)}  # 4 MiB
    state = Tensors(tensors, chunk_bytes=65536)
    ring = MemoryRing(slots=4, slot_bytes=1 << 18, keep=False)  # 1 MiB
    stage(ring, state, stager=HostStager(seed=SEED, threads=4, unit_bytes=1 << 18))
    assert not ring.torn
    assert ring.waves >= 3
    for extent, tensor in enumerate(tensors.values()):
        assert b"".join(ring.chunks[extent, i] for i in range(4)) == bytes_of(tensor)


def test_a_ring_that_never_empties_is_an_error_in_time() -> None:
    _, state = random_state()
    ring = MemoryRing(slots=2, slot_bytes=1 << 18)
    with pytest.raises(StorageError, match="slot"):
        stage(ring, state, seconds=0.2)
    assert len(ring.free) + len(ring.sent) == 2


def test_an_error_of_one_thread_gives_every_unsent_slot_back() -> None:
    # case 58
    state = Tensors({"a": torch.randn(3 << 20)})  # 12 MiB: three units
    here = threading.Barrier(2)
    first = [True, True]

    class Failing(MemoryRing):
        def acquire_slot(self, timeout: float | None) -> int:
            if first and first.pop() and here.wait(30) == 0:
                raise OSError(5, "Input/output error")
            return super().acquire_slot(timeout)

    ring = Failing(slots=8)
    with pytest.raises(OSError, match="Input/output error"):
        stage(ring, state, threads=2)
    assert len(ring.free) + len(ring.sent) == 8


def test_a_cancelled_save_ends_early() -> None:
    _, state = random_state()
    ring = MemoryRing()
    with pytest.raises(StateError, match="given up"):
        stage(ring, state, cancelled=True)
    assert len(ring.free) == len(ring.slots)


def test_many_tiny_tensors_share_slots_and_messages() -> None:
    """Prevents: one copy, message or file per tensor."""
    # case 168
    tensors = {f"t{i:05d}": torch.full((200,), float(i)) for i in range(20_000)}  # 16 MB
    state = Tensors(tensors, chunk_bytes=1 << 18)
    ring = MemoryRing(slots=24, slot_bytes=1 << 20)
    stager = HostStager(seed=SEED, threads=2)
    table = stage(ring, state, stager=stager).table
    assert len(ring.sent) <= 18
    for i in (3, 10_000, 19_999):
        tensors[f"t{i:05d}"].add_(1)
    ring = MemoryRing(slots=24)
    assert stage(ring, state, table, stager=stager).changed_chunks == 3
    assert len(ring.sent) <= 2


def test_hash_all_gives_private_copies_and_their_hashes() -> None:
    tensors, state = random_state(65536)
    table = stage(MemoryRing(), state).table
    stager = HostStager(seed=SEED, threads=1)
    keys = extent_keys(state.layout)
    joined: dict[int, bytes] = {}
    for key, index, digest, data in stager.hash_all(state.layout, state.sources):
        extent = keys.index(key)
        assert table[key][HASH_BYTES * index : HASH_BYTES * (index + 1)] == digest
        joined[extent] = joined.get(extent, b"") + bytes(data)
    assert [joined[i] for i in range(4)] == [bytes_of(t) for t in tensors.values()]
    assert np.frombuffer(joined[0], np.float32)[7] == tensors["big"][7].item()
