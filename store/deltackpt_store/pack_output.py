"""The packs that a writer fills: blobs go to the disk in batches, from a thread of its own."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from deltackpt_store.codecs import Encoded
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.io_thread import IoThread
from deltackpt_store.pack import PackEntries, pack_path
from deltackpt_store.pack_writer import BATCH_BYTES, Batch, PackBuilder, PackFile, Rooms
from deltackpt_store.presence import check_there


class _Pack(NamedTuple):
    builder: PackBuilder
    file: PackFile


class PackOutput:
    """Used by one thread, while a thread of its own does the writing.

    Raw payloads given to `add` are referred to until `finish` or `drop` returns; beside them it
    holds about four times `BATCH_BYTES`, in which blobs are laid out. Once anything has failed
    (`error`, or what `finish` and `publish` raise) nothing more is written until `drop` is called.
    """

    def __init__(self, io: FileIO, root: str, uuid: bytes, writer: str, pack_bytes: int) -> None:
        self._io = io
        self._root = root
        self._uuid = uuid
        self._writer = writer
        self._thread = IoThread("deltackpt-packs")
        self._rooms = Rooms()
        self._seq = 0
        self._open: _Pack | None = None
        self._sealed: list[_Pack] = []  # some of them by jobs that still wait
        self.pack_bytes = pack_bytes
        """Bytes from which on a pack is full."""
        self.handed_out = 0
        """Bytes given to the thread so far."""

    @property
    def error(self) -> BaseException | None:
        """What went wrong in the thread since the last `drop`."""
        return self._thread.error

    @property
    def busy_seconds(self) -> float:
        """Wall time that the thread has spent writing so far."""
        return self._thread.busy_seconds

    @property
    def unpublished(self) -> set[str]:
        """Names of the packs begun and not yet published."""
        names = {pack.builder.name for pack in self._sealed}
        return names if self._open is None else {*names, self._open.builder.name}

    def add(self, chunk_id: bytes, raw: int, encoded: Encoded) -> tuple[str, int]:
        """Append the blob of a chunk of `raw` bytes; the name of its pack, and what it takes.

        Raises InvalidInputError for lengths that the format cannot hold.
        """
        pack = self._open or self._begin()
        builder = pack.builder
        written = builder.add(chunk_id, raw, encoded)
        if builder.pending >= BATCH_BYTES:
            self._submit_batch(pack)
        if builder.size >= self.pack_bytes:
            self._seal(pack)
        return builder.name, written

    def finish(self) -> None:
        """Wait until all that was added is durable, in files that still have temporary names.

        Raises the first error of the thread (StorageError when it was one of the disk).
        """
        if self._open is not None:
            self._seal(self._open)
        self._thread.drain()

    def publish(self) -> list[tuple[str, PackEntries]]:
        """Give all finished packs their names (StorageError); their names and tables.

        The names are durable only when their directories are synced next.
        """
        packs, self._sealed = self._sealed, []
        for i, pack in enumerate(packs):
            try:
                pack.file.publish()
            except DeltackptError:
                self._sealed = packs[i:]
                raise
        return [(pack.builder.name, pack.builder.entries()) for pack in packs]

    def drop(self) -> None:
        """Give up what is not published, remove its files, and forget a failure."""
        self._thread.reset()
        for pack in self._sealed:
            pack.file.discard()
        if self._open is not None:
            self._open.file.discard()
        self._sealed, self._open = [], None

    def close(self) -> None:
        """`drop`, then end the thread."""
        self.drop()
        self._thread.stop()

    def _begin(self) -> _Pack:
        self._seq += 1
        builder = PackBuilder(self._uuid, self._writer, self._seq, self._rooms)
        check = partial(check_there, self._io, self._root, self._uuid)
        self._open = _Pack(builder, PackFile(self._io, pack_path(self._root, builder.name), check))
        return self._open

    def _submit_batch(self, pack: _Pack) -> None:
        batch = pack.builder.take()
        self.handed_out += batch.size
        self._thread.submit(partial(self._write, pack.file, batch))

    def _write(self, file: PackFile, batch: Batch) -> None:
        file.write(batch)
        self._rooms.give_back(batch.rooms)

    def _seal(self, pack: _Pack) -> None:
        if pack.builder.pending:
            self._submit_batch(pack)
        self._thread.submit(partial(pack.file.write, pack.builder.take_footer()))
        self._thread.submit(pack.file.seal)
        self._sealed.append(pack)
        self._open = None
