"""An output file that exists whole or not at all.

Used for what commands write outside a store. The bytes go to a temporary name in the folder of the
target; the target's name is given only when all are written and synced, and never to a file that
already exists unless that was asked for.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from types import FrameType

from deltackpt_store.errors import (
    DeltackptError,
    InvalidInputError,
    StorageError,
)
from deltackpt_store.format_file import FORMAT_NAME
from deltackpt_store.oserror import hint_for

from deltackpt_tools.exits import Exit
from deltackpt_tools.output import size


def check_target(path: str, *, force: bool) -> None:
    """Refuse, before any work is done, a target that :func:`published` would refuse at the end."""
    if path in ("", "-"):
        raise InvalidInputError(
            f"{path!r} cannot be the name of an output file", kind="bad-path", path=path,
            hint="name a file: what is read back while it is written cannot go to standard output"
            if path else "name a file",
        )  # fmt: skip
    try:
        folder = os.path.dirname(os.path.abspath(path))
    except OSError as error:  # the working directory was removed
        raise cannot_write(error, path) from error
    if not os.path.isdir(folder):
        raise StorageError(
            f"cannot write {path}: the folder {folder} does not exist",
            kind="no-such-folder", hint="create it first", path=folder,
        )  # fmt: skip
    if os.path.exists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a device, pipe or socket"
        raise InvalidInputError(
            f"{path} is {what}", kind="output-exists", hint="name a file", path=path
        )
    store = _store_around(os.path.realpath(path)) or _store_around(os.path.abspath(path))
    if store:
        raise InvalidInputError(
            f"{path} lies in the store {store}",
            kind="output-in-store", hint="name a file outside of it", path=path,
        )  # fmt: skip
    if os.path.lexists(path) and not force:
        raise _exists(path)


def _store_around(path: str) -> str | None:
    """The store in which `path`, which is absolute, lies."""
    folder = os.path.dirname(path)
    while folder != path:
        if os.path.isfile(os.path.join(folder, FORMAT_NAME)) and os.path.isdir(f"{folder}/packs"):
            return folder
        path, folder = folder, os.path.dirname(folder)
    return None


def cannot_write(error: OSError, path: str) -> StorageError:
    """The StorageError for an output file that the file system refused."""
    return StorageError(
        f"cannot write {path}: {error.strerror or error}",
        hint=hint_for(error, path), errno=error.errno, path=path,
    )  # fmt: skip


def require_room(file: BufferedRandom, nbytes: int) -> None:
    """OSError (no space) when the file system of `file` has no room for `nbytes` more.

    What is known not to fit must not first take the room of everybody else on that disk.
    """
    disk = os.fstatvfs(file.fileno())
    free = disk.f_frsize * (disk.f_bavail if os.geteuid() else disk.f_bfree)
    told = disk.f_blocks > 0  # some file systems do not say
    if told and free < nbytes < 1 << 63:  # beyond, no disk would help
        raise OSError(errno.ENOSPC, f"it takes {size(nbytes)}, and {size(free)} are free")


def _exists(path: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path} exists already",
        kind="output-exists", hint="use --force to replace it, or another name", path=path,
    )  # fmt: skip


@contextmanager
def _unwinding_on_sigterm() -> Generator[None, None, None]:
    """Make SIGTERM an exception within the block, so that what it began is undone.

    Outside, and where somebody else handles the signal, nothing changes: an exception raised while
    modules are being imported may be swallowed.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        raise SystemExit(Exit.TERMINATED)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def published(path: str, *, force: bool) -> Generator[BufferedRandom, None, None]:
    """A seekable file for writing and reading back, published as `path` when the block ends well.

    On any exception in the block (Ctrl-C and SIGTERM included) nothing of it remains, and a file
    that was at `path` before is untouched. Where a symbolic link is at `path` it is written what
    that leads to. A file that replaces another has its permissions. Durable on return. Raises
    InvalidInputError when `path` exists and not `force` or lies in a store, StorageError when the
    file system refuses.
    """
    check_target(path, force=force)
    told, path = path, os.path.realpath(path)
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".deltackpt.tmp-{secrets.token_hex(6)}")
    with _unwinding_on_sigterm():
        try:
            with open(temporary, "x+b") as file:
                _keep_permissions(file, path)
                yield file
                file.flush()
                os.fsync(file.fileno())
            if force:
                os.replace(temporary, path)
            else:
                _rename_to_new(temporary, path)
            _sync_folder(folder)
        except BaseException as error:
            if os.path.lexists(temporary):
                os.unlink(temporary)
            if isinstance(error, OSError) and not isinstance(error, DeltackptError):
                raise cannot_write(error, told) from error
            raise


def _keep_permissions(file: BufferedRandom, replaced: str) -> None:
    """What only some might read must not become readable to all by being written anew."""
    with suppress(OSError):  # there is none, or the file system has no permissions
        os.fchmod(file.fileno(), stat.S_IMODE(os.stat(replaced).st_mode))


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename_to_new(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError:  # a file system without hard links: the next best is to look first
        if os.path.lexists(path):
            raise _exists(path) from None
        os.rename(temporary, path)
        return
    os.unlink(temporary)
