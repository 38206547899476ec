"""Making the folders again that a store has lost whole.

``runs`` and ``pins`` tell what is needed: a new empty one would make garbage of the rest. So they
come back filled from a copy, in one step, or not at all. What is missing in ``packs`` and
``manifests`` is told by the commits, and found by whoever repairs them.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Sequence

from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import (
    TEMPORARY_PREFIX,
    FileIO,
    discard,
    make_directories,
    make_directory,
    publish_bytes,
    read_file,
)
from deltackpt_store.lost_commits import read_boundary
from deltackpt_store.manifest_io import MAX_COMMIT_BYTES
from deltackpt_store.names import number_name
from deltackpt_store.quarantine import QUARANTINE
from deltackpt_store.repair_records import Mended
from deltackpt_store.store import Store

Content = dict[str, bytes]
"""Path below the folder -> content of the file."""


def mend_folders(store: Store, others: Sequence[Store], *, dry_run: bool) -> list[Mended]:
    """Make again those of ``packs``, ``manifests``, ``runs`` and ``pins`` that are gone.

    CorruptionError when ``runs`` is, and no copy of the store has it; OSError, StorageError.
    """
    io, root = store.io, store.path
    copies = [other for other in others if other.uuid == store.uuid and other.path != root]
    mended: list[Mended] = []
    for name, read in (("runs", _runs), ("pins", _pins)):
        if io.exists(f"{root}/{name}"):
            continue
        for copy in copies:
            content = read(store, copy)
            if content:
                if not dry_run:
                    _fill(io, root, name, content)
                mended.append(Mended(kind="store", name=name, source=copy.path))
                break
    if not any(one.name == "runs" for one in mended):
        store.runs()  # refuses
    for name in ("packs", "manifests"):
        if not io.exists(f"{root}/{name}"):
            if not dry_run:
                make_directory(io, f"{root}/{name}")
            mended.append(Mended(kind="store", name=name, source="made anew, empty at first"))
    return mended


def _runs(store: Store, copy: Store) -> Content:
    """The records of the copy's commits, except those that were collected here."""
    boundary = read_boundary(store)
    content: Content = {}
    with contextlib.suppress(DeltackptError):
        for run in copy.runs():
            for commit in copy.commits(run):
                if commit.number > boundary.get(run, 0):
                    name = f"{run}/{number_name(commit.number)}"
                    content[name] = read_file(copy.io, f"{copy.path}/runs/{name}", MAX_COMMIT_BYTES)
    return content


def _pins(store: Store, copy: Store) -> Content:
    """The copy's pins of commits that are there."""
    content: Content = {}
    for name, pin in copy.pins().items():
        with contextlib.suppress(DeltackptError):
            if store.read_commit(pin.run, pin.number).digest == pin.digest:
                content[name] = read_file(copy.io, f"{copy.path}/pins/{name}", MAX_COMMIT_BYTES)
    return content


def _fill(io: FileIO, root: str, name: str, content: Content) -> None:
    """Make the folder `name` with `content`, durably, whole or not at all. OSError."""
    aside = f"{root}/{QUARANTINE}/{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{name}"
    make_directories(io, aside, within=root)
    folders = sorted(_folders(content))
    try:
        for path in folders:
            make_directory(io, f"{aside}/{path}")
        for path, data in content.items():
            publish_bytes(io, f"{aside}/{path}", data)
        io.replace(aside, f"{root}/{name}")
    except BaseException:
        for path in content:
            discard(io, f"{aside}/{path}")
        for path in (*reversed(folders), ""):
            with contextlib.suppress(OSError):
                io.rmdir(f"{aside}/{path}")
        raise
    io.sync_directory(f"{root}/{QUARANTINE}")
    io.sync_directory(root)


def _folders(content: Iterable[str]) -> set[str]:
    return {path.rpartition("/")[0] for path in content} - {""}
