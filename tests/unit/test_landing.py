"""Device tensors copied at the call of `save`: one instant, within bounded device memory.

Prevents: saves that run a full device out of memory by copying an EMA or strided slices there,
bytes of a later instant in such copies, and host memory read or reused while the device fills it.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import bits, rebuild, same, take
from deltackpt_store.errors import CorruptionError
from saving import saved
from staging_ring import SEED, MemoryRing
from torch import Tensor, nn

import deltackpt
from deltackpt import landing
from deltackpt.buffers import BufferPool, Lease
from deltackpt.capture import Capture
from deltackpt.cuda.split import SplitStager
from deltackpt.cuda.stager import DeviceStager
from deltackpt.cuda.table import ChunkTable, list_bytes
from deltackpt.report import DeviceFigures
from deltackpt.stage import Job, versions_of

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))

from simulated import LateEvent, LateStreams, ModelKernels, fresh

GPU = torch.device("cuda", 0)
BOUND = 64 * 1024
HASTE = (0.0, 0.2, 0.5, 0.8, 0.95)


class LateArrival:
    """An event of a simulated device as torch's events look."""

    def __init__(self, device: LateStreams, event: LateEvent) -> None:
        self._device, self._event = device, event

    def query(self) -> bool:
        return self._event.happened

    def synchronize(self) -> None:
        self._device.synchronize(self._event)


class LateTransport:
    """Copies on the training stream of a simulated device, as late as events allow."""

    def __init__(self, device: LateStreams) -> None:
        self.device = device
        self.rooms: list[int] = []
        self.largest = 1 << 40
        self.made: list[Tensor] = []

    def room(self, nbytes: int) -> Tensor:
        if nbytes > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.rooms.append(nbytes)
        return fresh(nbytes)

    def locked(self, nbytes: int) -> Tensor:
        self.made.append(fresh(nbytes))
        return self.made[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        self.device.submit(self.device.main, lambda: target.copy_(source))

    def record(self) -> LateArrival:
        return LateArrival(self.device, self.device.mark())


class Bench:
    """All host tensors of a capture pretend to be on one simulated GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, copies: int = 0, piece: int = BOUND,
                 **device: Any) -> None:  # fmt: skip
        self.device = LateStreams(ModelKernels(), **device)
        self.way = LateTransport(self.device)
        monkeypatch.setattr(landing, "transport", lambda device: self.way)
        monkeypatch.setattr(landing, "COPY_BYTES", copies)
        monkeypatch.setattr(landing, "PIECE_BYTES", piece)
        self.stager = SplitStager(
            seed=SEED, threads=2, runtime=lambda _: self.device, device_of=lambda source: GPU,
            make=lambda runtime: DeviceStager(runtime, seed=SEED, gather_bytes=1 << 20),
        )  # fmt: skip
        self.pool = BufferPool()

    def job(self, taken: Capture, **changes: Any) -> Job:
        return Job(**{
            "save": 1, "layout": taken.layout, "sources": taken.sources, "table": {},
            "versions": versions_of(taken.sources), "deadline": time.monotonic() + 60,
            "unlock": lambda: None, "cancelled": lambda: False,
            "marks": self.stager.mark(taken.sources), **changes,
        })  # fmt: skip

    def arrive(self, taken: Capture) -> None:
        for source in taken.sources.values():
            if source.arrived is not None:
                source.arrived.synchronize()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    width = dtype.itemsize
    raw = torch.randint(0, 255, (*shape, width), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).view(shape)


def gappy() -> dict[str, Tensor]:
    """Tensors with gaps whose sizes lie around multiples of the bound."""
    state: dict[str, Tensor] = {
        "columns": numbers(1000, 300)[:, :200],
        "one wide row": numbers(3, 60_000)[:, 1:50_001],
        "every other": numbers(90_000)[::2],
        "turned": numbers(70, 80, 90)[:, ::2, 3:].permute(2, 0, 1),
        "expanded": numbers(4000, 9)[:, 2:4].unsqueeze(1).expand(4000, 7, 2),
        "odd": numbers(70_001, 2, dtype=torch.uint8)[:, 0],
        "complex": numbers(5000, 3, dtype=torch.complex128)[:, 1:],
        "conjugate": numbers(5000, 3, dtype=torch.complex64)[:, 1:].conj(),
        "half": numbers(300, 301, dtype=torch.bfloat16)[:, :-1],
        "flags": numbers(300, 301, dtype=torch.bool)[:, :-1],
        "float8": numbers(300, 301, dtype=torch.float8_e4m3fn)[:, :-1],
    }
    for count in (BOUND - 4, BOUND, BOUND + 4, 2 * BOUND - 4, 2 * BOUND, 2 * BOUND + 4):
        state[f"{count} bytes"] = numbers(count // 4, 2)[:, 1]
        state[f"{count} bytes in rows"] = numbers(4, count // 16 + 3)[:, : count // 16]
    return state


def dense() -> dict[str, Tensor]:
    return {"ema": numbers(123_457), "turned": numbers(300, 500).t(),
            "wide": numbers(999, dtype=torch.complex128)}  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_copies_are_of_the_instant_of_the_call(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """What training has queued before is in them, what it queues afterwards is not."""
    bench = Bench(monkeypatch, haste=HASTE[seed % 5], seed=seed)
    state = gappy() | dense()
    expected = copy.deepcopy(state)
    for name, tensor in state.items():
        _flip(expected[name])
        bench.device.submit(bench.device.main, lambda t=tensor: _flip(t))
    taken = take(state, pool=bench.pool)
    for tensor in state.values():
        bench.device.submit(bench.device.main, lambda t=tensor: t.zero_())
    bench.arrive(taken)
    found = rebuild(taken)
    for name, tensor in expected.items():
        assert same(found[name], tensor), name
    assert all(not source.live for source in taken.sources.values())


def _flip(tensor: Tensor) -> None:
    """Change every byte of the tensor's storage."""
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).bitwise_xor_(1)


@pytest.mark.parametrize("piece", [16, 4096, BOUND - 16, BOUND, 1 << 30])
def test_device_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Prevents a second copy of the state on the device: the packing buffer is all there is."""
    bench = Bench(monkeypatch, piece=piece, haste=0.5)
    small = {"a": numbers(40, 20)[:, 1:], "b": numbers(90, 2, dtype=torch.complex128)[:, 1]}
    state = small if piece == 16 else gappy()
    taken = take(state, pool=bench.pool)
    largest = max(t.numel() * t.itemsize for n, t in state.items() if n != "expanded")
    assert bench.way.rooms == [min(piece, largest)]
    (cost,) = taken.figures.values()
    assert cost.device_bytes == min(piece, largest)
    bench.arrive(taken)
    found = rebuild(taken)
    for name, tensor in state.items():
        assert same(found[name], tensor), name


def test_dense_tensors_need_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    taken = take(dense(), pool=bench.pool)
    (cost,) = taken.figures.values()
    total = sum(t.numel() * t.itemsize for t in dense().values())
    assert bench.way.rooms == []
    assert (cost.device_bytes, cost.transfers, cost.transferred_bytes) == (0, 3, total)


def test_members_of_several_storages_land_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping tensors whose extent no single storage holds are pieced together."""
    bench = Bench(monkeypatch)
    memory = numbers(3000).numpy()
    state = {"left": torch.from_numpy(memory[:2000]), "right": torch.from_numpy(memory[1000:])}
    taken = take(state, pool=bench.pool)
    assert len(taken.sources) == 1
    bench.arrive(taken)
    found = rebuild(taken)
    assert all(same(found[name], tensor) for name, tensor in state.items())


def test_what_fits_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """First come, as long as there is room: the same extents at every save of a layout."""
    bench = Bench(monkeypatch, copies=10_000)
    sizes = {"a": 1000, "b": 1400, "c": 400, "d": 1000}
    state = {name: numbers(count) for name, count in sizes.items()}
    for _ in range(2):
        taken = take(state, pool=bench.pool)
        landed = [source.arrived is not None for source in taken.sources.values()]
        assert landed == [False, False, True, True]
        (cost,) = taken.figures.values()
        assert cost.device_bytes <= 10_000
        assert cost.pinned_bytes >= 5600
        taken.release()
    assert landing.staying([256] * 4, 768) == [True, True, True, False]
    assert landing.staying([512, 1024, 256], 768) == [True, False, True]


def test_landing_memory_is_reused_once_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents growth with saves, and two captures that fill one buffer."""
    bench = Bench(monkeypatch)
    state = dense()
    for _ in range(20):
        taken = take(state, pool=bench.pool)
        bench.arrive(taken)
        taken.release()
    assert len(bench.way.made) == 1
    early = take(state, pool=bench.pool)
    early.release()  # given up while the device still copies
    late = take(state, pool=bench.pool)
    assert len(bench.way.made) == 2
    bench.arrive(late)
    found = rebuild(late)
    assert all(same(found[name], tensor) for name, tensor in state.items())


def test_device_memory_is_reused_once_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a save with bytes of one that was given up before its copies had run, where the two
    were called on different streams."""
    bench = Bench(monkeypatch, copies=1 << 30)

    held: list[torch.UntypedStorage] = []

    def buffer(*, arrive: bool) -> int:
        taken = take(dense(), pool=bench.pool)
        held.extend(source.storage for source in taken.sources.values())
        assert bench.way.made == []  # nothing lands
        if arrive:
            bench.device.synchronize(bench.device.mark())
        taken.release()
        return held[-1].data_ptr()

    first = buffer(arrive=True)
    assert buffer(arrive=False) == first
    assert buffer(arrive=True) != first


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("copies", [0, 400_000])
def test_staged_with_live_memory(monkeypatch: pytest.MonkeyPatch, seed: int, copies: int) -> None:
    """The whole stage: live memory on the device, copies there and copies that landed."""
    bench = Bench(monkeypatch, copies=copies, haste=HASTE[seed % 5], seed=seed)
    weight = nn.Parameter(numbers(40_000).nan_to_num())
    state: dict[str, Any] = {"w": weight, **gappy(), **dense()}
    expected = {name: bits(tensor) for name, tensor in state.items()}
    taken = take(state, pool=bench.pool, live=lambda path, tensor: path == "w")
    assert [s.live for s in taken.sources.values()].count(True) == 1
    ring, unlocked = MemoryRing(64, 1 << 18), list[int]()

    def scribble() -> None:
        unlocked.append(len(ring.sent))
        weight.data.zero_()

    for name, tensor in state.items():
        if name != "w":
            bench.device.submit(bench.device.main, lambda t=tensor: t.zero_())
    job = bench.job(taken, unlock=scribble, versions={})
    staging = bench.stager.stage(job, ring)
    assert unlocked == [0]  # nothing waits for what has landed
    assert ring.torn == []
    assert staging.table.keys() == bench.stager.stage(bench.job(taken), MemoryRing()).table.keys()
    for number, spec in enumerate(taken.layout.extents):
        if number in taken.sources:
            parts = [ring.chunks[number, i] for i in range(spec.chunk_count)]
            taken.sources[number] = type(taken.sources[number]).of(
                torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), False, "", None
            )
    found = rebuild(taken)
    for name, raw in expected.items():
        assert bits(found[name]) == raw, name
    bench.stager.close()


def test_only_landed_copies_and_then_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    state = dense()
    unlocked: list[int] = []
    first = take(state, pool=bench.pool)
    table = bench.stager.stage(
        bench.job(first, unlock=lambda: unlocked.append(1)), MemoryRing()
    ).table
    assert unlocked == [1]
    second = take(state, pool=bench.pool, previous=first)
    again = bench.stager.stage(bench.job(second, table=table), MemoryRing())
    assert again.changed_chunks == 0
    assert again.table == table
    state["ema"][7] += 1
    third = take(state, pool=bench.pool, previous=second)
    assert bench.stager.stage(bench.job(third, table=table), MemoryRing()).changed_chunks == 1
    chunks = bench.stager.hash_all(third.layout, third.sources, {})
    assert len(list(chunks)) == sum(e.chunk_count for e in third.layout.extents)


def test_a_torn_live_tensor_beside_landed_copies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    weight = nn.Parameter(torch.zeros(40_000))
    taken = take({"w": weight, **dense()}, live=lambda path, tensor: path == "w")
    job = bench.job(taken)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(CorruptionError, match="w was modified"):
        bench.stager.stage(job, MemoryRing())


def _simulated(device: LateStreams, *, seed: int, threads: int) -> SplitStager:
    return SplitStager(
        seed=seed, threads=threads, runtime=lambda _: device,
        device_of=lambda source: GPU,
        make=lambda runtime: DeviceStager(runtime, seed=seed, gather_bytes=1 << 20),
    )  # fmt: skip


def _entries(changed: int) -> int:
    return 16 << (changed - 1).bit_length()


def test_figures_are_those_of_the_memory_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/gpu.md: what copies at the call add to each column of a save's report."""
    strided, ema, kept = numbers(50_000, 3)[:, 1], numbers(100_000), numbers(60_000)
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = {"model": model, "optimizer": optimizer}

    def figures(run: str, state: dict[str, Any]) -> DeviceFigures:
        """Of the second save, with no change."""
        bench = Bench(monkeypatch, copies=300_000)
        monkeypatch.setattr("deltackpt.pipeline.SplitStager", partial(_simulated, bench.device))
        with deltackpt.Checkpointer(tmp_path, state, run=run, writer="thread", rng=False,
                                    final=False, chunk_bytes=65536) as ckpt:  # fmt: skip
            optimizer.step()
            ckpt.save(0).result(60)
            found = ckpt.save(1).result(60).devices
        copied = found.get("cpu", DeviceFigures(0, 0, 0, 0, 0))  # one device under two names
        return DeviceFigures(*map(sum, zip(astuple(found["cuda:0"]), astuple(copied), strict=True)))

    none = figures("none", trained)
    stays = figures("stays", {**trained, "kept": kept})
    lands = figures("lands", {**trained, "kept": kept, "ema": ema, "strided": strided})
    sizes = [(160_000, 65536), (800, 65536)]
    before, after = ChunkTable(sizes), ChunkTable([*sizes, (240_000, 65536)])
    chunks = after.count - before.count
    assert stays.transfers == none.transfers
    assert stays.pinned_bytes - none.pinned_bytes == (
        16 * chunks + list_bytes(after.count) - list_bytes(before.count)
        + _entries(after.count) - _entries(before.count)
    )  # fmt: skip
    assert stays.device_bytes - none.device_bytes == (
        32 * chunks + after.scratch_bytes - before.scratch_bytes
        + _entries(after.count) - _entries(before.count) + 240_128
    )  # fmt: skip
    assert lands.launches == stays.launches
    assert lands.transfers - stays.transfers == 1 + 4  # 200 000 bytes, 64 KiB at a time
    assert lands.transferred_bytes - stays.transferred_bytes == 400_000 + 200_000
    assert lands.device_bytes - stays.device_bytes == BOUND
    assert lands.pinned_bytes - stays.pinned_bytes == 400_128 + 200_192
    assert same(saved(tmp_path, 1, run="lands")["strided"], strided)


def test_a_full_device_lets_all_copies_land(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents a training that ends because its device has no memory left for a save's copies."""
    bench = Bench(monkeypatch, copies=1 << 30, piece=1 << 20)
    own, asked = BufferPool.take, []

    def no_room(pool: BufferPool, device: torch.device, nbytes: int, **options: Any) -> Tensor:
        if "landing" not in options:
            asked.append(nbytes)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own(pool, device, nbytes, **options)

    monkeypatch.setattr(BufferPool, "take", no_room)
    bench.way.largest = BOUND
    state = gappy() | dense()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(2):
        taken = take(state, pool=bench.pool)
        bench.arrive(taken)
        found = rebuild(taken)
        assert all(same(found[name], expected[name]) for name in expected)
        taken.release()
    assert len(asked) == len(caplog.records) == 1  # the device is not asked at every save
    assert set(bench.way.rooms) == {BOUND}


def test_copies_of_inference_mode_serve_outside_of_it() -> None:
    """Prevents a save that fails because the one before it was called in `inference_mode`."""
    pool = BufferPool()
    state = {"large": numbers(2_000_000), "small": numbers(20_000)}
    with torch.inference_mode():
        take(state, pool=pool).release()
    again = take(state, pool=pool)
    assert all(same(rebuild(again)[name], tensor) for name, tensor in state.items())


def test_a_lease_ends_on_a_device_that_has_failed() -> None:
    class Failed:
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

        def synchronize(self) -> None: ...

    pool = BufferPool()
    buffer = fresh(100)
    Lease(buffer, GPU, Failed()).end(pool)
    assert pool.take(GPU, 100, landing=fresh) is not buffer
