"""What may go: packs, manifests, retired commits and unfinished files that nothing needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltackpt_store.fileio import TEMPORARY_PREFIX, FileIO, is_link
from deltackpt_store.leases import live_leases
from deltackpt_store.mark import Marking
from deltackpt_store.names import is_digest_name, is_pack_folder
from deltackpt_store.oserror import storage_error
from deltackpt_store.roots import Retired, Roots
from deltackpt_store.store import Store

CACHE = "cache"


@dataclass(slots=True)
class Doomed:
    """What one marking found unneeded. `leftovers` are paths relative to the store."""

    packs: set[str] = field(default_factory=set[str])
    manifests: set[bytes] = field(default_factory=set[bytes])
    commits: list[Retired] = field(default_factory=list[Retired])
    leftovers: set[str] = field(default_factory=set[str])

    @property
    def nothing(self) -> bool:
        return not (self.packs or self.manifests or self.commits or self.leftovers)


def unneeded(store: Store, roots: Roots, marking: Marking, lying: Iterable[str]) -> Doomed:
    """Everything in the store that `roots` do not need. StorageError.

    Of `lying`, the unfinished files, those that a live writer may still be working on stay.
    """
    path = f"{store.path}/manifests"
    try:
        manifests = {bytes.fromhex(n) for n in store.io.list(path) if is_digest_name(n)}
    except OSError as error:
        raise storage_error(error, "list", path) from error
    try:
        live, _ = live_leases(store.io, store.path)
    except OSError as error:
        raise storage_error(error, "read the leases of", store.path) from error
    return Doomed(
        packs=set(marking.catalogue.names) - marking.keeping(),
        manifests=manifests - roots.manifests,
        commits=list(roots.retired),
        leftovers={name for name in lying if not any(writer in name for writer in live)},
    )


def leftovers(io: FileIO, root: str) -> set[str]:
    """All unfinished files, as paths relative to the store (StorageError). Folders that are
    symbolic links are not looked into."""
    found: set[str] = set()
    try:
        directories = ["", "manifests", "pins", "gc"]
        directories += [
            f"packs/{name}" for name in io.list(f"{root}/packs") if is_pack_folder(name)
        ]
        directories += [f"runs/{name}" for name in io.list(f"{root}/runs")]
        for directory in directories:
            if "/" in directory and is_link(f"{root}/{directory}"):
                continue
            try:
                names = io.list(f"{root}/{directory}")
            except NotADirectoryError:
                continue
            except FileNotFoundError:
                if directory == "gc":
                    continue  # never collected
                raise
            start = f"{directory}/" if directory else ""
            found.update(start + name for name in names if name.startswith(TEMPORARY_PREFIX))
    except OSError as error:
        raise storage_error(error, "list the unfinished files of", root) from error
    with contextlib.suppress(OSError):  # the cache may be missing, or another user's
        names = io.list(f"{root}/{CACHE}")
        found.update(f"{CACHE}/{name}" for name in names if name.startswith(TEMPORARY_PREFIX))
    return found
