"""Setting damaged files aside: out of the way of readers, and still there.

``quarantine/`` mirrors the store: what lay at ``packs/ab/x.pack`` lies at
``quarantine/packs/ab/x.pack`` (``~2`` and so on is appended when that is taken by something else).
Nothing there is ever overwritten or deleted by the program, and readers pass it by; only repair
looks into it, since parts of a damaged file may still be good.
"""

from __future__ import annotations

import errno
import os

from deltackpt_store.fileio import FileIO, make_directories

QUARANTINE = "quarantine"
_WINDOW = 1024 * 1024


def keep(io: FileIO, root: str, relative: str) -> str:
    """Give the file at `relative` a second name in the quarantine, durably; that name. OSError.

    Called again after a crash it finds the name it has given before.
    """
    number = 1
    while True:
        place = f"{QUARANTINE}/{relative}" + (f"~{number}" if number > 1 else "")
        path = f"{root}/{place}"
        make_directories(io, os.path.dirname(path), within=root)
        try:
            io.link(f"{root}/{relative}", path)
        except FileExistsError:
            if not _equal(io, f"{root}/{relative}", path):
                number += 1
                continue
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise _elsewhere(relative) from error
        io.sync_directory(os.path.dirname(path))
        return place


def set_aside(io: FileIO, root: str, relative: str) -> str:
    """Move the file at `relative` into the quarantine; its path there. OSError.

    In this order: the new name, its durability, the old name's removal. A crash in between leaves
    both names, never none. A directory, which can have only one name, is renamed.
    """
    if is_directory(io, f"{root}/{relative}"):
        return _rename(io, root, relative)
    place = keep(io, root, relative)
    io.unlink(f"{root}/{relative}")
    io.sync_directory(os.path.dirname(f"{root}/{relative}"))
    return place


def is_directory(io: FileIO, path: str) -> bool:
    """Whether a directory lies at `path`. A symbolic link that leads to itself does not count."""
    try:
        io.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False
    return True


def _rename(io: FileIO, root: str, relative: str) -> str:
    """Move the directory at `relative` into the quarantine; its path there. OSError."""
    number = 1
    while True:
        place = f"{QUARANTINE}/{relative}" + (f"~{number}" if number > 1 else "")
        if not io.exists(f"{root}/{place}"):
            break
        number += 1
    make_directories(io, os.path.dirname(f"{root}/{place}"), within=root)
    try:
        io.replace(f"{root}/{relative}", f"{root}/{place}")
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise _elsewhere(relative) from error
    for path in (place, relative):
        io.sync_directory(os.path.dirname(f"{root}/{path}"))
    return place


def _elsewhere(relative: str) -> OSError:
    """The error, with a way out, where links have put folders of the store on different disks."""
    folder = relative.partition("/")[0]
    return OSError(
        errno.EXDEV,
        f"{QUARANTINE} lies on another file system than {folder}: put both on one, as links",
    )


def _equal(io: FileIO, one: str, other: str) -> bool:
    """Whether two files hold the same bytes; what cannot be read counts as different."""
    try:
        first = io.open(one)
        try:
            second = io.open(other)
            try:
                return _same_bytes(io, first, second)
            finally:
                io.close(second)
        finally:
            io.close(first)
    except OSError:
        return False


def _same_bytes(io: FileIO, first: int, second: int) -> bool:
    size = io.size(first)
    if io.size(second) != size:
        return False
    for position in range(0, size, _WINDOW):
        pieces = [bytearray(min(_WINDOW, size - position)) for _ in range(2)]
        io.read_into(first, [pieces[0]], position)
        io.read_into(second, [pieces[1]], position)
        if pieces[0] != pieces[1]:
            return False
    return True
