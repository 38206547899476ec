"""Putting chunks, manifests and commits into a store, durably and in the right order.

The order is the caller's duty and is guarded here: blobs (`put`, then `flush`), then the manifest
that names them (`write_manifest`), then the commit that makes the step exist (`commit`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3

from deltackpt_store import codecs
from deltackpt_store.coding_policy import MAX_HURRY
from deltackpt_store.confirm import MAX_DEPTH, Confirmer
from deltackpt_store.encoder import Encoder, Job
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    StateError,
    StorageError,
)
from deltackpt_store.fileio import (
    Buffer,
    FileIO,
    make_directory,
    publish_bytes,
    read_file,
)
from deltackpt_store.format_file import Format
from deltackpt_store.generation import Generation
from deltackpt_store.history import ancestors_after
from deltackpt_store.index import ChunkIndex, MemoryIndex
from deltackpt_store.io_thread import IoThread
from deltackpt_store.leases import Claims, Lease
from deltackpt_store.manifest import Commit, Manifest
from deltackpt_store.manifest_io import closure_digest, digest_of, encode, encode_commit
from deltackpt_store.names import (
    RETIRED_SUFFIX,
    check_name,
    check_step,
    number_name,
    parse_number,
)
from deltackpt_store.oserror import storage_error
from deltackpt_store.pack import MAX_CHUNK_BYTES, Location, pack_path
from deltackpt_store.pack_writer import BATCH_BYTES, PackBuilder, PackFile, sync_directory
from deltackpt_store.presence import KIND as VANISHED
from deltackpt_store.presence import check_there, explain, make_empty_folders
from deltackpt_store.recipes import Attempt, Coded, Recipe, Same, attempt
from deltackpt_store.standing import Standing

FOLDERS = ("packs", "manifests", "runs", "gc")
"""What a writer makes when it is missing: none of these tells anything by being empty."""

PACK_BYTES = 64 * 1024 * 1024


class StoreLike(Protocol):
    """What a writer needs of a store: its place, its uuid (16 bytes) and its file layer."""

    @property
    def path(self) -> str: ...
    @property
    def uuid(self) -> bytes: ...
    @property
    def io(self) -> FileIO: ...
    @property
    def format(self) -> Format: ...


class Put(NamedTuple):
    """What became of one chunk.

    `written` is 0 when the store already held it, else the bytes of its record. A manifest that
    names `id` must list `pack` and the packs of the chunks in `refs` (needed to decode it).
    """

    id: bytes
    pack: str
    written: int
    codec: int = codecs.RAW
    refs: tuple[bytes, ...] = ()


class Chunk(NamedTuple):
    """One chunk to be put: contiguous memory of 1 byte to 64 MiB.

    `dtype` guides the encoding. `stream` names the tensor that the chunk is of: what pays is
    learned per name, and tried for each chunk without one. `reference` is the id of a chunk that
    it resembles. The first of `recipes` that holds and pays is used instead of all that; `learned`
    is told what became of a prediction.
    """

    raw: Buffer
    dtype: str = "uint8"
    stream: str = ""
    reference: bytes | None = None
    recipes: tuple[Recipe, ...] = ()
    learned: Callable[[Coded], None] | None = None


class _Pack(NamedTuple):
    builder: PackBuilder
    file: PackFile


class StoreWriter:
    """Appends to a store. One per process, used by one thread; refuses to work after a fork.

    A background thread writes packs while the caller goes on, and up to four threads encode, as
    many as there are idle cores. Beside the caller's own buffers it holds about three times
    `BATCH_BYTES` of encoded blobs, the references of the chunks put together, a cache of references
    and 200 bytes per unflushed blob. With `shadow`, that many bytes of the chunks stored without
    references are kept in memory, to code later ones against without reading.

    Failure. When storing a pack fails (`put` or `flush` raises StorageError), blobs put since the
    last `flush` are lost, their temporary files are removed and never synced again, and every
    further `put`, `flush`, `write_manifest` and `commit` raises the same error until `abort` is
    called. After that the writer works again. Published packs are never touched.

    Deduplication. A chunk found in `index` counts as stored only when the record in the pack
    confirms it (checked once per chunk); `verify_dedup` also reads it back and compares the bytes.

    Garbage collection. The writer holds a lease (`lease`, else one taken at its first use; give one
    taken before the index was read when the writer lives on), and treats as absent what a
    collection condemns. `heed` must be called now and then: a collection waits for it. What is not
    yet part of a commit stays as long as the writer does; a writer that builds upon more than its
    puts since its last commit says so in `claim`.
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        codec: str = "auto",
        index: ChunkIndex | None = None,
        pack_bytes: int = PACK_BYTES,
        verify_dedup: bool = False,
        shadow: int | None = None,
        lease: Lease | None = None,
    ) -> None:
        codecs.check_mode(codec)
        if pack_bytes < 1:
            raise InvalidInputError(f"pack_bytes must be positive, not {pack_bytes}")
        store.format.require("write", store.path)
        self.writer = secrets.token_hex(8) if lease is None else lease.writer
        self._io = store.io
        self._root = store.path
        self._uuid = store.uuid
        self._pack_bytes = pack_bytes
        self._verify_dedup = verify_dedup
        self._index: ChunkIndex = MemoryIndex() if index is None else index
        self._confirmer = Confirmer(self._io, self._root, self._index)
        self.encoder = Encoder(codec, self._confirmer, shadow=shadow)
        self._thread = IoThread("deltackpt-packs")
        self._out = 0  # bytes handed to the thread
        self._pace = (0.0, 0, 0.0, 0)  # of encoder and thread when `hurry` looked last
        self._pid = os.getpid()
        self._closed = False
        self._failed: DeltackptError | None = None
        self._seq = 0
        self._open: _Pack | None = None
        self._sealed: list[_Pack] = []
        self._unflushed: dict[bytes, Put] = {}
        # Published by this writer, and not yet in the index: that follows the commit.
        self._uncommitted = MemoryIndex()
        self._durable: set[str] = set()  # packs whose name this writer knows to be durable
        self._doubtful: set[str] = set()  # relied upon since the last flush, name maybe not durable
        self._standing = Standing(self._io, self._root, self.writer, lease)
        self._heeding = False
        self._relied: set[str] = set()  # packs of puts since the last commit
        self._named: set[bytes] = set()  # manifests of the next commit
        self.claim: Callable[[frozenset[str]], Collection[str]] = self._relied.intersection
        """Which of the packs given, all condemned, the caller still builds upon."""
        self.heeded: Callable[[], None] | None = None
        """Called when a generation has been heeded: `absent_packs` and `absent_manifests` are to be
        forgotten now, they are not told again."""

    # garbage collection --------------------------------------------------------------------

    def heed(self) -> bool:
        """Let a waiting garbage collection go on; tells whether there is a new generation.

        What it condemns is not built upon from here on. Costs one directory listing. StorageError.
        """
        self._check_process()
        if not self._heeding:
            make_empty_folders(self._io, self._root, FOLDERS)
        try:
            moved = self._standing.heed(self._claims)
        except StorageError as error:
            raise self.explain(error) from error
        self._heeding = True
        if not moved:
            return False
        absent = self._standing.packs
        self._confirmer.ban(absent)
        for name in absent:
            self._uncommitted.drop_pack(name)
        if self._standing.strict:  # what was put may be gone: whoever puts it again stores it
            self._uncommitted = MemoryIndex()
            self._unflushed = {}
        self._durable -= absent
        while gone := [  # what they are coded against is going
            chunk_id
            for chunk_id, put in self._unflushed.items()
            if any(self._held(ref) is None for ref in put.refs)
        ]:
            for chunk_id in gone:
                del self._unflushed[chunk_id]
        if self.heeded is not None:
            self.heeded()
        return True

    def explain(self, error: DeltackptError) -> DeltackptError:
        """`error`, or that the store is gone where that is behind it.

        Nothing that was known of the store counts from then on: when it is back, chunks are looked
        for again, and every commit is proved.
        """
        found = explain(self._io, self._root, error)
        if found.kind == VANISHED:
            self._standing.strict = True
            self._confirmer.ban(self._standing.packs)
            self._uncommitted = MemoryIndex()
            self._durable.clear()
        return found

    @property
    def absent_packs(self) -> frozenset[str]:
        """Packs that must not be built upon: a collection is about to delete them."""
        return self._standing.packs

    @property
    def absent_manifests(self) -> frozenset[bytes]:
        """Manifests that must not be built upon: a collection is about to delete them."""
        return self._standing.manifests

    @property
    def bases(self) -> Mapping[str, int]:
        """By run, the commit whose chunks compaction has stored without references last."""
        return self._standing.generation.bases

    def _claims(self, generation: Generation) -> Claims:
        return Claims(
            generation.packs.intersection(self.claim(generation.packs)),
            generation.manifests & self._named,
        )

    # blobs ---------------------------------------------------------------------------------

    def put(
        self, raw: Buffer, *, dtype: str = "uint8", reference: bytes | None = None, stream: str = ""
    ) -> Put:
        """Store one chunk unless the store holds it; see `put_many`."""
        return self.put_many([Chunk(raw, dtype, stream, reference)])[0]

    def put_many(self, chunks: Sequence[Chunk]) -> list[Put]:
        """Store chunks unless the store holds them; what became of each, in order.

        `raw` is written from where it lies: the caller keeps it unchanged until `flush` or `abort`
        returns. A reference serves only when the store holds it without a reference of its own;
        otherwise, and when nothing is gained by it, the chunk is stored by itself. A recipe may
        refer to any chunk that the store holds, and to what was put before. Durable only after
        `flush`. Raises StorageError, InvalidInputError, StateError.
        """
        self._check()
        if not self._heeding:
            self.heed()
        views = [_flat(chunk.raw) for chunk in chunks]
        ids = self.encoder.map(_digest, views, sum(map(len, views)))
        puts: list[Put | None] = []
        fresh: dict[bytes, int] = {}
        for i, (chunk_id, view) in enumerate(zip(ids, views, strict=True)):
            put = self._unflushed.get(chunk_id) or self._stored(chunk_id, view)
            puts.append(put)
            if put is None:
                fresh.setdefault(chunk_id, i)
        made = self._by_recipe(chunks, views, fresh)
        others = {chunk_id: i for chunk_id, i in fresh.items() if chunk_id not in made}
        jobs = [
            Job(views[i], chunks[i].dtype, chunks[i].stream, self._usable(chunks[i].reference))
            for i in others.values()
        ]
        outcomes = self.encoder.encode(jobs)
        made.update(zip(others, (outcome.best for outcome in outcomes), strict=True))
        for chunk_id, i in fresh.items():
            puts[i] = self._append(chunk_id, views[i], made[chunk_id])
        return [put or self._unflushed[ids[i]] for i, put in enumerate(puts)]

    def _by_recipe(
        self, chunks: Sequence[Chunk], views: Sequence[memoryview], fresh: Mapping[bytes, int]
    ) -> dict[bytes, codecs.Encoded]:
        """Encodings of those chunks of which a recipe holds, by id."""
        policy = self.encoder.policy
        made: dict[bytes, codecs.Encoded] = {}
        work: dict[bytes, Attempt] = {}
        depths: dict[bytes, int] = {}
        for chunk_id, i in fresh.items():
            chunk, raw = chunks[i], views[i]
            for recipe in chunk.recipes:
                if isinstance(recipe, Same):
                    same = recipe.id == chunk_id
                    if same and self._depth(recipe.encoded.refs, depths) <= MAX_DEPTH:
                        made[chunk_id] = recipe.encoded
                elif self._depth(recipe.refs, depths) <= recipe.depth:
                    limit = policy.expected(chunk.stream) * len(raw)
                    if limit:
                        work[chunk_id] = Attempt(raw, recipe, policy.entropy, limit)
                if chunk_id in made or chunk_id in work:
                    break
        attempts = list(work.values())
        coded = self.encoder.map(attempt, attempts, sum(len(item.raw) for item in attempts))
        for chunk_id, result in zip(work, coded, strict=True):
            if result.encoded is not None:
                made[chunk_id] = result.encoded
            learned = chunks[fresh[chunk_id]].learned
            if learned is not None:
                learned(result)
        return made

    def _depth(self, refs: tuple[bytes, ...], known: dict[bytes, int]) -> int:
        """How deep a record's references go; more than is allowed when one is not there."""
        deepest = 0
        for ref in refs:
            depth = known.get(ref)
            if depth is None:
                known[ref] = depth = 2 * MAX_DEPTH  # stays for what goes round in a circle
                held = self._held(ref)
                if held is not None:
                    known[ref] = depth = self._depth(held[1], known)
            deepest = max(deepest, 1 + depth)
        return deepest

    def content(self, chunk_id: bytes) -> memoryview | None:
        """A chunk that the store holds, decoded and not yet proved; None when it cannot be had."""
        location = self._place(chunk_id)
        if location is None or self._confirmer.find(chunk_id) is None:
            return None
        try:
            return memoryview(self._confirmer.content(chunk_id, location))
        except (OSError, DeltackptError):
            return None

    def put_encoded(self, chunk_id: bytes, raw: memoryview, encoded: codecs.Encoded) -> Put:
        """Store a chunk in this form, also when the store holds it already.

        For compaction and repair, which have proved that `raw` has the id and is what `encoded`
        stands for. Otherwise as `put_many`.
        """
        self._check()
        if not self._heeding:
            self.heed()
        return self._append(chunk_id, raw, encoded)

    @property
    def encodes(self) -> bool:
        """Whether chunks are to be stored in fewer bytes than they have."""
        return self.encoder.policy.mode != "none"

    def next_save(self, state_bytes: int = 0) -> None:
        """What is put from here on belongs to another step, for what is learned about tensors.

        `state_bytes` is the size of the whole state: a shadow grows to it.
        """
        self.encoder.next_save(state_bytes)

    def hurry(self) -> None:
        """The caller falls behind: encode less, if that is what takes the time and not the disk.

        Goes down one step at a time (no zstd, then no encoding), and no further than where writing
        the larger blobs would take longer than encoding does now. `ease` goes back a step.
        """
        encoder, policy = self.encoder, self.encoder.policy
        seconds, raw, busy, written = self._pace
        self._pace = pace = encoder.seconds, encoder.raw_bytes, self._thread.busy_seconds, self._out
        taken, stored = pace[1] - raw, pace[3] - written
        if not taken or policy.hurry >= MAX_HURRY:
            return
        encoding = (pace[0] - seconds) / taken
        writing = (pace[2] - busy) / max(stored, 1)
        share = stored / taken if policy.hurry == 0 else 1.0
        if encoding > writing * share:
            policy.hurry += 1

    def ease(self) -> None:
        """The caller keeps up: take a step back from what `hurry` gave up."""
        self.encoder.policy.hurry = max(0, self.encoder.policy.hurry - 1)

    def _usable(self, reference: bytes | None) -> tuple[bytes, Location] | None:
        if reference is None:
            return None
        location = self.encoder.references.locate(reference)
        return None if location is None else (reference, location)

    def _append(self, chunk_id: bytes, view: memoryview, encoded: codecs.Encoded) -> Put:
        size = len(view)
        self._rely(self._packs_of(encoded.refs))
        if not encoded.refs:
            self.encoder.stored_by_itself(chunk_id, view)
        pack = self._open or self._new_pack()
        builder = pack.builder
        self._relied.add(builder.name)
        written = builder.add(chunk_id, size, encoded)
        self._unflushed[chunk_id] = Put(chunk_id, builder.name, 0, encoded.codec, encoded.refs)
        if builder.pending >= BATCH_BYTES:
            self._submit_batch(pack)
        if builder.size >= self._pack_bytes:
            self._finish_pack(pack)
        return Put(chunk_id, builder.name, written, encoded.codec, encoded.refs)

    def _stored(self, chunk_id: bytes, raw: memoryview) -> Put | None:
        location = self._place(chunk_id)
        if location is None:
            return None
        if self._verify_dedup and not self._same(chunk_id, raw):
            return None
        self._rely((location.pack, *self._packs_of(location.refs)))
        return Put(chunk_id, location.pack, 0, location.codec, location.refs)

    def packs_of(self, put: Put) -> tuple[str, ...]:
        """All packs that it takes to read the chunk, for a put of which no flush has failed."""
        return tuple(sorted({put.pack, *self._packs_of(put.refs)})) if put.refs else (put.pack,)

    def _held(self, chunk_id: bytes) -> tuple[str, tuple[bytes, ...]] | None:
        """Pack and references of a chunk that is stored or has been put; None when neither."""
        put = self._unflushed.get(chunk_id)
        if put is not None:
            return put.pack, put.refs
        location = self._place(chunk_id)
        return None if location is None else (location.pack, location.refs)

    def _rely(self, packs: Iterable[str]) -> None:
        for pack in packs:
            self._relied.add(pack)
            if pack not in self._durable:
                self._doubtful.add(pack)

    def _place(self, chunk_id: bytes) -> Location | None:
        """Where the chunk is stored, whole with what it is coded against; None when it is not."""
        location = self._uncommitted.get(chunk_id)
        if location is not None and all(self._place(ref) for ref in location.refs):
            return location
        return self._confirmer.find(chunk_id)

    def _packs_of(self, refs: tuple[bytes, ...]) -> Iterable[str]:
        """Packs of these chunks and of all they need; each chunk is looked at once."""
        seen: set[bytes] = set()
        open_ = list(refs)
        while open_:
            ref = open_.pop()
            if ref in seen:
                continue
            seen.add(ref)
            location = self._place(ref)
            if location is not None:
                yield location.pack
                open_ += location.refs

    def _same(self, chunk_id: bytes, raw: memoryview) -> bool:
        location = self._confirmer.find(chunk_id)
        if location is None:
            return True  # stored by this very writer a moment ago
        try:
            return memoryview(self._confirmer.content(chunk_id, location)) == raw
        except (OSError, DeltackptError):
            self._confirmer.forget(chunk_id)
            self._index.drop_pack(location.pack)
            return False

    def _new_pack(self) -> _Pack:
        self._seq += 1
        builder = PackBuilder(self._uuid, self.writer, self._seq)
        self._open = _Pack(builder, PackFile(self._io, pack_path(self._root, builder.name)))
        return self._open

    def _submit_batch(self, pack: _Pack) -> None:
        batch = pack.builder.take()
        self._out += batch.size
        self._thread.submit(partial(pack.file.write, batch))

    def _finish_pack(self, pack: _Pack) -> None:
        if pack.builder.pending:
            self._submit_batch(pack)
        self._thread.submit(partial(pack.file.write, pack.builder.take_footer()))
        self._thread.submit(pack.file.seal)
        self._sealed.append(pack)
        self._open = None

    def flush(self) -> list[str]:
        """Make every blob put so far durable and its pack published; return the new pack names.

        Also makes durable the names of packs of other writers that `put` relied on. On an error
        (StorageError) nothing since the last flush counts as stored.
        """
        self._check()
        try:
            if self._open is not None:
                self._finish_pack(self._open)
            self._thread.drain()
            if self._sealed and not self._standing.leased:
                check_there(self._io, self._root, self._uuid)
            packs, self._sealed = self._sealed, []
            for i, pack in enumerate(packs):
                try:
                    pack.file.publish()
                except DeltackptError:
                    self._sealed = packs[i:]
                    raise
            names = [p.builder.name for p in packs]
            relied = self._doubtful.union(names)
            for directory in sorted({os.path.dirname(pack_path(self._root, n)) for n in relied}):
                sync_directory(self._io, directory)
        except DeltackptError as error:
            self._failed = self.explain(error)
            self._drop_unflushed()
            raise self._failed from error
        self._durable |= relied
        self._doubtful = set()
        self._unflushed = {}
        for pack in packs:
            self._uncommitted.add_pack(pack.builder.name, pack.builder.entries())
        return names

    def abort(self) -> None:
        """Drop every blob not yet flushed, remove temporary files, and forget a failure."""
        self._check_process()
        self._drop_unflushed()
        self._failed = None

    def _drop_unflushed(self) -> None:
        self._thread.reset()
        for pack in self._sealed:
            pack.file.discard()
        if self._open is not None:
            self._open.file.discard()
        self._sealed, self._open = [], None
        self._unflushed = {}
        self._doubtful = set()

    # manifests and commits -----------------------------------------------------------------

    def write_manifest(self, manifest: Manifest) -> bytes:
        """Make `manifest` durable and return its digest; an equal one may exist already.

        StateError when it names a pack of this writer that is not flushed.
        """
        self._check()
        self.heed()
        self._check_flushed(manifest.packs)
        data = encode(manifest)
        digest = digest_of(data)
        if digest in self._standing.manifests:  # the one that is there is about to go
            data = encode(msgspec.structs.replace(manifest, salt=secrets.token_bytes(8)))
            digest = digest_of(data)
        self._named.update(d for d in (digest, manifest.base) if d is not None)
        path = os.path.join(self._root, "manifests", digest.hex())
        if not self._publish(path, data, "write the manifest"):
            raise CorruptionError(
                f"manifest {path} exists and is damaged",
                kind="damaged-manifest", hint="run `deltackpt repair`", path=path,
            )  # fmt: skip
        return digest

    def commit(
        self,
        *,
        run: str,
        step: int,
        parent: Commit | None,
        manifest: bytes,
        base: bytes | None,
        root: bytes,
        packs: Iterable[str],
        number: int | None = None,
        versions: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        stats: Mapping[str, float] | None = None,
    ) -> Commit:
        """Create the next numbered commit of `run`, durably, or raise ConflictError.

        `manifest` and `base` are digests of durable manifests (`base` None when the manifest is
        its own base), `root` the Merkle root, `packs` all packs the manifest depends on. `number`
        is the number to take: pass the one above the newest commit this writer has seen, so that a
        commit made by somebody else in between is a conflict; None means one above whatever exists
        now. Afterwards the index learns the packs flushed so far. StateError (kind ``collected``)
        when garbage collection has taken this writer for dead and may have deleted what the step
        needs: then there is no commit, and the step must be saved anew.
        """
        self._check()
        if not self._heeding:
            self.heed()
        check_name(run, "run")
        check_step(step)
        names = sorted(set(packs))
        self._check_flushed(names)
        directory = os.path.join(self._root, "runs", run)
        if number is None:
            number = self._highest(directory) + 1
        record = Commit(
            run=run, number=number, step=step,
            parent=None if parent is None else (parent.run, parent.number, parent.digest),
            manifest=manifest, base=base, root=root, closure=closure_digest(names),
            writer=self.writer, nonce=secrets.token_bytes(16), generation=self._standing.seen,
            created=time.time(), versions=dict(versions or {}), metrics=dict(metrics or {}),
            stats=dict(stats or {}), ancestors=ancestors_after(parent, run),
        )  # fmt: skip
        data = encode_commit(record)
        path = os.path.join(directory, number_name(number))
        if self._io_exists(path + RETIRED_SUFFIX) or not self._publish(path, data, "write"):
            raise ConflictError(
                f"commit {number} of run {run!r} was made by somebody else",
                kind="commit-taken", run=run, number=number, step=step,
                hint="let one writer at a time save to a run, or give this one its own run",
            )  # fmt: skip
        try:
            self._standing.settle(record, path)
        except StateError:
            self.heed()
            raise
        self._relied.clear()
        self._named.clear()
        self._index_committed()
        return msgspec.structs.replace(record, digest=data[-32:])

    def _index_committed(self) -> None:
        fresh, self._uncommitted = self._uncommitted, MemoryIndex()
        packs = [(name, fresh.entries(name)) for name in sorted(fresh.packs())]
        if packs:
            self._index.add_packs([(name, entries) for name, entries in packs if entries])

    def _highest(self, directory: str) -> int:
        try:
            names = self._io.list(directory)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise storage_error(error, "list", directory) from error
        numbers = (parse_number(name.removesuffix(RETIRED_SUFFIX)) for name in names)
        return max((n for n in numbers if n is not None), default=0)

    def _io_exists(self, path: str) -> bool:
        try:
            return self._io.exists(path)
        except OSError as error:
            raise storage_error(error, "look for", path) from error

    def _publish(self, path: str, data: bytes, doing: str) -> bool:
        """Create `path` durably; False when it exists with other content.

        An existing file with exactly these bytes counts as created: over a network the answer to
        a creation may be lost and the call repeated.
        """
        try:
            make_directory(self._io, os.path.dirname(path))
            while True:
                try:
                    publish_bytes(self._io, path, data)
                    return True
                except FileExistsError:
                    if not self._io.exists(path):
                        continue  # collected in this very moment
                if read_file(self._io, path, max(len(data), 1 << 30)) != data:
                    return False
                self._io.sync_directory(os.path.dirname(path))
                return True
        except OSError as error:
            raise self.explain(storage_error(error, doing, path)) from error

    # state ---------------------------------------------------------------------------------

    def _check_flushed(self, packs: Iterable[str]) -> None:
        unflushed = {p.builder.name for p in self._sealed}
        if self._open is not None:
            unflushed.add(self._open.builder.name)
        if not unflushed.isdisjoint(packs):
            raise StateError("the packs named are not durable yet", hint="flush() first")

    def _check(self) -> None:
        self._check_process()
        if self._failed is None and self._thread.error is not None:
            error = self._thread.error
            if not isinstance(error, DeltackptError):
                error = StateError(f"writing packs failed: {type(error).__name__}: {error}")
            self._failed = error
            self._drop_unflushed()
        if self._failed is not None:
            raise self._failed

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "this writer belongs to the process that opened it, not to a forked child",
                kind="forked", hint="open the store again in this process",
            )  # fmt: skip
        if self._closed:
            raise StateError("the writer is closed", kind="closed")

    def close(self) -> None:
        """Drop what is not flushed and end the thread. The index given stays open."""
        if self._closed or os.getpid() != self._pid:
            return
        self._drop_unflushed()
        self._thread.stop()
        self.encoder.close()
        self._confirmer.close()
        self._standing.close()
        self._closed = True

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _digest(view: memoryview) -> bytes:
    return blake3(view).digest()


def _flat(raw: Buffer) -> memoryview:
    view = memoryview(raw)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    if not 0 < len(view) <= MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"a chunk of {len(view)} bytes cannot be stored",
            kind="chunk-size", hint=f"a chunk has 1 to {MAX_CHUNK_BYTES} bytes", size=len(view),
        )  # fmt: skip
    return view
