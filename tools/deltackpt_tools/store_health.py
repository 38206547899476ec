"""The state of a store as a whole, for the report: sizes, what nothing needs, damage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from deltackpt_store.oserror import storage_error
from deltackpt_store.store import Store
from numpy.typing import NDArray

from deltackpt_tools.frames import Record
from deltackpt_tools.stored_chunks import StoredChunks, joined
from deltackpt_tools.usage import measure_files


@dataclass(frozen=True, slots=True)
class Health(Record):
    """The state of the store as a whole. Sizes in bytes."""

    total_bytes: int
    packs: int
    pack_bytes: int
    manifest_bytes: int
    referenced_bytes: int
    unreferenced_bytes: int
    duplicate_bytes: int
    overhead_bytes: int
    commits: int
    retired: int
    """Steps that retention has taken off the list and collection has not removed yet."""
    pins: tuple[str, ...]
    verified: str | None
    """Level at which the store was verified now; None when it was not."""
    findings: tuple[tuple[str, str, str], ...]
    """Damage: (kind, name, reason)."""
    unreadable: tuple[tuple[str, str], ...]


def health_of(
    store: Store,
    keys: list[NDArray[np.uint64]],
    commits: int,
    level: str | None,
    run: str | None,
    unreadable: list[tuple[str, str]],
) -> Health:
    """Measure a store of `commits` commits, whose chunks have the `keys`, and verify it (or only
    what `run` needs) at that level, if any."""
    chunks = StoredChunks(store)
    places, known = chunks.find(np.unique(joined(keys, np.uint64)))
    reached = chunks.closure(places[known])
    distinct = int(chunks.stored.sum())
    referenced = int(chunks.stored[reached].sum())
    files, _ = measure_files(store)  # `du` tells what could not be measured
    if level is None:  # else it is found
        unreadable = [*unreadable, *chunks.unreadable]
    findings: list[tuple[str, str, str]] = []
    if level is not None:
        from typing import cast

        from deltackpt_store.verify import Level, verify

        checked = verify(store, level=cast("Level", level), run=run)
        findings = [(one.kind, one.name, one.reason) for one in checked.findings]
    return Health(
        total_bytes=files.total,
        packs=files.count.get("packs", 0),
        pack_bytes=files.bytes.get("packs", 0),
        manifest_bytes=files.bytes.get("manifests", 0),
        referenced_bytes=referenced,
        unreferenced_bytes=distinct - referenced,
        duplicate_bytes=chunks.all_stored - distinct,
        overhead_bytes=files.bytes.get("packs", 0) - chunks.all_stored,
        commits=commits,
        retired=_retired(store),
        pins=tuple(sorted(store.pins())),
        verified=level,
        findings=tuple(findings),
        unreadable=tuple(unreadable),
    )


def _retired(store: Store) -> int:
    from deltackpt_store.names import RETIRED_SUFFIX

    count = 0
    for run in store.runs():
        folder = f"{store.path}/runs/{run}"
        try:
            names = store.io.list(folder)
        except OSError as error:
            raise storage_error(error, "list", folder) from error
        count += sum(1 for name in names if name.endswith(RETIRED_SUFFIX))
    return count
