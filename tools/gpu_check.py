"""Everything about GPUs that only a GPU can show, in one command of under 10 minutes.

    python tools/gpu_check.py [--only hash,tests,copy] [--out FILE] [--dry]

Run it from a checkout (nothing need be installed but the packages below). The result file is
docs/benchmarks/gpu-<name of the device>.json unless `--out` names another. Each section runs in a
process of its own, so that a device error, a crash or a hang ends that section alone, and writes
each figure into the result file at once; run again with `--only` for those that are missing, the
others are kept. Within a section, too, what fails leaves the rest to go on. Exit code 1, and a line
in capitals, when anything is wrong: a hash that differs from xxhash's, a restored byte that
differs, a test that fails, a context on an unused device, a section that died. Warnings that the
library logged are in the result, under "warnings": a figure of a save that had to copy all is none
of the kernels.

In this order, what matters most first:

`hash`      every kernel path against xxhash; bandwidth by chunk size, beside a device copy and a
            plain read; thousands of tiny tensors; tensors at odd addresses
`tests`     all of tests/gpu, each test in a process of its own (needs pytest)
`stage`     staging of a dense and of a 1 % changed state; what it costs a matmul loop
`train`     a transformer with AdamW: stall and slowdown of saves every step and every tenth, mostly
            frozen and dense; a restore that is compared bit for bit
`multi`     states on two devices, and no context on a device that is not used
`copy`      page-locking the ring; slot-sized copies, one large copy, a kernel writing straight to
            the host
`peers`     the same state through torch.save, DCP's async_save and a full pinned copy
`variants`  other ways to compile the sweep

Sizes follow the memory and the disk that there are. `--dry` runs all sections at toy sizes on the
CPU, kernels under Triton's interpreter: it shows that the tool works, its figures mean nothing.

Needs torch >= 2.11 (a CUDA or ROCm build, which brings triton 3.6 or newer) and these wheels, to be
carried along where there is no network: numpy xxhash lz4 zstandard lmdb blake3 msgspec click. The
section `tests` needs pytest, too. What is missing is told at once, before anything runs.
Triton needs a C compiler and Python's headers (gcc, python3-dev). No network and no nvcc is used.
"""

# pyright: basic
# ruff: noqa: E402  (--dry must choose the interpreter before anything imports triton)

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "store")]

SECTIONS = ("hash", "tests", "stage", "train", "multi", "copy", "peers", "variants")
PACKAGES = ("torch", "numpy", "xxhash", "lz4", "zstandard", "lmdb", "blake3", "msgspec", "click")
if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    sys.exit(f"not installed: {' '.join(missing)}")
DRY = "--dry" in sys.argv
if DRY:  # before triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from deltackpt_store.errors import StorageError
from deltackpt_store.ring import Ring
from torch import nn

import deltackpt
from deltackpt.cuda import selftest, specs
from deltackpt.cuda.hasher import Counters, Hasher
from deltackpt.cuda.runtime import CudaRuntime, HostRuntime, address_of
from deltackpt.cuda.stager import DeviceStager
from deltackpt.cuda.table import ChunkTable

MIB, GIB = 1 << 20, 1 << 30
FILES_BYTES = 24 * GIB
"""Room that the files of a section may take."""
RESERVE = 40.0
"""Seconds that a section which hangs leaves to each one after it."""
SEED = 0x9E3779B97F4A7C15


class WrongError(Exception):
    """Something is not as it must be."""


class Check:
    """The device under test, the clock, and the figures so far."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.deadline = out, time.monotonic() + seconds
        self.device = torch.device("cpu") if DRY else torch.device("cuda", 0)
        self.result: dict[str, Any] = {"sections": {}}
        self.section: dict[str, Any] = {}
        self.wrong: list[str] = []
        """What has gone wrong in this section."""
        self.load()

    def load(self) -> None:
        """Take up what the result file holds, if there is one."""
        if self.out.exists():
            self.result = json.loads(self.out.read_text())

    def begin(self, name: str) -> None:
        self.section = {"ok": False, "error": "not finished"}
        self.result["sections"][name] = self.section
        self.save()

    def runtime(self, kernels: dict[str, specs.KernelSpec] | None = None) -> Any:
        return HostRuntime() if DRY else CudaRuntime(self.device, kernels)

    def size(self, real: int, dry: int) -> int:
        return dry if DRY else real

    def room(self, real: int, dry: int) -> int:
        """Bytes of device memory to work on: `real`, or a quarter of what is free."""
        if DRY:
            return dry
        return min(real, torch.cuda.mem_get_info(self.device)[0] // 4) & -MIB

    def part(self, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Do a part of a section; when it fails, that is told and noted, and None is the result."""
        try:
            return action(*arguments)
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            print(f"  FAILED: {self.wrong[-1]}", flush=True)
            if not isinstance(error, WrongError):
                traceback.print_exc()
            return None

    def put(self, name: str, value: Any) -> None:
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"  {name:<48} {shown}", flush=True)
        self.section[name] = value
        self.save()

    def late(self, what: str, reserve: float = 20.0) -> bool:
        """Whether to leave `what` out because the time is up."""
        if time.monotonic() < self.deadline - reserve:
            return False
        self.put(f"left out, no time: {what}", True)
        return True

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_name(self.out.name + ".partial")
        partial.write_text(json.dumps(self.result, indent=1, sort_keys=True) + "\n")
        partial.replace(self.out)

    def sync(self) -> None:
        if not DRY:
            torch.cuda.synchronize(self.device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Random bytes on the device, ready for any stream."""
        words = torch.randint(-(2**62), 2**62, (nbytes // 8 + 2,), device=self.device)
        self.sync()
        return words.view(torch.uint8)[:nbytes]

    def seconds(self, stream: Any, action: Any, rounds: int = 5) -> float:
        """Median time of `action`, which queues work on `stream`, by the device's own clock."""
        times: list[float] = []
        for _ in range(1 if DRY else rounds + 1):
            if DRY:
                began = time.perf_counter()
                action()
                times.append(time.perf_counter() - began)
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            action()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times[1:] or times)

    def clock(self, action: Any, rounds: int = 3) -> float:
        """Median wall time of `action` until the device is idle."""
        times: list[float] = []
        for _ in range(1 if DRY else rounds):
            self.sync()
            began = time.perf_counter()
            action()
            self.sync()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def environment(device: torch.device) -> dict[str, Any]:
    try:
        triton = importlib.import_module("triton").__version__
    except ImportError as error:
        triton = str(error)
    facts: dict[str, Any] = {
        "dry": DRY, "torch": torch.__version__, "triton": triton,
        "python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip,
        "numpy": np.__version__, "deltackpt": deltackpt.__version__, "cores": os.cpu_count(),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "headers": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
    }  # fmt: skip
    if not DRY:
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name, "device_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(device)),
            "devices": torch.cuda.device_count(), "driver": driver(),
        }  # fmt: skip
    return facts


def driver() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return "unknown"


# hash --------------------------------------------------------------------------------------------


def variants() -> dict[str, dict[str, specs.KernelSpec]]:
    """Ways to compile the sweep: tile, stripes a step, warps, register cap, stages."""
    base = specs.kernel_specs()["sweep"]
    made = {}
    for blocks, stripes, warps, cap, stages in (
        (16, 2, 4, 64, 8), (16, 2, 4, None, 8), (16, 2, 4, 80, 8), (32, 2, 4, None, 8),
        (32, 2, 8, 64, 8), (16, 4, 8, 32, 8), (16, 2, 4, 64, 4),
    ):  # fmt: skip
        constants = {**base.constants, "BLOCKS": blocks, "STRIPES": stripes, "STAGES": stages}
        name = f"{blocks} KiB, {stripes} stripes, {warps} warps, cap {cap}, {stages} stages"
        made[name] = {"sweep": dataclasses.replace(
            base, constants=constants, warps=warps, registers=cap)}  # fmt: skip
    return made


def hashing(
    runtime: Any,
    extents: list[tuple[int, int]],
    addresses: list[int],
    blocks: int = 16,
    scratch: int = specs.SCRATCH_BYTES,
) -> tuple[Any, Hasher]:
    stream = runtime.stream()
    blocks = max(blocks, specs.sum_blocks_per_program(runtime.wave))
    table = ChunkTable(extents, scratch_bytes=scratch, blocks_per_program=blocks)
    hasher = Hasher(runtime, stream, table, SEED, Counters())
    hasher.set_addresses(addresses)
    hasher.set_digests(np.zeros((table.count, 2), np.uint64))
    return stream, hasher


def verify(hasher: Hasher, memory: torch.Tensor, chunk: int, what: str) -> None:
    """Compare the digests of some chunks of one extent with xxhash; all are listed as changed."""
    import xxhash

    from deltackpt.cuda.xxh3 import digest_bytes

    hasher.set_digests(np.zeros((hasher.table.count, 2), np.uint64))
    hasher.detect()
    changes = hasher.changes()
    digests = digest_bytes(changes.digests)
    if changes.rows.tolist() != list(range(hasher.table.count)):
        raise WrongError(f"{what}: the change list is wrong")
    rows = np.unique(np.linspace(0, hasher.table.count - 1, 200).astype(int))
    for row in rows.tolist():
        data = memory[row * chunk : (row + 1) * chunk].cpu().numpy().tobytes()
        if xxhash.xxh3_128_digest(data, seed=SEED) != digests[row].tobytes():
            raise WrongError(f"{what}: chunk {row} hashes wrongly")


def section_hash(check: Check) -> None:
    check.part("self-test", self_test, check)
    check.part("random pieces", random_pieces, check)
    runtime = check.runtime()
    total = check.room(8 * GIB, 96 * 1024)
    memory = check.memory(total)
    read_rate = check.part("plain rates", plain_rates, check, memory) or float("nan")
    for chunk in (16, 64, 256, 1024, 4096):
        check.part(f"{chunk} KiB chunks", hash_rate, check, memory, chunk, read_rate)

    def skewed() -> None:
        memory_at_8 = memory[8 : total - 8]
        stream, hasher = hashing(runtime, [(total - 16, 262144)], [memory_at_8.data_ptr()])
        rate = total / check.seconds(stream, hasher.detect) / 1e9
        check.put("hash at address 8 modulo 16, GB/s", rate)
        verify(hasher, memory_at_8, 262144, "address 8 modulo 16")

    check.part("address 8 modulo 16", skewed)
    check.part("tiny tensors", tiny_tensors, check, runtime, memory)


def self_test(check: Check) -> None:
    began = time.perf_counter()
    wrong = selftest.check_device(check.runtime(), seed=SEED)
    if wrong:
        raise WrongError(f"{len(wrong)} faults: {wrong[:20]}")
    check.put("self-test", "all digests equal xxhash's")
    check.put("self-test and compilation (if not cached), s", time.perf_counter() - began)


def random_pieces(check: Check) -> None:
    rng = np.random.default_rng()
    count, longest = check.size(3000, 8), check.size(600_000, 4000)
    pieces = [(int(longest * rng.random() ** 3) + 1, int(rng.integers(16))) for _ in range(count)]
    for seed in (0, 2**64 - 1, int(rng.integers(2**63))):
        wrong = selftest.hash_pieces(check.runtime(), pieces, seed=seed, data_seed=seed % 1000)
        if wrong:
            raise WrongError(f"seed {seed}: {len(wrong)} wrong: {wrong[:20]}")
    check.put("random pieces that equal xxhash", 3 * count)


def hash_rate(check: Check, memory: torch.Tensor, chunk: int, read_rate: float) -> None:
    total = memory.numel()
    nbytes = min(chunk * 1024, check.size(GIB, 65536))
    stream, hasher = hashing(check.runtime(), [(total, nbytes)], [memory.data_ptr()])
    rate = total / check.seconds(stream, hasher.detect) / 1e9
    check.put(f"hash, {chunk} KiB chunks, GB/s", rate)
    check.put(f"hash, {chunk} KiB chunks, of the plain read", rate / read_rate)
    if chunk in (64, 256):
        verify(hasher, memory, nbytes, f"{chunk} KiB chunks")


def plain_rates(check: Check, memory: torch.Tensor) -> float:
    """What the device does without hashing; returns the rate of a plain read in GB/s."""
    half = memory[: memory.numel() // 2]
    other = torch.empty_like(half)
    stream = None if DRY else torch.cuda.current_stream(check.device)
    copied = check.seconds(stream, lambda: other.copy_(half))
    read = check.seconds(stream, lambda: half.view(torch.int64).sum())
    check.put("device copy, GB/s read + written", 2 * half.numel() / copied / 1e9)
    rate = half.numel() / read / 1e9
    check.put("plain read (int64 sum), GB/s", rate)
    return rate


def tiny_tensors(check: Check, runtime: Any, memory: torch.Tensor) -> None:
    many = check.size(5000, 6)
    stream, hasher = hashing(
        runtime, [(8192, 262144)] * many, [memory.data_ptr() + 8192 * i for i in range(many)]
    )

    def small_save() -> None:
        hasher.detect()
        hasher.changes()

    check.put(f"{many} tensors of 8 KiB, us", check.seconds(stream, hasher.detect) * 1e6)
    check.put("the same with the list read back, us", check.clock(small_save) * 1e6)


def section_variants(check: Check) -> None:
    if DRY or torch.version.hip is not None:
        check.put("not run: for warps of 32 lanes on a device", True)
        return
    memory = check.memory(check.room(8 * GIB, 0))
    for name, kernels in variants().items():
        for scratch in (64, 128):
            if check.late("more kernel variants", 30):
                return
            what = f"variant {name}, {scratch} MiB scratch"
            check.part(what, variant, check, memory, kernels, scratch, what)


def variant(
    check: Check, memory: torch.Tensor, kernels: dict[str, specs.KernelSpec], scratch: int,
    what: str,
) -> None:  # fmt: skip
    stream, hasher = hashing(
        check.runtime(kernels), [(memory.numel(), 262144)], [memory.data_ptr()],
        kernels["sweep"].constants["BLOCKS"], scratch * MIB,
    )  # fmt: skip
    taken = check.seconds(stream, hasher.detect)
    verify(hasher, memory, 262144, what)
    check.put(f"{what}, GB/s", memory.numel() / taken / 1e9)


# copy --------------------------------------------------------------------------------------------


class EndlessRing:
    """A ring whose slots come back at once: what staging does when the writer keeps up."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.ring = Ring.create(slots * slot_bytes, slot_bytes)
        self.slot_bytes = slot_bytes
        self.free = list(range(slots))

    def acquire_slot(self, timeout: float | None) -> int:
        if not self.free:
            raise StorageError("no slot is free", kind="timeout")
        return self.free.pop(0)

    def view(self, slot: int) -> memoryview:
        return self.ring.view(slot)

    def put(self, slot: int, at: int, data: memoryview) -> None:
        self.ring.put(slot, at, data)

    def slot(self, save: int, slot: int, records: bytes) -> None:
        self.free.append(slot)

    def release_slot(self, slot: int) -> None:
        self.free.append(slot)


def job_of(tensors: dict[str, torch.Tensor], table: Any, chunk: int, unlocked: Any) -> Any:
    import msgspec
    from deltackpt_store.manifest import ExtentSpec, Layout, TensorView

    from deltackpt.sources import Source
    from deltackpt.stage import Job

    views = tuple(TensorView(i, i, "uint8", tuple(t.shape), (1,), 0)
                  for i, t in enumerate(tensors.values()))  # fmt: skip
    extents = tuple(ExtentSpec(t.numel(), chunk, "uint8") for t in tensors.values())
    layout = Layout(msgspec.msgpack.encode([]), tuple(tensors), views, extents, ())
    sources = {i: Source.of(t, True, name, t) for i, (name, t) in enumerate(tensors.items())}
    return Job(
        save=1, layout=layout, sources=sources, table=table, versions={},
        deadline=time.monotonic() + 300, unlock=unlocked, cancelled=lambda: False,
    )  # fmt: skip


def section_copy(check: Check) -> None:
    runtime = check.runtime()
    slot_bytes, slots = check.size(4 * MIB, 32768), check.size(256, 6)
    ring = EndlessRing(slots, slot_bytes)
    began = time.perf_counter()
    reasons = {runtime.lock(ring.view(slot)) for slot in range(slots)} - {None}
    taken = time.perf_counter() - began
    check.put("page-locking shared memory", "; ".join(map(str, reasons)) or "works")
    check.put("page-locking shared memory, GB/s", slots * slot_bytes / taken / 1e9)
    if not reasons:
        check.part("copies", copies, check, runtime, ring, slots)
        for slot in range(slots):
            runtime.unlock(ring.view(slot))


def copies(check: Check, runtime: Any, ring: EndlessRing, slots: int) -> None:
    """Ways to bring bytes to the locked ring, alone."""
    stream, slot_bytes = runtime.stream(), ring.slot_bytes
    total = slots * slot_bytes
    memory = check.memory(total)
    pieces = memory.split(slot_bytes)
    targets = [torch.frombuffer(ring.view(slot), dtype=torch.uint8) for slot in range(slots)]

    def arrived(what: str) -> None:
        check.sync()
        if not all(torch.equal(t, p.cpu()) for t, p in zip(targets, pieces, strict=True)):
            raise WrongError(f"{what}: bytes arrive wrong in locked shared memory")
        for target in targets:
            target.zero_()

    def by_slot() -> None:
        for target, piece in zip(targets, pieces, strict=True):
            runtime.copy(stream, target, piece)

    check.put("copy to the ring, slot by slot, GB/s", total / check.seconds(stream, by_slot) / 1e9)
    arrived("copies")
    landing = runtime.pinned(total)
    one = check.seconds(stream, lambda: runtime.copy(stream, landing, memory))
    check.put("copy to torch's pinned memory, at once, GB/s", total / one / 1e9)

    chunk = check.size(256 * 1024, 16384)
    _, hasher = hashing(runtime, [(total, chunk)], [memory.data_ptr()])
    hasher._stream = stream  # the kernels and the copies here share one stream
    count, per_slot = total // chunk, slot_bytes // chunk
    plan, gathered = runtime.empty(stream, 16 * count), runtime.empty(stream, total)
    host = runtime.pinned(16 * count)
    host.numpy().view(np.int64).reshape(-1, 2)[:] = [[i, i * chunk] for i in range(count)]
    runtime.copy(stream, plan, host)
    entries = plan.view(torch.int64)

    def gather() -> None:
        hasher.gather(entries, 0, count, chunk, gathered.data_ptr())

    def straight() -> None:
        for slot in range(slots):
            at = address_of(ring.view(slot)) - slot * slot_bytes
            hasher.gather(entries, slot * per_slot, per_slot, chunk, at)

    check.put("gather on the device, GB/s", total / check.seconds(stream, gather) / 1e9)
    check.sync()
    if not torch.equal(gathered, memory):
        raise WrongError("gathered bytes are wrong")
    check.put("kernel straight to the host, GB/s", total / check.seconds(stream, straight) / 1e9)
    arrived("a kernel's writes")


def section_stage(check: Check) -> None:
    """The stager as saves use it, with a writer that takes no time."""
    runtime = check.runtime()
    ring = EndlessRing(check.size(256, 6), check.size(4 * MIB, 32768))
    chunk = check.size(256 * 1024, 16384)
    state = {"a": check.memory(check.room(8 * GIB, 100_000)), "b": check.memory(1000)}
    nbytes = sum(tensor.numel() for tensor in state.values())
    stager = DeviceStager(runtime, seed=SEED)
    unlocked: list[float] = []

    def save(table: Any) -> Any:
        job = job_of(state, table, chunk, lambda: unlocked.append(time.perf_counter()))
        return stager.finish(job, ring, stager.start(job, stager.mark()))

    save({})  # locks the slots, takes the buffers
    check.put("staging a dense state, GB/s", nbytes / check.clock(lambda: save({}), 2) / 1e9)
    job = job_of(state, {}, chunk, lambda: None)
    first = stager.finish(job, ring, stager.start(job, stager.mark()))

    def again(table: Any) -> Any:
        repeat = dataclasses.replace(
            job, table=table, deadline=time.monotonic() + 300,
            unlock=lambda: unlocked.append(time.perf_counter()),
        )  # fmt: skip
        return stager.finish(repeat, ring, stager.start(repeat, stager.mark()))

    tables = [first.table]

    def unchanged() -> None:
        result = again(tables[-1])
        if result.changed_chunks:
            raise WrongError(f"nothing changed, {result.changed_chunks} chunks were found")
        tables.append(result.table)

    def unchanged_ms() -> None:
        check.put("staging an unchanged state, ms", check.clock(unchanged) * 1e3)

    check.part("staging an unchanged state", unchanged_ms)
    changed = max(1, nbytes // chunk // 100)
    state["a"][: changed * chunk : chunk] ^= 1
    check.sync()
    began = time.perf_counter()
    result = again(tables[-1])
    check.put("staging 1 % changed, ms", (time.perf_counter() - began) * 1e3)
    check.put("staging 1 % changed, ms until unlocked", (unlocked[-1] - began) * 1e3)
    if result.changed_chunks != changed:
        check.wrong.append(f"{changed} chunks changed, {result.changed_chunks} were found")
    if not DRY and not check.late("overlap", 60):
        check.part("overlap", overlap, check, lambda: save({}))
    stager.close()


def overlap(check: Check, action: Any) -> None:
    """Time of a matmul loop while staging repeats in another thread, over its time alone."""
    a = torch.randn(8192, 8192, device=check.device, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(100):
            torch.mm(a, a)

    work()
    alone = check.clock(work)
    stop = threading.Event()

    def repeat() -> None:
        # on a stream of its own: a save waits for what its stream has been given, here the products
        with torch.cuda.device(check.device), torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                action()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(repeat)
        try:
            began = time.perf_counter()
            work()
            torch.cuda.current_stream(check.device).synchronize()
            taken = time.perf_counter() - began
        finally:
            stop.set()
        done.result()
    check.put("slowdown of a matmul loop by dense staging", taken / alone)


# train and peers ---------------------------------------------------------------------------------


class Training:
    """A transformer in bf16 autocast with fp32 AdamW; `frozen` leaves one layer to train."""

    def __init__(self, check: Check, *, frozen: bool) -> None:
        torch.manual_seed(1)
        width, layers = check.size(1536, 32), 2
        if not DRY:  # the whole takes 12 layers, 24 GiB of device memory and of files
            free = min(torch.cuda.mem_get_info(check.device)[0], room_for_files()[1])
            layers = max(2, min(12, 12 * free // FILES_BYTES))
        self.device, self.width, self.batch = check.device, width, check.size(16, 2)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.model.to(check.device)
        if frozen:
            self.model.requires_grad_(False)
            self.model.layers[-1].requires_grad_(True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not DRY)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.nbytes += sum(8 * p.numel() for p in trained)

    def step(self) -> None:
        data = torch.randn(
            self.batch, 256 if self.width > 100 else 8, self.width, device=self.device
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(data).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def loop(check: Check, training: Training, steps: int, after: Any) -> float:
    """Seconds per step, `after(number)` being called after each."""
    check.sync()
    began = time.perf_counter()
    for number in range(steps):
        training.step()
        after(number)
    check.sync()
    return (time.perf_counter() - began) / steps


def section_train(check: Check) -> None:
    for frozen, every in ((True, 1), (False, 10)):
        if check.late("training", 90):
            return
        kind = "one layer trained, save every step" if frozen else "dense, save every 10 steps"
        check.part(kind, train, check, kind, frozen, every)


def train(check: Check, kind: str, frozen: bool, every: int) -> None:
    steps = check.size(30, 2)
    training = Training(check, frozen=frozen)
    loop(check, training, 3, lambda number: None)
    alone = loop(check, training, steps, lambda number: None)
    with tempfile.TemporaryDirectory(dir=room_for_files()[0]) as folder:
        ckpt = deltackpt.Checkpointer(folder, training.state, every=every, final=False)
        handles: list[Any] = []
        with ckpt:
            ckpt.save(0).result(300)

            def after(number: int) -> None:
                save = ckpt.step(number + 1)
                if save is not None:
                    handles.append(save)

            saving = loop(check, training, max(steps, every), after)
            reports = [handle.result(300) for handle in handles]
            last = ckpt.save(10_000).result(300)
        stalls = [report.stall_seconds for report in reports]
        check.put(f"{kind}: state, MB", training.nbytes / 1e6)
        check.put(f"{kind}: step alone, ms", alone * 1e3)
        check.put(f"{kind}: slowdown", saving / alone)
        check.put(f"{kind}: stall per save, median ms", statistics.median(stalls) * 1e3)
        check.put(f"{kind}: stall per save, largest ms", max(stalls) * 1e3)
        staged = statistics.median(r.staged_seconds for r in reports)
        check.put(f"{kind}: staged, median ms", staged * 1e3)
        changed = statistics.median(r.changed_bytes for r in reports) / training.nbytes
        check.put(f"{kind}: part of the state that changed", changed)
        figures = {name: dataclasses.asdict(f) for name, f in last.devices.items()}
        check.put(f"{kind}: device figures", figures)
        compare(training, folder)
    check.put(f"{kind}: restored bit for bit", True)


def compare(training: Training, folder: str) -> None:
    """Raise unless what the store holds equals the live state, bit for bit."""
    loaded = deltackpt.load(folder)
    for name, tensor in training.model.state_dict().items():
        same(tensor, loaded["model"][name], name)
    for number, entry in training.optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            same(value, loaded["optimizer"]["state"][number][name], f"{number}/{name}")


def same(live: torch.Tensor, loaded: torch.Tensor, name: str) -> None:
    a, b = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (live, loaded))
    if not torch.equal(a, b):
        raise WrongError(f"{name} was restored with other bytes")


def room_for_files() -> tuple[str, int]:
    """Where files cost least, so that the disk does not decide, and the bytes that are free there:
    /dev/shm, where that is large enough (in a container it often is not)."""
    places = [tempfile.gettempdir()] if DRY else ["/dev/shm", tempfile.gettempdir()]
    found: list[tuple[str, int]] = []
    for place in places:
        with contextlib.suppress(OSError):
            found.append((place, shutil.disk_usage(place).free))
    if not found:
        raise OSError(f"none of {', '.join(places)} can be used for files (see TMPDIR)")
    enough = [one for one in found if one[1] >= FILES_BYTES]
    return enough[0] if enough else max(found, key=lambda one: one[1])


def full_copy(check: Check, tensors: list[torch.Tensor]) -> None:
    runtime = check.runtime()
    landing = [runtime.pinned(t.nbytes).view(t.dtype).view(t.shape) for t in tensors]

    def copy() -> None:
        for target, tensor in zip(landing, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)

    copy()
    check.put("full copy to pinned memory, ms", check.clock(copy) * 1e3)


def torch_save(check: Check, states: Any, path: Path) -> None:
    check.put("torch.save, ms", check.clock(lambda: torch.save(states, path)) * 1e3)


def dcp_stall(check: Check, states: Any, folder: str) -> float:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    stalls: list[float] = []
    for number in range(3):
        path = os.path.join(folder, str(number))
        check.sync()
        began = time.perf_counter()
        future: Any = async_save(states, checkpoint_id=path)
        stalls.append(time.perf_counter() - began)
        future.result()
        shutil.rmtree(path)
    return statistics.median(stalls)


def section_peers(check: Check) -> None:
    training = Training(check, frozen=False)
    training.step()
    tensors = [p.detach() for p in training.model.parameters()]
    for entry in training.optimizer.state.values():
        tensors += [v for v in entry.values() if v.device == check.device and v.numel() > 1]
    check.put("state, MB", training.nbytes / 1e6)
    check.part("full copy", full_copy, check, tensors)
    with tempfile.TemporaryDirectory(dir=room_for_files()[0]) as folder:
        if not check.late("deltackpt", 30):
            check.part("deltackpt", dense_saves, check, training, folder)
        states = {name: thing.state_dict() for name, thing in training.state.items()}
        path = Path(folder) / "state.pt"
        if not check.late("torch.save", 40):
            check.part("torch.save", torch_save, check, states, path)
            path.unlink(missing_ok=True)
        if check.late("DCP", 40):
            return
        try:
            check.put("DCP async_save, stall, ms", dcp_stall(check, states, folder) * 1e3)
        except Exception as error:  # no fault of what is checked here
            check.put("DCP async_save", f"{type(error).__name__}: {error}")


def dense_saves(check: Check, training: Training, folder: str) -> None:
    stalls: list[float] = []
    staged: list[float] = []
    store = os.path.join(folder, "store")
    with deltackpt.Checkpointer(store, training.state, final=False, codec="none") as ckpt:
        ckpt.save(0).result(300)
        for number in range(1, 4):
            training.step()  # the lock is waited for in the optimizer's step
            save = ckpt.save(number)
            training.step()
            report = save.result(300)
            stalls.append(report.stall_seconds)
            staged.append(report.staged_seconds)
    shutil.rmtree(store)
    check.put("deltackpt, all changed, stall, ms", statistics.median(stalls) * 1e3)
    check.put("deltackpt, all changed, staged, ms", statistics.median(staged) * 1e3)


# multi -------------------------------------------------------------------------------------------


UNUSED = """
import sys, tempfile, torch
sys.path[:0] = sys.argv[1:3]
import deltackpt
state = {"w": torch.randn(1 << 22, device="cuda:1")}
with tempfile.TemporaryDirectory() as folder:
    with deltackpt.Checkpointer(folder, state, final=False) as ckpt:
        ckpt.save(0).result(300)
    got = deltackpt.load(folder)["w"]
assert torch.equal(got.cpu(), state["w"].cpu())
assert not torch._C._cuda_hasPrimaryContext(0), "a context on device 0"
"""


def section_multi(check: Check) -> None:
    devices = 0 if DRY else torch.cuda.device_count()
    check.put("devices", devices)
    if devices < 2:
        check.put("not run: needs two devices", True)
        return
    check.part("a state on cuda:1 alone", unused, check)
    check.part("states on several devices", several, check, devices)


def unused(check: Check) -> None:
    """In a process that has asked nothing of device 0."""
    paths = [str(ROOT), str(ROOT / "store")]
    done = subprocess.run([sys.executable, "-c", UNUSED, *paths], capture_output=True, text=True)
    if done.returncode:
        raise WrongError(done.stderr[-500:])
    check.put("no context on an unused device", True)


def several(check: Check, devices: int) -> None:
    state = {f"w{i}": torch.randn(1 << 24, device=f"cuda:{i}") for i in range(devices)}
    with tempfile.TemporaryDirectory() as folder:
        with deltackpt.Checkpointer(folder, state, final=False) as ckpt:
            ckpt.save(0).result(300)
            for tensor in state.values():
                tensor[5] += 1
            report = ckpt.save(1).result(300)
        if report.changed_chunks != devices or len(report.devices) != devices:
            raise WrongError(f"one chunk per device changed, found {report.changed_chunks}")
        for name, tensor in state.items():
            same(tensor, deltackpt.load(folder)[name], name)
    check.put("states on several devices", "restored bit for bit")


# tests -------------------------------------------------------------------------------------------


TEST_SECONDS = 170
"""Of each test, which gives processes of its own 140."""


def section_tests(check: Check) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise WrongError("pytest is not installed")
    found = pytest("--collect-only", "-q", "tests/gpu")
    names = [line for line in found.stdout.splitlines() if "::" in line]
    if not names:
        raise WrongError(f"no test was found: {(found.stdout + found.stderr)[-2000:]}")
    if DRY:
        names = [name for name in names if "restored" in name][:2]

    def run(name: str) -> tuple[str, str]:
        if check.deadline - time.monotonic() < 20:
            return name, "not run: no time is left"
        try:
            done = pytest("-q", "-rs", name)
        except subprocess.TimeoutExpired:
            return name, f"not done in {TEST_SECONDS} s"
        if done.returncode:
            return name, f"code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
        return name, "skipped" if " skipped" in done.stdout.splitlines()[-1] else "passed"

    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2))) as pool:
        for name, outcome in pool.map(run, names):
            check.put(name, outcome)
            if outcome not in ("passed", "skipped"):
                check.wrong.append(name)


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest without the project's settings, which ask for its plugins and forbid warnings."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT),
               "--import-mode=importlib", "-o", f"pythonpath={ROOT / 'tests' / 'support'}",
               "-p", "no:cacheprovider"]  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "store")]))
    environment.pop("TRITON_INTERPRET", None)
    if DRY:
        environment["DELTACKPT_TEST_DEVICE"] = "cpu"
    running = subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = running.communicate(timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # and what it has started, which holds the pipes
        running.communicate()
        raise
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def default_out() -> Path:
    if DRY:
        return Path(tempfile.gettempdir()) / "gpu-dry.json"
    name = torch.cuda.get_device_name(0)
    slug = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "docs" / "benchmarks" / f"gpu-{slug}.json"


class Warnings(logging.Handler):
    """Keeps what the library warns of in the section's result."""

    def __init__(self, check: Check) -> None:
        super().__init__(logging.WARNING)
        self.check = check

    def emit(self, record: logging.LogRecord) -> None:
        known = self.check.section.setdefault("warnings", [])
        if record.getMessage() not in known:
            known.append(record.getMessage())
            print(f"  WARNING: {record.getMessage()}", flush=True)


def run_here(check: Check, name: str) -> bool:
    """Run one section, report it, and tell whether all was well."""
    print(f"{name}:", flush=True)
    check.begin(name)
    logging.getLogger("deltackpt").addHandler(Warnings(check))
    began = time.monotonic()
    check.wrong.clear()
    try:
        check.result["environment"] = environment(check.device)
    except Exception as error:
        check.wrong.append(f"environment: {error}")
    check.part(name, globals()[f"section_{name}"], check)
    del check.section["error"]
    if check.wrong:
        check.section["error"] = "; ".join(check.wrong)
    check.section.update(ok=not check.wrong, seconds=time.monotonic() - began)
    check.save()
    return not check.wrong


def command(check: Check, name: str) -> list[str]:
    """What runs one section in a process of its own, in the time that is left."""
    left = max(1.0, check.deadline - time.monotonic())
    own = [sys.executable, __file__, "--only", name, "--out", str(check.out)]
    return [*own, "--seconds", f"{left:.0f}", *(["--dry"] if DRY else [])]


def run_apart(check: Check, name: str, command: list[str], reserve: float = 0.0) -> bool:
    """Let another process run a section; report it as failed when that dies, or hangs until only
    `reserve` seconds are left."""
    check.load()
    check.begin(name)
    left = check.deadline - time.monotonic() - reserve
    if left < 5:
        end = "not run: no time is left, run it with --only"
    else:
        try:
            code = subprocess.run(command, timeout=left, check=False).returncode
            end = None if code in (0, 1) else f"its process ended with code {code}"
        except subprocess.TimeoutExpired:
            end = f"not done in {left:.0f} s"
    check.load()
    section = check.result["sections"][name]
    if end is not None:
        print(f"  FAILED: {name}: {end}", flush=True)
        section.update(ok=False, error=end)
        check.save()
    return section["ok"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument("--out", type=Path, help="result file (see above)")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for all sections")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = set(names) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    if not DRY and not torch.cuda.is_available():
        parser.error("no GPU is in reach (torch.cuda.is_available() is False); --dry needs none")
    check = Check(options.out or default_out(), options.seconds)
    if len(names) == 1:
        good = run_here(check, names[0])
    else:
        good = True
        for number, name in enumerate(names):
            reserve = RESERVE * (len(names) - 1 - number)
            good &= run_apart(check, name, command(check, name), reserve)
    print(f"{'ok' if good else 'FAILED'}: {check.out}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
