"""What is the same for every save with one layout, on one device; and what must hold of sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import ExtentKey, extent_keys
from numpy.typing import NDArray

from ..detect import HASH_BYTES, ChangeTable, staging_order
from ..restless import torn
from ..sources import Sign, Source, parted
from ..stage import not_comparable
from .table import ChunkTable

Digests = NDArray[np.uint8]  # shape (rows, 16), canonical bytes


class DevicePlan:
    """Rows of the chunk table for the extents of one device; live extents come first.

    ``extents[position]`` is the extent number of each position in the table, ``keys`` and
    ``paths`` go with the positions.
    """

    def __init__(
        self,
        layout: Layout,
        sources: Mapping[int, Source],
        *,
        scratch_bytes: int,
        blocks_per_program: int,
    ) -> None:
        self.layout = layout
        self._signature = live, private = parted(sources)
        live, private = staging_order(layout, live), staging_order(layout, private)
        self.extents = np.array([*live, *private], np.int64)
        specs = [layout.extents[extent] for extent in (*live, *private)]
        self.table = ChunkTable(
            [(spec.nbytes, spec.chunk_bytes) for spec in specs],
            scratch_bytes=scratch_bytes,
            blocks_per_program=blocks_per_program,
        )
        keys = extent_keys(layout)
        self.keys: list[ExtentKey] = [keys[extent] for extent in (*live, *private)]
        self.live_rows = int(self.table.starts[len(live)])

    def fits(self, layout: Layout, sources: Mapping[int, Source]) -> bool:
        return layout is self.layout and parted(sources) == self._signature

    def addresses(self, sources: Mapping[int, Source]) -> list[int]:
        return [sources[extent].address for extent in self.extents.tolist()]

    def digests_of(self, table: ChangeTable) -> Digests:
        """The rows of a change table, zeros (which equal no digest) for what it does not hold."""
        rows = np.zeros((self.table.count, HASH_BYTES), np.uint8)
        for position, key in enumerate(self.keys):
            start, end = self._span(position)
            hashes = table.get(key)
            if hashes is not None and len(hashes) == (end - start) * HASH_BYTES:
                rows[start:end] = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
        return rows

    def table_of(
        self, digests: Digests, before: Mapping[ExtentKey, bytes], changed: Iterable[int]
    ) -> dict[ExtentKey, bytes]:
        """The change table of these digests; entries of unchanged positions are those `before`."""
        new = dict(before)
        for position in changed:
            start, end = self._span(position)
            new[self.keys[position]] = digests[start:end].tobytes()
        return new

    def _span(self, position: int) -> tuple[int, int]:
        return int(self.table.starts[position]), int(self.table.starts[position + 1])


def words_of(digests: Digests) -> NDArray[np.uint64]:
    """Canonical digest bytes as (low, high) words: the inverse of `xxh3.digest_bytes`."""
    high_low = np.ascontiguousarray(digests).view(">u8").reshape(-1, 2)
    return np.ascontiguousarray(high_low[:, ::-1]).astype(np.uint64)


def check_sizes(
    sources: Mapping[int, Source], extents: Sequence[int], paths: Sequence[str]
) -> None:
    """Raise :func:`torn` for a live source whose storage was shrunk or freed in the meantime."""
    for extent, path in zip(extents, paths, strict=True):
        if sources[extent].live and sources[extent].gone:
            raise torn([path])


def check_versions(
    sources: Mapping[int, Source],
    versions: Mapping[int, Sign],
    extents: Sequence[int],
    paths: Sequence[str],
) -> None:
    """Raise :func:`torn` for a live tensor whose address or version moved since the save's call."""
    moved: list[str] = []
    for extent, path in zip(extents, paths, strict=True):
        noted = versions.get(extent)
        if noted and sources[extent].sign != noted:
            moved.append(path)
    if moved:
        raise torn(moved)


def check_still(
    sources: Mapping[int, Source],
    table: ChangeTable,
    keys: Mapping[int, ExtentKey],
    changed: Iterable[int],
) -> None:
    """Raise :func:`torn` for extents that changed and ought not to, as far as `table` knows them.

    `keys` are those of the device's extents.
    """
    still = [extent for extent in keys if sources[extent].still]
    if any(keys[extent] not in table for extent in still):
        raise not_comparable()
    moved = sorted(set(still).intersection(changed))
    if moved:
        raise torn([keys[extent][0] for extent in moved])
