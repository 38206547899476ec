"""Prevents: a collection beside writers deletes what they build upon, or waits for the dead."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authors import Author, Session, check_everything, chunk_of, collected
from collecting import with_garbage
from deltackpt_store import leases
from deltackpt_store.errors import (
    ConflictError,
    StateError,
    StorageError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.index import MemoryIndex
from deltackpt_store.leases import Lease
from deltackpt_store.protocol import Abort, NeedSlots
from deltackpt_store.retention import retire
from deltackpt_store.store import Store

IO = FileIO()


# writers ----------------------------------------------------------------------------------------


def test_a_live_writer_is_waited_for(store: Store, new: Callable[..., Author]) -> None:
    with_garbage(store, new)
    author = new("living")
    author.writer.put(memoryview(chunk_of("x")))
    with pytest.raises(ConflictError, match="process") as caught:
        collect(store, timeout=0)
    assert caught.value.kind == "gc-busy"
    assert len(store.packs.names()) == 2
    assert len(collected(store, author).packs) == 1


# case 128
def test_what_was_committed_meanwhile_is_pardoned(store: Store, new: Callable[..., Author]) -> None:
    """Guard: the second marking. The commit falls between the first marking and the ack."""
    with_garbage(store, new)
    author = new("living")
    held: list[Any] = []

    def commit(_: object) -> bool:
        if not held:
            held.append(author.finish(3))
        author.heed()
        return True

    author.prepare(["garbage"])  # all but the commit
    report = collect(store, wait=commit)
    assert report.pardoned
    check_everything(store, held)


# case 128
def test_what_a_writer_builds_upon_is_pardoned(store: Store, new: Callable[..., Author]) -> None:
    """Guard: claims. The commit comes only after the collection, of packs and manifest."""
    with_garbage(store, new)
    author = new("living")
    author.prepare(["garbage"])
    report = collected(store, author)
    assert report.pardoned
    assert not report.packs
    check_everything(store, [author.finish(3)])


def test_what_is_published_meanwhile_is_not_touched(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: only what the generation condemns is deleted, however unneeded other things look."""
    with_garbage(store, new)
    author = new("living")
    author.writer.heed()
    prepared: list[bool] = []

    def prepare(_: object) -> bool:
        author.heed()
        if not prepared:
            author.prepare(["fresh"])
            prepared.append(True)
        return True

    assert len(collect(store, wait=prepare).packs) == 1
    check_everything(store, [author.finish(3)])


# case 128
def test_what_a_save_in_flight_builds_upon_is_pardoned(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: a session claims what the tables of its saves need."""
    with_garbage(store, new)
    session = Session(store, "main", IO)
    save = session.begin(3, ["garbage", "more"])
    session.writer.relieve()  # what was staged is looked up and stored
    report = collected(store, session)
    assert report.pardoned
    committed = session.finish(save)
    assert committed is not None
    check_everything(store, [committed])
    session.close()


def test_tables_kept_for_later_saves_count_too(store: Store, new: Callable[..., Author]) -> None:
    """A save relative to one whose commit was retired meanwhile inherits its chunks."""
    session = Session(store, "main", IO)
    session.save(1, ["a", "b"])
    session.save(2, ["c", "d"], relative=1)
    retire(store, [store.read_commit("main", 1)])
    collected(store, session)
    third = session.save(3, ["a", "x"], relative=1)
    assert third is not None
    session.close()
    check_everything(store, [third])


def test_condemned_packs_hold_nothing_for_new_saves(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: after its acknowledgement a writer stores again what only a condemned pack holds."""
    with_garbage(store, new)
    author = new("living")
    author.writer.put(memoryview(chunk_of("x")))  # has its lease, and relies on nothing condemned
    made: list[Any] = []

    def save(_: object) -> bool:
        author.heed()
        if not made:
            made.append(author.save(3, ["garbage"]))
        return True

    report = collect(store, wait=save)
    assert report.packs
    check_everything(store, made)


def test_a_writer_that_comes_later_knows_what_is_condemned(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: the newest generation is read before anything is relied upon."""
    with_garbage(store, new)
    first = new("first")
    first.writer.heed()
    made: list[Any] = []

    def save(_: object) -> bool:
        if not made:
            second = new("second")  # its index knows the condemned pack
            made.append(second.save(3, ["garbage"]))
        first.heed()
        return True

    assert collect(store, wait=save).packs
    check_everything(store, made)


def test_the_lease_comes_before_the_index(tmp_path: Path, new: Callable[..., Author]) -> None:
    """Guard: what the index finds cannot be collected behind the writer's back."""
    from deltackpt_store import open_run
    from deltackpt_store.client import WriterClient

    seen: list[list[str]] = []
    real = open_run.open_index

    def looking(store: Any, **options: Any) -> Any:
        seen.append(os.listdir(f"{store.path}/gc/leases"))
        return real(store, **options)

    open_run.open_index = looking
    try:
        client = WriterClient(tmp_path / "s2", "main", seed=1, ring_bytes=1 << 20, mode="thread")
        client.ready(60)
        client.close(60)
    finally:
        open_run.open_index = real
    assert [len(names) for names in seen] == [1]


def test_blobs_of_a_failed_save_are_not_relied_upon_when_collected(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: a writer forgets its own packs too, when they are condemned."""
    session = Session(store, "main", IO)
    session.save(5, ["a"])
    failed = session.begin(6, ["lost"])
    session.writer.handle(NeedSlots())
    session.writer.relieve()  # the blob is durable
    session.writer.handle(Abort(failed))
    assert collected(store, session).packs
    again = session.save(8, ["lost"])
    assert again is not None
    session.close()
    check_everything(store, [again])


def test_an_equal_manifest_about_to_go_is_not_built_upon(
    store: Store, new: Callable[..., Author]
) -> None:
    """Guard: the salt. The same step saved again has the same manifest, which is condemned."""
    with_garbage(store, new)
    author = new("living")
    author.writer.heed()
    made: list[Any] = []

    def save(_: object) -> bool:
        author.heed()
        if not made:
            made.append(author.save(3, ["garbage"]))
        return True

    first = store.read_commit("main", 1)
    author.hints = store.snapshot(first).packs  # makes the manifests equal to the byte
    report = collect(store, wait=save)
    assert report.manifests == [first.manifest.hex()]
    assert made[0].manifest != first.manifest
    assert made[0].root == first.root
    check_everything(store, made)


def test_a_base_about_to_go_is_not_built_upon(store: Store) -> None:
    """Guard: deltas are written against a base that stays."""
    words = [f"w{i}" for i in range(12)]
    session = Session(store, "main", IO)
    first = session.save(1, words)
    assert first is not None
    assert first.base
    session.close()
    commit = store.head("main")
    other = Session(store, "main", IO, name="other")
    save = other.begin(2, ["x", *words[1:]], commit=commit)
    other.writer._release_hold()  # pyright: ignore[reportPrivateUsage] - as if holds did not work
    retire(store, [commit])
    files = [path for name in ("manifests", "runs") for path in Path(store.path, name).rglob("*")]
    before = {path: path.read_bytes() for path in files if path.is_file()}
    report = collected(store, other)
    assert report.manifests == [commit.manifest.hex()]
    gone = [path for path in before if not path.exists()]
    for path in gone:  # as if the collection had not come to them yet
        path.write_bytes(before[path])
    second = other.finish(save)
    assert second is not None
    assert second.base
    for path in gone:
        path.unlink()
    other.close()
    check_everything(store, [second])


def test_moved_chunks_are_found_in_their_new_place(
    store: Store, new: Callable[..., Author]
) -> None:
    """A session lets go of a pack when another one holds its chunks; else nothing is ever freed."""
    session = Session(store, "main", IO)
    session.save(1, ["a", "b", "c"])
    old = set(store.packs.names())
    copier = new("copier", "other")
    copier.writer._holdings._index = MemoryIndex()  # pyright: ignore[reportPrivateUsage] - knows of no copy
    copier.writer._confirmer._index = MemoryIndex()  # pyright: ignore[reportPrivateUsage]
    copier.save(1, ["a", "b", "c"])
    copier.close()
    report = collected(store, session, avoid=old)
    assert set(report.packs) == old
    second = session.save(2, ["a", "b", "x"], relative=1)
    assert second is not None
    session.close()
    check_everything(store, [second])


# locks that lie ---------------------------------------------------------------------------------


def blind(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """From here on the collector takes every writer for dead."""

    def nobody(io: FileIO, path: str) -> bool:
        return False

    def bury(io: FileIO, root: str, writer: str) -> bool:
        os.unlink(f"{root}/gc/leases/{writer}")
        return True

    monkeypatch.setattr(leases, "is_locked", nobody)
    monkeypatch.setattr(leases, "bury", bury)


def test_a_writer_taken_for_dead_withdraws_what_was_collected(
    store: Store, new: Callable[..., Author], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: after a commit the lease must still be there, else the commit is proved."""
    with_garbage(store, new)
    author = new("living")
    author.prepare(["garbage"])
    blind(monkeypatch, store)
    assert collect(store).packs
    with pytest.raises(StateError, match="took this writer for dead") as caught:
        author.finish(3)
    assert caught.value.kind == "collected"
    check_everything(store)
    assert store.steps("main") == [2]
    check_everything(store, [author.save(4, ["garbage"])])  # said again, it is stored again


def test_a_writer_taken_for_dead_keeps_proving(
    store: Store, new: Callable[..., Author], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: having heeded the generation meanwhile does not make the lost chunks come back."""
    with_garbage(store, new)
    author = new("living")
    author.prepare(["garbage"])
    blind(monkeypatch, store)
    collect(store)
    author.heed()
    with pytest.raises(StateError, match="took this writer for dead"):
        author.finish(3)
    check_everything(store)


def test_a_writer_taken_for_dead_may_still_commit_what_is_whole(
    store: Store, new: Callable[..., Author], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_garbage(store, new)
    author = new("living")
    author.prepare(["base"])
    blind(monkeypatch, store)
    assert collect(store).packs
    check_everything(store, [author.finish(3)])


def test_a_dead_lease_is_gone_before_the_second_marking(
    store: Store, new: Callable[..., Author], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: else a commit after that marking would find its lease and count itself safe."""
    with_garbage(store, new)
    author = new("living")
    author.prepare(["garbage"])
    blind(monkeypatch, store)

    class Between(FileIO):
        """Commits when the second marking is over, before the first deletion."""

        tried = False

        def unlink(self, path: str) -> None:
            if "/packs/" in path and not self.tried:
                self.tried = True
                with pytest.raises(StateError, match="took this writer for dead"):
                    author.finish(3)
            super().unlink(path)

    io = Between()
    collect(Store.open(store.path, io=io))
    assert io.tried
    check_everything(store)


# case 130
def test_a_killed_writer_blocks_nobody(store: Store, new: Callable[..., Author]) -> None:
    code = (
        "import os, signal, sys\n"
        "from deltackpt_store import FileIO\n"
        "from deltackpt_store.leases import Lease\n"
        "lease = Lease.take(FileIO(), sys.argv[1], 'ab' * 8)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with_garbage(store, new)
    subprocess.run([sys.executable, "-c", code, store.path], check=False)
    assert os.listdir(f"{store.path}/gc/leases") == ["ab" * 8]
    assert collect(store, timeout=0).packs
    assert os.listdir(f"{store.path}/gc/leases") == []


# case 129
def test_no_clock_decides_who_is_alive(
    store: Store, new: Callable[..., Author], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_garbage(store, new)
    author = new("living")
    author.writer.heed()
    old = 1.0
    os.utime(f"{store.path}/gc/leases/{author.writer.writer}", (old, old))
    for now in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        with pytest.raises(ConflictError):
            collect(store, timeout=0)
    assert len(collected(store, author).packs) == 1


def test_a_forked_child_does_not_keep_its_parent_alive(store: Store) -> None:
    lease = Lease.take(IO, store.path, "cd" * 8)
    assert lease is not None
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    lease.close_in_child()  # what the death of this process would do to its descriptor
    found = leases.live_leases(IO, store.path)
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    for fd in (*ready, *go):
        os.close(fd)
    assert found == ([], ["cd" * 8])


def test_without_locks_nothing_is_collected(store: Store, new: Callable[..., Author]) -> None:
    with_garbage(store, new)

    class NoLocks(FileIO):
        def lock(self, path: str, *, create: bool = False) -> int:
            raise OSError(errno.ENOLCK, "No locks available", path)

    with pytest.raises(StorageError, match="needs file locks"):
        collect(Store.open(store.path, io=NoLocks()))
    assert len(store.packs.names()) == 2


@pytest.mark.parametrize("heeds", [False, True])
def test_without_locks_a_writer_saves_and_proves(
    store: Store, new: Callable[..., Author], caplog: pytest.LogCaptureFixture, heeds: bool
) -> None:
    """One host without locks, another with: the collection there cannot see this writer.

    Having heeded the generation meanwhile does not make the lost chunks come back.
    """
    with_garbage(store, new)

    class NoLocks(FileIO):
        def lock(self, path: str, *, create: bool = False) -> int:
            raise OSError(errno.ENOLCK, "No locks available", path)

    author = Author(Store.open(store.path, io=NoLocks()), "lockless")
    author.run = "main"
    author.parent = store.head("main")
    author.save(3, ["x"])
    author.prepare(["garbage"])
    collect(store)
    if heeds:
        author.heed()
    with pytest.raises(StateError, match="took this writer for dead"):
        author.finish(4)
    author.close()
    assert "garbage collection must not run" in caplog.text
    check_everything(store)


# somebody empties gc/ ----------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["all", "folder", "generations"])
def test_generations_that_begin_anew_are_no_old_news(
    store: Store, new: Callable[..., Author], lost: str
) -> None:
    """A generation of the number that the writer has heeded may be another one."""
    with_garbage(store, new)
    other = new("other", "other")
    spare = other.save(1, ["spare"])
    other.save(2, ["base"])
    other.close()
    assert collect(store).generation == 1
    author = new("living", "living")
    author.save(1, ["x"])
    author.prepare(["spare"])
    retire(store, [spare])
    for name in os.listdir(f"{store.path}/gc"):
        path = Path(store.path, "gc", name)
        if path.is_file():
            path.unlink()
        elif lost != "generations":
            shutil.rmtree(path)
    if lost == "folder":
        os.rmdir(f"{store.path}/gc")
    if lost == "generations":  # the lease is there, and so is the answer to the old number
        with pytest.raises(ConflictError, match="have not let go"):
            collect(store, accept_lost=True, timeout=0)
        check_everything(store, [author.finish(2)])
        return
    assert len(collect(store, accept_lost=True).packs) == 1
    with pytest.raises(StateError, match="took this writer for dead"):
        author.finish(2)
    check_everything(store, [author.save(2, ["spare"])])


def test_a_writer_makes_a_lost_folder_of_collection_again(
    store: Store, new: Callable[..., Author]
) -> None:
    author = new()
    author.save(1, ["x"])
    shutil.rmtree(f"{store.path}/gc")
    with pytest.raises(StorageError, match="gc"):
        author.save(2, ["y"])
    check_everything(store, [author.save(2, ["y"])])
