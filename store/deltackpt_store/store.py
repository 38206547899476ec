"""The store as a reader sees it: open or create the directory, find steps, resolve snapshots.

`Store.open` and everything reached through it never write, take no lock and need no index file:
a store on a read-only disk of another user works. What a save adds goes through `StoreWriter`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
    told,
)
from deltackpt_store.fileio import (
    TEMPORARY_PREFIX,
    FileIO,
    make_directories,
    publish_bytes,
    read_file,
    share_as_above,
)
from deltackpt_store.format_file import (
    FORMAT_NAME,
    MAX_FORMAT_BYTES,
    REMAKE,
    Format,
    decode_format,
    encode_format,
    new_format,
)
from deltackpt_store.history import History
from deltackpt_store.index import MemoryIndex
from deltackpt_store.location import PROBE_PREFIX, check_location
from deltackpt_store.manifest import Commit, Manifest, Snapshot
from deltackpt_store.manifest_io import (
    MAX_MANIFEST_BYTES,
    closure_digest,
    damaged_manifest,
    decode,
    digest_of,
    resolve,
)
from deltackpt_store.names import OF_THE_SYSTEM
from deltackpt_store.no_store import looks_like_a_store, not_a_store
from deltackpt_store.oserror import DAMAGE, storage_error
from deltackpt_store.pack_set import PackSet
from deltackpt_store.reader import ChunkReader

DIRECTORIES = ("packs", "manifests", "runs", "pins", "gc", "quarantine")
_OWN = frozenset((*DIRECTORIES, "cache"))
_BASES_KEPT = 2
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # also as pathlib writes it, with one slash


class Store(History):
    """A store directory. Holds no open file and no lock: it may be used from any thread, kept
    across fork, and opened any number of times.

    `path` is absolute and fixed when the store is opened (symbolic links resolved), so a later
    chdir changes nothing. `uuid` are the 16 bytes drawn when the store was made. `io` is the layer
    through which every byte passes. `packs` are the packs this process has learned about.
    """

    def __init__(self, path: str, io: FileIO, format: Format) -> None:
        super().__init__(path, io)
        self.format = format
        self.uuid = format.uuid
        self.packs = PackSet(io, path, self.uuid)
        self._lock = threading.Lock()
        self._bases: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    # opening -------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, io: FileIO | None = None) -> Store:
        """Open the store at `path` for reading; nothing is created or touched.

        NotFoundError (kind ``not-a-store``) when there is none, UnsupportedFormatError when it is
        newer than this package, CorruptionError when FORMAT is damaged, StorageError otherwise.
        """
        io = io or FileIO()
        where = absolute_path(path)
        description = _read_format(io, where)
        if description is None:
            raise not_a_store(io, where)
        return cls(where, io, description)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        io: FileIO | None = None,
        exist_ok: bool = True,
        mode: int | None = None,
    ) -> Store:
        """Make a store at `path` (parents too), durable on return, or open the one that is there.

        Meant for writing: UnsupportedFormatError when this package may only read that store. Of
        several processes that create one path at once, all get the same store. With `exist_ok`
        False an existing store is refused. A directory that holds anything else is refused
        untouched. `mode` are the permission bits of the directories made here (for example 0o2775
        for a group); the default follows the umask.

        What a store needs of a file system is tried when it is first written to at a place:
        StorageError (kind ``location``) when something vital does not work there.
        """
        io = io or FileIO()
        where = absolute_path(path)
        _check_mode(mode)
        try:
            return cls(where, io, _create(io, where, exist_ok, mode))
        except StorageError:
            raise  # it says itself what cannot be done, and what to do
        except OSError as error:
            if isinstance(error, DeltackptError):
                raise
            raise storage_error(error, "create a store at", where) from error

    # manifests and snapshots ---------------------------------------------------------------

    def manifest(self, digest: bytes, *, views: bool = False) -> Manifest:
        """The manifest called `digest`, its bytes proven to be the ones that were named.

        With `views` its bytes stay where they were read: see `decode`.
        """
        relative = f"manifests/{digest.hex()}"
        try:
            data = self._read_buffer(relative, MAX_MANIFEST_BYTES, "manifest")
        except NotFoundError as error:
            raise CorruptionError(
                f"manifest {relative} is missing", kind="missing-manifest", path=relative,
                store=self.path,
            ) from error  # fmt: skip
        if digest_of(data) != digest:
            raise CorruptionError(
                f"manifest {relative} is damaged: its content does not have that digest",
                kind="damaged-manifest",
                hint="restore another step",
                path=relative,
            )
        return decode(data, name=relative, views=views)

    def snapshot(self, which: Commit | bytes) -> Snapshot:
        """The whole content of a commit, or of the manifest with that digest.

        Everything is recomputed from the bytes read: manifest digests, the root, the closure.
        `packs` of the result are the packs to hand to :meth:`reader`. CorruptionError names the
        file (and in its context the run and step) that does not hold.
        """
        if isinstance(which, bytes):
            return self._snapshot(which)
        try:
            snapshot = self._snapshot(which.manifest)
            for what, found, recorded in (
                ("root", snapshot.root, which.root),
                ("base", snapshot.base, which.base),
                ("closure", closure_digest(snapshot.packs), which.closure),
            ):
                if found != recorded:
                    raise CorruptionError(
                        f"manifest {which.manifest.hex()} does not have the {what} that its "
                        "commit records",
                        kind="damaged-commit",
                    )
        except (CorruptionError, UnsupportedFormatError) as error:
            error.context.update(run=which.run, step=which.step, number=which.number)
            raise
        return snapshot

    def _snapshot(self, digest: bytes, *, is_base: bool = False) -> Snapshot:
        with self._lock:
            known = self._bases.get(digest)
        if known is not None:
            return known
        manifest = self.manifest(digest)
        base = None
        if is_base and manifest.base is not None:
            raise damaged_manifest(digest, "is named as a base and is none")
        if manifest.base is not None:
            base = self._snapshot(manifest.base, is_base=True)
        snapshot = resolve(manifest, base, digest=digest, name=f"manifests/{digest.hex()}")
        if manifest.base is None:
            with self._lock:
                self._bases[digest] = snapshot
                while len(self._bases) > _BASES_KEPT:
                    self._bases.popitem(last=False)
        return snapshot

    # pins ----------------------------------------------------------------------------------

    def pin(self, name: str, commit: Commit) -> None:
        """As `PinFiles.pin`; UnsupportedFormatError when this package may only read the store."""
        self.format.require("write", self.path)
        super().pin(name, commit)

    def unpin(self, name: str) -> None:
        """As `PinFiles.unpin`; UnsupportedFormatError when this package may only read the store."""
        self.format.require("write", self.path)
        super().unpin(name)

    # chunks --------------------------------------------------------------------------------

    def index(self) -> MemoryIndex:
        """An index of every chunk in the intact packs, rebuilt from their footers as needed.

        It is this object's own: one that adds packs to it helps its readers too.
        """
        self.packs.load_all()
        return self.packs.index

    def reader(self, packs: Iterable[str] = ()) -> ChunkReader:
        """A reader of chunks that looks into `packs` first (those of a snapshot)."""
        return ChunkReader(self.packs, packs)

    def get_into(self, chunk_id: bytes, buffer: memoryview | bytearray) -> None:
        """Fill `buffer`, which has the chunk's exact size, with a chunk; see `ChunkReader.read`."""
        self.reader().read([(chunk_id, memoryview(buffer))])


def absolute_path(path: str | os.PathLike[str]) -> str:
    """The path of a store from the root; InvalidInputError (kind "bad-path") when it is not one."""
    try:
        text = os.fsdecode(path)
        usable = bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeError:
        text, usable = str(path), False
    except TypeError as error:
        raise InvalidInputError(
            f"the path of a store must be a str or a path, got {told(path)}", kind="bad-path"
        ) from error
    if usable and _URL.match(text):
        raise InvalidInputError(
            f"{text!r} cannot be the path of a store: it is a URL, and stores are directories",
            kind="bad-path",
            hint="name a directory, and copy the store from there",
        )
    if usable and text.startswith("~"):
        raise InvalidInputError(
            f"{text!r} cannot be the path of a store: '~' is not expanded here",
            kind="bad-path",
            hint="pass os.path.expanduser(path), or './~...' for a directory of that name",
        )
    if not usable:
        raise InvalidInputError(
            f"{text!r} cannot be the path of a store", kind="bad-path", hint="name a directory"
        )
    try:
        return os.path.realpath(text)
    except OSError as error:  # the working directory was removed
        raise StorageError(
            f"cannot find the directory of the relative path {text}: {error.strerror or error}",
            hint="the directory that this process works in was removed: name a path from the root",
            errno=error.errno,
            path=text,
        ) from error


def _check_mode(mode: Any) -> None:
    if mode is None:
        return
    if type(mode) is not int or not 0 <= mode <= 0o7777 or mode & 0o700 != 0o700:
        shown = oct(mode) if type(mode) is int and mode >= 0 else repr(mode)
        raise InvalidInputError(
            f"mode must be permission bits that let the owner in, such as 0o2775, got {shown}",
            option="mode",
        )


def _read_format(io: FileIO, path: str) -> Format | None:
    """FORMAT of the store at `path`, None when there is none."""
    name = f"{path}/{FORMAT_NAME}"
    try:
        return decode_format(read_file(io, name, MAX_FORMAT_BYTES), name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in DAMAGE and _is_directory(io, path):
            raise CorruptionError(
                f"{name} cannot be read: {error.strerror or error}",
                kind="damaged-format",
                hint=REMAKE,
                path=name,
            ) from error
        raise storage_error(error, "open the store, reading", name) from error


def _is_directory(io: FileIO, path: str) -> bool:
    try:
        io.list(path)
    except OSError:
        return False
    return True


def _create(io: FileIO, path: str, exist_ok: bool, mode: int | None) -> Format:
    """Make or open; FORMAT comes last, so that what has one is complete. Raises OSError."""
    description = _read_format(io, path)
    if description is None:
        fresh = not io.exists(path)
        make_directories(io, path)
        _refuse_foreign(io, path)
        if mode is not None and fresh:
            io.chmod(path, mode)
        _probe(io, path, mode)
    elif not exist_ok:
        raise _exists(path)
    else:
        description.require("write", path)
        _probe(io, path, mode)
    missing = [name for name in DIRECTORIES if not io.exists(f"{path}/{name}")]
    if missing and description is not None:
        runs = Store(path, io, description).runs()  # refuses where they are lost
        if runs and "pins" in missing:  # they may be lost as well: see `collect`
            missing.remove("pins")
    for name in missing:
        directory = f"{path}/{name}"
        try:
            io.mkdir(directory)
        except FileExistsError:  # another process makes the same store
            continue
        if description is not None:
            share_as_above(io, directory)
        elif mode is not None:
            io.chmod(directory, mode)
    if missing or description is None:
        io.sync_directory(path)  # FORMAT must not outlive its directories in a power cut
    if description is not None:
        return description
    description = new_format()
    try:
        publish_bytes(io, f"{path}/{FORMAT_NAME}", encode_format(description))
    except FileExistsError:
        if not exist_ok:
            raise _exists(path) from None
        made = _read_format(io, path)
        if made is None:
            raise
        description = made
        io.sync_directory(path)  # the other process may not have come to that yet
    io.sync_directory(os.path.dirname(path))
    return description


def _refuse_foreign(io: FileIO, path: str) -> None:
    """InvalidInputError unless `path` is empty but for what an unfinished create leaves behind."""
    try:
        names = io.list(path)
    except NotADirectoryError:
        raise InvalidInputError(
            f"{path} is a file; a store is a directory", kind="not-empty", path=path
        ) from None
    foreign = [
        name
        for name in names
        if not name.startswith((TEMPORARY_PREFIX, ".nfs"))
        and name.lower() not in OF_THE_SYSTEM
        and not (name in _OWN and not any(map(_is_foreign, io.list(f"{path}/{name}"))))
    ]
    if foreign and not io.exists(f"{path}/{FORMAT_NAME}"):
        raise InvalidInputError(
            f"{path} is not empty and not a store (it holds {sorted(foreign)[0]!r})",
            kind="not-empty",
            hint="its file FORMAT is lost: copy it back from a copy of the store"
            if looks_like_a_store(set(names))
            else "name a new or empty directory",
            path=path,
        )


def _is_foreign(name: str) -> bool:
    return not (name.startswith((PROBE_PREFIX, TEMPORARY_PREFIX)) or name == "location")


def _probe(io: FileIO, path: str, mode: int | None) -> None:
    """Try what the place can do; a replaced file layer is trusted."""
    if type(io) is not FileIO:
        return
    cache = f"{path}/cache"
    if mode is not None and not io.exists(cache):
        with contextlib.suppress(OSError):
            io.mkdir(cache)
            io.chmod(cache, mode)
    check_location(io, path)


def _exists(path: str) -> ConflictError:
    return ConflictError(
        f"there is a store at {path} already", kind="exists", hint="open it instead", path=path
    )
