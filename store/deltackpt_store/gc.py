"""Garbage collection: the only thing that deletes, and never what anybody reaches or builds upon.

One collection, safe beside any number of writers, readers, compactions and attempts to collect,
and interruptible anywhere (the next one starts again and finds less to do)::

    lock        one collection at a time (``gc/lock``)
    mark        everything that commits, pins and holds reach; give up on anything unreadable
    publish     generation g+1: the packs and manifests that nothing reached are *condemned*
    wait        until every live writer has acknowledged g+1; the dead lose their leases
    mark again  from scratch; what is reached now, or claimed by a writer, is pardoned
    prove       a chunk that leaves with a condemned pack must be readable where it stays
    sync        every directory whose content the second marking has relied on
    delete      packs, then records of retired commits, manifests, unfinished files
    copy        the generation, which alone tells what was collected

Why it is safe. A writer acknowledges g+1 only when it has taken the condemned packs out of
everything it may build upon, or claims them. So what it commits later does not need them, and what
it committed before shows in the second marking. A writer that was taken for dead finds its lease
gone after its commit, and then proves the commit or withdraws it (`StoreWriter.commit`): either it
sees g+1, or the second marking sees its commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from deltackpt_store import leases
from deltackpt_store.doomed import CACHE, Doomed, leftovers, unneeded
from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.generation import (
    Generation,
    newest_number,
    publish_generation,
    read_generation,
    tidy_generations,
)
from deltackpt_store.linked import linked_folders
from deltackpt_store.location import remove_dead_probes
from deltackpt_store.lost_commits import lost_commits, refuse_lost
from deltackpt_store.mark import Marking, mark
from deltackpt_store.names import RETIRED_SUFFIX, number_name, relative_pack_path
from deltackpt_store.oserror import FULL, storage_error
from deltackpt_store.proof import unreadable_after
from deltackpt_store.reserve import make_reserve
from deltackpt_store.roots import Retired, Roots, read_roots
from deltackpt_store.settling import (
    ACK_SECONDS,
    Wait,
    check_newest,
    overtaken,
    patience,
    settle,
)
from deltackpt_store.store import Store
from deltackpt_store.store_locks import collection_lock

_log = logging.getLogger("deltackpt.store.gc")

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total) by the thread that collects."""

_MEND = "`deltackpt verify` tells what is hit, `deltackpt repair --from` mends what a copy has"
_NEWER = "save newer steps, and take the damaged ones off the list with `deltackpt retain`"
_LAST_RESORT = {
    **dict.fromkeys(("missing-chunk", "missing-manifest", "damaged-manifest", "pack"), _NEWER),
    "damaged-commit": "move that file out of the store, and give the step up with `deltackpt gc"
    " --accept-lost`",
}
_FEW_PACKS = 500
"""Condemned at a time when the record of all does not fit onto a full disk."""


@dataclass(slots=True)
class GcReport:
    """What a collection did, or with `dry_run` would do. Sizes in bytes of files."""

    dry_run: bool = False
    generation: int = 0
    packs: list[str] = field(default_factory=list[str])
    manifests: list[str] = field(default_factory=list[str])
    commits: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    leftovers: list[str] = field(default_factory=list[str])
    """Unfinished files of writers that have ended, relative to the store."""
    pack_bytes: int = 0
    pardoned: list[str] = field(default_factory=list[str])
    """Packs condemned at first that turned out to be needed."""
    kept_packs: int = 0
    kept_bytes: int = 0
    writers: int = 0
    """Live writers that were waited for."""
    accepted: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Lost commits that were given up, as `accept_lost` says."""

    @property
    def nothing(self) -> bool:
        return not (self.packs or self.manifests or self.commits or self.leftovers)


def collect(
    store: Store,
    *,
    dry_run: bool = False,
    accept_lost: bool = False,
    timeout: float = ACK_SECONDS,
    avoid: Collection[str] = (),
    wait: Wait | None = None,
    progress: Progress | None = None,
) -> GcReport:
    """Delete what nothing reaches from `store`.

    `accept_lost` gives up commits that are lost (see `lost_commits`): from then on they count as
    collected. `avoid` are packs to be got rid of where other packs hold their chunks too. `timeout`
    (seconds) bounds the wait for live writers to acknowledge; `wait` replaces it, for tests.
    `dry_run` only reads, takes no lock, and reports what would go at this moment. `progress` is
    called with what is done ("marking", "waiting", "proving", "deleting"), and how much of it:
    (done, total).

    Raises ConflictError when another collection runs (kind ``gc-running``) or a live writer does
    not acknowledge in time (``gc-busy``: nothing was deleted, run it again later);
    CorruptionError when anything that is needed cannot be read, or a commit is lost (kind
    ``lost-commit``): nothing was deleted then;
    StorageError, also when there are no file locks (``no-locks``).
    """
    store.format.require("gc", store.path)
    try:
        if dry_run:
            return _Collection(store, avoid, progress, accept_lost).plan()
        with collection_lock(store.io, store.path):
            collection = _Collection(store, avoid, progress, accept_lost)
            report = collection.run(wait or patience(timeout))
            while collection.more:
                collection = _Collection(store, avoid, progress, accept_lost)
                report = _added(report, collection.run(wait or patience(timeout)))
            make_reserve(store.io, store.path)
            return report
    except CorruptionError as error:
        error.hint = _way_out(error)
        raise
    except OSError as error:
        if isinstance(error, DeltackptError):
            raise
        raise storage_error(error, "collect garbage in", store.path) from error


def _way_out(error: CorruptionError) -> str | None:
    """What to do about damage in the way of a collection, also where no copy has what is lost."""
    last = _LAST_RESORT.get(error.kind or "")
    return error.hint if last is None else f"{_MEND}; if nothing has it, {last}"


class _Collection:
    def __init__(
        self, store: Store, avoid: Collection[str], progress: Progress | None, accept_lost: bool
    ) -> None:
        self._store = Store(store.path, store.io, store.format)  # remembers nothing from before
        self._io = store.io
        self._root = store.path
        self._avoid = frozenset(avoid)
        self._progress: Progress = progress or (lambda stage, done, total: None)
        self._accept_lost = accept_lost
        self._accepted: list[Retired] = []
        self._untold = False  # the newest generation is damaged: a new one is due
        self.more = False
        """There was no space to write down all that may go: collect again."""

    def plan(self) -> GcReport:
        """What would be deleted, as far as one marking shows."""
        last = self._last() if self._io.exists(f"{self._root}/gc") else Generation()
        _, marking, doomed = self._mark((), last)
        report = _report(marking, doomed)
        report.accepted = [*self._accepted]
        report.commits = [one for one in report.commits if one not in report.accepted]
        report.dry_run = True
        with contextlib.suppress(FileNotFoundError):  # never collected, and copied without gc/
            report.generation = newest_number(self._io, self._root)
        return report

    def run(self, wait: Wait) -> GcReport:
        last = self._last()
        # What was condemned once stays so as long as another pack has its chunks: a collection
        # that goes on where one was killed must not choose the other way round.
        roots, marking, doomed = self._mark(last.packs, last)
        if doomed.nothing:
            if self._untold:
                self._close(last)
            report = _report(marking, doomed)
            report.generation = newest_number(self._io, self._root)
            self._tidy(report.generation)
            return report
        generation = self._publish(last, doomed, marking)
        self._progress("waiting", 0, 0)
        claims, writers = settle(self._io, self._root, generation.number, wait)
        roots, marking, now = self._mark(generation.packs, generation)
        final = _final(doomed, now, generation, claims)
        self._prove(marking, final)
        self._sync(roots)
        check_newest(self._io, self._root, generation.number)
        self._delete(final)
        self.more = self.more and bool(final.packs)
        report = _report(marking, final)
        report.generation, report.writers = generation.number, writers
        report.accepted = [*self._accepted]
        report.pardoned = sorted(generation.packs.difference(final.packs))
        if report.pardoned or generation.manifests.difference(final.manifests):
            self._close(generation)
        self._tidy(newest_number(self._io, self._root))
        return report

    # marking -------------------------------------------------------------------------------

    def _mark(self, condemned: Collection[str], last: Generation) -> tuple[Roots, Marking, Doomed]:
        # Names first: what is published after this listing is left to the next collection.
        lying = leftovers(self._io, self._root)
        linked = linked_folders(self._io, self._root)
        roots = read_roots(self._store)
        self._miss(roots, last)
        # What lies behind a link may go at any time: it is relied on only where nothing else is.
        foreign = [name for name in self._store.packs.names() if _folder(name) in linked]
        marking = mark(
            self._store, roots, avoid=self._avoid, condemned={*condemned, *foreign},
            progress=partial(self._progress, "marking"),
        )  # fmt: skip
        doomed = unneeded(self._store, roots, marking, lying)
        doomed.packs.difference_update(foreign)
        doomed.commits = [one for one in doomed.commits if f"runs/{one.run}" not in linked]
        return roots, marking, doomed

    def _miss(self, roots: Roots, last: Generation) -> None:
        """Refuse when commits are lost, or let them count as retired, so that the boundary of the
        next generation reaches them."""
        lost = lost_commits(
            self._store, roots.commits.values(), last.boundary, retired=roots.retired
        )
        if not self._accept_lost:
            refuse_lost(lost, self._root)
        given_up = [Retired(run, number) for run, number in lost]
        self._accepted += [one for one in given_up if one not in self._accepted]
        roots.retired += given_up

    def _last(self) -> Generation:
        """The newest generation; an empty one of the same number when it is damaged.

        StorageError, UnsupportedFormatError: what was condemned and collected before must
        not be forgotten because it could not be read this time, or by this package.
        """
        number = newest_number(self._io, self._root)
        try:
            return read_generation(self._io, self._root, number)
        except CorruptionError as error:
            _log.warning("%s", error)
            self._untold = True
            return Generation(number=number)

    # generation ----------------------------------------------------------------------------

    def _publish(self, last: Generation, doomed: Doomed, marking: Marking) -> Generation:
        boundary = dict(last.boundary)
        for run, number in doomed.commits:
            boundary[run] = max(number, boundary.get(run, 0))
        full = Generation(
            number=last.number + 1,
            packs=frozenset(doomed.packs),
            manifests=frozenset(doomed.manifests),
            boundary=boundary,
            bases=last.bases,
        )
        try:
            publish_generation(self._io, self._root, full)
            return full
        except FileExistsError:
            raise overtaken() from None
        except OSError as error:
            if error.errno not in FULL:
                raise
        # No room to write down everything: begin with the largest packs.
        size = dict(zip(marking.catalogue.names, marking.catalogue.sizes, strict=True))
        largest = sorted(doomed.packs, key=lambda name: -size[name])[:_FEW_PACKS]
        few = Generation(
            number=full.number, packs=frozenset(largest), boundary=last.boundary, bases=last.bases
        )
        publish_generation(self._io, self._root, few)
        self.more = True
        return few

    def _close(self, generation: Generation) -> None:
        """Let writers use again what was pardoned; not vital."""
        after = Generation(
            number=generation.number + 1, boundary=generation.boundary, bases=generation.bases
        )
        with contextlib.suppress(OSError):
            publish_generation(self._io, self._root, after)

    # deleting ------------------------------------------------------------------------------

    def _sync(self, roots: Roots) -> None:
        """Make durable what the second marking has seen.

        A mark of retirement, a removed pin or another copy of a chunk may have been left behind
        by a process that was killed before it made the name durable. Were it lost in a power cut
        after the deletions, a step would be back that is not whole.
        """
        top = ["", "/runs", "/pins", "/packs"]
        runs = [f"/runs/{run}" for run in roots.runs]
        packs = sorted({f"/packs/{name[:2]}" for name in self._store.packs.names()})
        for directory in (*top, *runs, *packs):
            self._io.sync_directory(f"{self._root}{directory}")

    def _prove(self, marking: Marking, final: Doomed) -> None:
        """Pardon packs whose chunks cannot be read from where they are to stay."""
        while final.packs:
            told = partial(self._progress, "proving")
            lost = unreadable_after(self._store, marking, final.packs, told)
            if not lost:
                return
            _log.warning(
                "%d chunks are damaged where they were to stay; their other copies are kept",
                len(lost),
            )
            final.packs -= marking.catalogue.holders(lost)

    def _delete(self, final: Doomed) -> None:
        for done, name in enumerate(sorted(final.packs)):
            self._unlink(relative_pack_path(name))
            self._progress("deleting", done + 1, len(final.packs))
        for run in sorted({run for run, _ in final.commits}):
            records = [number_name(number) for r, number in final.commits if r == run]
            for record in records:
                self._unlink(f"runs/{run}/{record}")
            # A mark of retirement goes when its record is gone for good: after a power cut the
            # record must not be there without it.
            self._io.sync_directory(f"{self._root}/runs/{run}")
            for record in records:
                self._unlink(f"runs/{run}/{record}{RETIRED_SUFFIX}")
        for digest in sorted(final.manifests):
            self._unlink(f"manifests/{digest.hex()}")
        for path in sorted(final.leftovers):
            ignored = OSError if path.startswith(f"{CACHE}/") else FileNotFoundError
            with contextlib.suppress(ignored):
                self._io.unlink(f"{self._root}/{path}")

    def _unlink(self, relative: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._io.unlink(f"{self._root}/{relative}")

    def _tidy(self, newest: int) -> None:
        """Remove what earlier collections and dead processes left; best effort."""
        leases.remove_acks(self._io, self._root)
        tidy_generations(self._io, self._root, newest)
        remove_dead_probes(self._io, f"{self._root}/{CACHE}")
        with contextlib.suppress(OSError):
            leases.held_commits(self._io, self._root, clean=True)


def _folder(pack: str) -> str:
    return os.path.dirname(relative_pack_path(pack))


def _final(doomed: Doomed, now: Doomed, generation: Generation, claims: leases.Claims) -> Doomed:
    """What both markings found unneeded, the generation condemns, and nobody claims."""
    return Doomed(
        packs=set(generation.packs & now.packs - claims.packs),
        manifests=set(generation.manifests & now.manifests - claims.manifests),
        commits=[c for c in doomed.commits if c in set(now.commits)
                 and c.number <= generation.boundary.get(c.run, 0)],
        leftovers=doomed.leftovers & now.leftovers,
    )  # fmt: skip


def _report(marking: Marking, doomed: Doomed) -> GcReport:
    catalogue = marking.catalogue
    size = dict(zip(catalogue.names, catalogue.sizes, strict=True))
    gone = sum(size.get(name, 0) for name in doomed.packs)
    return GcReport(
        packs=sorted(doomed.packs),
        manifests=sorted(digest.hex() for digest in doomed.manifests),
        commits=[(run, number) for run, number in doomed.commits],
        leftovers=sorted(doomed.leftovers),
        pack_bytes=gone,
        kept_packs=len(size.keys() - doomed.packs),
        kept_bytes=sum(size.values()) - gone,
    )


def _added(first: GcReport, second: GcReport) -> GcReport:
    second.packs = sorted({*first.packs, *second.packs})
    second.manifests = sorted({*first.manifests, *second.manifests})
    second.commits = [*first.commits, *second.commits]
    second.leftovers = sorted({*first.leftovers, *second.leftovers})
    second.pack_bytes += first.pack_bytes
    second.accepted = list(dict.fromkeys([*first.accepted, *second.accepted]))
    return second
