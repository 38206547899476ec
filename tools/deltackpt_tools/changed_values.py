"""Reads the chunks that differ between two steps, and no others, and compares their elements.

Memory is bounded: a batch of chunks of each step at a time, whatever the size of the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from deltackpt_store.manifest import Snapshot, TensorView
from deltackpt_store.reader import ChunkReader
from numpy.typing import NDArray

from deltackpt_tools.changes import TensorChange, ValueStats
from deltackpt_tools.chunk_rows import BATCH, ChunkRows
from deltackpt_tools.compare import Comparison, Pair
from deltackpt_tools.numeric import Sums
from deltackpt_tools.tensor_bytes import TensorBytes, tensor_nbytes, without_repeats


class ValueReader:
    """Compares tensors of two snapshots element by element. Not thread-safe.

    All bytes are checked against their chunk ids; CorruptionError when one is damaged.
    """

    def __init__(
        self, old: Snapshot, old_reader: ChunkReader, new: Snapshot, new_reader: ChunkReader
    ) -> None:
        self._old, self._new = ChunkRows(old, old_reader), ChunkRows(new, new_reader)
        self._whole_old = TensorBytes(old, old_reader)
        self._whole_new = TensorBytes(new, new_reader)

    def stats(
        self, pairs: Sequence[Pair], progress: Callable[[int], None] | None = None
    ) -> list[ValueStats]:
        """Figures of tensors, in order; `progress` is told the bytes read of the new step."""
        sums = [
            Sums(pair.new.dtype, prod(pair.new.shape), without_repeats(pair.old, pair.new)[1])
            for pair in pairs
        ]
        for number, old, new in self._pieces(pairs):
            sums[number].add(old, new)
            if progress is not None:
                progress(len(new))
        return [one.stats() for one in sums]

    def _pieces(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, memoryview, memoryview]]:
        """(number of the pair, bytes before, bytes after), whole elements each."""
        numbers: list[int] = []
        before: list[tuple[TensorView, NDArray[Any]]] = []
        after: list[tuple[TensorView, NDArray[Any]]] = []
        for number, pair in enumerate(pairs):
            by_chunk = self._old.whole_elements(pair.old) and self._new.whole_elements(pair.new)
            if pair.chunks is not None and by_chunk:
                numbers.append(number)
                before.append((pair.old, pair.chunks))
                after.append((pair.new, pair.chunks))
                continue
            size = BATCH // 64 * 64  # a multiple of every element's width
            (of_old, of_new), _ = without_repeats(pair.old, pair.new)
            whole_old = _cut(self._whole_old.tensor(of_old), size)
            whole_new = _cut(self._whole_new.tensor(of_new), size)
            for old, new in zip(whole_old, whole_new, strict=True):
                yield number, old, new
        together = zip(self._old.many(before), self._new.many(after), strict=True)
        for (index, old), (_, new) in together:
            yield numbers[index], old, new


def _cut(source: Iterator[memoryview], size: int) -> Iterator[memoryview]:
    """The bytes of `source` cut anew, into private pieces of `size` bytes (the last is shorter)."""
    held = bytearray()
    for data in source:
        held += data
        while len(held) >= size:
            yield memoryview(bytes(held[:size]))
            del held[:size]
    if held:
        yield memoryview(bytes(held))


def bytes_to_read(comparison: Comparison) -> int:
    """About how many bytes of the new step `add_values` will read."""
    by_path = {change.path: change for change in comparison.tensors}
    return sum(
        tensor_nbytes(pair.new) if pair.chunks is None else by_path[path].changed_bytes
        for path, pair in comparison.pairs.items()
    )


def add_values(
    comparison: Comparison, reader: ValueReader, progress: Callable[[int], None] | None = None
) -> Comparison:
    """`comparison` with figures of the elements of every changed tensor.

    Tensors that only seemed to differ (their chunks could not be compared, or bytes between their
    elements differ) are dropped.
    """
    kept: list[TensorChange] = []
    same_bytes = 0
    paths = list(comparison.pairs)
    found = dict(zip(paths, reader.stats(list(comparison.pairs.values()), progress), strict=True))
    for change in comparison.tensors:
        stats = found.get(change.path)
        if stats is None:
            kept.append(change)
            continue
        if stats.changed_elements == 0 and not change.attributes:
            same_bytes += change.changed_bytes
            continue
        if change.change == "unproven":
            change = dataclasses.replace(change, change="changed")
        kept.append(dataclasses.replace(change, values=stats))
    changed_bytes = max(0, comparison.changed_bytes - same_bytes)
    return dataclasses.replace(comparison, tensors=kept, changed_bytes=changed_bytes)
