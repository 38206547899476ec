"""A writer's standing with garbage collection: what it must not build upon, and whether it may.

Rules (see `gc`). A writer takes a lease before it looks at anything; takes what the newest
generation condemns out of all it may build upon, except its claims, and acknowledges; and after
each commit makes sure that no collection can have passed it by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    StateError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.generation import Generation, newest_number, read_generation
from deltackpt_store.leases import NOTHING, Claims, Lease
from deltackpt_store.manifest import Commit
from deltackpt_store.mark import mark
from deltackpt_store.oserror import storage_error
from deltackpt_store.roots import Roots
from deltackpt_store.store import Store

_log = logging.getLogger("deltackpt.store.gc")

Claim = Callable[[Generation], Claims]
"""Which of what a generation condemns the writer still builds upon."""


class Standing:
    """Used by one thread. Owns the lease."""

    def __init__(self, io: FileIO, root: str, writer: str, lease: Lease | None = None) -> None:
        self.generation = Generation()
        self.packs: frozenset[str] = frozenset()
        """Packs that count as absent."""
        self.manifests: frozenset[bytes] = frozenset()
        """Manifests that count as absent."""
        self._io = io
        self._root = root
        self._writer = writer
        self._lease = lease
        self._entered = False
        self._owed: Claims | None = None  # acknowledgement that could not be written yet
        self._doubted = False  # the generation of the number that was heeded may be another one
        self.strict = False
        """What this writer builds upon may be gone (a collection may have passed it by, or somebody
        has taken files away): every commit is proved."""

    @property
    def seen(self) -> int:
        """Number of the newest generation that has been heeded."""
        return self.generation.number

    def heed(self, claim: Claim) -> bool:
        """Learn of a newer generation, if there is one, and acknowledge it; returns whether.

        The first call takes the lease. StorageError when the store cannot be looked at; what
        cannot be acknowledged yet is tried again at the next call.
        """
        if not self._entered:
            if self._lease is None:
                self._lease = Lease.take(self._io, self._root, self._writer)
            self._entered = True
        if self._owed is not None:
            self._acknowledge(self._owed)
        number = self._newest()
        if number == self.seen and not self._doubted:
            return False
        try:
            generation = read_generation(self._io, self._root, number)
        except (CorruptionError, UnsupportedFormatError, StorageError) as error:
            # Not heeded, so not acknowledged: the collection waits, and commits are safe.
            _log.warning("%s", error)
            return False
        protected = self.leased
        claims = claim(generation) if protected else NOTHING
        if not protected:
            self.strict = True
        self.packs = generation.packs - claims.packs
        self.manifests = generation.manifests - claims.manifests
        self.generation = generation
        self._doubted = False
        if protected:
            self._acknowledge(claims)
        return True

    def _acknowledge(self, claims: Claims) -> None:
        assert self._lease is not None
        self._owed = claims
        try:
            self._lease.acknowledge(self.seen, claims)
            self._owed = None
        except StorageError as error:
            _log.warning("%s", error)

    @property
    def leased(self) -> bool:
        """Whether the lease still lies in the store: no collection has passed this writer by."""
        return self._lease is not None and self._lease.intact()

    def _newest(self) -> int:
        try:
            return newest_number(self._io, self._root)
        except OSError as error:
            raise storage_error(error, "look for a collection in", self._root) from error

    # commits -------------------------------------------------------------------------------

    def settle(self, commit: Commit, path: str) -> None:
        """Make sure that the commit just created at `path` counts, or take it back.

        While the lease is intact a collection that this writer has not acknowledged is still going
        to see the commit. Without one everything it needs is looked up again; but where there are
        no locks, only when the generation has moved since that was looked up first.

        ConflictError when its number was passed by, StateError (kind ``collected``) when what it
        builds upon may have been deleted: the commit is gone again, and nobody was told of it.
        """
        leased = self.leased
        number = self._newest()
        generation: Generation | None = self.generation
        if number != self.seen or not leased:  # numbers start over where somebody has emptied gc/
            try:
                generation = read_generation(self._io, self._root, number)
            except DeltackptError as error:
                _log.warning("%s", error)
                generation = None
        if generation is not None and commit.number <= generation.boundary.get(commit.run, 0):
            self._withdraw(path)
            raise ConflictError(
                f"commit {commit.number} of run {commit.run!r} was made and collected before",
                kind="commit-taken", run=commit.run, number=commit.number, step=commit.step,
                hint="let one writer at a time save to a run, or give this one its own run",
            )  # fmt: skip
        if not self.strict and (leased or (self._lease is None and number == self.seen)):
            return
        self.strict = True
        if generation is not None and _is_whole(self._io, self._root, commit, generation):
            return
        self._doubted = True
        self._withdraw(path)
        raise StateError(
            f"step {commit.step} of run {commit.run!r} builds upon what is gone from the store:"
            " somebody has deleted files or put an older copy in its place, or garbage collection"
            " took this writer for dead",
            kind="collected",
            hint="save the step again: what is gone is stored anew; if it comes again, check that"
            " file locks work on this file system",
            run=commit.run,
            step=commit.step,
        )

    def _withdraw(self, path: str) -> None:
        try:
            self._io.unlink(path)
            self._io.sync_directory(path.rsplit("/", 1)[0])
        except OSError as error:
            raise storage_error(error, "take back the commit", path) from error

    def close(self) -> None:
        """Nothing more is committed."""
        if self._lease is not None:
            self._lease.release()


def _is_whole(io: FileIO, root: str, commit: Commit, generation: Generation) -> bool:
    """Whether everything the commit needs lies outside what the generation condemns."""
    if not generation.manifests.isdisjoint(d for d in (commit.manifest, commit.base) if d):
        return False
    roots = Roots(commits={(commit.run, commit.number): commit})
    try:
        mark(Store.open(root, io=io), roots, without=generation.packs)
    except (CorruptionError, UnsupportedFormatError) as error:
        _log.warning("%s", error)
        return False
    return True
