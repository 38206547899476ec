"""The default size of the staging ring: a whole state fits, whatever its tensors look like."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from staging_ring import SEED, Tensors

import deltackpt.stage as stage_module
from deltackpt import writerlink
from deltackpt.options import CHUNK_BYTES, Options
from deltackpt.stage import HostStager, Job
from deltackpt.writerlink import WriterLink

MEBI = 1 << 20


class Counted:
    """A ring of which only the slots that are taken are of interest."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._next = count()
        self.used = 0

    def acquire_slot(self, timeout: float | None) -> int:
        slot = next(self._next)
        self.used = max(self.used, slot + 1)
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
    monkeypatch.setattr(writerlink, "available_memory", lambda: 1 << 50)
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
    assert wanted <= 1.15 * total
