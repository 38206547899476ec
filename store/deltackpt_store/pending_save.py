"""A save between its beginning and its commit, and what must hold before it may be committed."""

from __future__ import annotations

import time

from deltackpt_store import codecs
from deltackpt_store.errors import CorruptionError, InvalidInputError
from deltackpt_store.holdings import Put
from deltackpt_store.protocol import Begin, Finish, extent_keys
from deltackpt_store.tables import ChunkTable


class PendingSave:
    """One save of the session: its chunk table so far and its figures. Used by one thread."""

    def __init__(self, begin: Begin, table: ChunkTable) -> None:
        self.id = begin.save
        self.step = begin.step
        self.overwrite = begin.overwrite
        self.table = table
        self.began = time.monotonic()
        self.encode_seconds = self.flush_seconds = 0.0
        self._staged = _Figure()
        self._changed = _Figure()
        self._dedup = _Figure()
        self._stored: dict[int, _Figure] = {}  # by codec
        self._by_extent: dict[int, dict[int, int]] = {}  # raw bytes by extent and codec
        self._names: list[str] | None = None

    def check_place(self, extent: int, chunk: int, length: int) -> None:
        """Raise `InvalidInputError` unless the layout has a chunk of that length there."""
        extents = self.table.layout.extents
        if extent < len(extents):
            spec = extents[extent]
            if chunk < spec.chunk_count and length == spec.chunk_length(chunk):
                return
        raise InvalidInputError(
            f"staged chunk {chunk} of extent {extent} ({length} bytes) is not one of the layout's",
            kind="protocol",
        )

    def record(self, extent: int, chunk: int, length: int, put: Put) -> None:
        """A staged chunk has been put: its id enters the table."""
        self._staged.add(length)
        if self.table.id(extent, chunk) != put.id:
            self._changed.add(length)
        if put.written:
            self._stored.setdefault(put.codec, _Figure()).add(length, put.written)
            mix = self._by_extent.setdefault(extent, {})
            mix[put.codec] = mix.get(put.codec, 0) + length
        else:
            self._dedup.add(length)
        self.table.set(extent, chunk, put.id, put.packs, base=not put.refs)

    def check_complete(self, message: Finish) -> None:
        """Raise `InvalidInputError` unless all that the layout promises is there, and no more."""
        layout = self.table.layout
        missing = self.table.first_missing()
        if missing is not None:
            name = self.extent_name(missing[0])
            raise InvalidInputError(
                f"chunk {missing[1]} of {name!r} was neither staged nor part of the save that this"
                " one is relative to",
                kind="incomplete", key=name,
            )  # fmt: skip
        if set(message.objects) != set(layout.objects):
            raise InvalidInputError("the objects are not those of the layout", kind="incomplete")
        inline = {i: spec.nbytes for i, spec in enumerate(layout.extents) if spec.inline}
        if {extent: len(data) for extent, data in message.inline.items()} != inline:
            raise InvalidInputError(
                "the inline extents are not those of the layout", kind="incomplete"
            )

    def torn(self, extent: int, chunk: int) -> CorruptionError:
        """The error for staged bytes that do not have their change hash."""
        name = self.extent_name(extent)
        return CorruptionError(
            f"the staged bytes of {name!r} (chunk {chunk}) are not the bytes that were detected:"
            " they changed while they were copied",
            kind="torn",
            hint="do not write to the state between save() and the next optimizer step, or use"
            " overlap=False",
            key=name, step=self.step, chunk=chunk,
        )  # fmt: skip

    def extent_name(self, extent: int) -> str:
        """Path of the first tensor that views the extent."""
        if self._names is None:
            self._names = [key[0] for key in extent_keys(self.table.layout)]
        return self._names[extent]

    def stats(self, message: Finish) -> dict[str, float]:
        """What the commit records: the trainer's counters, and the writer's own figures."""
        layout = self.table.layout
        stats = {
            **message.counters,
            "staged_bytes": self._staged.bytes, "staged_chunks": self._staged.chunks,
            "changed_bytes": self._changed.bytes, "changed_chunks": self._changed.chunks,
            "dedup_bytes": self._dedup.bytes, "dedup_chunks": self._dedup.chunks,
            "written_bytes": sum(figure.written for figure in self._stored.values()),
            "state_bytes": sum(spec.nbytes for spec in layout.extents),
            "chunks": sum(spec.chunk_count for spec in layout.extents),
            "packs": len(self.table.packs()),
            "inline_bytes": sum(map(len, message.inline.values())),
            "object_bytes": sum(map(len, message.objects.values())),
            "encode_seconds": self.encode_seconds, "flush_seconds": self.flush_seconds,
            "writer_seconds": time.monotonic() - self.began,  # manifest and commit are to come
        }  # fmt: skip
        for codec, figure in self._stored.items():
            name = f"codec.{codecs.name_of(codec)}"
            stats[f"{name}.chunks"] = figure.chunks
            stats[f"{name}.raw_bytes"] = figure.bytes
            stats[f"{name}.written_bytes"] = figure.written
        stats["tensors.skip"] = sum(not spec.inline for spec in layout.extents)
        for mix in self._by_extent.values():
            mode = f"tensors.{codecs.name_of(max(mix, key=mix.__getitem__))}"
            stats[mode] = stats.get(mode, 0) + 1
            stats["tensors.skip"] -= 1
        return {name: float(value) for name, value in stats.items()}


class _Figure:
    """Chunks counted: how many, their raw bytes, and the bytes written for them."""

    __slots__ = ("bytes", "chunks", "written")

    def __init__(self) -> None:
        self.chunks = self.bytes = self.written = 0

    def add(self, length: int, written: int = 0) -> None:
        self.chunks += 1
        self.bytes += length
        self.written += written
