"""Hash every chunk of a table on a device and list those that changed, in order.

The digests of the state before stay on the device; only the list of changed chunks and their
digests come to the host. The host waits for nothing but that list, on the thread that asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import specs
from .runtime import Runtime
from .table import ChunkTable, list_bytes, list_rows_bytes
from .xxh3 import key_table

FIRST_READ = 8192
"""Entries of the change list that the first read-back brings, whether they are used or not."""


@dataclass(slots=True)
class Counters:
    """What the device was asked to do so far, and the memory held for it now."""

    launches: int = 0
    transfers: int = 0
    transferred_bytes: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows whose digest differs from the one before, ascending, and their new digests.

    ``digests`` are rows of (low, high) words. Both arrays belong to the receiver.
    """

    rows: NDArray[np.int64]
    digests: NDArray[np.uint64]


class Hasher:
    """The hashes of one table on one device. Used by one thread; owns its device memory.

    Sequence: :meth:`set_addresses`, :meth:`set_digests` where the ones on the device are not those
    to compare with, :meth:`detect`, :meth:`changes`.
    """

    def __init__(
        self, runtime: Runtime, stream: Any, table: ChunkTable, seed: int, counters: Counters
    ) -> None:
        self.table = table
        self._runtime, self._stream, self._counters = runtime, stream, counters
        count = table.count
        self._memory = (
            runtime.empty(stream, 16 * count),
            runtime.empty(stream, 16 * count),
            runtime.empty(stream, table.scratch_bytes),
            runtime.empty(stream, key_table(seed).nbytes),
        )
        rows, digests, scratch, keys = self._memory
        self.rows = rows.view(torch.int64)
        self.digests = digests.view(torch.uint64)
        self._keys = keys.view(torch.uint64)
        self._sums = scratch[: table.sum_bytes].view(torch.uint64)
        self._flags = scratch[table.sum_bytes :]
        at = list_rows_bytes(count)
        self._list = scratch[: list_bytes(count)]
        self._changed = self._list[:at].view(torch.int32)
        self._changed_digests = self._list[at:].view(torch.uint64)
        self._host_rows = runtime.pinned(16 * count)
        self._host_list = runtime.pinned(list_bytes(count))
        self._addresses: NDArray[np.int64] | None = None
        counters.device_bytes += self.device_bytes
        counters.pinned_bytes += self.pinned_bytes
        if count:
            host_keys = runtime.pinned(keys.numel())
            host_keys.numpy().view(np.uint64)[:] = key_table(seed)
            self._copy(keys, host_keys)
            runtime.synchronize(runtime.record(stream))

    @property
    def device_bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    @property
    def pinned_bytes(self) -> int:
        return self._host_rows.numel() + self._host_list.numel()

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Say where each extent starts now; uploads the table when one moved."""
        start = np.array(addresses, np.int64)
        if self._addresses is not None and np.array_equal(start, self._addresses):
            return
        self._addresses = start
        if self.table.count:
            self._upload(self.rows.view(torch.uint8), self.table.rows(start))

    def set_digests(self, digests: NDArray[np.uint64]) -> None:
        """Say what to compare with: (low, high) per row; zeros where nothing is known."""
        if self.table.count:
            self._upload(self.digests.view(torch.uint8), digests)

    def detect(self) -> None:
        """Queue the hashing of all rows and the list of those that changed.

        From here on the digests on the device are those of the present bytes.
        """
        table = self.table
        if not table.count:
            return
        common = (self.rows, self._keys, self._sums, self.digests, self._flags)
        first, end, programs = 0, 0, 0
        for turn, wave in enumerate((*table.waves, None)):
            here, there = (turn % 2) * table.wave_blocks, (1 - turn % 2) * table.wave_blocks
            tiles = 0 if wave is None else (wave.end - wave.first) << wave.tiles_log2
            self._launch(
                "sweep", programs + tiles, *common, first, end, programs, there,
                0 if wave is None else wave.first, here, 0 if wave is None else wave.tiles_log2,
            )  # fmt: skip
            if wave is not None:
                first, end = wave.first, wave.end
                programs = -(-(end - first) // specs.FINISH_CHUNKS)
        if table.has_short:
            self._launch(
                "short_chunks", -(-table.count // specs.SHORT_CHUNKS),
                self.rows, self._keys, self.digests, self._flags, table.count,
            )  # fmt: skip
        self._launch(
            "compact", -(-table.count // specs.COMPACT_TILE),
            self._flags, self.digests, self._changed, self._changed_digests, table.count,
        )  # fmt: skip

    def changes(self) -> Changes:
        """Wait for :meth:`detect` and read its list back: one round trip, two for a long list."""
        count = self.table.count
        if not count:
            return Changes(np.zeros(0, np.int64), np.zeros((0, 2), np.uint64))
        at = list_rows_bytes(count)
        head = min(count, FIRST_READ)
        self._read(0, 4 * (head + 1))
        self._read(at, at + 16 * head)
        self._runtime.synchronize(self._runtime.record(self._stream))
        listed = self._host_list.numpy()
        found = int(listed[:4].view(np.int32)[0])
        if found > head:
            self._read(4 * (head + 1), 4 * (found + 1))
            self._read(at + 16 * head, at + 16 * found)
            self._runtime.synchronize(self._runtime.record(self._stream))
        rows = listed[4 : 4 * (found + 1)].view(np.int32).astype(np.int64)
        digests = listed[at : at + 16 * found].view(np.uint64).reshape(-1, 2).copy()
        return Changes(rows, digests)

    def gather(self, plan: torch.Tensor, first: int, entries: int, longest: int, at: int) -> None:
        """Queue copies of `entries` chunks to device memory at address `at` (see the kernel).

        `longest` is the length of the longest of them, in bytes.
        """
        log2 = max(-(-longest // specs.GATHER_BYTES) - 1, 0).bit_length()
        self._launch("gather", entries << log2, self.rows, plan, at, first, log2)

    def _upload(self, target: torch.Tensor, values: NDArray[np.int64] | NDArray[np.uint64]) -> None:
        self._host_rows.numpy()[:] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self._copy(target, self._host_rows)
        self._runtime.synchronize(self._runtime.record(self._stream))

    def _read(self, start: int, end: int) -> None:
        self._copy(self._host_list[start:end], self._list[start:end])

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._counters.transfers += 1
        self._counters.transferred_bytes += source.numel()
        self._runtime.copy(self._stream, target, source)

    def _launch(self, kernel: str, programs: int, *args: torch.Tensor | int) -> None:
        self._counters.launches += 1
        self._runtime.launch(self._stream, kernel, programs, *args)
