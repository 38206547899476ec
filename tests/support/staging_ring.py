"""A staging ring in plain memory, with a writer's check of every staged chunk."""

from __future__ import annotations

import threading
import time

import msgspec
import torch
import xxhash
from deltackpt_store.errors import StorageError
from deltackpt_store.manifest import ExtentSpec, Layout, TensorView
from deltackpt_store.protocol import unpack_records

from deltackpt.detect import ChangeTable
from deltackpt.sources import Source
from deltackpt.stage import HostStager, Job, Staging, copy_bytes, versions_of

SEED = 0x5EED


class MemoryRing:
    """Slots as bytearrays, never released; without `keep`, all sent ones when one is wanted."""

    def __init__(self, slots: int = 64, slot_bytes: int = 1 << 20, *, keep: bool = True) -> None:
        self.slot_bytes = slot_bytes
        self.slots = [bytearray(slot_bytes) for _ in range(slots)]
        self.free = list(range(slots))
        self.keep = keep
        self.sent: list[tuple[int, bytes]] = []
        self.chunks: dict[tuple[int, int], bytes] = {}
        self.torn: list[tuple[int, int]] = []
        self.places: list[tuple[int, int]] = []
        self.waves = 0
        self._released = 0
        self._condition = threading.Condition()

    def acquire_slot(self, timeout: float | None) -> int:
        with self._condition:
            if not self.free and not self.keep:
                self.waves += 1
                for slot, _ in self.sent[self._released :]:
                    self._free(slot)
                self._released = len(self.sent)
            if not self._condition.wait_for(lambda: self.free, timeout):
                raise StorageError("no slot became free", kind="timeout")
            return self.free.pop(0)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def put(self, slot: int, at: int, data: memoryview) -> None:
        copy_bytes(memoryview(self.slots[slot])[at : at + len(data)], data)

    def slot(self, save: int, slot: int, records: bytes) -> None:
        data = self.slots[slot]
        with self._condition:
            self.sent.append((slot, records))
            for extent, chunk, start, length, digest in unpack_records(records):
                raw = bytes(data[start : start + length])
                self.places.append((start, length))
                if xxhash.xxh3_128(raw, seed=SEED).digest() != digest:
                    self.torn.append((extent, chunk))
                self.chunks[extent, chunk] = raw

    def release_slot(self, slot: int) -> None:
        with self._condition:
            self._free(slot)

    def _free(self, slot: int) -> None:
        self.slots[slot][:] = bytes(self.slot_bytes)  # whoever reads it too late sees zeros
        self.free.append(slot)
        self.free.sort()
        self._condition.notify_all()


class Tensors:
    """Named tensors as a layout and sources, one extent each, without the capture code."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], *, chunk_bytes: int = 65536, live: bool = True
    ) -> None:
        views = [
            TensorView(i, i, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(), 0)
            for i, t in enumerate(tensors.values())
        ]
        extents = [
            ExtentSpec(t.numel() * t.element_size(), chunk_bytes, v.dtype)
            for t, v in zip(tensors.values(), views, strict=True)
        ]
        structure = msgspec.msgpack.encode(list(range(len(tensors))))
        self.layout = Layout(structure, tuple(tensors), tuple(views), tuple(extents), ())
        self.sources = {
            i: Source.of(t.detach().view(-1).view(torch.uint8), live, name, t if live else None)
            for i, (name, t) in enumerate(tensors.items())
        }


def stage(
    ring: MemoryRing,
    state: Tensors,
    table: ChangeTable | None = None,
    *,
    threads: int = 2,
    stager: HostStager | None = None,
    seconds: float = 60.0,
    unlocked: list[bool] | None = None,
    cancelled: bool = False,
) -> Staging:
    """One pass of the host stager."""
    stager = stager or HostStager(seed=SEED, threads=threads)
    versions = versions_of(state.sources)
    job = Job(
        save=1, layout=state.layout, sources=state.sources, table=table or {},
        versions=versions, deadline=time.monotonic() + seconds,
        unlock=lambda: unlocked.append(True) if unlocked is not None else None,
        cancelled=lambda: cancelled,
    )  # fmt: skip
    return stager.stage(job, ring)
