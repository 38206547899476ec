"""The chunk table: one row for every chunk of every extent, and the waves it is hashed in.

Rows depend on sizes only; addresses join them at each save, because allocators move and reuse
memory. Pure numpy: no torch, no triton here.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from deltackpt_store.errors import InvalidInputError
from numpy.typing import NDArray

from . import specs
from .xxh3 import BLOCK_BYTES, SHORT_BYTES, STRIPE_BYTES

MAX_CHUNK_BYTES = 1 << 30
_SPARE_PROGRAMS = 1 << 16


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows ``first <= row < end``, whose sums are in the scratch together.

    Each chunk is summed by ``2 ** tiles_log2`` programs; those past its end do nothing.
    """

    first: int
    end: int
    tiles_log2: int


class ChunkTable:
    """Extents cut into chunks. Row order is extent order, chunks of an extent ascending.

    Per row: ``extent`` (position in `extents`), ``chunk`` (index in it), ``length`` (bytes),
    ``first_block`` (where its sums start in its wave's part of the scratch). ``starts[e]`` is the
    first row of extent ``e``, and ``starts[-1]`` the number of rows.
    """

    def __init__(
        self,
        extents: Sequence[tuple[int, int]],
        *,
        scratch_bytes: int = specs.SCRATCH_BYTES,
        blocks_per_program: int = 16,
    ) -> None:
        """`extents` are (bytes, chunk bytes). `scratch_bytes` bounds the scratch; one that could
        not hold the largest chunk, or the list of all chunks, is exceeded by what those need.

        Raises `InvalidInputError` for a chunk size that is not within 1 byte and 1 GiB.
        """
        nbytes = np.array([size for size, _ in extents], np.int64).reshape(-1)
        chunk_bytes = np.array([chunk for _, chunk in extents], np.int64).reshape(-1)
        if ((chunk_bytes < 1) | (chunk_bytes > MAX_CHUNK_BYTES)).any():
            raise InvalidInputError(
                f"chunk_bytes must be between 1 and {MAX_CHUNK_BYTES}", option="chunk_bytes"
            )
        counts = -(-nbytes // chunk_bytes)
        self.starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts)))
        self.count = int(self.starts[-1])
        self.extent: NDArray[np.int32] = np.repeat(np.arange(len(extents), dtype=np.int32), counts)
        self.chunk = (np.arange(self.count) - self.starts[self.extent]).astype(np.int32)
        self.offset: NDArray[np.int64] = self.chunk * chunk_bytes[self.extent]
        self.length = np.minimum(
            chunk_bytes[self.extent], nbytes[self.extent] - self.offset
        ).astype(np.int32)
        self.has_short = bool((self.length <= SHORT_BYTES).any())

        blocks = _blocks(self.length)
        ends: NDArray[np.int64] = np.concatenate(([0], np.cumsum(blocks)))
        flag_bytes, listed = _align(self.count), list_bytes(self.count)
        total, largest = int(ends[-1]), int(blocks.max(initial=0))
        room = max(scratch_bytes - flag_bytes, listed) // specs.SUM_BYTES
        if total <= room:
            self.wave_blocks, halves = total, 1
        else:
            self.wave_blocks, halves = max(largest, room // 2), 2
        self.sum_bytes = _align(max(self.wave_blocks * halves * specs.SUM_BYTES, listed))
        self.scratch_bytes = self.sum_bytes + flag_bytes
        self.waves = _waves(ends, blocks, self.wave_blocks, blocks_per_program)
        self.first_block = np.zeros(self.count, np.int64)
        for wave in self.waves:
            self.first_block[wave.first : wave.end] = ends[wave.first : wave.end] - ends[wave.first]

    def rows(self, addresses: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows as the kernels read them, for extents that start at these addresses."""
        start = np.asarray(addresses, np.int64).reshape(-1)
        rows = np.empty((self.count, 2), np.int64)
        rows[:, 0] = start[self.extent] + self.offset
        rows[:, 1] = self.length | (self.first_block << 32)
        return rows


def list_bytes(chunks: int) -> int:
    """Bytes of the list of changed chunks at its longest: count, row numbers, digests."""
    return list_rows_bytes(chunks) + 16 * chunks


def list_rows_bytes(chunks: int) -> int:
    """Bytes before the digests in the list of changed chunks."""
    return _align(4 * (chunks + 1))


def _align(size: int) -> int:
    return -(-size // 256) * 256


def _blocks(length: NDArray[np.int32]) -> NDArray[np.int64]:
    """Blocks of sums per chunk: those that hold whole stripes before the last byte."""
    stripes_per_block = BLOCK_BYTES // STRIPE_BYTES
    stripes = (length.astype(np.int64) - 1) // STRIPE_BYTES
    return np.where(length > SHORT_BYTES, -(-stripes // stripes_per_block), 0)


def _waves(
    ends: NDArray[np.int64], blocks: NDArray[np.int64], wave_blocks: int, per_program: int
) -> tuple[Wave, ...]:
    waves: list[Wave] = []
    tiles = -(-blocks // per_program)
    first, count = 0, len(blocks)
    while first < count:
        end = bisect.bisect_right(ends, int(ends[first]) + wave_blocks) - 1
        while True:
            log2 = max(int(tiles[first:end].max()) - 1, 0).bit_length()
            # a few huge chunks among many small ones: cut, so that idle programs stay few
            idle = ((end - first) << log2) - int(tiles[first:end].sum())
            if idle <= int(tiles[first:end].sum()) * 4 + _SPARE_PROGRAMS or end - first == 1:
                break
            end = first + (end - first) // 2
        waves.append(Wave(first, end, log2))
        first = end
    return tuple(waves)
