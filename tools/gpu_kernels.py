"""Sections of `gpu_check` on kernels and copies, without a `Checkpointer`."""

# pyright: basic

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from deltackpt_store.errors import StorageError
from deltackpt_store.ring import Ring
from gpu_figures import DRY, GIB, MIB, SEED, Check, WrongError

from deltackpt.cuda import selftest, specs
from deltackpt.cuda.hasher import Counters, Hasher
from deltackpt.cuda.runtime import address_of
from deltackpt.cuda.stager import DeviceStager
from deltackpt.cuda.table import ChunkTable

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
