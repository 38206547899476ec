"""Where the bytes are by module: stored chunks counted by the parts of the model that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from deltackpt_store.errors import DeltackptError
from deltackpt_store.store import Store
from numpy.typing import NDArray

from deltackpt_tools.chunk_states import Keys
from deltackpt_tools.frames import Record
from deltackpt_tools.module_paths import Depth, folding, natural
from deltackpt_tools.stored_chunks import StoredChunks, chunk_keys, joined
from deltackpt_tools.usage import all_commits


@dataclass(frozen=True, slots=True)
class ModuleUsage(Record):
    """Stored bytes that the tensors below one prefix hold, over all steps, each chunk once."""

    module: str
    total_bytes: int
    unique_bytes: int
    """Of chunks that no other module holds: what would become free without it."""
    newest_bytes: int
    """What the newest step of any run that has the module needs for it."""
    chunks: int

    @property
    def shared_bytes(self) -> int:
        return self.total_bytes - self.unique_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "shared_bytes": self.shared_bytes}


def measure_modules(
    store: Store, depth: Depth, progress: Callable[[int, int], None] | None = None
) -> list[ModuleUsage]:
    """Add up by module of `depth` parts ("auto": as suits the newest steps), the largest first.

    Reads commits, manifests and pack tables. Steps that cannot be read are passed over (`measure`
    lists them).

    Bytes that several tensors share count for each of their modules, and as unique for none. What
    a chunk is coded against counts for the module as well.
    """
    held = StoredChunks(store)
    keys: dict[str, list[Keys]] = {}
    commits = [commit for _, of_run in all_commits(store, []) for commit in of_run]
    seen: dict[str, list[NDArray[np.uint8]]] = {}
    fold = folding(depth, _newest_paths(store) if depth == "auto" else ())
    for done, commit in enumerate(commits):
        try:
            snapshot = store.snapshot(commit)
        except DeltackptError:
            continue
        arrays: dict[str, list[NDArray[np.uint8]]] = {}
        layout = snapshot.layout
        for view in layout.tensors:
            ids = snapshot.chunks.get(view.extent)
            if ids is not None:
                arrays.setdefault(fold(layout.paths[view.slot]), []).append(ids)
        for module, present in arrays.items():
            before = seen.get(module, [])
            seen[module] = present
            keys.setdefault(module, []).extend(_fresh(before, present))
        if progress is not None:
            progress(done + 1, len(commits))
    places = {module: _places(held, wanted) for module, wanted in keys.items()}
    newest = {m: _places(held, [chunk_keys(ids) for ids in seen[m]]) for m in keys}
    holders = np.zeros(len(held.keys), np.int32)
    for mine in places.values():
        holders[mine] += 1
    found: list[ModuleUsage] = []
    for module, mine in places.items():
        stored = held.stored[mine]
        found.append(
            ModuleUsage(
                module=module,
                total_bytes=int(stored.sum()),
                unique_bytes=int(stored[holders[mine] == 1].sum()),
                newest_bytes=int(held.stored[newest[module]].sum()),
                chunks=len(mine),
            )
        )
    return sorted(found, key=lambda one: (-one.total_bytes, natural(one.module)))


def _newest_paths(store: Store) -> list[str]:
    """Paths of the tensors of each run's newest step, of those that can be read."""
    paths: dict[str, None] = {}
    for _, commits in all_commits(store, []):
        for commit in commits[-1:]:
            with contextlib.suppress(DeltackptError):
                layout = store.snapshot(commit).layout
                paths.update(dict.fromkeys(layout.paths[view.slot] for view in layout.tensors))
    return list(paths)


def _fresh(before: list[NDArray[np.uint8]], present: list[NDArray[np.uint8]]) -> list[Keys]:
    """Keys of the chunks in `present` that do not lie in the same place of `before`."""
    if [len(ids) for ids in before] != [len(ids) for ids in present]:
        return [chunk_keys(ids) for ids in present]
    pairs = [(a, b) for a, b in zip(before, present, strict=True) if a is not b]
    return [chunk_keys(b[(a != b).any(axis=1)]) for a, b in pairs]


def _places(held: StoredChunks, keys: list[Keys]) -> NDArray[np.intp]:
    places, known = held.find(np.unique(joined(keys, np.uint64)))
    return held.closure(places[known])
