"""Packs held open to read single records from."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

import numpy as np

from deltackpt_store.errors import CorruptionError
from deltackpt_store.fileio import FileIO
from deltackpt_store.pack import Location, RecordHead, check_payload, pack_path, read_record_head

_MAX_HANDLES = 32


class OpenPacks:
    """The packs of the store at `root` that were read last. Used by one thread."""

    def __init__(self, io: FileIO, root: str) -> None:
        self._io = io
        self.root = root
        self._handles: OrderedDict[str, tuple[int, int]] = OrderedDict()  # pack -> fd, file size

    def head(self, chunk_id: bytes, location: Location) -> RecordHead:
        """The record's head, which must say what `location` does (OSError, CorruptionError)."""
        handle, size = self._open(location.pack)
        head = read_record_head(self._io, handle, location.offset, location.pack)
        told = (head.id, head.skip, head.stored, head.raw, head.codec, head.refs)
        if told != (chunk_id, *location[2:]) or location.payload + location.stored > size:
            raise CorruptionError("another record lies there", kind="index")
        return head

    def record(self, chunk_id: bytes, location: Location) -> tuple[RecordHead, memoryview]:
        """Head and payload, unchanged since they were written (OSError, CorruptionError)."""
        head = self.head(chunk_id, location)
        payload = np.empty(head.stored, np.uint8).data
        handle, _ = self._open(location.pack)
        got = self._io.read_into(handle, [payload], location.payload)
        check_payload(head, payload[:got], location.pack)
        return head, payload

    def _open(self, pack: str) -> tuple[int, int]:
        known = self._handles.get(pack)
        if known is not None:
            self._handles.move_to_end(pack)
            return known
        while len(self._handles) >= _MAX_HANDLES:
            self._close(self._handles.popitem(last=False)[1][0])
        handle = self._io.open(pack_path(self.root, pack))
        try:
            opened = handle, self._io.size(handle)
        except OSError:
            self._close(handle)
            raise
        self._handles[pack] = opened
        return opened

    def _close(self, handle: int) -> None:
        with contextlib.suppress(OSError):
            self._io.close(handle)

    def close(self) -> None:
        """Close the files; the object stays usable."""
        while self._handles:
            self._close(self._handles.popitem()[1][0])
