"""Chosen chunks of a tensor out of one step, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from deltackpt_store.manifest import Snapshot, TensorView, element_bytes
from deltackpt_store.reader import ChunkReader
from numpy.typing import NDArray

from deltackpt_tools.damage import naming_tensors
from deltackpt_tools.tensor_bytes import is_contiguous, span

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

    def many(
        self, wanted: Sequence[tuple[TensorView, NDArray[Any]]]
    ) -> Iterator[tuple[int, memoryview]]:
        """The chunks `rows` (ascending) of several tensors: (number in `wanted`, bytes of a chunk).

        They are read together, which for many small ones is much faster than one by one. Each
        piece is valid until the next is asked for. `whole_elements` must hold for every tensor.
        """
        held: list[tuple[int, TensorView, int, int]] = []  # number, view, row, length
        size = 0
        for number, (view, rows) in enumerate(wanted):
            spec = self.snapshot.layout.extents[view.extent]
            for row in cast("list[int]", rows.tolist()):
                length = spec.chunk_length(row)
                if held and size + length > BATCH:
                    yield from self._together(held)
                    held, size = [], 0
                held.append((number, view, row, length))
                size += length
        if held:
            yield from self._together(held)

    def _together(
        self, held: list[tuple[int, TensorView, int, int]]
    ) -> Iterator[tuple[int, memoryview]]:
        needed = sum(length for *_, length in held)
        if len(self._buffer) < needed:
            self._buffer = bytearray(needed)
        memory = memoryview(self._buffer)
        position = 0
        requests: list[tuple[bytes, memoryview]] = []
        pieces: list[tuple[int, memoryview]] = []
        for number, view, row, length in held:
            spec = self.snapshot.layout.extents[view.extent]
            part = memory[position : position + length]
            position += length
            requests.append((self.snapshot.chunks[view.extent][row].tobytes(), part))
            start, stop = span(view)
            at = row * spec.chunk_bytes
            pieces.append((number, part[max(start - at, 0) : min(stop - at, length)]))
        with naming_tensors(self.snapshot):
            self._reader.read(requests)
        yield from pieces
