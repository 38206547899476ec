"""Change detection: what is hashed, by whom, and without holding the interpreter."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import xxhash
from deltackpt_store.copies import copy_bytes
from deltackpt_store.manifest import ExtentSpec, Layout
from deltackpt_store.ring import Ring
from staging_ring import Tensors

from deltackpt.detect import (
    GIL_FREE_BYTES,
    LayoutPlan,
    Unit,
    Workers,
    change_hash,
    memory,
    plan_units,
)
from deltackpt.options import CHUNK_BYTES


@pytest.mark.parametrize("size", [0, 1, 16, 17, 128, 129, 240, 241, 1024, 65536, 65537, 1 << 20])
def test_change_hash_is_the_published_algorithm(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    seed = 0x1234_5678_9ABC_DEF0
    streaming = xxhash.xxh3_128(seed=seed)
    for start in range(0, size, 977):
        streaming.update(data[start : start + 977])
    assert change_hash(data, seed) == streaming.digest()
    assert change_hash(memoryview(data), seed) != change_hash(data, seed + 1)


def test_reading_a_tensor_leaves_its_storage_resizable() -> None:
    """Prevents: saving once forbids offloading (storage resize) for the rest of the run."""
    # case 50
    tensor = torch.arange(1000, dtype=torch.uint8)
    assert bytes(memory(tensor)) == bytes(tensor.tolist())
    assert tensor.untyped_storage().resizable()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(1000)


def test_units_cover_every_chunk_once_and_gather_small_extents() -> None:
    rng = random.Random(5)
    for _ in range(50):
        extents = tuple(
            ExtentSpec(rng.choice([1, 512, 513, 4096, 65536, 65537, 300_000, 5_000_000]),
                       rng.choice([1024, 4096, 65536, 262144]), "uint8")
            for _ in range(rng.randrange(1, 40))
        )  # fmt: skip
        layout = Layout(b"", (), (), extents, ())
        units = plan_units(layout, range(len(extents)), unit_bytes=1 << 18)
        seen = [(p.extent, i) for unit in units for p in unit for i in range(p.first, p.last)]
        wanted = [(e, i) for e, spec in enumerate(extents) for i in range(spec.chunk_count)]
        assert seen == wanted


def test_tiny_extents_share_units() -> None:
    # case 168
    layout = Layout(b"", (), (), (ExtentSpec(4096, CHUNK_BYTES, "float32"),) * 20_000, ())
    assert len(plan_units(layout, range(20_000))) <= 20_000 * 4096 // (4 << 20) + 1


def test_the_plan_is_kept_as_long_as_it_fits() -> None:
    state = Tensors({"a": torch.zeros(1000), "b": torch.zeros(1000)})
    plan = LayoutPlan(state.layout, [0], [1])
    assert plan.fits(state.layout, [0], [1])
    assert not plan.fits(state.layout, [1], [0])
    assert not plan.fits(Tensors({"a": torch.zeros(1000)}).layout, [0], [1])
    assert plan.chunks == 2
    assert plan.useful_threads == 1
    assert LayoutPlan(Tensors({"a": torch.zeros(4 << 20)}).layout, [0], []).useful_threads >= 4


def units_of(count: int) -> list[Unit]:
    layout = Layout(b"", (), (), (ExtentSpec(count * 1024, 1024, "uint8"),), ())
    return plan_units(layout, [0], unit_bytes=1024)


def test_workers_share_the_units_among_threads() -> None:
    workers = Workers(3)
    both_here = threading.Barrier(3)
    done: list[int] = []

    def work(units: Iterator[Unit]) -> None:
        both_here.wait(30)
        done.extend(unit[0].first for unit in units)

    for _ in range(3):  # the same threads again
        done.clear()
        workers.run(work, units_of(50))
        assert sorted(done) == list(range(50))
    workers.close()


def test_threads_that_cannot_be_had_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = threading.Thread.start, [1]

    def start(self: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    workers, done = Workers(4), list[int]()
    workers.run(lambda units: done.extend(unit[0].first for unit in units), units_of(50))
    workers.close()
    assert sorted(done) == list(range(50))


@pytest.mark.parametrize("failing", range(3))
def test_an_error_in_any_thread_is_raised_by_run(failing: int) -> None:
    """Prevents: a dead helper thread, whose chunks are missing from a save that succeeds."""
    # case 58
    workers = Workers(3)
    order = iter(range(3))
    all_here = threading.Barrier(3)
    lock = threading.Lock()

    def work(units: Iterator[Unit]) -> None:
        all_here.wait(30)
        with lock:
            mine = next(order)
        if mine == failing:
            raise MemoryError("no more")
        for _ in units:
            pass

    with pytest.raises(MemoryError, match="no more"):
        workers.run(work, units_of(50))
    count = [0]
    workers.run(lambda units: count.append(sum(1 for _ in units)), units_of(50))
    assert sum(count) == 50
    workers.close()


class Heavy:
    """What a job refers to, slow to let go of, as many tensors are."""

    def __init__(self) -> None:
        self.all_here = threading.Barrier(3)

    def __call__(self, units: Iterator[Unit]) -> None:
        self.all_here.wait(30)

    def __del__(self) -> None:
        time.sleep(0.2)


def test_no_thread_is_left_when_close_returns() -> None:
    """Prevents: the interpreter ends while a helper lets go of tensors, and aborts (SIGABRT)."""
    before = set(threading.enumerate())
    workers = Workers(3)
    workers.run(Heavy(), units_of(50))
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    workers.close()
    assert not any(thread.is_alive() for thread in helpers)


def progress_without_the_interpreter(action: Callable[[], object]) -> bool:
    """Whether another Python thread gets on while `action` runs and never gives way by itself."""
    turns, stop = [0], [False]
    before = sys.getswitchinterval()

    def count() -> None:
        while not stop[0]:
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    try:
        thread.start()
        sys.setswitchinterval(3600.0)  # nobody is interrupted: a turn must be given away
        for _ in range(10_000):
            seen = turns[0]
            action()
            if turns[0] > seen:
                return True
        return False
    finally:
        stop[0] = True
        sys.setswitchinterval(before)
        thread.join()


def test_hashing_and_copying_chunks_let_training_go_on() -> None:
    """Prevents: background work that holds the interpreter and halves the training speed."""
    # case 166
    assert CHUNK_BYTES > GIL_FREE_BYTES
    source = memoryview(bytearray(CHUNK_BYTES))
    target = memoryview(bytearray(CHUNK_BYTES))
    assert progress_without_the_interpreter(lambda: change_hash(source, 1))
    assert progress_without_the_interpreter(lambda: copy_bytes(target, source))
    with Ring.create(CHUNK_BYTES, CHUNK_BYTES) as ring:

        def put_into_new_memory() -> None:
            ring._used.clear()
            ring.put(0, 0, source)

        assert progress_without_the_interpreter(put_into_new_memory)
        assert progress_without_the_interpreter(lambda: ring.put(0, 0, source))


@pytest.mark.parametrize("size", [1, 63, 65535, 65536, 65537, 1 << 20])
def test_copy_bytes_copies_every_byte(size: int) -> None:
    source = np.random.default_rng(size).bytes(size)
    target = bytearray(size + 2)
    copy_bytes(memoryview(target)[1:-1], memoryview(source))
    assert target == b"\0" + source + b"\0"
