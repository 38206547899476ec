"""States on the host and on several devices in one save, up to the training loop's own view.

Prevents: live memory unlocked while one device still reads it, one device's failure leaving
another's reads running, and costs that nobody counts.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from deltackpt_store.errors import StorageError
from extras import needs_triton
from saving import saved
from staging_ring import SEED, MemoryRing, Tensors
from torch import nn

import deltackpt
from deltackpt.cuda.hasher import FIRST_READ
from deltackpt.cuda.runtime import CudaRuntime
from deltackpt.cuda.split import SplitStager, stager_for
from deltackpt.cuda.stager import DeviceStager
from deltackpt.cuda.table import ChunkTable, list_bytes
from deltackpt.options import SLOT_BYTES
from deltackpt.report import DeviceFigures, SaveProgress
from deltackpt.sources import Source
from deltackpt.stage import HostStager, Job

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))

from simulated import LateStreams, ModelKernels

CHUNK, SLOT = 16384, 1 << 18


def place(source: Any) -> torch.device:
    """Where a source pretends to be: its key ends in the device's name."""
    path = source.key.split(":")[0] if ":" in source.key else source.key
    name = next((part for part in ("gpu0", "gpu1") if part in path), None)
    return torch.device("cpu") if name is None else torch.device("cuda", int(name[3:]))


class Devices:
    """Simulated devices made on demand."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: dict[torch.device, LateStreams] = {}

    def __call__(self, device: torch.device) -> LateStreams:
        assert device not in self.made
        self.made[device] = LateStreams(ModelKernels(), **self.options)
        self.made[device].device = device
        return self.made[device]


def splitter(devices: Devices, **options: Any) -> SplitStager:
    return SplitStager(
        seed=SEED, threads=1, runtime=devices, device_of=place,
        make=lambda runtime: DeviceStager(runtime, seed=SEED, **options),
    )  # fmt: skip


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = ["host", "gpu0 a", "gpu1 b", "gpu0 c", "host d"]
    return {name: torch.randn(50_000 + i, generator=generator) for i, name in enumerate(names)}


def job(described: Tensors, stager: SplitStager, table: Any = None, **changes: Any) -> Job:
    return Job(**{
        "save": 1, "layout": described.layout, "sources": described.sources, "table": table or {},
        "versions": {}, "deadline": time.monotonic() + 60, "unlock": lambda: None,
        "cancelled": lambda: False, "marks": stager.mark(described.sources), **changes,
    })  # fmt: skip


def whole(tensors: dict[str, torch.Tensor]) -> dict[tuple[int, int], bytes]:
    ring = MemoryRing()
    described = Tensors(tensors, chunk_bytes=CHUNK)
    plain = SplitStager(seed=SEED, threads=1)
    HostStager(seed=SEED, threads=1).stage(job(described, plain), ring)
    return ring.chunks


@pytest.mark.parametrize("haste", [0.0, 0.5])
def test_host_and_devices_make_one_save(haste: float) -> None:
    devices = Devices(haste=haste)
    stager, tensors = splitter(devices), state()
    described, ring = Tensors(tensors, chunk_bytes=CHUNK), MemoryRing()
    reached: list[int] = []
    staging = stager.stage(job(described, stager, reached=lambda: reached.append(1)), ring)
    assert reached == [1, 1]  # once for each device
    assert ring.chunks == whole(tensors)
    assert ring.torn == []
    assert set(devices.made) == {torch.device("cuda", 0), torch.device("cuda", 1)}
    assert set(staging.devices) == {"cuda:0", "cuda:1"}
    for tensor in tensors.values():
        tensor[40_000] += 1
    ring.chunks.clear()
    again = stager.stage(job(described, stager, staging.table), ring)
    assert again.changed_chunks == 5
    assert {key: whole(tensors)[key] for key in ring.chunks} == ring.chunks
    assert again.table.keys() == staging.table.keys()
    stager.close()


@pytest.mark.parametrize("seed", range(4))
def test_memory_is_unlocked_once_all_have_read_it(seed: int) -> None:
    devices = Devices(haste=(0.0, 0.3, 0.7, 0.9)[seed], seed=seed)
    stager, tensors = splitter(devices, gather_bytes=2 * SLOT), state()
    described, ring = Tensors(tensors, chunk_bytes=CHUNK), MemoryRing(3, SLOT, keep=False)
    before, unlocked = whole(tensors), []

    def scribble() -> None:
        unlocked.append(1)
        for tensor in tensors.values():
            tensor.fill_(3)

    stager.stage(job(described, stager, unlock=scribble), ring)
    assert unlocked == [1]
    assert ring.torn == []
    assert ring.chunks == before


def test_a_failure_of_one_part_leaves_nothing_running() -> None:
    devices = Devices()
    stager, tensors = splitter(devices), state()
    described, ring = Tensors(tensors, chunk_bytes=CHUNK), MemoryRing(1, SLOT)
    with pytest.raises(StorageError):
        stager.stage(job(described, stager, deadline=time.monotonic()), ring)
    assert all(device.idle for device in devices.made.values())
    ring = MemoryRing()
    stager.stage(job(described, stager), ring)
    assert ring.chunks == whole(tensors)


def test_every_chunk_of_all_parts() -> None:
    devices = Devices()
    stager, tensors = splitter(devices), state()
    described = Tensors(tensors, chunk_bytes=CHUNK)
    marks = stager.mark(described.sources)
    found = list(stager.hash_all(described.layout, described.sources, marks))
    assert len(found) == len(whole(tensors))


def test_a_state_on_the_host_alone_makes_no_device() -> None:
    devices = Devices()
    stager = splitter(devices)
    described = Tensors({"host": torch.ones(1000)}, chunk_bytes=CHUNK)
    assert stager.stage(job(described, stager), MemoryRing()).devices == {}
    assert devices.made == {}


@needs_triton
def test_a_device_that_hashes_wrongly_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    """Prevents changes missed for good by a miscompiled kernel or a broken device."""

    class Broken(ModelKernels):
        def short_chunks(self, programs: int, **arguments: Any) -> None:
            super().short_chunks(programs, **arguments)
            arguments["digests"].numpy()[1] ^= 1

    with caplog.at_level(logging.ERROR):
        stager = stager_for(LateStreams(Broken()), seed=SEED)
    assert type(stager).__name__ == "CopyStager"
    assert "hash wrongly" in caplog.text


@needs_triton
def test_a_device_that_runs_no_kernel_is_copied_from(caplog: pytest.LogCaptureFixture) -> None:
    def no_kernels(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    stager = stager_for(LateStreams(no_kernels), seed=SEED)
    assert type(stager).__name__ == "CopyStager"
    assert "no kernel image" in caplog.text


def test_without_triton_all_is_copied(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    stager = stager_for(LateStreams(ModelKernels()), seed=SEED)
    assert type(stager).__name__ == "CopyStager"
    assert "deltackpt[gpu]" in caplog.text


@needs_triton
def test_a_device_that_moves_wrong_bytes_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    """Prevents every save failing, where copying all would have worked."""

    class Broken(ModelKernels):
        def gather(self, programs: int, **arguments: Any) -> None:
            super().gather(programs, **arguments)
            ctypes.memset(arguments["target"], 1, 1)

    with caplog.at_level(logging.ERROR):
        stager = stager_for(LateStreams(Broken()), seed=SEED)
    assert type(stager).__name__ == "CopyStager"
    assert "move wrong bytes" in caplog.text


def test_a_full_device_is_copied_from(caplog: pytest.LogCaptureFixture) -> None:
    """Prevents saves that fail for good where training has left no memory for hashing."""
    devices = Devices()
    stager, tensors = splitter(devices), state()
    described, ring = Tensors(tensors, chunk_bytes=CHUNK), MemoryRing()
    staging = stager.stage(job(described, stager), ring)
    other = dict(tensors, **{"gpu1 e": torch.ones(50_000)})
    described = Tensors(other, chunk_bytes=CHUNK)
    devices.made[torch.device("cuda", 1)].largest = 100
    ring.chunks.clear()
    unlocked: list[int] = []
    staging = stager.stage(
        job(described, stager, staging.table, unlock=lambda: unlocked.append(1)), ring
    )
    assert unlocked == [1]
    assert ring.chunks == {key: whole(other)[key] for key in whole(other) if key[0] == 5}
    assert staging.devices["cuda:1"].launches == 0
    assert staging.devices["cuda:1"].device_bytes == 0
    again = stager.stage(job(described, stager, staging.table), ring)
    assert again.changed_chunks == 0
    assert [record.message for record in caplog.records] == [
        "cuda:1 has no memory left for hashing: from now on, saves copy its whole state to the host"
        " (CUDA out of memory.)"
    ]
    stager.close()


@pytest.mark.parametrize("live", [True, False])
def test_a_device_without_room_for_one_slot_is_copied_from(
    live: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents every save failing where there is room to hash and none to move what changed; and
    live memory that is read again after it was unlocked."""
    tensors = state() | {"gpu1 e": torch.ones(50_000)}
    described, ring = Tensors(tensors, chunk_bytes=CHUNK), MemoryRing()
    known = HostStager(seed=SEED, threads=1).stage(
        job(described, SplitStager(seed=SEED, threads=1)), MemoryRing()
    )
    tensors["gpu1 b"].add_(1)
    described.sources[2] = msgspec.structs.replace(described.sources[2], live=live)
    before = whole(tensors)
    devices, unlocked = Devices(), list[int]()
    stager = splitter(devices)

    def scribble() -> None:
        unlocked.append(1)
        for name in ("gpu0 a", "gpu0 c", "host", "gpu1 e"):
            tensors[name].fill_(3)

    task = job(described, stager, known.table, unlock=scribble)
    devices.made[torch.device("cuda", 1)].largest = SLOT
    staging = stager.stage(task, ring)
    assert unlocked == [1]
    assert ring.chunks == {key: data for key, data in before.items() if key[0] == 2}
    assert staging.devices["cuda:1"].device_bytes == 0
    assert [record.message for record in caplog.records if "host" in record.message] == [
        "cuda:1 has no memory left for hashing: from now on, saves copy its whole state to the host"
        " (CUDA out of memory.)"
    ]
    again = stager.stage(job(described, stager, staging.table), MemoryRing())
    assert again.table.keys() == staging.table.keys()
    stager.close()


def test_a_device_that_has_failed_is_let_go_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents an exit that waits for threads which an error of the device has ended."""
    devices = Devices()
    stager, tensors = splitter(devices), state()
    described = Tensors(tensors, chunk_bytes=CHUNK)
    stager.stage(job(described, stager), MemoryRing())
    lost, other = (devices.made[torch.device("cuda", i)] for i in (0, 1))

    def unlock(view: memoryview) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(lost, "unlock", unlock)
    stager.close()
    assert other.locked == {}
    assert "cuda:0 could not be given back" in caplog.text


def test_interpreted_kernels_are_never_given_device_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a segmentation fault where a user debugs kernels with TRITON_INTERPRET=1."""

    class InterpretedFunction:
        def __getitem__(self, grid: Any) -> Any:
            raise AssertionError("launched")

    monkeypatch.setattr("deltackpt.cuda.runtime.find_kernel", lambda spec: InterpretedFunction())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        CudaRuntime(torch.device("cuda", 0)).launch(None, "sweep", 1)  # pyright: ignore


def test_devices_other_than_cudas_are_hashed_on_the_host() -> None:
    source = Source.of(torch.empty(1000, dtype=torch.uint8, device="meta"), True, "w", None)
    assert SplitStager(seed=SEED, threads=1).mark({0: source}) == {}


@needs_triton
def test_a_good_device_passes_the_self_test() -> None:
    assert isinstance(stager_for(LateStreams(ModelKernels()), seed=SEED), DeviceStager)


# the memory model of docs/gpu.md ----------------------------------------------------------------


def figures(table: ChunkTable, changed: int, slots: int, batches: int, *, first: bool,
            lengths: int = 0) -> tuple[int, int, int]:  # fmt: skip
    """Launches, transfers and bytes moved by one save, as docs/gpu.md has them."""
    launches = len(table.waves) + 1 + int(table.has_short) + 1 + batches
    read = 2 if changed <= FIRST_READ else 4
    transfers = read + (3 if first else 0) + (1 if changed else 0) + slots
    head = min(table.count, FIRST_READ)
    moved = 4 * (head + 1) + 16 * head + 20 * max(0, changed - FIRST_READ)
    moved += (32 * table.count + 1600 if first else 0) + 16 * changed + lengths
    return launches, transfers, moved


def test_figures_are_those_of_the_memory_model(tmp_path: Path, monkeypatch: Any) -> None:
    """The whole way: a training loop, its report, and the formulas of docs/gpu.md."""
    devices = Devices()
    real = SplitStager

    def simulated(*, seed: int, threads: int) -> SplitStager:
        return real(
            seed=seed, threads=threads, runtime=devices,
            device_of=lambda source: torch.device("cuda", 0),
            make=lambda runtime: DeviceStager(runtime, seed=seed, gather_bytes=2 << 20),
        )  # fmt: skip

    monkeypatch.setattr("deltackpt.pipeline.SplitStager", simulated)
    model = nn.ModuleDict({"a": nn.Linear(700, 700), "b": nn.Linear(700, 333)})
    with deltackpt.Checkpointer(tmp_path, {"model": model}, writer="thread", rng=False,
                                chunk_bytes=65536) as ckpt:  # fmt: skip
        first = ckpt.save(0).result(60)
        with torch.no_grad():
            model["a"].weight[0, 0] += 1
            model["b"].bias[0] += 1
        second = ckpt.save(1).result(60)
        third = ckpt.save(2).result(60)
    for name, tensor in model.state_dict().items():
        assert torch.equal(saved(tmp_path, 1)["model"][name], tensor)

    sizes = [p.numel() * 4 for p in model.parameters()]
    table = ChunkTable([(size, 65536) for size in sizes])
    a, b = sizes[0], sizes[3]
    one, two, three = (r.devices["cuda:0"] for r in (first, second, third))
    assert (one.launches, one.transfers) == figures(table, table.count, 1, 1, first=True)[:2]
    padded = one.transferred_bytes - figures(table, table.count, 1, 1, first=True)[2]
    assert sum(sizes) <= padded <= sum(sizes) + 4096 * table.count
    assert second.changed_bytes == 65536 + b
    gap = 65536 + b  # the small chunk follows the big one at a multiple of 64
    expected = figures(table, 2, 1, 1, first=False, lengths=gap)
    assert (two.launches, two.transfers, two.transferred_bytes) == expected
    expected = figures(table, 0, 0, 0, first=False)
    assert (three.launches, three.transfers, three.transferred_bytes) == expected
    assert a > 65536

    entries = 16 << (table.count - 1).bit_length()
    slot = SLOT_BYTES
    held = DeviceFigures(
        *expected,
        device_bytes=32 * table.count + table.scratch_bytes + 1600 + entries + slot,
        pinned_bytes=16 * table.count + list_bytes(table.count) + entries + slot,
    )
    assert one.device_bytes == two.device_bytes == held.device_bytes
    assert three == held


def test_at_most_32_bytes_of_device_memory_a_chunk_and_fixed_buffers() -> None:
    table = ChunkTable([(100 << 30, 256 * 1024)])
    assert table.count == 400 * 1024
    assert table.scratch_bytes <= (64 << 20) + 1024


def test_one_percent_changed_moves_little_more_than_one_percent() -> None:
    nbytes, chunk = 10 << 30, 256 * 1024
    table = ChunkTable([(nbytes, chunk)])
    changed = table.count // 100
    _, _, moved = figures(table, changed, 1, 1, first=False, lengths=changed * chunk)
    assert moved <= 0.011 * nbytes


def test_thousands_of_tiny_tensors_take_one_wave() -> None:
    table = ChunkTable([(8192, 262144)] * 5000)
    assert len(table.waves) == 1
    assert figures(table, 0, 0, 0, first=False)[0] == 3


def test_waiting_for_the_devices_own_work_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents stalls reported on a GPU that are only training's own queue running ahead."""
    clock = [0.0]
    monkeypatch.setattr("deltackpt.report.time.perf_counter", lambda: clock[0])
    progress = SaveProgress("main", 0, lambda _: None, 0.0)
    for now, event in [(1.0, progress.captured), (5.0, progress.waiting),
                       (8.0, progress.mark_reached), (8.5, progress.mark_unlocked)]:  # fmt: skip
        clock[0] = now
        event()
    assert progress.stall == 1.5
    host = SaveProgress("main", 0, lambda _: None, 0.0)
    for now, event in [(1.0, host.captured), (5.0, host.waiting), (8.5, host.mark_unlocked)]:
        clock[0] = now
        event()
    assert host.stall == 4.5
