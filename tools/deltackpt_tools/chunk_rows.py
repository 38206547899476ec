"""Chosen chunks of a tensor out of one step, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deltackpt_store.manifest import Snapshot, TensorView, element_bytes
from deltackpt_store.reader import ChunkReader
from numpy.typing import NDArray

from deltackpt_tools.compare import span
from deltackpt_tools.tensor_bytes import is_contiguous

BATCH = 16 * 1024 * 1024  # bytes held at once; one chunk may be larger


class ChunkRows:
    """Reads chunks of one snapshot into memory of its own, `BATCH` bytes at a time.

    All bytes are checked against their chunk ids; CorruptionError otherwise. Not thread-safe.
    """

    def __init__(self, snapshot: Snapshot, reader: ChunkReader) -> None:
        self.snapshot = snapshot
        self._reader = reader
        self._buffer = bytearray()

    def whole_elements(self, view: TensorView) -> bool:
        """Whether every chunk of the tensor holds whole elements, row-major."""
        width = element_bytes(view.dtype)
        spec = self.snapshot.layout.extents[view.extent]
        aligned = spec.chunk_bytes % width == 0 and view.offset % width == 0
        return aligned and is_contiguous(view) and not spec.inline

    def batches(self, view: TensorView, rows: NDArray[Any]) -> Iterator[memoryview]:
        """The bytes of the tensor that lie in the chunks `rows` (ascending), one after the other.

        Each piece is valid until the next is asked for. `whole_elements(view)` must hold.
        """
        spec = self.snapshot.layout.extents[view.extent]
        ids = self.snapshot.chunks[view.extent]
        size = spec.chunk_bytes
        at_once = max(1, BATCH // size)
        start, stop = span(view)
        for first in range(0, len(rows), at_once):
            some: list[int] = rows[first : first + at_once].tolist()
            if len(self._buffer) < len(some) * size:
                self._buffer = bytearray(len(some) * size)
            memory = memoryview(self._buffer)
            position = 0
            requests: list[tuple[bytes, memoryview]] = []
            for row in some:
                length = spec.chunk_length(row)
                requests.append((ids[row].tobytes(), memory[position : position + length]))
                position += length
            self._reader.read(requests)
            head = max(start - some[0] * size, 0)
            tail = max(some[-1] * size + spec.chunk_length(some[-1]) - stop, 0)
            yield memory[head : position - tail]
