"""Symbolic links in place of a store's folders: what they lead to is no part of the store.

The folders at the top (``packs``, ``runs``, ...) may be links: somebody has put them on another
disk. Below them a link may lead anywhere, to a backup of this very store for instance. What is
behind it is read, since every byte is proved; but nothing is written there, and nothing deleted.
(A link in place of a *file* is safe by itself: deleting or moving it concerns the link alone, and
files are only ever created.)
"""

from __future__ import annotations

from collections.abc import Iterator

from deltackpt_store.errors import StorageError
from deltackpt_store.fileio import FileIO, is_link
from deltackpt_store.format_file import FORMAT_NAME
from deltackpt_store.oserror import storage_error

_DEPTHS = {"packs": 1, "runs": 1, "quarantine": 2}
_OF_FOLDERS = ("packs", "runs")  # of these the quarantine has folders; of the rest, files
LINKED = "it is a symbolic link, behind which nothing is written or deleted"
_HINT = "put the folder itself in its place, or take the link away"


def linked_folders(io: FileIO, root: str) -> frozenset[str]:
    """Links among the folders of packs, runs and the quarantine, relative to the store.

    StorageError when a folder cannot be listed.
    """
    return frozenset(
        link for top, depth in _DEPTHS.items() for link in _links(io, root, top, depth)
    )


def _links(io: FileIO, root: str, folder: str, depth: int) -> Iterator[str]:
    try:
        names = io.list(f"{root}/{folder}")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise storage_error(error, "list", f"{root}/{folder}") from error
    for name in sorted(names):
        relative = f"{folder}/{name}"
        if folder == "quarantine" and name.startswith(FORMAT_NAME):
            continue  # a damaged FORMAT that was a link itself
        if is_link(f"{root}/{relative}"):
            yield relative
        elif depth > 1 and name in _OF_FOLDERS:
            yield from _links(io, root, relative, depth - 1)


def refuse_linked(io: FileIO, root: str, what: str) -> None:
    """StorageError (kind ``linked-folder``) where `what` might write or delete behind a link."""
    for link in sorted(linked_folders(io, root)):
        path = f"{root}/{link}"
        raise StorageError(
            f"cannot {what} {root}: {path}: {LINKED}", kind="linked-folder", hint=_HINT, path=path
        )
