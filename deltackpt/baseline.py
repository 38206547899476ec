"""What the next save is compared with: change tables, and which of them the writer can build on.

The newest staged save is the best baseline, but it counts only as long as it does not fail; the
last durable step always counts. After a restore the restored commit becomes the baseline, as far
as its chunks are proven to be what the live objects hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from blake3 import blake3
from deltackpt_store.client import WriterClient
from deltackpt_store.manifest import Commit
from deltackpt_store.protocol import ExtentKey, extent_keys
from deltackpt_store.store import Store

from .detect import HASH_BYTES, ChangeTable


@dataclasses.dataclass(frozen=True, slots=True)
class Baseline:
    """A change table and the names under which the writer knows the same content.

    `save` is a save of `client`; `commit` is (run, number) once it is durable. Without either,
    everything is staged.
    """

    table: ChangeTable
    client: WriterClient | None = None
    save: int | None = None
    commit: tuple[str, int] | None = None


NOTHING = Baseline({})


class Baselines:
    """The baselines of one checkpointer. Not locked: its owner serialises the calls."""

    def __init__(self) -> None:
        self._newest = NOTHING
        self._durable = NOTHING
        self.parent: Commit | None = None
        """The commit that was restored, until a save that continues it is durable."""

    def best_for(self, client: WriterClient) -> Baseline:
        """The newest baseline that `client`'s writer can build on."""
        newest = self._newest
        if newest.commit is not None or newest.client is client:
            return newest
        return self._durable

    def staged(self, table: ChangeTable, client: WriterClient, save: int) -> None:
        """`save` is handed over whole: the next save is compared with it."""
        self._newest = Baseline(table, client, save)

    def committed(
        self, table: ChangeTable, client: WriterClient, save: int, commit: tuple[str, int]
    ) -> None:
        """`save` is durable: from here on it can be fallen back to."""
        self._durable = Baseline(table, client, save, commit)
        self.parent = None
        if self._newest.client is client and self._newest.save == save:
            self._newest = self._durable

    def failed(self, *, lost: bool = False) -> None:
        """A save failed, and with it whatever may have relied on it: fall back.

        `lost`: what earlier saves have stored may be gone, so that nothing can be built upon.
        """
        if lost:
            self._durable = NOTHING
        self._newest = self._durable

    def restored(self, commit: Commit) -> None:
        """The live objects are something else now; saves continue `commit`."""
        self._newest = self._durable = NOTHING
        self.parent = commit

    def proven(self, table: ChangeTable, commit: Commit) -> None:
        """`table` describes `commit`; counts unless something else was staged or restored since."""
        if self._newest is NOTHING and self.parent == commit:
            self._newest = self._durable = Baseline(table, commit=(commit.run, commit.number))


def proven_table(
    store: Store,
    commit: Commit,
    chunks: Iterable[tuple[ExtentKey, int, bytes, memoryview]],
) -> dict[ExtentKey, bytearray]:
    """The change table of `commit`, from (key, index, change hash, private copy) of live chunks.

    Only a chunk whose BLAKE3 is the id that the commit records enters the table. Change hash and
    id are of the same private bytes, so this holds whatever a restore converted and whatever
    modifies the live tensors meanwhile.
    """
    snapshot = store.snapshot(commit)
    extents = {key: extent for extent, key in enumerate(extent_keys(snapshot.layout))}
    table: dict[ExtentKey, bytearray] = {}
    for key, index, digest, data in chunks:
        extent = extents.get(key)
        if extent is None:
            continue
        ids = snapshot.chunks[extent]
        if blake3(data).digest() == ids[index].tobytes():
            hashes = table.setdefault(key, bytearray(HASH_BYTES * len(ids)))
            hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)] = digest
    return table
