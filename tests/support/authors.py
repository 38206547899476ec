"""Writers of small steps whose content is told by words, for tests of collection.

A step of words ``["a", "b"]`` is one tensor of two chunks, each made of its word, so equal words
are equal chunks wherever they were saved. ``"a~7"`` differs from ``"a"`` in a few bytes: with a
codec other than "none" it is coded against that, when the store holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from blake3 import blake3
from deltackpt_store.fileio import TEMPORARY_PREFIX, FileIO, make_directories
from deltackpt_store.gc import GcReport, collect
from deltackpt_store.index import MemoryIndex, list_packs, refresh
from deltackpt_store.leases import Lease
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Snapshot, TensorView
from deltackpt_store.manifest_io import to_base
from deltackpt_store.mark import mark
from deltackpt_store.protocol import (
    RECORD,
    Begin,
    Committed,
    Failed,
    Finish,
    Hello,
    Slot,
    ToTrainer,
    WriterOptions,
)
from deltackpt_store.ring import Ring
from deltackpt_store.roots import read_roots
from deltackpt_store.session import RunWriter
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter

CHUNK = 1024


def chunk_of(word: str) -> bytes:
    base, _, change = word.partition("~")
    data = bytearray(blake3(base.encode()).digest(length=CHUNK))
    for place in blake3(change.encode()).digest(length=8) if change else b"":
        data[4 * place] ^= 255
    return bytes(data)


def id_of(word: str) -> bytes:
    return blake3(chunk_of(word)).digest()


def writer_id(text: str) -> str:
    """The id of a test's only writer that is called so; the same in every schedule."""
    return blake3(text.encode()).hexdigest(length=8)


def layout_of(words: int) -> Layout:
    return Layout(
        structure=msgspec.msgpack.encode(["d", [["w", 0], ["words", 1]]]),
        paths=("w", "words"),
        tensors=(TensorView(0, 0, "uint8", (words * CHUNK,), (1,), 0),),
        extents=(ExtentSpec(words * CHUNK, CHUNK, "uint8"),),
        objects=(1,),
    )


def words_in(store: Store, commit: Commit) -> list[str]:
    """What a step says; every chunk is read and must be what its word makes it."""
    snapshot = store.snapshot(commit)
    words: list[str] = msgspec.msgpack.decode(snapshot.objects[1])
    buffers = [bytearray(CHUNK) for _ in words]
    ids = [row.tobytes() for row in snapshot.chunks[0]]
    store.reader(snapshot.packs).read(
        [(i, memoryview(b)) for i, b in zip(ids, buffers, strict=True)], threads=1
    )
    assert [bytes(b) for b in buffers] == [chunk_of(word) for word in words]
    return words


def check_everything(
    store: Store, acknowledged: Sequence[Commit | Committed] = (), where: object = ""
) -> None:
    """All acknowledged commits are there, and every listed or pinned one restores."""
    found = everything_in(store, where)
    for commit in acknowledged:
        assert commit.digest in found, f"{where}: {commit.run}@{commit.step} is gone"


def everything_in(store: Store, where: object = "") -> set[bytes]:
    """Digests of all commits that are listed or pinned; each of them restores."""
    found: set[bytes] = set()
    for run in store.runs():
        commits = store.commits(run)
        assert not commits.damaged, (where, commits.damaged)
        for commit in commits:
            words_in(store, commit)
            found.add(commit.digest)
    for name in store.pins():
        commit = store.pinned(name)
        words_in(store, commit)
        found.add(commit.digest)
    return found


def check_clean(store: Store, where: object = "") -> None:
    """Nothing is left that nothing needs."""
    marking = mark(store, read_roots(store))
    assert marking.keeping() == set(marking.catalogue.names), where
    places = ["", "/manifests", "/pins", "/gc", *(f"/runs/{run}" for run in store.runs())]
    places += [f"/packs/{name[:2]}" for name in marking.catalogue.names]
    left = [name for place in places for name in store.io.list(store.path + place)
            if name.startswith(TEMPORARY_PREFIX)]  # fmt: skip
    assert not left, where


class Author:
    """A store writer on its own, as a compaction or a repair uses it."""

    def __init__(self, store: Store, run: str, *, lease: bool = True, codec: str = "none") -> None:
        self.store = Store.open(store.path, io=store.io)
        self.run = run
        self.index = MemoryIndex()
        name = writer_id(f"author {run}")
        held = Lease.take(store.io, store.path, name) if lease else None
        refresh(self.index, store.io, store.path, list_packs(store.io, store.path))
        self.writer = StoreWriter(self.store, codec=codec, index=self.index, lease=held)
        self.parent: Commit | None = None
        self.hints: Sequence[str] = ()
        """Packs to name in manifests instead of the right ones: hints mean nothing."""

    def prepare(self, words: Sequence[str]) -> None:
        """Everything of a save but its commit."""
        puts = [
            self.writer.put(
                memoryview(chunk_of(word)),
                reference=id_of(word.partition("~")[0]) if "~" in word else None,
            )
            for word in words
        ]
        self.writer.flush()
        packs = {name for put in puts for name in put.packs}
        ids = np.frombuffer(b"".join(put.id for put in puts), np.uint8).reshape(-1, 32)
        snapshot = Snapshot(
            layout_of(len(words)), {1: msgspec.msgpack.encode(list(words))}, {}, {0: ids}
        )
        self._manifest = to_base(snapshot, self.hints or packs)
        self._digest = self.writer.write_manifest(self._manifest)

    def finish(self, step: int, *, number: int | None = None) -> Commit:
        """Commit what was prepared."""
        self.parent = self.writer.commit(
            run=self.run, step=step, parent=self.parent, manifest=self._digest, base=None,
            root=self._manifest.root, packs=self._manifest.packs, number=number,
        )  # fmt: skip
        return self.parent

    def save(self, step: int, words: Sequence[str], *, number: int | None = None) -> Commit:
        self.prepare(words)
        return self.finish(step, number=number)

    def heed(self) -> None:
        self.writer.heed()

    def close(self) -> None:
        self.writer.close()


def collected(store: Store, *writers: Author | Session, **options: Any) -> GcReport:
    """Collect beside live writers, each of which gets its turn while the collection waits."""
    waits = 0

    def wait(missing: list[str]) -> bool:
        nonlocal waits
        waits += 1
        for writer in writers:
            writer.heed()
        return waits < 10

    return collect(store, wait=wait, **options)


class _NoLock:
    locked = False

    def release(self) -> None:
        pass


class Session:
    """A run writer fed by hand, without process, threads or channel. Staged words as told."""

    SEED = 7

    def __init__(
        self, store: Store, run: str, io: FileIO, *, name: str = "", **options: object
    ) -> None:
        self.store = Store.open(store.path, io=io)
        self.run = run
        self.sent: list[ToTrainer] = []
        self.ring = Ring.create(4 * 16 * CHUNK, 16 * CHUNK)
        hello = Hello(
            1, store.path.encode(), run, self.SEED, 4, 16 * CHUNK,
            WriterOptions(**{"codec": "none", **options}),  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        make_directories(io, f"{store.path}/runs/{run}")
        lease = Lease.take(io, store.path, writer_id(f"session {name or run}"))
        index = MemoryIndex()
        refresh(index, io, store.path, list_packs(io, store.path))
        self.writer = RunWriter(
            self.store, hello, self.ring, index=index, lock=_NoLock(), lease=lease,  # pyright: ignore[reportArgumentType] - stands for a lock
            send=self.sent.append,
        )  # fmt: skip
        self._saves = 0
        self._words: dict[int, list[str]] = {}

    @property
    def newest(self) -> int:
        """The save begun last."""
        return self._saves

    def begin(self, step: int, words: Sequence[str], *, relative: int | None = None,
              parent: Commit | None = None, commit: Commit | None = None,
              overwrite: bool = False) -> int:  # fmt: skip
        """Begin a save and stage what differs from the one it is relative to."""
        self._saves += 1
        save = self._saves
        self.writer.handle(
            Begin(
                save, step, relative=relative, layout=msgspec.msgpack.encode(layout_of(len(words))),
                relative_commit=None if commit is None else (commit.run, commit.number),
                parent=parent, overwrite=overwrite,
            )
        )  # fmt: skip
        before = self._words.get(relative, []) if relative is not None else []
        if commit is not None:
            before = words_in(self.store, commit)
        staged = [(i, w) for i, w in enumerate(words) if i >= len(before) or before[i] != w]
        if staged:
            view = self.ring.view(0)
            records = np.zeros(len(staged), RECORD)
            for at, (place, word) in enumerate(staged):
                data = chunk_of(word)
                view[at * CHUNK : (at + 1) * CHUNK] = data
                digest = np.frombuffer(xxhash.xxh3_128_digest(data, self.SEED), np.uint8)
                records[at] = (0, place, at * CHUNK, CHUNK, digest)
            self.writer.handle(Slot(save, 0, records.tobytes()))
            self.writer.relieve()  # no message is waiting
        self._words[save] = list(words)
        return save

    def finish(self, save: int, metrics: dict[str, float] | None = None) -> Committed | None:
        """The commit's report; None when the save failed."""
        words = self._words[save]
        self.writer.handle(
            Finish(save, {1: msgspec.msgpack.encode(words)}, {}, b"\x80", metrics or {}, {})
        )
        for message in reversed(self.sent):
            if isinstance(message, Committed) and message.save == save:
                return message
            if isinstance(message, Failed) and message.save == save:
                return None
        raise AssertionError(self.sent)

    def failure(self, save: int) -> dict[str, object]:
        return next(m.error for m in self.sent if isinstance(m, Failed) and m.save == save)

    def save(self, step: int, words: Sequence[str], *, metrics: dict[str, float] | None = None,
             **options: object) -> Committed | None:  # fmt: skip
        return self.finish(self.begin(step, words, **options), metrics)  # pyright: ignore[reportArgumentType] - as in begin

    def commit_of(self, report: Committed) -> Commit:
        return self.store.read_commit(report.run, report.number)

    def heed(self) -> None:
        self.writer.attend()

    def close(self) -> None:
        self.writer.close()
        self.ring.close()
