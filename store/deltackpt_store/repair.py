"""Repair: damage is undone from other copies, damaged files are set aside, nothing is deleted.

What is damaged is what `verify` finds. Then, under the lock of garbage collection::

    folders   those that are gone whole are made again (`repair_folders`)
    records   commits, manifests, pins (and FORMAT) that a copy holds change over in one step; the
              damaged file has a name in the quarantine before
    chunks    all that the damaged packs hold, and all that is missing, is written into new packs,
              taken from healthy records, other packs, the quarantine, other stores, a live state
    prove     every one of them is read from the packs that are to stay
    condemn   a generation names the damaged packs, so that no writer builds upon them any more;
              every live writer acknowledges it
    move      the damaged packs go into the quarantine

Why no healthy record is lost, wherever this is interrupted: until a record can be read from a
durable pack that stays, the pack that holds it does not move; and moving gives the new name before
it takes the old one away. What an interrupted repair leaves is a second copy of some chunks. The
next one finds them, and goes on with the rest.

A writer that has a chunk's place in a damaged pack in mind either lets go of it (and stores the
chunk again, which repairs what nothing else could), or claims the pack in its acknowledgement, and
then the pack stays where it is until the next repair.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltackpt_store.chunk_sources import ChunkSource, StoreSource
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import FileIO, is_link, make_directories
from deltackpt_store.format_file import FORMAT_NAME, Format
from deltackpt_store.generation import (
    Generation,
    newest_number,
    publish_generation,
    read_generation,
    tidy_generations,
)
from deltackpt_store.impact import DamageMap, NeededChunks
from deltackpt_store.leases import Lease
from deltackpt_store.linked import refuse_linked
from deltackpt_store.lost_commits import LOST, LostCommit
from deltackpt_store.manifest import Commit, Ids
from deltackpt_store.names import is_pack_name, relative_pack_path
from deltackpt_store.oserror import DAMAGE, storage_error
from deltackpt_store.pack import pack_path, read_footer
from deltackpt_store.pack_set import is_gone
from deltackpt_store.quarantine import set_aside
from deltackpt_store.repair_folders import mend_folders
from deltackpt_store.repair_lost import LostRepair
from deltackpt_store.repair_packs import PackRepair
from deltackpt_store.repair_records import Left, Mended, RecordRepair, mend_format
from deltackpt_store.scrub import Progress
from deltackpt_store.settling import ACK_SECONDS, Wait, check_newest, patience, settle
from deltackpt_store.store import Store, absolute_path
from deltackpt_store.store_locks import collection_lock
from deltackpt_store.verify import Finding, verify

_ROUNDS = 4


class LostTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor with bytes that nothing holds any more: `ranges` are (start, stop), in bytes from
    its first element in the memory that it looks at."""

    path: str
    ranges: tuple[tuple[int, int], ...]


class LostStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that stays damaged. `tensors` is empty when the whole step is lost (its commit or
    manifest is); `step` is -1 when the commit is too damaged to tell."""

    run: str
    number: int
    step: int = -1
    tensors: tuple[LostTensor, ...] = ()


class RepairReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair did, or with `dry_run` would do.

    `found`: findings of the verification it began with. `copied`: healthy records of damaged packs
    that were written again. `packs`: new packs. `quarantined`: paths of what was set aside.
    """

    dry_run: bool
    found: int
    mended: tuple[Mended, ...] = ()
    copied: int = 0
    packs: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    left: tuple[Left, ...] = ()
    lost: tuple[LostStep, ...] = ()

    @property
    def ok(self) -> bool:
        """Everything is whole (or, with `dry_run`, would be)."""
        return not (self.left or self.lost)


def repair(
    store: Store | str | os.PathLike[str],
    *,
    sources: Iterable[Store | str | os.PathLike[str] | ChunkSource] = (),
    dry_run: bool = False,
    timeout: float = ACK_SECONDS,
    wait: Wait | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> RepairReport:
    """Verify every byte of `store` and put right what is damaged, as far as a copy exists.

    `sources` are other stores (copies of this one, stores of related runs) and other providers of
    chunks. `timeout` (seconds) bounds the wait for live writers to let go of damaged packs; `wait`
    replaces it, for tests. Safe beside running trainings, and to interrupt at any point; run it
    again to go on. `dry_run` writes nothing and takes no lock.

    ConflictError when a collection or another repair runs; NotFoundError, UnsupportedFormatError
    for what cannot be opened; CorruptionError when neither the store nor a copy tells which steps
    there are, or what FORMAT held; StorageError when the store or a source cannot be read or
    written.
    """
    others: list[Store] = []
    chunks: list[ChunkSource] = []
    for source in sources:
        if isinstance(source, (Store, str, os.PathLike)):
            other = source if isinstance(source, Store) else Store.open(source)
            others.append(other)
            chunks.append(StoreSource(other))
        else:
            chunks.append(source)
    io = store.io if isinstance(store, Store) else FileIO()
    root = store.path if isinstance(store, Store) else absolute_path(store)
    others = [other for other in others if other.path != root]
    try:
        _check_is_store(io, root)
        if not dry_run:
            refuse_linked(io, root, "repair")
        with _lock(io, root, dry_run) as locked:
            work = _Repair(io, root, others, chunks, dry_run=dry_run, locked=locked)
            return work.run(wait or patience(timeout), progress, threads)
    except OSError as error:
        if isinstance(error, DeltackptError):
            raise
        raise storage_error(error, "repair the store", root) from error


def _check_is_store(io: FileIO, root: str) -> None:
    """NotFoundError, UnsupportedFormatError; a store whose FORMAT is lost or damaged passes."""
    try:
        Store.open(root, io=io).format.require("gc", root)
    except CorruptionError:
        return
    except NotFoundError:
        if not all(io.exists(f"{root}/{name}") for name in ("packs", "manifests", "runs")):
            raise


@contextlib.contextmanager
def _lock(io: FileIO, root: str, dry_run: bool) -> Generator[bool]:
    """The lock of collection, where there are locks and something is to be written."""
    with contextlib.ExitStack() as stack:
        locked = False
        if not dry_run:
            make_directories(io, f"{root}/gc", within=root)
            try:
                stack.enter_context(collection_lock(io, root))
                locked = True
            except StorageError as error:
                if error.kind != "no-locks":
                    raise
        yield locked


class _Repair:
    def __init__(
        self,
        io: FileIO,
        root: str,
        others: Sequence[Store],
        sources: Sequence[ChunkSource],
        *,
        dry_run: bool,
        locked: bool,
    ) -> None:
        self._io = io
        self._root = root
        self._others = others
        self._sources = sources
        self._dry_run = dry_run
        self._locked = locked
        self._mended: list[Mended] = []
        self._left: list[Left] = []
        self._aside: list[str] = []
        self._format = self._open_format()

    def _open_format(self) -> Format:
        try:
            return Store.open(self._root, io=self._io).format
        except (CorruptionError, NotFoundError):
            value, source, aside = mend_format(
                self._io, self._root, self._others, dry_run=self._dry_run
            )
        if aside is not None:
            self._aside.append(aside)
        self._mended.append(Mended(kind="format", name=FORMAT_NAME, source=source))
        return value

    def _fresh(self) -> Store:
        """The store, with nothing remembered."""
        return Store(self._root, self._io, self._format)

    def run(self, wait: Wait, progress: Progress | None, threads: int | None) -> RepairReport:
        folders = mend_folders(self._fresh(), self._others, dry_run=self._dry_run)
        self._mended += folders
        found = len(self._mended)
        if self._dry_run and any(one.name == "runs" for one in folders):
            return self._report(found, PackRepair(self._fresh(), (), (), ""), [], [])
        before = verify(self._fresh(), level="chunks", progress=progress, threads=threads)
        _refuse_unread(before.findings, self._root)
        made = {folder.name for folder in folders}
        findings = [f for f in before.findings if f.kind != "format" and f.reason != LOST]
        findings = [f for f in findings if not (f.kind == "store" and f.name in made)]
        left = self._mend_records(findings) if findings else []
        gone = LostRepair(self._fresh(), self._others, dry_run=self._dry_run)
        if not (findings or gone.found):
            return self._report(found, PackRepair(self._fresh(), (), (), ""), [], [])
        commits, ids, lengths = self._needed(gone)
        damaged = self._damaged_packs(findings)
        packs = PackRepair(self._fresh(), damaged, self._sources, secrets.token_hex(8))
        self._rewrite(packs, ids, lengths)
        if packs.lost:
            damaged -= self._leave_links(damaged)
        gone.bring_back(packs.lost)
        self._mended += gone.mended
        self._left += gone.left
        self._left = [left for left in self._left if not self._follows(left)]
        moved = self._take_away(damaged - packs.unknown, wait)
        for name in sorted(packs.unknown & damaged):
            self._leave_pack(name, "it holds what this version of the program cannot decode")
        for finding in findings:
            if finding.kind == "pack" and _pack_of(finding) in moved:
                self._mended.append(
                    Mended(kind="pack", name=finding.name, source="its records and other copies")
                )
        lost = [*_lost_wholly(left), *_lost_partly(self._fresh(), commits, packs.lost)]
        lost += [LostStep(run=one.run, number=one.number) for one in gone.lost]
        return self._report(found + len(findings) + len(gone.found), packs, findings, lost)

    def _report(
        self, found: int, packs: PackRepair, findings: list[Finding], lost: list[LostStep]
    ) -> RepairReport:
        bad = {bytes.fromhex(f.name): None for f in findings if f.kind == "chunk"}
        damaged = {name for f in findings if (name := _pack_of(f)) is not None}
        chunks: dict[bytes, str] = {}
        copied = 0
        for chunk_id, origin in packs.origin.items():
            if chunk_id in packs.lost:
                continue
            if origin in damaged and chunk_id not in bad:
                copied += 1
            else:
                chunks[chunk_id] = origin
        for chunk_id in bad:
            if chunk_id not in packs.lost and chunk_id not in chunks:
                elsewhere = packs.places_elsewhere(chunk_id)
                if elsewhere is not None:
                    chunks[chunk_id] = elsewhere
        mended = [Mended(kind="chunk", name=i.hex(), source=_source(o)) for i, o in chunks.items()]
        return RepairReport(
            dry_run=self._dry_run,
            found=found,
            mended=(*self._mended, *mended),
            copied=copied,
            packs=tuple(packs.written),
            quarantined=tuple(self._aside),
            left=tuple(self._left),
            lost=tuple(lost),
        )

    # records -------------------------------------------------------------------------------

    def _mend_records(self, findings: list[Finding]) -> list[Finding]:
        """Put right what can be; the findings that stay."""
        rounds = 0
        todo = findings
        while True:
            rounds += 1
            records = RecordRepair(self._fresh(), self._others, dry_run=self._dry_run)
            records.work(todo)
            self._mended += records.mended
            self._aside += records.quarantined
            if not records.mended or self._dry_run or rounds == _ROUNDS:
                break
            # What could not be read before may name more that is damaged.
            todo = list(verify(self._fresh(), level="structure").findings)
        self._left += records.left
        names = {left.name for left in records.left}
        return [finding for finding in todo if finding.name in names]

    def _follows(self, left: Left) -> bool:
        """Whether a pin is whole again with the commit that it names."""
        if left.kind != "pin":
            return False
        mended = {one.name for one in self._mended if one.kind == "commit"}
        with contextlib.suppress(CorruptionError, UnsupportedFormatError, NotFoundError):
            pin = self._fresh().read_pin(left.name.removeprefix("pins/"))
            return LostCommit(pin.run, pin.number).path in mended
        return False

    def _needed(self, gone: LostRepair) -> tuple[list[Commit], Ids, NDArray[np.int64]]:
        """All commits that can be read, and what they and those that can come back need."""
        store = self._fresh()
        commits: dict[tuple[str, int], Commit] = {}
        for run in store.runs():
            commits.update(((c.run, c.number), c) for c in store.commits(run))
        for name in store.pins():
            with contextlib.suppress(CorruptionError, UnsupportedFormatError, NotFoundError):
                commit = store.pinned(name)
                commits.setdefault((commit.run, commit.number), commit)
        needed = NeededChunks()
        whole: list[Commit] = []
        for commit in commits.values():
            try:
                needed.add(store.snapshot(commit))
            except (CorruptionError, UnsupportedFormatError):
                continue  # among the findings
            whole.append(commit)
        gone.need(needed)
        return whole, *needed.get()

    # packs ---------------------------------------------------------------------------------

    def _damaged_packs(self, findings: list[Finding]) -> set[str]:
        """Packs that lie there and are damaged, which is not the same as unreadable just now."""
        damaged: set[str] = set()
        for name in sorted({name for f in findings if (name := _pack_of(f)) is not None}):
            try:
                read_footer(self._io, pack_path(self._root, name), store_uuid=self._format.uuid)
            except UnsupportedFormatError as error:
                self._leave_pack(name, error.message)
                continue
            except StorageError as error:
                if is_gone(error):
                    continue  # what it held is among what is missing
                if error.errno != errno.ENOENT and error.errno not in DAMAGE:
                    self._leave_pack(name, error.message)
                    continue
            except CorruptionError:
                pass
            damaged.add(name)
        return damaged

    def _leave_links(self, damaged: set[str]) -> set[str]:
        """Those that are links which lead nowhere: what is lost may lie where they led to."""
        links = {name for name in damaged if self._leads_nowhere(pack_path(self._root, name))}
        for name in sorted(links):
            self._leave_pack(
                name,
                "it is a symbolic link that leads nowhere: mount what it leads to, or put the file"
                " itself in its place",
            )
        return links

    def _leads_nowhere(self, path: str) -> bool:
        try:
            return is_link(path) and not self._io.exists(path)
        except OSError:
            return False

    def _leave_pack(self, name: str, reason: str) -> None:
        self._left.append(Left(kind="pack", name=relative_pack_path(name), reason=reason))

    def _rewrite(self, packs: PackRepair, ids: Ids, lengths: NDArray[np.int64]) -> None:
        if self._dry_run:
            packs.work(ids, lengths, dry_run=True)
            return
        lease = Lease.take(self._io, self._root, packs.writer)
        try:
            packs.work(ids, lengths)
        finally:
            if lease is not None:
                lease.release()

    def _take_away(self, damaged: set[str], wait: Wait) -> set[str]:
        """Set the packs aside whose content lies elsewhere now; those that went."""
        if self._dry_run or not damaged:
            return damaged
        if not self._locked:
            for name in sorted(damaged):
                self._leave_pack(name, "without file locks it cannot be set aside; it was copied")
            return set()
        last = self._last_generation()
        generation = msgspec.structs.replace(
            last, number=last.number + 1, packs=frozenset(damaged), manifests=frozenset[bytes]()
        )
        publish_generation(self._io, self._root, generation)
        try:
            claims, _ = settle(self._io, self._root, generation.number, wait)
        except ConflictError as error:
            if error.kind != "gc-busy":
                raise
            for name in sorted(damaged):
                self._leave_pack(name, f"{error.message}; run the repair again")
            return set()
        for name in sorted(damaged & claims.packs):
            self._leave_pack(name, "a running save builds upon it; run the repair again")
        self._sync()
        check_newest(self._io, self._root, generation.number)
        moved: set[str] = set()
        for name in sorted(damaged - claims.packs):
            try:
                self._aside.append(set_aside(self._io, self._root, relative_pack_path(name)))
                moved.add(name)
            except OSError as error:
                self._leave_pack(name, f"it cannot be set aside: {error.strerror or error}")
        if moved != damaged:
            after = msgspec.structs.replace(
                generation, number=generation.number + 1, packs=frozenset[str]()
            )
            with contextlib.suppress(OSError):
                publish_generation(self._io, self._root, after)
        with contextlib.suppress(OSError):
            tidy_generations(self._io, self._root, newest_number(self._io, self._root))
        return moved

    def _last_generation(self) -> Generation:
        number = newest_number(self._io, self._root)
        try:
            return read_generation(self._io, self._root, number)
        except CorruptionError:
            return Generation(number=number)

    def _sync(self) -> None:
        """Make durable the names of all packs that the proof has relied on."""
        names = self._fresh().packs.names()
        for directory in ("", *sorted({f"/{name[:2]}" for name in names})):
            self._io.sync_directory(f"{self._root}/packs{directory}")


def _refuse_unread(findings: Iterable[Finding], root: str) -> None:
    """StorageError when something could not be read: it may be whole, and is not to be moved."""
    for finding in findings:
        if finding.unreadable:
            raise StorageError(
                f"cannot repair the store {root}: {finding.kind} {finding.name} cannot be read, and"
                f" may be whole: {finding.reason}",
                hint="let it be read (its permissions, the limit on open files, the mount), then"
                " repair again",
                path=root,
            )


def _pack_of(finding: Finding) -> str | None:
    """The pack that a finding speaks of."""
    path = finding.name if finding.kind == "pack" else finding.pack
    return None if path is None else os.path.basename(path).removesuffix(".pack")


def _source(origin: str) -> str:
    return relative_pack_path(origin) if is_pack_name(origin) else origin


def _lost_wholly(left: Iterable[Finding]) -> list[LostStep]:
    """Steps whose commit or manifest is lost."""
    steps: dict[tuple[str, int], LostStep] = {}
    for finding in left:
        for hit in finding.hits:
            if finding.kind in ("commit", "manifest"):
                lost = LostStep(run=hit.run, number=hit.number, step=hit.step)
                steps[hit.run, hit.number] = lost
    return list(steps.values())


def _lost_partly(
    store: Store, commits: Iterable[Commit], lost: Mapping[bytes, int]
) -> Iterator[LostStep]:
    """Steps with tensors that need one of the lost chunks."""
    if not lost:
        return
    mapping = DamageMap(set(lost))
    for commit in commits:
        ranges = mapping.ranges(store.snapshot(commit))
        if ranges:
            tensors = [LostTensor(path=path, ranges=tuple(r)) for path, r in ranges.items()]
            yield LostStep(
                run=commit.run, number=commit.number, step=commit.step, tensors=tuple(tensors)
            )
