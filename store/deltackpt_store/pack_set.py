"""The packs of one store as a reader knows them: their footers, loaded when first needed."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterable

from deltackpt_store.errors import DeltackptError, StorageError, UnsupportedFormatError
from deltackpt_store.fileio import FileIO, is_link
from deltackpt_store.index import Location, MemoryIndex, list_packs
from deltackpt_store.oserror import DAMAGE, storage_error
from deltackpt_store.pack import PackEntries, pack_path, read_footer
from deltackpt_store.pack_scan import scan_records

_log = logging.getLogger("deltackpt.store")


def is_damage(error: DeltackptError | OSError) -> bool:
    """Whether an error says that this file is bad, rather than that reading fails as such."""
    if isinstance(error, StorageError) or not isinstance(error, DeltackptError):
        return error.errno == errno.ENOENT or error.errno in DAMAGE
    return True


def is_gone(error: DeltackptError) -> bool:
    """Whether an error says that the file is not there: a pack that was collected, as a rule.

    A symbolic link that leads nowhere is there: what was behind it nobody has collected.
    """
    return (
        isinstance(error, StorageError)
        and error.errno == errno.ENOENT
        and not is_link(str(error.context.get("path", "")))
    )


class PackSet:
    """Which packs hold which chunks, learned from footers. Thread-safe; never writes.

    `index` knows the packs loaded so far that are intact (it reads tables again when it has many;
    one that turns out bad then is not known any more); `damaged` says what is wrong with the
    others. Records of damaged packs are found by :meth:`salvage` only.

    `lenient`, for those who report: a table that the system does not let be read counts as damaged
    as well, and a folder that it does not let be listed as empty; `unlisted` says why, by its path
    in the store.
    """

    def __init__(self, io: FileIO, root: str, uuid: bytes, *, lenient: bool = False) -> None:
        self.io = io
        self.root = root
        self.uuid = uuid
        self.index = MemoryIndex(self._entries)
        self.damaged: dict[str, DeltackptError] = {}
        self.unlisted: dict[str, DeltackptError] = {}
        self._lenient = lenient
        self._salvaged: dict[str, dict[bytes, list[Location]]] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Names of all packs that lie in the store, sorted. StorageError, never a short list (a
        lenient one leaves out what is `unlisted`)."""
        refused: dict[str, OSError] = {}
        try:
            names = list_packs(self.io, self.root, refused if self._lenient else None)
        except OSError as error:
            raise storage_error(error, "list the packs of", self.root) from error
        for folder, error in refused.items():
            told = storage_error(error, "list the packs in", f"{self.root}/{folder}")
            self.unlisted.setdefault(folder, told)
        return names

    def path(self, name: str) -> str:
        """Where the pack `name` lies."""
        return pack_path(self.root, name)

    def load(self, names: Iterable[str]) -> None:
        """Learn the footers of the packs `names`; damaged and missing ones go to `damaged`."""
        with self._lock:
            missing = sorted(set(names) - self.index.packs() - self.damaged.keys())
            for name in missing:
                entries = self._entries(name)
                if entries is not None:
                    self.index.add_pack(name, entries)

    def _entries(self, name: str) -> PackEntries | None:
        """The table of a pack; None when it is gone or bad, which `damaged` then says.

        Takes no lock: the index calls it while it holds its own.
        """
        try:
            return read_footer(self.io, self.path(name), store_uuid=self.uuid).entries
        except DeltackptError as error:
            if not (self._lenient or is_damage(error)):
                raise
            # One that is gone was collected: what it held lies elsewhere, if it is needed.
            level = logging.DEBUG if is_gone(error) else logging.WARNING
            _log.log(level, "pack %s cannot be used: %s", name, error)
            self.damaged[name] = error
            return None

    def load_all(self) -> None:
        """Learn every pack of the store, and forget those that are gone."""
        names = self.names()
        for gone in self.index.packs().difference(names):
            self.index.drop_pack(gone)
        with self._lock:
            # A pack that was missing when asked for may have been published since.
            for name, error in list(self.damaged.items()):
                if is_gone(error) or (isinstance(error, StorageError) and not self._lenient):
                    del self.damaged[name]
        self.load(names)

    def salvage(self, chunk_id: bytes) -> list[Location]:
        """Undamaged records of a chunk in packs whose footer is unusable, found by scanning."""
        found: list[Location] = []
        for name in sorted(self.damaged):
            found += self.salvaged(name).get(chunk_id, ())
        return found

    def salvaged(self, name: str) -> dict[bytes, list[Location]]:
        """All undamaged records of one pack whose footer is unusable, by chunk id."""
        if name not in self._salvaged:
            self._salvaged[name] = self._scan(name)
        return self._salvaged[name]

    def _scan(self, name: str) -> dict[bytes, list[Location]]:
        records: dict[bytes, list[Location]] = {}
        error = self.damaged[name]
        if not is_gone(error) and not isinstance(error, UnsupportedFormatError):
            try:
                for record in scan_records(self.io, self.path(name)):
                    if record.intact:
                        records.setdefault(record.id, []).append(record.location)
            except DeltackptError as error:
                _log.warning("pack %s cannot be scanned to its end: %s", name, error)
        return records
