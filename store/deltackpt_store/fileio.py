"""The one thin layer through which every byte of a store is read and written.

`FileIO` is the real file system. Tests substitute subclasses that record operations (to enumerate
crash states) or fail them. Nothing else in the project opens, renames, syncs or deletes a file of
a store; the LMDB cache, which is disposable, is the only exception.

Durability protocol for a write-once file (`publish`): exclusive temporary name in the same
directory -> write -> fdatasync -> `link` to the final name (fails when it exists) -> unlink the
temporary name -> fsync of the directory. An fsync that failed is never retried on the same file:
the kernel may have dropped the dirty pages while marking them clean (Rebello et al., ATC 2020).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Generator, Sequence

from deltackpt_store import direct
from deltackpt_store.descriptors import above_standard

Buffer = bytes | bytearray | memoryview

_IOV_MAX = 1024
TEMPORARY_PREFIX = ".tmp-"


class FileIO:
    """Real files. All paths are absolute ``str``; handles are file descriptors (``int``).

    Errors are plain ``OSError``; callers translate them. Methods are safe to call from any thread;
    a handle is used by one thread at a time, except :meth:`read_into`, which is positional.
    """

    # writing -------------------------------------------------------------------------------

    def create(self, path: str, mode: int = 0o666) -> int:
        """Create `path` exclusively for writing (``FileExistsError`` when it exists)."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return above_standard(os.open(path, flags, mode))

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all `buffers` at `offset`, looping over short writes; return bytes written.

        Large ones go past the page cache where the file system allows it.
        """
        views = [v for v in (memoryview(b).cast("B") for b in buffers) if len(v)]
        total = 0
        for run in direct.runs(views, offset):
            if run.direct and direct.switch(handle, on=True):
                try:
                    total += self._write_direct(handle, run.views, run.offset)
                finally:
                    direct.switch(handle, on=False)
            else:
                total += self._write_all(handle, run.views, run.offset)
        return total

    def _write_direct(self, handle: int, views: list[memoryview], offset: int) -> int:
        total = sum(map(len, views))
        try:
            return self._write_all(handle, views, offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        # Refused, usually for its alignment, perhaps after a part: `views` holds what is left.
        direct.switch(handle, on=False)
        left = sum(map(len, views))
        return total - left + self._write_all(handle, views, offset + total - left)

    def _write_all(self, handle: int, views: list[memoryview], offset: int) -> int:
        """Write and use up `views`."""
        total = 0
        while views:
            done = self._pwritev(handle, views[:_IOV_MAX], offset + total)
            if done <= 0:
                raise OSError(errno.EIO, f"write returned {done}")
            total += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]
        return total

    def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(handle, views, offset)

    def sync(self, handle: int) -> None:
        """Make the file's bytes and length durable (fdatasync)."""
        os.fdatasync(handle)

    def close(self, handle: int) -> None:
        """Give the handle, and a lock that it has, back. Makes nothing durable."""
        os.close(handle)

    def link(self, source: str, target: str) -> None:
        """Give `source` the second name `target`; ``FileExistsError`` when it is taken."""
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        """Give the file `source` the name `target` in one step, in place of what had it.

        Only for what is disposable, or damaged and kept elsewhere: nothing else is ever replaced.
        """
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Remove the name; a process that has the file open can go on reading it."""
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        """Make names created in or removed from the directory durable."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def mkdir(self, path: str) -> None:
        """Make one directory; ``FileExistsError`` when the name is taken."""
        os.mkdir(path)

    def chmod(self, path: str, mode: int) -> None:
        """Give `path` these permission bits."""
        os.chmod(path, mode)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory; ``OSError`` when it is not empty."""
        os.rmdir(path)

    # locks ---------------------------------------------------------------------------------

    def lock(self, path: str, *, create: bool = False) -> int:
        """Lock the file at `path` for this handle alone, until it is closed or the process dies.

        Never waits: ``BlockingIOError`` while somebody else holds it. `create` makes the file when
        it does not exist. On return the file locked is the one that `path` names. The handle can
        be written to, where the file can. Other errors, ENOLCK and ENOTSUP among them, say that
        there is no lock.
        """
        parted = not create
        while True:
            handle = _open_to_lock(path, create)
            if create:
                share_lock(path, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not parted and part(path, handle):
                    parted = True
                elif still_named(path, handle):
                    return handle
            except OSError as error:
                os.close(handle)
                if error.errno == errno.EACCES:
                    raise BlockingIOError(errno.EAGAIN, "locked by somebody else", path) from None
                raise
            os.close(handle)  # removed or replaced before it was locked: try again

    # reading -------------------------------------------------------------------------------

    def open(self, path: str) -> int:
        """Open the file at `path`, never waiting. ``OSError`` (see `open_regular`)."""
        try:
            return open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            look_afresh(path)  # another machine may have made it a moment ago
            return open_regular(path, os.O_RDONLY)

    def size(self, handle: int) -> int:
        """Bytes of the file, as far as they have been written."""
        return os.fstat(handle).st_size

    def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill `buffers` in turn from `offset`; return bytes read (short only at end of file)."""
        views = [v for v in (memoryview(b).cast("B") for b in buffers) if len(v)]
        total = 0
        while views:
            done = os.preadv(handle, views[:_IOV_MAX], offset + total)
            if done == 0:
                break
            total += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]
        return total

    def list(self, path: str) -> list[str]:
        """Names in the directory, unsorted. An error is raised, never read as 'empty'."""
        return os.listdir(path)

    def exists(self, path: str) -> bool:
        """Whether there is anything at `path` now, also when another machine has just made it."""
        look_afresh(path)
        try:
            os.stat(path)
        except FileNotFoundError:
            return False
        return True

    def free_bytes(self, path: str) -> int:
        """Bytes that may still be written where `path` lies."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def is_link(path: str) -> bool:
    """Whether `path` is a symbolic link: what it leads to may be no part of the store."""
    return os.path.islink(path)


def look_afresh(path: str) -> None:
    """Make the kernel forget what it believes about the name `path`, on a network file system.

    An NFS client answers from memory for up to a minute whether a name exists, unless it learns
    that the directory has changed; it asks for that whenever a directory is opened.
    """
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        os.close(os.open(os.path.dirname(path) or ".", flags))


def share_lock(path: str, handle: int) -> None:
    """Let everybody who may write in the folder take the lock too, whatever the umask is."""
    with contextlib.suppress(OSError):  # somebody else's
        bits = stat.S_IMODE(os.fstat(handle).st_mode)
        above = os.stat(os.path.dirname(path)).st_mode & 0o022 if bits else 0
        if bits | above != bits:
            os.fchmod(handle, bits | above)


def open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file that must be a regular one, or become one.

    A pipe, socket, device or directory in its place is refused by ``OSError`` (ENXIO, EISDIR) that
    names it, and is never waited for.
    """
    flags |= os.O_CLOEXEC
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except BlockingIOError:  # a file server is just taking back what it gave to a client
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise
        handle = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a socket or device, not a file", path) from None
        raise
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return handle
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, "it is a directory, not a file", path)
    what = "pipe" if stat.S_ISFIFO(kind) else "device"
    raise OSError(errno.ENXIO, f"it is a {what}, not a file", path)


def _open_to_lock(path: str, create: bool) -> int:
    """Symbolic links are not followed: nothing is made or written elsewhere."""
    try:
        return open_regular(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0))
    except OSError as error:
        if create or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)


def still_named(path: str, handle: int) -> bool:
    """Whether `path` still leads to the open file."""
    look_afresh(path)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def is_shared(handle: int) -> bool:
    """Whether the file has another name: a copy made of hard links has it, too, and who locks it
    here would lock that copy as well."""
    return os.fstat(handle).st_nlink > 1


def part(path: str, handle: int) -> bool:
    """Leave the open file at `path` to its copies made of hard links, whether it has any. Where the
    name cannot be taken from it, it stays shared."""
    shared = is_shared(handle)
    if shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return shared


def read_file(io: FileIO, path: str, limit: int) -> bytes:
    """Read a whole small file; ``OSError`` (EFBIG) when it is larger than `limit` bytes."""
    return bytes(read_buffer(io, path, limit))


def read_buffer(io: FileIO, path: str, limit: int) -> memoryview:
    """As `read_file`, into memory that is not copied."""
    handle = io.open(path)
    try:
        size = io.size(handle)
        if size > limit:
            why = f"file of {size} bytes is larger than the limit of {limit}"
            raise OSError(errno.EFBIG, why, path)
        data = memoryview(bytearray(size))
        return data[: io.read_into(handle, [data], 0)].toreadonly()
    finally:
        io.close(handle)


def make_directories(io: FileIO, path: str, *, within: str | None = None) -> None:
    """Create `path` and missing parents, each made durable in its parent.

    Those below `within`, a store, get the permission bits of the directory that they lie in.
    """
    missing: list[str] = []
    while not io.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            io.mkdir(directory)
        except FileExistsError:
            continue
        if within is not None and directory.startswith(f"{within}/"):
            share_as_above(io, directory)
        io.sync_directory(os.path.dirname(directory))


def make_directory(io: FileIO, path: str) -> None:
    """Create `path`, durable in its parent, which must exist (``FileNotFoundError``)."""
    if io.exists(path):
        return
    with contextlib.suppress(FileExistsError):
        io.mkdir(path)
        share_as_above(io, path)
        io.sync_directory(os.path.dirname(path))


def share_as_above(io: FileIO, path: str) -> None:
    """Give the directory `path`, just made, the permission bits of the one it lies in.

    So what `mode=` gave to a group holds for all of a store, whatever each user's umask is.
    """
    with contextlib.suppress(OSError):  # a file layer of its own, or not ours to change
        above = stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)
        if stat.S_IMODE(os.stat(path).st_mode) != above:
            io.chmod(path, above)


def make_subdirectory(io: FileIO, path: str) -> None:
    """As `make_directory`, for a folder of a store below its top ones.

    ``OSError`` (ELOOP) when a symbolic link lies there: nothing is to be written behind it.
    """
    refuse_link(path)
    make_directory(io, path)


def refuse_link(path: str) -> None:
    """``OSError`` (ELOOP) when `path` is a symbolic link."""
    if is_link(path):
        raise OSError(errno.ELOOP, "it is a symbolic link: nothing is written behind it", path)


def publish_bytes(io: FileIO, path: str, data: Buffer | list[Buffer]) -> None:
    """Create `path` with `data`, durable on return, whole or not at all, never overwriting.

    Raises ``FileExistsError`` when `path` exists; leaves no temporary file on any error.
    """
    buffers: Sequence[Buffer] = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
    with _written(io, path, buffers) as temporary:
        publish_file(io, temporary, path)


@contextlib.contextmanager
def _written(io: FileIO, path: str, buffers: Sequence[Buffer]) -> Generator[str]:
    """A synced temporary file beside `path` that holds `buffers`; it goes again on any error."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, temporary_name(name))
    handle = io.create(temporary)
    try:
        try:
            io.write(handle, buffers, 0)
            io.sync(handle)
        finally:
            io.close(handle)
        yield temporary
    except BaseException:
        discard(io, temporary)
        raise


def publish_once(io: FileIO, path: str, data: Buffer) -> bool:
    """As `publish_bytes`, with the directory; False when `path` exists with other content.

    An existing file with exactly these bytes counts as created, and is made durable: over a network
    the answer to a creation may be lost and the call repeated. OSError.
    """
    directory = os.path.dirname(path)
    make_directory(io, directory)
    while True:
        try:
            publish_bytes(io, path, data)
            return True
        except FileExistsError:
            if not io.exists(path):
                continue  # deleted in this very moment
        if read_file(io, path, max(len(data), 1 << 30)) != data:
            return False
        io.sync_directory(directory)
        return True


def publish_file(io: FileIO, temporary: str, path: str) -> None:
    """Give an already synced temporary file its final name, durably, never overwriting."""
    try:
        io.link(temporary, path)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
        # What the system says of FAT and the like.
        raise OSError(errno.EOPNOTSUPP, "that file system makes no hard links", path) from error
    discard(io, temporary)
    io.sync_directory(os.path.dirname(path))


def replace_bytes(io: FileIO, path: str, data: Buffer) -> None:
    """Make `path` hold `data`, durable on return, whatever it held; leaves no temporary file."""
    with _written(io, path, [data]) as temporary:
        io.replace(temporary, path)
    io.sync_directory(os.path.dirname(path))


def temporary_name(name: str) -> str:
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{name[:80]}"


def discard(io: FileIO, path: str) -> None:
    """Best-effort removal of a temporary file; a leftover is reclaimed by garbage collection."""
    with contextlib.suppress(OSError):
        io.unlink(path)
