"""What a verification within a budget remembers: which pack was proved when.

One small sealed file (``DCKPTCK`` + version byte + msgpack + BLAKE3-256 of all before) in the
store's ``cache``, or for a store that cannot be written in the user's cache directory. It is
disposable: lost or damaged, everything counts as never checked.

What comes next is decided by a running number, not by the clock: a pack whose last check has the
smallest number is the longest unchecked, whatever the clocks said. Times are only reported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping

import msgspec

from deltackpt_store.fileio import FileIO, make_directories, read_file, replace_bytes
from deltackpt_store.localfs import index_directory
from deltackpt_store.sealed import seal, unseal

_MAGIC = b"DCKPTCK\x01"
_NAME = "verified"
_MAX_BYTES = 256 * 1024 * 1024
_MAX_NUMBER = 1 << 53  # no running number comes near it
_MAX_TIME = 253402300800.0  # seconds; the year 10000


class Check(msgspec.Struct, frozen=True, array_like=True):
    """The last check of one pack: its running number, when (Unix seconds, by the clock
    of the machine that checked), the bytes of payload read, and whether they were damaged."""

    number: int
    at: float
    bytes: int
    bad: bool = False


class _File(msgspec.Struct, frozen=True):
    store: bytes
    checks: dict[str, Check]


class CheckLog:
    """The checks known of a store's packs. Used by one thread."""

    def __init__(self, io: FileIO, root: str, uuid: bytes) -> None:
        self._io = io
        self._root = root
        self._uuid = uuid
        self._places = [f"{root}/cache/{_NAME}"]
        elsewhere = index_directory(root, uuid)
        if elsewhere is not None and not elsewhere.startswith(root + "/"):
            self._places.append(os.path.join(elsewhere, _NAME))
        self._checks = self._read()
        self.path: str | None = None
        """Where it was last kept; None when it could not be, see `problem`."""
        self.problem = ""

    def get(self, pack: str, size: int) -> Check | None:
        """The last check of a pack with that many bytes of payload."""
        check = self._checks.get(pack)
        return check if check is not None and check.bytes == size else None

    def order(self, sizes: Mapping[str, int]) -> list[str]:
        """The packs, those to be checked next first: known damage, never checked, longest ago."""

        def rank(pack: str) -> tuple[bool, int, str]:
            check = self.get(pack, sizes[pack])
            return (not (check and check.bad), check.number if check else 0, pack)

        return sorted(sizes, key=rank)

    def checked(self, sizes: Mapping[str, int], at: float, bad: Iterable[str]) -> None:
        """These packs have been read to their end at that time."""
        number = 1 + max((check.number for check in self._checks.values()), default=0)
        damaged = frozenset(bad)
        for pack, size in sizes.items():
            self._checks[pack] = Check(number, at, size, pack in damaged)

    def keep(self, packs: Iterable[str] | None = None) -> None:
        """Write it down, atomically; `packs` are all that exist, others are forgotten.

        Never raises: where it cannot be kept, `problem` says why.
        """
        for pack, check in self._read().items():  # of somebody who verifies at the same time
            mine = self._checks.get(pack)
            if mine is None or mine.number < check.number:
                self._checks[pack] = check
        if packs is not None:
            existing = frozenset(packs)
            self._checks = {p: c for p, c in self._checks.items() if p in existing}
        data = seal(_MAGIC, _File(self._uuid, self._checks))
        self.path = None
        for path in self._places:
            try:
                make_directories(self._io, os.path.dirname(path), within=self._root)
                replace_bytes(self._io, path, data)
            except OSError as error:
                self.problem = f"{path}: {error.strerror or error}"
                continue
            self.path, self.problem = path, ""
            return

    def _read(self) -> dict[str, Check]:
        found: dict[str, Check] = {}
        for path in self._places:
            with contextlib.suppress(OSError, ValueError):
                file = unseal(read_file(self._io, path, _MAX_BYTES), _MAGIC, _File)
                if file.store != self._uuid:
                    continue
                for pack, check in file.checks.items():
                    if not _possible(check):
                        continue
                    if pack not in found or found[pack].number < check.number:
                        found[pack] = check
        return found


def _possible(check: Check) -> bool:
    """Whether it is a check that was ever made; any other counts as none."""
    return (
        0 < check.number < _MAX_NUMBER
        and abs(check.at) < _MAX_TIME  # a clock may have been wrong, either way; NaN is not
        and check.bytes >= 0
    )
