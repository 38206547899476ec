"""Opening a run for writing: the store (made if need be), its lock, the index, the session."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from threading import Event

from deltackpt_store.encode_crew import Crew
from deltackpt_store.errors import DeltackptError, NotFoundError
from deltackpt_store.fileio import FileIO, make_subdirectory
from deltackpt_store.leases import Lease
from deltackpt_store.lmdb_index import open_index
from deltackpt_store.names import check_name
from deltackpt_store.oserror import storage_error
from deltackpt_store.presence import make_empty_folders, vanished
from deltackpt_store.protocol import Hello, ToTrainer, WriterOptions
from deltackpt_store.reserve import make_reserve
from deltackpt_store.ring import Ring
from deltackpt_store.runlock import RunLock
from deltackpt_store.session import RunWriter
from deltackpt_store.store import Store
from deltackpt_store.store_writer import FOLDERS


def open_session(
    hello: Hello,
    ring: Ring,
    *,
    send: Callable[[ToTrainer], None],
    gone: Event,
    io: FileIO | None = None,
    crew: Crew | None = None,
) -> RunWriter:
    """Open (or create) the store, lock the run, and tell the trainer that it may save.

    `crew`, which stays the caller's, helps with encoding.

    Waits up to ``options.lock_timeout`` for an earlier writer of the run, or until `gone` is set.
    Raises what keeps the run from being written: `NotFoundError`, `UnsupportedFormatError`,
    `InvalidInputError`, `StorageError`, `ConflictError`, `CorruptionError`.
    """
    check_name(hello.run, "run")
    path = os.fsdecode(hello.store)
    store = _open(path, hello.options, io)
    directory = os.path.join(store.path, "runs", hello.run)
    try:
        make_subdirectory(store.io, directory)
        store.check_spelling(hello.run)
        lock = RunLock.acquire(
            directory, hello.run, timeout=hello.options.lock_timeout, cancelled=gone.wait
        )
    except OSError as error:
        if isinstance(error, DeltackptError):
            raise
        raise storage_error(error, "write to the run", directory) from error
    with contextlib.ExitStack() as failed:
        failed.callback(lock.release)
        # Before the index: what is found from here on is not collected behind this writer's back.
        lease = Lease.take(store.io, store.path, secrets.token_hex(8))
        if lease is not None:
            failed.callback(lease.release)
        make_reserve(store.io, store.path)
        index = open_index(store)
        failed.callback(index.close)
        session = RunWriter(store, hello, ring, index=index, lock=lock, lease=lease, send=send,
                            crew=crew)  # fmt: skip
        failed.pop_all()
    send(session.ready())
    return session


def _open(path: str, options: WriterOptions, io: FileIO | None) -> Store:
    """The store to write to; one that existed before is not created again when it has vanished."""
    if not options.expect:
        store = Store.create(path, io=io) if options.create else Store.open(path, io=io)
    else:
        try:
            store = Store.open(path, io=io)
        except NotFoundError as error:
            raise vanished(path) from error
        if store.uuid.hex() != options.expect:
            raise vanished(store.path, "another store was put in its place")
    store.format.require("write", store.path)
    make_empty_folders(store.io, store.path, FOLDERS)
    return store
