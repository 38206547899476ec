"""The container of a `torch.save` file: an uncompressed zip of records, each 64-byte aligned.

Records written here: ``data.pkl`` (the object tree), ``byteorder``, ``version``, and ``data/<key>``
for the bytes of each storage. Layout as `torch.serialization` writes it, so that ``mmap=True``
works as well. Deterministic: equal content gives equal files.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from io import BufferedRandom

_ALIGN = 64
_TOP = "archive"
_PADDING_FIELD = 0x4246  # "FB", by which torch pads; readers skip unknown extra fields
_LOCAL_HEADER = 30
_ZIP64_FIELD = 20
_EXTRA_HEADER = 4


class TorchArchive:
    """Writes records one after the other to `file`; the directory comes when the block ends."""

    def __init__(self, file: BufferedRandom) -> None:
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._zip.close()
        else:
            self._zip.fp = None  # or it would write its directory when it is collected

    def record(self, name: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> None:
        """One record of exactly `nbytes` bytes, which need not all be in memory."""
        info = zipfile.ZipInfo(f"{_TOP}/{name}", (1980, 1, 1, 0, 0, 0))
        info.file_size = nbytes
        large = nbytes >= 1 << 30
        file = self._zip.fp
        assert file is not None
        start = file.tell() + _LOCAL_HEADER + len(info.filename) + _EXTRA_HEADER
        start += _ZIP64_FIELD if large else 0
        padding = -start % _ALIGN
        info.extra = struct.pack("<HH", _PADDING_FIELD, padding) + b"Z" * padding
        with self._zip.open(info, "w", force_zip64=large) as out:
            for piece in pieces:
                out.write(piece)
