"""The last part of a save: manifest (base or delta), then the numbered commit.

Everything the manifest names is durable when this is called; what is left is to write the
manifest durably and to create the commit, which makes the step exist.
"""

from __future__ import annotations

import os

from deltackpt_store.errors import StorageError
from deltackpt_store.lineage import Lineage
from deltackpt_store.lost_commits import read_boundary
from deltackpt_store.manifest import Commit, Layout, Snapshot
from deltackpt_store.manifest_io import to_base, to_delta
from deltackpt_store.names import highest_number
from deltackpt_store.oserror import storage_error
from deltackpt_store.pending_save import PendingSave
from deltackpt_store.protocol import Finish
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter


class Publisher:
    """Commits the saves of one run. Used by one thread.

    Keeps one base snapshot in memory; a delta is written against it while the layout stays and
    the delta is small (`to_delta` judges), otherwise a new base.
    """

    def __init__(
        self, store: Store, run: str, writer: StoreWriter, lineage: Lineage, *,
        versions: dict[str, str],
    ) -> None:  # fmt: skip
        self._store = store
        self._run = run
        self._writer = writer
        self._lineage = lineage
        self._versions = versions
        self._base: Snapshot | None = None  # its digest is set
        self._number: int | None = self._highest_number()

    def known_layout(self, layout: Layout) -> Layout:
        """`layout`, or the equal one that the base has (one object lets snapshots share)."""
        if self._base is not None and self._base.layout == layout:
            return self._base.layout
        return layout

    def continue_from(self, commit: Commit, snapshot: Snapshot) -> None:
        """Write further deltas against the base of a commit whose `snapshot` has been read."""
        base = snapshot if commit.base is None else self._store.snapshot(commit.base)
        base.digest = commit.manifest if commit.base is None else commit.base
        self._base = base

    def forget(self, manifests: frozenset[bytes]) -> None:
        """Write no deltas against any of these: they are being collected."""
        if self._base is not None and self._base.digest in manifests:
            self._base = None

    def publish(
        self, save: PendingSave, message: Finish, stats: dict[str, float]
    ) -> tuple[Commit, bool]:
        """Commit a complete save whose blobs are durable; returns whether it made a new base.

        Durable on return. Raises `StorageError`; `ConflictError` when somebody else committed to
        the run, or the step does not come after the one it would continue.
        """
        self._writer.heed()
        packs = save.table.packs()
        snapshot = Snapshot(
            save.table.layout, message.objects, message.inline, save.table.chunks,
            message.environment, packs=tuple(sorted(packs)),
        )  # fmt: skip
        self._lineage.check(save.step, overwrite=save.overwrite, begun=None)
        parent = self._lineage.parent_of(save.step)
        if not self._writer.look_for(
            parent, packs, None if self._base is None else self._base.digest
        ):
            self._base = None
        base, manifest = self._base, None
        if base is not None and base.digest is not None:
            manifest = to_delta(base.digest, base, snapshot, packs)
        if manifest is None:
            base, manifest = None, to_base(snapshot, packs)
        closure = {*manifest.packs, *(base.packs if base is not None else ())}
        digest = self._writer.write_manifest(manifest)
        if self._number is None:
            self._number = self._highest_number()
        if parent is not None and parent.run == self._run:
            self._number = max(self._number, parent.number)  # also where its record is lost
        try:
            commit = self._writer.commit(
                run=self._run, step=save.step, parent=parent, manifest=digest,
                base=None if base is None else base.digest, root=manifest.root, packs=closure,
                number=self._number + 1, versions=self._versions, metrics=message.metrics,
                stats=stats,
            )  # fmt: skip
        except StorageError:
            self._number = None  # the number may be taken all the same: look before the next one
            raise
        self._number = commit.number
        self._lineage.head = commit
        if base is None:
            snapshot.digest = digest
            self._base = snapshot
        return commit, base is None

    def _highest_number(self) -> int:
        """The largest commit number that was ever taken in this run and still shows, or 0. Where
        all of the run was collected, the boundary shows it."""
        directory = os.path.join(self._store.path, "runs", self._run)
        try:
            names = self._store.io.list(directory)
        except OSError as error:
            raise storage_error(error, "list", directory) from error
        return max(highest_number(names), read_boundary(self._store).get(self._run, 0))
