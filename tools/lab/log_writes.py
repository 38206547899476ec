"""Reading the log of the kernel's dm-log-writes target (Documentation/admin-guide/device-mapper).

A superblock, then entries of one block each, followed by the data of the entry: the writes of a
device in the order in which they were completed. Writes that no flush has made durable yet come
right before the flush that did.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")
_MAGIC = 0x6A736677736872
_SECTOR = 512


@dataclass(frozen=True)
class Entry:
    """One write: `size` bytes at `offset` of the device, found at `where` in the log."""

    flags: int
    offset: int
    size: int
    where: int
    mark: str = ""

    @property
    def durable(self) -> bool:
        """Everything before it is durable once it is there."""
        return bool(self.flags & FLUSH)


def read_log(path: Path) -> list[Entry]:
    """All entries, in order. ValueError when the file is no such log."""
    entries: list[Entry] = []
    with open(path, "rb") as file:
        magic, version, count, block = _SUPER.unpack(file.read(_SUPER.size))
        if magic != _MAGIC or version != 1:
            raise ValueError(f"{path} is no log of writes")
        position = block
        for _ in range(count):
            file.seek(position)
            sector, sectors, flags, length = _ENTRY.unpack(file.read(_ENTRY.size))
            text = file.read(length).decode(errors="replace") if flags & MARK else ""
            where = position + block
            size = 0 if flags & MARK else sectors * _SECTOR
            entries.append(Entry(flags, sector * _SECTOR, size, where, text))
            held = 0 if flags & DISCARD else size
            position = where + held
    return entries


def apply(entry: Entry, log: BinaryIO, disk: BinaryIO) -> None:
    """Do what `entry` did to the disk."""
    if entry.flags & MARK or not entry.size:
        return
    disk.seek(entry.offset)
    if entry.flags & DISCARD:
        disk.write(bytes(entry.size))
        return
    log.seek(entry.where)
    disk.write(log.read(entry.size))
