"""The default size of the staging ring: a whole state fits, whatever its tensors look like."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from staging_ring import SEED, Tensors

import deltackpt.stage as stage_module
from deltackpt import writerlink
from deltackpt.host_memory import available_bytes
from deltackpt.options import CHUNK_BYTES, Options
from deltackpt.stage import HostStager, Job
from deltackpt.writerlink import WriterLink

MEBI = 1 << 20


class Counted:
    """A ring of which only the slots that are taken are of interest."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._next = count()
        self._taken: list[int] = []

    @property
    def used(self) -> int:
        return len(self._taken)

    def acquire_slot(self, timeout: float | None) -> int:
        slot = next(self._next)
        self._taken.append(slot)  # in one go: threads of the stager come here at once
        return slot

    def put(self, slot: int, at: int, data: memoryview) -> None:
        assert at + len(data) <= self.slot_bytes

    def slot(self, save: int, slot: int, records: bytes) -> None:
        pass


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        (4 * MEBI, 4096),
        (4 * MEBI, 1000, 2 * MEBI, 600),
        (CHUNK_BYTES + 66_000,),
        (67_000,),
        (CHUNK_BYTES // 2 + 1,),
        (3 * CHUNK_BYTES - 1, 513),
        (250 * MEBI,),
    ],
)
def test_a_whole_state_is_staged_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], threads: int
) -> None:
    """Prevents: a stall until half of the state is durable because the last slots are missing."""
    monkeypatch.setattr(stage_module, "change_hash", lambda *args: bytes(16))
    monkeypatch.setattr(writerlink, "available_bytes", lambda: None)
    total = 0
    tensors: dict[str, torch.Tensor] = {}
    while total < 500 * MEBI:  # never touched: takes no memory
        size = sizes[len(tensors) % len(sizes)]
        tensors[str(len(tensors))] = torch.empty(size, dtype=torch.uint8)
        total += size
    options = Options(threads=threads)
    link = WriterLink(str(tmp_path), options, SEED, max_in_flight=2, on_result=lambda *_: None)
    wanted = link._wanted_ring(total)
    state = Tensors(tensors, chunk_bytes=CHUNK_BYTES)
    ring = Counted(options.slot_bytes(wanted))
    job = Job(
        save=1, layout=state.layout, sources=state.sources, table={}, versions={},
        deadline=float("inf"), unlock=lambda: None, cancelled=lambda: False,
    )  # fmt: skip
    stager = HostStager(seed=SEED, threads=threads)
    try:
        stager.stage(job, ring)
    finally:
        stager.close()
    assert total // ring.slot_bytes <= ring.used <= wanted // ring.slot_bytes
    assert wanted <= 1.17 * total


def machine(root: Path, cgroup: str, limits: dict[str, tuple[str, int, int]], version: int) -> str:
    """A machine of 1000 MiB free; by cgroup its limit, what it uses, and what of that are files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\n")
    old, new = (cgroup, "/") if version == 1 else ("/old", cgroup)
    (root / "proc/self/cgroup").write_text(f"9:cpu,memory:{old}\n3:pids:/x\n0::{new}\n")
    for path, (limit, used, files) in limits.items():
        folder = root / f"sys/fs/cgroup{'/memory' if version == 1 else ''}{path}"
        folder.mkdir(parents=True)
        names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        unlimited = str((1 << 63) - 4096) if version == 1 else "max"
        (folder / f"memory.{names[0]}").write_text(f"{limit.replace('max', unlimited)}\n")
        (folder / f"memory.{names[1]}").write_text(f"{used}\n")
        total = "total_" if version == 1 else ""
        (folder / "memory.stat").write_text(
            f"anon {used - files}\n{total}inactive_file {files - files // 4}\n"
            f"{total}active_file {files // 4}\n"
        )
    return str(root)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("cgroup", "limits", "free"),
    [
        ("/", {}, 1000),
        ("/", {"": ("max", 3 * MEBI, 0)}, 1000),
        ("/", {"": (str(800 * MEBI), 700 * MEBI, 600 * MEBI)}, 700),
        ("/", {"": (str(800 * MEBI), 900 * MEBI, 0)}, 0),
        ("/jobs/7/a", {"/jobs/7": (str(50 * MEBI), 10 * MEBI, 0), "/jobs/7/a": ("max", 0, 0)}, 40),
        ("/gone", {"": (str(20 * MEBI), 4 * MEBI, 0)}, 16),
    ],
)  # fmt: skip
def test_memory_is_what_machine_and_cgroups_leave_with_the_page_cache_given_up(
    tmp_path: Path, cgroup: str, limits: dict[str, tuple[str, int, int]], free: int, version: int
) -> None:
    """Prevents: a ring of 32 MiB for a large state, because a container's data loader has filled
    its page cache; and a job killed for memory that its cgroup does not have."""
    assert available_bytes(machine(tmp_path, cgroup, limits, version)) == free * MEBI


def test_memory_of_a_machine_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(str(tmp_path)) is None
