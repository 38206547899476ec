"""Bringing lost commits back from copies of the store.

A commit that is gone is made again only when everything that it needs lies in durable packs: as
long as that is not so, an older step that can be restored is the better newest one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.fileio import make_directories, publish_bytes
from deltackpt_store.impact import NeededChunks
from deltackpt_store.lost_commits import LostCommit, lost_commits, numbers_there, read_boundary
from deltackpt_store.manifest import ID_BYTES, Commit, Ids, Snapshot
from deltackpt_store.manifest_io import decode_commit
from deltackpt_store.repair_records import Left, Mended, RecordRepair
from deltackpt_store.store import Store
from deltackpt_store.verify import Finding, Hit


class _Copy(NamedTuple):
    """A copy of a lost commit. There may be many: what it names is read when it is needed."""

    commit: Commit
    data: bytes
    source: str
    store: Store
    """It holds the commit's manifests."""
    manifests: list[str]
    """Paths of those that are gone from the store that is repaired."""

    @property
    def snapshot(self) -> Snapshot:
        return self.store.snapshot(self.commit)


class LostRepair:
    """Used by one thread, under the lock of garbage collection. `found` are the commits that are
    gone, `lost` those that stay so."""

    def __init__(self, store: Store, others: Sequence[Store], *, dry_run: bool) -> None:
        """Look for what is gone. StorageError, UnsupportedFormatError."""
        self.mended: list[Mended] = []
        self.left: list[Left] = []
        self.lost: list[LostCommit] = []
        self._store = store
        self._others = others
        self._dry_run = dry_run
        self._records = RecordRepair(store, others, dry_run=dry_run)
        named = lost_commits(store, _commits(store), read_boundary(store))
        pins = (LostCommit(pin.run, pin.number) for pin in store.pins().values())
        pinned = [one for one in pins if not store.io.exists(f"{store.path}/{one.path}")]
        self.found = sorted({*named, *pinned, *self._only_in_copies()})
        self._copies: dict[LostCommit, _Copy | None] = {one: self._copy(one) for one in self.found}

    def _only_in_copies(self) -> Iterator[LostCommit]:
        """What a copy of this store lists, and is neither here nor collected.

        Of a copy that was written to by itself, what is not of this store's history stays there.
        """
        boundary = read_boundary(self._store)
        for other in self._others:
            if other.uuid != self._store.uuid:
                continue
            there: dict[str, set[int]] = {}
            for run, number in self._records.shared(other):
                if run not in there:
                    there[run] = numbers_there(self._store, run)
                if number not in there[run] and number > boundary.get(run, 0):
                    yield LostCommit(run, number)

    def _copy(self, lost: LostCommit) -> _Copy | None:
        """A copy of the commit and of its manifests."""
        hit = Hit(run=lost.run, number=lost.number)
        finding = Finding(kind="commit", name=lost.path, reason="it is gone", hits=(hit,))
        for source, data in self._records.commit_copies(finding):
            commit = decode_commit(data, name=lost.path)
            for store in (self._store, *self._others):
                with contextlib.suppress(DeltackptError, OSError):
                    store.snapshot(commit)
                    return _Copy(commit, data, source, store, self._manifests(commit))
        return None

    def _manifests(self, commit: Commit) -> list[str]:
        """Those of the commit's manifests that are gone. CorruptionError when no copy has one."""
        found: list[str] = []
        for digest in (commit.manifest, commit.base):
            path = f"manifests/{digest.hex()}" if digest is not None else ""
            if not path or self._store.io.exists(f"{self._store.path}/{path}"):
                continue
            self._manifest(path)
            found.append(path)
        return found

    def _manifest(self, path: str) -> tuple[str, bytes]:
        """Source and content of the manifest at `path`. CorruptionError when no copy has it."""
        copy = next(self._records.manifest_copies(path), None)
        if copy is None:
            raise CorruptionError(f"{path} is gone", kind="damaged-manifest", path=path)
        return copy

    def need(self, needed: NeededChunks) -> None:
        """Add what the commits that can come back need."""
        for copy in self._copies.values():
            if copy is not None:
                needed.add(copy.snapshot)

    def bring_back(self, missing: Iterable[bytes]) -> None:
        """Restore the commits, oldest first, except those that need a chunk of `missing`."""
        gone = frozenset(missing)
        for lost, copy in self._copies.items():
            if copy is None:
                self._leave(lost, "no copy of it was found")
            elif gone and not gone.isdisjoint(_ids(copy.snapshot)):
                self._leave(lost, "chunks that it needs were not found")
            else:
                self._make(lost, copy)

    def _make(self, lost: LostCommit, copy: _Copy) -> None:
        io, root = self._store.io, self._store.path
        known = {one.name for one in self.mended}
        try:
            for path in copy.manifests:
                if path in known:
                    continue
                source, data = self._manifest(path)
                if not self._dry_run:
                    publish_bytes(io, f"{root}/{path}", data)
                self.mended.append(Mended(kind="manifest", name=path, source=source))
            if not self._dry_run:
                make_directories(io, f"{root}/runs/{lost.run}", within=root)
                io.sync_directory(f"{root}/runs")  # who made the folder may have been killed
                publish_bytes(io, f"{root}/{lost.path}", copy.data)
        except CorruptionError as error:
            self._leave(lost, error.message)
        except FileExistsError:
            self._leave(lost, "its number was taken by a running save")
        except OSError as error:
            self._leave(lost, f"it cannot be written: {error.strerror or error}")
        else:
            self.mended.append(Mended(kind="commit", name=lost.path, source=copy.source))

    def _leave(self, lost: LostCommit, why: str) -> None:
        self.lost.append(lost)
        self.left.append(Left(kind="commit", name=lost.path, reason=f"it is gone; {why}"))


def _commits(store: Store) -> Iterator[Commit]:
    for run in store.runs():
        yield from store.commits(run)


def _ids(snapshot: Snapshot) -> set[bytes]:
    tables: Iterable[Ids] = snapshot.chunks.values()
    return {
        row.tobytes() for table in tables for row in table.reshape(-1, ID_BYTES)
    }  # fmt: skip
