"""One run being written: from staged chunks to blobs, chunk tables, manifests and commits.

Used by one thread. Failure policy: what is wrong with one save (a torn chunk, a step out of
order) fails that save; what is wrong with the storage fails every save with blobs that are not
durable yet, and those blobs are dropped. Either way the session goes on, the step can be saved
again, and a failed save is never what a later one refers to.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from deltackpt_store import protocol
from deltackpt_store.encode_crew import Crew
from deltackpt_store.encode_helper import Digest
from deltackpt_store.errors import (
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    NotFoundError,
    StateError,
)
from deltackpt_store.index import ChunkIndex, MemoryIndex, refresh
from deltackpt_store.intake import Arrived, Intake
from deltackpt_store.layout_check import check_counts, check_layout, check_structure
from deltackpt_store.leases import Hold, Lease, hold
from deltackpt_store.lineage import Lineage
from deltackpt_store.manifest import Commit, Layout, Snapshot
from deltackpt_store.pending_save import PendingSave
from deltackpt_store.protocol import Begin, Committed, Finish, Hello, Slot, ToTrainer, ToWriter
from deltackpt_store.publisher import Publisher
from deltackpt_store.retention import SESSION_SECONDS, Retention
from deltackpt_store.ring import Ring
from deltackpt_store.runlock import RunLock
from deltackpt_store.small_parts import SmallParts
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from deltackpt_store.tables import ChunkTable

_log = logging.getLogger("deltackpt.writer")

_TOGETHER_BYTES = 32 * 1024 * 1024

KEPT_TABLES = 4
"""Chunk tables kept for saves to be relative to: two in flight, the last commit, one spare."""


class _Batch(NamedTuple):
    """Staged chunks that are still to be stored: extent, chunk and change hash of each, and its
    bytes in the slots."""

    save: PendingSave
    slots: list[int]
    places: list[tuple[int, int, bytes]]
    pieces: list[memoryview]
    digests: Iterator[Digest]


class RunWriter:
    """The writer's side of one run. `send` tells the trainer; `ring` is only read."""

    def __init__(
        self,
        store: Store,
        hello: Hello,
        ring: Ring,
        *,
        index: ChunkIndex,
        lock: RunLock,
        lease: Lease | None,
        send: Callable[[ToTrainer], None],
        crew: Crew | None = None,
    ) -> None:
        """Owns `index`, `lock` and `lease` once it is made."""
        self._store = store
        self._run = hello.run
        self._seed = hello.seed
        self._ring = ring
        self._index = index
        self._lock = lock
        self._send = send
        self._writer = StoreWriter(
            store, codec=hello.options.codec, index=index, pack_bytes=hello.options.pack_bytes,
            shadow=0 if hello.options.shadow else None, lease=lease, crew=crew,
        )  # fmt: skip
        self._writer.claim = self._claim
        self._writer.heeded = self._heeded
        self._intake = Intake(self._writer, predict=hello.options.shadow)
        self._lineage = Lineage(store, hello.run)
        self._publisher = Publisher(
            store, hello.run, self._writer, self._lineage, versions=hello.options.versions
        )
        keep = hello.options.keep
        self._retention = None if keep is None else Retention(store, hello.run, keep)
        self._hold: Hold | None = None
        self._index_is_old = False  # chunks were moved, or packs pardoned
        # Number of the newest commit whose chunks later ones are known to be coded against.
        self._adopted = 0 if self._lineage.head is None else self._lineage.head.number
        self._layout: Layout | None = None
        self._active: dict[int, PendingSave] = {}
        self._tables: OrderedDict[int | tuple[str, int], ChunkTable | None] = OrderedDict()
        self._small = SmallParts()
        self._batch: _Batch | None = None
        self._held: list[int] = []
        self._dirty: set[int] = set()  # saves with blobs that no flush has made durable
        self._starving = False
        self._behind = False  # since the last commit
        self._opened = time.monotonic()
        self._complaint = ""
        self._hurried = (0, 0)  # chunks and bytes encoded in a hurry before the last commit

    # messages ----------------------------------------------------------------------------------

    def handle(self, message: ToWriter) -> None:
        """Do what the message asks for; every failure of a save is sent to the trainer.

        Raises only for a message that has no place here.
        """
        if isinstance(message, Slot):
            self.stage([message])
            return
        self._store_batch()
        match message:
            case Begin():
                self._begin(message)
            case Finish():
                self._finish(message)
            case protocol.Abort(save):
                if save in self._active:
                    step = self._active[save].step
                    self._fail(save, StateError(f"step {step} was given up", kind="aborted"))
            case protocol.NeedSlots():
                self._starving = True
            case _:
                raise StateError(f"unexpected message {type(message).__name__}", kind="protocol")

    def hurry(self) -> None:
        """The trainer has begun a save while chunks of an earlier one are still being encoded.

        Slots running out is no such sign: a state larger than the ring goes in waves.
        """
        self._behind = True
        self._writer.hurry()

    def relieve(self) -> None:
        """Do what has been put off; make slots free if the trainer waits for one.

        Called when no message is waiting.
        """
        self._store_batch()
        if self._starving and self._held:
            self._flush()

    def attend(self) -> None:
        """Let a waiting garbage collection go on; called every second or so, idle or not."""
        store = self._store
        try:
            self._writer.heed()
            if self._index_is_old:
                staying = set(store.packs.names()) - self._writer.absent_packs
                refresh(self._index, store.io, store.path, staying, store_uuid=store.uuid)
                self._index_is_old = False
                self._adopt_base()
            self._complaint = ""
        except DeltackptError as error:
            if str(error) != self._complaint:  # said once, not every second
                _log.warning("%s", error)
            self._complaint = str(error)

    def close(self) -> None:
        """Drop what is not committed and let the run go. Nothing is sent."""
        try:
            self._release_hold()
            self._writer.close()
        finally:
            self._index.close()
            self._lock.release()

    def ready(self) -> protocol.Ready:
        return protocol.Ready(self._store.uuid.hex(), os.getpid(), self._writer.writer)

    # begin -------------------------------------------------------------------------------------

    def _begin(self, begin: Begin) -> None:
        try:
            layout = self._take_layout(begin)
            if begin.parent is not None:
                self._lineage.restart(begin.parent)
                self._keep_alive(self._lineage.head)
            begun = max((save.step for save in self._active.values()), default=None)
            self._lineage.check(begin.step, overwrite=begin.overwrite, begun=begun)
            source = self._relative(begin)
            table = ChunkTable(layout) if source is None else source.derive(layout)
            self._active[begin.save] = PendingSave(begin, table)
            self._writer.next_save(sum(spec.nbytes for spec in layout.extents))
            self._intake.begin(self._active[begin.save], begin)
        except Exception as error:
            self._fail(begin.save, error)

    def _take_layout(self, begin: Begin) -> Layout:
        if begin.layout is not None:
            self._layout = None
            try:
                layout = msgspec.msgpack.decode(begin.layout, type=Layout)
                check_counts(layout, "layout")
                check_structure(layout.structure, "layout")
                check_layout(layout, "layout")
            except (msgspec.MsgspecError, CorruptionError) as error:
                raise InvalidInputError(f"the layout is not valid: {error}") from error
            self._layout = self._publisher.known_layout(layout)
        if self._layout is None:
            raise InvalidInputError("no valid layout was given")
        return self._layout

    def _relative(self, begin: Begin) -> ChunkTable | None:
        """The table of what the save is relative to; None for a save that stages everything."""
        key = begin.relative if begin.relative is not None else begin.relative_commit
        if key is None:
            return None
        if key in self._tables:
            table = self._tables[key]
            if table is None:
                raise StateError(
                    "the step saved before failed, and this one was relative to it",
                    kind="relative-failed",
                    hint="save again",
                )
            return table
        if isinstance(key, int):
            raise StateError(
                "the step saved before is not complete or no longer known, and this one is relative"
                " to it",
                kind="relative-unknown",
            )
        commit, snapshot = self._read_step(key)
        table = ChunkTable.from_snapshot(snapshot, self._footers_of(snapshot))
        self._publisher.continue_from(commit, snapshot)
        self._small.next(snapshot.layout, snapshot.objects, snapshot.inline)
        self._keep_table(key, table)
        return table

    def _read_step(self, key: tuple[str, int]) -> tuple[Commit, Snapshot]:
        """The committed step of that run and number, held from here on.

        StateError (kind ``collected``) when it is gone or damaged: no save can be relative to it.
        """
        head = self._lineage.head
        try:
            if head is not None and (head.run, head.number) == key:
                commit = head
            else:
                commit = self._store.read_commit(*key)
            self._keep_alive(commit)
            return commit, self._store.snapshot(commit)
        except (NotFoundError, CorruptionError) as error:
            raise StateError(
                f"the step saved before, which this one builds upon, cannot be read any more:"
                f" {error.message}",
                kind="collected",
                hint="save the step again: all of it is stored anew then",
                run=key[0],
            ) from error

    def _footers_of(self, snapshot: Snapshot) -> MemoryIndex:
        """Where the chunks of a step lie: footers, not the cache, say which pack holds what.

        A pack that is wrongly left out of what a save needs could be deleted under it. Chunks may
        have moved since the step was saved.
        """
        store, footers = self._store, MemoryIndex()
        there = set(store.packs.names()) - self._writer.absent_packs
        refresh(footers, store.io, store.path, there.intersection(snapshot.packs),
                store_uuid=store.uuid)  # fmt: skip
        if not there.issuperset(snapshot.packs):
            refresh(footers, store.io, store.path, there, store_uuid=store.uuid)
        return footers

    # garbage collection ------------------------------------------------------------------------

    def _claim(self, packs: frozenset[str]) -> set[str]:
        """Which of the condemned `packs` saves in flight, or relative to kept tables, still need.

        Chunks that other packs hold as well are looked for there from now on.
        """
        tables = [table for table in self._all_tables() if not packs.isdisjoint(table.packs())]
        if not tables:
            return set()
        store, footers = self._store, MemoryIndex()
        staying = set(store.packs.names()) - packs
        refresh(footers, store.io, store.path, staying, store_uuid=store.uuid)
        needed: set[str] = set()
        for table in tables:
            needed |= table.leave(packs, footers)
        return needed

    def _heeded(self) -> None:
        self._publisher.forget(self._writer.absent_manifests)
        self._index_is_old = True

    def _adopt_base(self) -> None:
        """Code further saves against the base that a compaction has made.

        What the old base holds can then be deleted once no step refers to it any more.
        """
        number = self._writer.bases.get(self._run, 0)
        if number <= self._adopted:
            return
        self._adopted = number
        try:
            snapshot = self._store.snapshot(self._store.read_commit(self._run, number))
        except DeltackptError as error:  # it was collected: the next save stores its own base
            _log.info("the base that compaction has made is not used: %s", error)
            return
        for table in self._all_tables():
            table.adopt(snapshot.layout, snapshot.chunks)

    def _all_tables(self) -> list[ChunkTable]:
        """Of the saves in flight, and what later ones may be relative to; each table once."""
        tables = [save.table for save in self._active.values()]
        tables += [table for table in self._tables.values() if table is not None]
        return list({id(table): table for table in tables}.values())

    def _keep_alive(self, commit: Commit | None) -> None:
        """Hold what training was restored from, until this session has a commit of its own.

        It may have been taken off the list in the moment of the restore: then the trainer's own
        hold keeps it, and what is built upon is claimed from a collection in any case.
        """
        if commit is None:
            return
        try:
            held = hold(self._store.io, self._store.path, commit)
        except NotFoundError:
            return
        self._release_hold()
        self._hold = held

    def _release_hold(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    # staging -----------------------------------------------------------------------------------

    @property
    def most_together(self) -> int:
        """Slots that are worth handing to `stage` at a time."""
        return max(1, min(_TOGETHER_BYTES // self._ring.slot_bytes, self._ring.slots // 8))

    def stage(self, messages: Sequence[Slot]) -> None:
        """Take what lies in slots of one save: the more at a time, the better on several cores.

        It is stored when more is staged, or what comes next is handled, or nothing comes
        (`relieve`): helpers hash it while what was staged before is stored. A failure of the save
        is told to the trainer.
        """
        save = self._active.get(messages[0].save)
        slots = [message.slot for message in messages]
        if save is None:  # failed or given up while this was on its way
            self._send(protocol.Released(slots))
            return
        began = time.perf_counter()
        try:
            batch = self._open_batch(save, messages)
        except Exception as error:
            self._held += slots
            self._fail(save.id, error)
            return
        save.encode_seconds += time.perf_counter() - began
        self._store_batch()
        self._batch = batch

    def _open_batch(self, save: PendingSave, messages: Sequence[Slot]) -> _Batch:
        places: list[tuple[int, int, bytes]] = []
        pieces: list[memoryview] = []
        for message in messages:
            data = self._ring.view(message.slot)
            for extent, chunk, offset, length, change in protocol.unpack_records(message.records):
                save.check_place(extent, chunk, length)
                if offset + length > len(data):
                    raise InvalidInputError(
                        f"a staged chunk lies at {offset} + {length} in a slot of {len(data)}",
                        kind="protocol",
                    )
                places.append((extent, chunk, change))
                pieces.append(data[offset : offset + length])
        digests = self._writer.digests(pieces, self._seed, ahead=self._batch is not None)
        return _Batch(save, [message.slot for message in messages], places, pieces, digests)

    def _store_batch(self) -> None:
        """Store what was staged last, if it has not been stored."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        save = batch.save
        if save.id not in self._active:
            self._send(protocol.Released(batch.slots))
            return
        self._held += batch.slots
        self._dirty.add(save.id)
        began = time.perf_counter()
        try:
            arrived: list[Arrived] = []
            for (extent, chunk, change), raw, digest in zip(
                batch.places, batch.pieces, batch.digests, strict=True
            ):
                if digest.change != change:
                    raise save.torn(extent, chunk)
                arrived.append(Arrived(extent, chunk, raw, digest.id))
            self._intake.take(save, arrived)
        except Exception as error:
            self._fail(save.id, error)
            return
        save.encode_seconds += time.perf_counter() - began
        if 2 * len(self._held) >= self._ring.slots:
            self._flush()  # while the trainer fills the other half

    def _flush(self) -> bool:
        """Make all blobs durable and release their slots; False when the storage refused."""
        began = time.perf_counter()
        try:
            if self._dirty:
                self._intake.settle()
                self._writer.flush()
        except Exception as error:
            self._fail_unflushed(error)
            return False
        spent = time.perf_counter() - began
        for save in self._dirty:
            if save in self._active:
                self._active[save].flush_seconds += spent
        self._dirty.clear()
        self._release()
        return True

    def _release(self) -> None:
        if self._held:
            self._send(protocol.Released(sorted(self._held)))
            self._held = []
            self._starving = False

    # finish ------------------------------------------------------------------------------------

    def _finish(self, message: Finish) -> None:
        save = self._active.get(message.save)
        if save is None:
            return
        try:
            self._intake.settle(complete=True)
            save.check_complete(message)
        except Exception as error:
            self._fail(save.id, error)
            return
        if not self._flush() and save.id not in self._active:
            return  # its blobs were among those that are lost
        try:
            save.table.freeze()
            stats = {**save.stats(message), **self._coding_stats()}
            small = self._small.next(save.table.layout, message.objects, message.inline)
            stats["small_changed_bytes"] = float(small)
            stats[SESSION_SECONDS] = time.monotonic() - self._opened
            commit, base = self._publisher.publish(save, message, stats)
        except Exception as error:
            self._small = SmallParts()
            self._fail(save.id, error)
            return
        del self._active[save.id]
        self._intake.end(save)
        self._keep_table(save.id, save.table)
        self._keep_table((commit.run, commit.number), save.table)
        if not self._behind:
            self._writer.ease()
        self._behind = False
        stats["writer_seconds"] = time.monotonic() - save.began
        self._send(
            Committed(
                save.id, commit.run, commit.number, commit.step, commit.digest, commit.manifest,
                commit.root, base, stats,
            )
        )  # fmt: skip
        self._release_hold()
        self._retain(commit)

    def _retain(self, commit: Commit) -> None:
        """Take off the list what need not be kept, now that `commit` is durable."""
        if self._retention is None:
            return
        try:
            retired = self._retention.apply(commit)
        except DeltackptError as error:  # what should have gone is still there: nothing is lost
            _log.warning("retention failed: %s", error)
            return
        if retired:
            self._send(protocol.Retired(commit.step, [gone.step for gone in retired]))

    def _coding_stats(self) -> dict[str, float]:
        encoder = self._writer.encoder
        chunks, size = self._hurried
        self._hurried = encoder.hurried_chunks, encoder.hurried_bytes
        return {
            "hurried_chunks": float(encoder.hurried_chunks - chunks),
            "hurried_bytes": float(encoder.hurried_bytes - size),
        }

    def _keep_table(self, key: int | tuple[str, int], table: ChunkTable | None) -> None:
        self._tables[key] = table
        self._tables.move_to_end(key)
        while len(self._tables) > 2 * KEPT_TABLES:  # most tables are kept under two keys
            self._tables.popitem(last=False)

    # failure -----------------------------------------------------------------------------------

    def _fail(self, save: int, error: Exception) -> None:
        """Fail one save; every unflushed one too when the error is of the storage."""
        of_save = isinstance(error, DeltackptError) and not isinstance(error, OSError)
        if not of_save and save in self._dirty:
            self._fail_unflushed(error)
            return
        self._settle(save, error)
        self._dirty.discard(save)
        if not self._dirty:
            self._drop_blobs()

    def _fail_unflushed(self, error: Exception) -> None:
        for save in sorted(self._dirty):
            self._settle(save, error)
        self._dirty.clear()
        self._drop_blobs()

    def _drop_blobs(self) -> None:
        """Forget blobs that nothing needs, so that a failed save leaves no garbage behind."""
        self._writer.abort()
        self._release()

    def _settle(self, save: int, error: Exception) -> None:
        if isinstance(error, DeltackptError):
            error = self._writer.explain(error)
        else:
            active = self._active.get(save)
            _log.error("the save of step %s failed", active and active.step, exc_info=error)
        self._active.pop(save, None)
        self._intake.failed(save)
        self._keep_table(save, None)
        self._send(protocol.Failed(save, protocol.wire_error(error)))
