"""Proving a store: everything that is damaged, and which steps and tensors each damage hits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltackpt_store import values_decode
from deltackpt_store.budgeted import WINDOW, Budget, Coverage, scrub_within
from deltackpt_store.errors import (
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.generation import damaged_generations
from deltackpt_store.impact import DamageMap, NeededChunks
from deltackpt_store.linked import LINKED, linked_folders
from deltackpt_store.lost_chunks import Lost, lost_chunks, read_back, unaccounted
from deltackpt_store.lost_commits import LOST, lost_commits, read_boundary
from deltackpt_store.manifest import Commit, Ids
from deltackpt_store.names import is_digest_name, parse_number, relative_pack_path
from deltackpt_store.pack_set import PackSet, is_damage, is_gone
from deltackpt_store.presence import check_not_empty
from deltackpt_store.scrub import Progress, scrub
from deltackpt_store.scrub_check import BadRecord
from deltackpt_store.store import Store

_ORPHAN = "no listed or pinned step names it"
_TRIES = 4

Level = Literal["structure", "records", "chunks", "restore"]


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a finding damages, and the leaves of it that are lost.

    `tensors` is empty when the whole step is lost (its commit or manifest is damaged); `step` is
    -1 when the commit is too damaged to tell.
    """

    run: str
    number: int
    step: int = -1
    tensors: tuple[str, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    `kind` is format, store, commit, manifest, pin, generation (which tells what was collected),
    pack, chunk or value; `name` the file's path in the store, the chunk id in hexadecimal, or the
    path of the value. `pack` is the file that holds the damaged record of a chunk. `hits` are the
    steps that cannot be restored whole because of it: none when everything they need can still be
    read, from another copy or otherwise.
    `needed_by` are the steps that read records of a damaged pack by searching the file for them:
    they can be restored as long as that file stays. `unreadable`: the system did not let it be read
    (no permission, too many open files); what it holds is not known, and may well be whole.
    """

    kind: str
    name: str
    reason: str
    pack: str | None = None
    hits: tuple[Hit, ...] = ()
    needed_by: tuple[Hit, ...] = ()
    unreadable: bool = False


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, and everything that was found to be wrong.

    `notes` are no damage. Of kind pack or chunk: what retention and collection leave behind and no
    listed or pinned step needs (packs that are gone but still named, records coded against chunks
    that are gone). Of kind manifest: what no listed or pinned step names, and collection would take
    away. Of kind store: folders that are symbolic links.
    """

    level: str
    runs: int
    commits: int
    manifests: int
    packs: int
    chunks: int
    bytes: int
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...] = ()
    coverage: Coverage | None = None
    """With a budget: how much was read, and how much is known to be whole."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def unread(self) -> bool:
        """Something was found, and all of it is what could not be read."""
        return bool(self.findings) and all(finding.unreadable for finding in self.findings)

    @property
    def damaged_steps(self) -> list[tuple[str, int]]:
        """(run, step) of every step known to be unrestorable in whole, sorted."""
        hits = [hit for finding in self.findings for hit in finding.hits]
        return sorted({(hit.run, hit.step) for hit in hits if hit.step >= 0})


def verify(
    store: Store,
    *,
    level: Level = "chunks",
    run: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    budget: Budget | None = None,
    window: float = WINDOW,
) -> VerifyReport:
    """Check `store` (or only what `run` needs) and report all damage; never stops at the first.

    Levels, each including the ones before: ``structure`` checks every commit, manifest, pin and
    pack table, recomputes roots, and looks up every chunk that a step needs; ``records`` reads
    every record of every pack and compares it with its checksums, which finds what has changed
    since it was written; ``chunks`` decodes each and proves it by its id instead; ``restore`` also
    reads the chunks of all steps the way a restore does and decodes the plain values. Nothing is
    written, and nothing that `store` remembers from earlier is trusted.

    With `budget` (level ``chunks`` only) commits, manifests and tables are all checked, and of the
    packs as many as the budget allows, those first that were not checked for the longest time. That
    is remembered in the store's ``cache`` or, where it cannot be written, in the user's. `window`
    (seconds) is the time for which the coverage is reported.

    Where retention, collection or compaction has taken away meanwhile what was looked at, what
    looked damaged is checked again. A file that the system does not let be read is told as such
    (`Finding.unreadable`), and so is what depends on it; when that happens only while the chunks of
    a pack are read, of which the table could be, StorageError. StorageError of kind
    ``store-vanished`` when the whole store was moved, deleted or unmounted meanwhile.

    `progress` is called with (bytes done, bytes in all) by one thread at a time.
    NotFoundError when `run` does not exist, InvalidInputError for an unknown level.
    """
    if level not in get_args(Level):
        raise InvalidInputError(
            f"there is no verify level {level!r}", hint=f"use one of {', '.join(get_args(Level))}"
        )
    if budget is not None and level != "chunks":
        raise InvalidInputError(
            f"a budget cannot be given with level {level}",
            hint="with a budget, chunks are verified",
        )
    good: set[str] = set()
    for _ in range(_TRIES - 1):
        work = _Verification(store, run, budget, window, good)
        try:
            report = work.work(level, progress, threads)
        except (CorruptionError, StorageError):
            check_not_empty(store.io, store.path)
            if not work.outdated():
                raise
        else:
            if report.ok:
                return report
            check_not_empty(store.io, store.path)
            if not work.outdated():
                return report
    return _Verification(store, run, budget, window, good).work(level, progress, threads)


class _Verification:
    """`good` are packs of which every record has been checked, and holds."""

    def __init__(
        self,
        store: Store,
        run: str | None,
        budget: Budget | None,
        window: float,
        good: set[str],
    ) -> None:
        self._good = good
        self._budget = budget
        self._window = window
        self._findings: list[Finding] = []
        self._notes: list[Finding] = []
        try:
            self._store = Store.open(store.path, io=store.io)
        except DeltackptError as error:
            self._found("format", "FORMAT", error)
            self._store = Store(store.path, store.io, store.format)
        self._packs = PackSet(store.io, store.path, store.uuid, lenient=True)
        self._run = run
        self._listed: dict[str, list[int]] = {}
        self._existing: list[str] = []
        self._commits: list[Commit] = []  # those whose snapshot resolves
        self._read: list[Commit] = []
        self._checked: set[tuple[str, int]] = set()
        self._manifests: set[str] = set()
        self._failed: dict[str, tuple[DeltackptError, list[Hit]]] = {}  # by manifest file
        self._closure: set[str] = set()
        self._needed = NeededChunks()
        self._bad_packs: dict[str, DeltackptError] = {}
        self._hurt: set[str] = set()  # packs with which something went that a step needs

    def _found(
        self,
        kind: str,
        name: str,
        error: Exception | str,
        hits: Iterable[Hit] = (),
        pack: str | None = None,
        *,
        unread: bool = False,
    ) -> None:
        found = _finding(kind, name, error, hits, pack)
        if unread and not found.unreadable:
            found = msgspec.structs.replace(found, unreadable=True)
        self._findings.append(found)

    def work(self, level: Level, progress: Progress | None, threads: int | None) -> VerifyReport:
        runs = self._check_runs()
        names = self._check_packs()
        bad: list[BadRecord] = []
        coverage: Coverage | None = None
        if self._budget is not None:
            bad, coverage = scrub_within(
                self._packs, names, self._existing, self._budget,
                window=self._window, threads=threads, progress=progress,
            )  # fmt: skip
        elif level != "structure":
            prove = level != "records"
            todo = [name for name in names if name not in self._good]
            bad = scrub(self._packs, todo, threads=threads, progress=progress, prove=prove)
            self._good.update(set(todo).difference(one.pack for one in bad))
        for name in names:  # tables are read again: these went bad in the meantime
            if name in self._packs.damaged:
                self._bad_packs.setdefault(name, self._packs.damaged[name])
        ids, lengths = self._needed.get()
        lost = lost_chunks(self._packs, ids, lengths, bad)
        if level == "restore":
            lost.update(read_back(self._packs, self._closure, ids, lengths, lost, threads))
            self._decode_values()
        leaning = self._leaning(ids, lengths, bad, lost)
        self._report_chunks(lost, bad, leaning)
        tables = [t.table for n in names if (t := self._packs.index.entries(n)) is not None]
        return VerifyReport(
            level=level,
            runs=runs,
            commits=len(self._commits),
            manifests=len(self._manifests),
            packs=len(names),
            chunks=sum(map(len, tables)),
            bytes=sum(int(table["stored"].sum(dtype=np.int64)) for table in tables),
            findings=tuple(self._findings),
            notes=tuple(self._notes),
            coverage=coverage,
        )

    def outdated(self) -> bool:
        """Whether a pack or a commit that was listed is not any more."""
        with contextlib.suppress(DeltackptError):
            return not set(self._packs.names()).issuperset(self._existing) or not all(
                set(self._store.numbers(run)).issuperset(numbers)
                for run, numbers in self._listed.items()
            )
        return False

    # commits, manifests, pins ----------------------------------------------------------------

    def _check_runs(self) -> int:
        """Read every commit and resolve its snapshot, noting what it needs; number of runs."""
        if self._run is not None:
            self._store.numbers(self._run)  # NotFoundError for an unknown run
            self._check_run(self._run)
            self._check_lost(self._run)
            count = 1
        else:
            try:
                runs = self._store.runs()
            except DeltackptError as error:
                self._found("store", "runs", error)
                runs = []
            for run in runs:
                self._check_run(run)
            self._check_pins()
            self._check_generations()
            self._check_lost(None)
            self._check_other_manifests()
            self._check_links()
            count = len(runs)
        for name, (error, hits) in self._failed.items():
            self._found("manifest", name, error, hits)
        return count

    def _check_run(self, run: str) -> None:
        try:
            commits = self._store.commits(run)
        except DeltackptError as error:
            self._found("store", f"runs/{run}", error)
            return
        for path, error in commits.damaged:
            number = parse_number(path.rsplit("/", 1)[-1]) or 0
            self._found("commit", path, error, [Hit(run=run, number=number)])
        self._listed[run] = [commit.number for commit in commits]
        for commit in commits:
            self._check_commit(commit)

    def _check_commit(self, commit: Commit) -> None:
        self._checked.add((commit.run, commit.number))
        self._read.append(commit)
        self._manifests.update(d.hex() for d in (commit.manifest, commit.base) if d)
        try:
            snapshot = self._store.snapshot(commit)
        except DeltackptError as error:
            name = str(error.context.get("path") or f"manifests/{commit.manifest.hex()}")
            self._failed.setdefault(name, (error, []))[1].append(_hit(commit))
        else:
            self._commits.append(commit)
            self._closure.update(snapshot.packs)
            self._needed.add(snapshot)

    def _check_lost(self, run: str | None) -> None:
        """Commits that others continue and that nothing took away (of `run`, or of all)."""
        try:
            lost = lost_commits(self._store, self._read, read_boundary(self._store))
        except DeltackptError as error:
            self._found("store", "gc", error)
            return
        for one in lost:
            if run in (None, one.run):
                hit = Hit(run=one.run, number=one.number)
                self._found("commit", one.path, LOST, [hit])

    def _check_generations(self) -> None:
        """The newest generation record, which says what was collected, and its copy."""
        with contextlib.suppress(OSError):  # `_check_lost` reports what cannot be listed
            for name, error in damaged_generations(self._store.io, self._store.path):
                self._found("generation", name, error)

    def _check_pins(self) -> None:
        try:
            pins = self._store.pins()
        except DeltackptError as error:
            self._found("store", "pins", error)
            return
        for path, error in pins.damaged:
            self._found("pin", path, error)
        for name in pins:
            try:
                commit = self._store.pinned(name)
            except DeltackptError as error:
                self._found("pin", f"pins/{name}", error)
                continue
            if (commit.run, commit.number) not in self._checked:
                self._check_commit(commit)  # retired, and kept by the pin alone

    def _check_other_manifests(self) -> None:
        """Manifests that no commit names (any more): a save may come to rely on them."""
        try:
            names = set(self._store.io.list(f"{self._store.path}/manifests"))
        except FileNotFoundError as error:
            if self._checked or self._packs.names():
                self._found("store", "manifests", error)
            return
        except OSError as error:
            self._found("store", "manifests", error)
            return
        known = self._manifests.union(name.rsplit("/", 1)[-1] for name in self._failed)
        for name in sorted(filter(is_digest_name, names - known)):
            try:
                self._store.manifest(bytes.fromhex(name))
            except DeltackptError as error:
                if error.kind != "missing-manifest":  # it was collected after it had been listed
                    self._found("manifest", f"manifests/{name}", error)
            else:
                self._notes.append(_finding("manifest", f"manifests/{name}", _ORPHAN))

    def _check_links(self) -> None:
        try:
            links = linked_folders(self._store.io, self._store.path)
        except DeltackptError:
            return  # what cannot be listed is a finding already
        self._notes += [_finding("store", link, LINKED) for link in sorted(links)]

    def _decode_values(self) -> None:
        for commit in self._commits:
            snapshot = self._store.snapshot(commit)
            for slot, document in snapshot.objects.items():
                path = snapshot.layout.paths[slot]
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        values_decode.decode(document, path)
                except (CorruptionError, UnsupportedFormatError) as error:
                    self._found("value", path, error, [_hit(commit, (path,))])
                except InvalidInputError:
                    continue  # of a class that only the training program knows

    # packs and chunks ------------------------------------------------------------------------

    def _check_packs(self) -> list[str]:
        """Read the table of every pack concerned; return the names of the intact ones."""
        names = self._closure
        self._existing = self._packs.names()
        for folder, error in self._packs.unlisted.items():
            self._found("store", folder, error)
        if self._run is None:
            names = names.union(self._existing)
        self._packs.load(names)
        self._bad_packs = dict(self._packs.damaged)  # readers forget those that are gone
        return sorted(names.difference(self._bad_packs))

    def _leaning(
        self, ids: Ids, lengths: NDArray[np.int64], bad: list[BadRecord], lost: Lost
    ) -> dict[str, dict[int, Hit]]:
        """By damaged pack, the steps that read chunks by searching it for their records."""
        found: dict[str, dict[int, Hit]] = {}
        searched = {name for name in self._packs.damaged if self._packs.salvaged(name)}
        if not searched:
            return found
        without = lost_chunks(self._packs, ids, lengths, bad, scan=False)
        chunks = without.keys() - lost.keys()
        if not chunks:
            return found
        mapping = DamageMap(chunks)
        for place, commit in enumerate(self._commits):
            snapshot = self._store.snapshot(commit)
            for chunk_id, paths in mapping.hits(snapshot).items():
                holders = {n for n in searched if chunk_id in self._packs.salvaged(n)}
                for name in holders or searched.intersection(snapshot.packs):
                    known = found.setdefault(name, {}).get(place)
                    every = dict.fromkeys([*(known.tensors if known else ()), *paths])
                    found[name][place] = _hit(commit, every)
        return found

    def _report_chunks(
        self, lost: Lost, bad: list[BadRecord], leaning: dict[str, dict[int, Hit]]
    ) -> None:
        """One finding for each damaged pack, damaged record, and chunk lost in another way.

        A pack that is gone, and a whole record whose references are gone, are collected garbage
        as far as no step has lost anything by them. Beside a pack that could not be read, what is
        missing may well lie there: it is as little known.
        """
        refused = [*self._bad_packs.values(), *self._packs.unlisted.values()]
        unread = any(map(_is_refused, refused))
        hits, blamed = self._hits(lost, {record.id for record in bad})
        for name, error in sorted(self._bad_packs.items()):
            path = relative_pack_path(name)
            if is_gone(error) and name not in self._hurt:
                reason = "it is gone, and nothing that was in it is needed or missing"
                self._notes.append(_finding("pack", path, reason))
            else:
                found = _finding("pack", path, error, blamed.get(name, {}).values())
                needed = tuple(leaning.get(name, {}).values())
                self._findings.append(msgspec.structs.replace(found, needed_by=needed))
        for record in bad:
            where = relative_pack_path(record.pack)
            hit = hits.get(record.id, ())
            if record.dangling and not hit:
                note = _finding("chunk", record.id.hex(), record.error, pack=where)
                self._notes.append(note)
            else:
                unknown = unread and record.dangling
                self._found("chunk", record.id.hex(), record.error, hit, where, unread=unknown)
        for chunk_id in sorted(hits.keys() - {record.id for record in bad}):
            self._found("chunk", chunk_id.hex(), lost[chunk_id], hits[chunk_id], unread=unread)

    def _hits(
        self, lost: Lost, known: set[bytes]
    ) -> tuple[dict[bytes, list[Hit]], dict[str, dict[int, Hit]]]:
        """Hits by chunk, and by damaged pack for the chunks that are only known to be gone.

        A chunk that no pack table mentions (and is not in `known`) is blamed on the damaged packs
        that the step depends on, when there are any.
        """
        hits: dict[bytes, list[Hit]] = {}
        blamed: dict[str, dict[int, Hit]] = {}
        if not lost:
            return hits, blamed
        unlisted = {i for i in lost if i not in known and self._packs.index.get(i) is None}
        gone_with_packs = unaccounted(self._packs, lost)
        mapping = DamageMap(set(lost))
        for place, commit in enumerate(self._commits):
            snapshot = self._store.snapshot(commit)
            culprits = self._bad_packs.keys() & set(snapshot.packs)
            gone: dict[str, None] = {}
            found = mapping.hits(snapshot)
            if not gone_with_packs.isdisjoint(found):
                self._hurt.update(snapshot.packs)
            for chunk_id, paths in found.items():
                if culprits and chunk_id in unlisted:
                    gone.update(dict.fromkeys(paths))
                else:
                    hits.setdefault(chunk_id, []).append(_hit(commit, paths))
            for culprit in culprits if gone else ():
                blamed.setdefault(culprit, {})[place] = _hit(commit, gone)
        return hits, blamed


def _finding(
    kind: str,
    name: str,
    error: Exception | str,
    hits: Iterable[Hit] = (),
    pack: str | None = None,
) -> Finding:
    reason = error.message if isinstance(error, DeltackptError) else str(error)
    return Finding(
        kind=kind, name=name, reason=reason, pack=pack, hits=tuple(hits),
        unreadable=_is_refused(error),
    )  # fmt: skip


def _is_refused(error: Exception | str) -> bool:
    """Whether the system did not let something be read, which says nothing of what it holds."""
    return isinstance(error, OSError) and not is_damage(error)


def _hit(commit: Commit, tensors: Iterable[str] = ()) -> Hit:
    return Hit(run=commit.run, number=commit.number, step=commit.step, tensors=tuple(tensors))
