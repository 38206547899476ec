"""Prevents: a storage error that is forgotten, or takes earlier steps or the writer with it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from deltackpt_store.errors import StorageError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from store_writing import (
    Recording,
    base_manifest,
    blob,
    files,
    read,
    recorded_store,
    recorder,
    reopen,
    save,
    temporaries,
)

store = pytest.fixture(recorded_store)


def attempt(work: Callable[[], Commit]) -> tuple[Commit | None, StorageError | None]:
    """Result, or the StorageError; any other error fails the test."""
    try:
        return work(), None
    except StorageError as error:
        return None, error


ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("code", ERRORS)
def test_every_failing_call_leaves_older_steps_and_a_usable_writer(
    tmp_path: Path, code: int, persistent: bool
) -> None:
    """A full disk or a failed sync: loud, no leftovers, and the next save works."""  # case 79
    fail_at = 0
    passed = False
    while not passed:
        fail_at += 1
        io = Recording()
        io.error = OSError(code, os.strerror(code))
        io.persistent = persistent
        store = Store.create(tmp_path / str(fail_at), io=io)
        with StoreWriter(store, pack_bytes=100_000) as writer:
            old = [blob(1000), blob(80_000)]
            first = save(writer, 1, old)
            new = [blob(3000), blob(90_000), blob(70_000), blob(600)]
            io.counting, io.fail_at = True, fail_at
            second, error = attempt(partial(save, writer, 2, new, first))
            io.counting = False
            passed = error is None and io.count < fail_at
            if error is not None:
                assert error.errno == code
                writer.abort()
            if not persistent and io.failed != "unlink":
                assert temporaries(store) == []
            third = save(writer, 3, new, second or first)
            again = save(writer, 4, old, third)
        fresh = reopen(store)
        steps = {c.step: c for c in fresh.commits("main")}
        # A commit whose directory sync failed may or may not have come into being.
        assert set(steps) >= {1, 3, 4}
        assert again.digest == steps[4].digest
        for step, blobs in ((1, old), (3, new), (4, old)):
            snapshot = fresh.snapshot(steps[step])
            for extent, raw in enumerate(blobs):
                out = bytearray(len(raw))
                fresh.get_into(snapshot.chunks[extent][0].tobytes(), out)
                assert out == raw
    assert fail_at > 20


def test_nothing_is_synced_twice_after_a_failed_sync(store: Store) -> None:
    """After a failed fsync a second one succeeds although the data are lost."""
    io = recorder(store)
    with StoreWriter(store) as writer:
        io.counting, io.fail_at = True, -1
        io.calls.clear()
        writer.put(blob(1000))
        io.error = OSError(errno.EIO, "Input/output error")

        def failing(handle: int) -> None:
            io.calls.append(("sync", io._names[handle]))  # pyright: ignore[reportPrivateUsage]
            raise io.error

        io.sync = failing  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(StorageError) as caught:
            writer.flush()
        assert caught.value.errno == errno.EIO
        with pytest.raises(StorageError):
            writer.flush()
        del io.sync
        writer.abort()
        assert [c[0] for c in io.calls].count("sync") == 1
        assert temporaries(store) == []
        put = writer.put(b"new")
        assert put.pack not in {os.path.basename(c[1]) for c in io.calls}
        writer.flush()
    assert read(store, put, 3) == b"new"


def test_a_failure_sticks_until_abort(store: Store) -> None:
    """Blobs of another save, put before the failure, must not be taken for stored."""
    io = recorder(store)
    with StoreWriter(store) as writer:
        raw = blob(1000)
        writer.put(raw)
        io.counting, io.fail_at, io.persistent = True, 0, True
        with pytest.raises(StorageError):
            writer.flush()
        io.counting = False
        for use in (
            lambda: writer.put(raw),
            writer.flush,
            lambda: writer.write_manifest(base_manifest([], [])),
            lambda: writer.commit(run="m", step=1, parent=None, manifest=bytes(32), base=None,
                                  root=bytes(32), packs=[]),
        ):  # fmt: skip
            with pytest.raises(StorageError):
                use()
        writer.abort()
        assert writer.put(raw).written > 0
        writer.flush()


@pytest.mark.parametrize("call", ["create", "write", "sync", "link", "sync_directory"])
def test_no_failure_of_a_flush_is_forgotten(store: Store, call: str) -> None:
    """A second flush that succeeds would acknowledge what the first one lost."""
    io = recorder(store)
    with StoreWriter(store) as writer:
        save(writer, 1, [blob(1000)])
        raw = blob(1000)
        writer.put(raw)
        io.fail_on = call
        with pytest.raises(StorageError):
            writer.flush()
        io.fail_on = ""
        with pytest.raises(StorageError):
            writer.flush()
        writer.abort()
        assert writer.put(raw).written > 0


def test_a_failure_in_the_background_reaches_the_next_put(store: Store) -> None:
    io = recorder(store)
    with StoreWriter(store, pack_bytes=1000) as writer:
        writer.put(blob(10))
        writer.flush()
        io.counting, io.fail_at, io.persistent = True, 0, True
        writer.put(blob(2000))
        with pytest.raises(StorageError):  # the thread is drained: the error is there
            writer._output._thread.drain()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(StorageError):
            writer.put(blob(10))
        io.counting = False
        assert temporaries(store) == []


def test_abort_drops_only_what_is_not_flushed(store: Store) -> None:
    with StoreWriter(store, pack_bytes=50_000) as writer:
        kept = writer.put(b"kept")
        writer.flush()
        dropped = [writer.put(blob(60_000)) for _ in range(3)]
        writer.put(b"small")
        writer.abort()
        assert temporaries(store) == []
        assert len(files(store, "packs")) == 1
        assert writer.put(b"kept").written == 0
        again = writer.put(b"small")
        assert again.written > 0
        assert again.pack not in {p.pack for p in dropped}
        writer.flush()
    assert read(store, kept, 4) == b"kept"
