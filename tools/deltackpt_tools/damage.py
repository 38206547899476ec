"""Damage that is met while tensors are read, told with their names."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import cast

from deltackpt_store.errors import CorruptionError
from deltackpt_store.manifest import Snapshot

_SHOWN = 5


@contextmanager
def naming_tensors(snapshot: Snapshot) -> Generator[None, None, None]:
    """Within the block, the CorruptionError of a reader names the tensors of `snapshot` that have
    the chunks which cannot be read (``context["tensors"]``)."""
    try:
        yield
    except CorruptionError as error:
        tensors = _tensors(snapshot, error)
        if not tensors:
            raise
        names = ", ".join(map(repr, tensors[:_SHOWN]))
        more = f", ... ({len(tensors)} in all)" if len(tensors) > _SHOWN else ""
        raise CorruptionError(
            f"damaged in {names}{more}: {error.message}",
            kind=error.kind, hint=error.hint, **{**error.context, "tensors": tuple(tensors)},
        ) from error  # fmt: skip


def _tensors(snapshot: Snapshot, error: CorruptionError) -> list[str]:
    lost = frozenset(cast("Iterable[bytes]", error.context.get("ids", ())))
    hit = {
        extent
        for extent, ids in snapshot.chunks.items()
        if lost and any(row.tobytes() in lost for row in ids)
    }
    paths = snapshot.layout.paths
    return [paths[view.slot] for view in snapshot.layout.tensors if view.extent in hit]
