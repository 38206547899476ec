"""Putting chunks, manifests and commits into a store, durably and in the right order.

The order is the caller's duty and is guarded here: blobs (`put`, then `flush`), then the manifest
that names them (`write_manifest`), then the commit that makes the step exist (`commit`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
from blake3 import blake3

from deltackpt_store import codecs
from deltackpt_store.confirm import Confirmer
from deltackpt_store.encode_crew import Crew
from deltackpt_store.encode_helper import Digest
from deltackpt_store.encoder import Chunk as Chunk
from deltackpt_store.encoder import Encoder
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    StateError,
    StorageError,
)
from deltackpt_store.fileio import Buffer, publish_once
from deltackpt_store.generation import Generation
from deltackpt_store.history import ancestors_after
from deltackpt_store.holdings import Holdings
from deltackpt_store.holdings import Put as Put
from deltackpt_store.index import ChunkIndex, MemoryIndex
from deltackpt_store.leases import Claims, Lease
from deltackpt_store.manifest import Commit, Manifest
from deltackpt_store.manifest_io import closure_digest, digest_of, encode, encode_commit
from deltackpt_store.names import (
    RETIRED_SUFFIX,
    check_name,
    check_number,
    check_step,
    highest_number,
    number_name,
)
from deltackpt_store.oserror import storage_error, sync_directory
from deltackpt_store.pack import MAX_CHUNK_BYTES, pack_path
from deltackpt_store.pack_output import PackOutput
from deltackpt_store.presence import KIND as VANISHED
from deltackpt_store.presence import check_there, explain, make_empty_folders
from deltackpt_store.standing import Standing
from deltackpt_store.store import Store

FOLDERS = ("packs", "manifests", "runs", "gc")
"""What a writer makes when it is missing: none of these means anything by being empty."""

PACK_BYTES = 64 * 1024 * 1024


class StoreWriter:
    """Appends to a store. One per process, used by one thread; refuses to work after a fork.

    A background thread writes packs while the caller goes on; a `crew`, which stays the caller's,
    helps with encoding. Beside the caller's own buffers it holds about four times `BATCH_BYTES`, in
    which blobs are laid out, a cache of references and 200 bytes per unflushed blob. With `shadow`,
    that many bytes of the chunks stored without references are kept in memory, to code later ones
    against without reading.

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
        store: Store,
        *,
        codec: str = "auto",
        index: ChunkIndex | None = None,
        pack_bytes: int = PACK_BYTES,
        verify_dedup: bool = False,
        shadow: int | None = None,
        lease: Lease | None = None,
        crew: Crew | None = None,
    ) -> None:
        codecs.check_mode(codec)
        if pack_bytes < 1:
            raise InvalidInputError(f"pack_bytes must be positive, not {pack_bytes}")
        store.format.require("write", store.path)
        self.writer = secrets.token_hex(8) if lease is None else lease.writer
        self._io = store.io
        self._root = store.path
        self._uuid = store.uuid
        index = MemoryIndex() if index is None else index
        self._confirmer = Confirmer(self._io, self._root, index)
        self._holdings = Holdings(index, self._confirmer, verify=verify_dedup)
        self.encoder = Encoder(codec, self._confirmer, shadow=shadow, crew=crew)
        self._output = PackOutput(self._io, self._root, self._uuid, self.writer, pack_bytes)
        self._pid = os.getpid()
        self._closed = False
        self._failed: DeltackptError | None = None
        self._standing = Standing(self._io, self._root, self.writer, lease)
        self._heeding = False
        self._named: set[bytes] = set()  # manifests of the next commit
        self.claim: Callable[[frozenset[str]], Collection[str]] = self._holdings.relied.intersection
        """Which of the packs given, all condemned, the caller still builds upon."""
        self.heeded: Callable[[], None] | None = None
        """Called when a generation has been heeded: `absent_packs` and `absent_manifests` are to be
        forgotten now, they are not told again."""

    # garbage collection --------------------------------------------------------------------

    def heed(self) -> bool:
        """Let a waiting garbage collection go on; returns whether there is a new generation.

        What it condemns is not built upon from here on. Costs one directory listing. StorageError;
        CorruptionError where the store has lost its folder ``runs``.
        """
        self._check_process()
        try:
            if not self._heeding:
                make_empty_folders(self._io, self._root, FOLDERS)
                for folder in ("", "/packs", "/runs"):  # who made a folder may have been killed
                    sync_directory(self._io, f"{self._root}{folder}")
            moved = self._standing.heed(self._claims)
        except StorageError as error:
            raise self.explain(error) from error
        self._heeding = True
        if not moved:
            return False
        self._holdings.condemn(self._standing.packs, all_unindexed=self._standing.strict)
        if self.heeded is not None:
            self.heeded()
        return True

    def explain(self, error: DeltackptError) -> DeltackptError:
        """`error`, or that the store is gone where that is behind it.

        Nothing that was known of the store counts from then on: when it is back, chunks are looked
        for again, and every commit is proved.
        """
        found = explain(self._io, self._root, error)
        self._heeding = False  # folders that are gone are made again
        if found.kind == VANISHED:
            self._standing.strict = True
            self._holdings.doubt_all(self._standing.packs)
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
        """Store chunks; what became of each, see `puts`."""
        return list(self.puts(chunks))

    def puts(self, chunks: Sequence[Chunk]) -> Iterator[Put]:
        """Store chunks unless the store holds them; what became of each, in order.

        A chunk is stored when what became of it is asked for, and what is not asked for is not
        stored: what the caller does in between, it does while helpers encode those that follow.

        `raw` may be written from where it lies: the caller keeps it unchanged until `flush` or
        `abort` returns. A reference serves only when the store holds it without a reference of its
        own; otherwise, and when nothing is gained by it, the chunk is stored by itself. A recipe
        may refer to any chunk that the store holds, and to what was put before. Durable only after
        `flush`. Raises StorageError, InvalidInputError, StateError.
        """
        self._check()
        if not self._heeding:
            self.heed()
        views = [_flat(chunk.raw) for chunk in chunks]
        ids = [chunk.id or blake3(view).digest() for chunk, view in zip(chunks, views, strict=True)]
        puts = self._holdings.find_all(ids, views)
        fresh: dict[bytes, tuple[Chunk, memoryview]] = {}
        for chunk, chunk_id, view, put in zip(chunks, ids, views, puts, strict=True):
            if put is None:
                fresh.setdefault(chunk_id, (chunk, view))
        encodings = self.encoder.encodings(fresh, partial(self._holdings.depth, known={}))
        open_ = set(fresh)
        for chunk_id, view, put in zip(ids, views, puts, strict=True):
            if chunk_id in open_:
                open_.remove(chunk_id)
                put = self._append(chunk_id, view, next(encodings))
            yield put or self._holdings.unflushed(chunk_id)  # an equal one came before it

    def digests(
        self, views: Sequence[memoryview], seed: int, *, ahead: bool = False
    ) -> Iterator[Digest]:
        """Ids of chunks that are to be put, and their change hashes of that seed, in order.

        `ahead`: other chunks are to be put first; helpers, if there are any, begin with these when
        nothing of those is left for them.
        """
        return self.encoder.digests(views, seed, ahead=ahead)

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
        """The caller falls behind: encode less, if encoding is what takes the time."""
        self.encoder.hurry(self._output.busy_seconds, self._output.handed_out)

    def ease(self) -> None:
        """The caller keeps up: take a step back from what `hurry` gave up."""
        self.encoder.ease()

    def content(self, chunk_id: bytes) -> memoryview | None:
        """A chunk that the store holds, decoded and not yet proved; None when it cannot be had."""
        return self._holdings.content(chunk_id)

    def _append(self, chunk_id: bytes, view: memoryview, encoded: codecs.Encoded) -> Put:
        if not encoded.refs:
            self.encoder.stored_by_itself(chunk_id, view)
        pack, written = self._output.add(chunk_id, len(view), encoded)
        packs = self._holdings.add(chunk_id, pack, encoded)
        return Put(chunk_id, pack, written, encoded.codec, encoded.refs, packs)

    def flush(self) -> list[str]:
        """Make every blob put so far durable and its pack published; return the new pack names.

        Also makes durable the names of packs of other writers that `put` relied on. On an error
        (StorageError) nothing since the last flush counts as stored.
        """
        self._check()
        try:
            self._output.finish()
            if self._output.unpublished and not self._standing.leased:
                check_there(self._io, self._root, self._uuid)
            packs = self._output.publish()
            names = [name for name, _ in packs]
            relied = self._holdings.doubtful.union(names)
            for directory in sorted({os.path.dirname(pack_path(self._root, n)) for n in relied}):
                sync_directory(self._io, directory)
        except DeltackptError as error:
            self._failed = self.explain(error)
            self._drop_unflushed()
            raise self._failed from error
        self._holdings.flushed(packs)
        return names

    def abort(self) -> None:
        """Drop every blob not yet flushed, remove temporary files, and forget a failure."""
        self._check_process()
        self._drop_unflushed()
        self._failed = None

    def _drop_unflushed(self) -> None:
        self._output.drop()
        self._holdings.drop_unflushed()

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

    def look_for(self, parent: Commit | None, packs: Iterable[str], base: bytes | None) -> bool:
        """Whether the commit that the next one continues, the packs that it needs and the base of
        its manifest lie there.

        They do not where somebody has put an older copy in the store's place, or deleted files.
        Then nothing that was known of the store counts any more, and every commit is proved.
        StorageError.
        """
        try:
            there = parent is None or any(
                self._io.exists(f"{self._root}/runs/{parent.run}/{number_name(parent.number)}{end}")
                for end in ("", RETIRED_SUFFIX)
            )
            there = there and (
                base is None or self._io.exists(f"{self._root}/manifests/{base.hex()}")
            )
            folders: dict[str, set[str]] = {}
            for path in (pack_path(self._root, name) for name in packs):
                folders.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))
            there = there and all(
                names.issubset(self._io.list(folder)) for folder, names in folders.items()
            )
        except FileNotFoundError:
            there = False
        except OSError as error:
            raise storage_error(error, "look for what is built upon in", self._root) from error
        if not there:
            self._standing.strict = True
            self._holdings.doubt_all(self._standing.packs)
        return there

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
        step = check_step(step)
        names = sorted(set(packs))
        self._check_flushed(names)
        directory = os.path.join(self._root, "runs", run)
        if number is None:
            number = self._highest(directory) + 1
        check_number(number, f"runs/{run}")
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
        self._named.clear()
        self._holdings.committed()
        return msgspec.structs.replace(record, digest=data[-32:])

    def _highest(self, directory: str) -> int:
        try:
            return highest_number(self._io.list(directory))
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise storage_error(error, "list", directory) from error

    def _io_exists(self, path: str) -> bool:
        try:
            return self._io.exists(path)
        except OSError as error:
            raise storage_error(error, "look for", path) from error

    def _publish(self, path: str, data: bytes, doing: str) -> bool:
        """Create `path` durably; False when it exists with other content (see `publish_once`)."""
        try:
            return publish_once(self._io, path, data)
        except OSError as error:
            raise self.explain(storage_error(error, doing, path)) from error

    # state ---------------------------------------------------------------------------------

    def _check_flushed(self, packs: Iterable[str]) -> None:
        if not self._output.unpublished.isdisjoint(packs):
            raise StateError("the packs named are not durable yet", hint="flush() first")

    def _check(self) -> None:
        self._check_process()
        if self._failed is None and self._output.error is not None:
            error = self._output.error
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
        self._output.close()
        self._confirmer.close()
        self._standing.close()
        self._closed = True

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


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
