"""The staging ring and its lease book."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Callable

import numpy as np
import pytest
from deltackpt_store.errors import CorruptionError, InvalidInputError, StateError, StorageError
from deltackpt_store.ring import Ring, SlotPool
from hypothesis import given, settings
from hypothesis import strategies as st

SLOT = 64 * 1024


def test_both_mappings_see_the_same_bytes() -> None:
    with Ring.create(3 * SLOT, SLOT) as ours, Ring.attach(os.dup(ours.fd), 3, SLOT) as theirs:
        for slot in range(3):
            ours.view(slot)[:] = bytes([slot + 1]) * SLOT
        for slot in range(3):
            assert bytes(theirs.view(slot)) == bytes([slot + 1]) * SLOT


def test_memory_is_used_only_for_touched_slots() -> None:
    # A frozen model must not pay for the ring that a dense one needs.
    with Ring.create(1 << 40, 4 << 20) as ring:
        assert ring.slots == 1 << 18
        assert os.fstat(ring.fd).st_blocks == 0
        ring.view(0)[:5000] = bytes(5000)
        assert 0 < os.fstat(ring.fd).st_blocks * 512 <= SLOT


def test_size_is_sealed() -> None:
    # Truncating shared memory under the other side's feet would kill it with SIGBUS.
    with Ring.create(2 * SLOT, SLOT) as ring:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(ring.fd, SLOT)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(ring.fd, 4 * SLOT)


def test_descriptor_is_closed_on_exec() -> None:
    with Ring.create(SLOT, SLOT) as ring:
        assert fcntl.fcntl(ring.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


@pytest.mark.parametrize("number", [None, errno.ENOSYS, errno.EPERM, errno.EACCES])
def test_without_memory_files_an_unlinked_file_serves(
    monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """Systems without them, and sandboxes that refuse them."""

    def refuse(*args: object) -> int:
        raise OSError(number, "refused")

    if number is None:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    with Ring.create(2 * SLOT, SLOT) as ours, Ring.attach(os.dup(ours.fd), 2, SLOT) as theirs:
        ours.view(1)[:4] = b"here"
        assert bytes(theirs.view(1)[:4]) == b"here"
        assert fcntl.fcntl(ours.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert os.fstat(ours.fd).st_nlink == 0
        # A mapping that is written to when the disk is full would kill the process.
        assert os.fstat(ours.fd).st_blocks * 512 >= 2 * SLOT


def test_memory_files_that_must_not_be_executable_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """vm.memfd_noexec=2 refuses all others; older systems do not know them."""
    real = os.memfd_create
    for bad in (lambda flags: not flags & 8, lambda flags: flags & 8):  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType, reportUnknownMemberType]

        def make(name: str, flags: int, bad: Callable[[int], object] = bad) -> int:
            if bad(flags):
                raise OSError(errno.EACCES if flags & 8 == 0 else errno.EINVAL, "refused")
            return real(name, flags & ~8)

        monkeypatch.setattr(os, "memfd_create", make)
        with Ring.create(SLOT, SLOT) as ring, pytest.raises(OSError, match="not permitted"):
            os.ftruncate(ring.fd, 4 * SLOT)  # it is sealed, and no file on a disk


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_ring_has_the_slots_that_fit(slots: int) -> None:
    with Ring.create(slots * SLOT + SLOT - 1, SLOT) as ring:
        assert (ring.slots, ring.slot_bytes) == (slots, SLOT)


def test_a_ring_smaller_than_a_slot_has_one_slot() -> None:
    with Ring.create(1, SLOT) as ring:
        assert ring.slots == 1


@pytest.mark.parametrize(("ring", "slot"), [(0, SLOT), (-1, SLOT), (SLOT, 0), (SLOT, 1000)])
def test_impossible_sizes_are_refused(ring: int, slot: int) -> None:
    with pytest.raises(InvalidInputError, match="_bytes"):
        Ring.create(ring, slot)


def test_a_ring_that_no_address_space_holds_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="smaller ring_bytes"):
        Ring.create(1 << 62, 1 << 60)


def test_a_ring_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Callable[..., int]:
        def fail(*args: object) -> int:
            raise OSError(number, os.strerror(number))

        return fail

    with Ring.create(2 * SLOT, SLOT) as ring, monkeypatch.context() as patch:
        patch.setattr("deltackpt_store.ring.mmap.mmap", refuse(errno.ENOMEM))
        with pytest.raises(StorageError, match=r"the writer cannot map .*smaller ring_bytes"):
            Ring.attach(ring.fd, 2, SLOT)
    for number, limit in ((errno.EMFILE, "-n"), (errno.EFBIG, "-f")):
        monkeypatch.setattr(os, "memfd_create", refuse(number))
        with pytest.raises(StorageError, match=f"cannot make a staging ring .*ulimit {limit}"):
            Ring.create(2 * SLOT, SLOT)


def test_attach_refuses_a_file_of_another_size() -> None:
    with Ring.create(2 * SLOT, SLOT) as ring, pytest.raises(CorruptionError, match="expected 3"):
        Ring.attach(ring.fd, 3, SLOT)


@pytest.mark.parametrize("slot", [-1, 2])
def test_no_view_outside_the_ring(slot: int) -> None:
    with Ring.create(2 * SLOT, SLOT) as ring, pytest.raises(InvalidInputError):
        ring.view(slot)


def test_views_outlive_close() -> None:
    # A staging thread that still copies while the client closes must not crash the process.
    ring = Ring.create(SLOT, SLOT)
    view = ring.view(0)
    ring.close()
    view[:4] = b"late"
    assert bytes(view[:4]) == b"late"
    with pytest.raises(StateError):
        ring.view(0)
    ring.close()


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng([size, seed]).bytes(size)


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, SLOT * 4 - 4096])
def test_what_is_put_is_what_both_sides_see(size: int) -> None:
    """Prevents: bytes that miss the file, or the part of it that is mapped, when memory is new,
    when it is used again, and when it is in part new."""
    with (
        Ring.create(8 * SLOT, 4 * SLOT) as ours,
        Ring.attach(os.dup(ours.fd), 2, 4 * SLOT) as other,
    ):
        for turn, at in enumerate((0, 0, 4096, 64, 0)):
            data = content(size, turn)
            ours.put(1, at, memoryview(data))
            assert bytes(ours.view(1)[at : at + size]) == data
            assert bytes(other.view(1)[at : at + size]) == data
        assert not any(other.view(0))
        assert not any(other.view(1)[4096 + size :])


def test_neighbours_put_into_one_slot_leave_each_other_alone() -> None:
    with Ring.create(4 * SLOT, 4 * SLOT) as ring:
        parts = [(0, 100), (128, 70_000), (73_728, 65_536), (139_264, 5), (139_328, 66_000)]
        for seed in range(3):
            for at, size in parts:
                ring.put(0, at, memoryview(content(size, seed)))
            for at, size in parts:
                assert bytes(ring.view(0)[at : at + size]) == content(size, seed)


def test_filling_new_memory_takes_no_page_faults() -> None:
    """Prevents: a first save that spends most of its time in the kernel, a page at a time."""
    data = memoryview(content(4 << 20))
    with Ring.create(8 << 20, 4 << 20) as ring:
        pages = len(data) // os.sysconf("SC_PAGE_SIZE")
        for most in (pages // 8, pages // 2):  # new, then used before: sixteen pages at a time
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            ring.put(0, 0, data)
            assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < most


def test_a_partly_done_write_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:30_000], at))
    with Ring.create(4 * SLOT, 4 * SLOT) as ring:
        ring.put(0, 4096, memoryview(content(100_000)))
        assert bytes(ring.view(0)[4096:104_096]) == content(100_000)


def test_memory_that_the_system_does_not_give_is_a_storage_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with Ring.create(SLOT, SLOT) as ring, pytest.raises(StorageError, match="memory") as caught:
        ring.put(0, 0, memoryview(bytes(SLOT)))
    assert caught.value.errno == 28


def test_a_descriptor_is_not_closed_while_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: staged bytes written into a file of the user's that has got the same number."""
    ring = Ring.create(SLOT, SLOT)
    real, fd = os.pwrite, ring.fd
    closing = threading.Thread(target=ring.close)

    def slow(to: int, data: memoryview, at: int) -> int:
        closing.start()
        closing.join(0.1)
        assert to == fd
        os.fstat(to)
        return real(to, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    view = ring.view(0)
    ring.put(0, 0, memoryview(content(SLOT)))
    closing.join(60)
    assert bytes(view) == content(SLOT)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_without_its_descriptor_a_ring_is_filled_by_its_mapping() -> None:
    with Ring.create(2 * SLOT, SLOT) as ring:
        ring.close_fd()
        ring.put(1, 0, memoryview(content(SLOT)))
        assert bytes(ring.view(1)) == content(SLOT)


def test_lowest_slot_first_so_that_warm_memory_is_reused() -> None:
    pool = SlotPool(4)
    assert [pool.acquire() for _ in range(4)] == [0, 1, 2, 3]
    assert pool.acquire() is None
    for slot in (3, 0, 2):
        pool.send(slot)
    for slot in (2, 3, 0):
        pool.release(slot)
    assert [pool.acquire() for _ in range(3)] == [0, 2, 3]
    assert pool.high_water == 4


def test_a_slot_cannot_be_released_or_sent_twice() -> None:
    pool = SlotPool(2)
    slot = pool.acquire()
    assert slot is not None
    pool.send(slot)
    with pytest.raises(StateError):
        pool.send(slot)
    with pytest.raises(StateError):
        pool.give_back(slot)
    pool.release(slot)
    with pytest.raises(StateError):
        pool.release(slot)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("asgr"), st.integers(0, 5))))
def test_two_owners_never_hold_one_slot(slots: int, moves: list[tuple[str, int]]) -> None:
    pool, owner = SlotPool(slots), dict.fromkeys(range(slots), "free")
    for move, pick in moves:
        slot = pick % slots
        if move == "a":
            free = [s for s in range(slots) if owner[s] == "free"]
            assert pool.acquire() == (free[0] if free else None)
            if free:
                owner[free[0]] = "trainer"
        elif move == "r":
            if owner[slot] == "writer":
                pool.release(slot)
                owner[slot] = "free"
        elif owner[slot] == "trainer":
            (pool.send if move == "s" else pool.give_back)(slot)
            owner[slot] = "writer" if move == "s" else "free"
        kinds = list(owner.values())
        assert (pool.free, pool.acquired, pool.sent) == tuple(
            kinds.count(k) for k in ("free", "trainer", "writer")
        )
