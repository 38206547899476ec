"""Repairing a store with the help of a state that is still in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from blake3 import blake3
from deltackpt_store.errors import DeltackptError, InvalidInputError, told
from deltackpt_store.repair import RepairReport
from deltackpt_store.repair import repair as repair_store
from deltackpt_store.settling import ACK_SECONDS
from deltackpt_store.store import Store
from torch import Tensor

from .capture import capture, everything
from .detect import memory
from .options import CHUNK_BYTES, check_flags, check_mapping, check_threads
from .policy import check_seconds


def repair(
    store: Store | str | os.PathLike[str],
    *,
    sources: Iterable[Store | str | os.PathLike[str]] = (),
    state: Mapping[Any, Any] | None = None,
    dry_run: bool = False,
    timeout: float = ACK_SECONDS,
    threads: int | None = None,
) -> RepairReport:
    """Verify every byte of `store` and put right what is damaged, as far as a copy exists.

    Copies are looked for in the store itself, in other stores (`sources`), and in a live `state`
    as a Checkpointer is given one: its tensors are cut and hashed as a save does, and a chunk that
    has the id of a lost one is that chunk. Nothing of `state` changes; call it between two steps.
    Damaged files are moved to ``quarantine``, never deleted; what is put right is durable when
    this returns. Safe beside running trainings (their writers are waited for, `timeout` seconds at
    most) and to interrupt: run it again. `dry_run` writes nothing. `threads` verify in parallel.

    `report.ok` tells whether all is whole now, `report.lost` which bytes of which tensors of which
    steps are not. Raises `InvalidInputError` for an unusable option, `NotFoundError` and
    `UnsupportedFormatError` for what cannot be opened, `CorruptionError` when neither the store nor
    a copy tells which steps there are, or what FORMAT held, `ConflictError` when a collection or
    another repair runs, and `StorageError`.
    """
    check_flags(dry_run=dry_run)
    check_threads(threads)
    timeout = check_seconds("timeout", timeout)
    providers = _checked(sources)
    if state is not None:
        check_mapping(state)
        providers.append(_State(store, state))
    return repair_store(store, sources=providers, dry_run=dry_run, timeout=timeout, threads=threads)


def _checked(sources: Any) -> list[Any]:
    if isinstance(sources, Iterable) and not isinstance(sources, (str, bytes)):
        found = list(cast("Iterable[Any]", sources))
        if all(isinstance(one, (Store, str, os.PathLike)) for one in found):
            return found
    raise InvalidInputError(
        "sources must be a sequence of stores, got " + told(cast("object", sources)),
        option="sources",
        hint="write sources=[one]",
    )


class _State:
    """The chunks of a live state (see `ChunkSource`)."""

    name = "the state in memory"

    def __init__(self, store: Store | str | os.PathLike[str], state: Mapping[Any, Any]) -> None:
        self._store = store
        self._state = state

    def find(self, wanted: Mapping[bytes, int]) -> Iterator[tuple[bytes, memoryview]]:
        """Hash all of the state, in pieces of the sizes that the store's steps are cut into."""
        lengths = set(wanted.values())
        sizes = sorted(self._sizes())
        taken = capture(self._state, chunk_bytes=CHUNK_BYTES, live=everything)
        try:
            for source in taken.sources.values():
                if source.arrived is not None:
                    source.arrived.synchronize()
                data = source.data.cpu()
                for size in sizes:
                    yield from _found(data, size, lengths, wanted)
        finally:
            taken.release()

    def _sizes(self) -> set[int]:
        """All chunk sizes that steps of the store use."""
        sizes: set[int] = set()
        with contextlib.suppress(DeltackptError):
            where = self._store
            store = Store.open(where.path, io=where.io) if isinstance(where, Store) else (
                Store.open(where)
            )  # fmt: skip
            for run in store.runs():
                for commit in store.commits(run):
                    with contextlib.suppress(DeltackptError):
                        layout = store.snapshot(commit).layout
                        sizes.update(extent.chunk_bytes for extent in layout.extents)
        return sizes or {CHUNK_BYTES}


def _found(
    data: Tensor, size: int, lengths: set[int], wanted: Mapping[bytes, int]
) -> Iterator[tuple[bytes, memoryview]]:
    view = memory(data)
    for start in range(0, len(view), size):
        piece = view[start : start + size]
        if len(piece) in lengths or 0 in lengths:
            chunk_id = blake3(piece).digest()
            if chunk_id in wanted:
                yield chunk_id, piece
