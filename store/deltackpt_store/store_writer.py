"""Putting chunks, manifests and commits into a store, durably and in the right order.

The order is the caller's duty and is guarded here: blobs (`put`, then `flush`), then the manifest
that names them (`write_manifest`), then the commit that makes the step exist (`commit`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3

from deltackpt_store import codecs
from deltackpt_store.confirm import Confirmer
from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    StateError,
)
from deltackpt_store.fileio import (
    Buffer,
    FileIO,
    make_directories,
    publish_bytes,
    read_file,
)
from deltackpt_store.history import ancestors_after
from deltackpt_store.index import ChunkIndex, MemoryIndex
from deltackpt_store.io_thread import IoThread
from deltackpt_store.manifest import Commit, Manifest
from deltackpt_store.manifest_io import closure_digest, digest_of, encode, encode_commit
from deltackpt_store.names import RETIRED_SUFFIX, check_name, number_name, parse_number
from deltackpt_store.oserror import storage_error
from deltackpt_store.pack import MAX_CHUNK_BYTES, pack_path
from deltackpt_store.pack_writer import BATCH_BYTES, PackBuilder, PackFile, sync_directory

PACK_BYTES = 64 * 1024 * 1024


class StoreLike(Protocol):
    """What a writer needs of a store: its place, its uuid (16 bytes) and its file layer."""

    @property
    def path(self) -> str: ...
    @property
    def uuid(self) -> bytes: ...
    @property
    def io(self) -> FileIO: ...


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


class _Pack(NamedTuple):
    builder: PackBuilder
    file: PackFile


class StoreWriter:
    """Appends to a store. One per process, used by one thread; refuses to work after a fork.

    A background thread writes packs while the caller goes on. Beside the caller's own buffers it
    holds about three times `BATCH_BYTES` of encoded blobs and 200 bytes per unflushed blob.

    Failure. When storing a pack fails (`put` or `flush` raises StorageError), blobs put since the
    last `flush` are lost, their temporary files are removed and never synced again, and every
    further `put`, `flush`, `write_manifest` and `commit` raises the same error until `abort` is
    called. After that the writer works again. Published packs are never touched.

    Deduplication. A chunk found in `index` counts as stored only when the record in the pack
    confirms it (checked once per chunk); `verify_dedup` also reads it back and compares the bytes.
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        codec: str = "auto",
        index: ChunkIndex | None = None,
        pack_bytes: int = PACK_BYTES,
        verify_dedup: bool = False,
    ) -> None:
        if codec not in codecs.MODES:
            raise InvalidInputError(
                f"codec must be one of {', '.join(codecs.MODES)}, not {codec!r}", option="codec"
            )
        if pack_bytes < 1:
            raise InvalidInputError(f"pack_bytes must be positive, not {pack_bytes}")
        self.writer = secrets.token_hex(8)
        self._io = store.io
        self._root = store.path
        self._uuid = store.uuid
        self._codec = codec
        self._pack_bytes = pack_bytes
        self._verify_dedup = verify_dedup
        self._index: ChunkIndex = MemoryIndex() if index is None else index
        self._confirmer = Confirmer(self._io, self._root, self._index)
        self._thread = IoThread("deltackpt-packs")
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

    # blobs ---------------------------------------------------------------------------------

    def put(self, raw: Buffer, *, dtype: str = "uint8", reference: bytes | None = None) -> Put:
        """Store a chunk unless the store holds it.

        `raw` (contiguous, 1 byte to 64 MiB) is written from where it lies: the caller keeps it
        unchanged until `flush` or `abort` returns. `dtype` guides the encoding. `reference` is the
        id of a chunk that `raw` resembles; it is a hint that the present codecs make no use of.
        Durable only after `flush`. Raises StorageError, InvalidInputError, StateError.
        """
        self._check()
        view = memoryview(raw)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        chunk_id = blake3(view).digest()
        known = self._unflushed.get(chunk_id)
        if known is not None:
            return known
        stored = self._stored(chunk_id, view)
        if stored is not None:
            return stored
        size = len(view)
        if not 0 < size <= MAX_CHUNK_BYTES:
            raise InvalidInputError(
                f"a chunk of {size} bytes cannot be stored",
                kind="chunk-size", hint=f"a chunk has 1 to {MAX_CHUNK_BYTES} bytes", size=size,
            )  # fmt: skip
        encoded = codecs.choose(view, dtype, self._codec)
        pack = self._open or self._new_pack()
        builder = pack.builder
        written = builder.add(chunk_id, size, encoded)
        self._unflushed[chunk_id] = Put(chunk_id, builder.name, 0, encoded.codec, encoded.refs)
        if builder.pending >= BATCH_BYTES:
            self._submit_batch(pack)
        if builder.size >= self._pack_bytes:
            self._finish_pack(pack)
        return Put(chunk_id, builder.name, written, encoded.codec, encoded.refs)

    def _stored(self, chunk_id: bytes, raw: memoryview) -> Put | None:
        location = self._uncommitted.get(chunk_id) or self._confirmer.find(chunk_id)
        if location is None:
            return None
        if self._verify_dedup and not self._same(chunk_id, raw):
            return None
        for pack in (location.pack, *self._packs_of(location.refs)):
            if pack not in self._durable:
                self._doubtful.add(pack)
        return Put(chunk_id, location.pack, 0, location.codec, location.refs)

    def _packs_of(self, refs: tuple[bytes, ...]) -> Iterable[str]:
        for ref in refs:
            location = self._uncommitted.get(ref) or self._confirmer.find(ref)
            if location is not None:
                yield location.pack
                yield from self._packs_of(location.refs)

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
        self._thread.submit(partial(pack.file.write, pack.builder.take()))

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
            self._failed = error
            self._drop_unflushed()
            raise
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
        self._check_flushed(manifest.packs)
        data = encode(manifest)
        digest = digest_of(data)
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
        generation: int = 0,
        versions: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        stats: Mapping[str, float] | None = None,
    ) -> Commit:
        """Create the next numbered commit of `run`, durably, or raise ConflictError.

        `manifest` and `base` are digests of durable manifests (`base` None when the manifest is
        its own base), `root` the Merkle root, `packs` all packs the manifest depends on. `number`
        is the number to take: pass the one above the newest commit this writer has seen, so that a
        commit made by somebody else in between is a conflict; None means one above whatever exists
        now. Afterwards the index learns the packs flushed so far.
        """
        self._check()
        check_name(run, "run")
        names = sorted(set(packs))
        self._check_flushed(names)
        directory = os.path.join(self._root, "runs", run)
        if number is None:
            number = self._highest(directory) + 1
        record = Commit(
            run=run, number=number, step=step,
            parent=None if parent is None else (parent.run, parent.number, parent.digest),
            manifest=manifest, base=base, root=root, closure=closure_digest(names),
            writer=self.writer, nonce=secrets.token_bytes(16), generation=generation,
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
            make_directories(self._io, os.path.dirname(path))
            try:
                publish_bytes(self._io, path, data)
            except FileExistsError:
                if not self._io.exists(path):
                    raise
                if read_file(self._io, path, max(len(data), 1 << 30)) != data:
                    return False
                self._io.sync_directory(os.path.dirname(path))
        except OSError as error:
            raise storage_error(error, doing, path) from error
        return True

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
        self._confirmer.close()
        self._closed = True

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
