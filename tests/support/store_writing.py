"""What tests of the store writer share: whole saves of random bytes, and a record of file calls."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

from deltackpt_store.fileio import Buffer, FileIO
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Manifest, Snapshot, TensorView
from deltackpt_store.manifest_io import to_base
from deltackpt_store.store import Store
from deltackpt_store.store_writer import Put, StoreWriter

NOISE = random.Random(17)


def blob(size: int) -> bytes:
    return NOISE.randbytes(size)


class Recording(FileIO):
    """Notes every call that changes or syncs something, and can fail the n-th call.

    What a writer does in ``gc/`` is left out: that is tested with garbage collection.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.counting = False
        self.count = 0
        self.fail_at = -1
        self.failed = ""
        self.fail_on = ""
        self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.persistent = False
        self._names: dict[int, str] = {}

    def _note(self, what: str, path: str) -> None:
        if "/gc/" in path or path.endswith("/gc"):
            return
        self.calls.append((what, path))
        if what == self.fail_on:
            raise self.error
        if self.counting:
            self.count += 1
            if self.count == self.fail_at or (self.persistent and self.count > self.fail_at >= 0):
                self.failed = what
                raise self.error

    def create(self, path: str, mode: int = 0o666) -> int:
        self._note("create", path)
        handle = super().create(path, mode)
        self._names[handle] = path
        return handle

    def lock(self, path: str, *, create: bool = False) -> int:
        handle = super().lock(path, create=create)
        self._names[handle] = path
        return handle

    def _pwritev(self, handle: int, views: Sequence[Buffer], offset: int) -> int:
        self._note("write", self._names[handle])
        return super()._pwritev(handle, views, offset)

    def sync(self, handle: int) -> None:
        self._note("sync", self._names[handle])
        super().sync(handle)

    def close(self, handle: int) -> None:
        path = self._names.pop(handle, None)
        super().close(handle)
        if path is not None:
            self._note("close", path)

    def link(self, source: str, target: str) -> None:
        self._note("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._note("unlink", path)
        super().unlink(path)

    def sync_directory(self, path: str) -> None:
        self._note("sync_directory", path)
        super().sync_directory(path)

    def mkdir(self, path: str) -> None:
        self._note("mkdir", path)
        super().mkdir(path)


def recorded_store(path: Path) -> Store:
    """An empty store whose file calls are noted; a fixture where a module says so."""
    return Store.create(path, io=Recording())


def recorder(store: Store) -> Recording:
    assert isinstance(store.io, Recording)
    return store.io


def reopen(store: Store) -> Store:
    return Store.open(store.path)


def read(store: Store, put: Put, size: int) -> bytes:
    out = bytearray(size)
    reopen(store).get_into(put.id, out)
    return bytes(out)


def layout(sizes: Sequence[int]) -> Layout:
    sizes = [max(size, 513) for size in sizes]  # smaller ones would have to be inline
    extents = tuple(ExtentSpec(size, 1 << 26, "uint8") for size in sizes)
    views = tuple(TensorView(n, n, "uint8", (size,), (1,), 0) for n, size in enumerate(sizes))
    paths = tuple(map(str, range(len(sizes))))
    return Layout(structure=b"\xc0", paths=paths, tensors=views, extents=extents, objects=())


def base_manifest(puts: Sequence[Put], sizes: Sequence[int]) -> Manifest:
    import numpy as np

    chunks = {
        n: np.frombuffer(put.id, np.uint8).reshape(1, 32).copy() for n, put in enumerate(puts)
    }
    snapshot = Snapshot(layout(sizes), {}, {}, chunks)
    return to_base(snapshot, {put.pack for put in puts})


def save(
    writer: StoreWriter, step: int, blobs: Sequence[bytes], parent: Commit | None = None
) -> Commit:
    """A whole save: blobs, manifest, commit."""
    puts = [writer.put(raw) for raw in blobs]
    writer.flush()
    manifest = base_manifest(puts, [len(raw) for raw in blobs])
    digest = writer.write_manifest(manifest)
    return writer.commit(
        run="main", step=step, parent=parent, manifest=digest, base=None, root=manifest.root,
        packs=manifest.packs,
    )  # fmt: skip


def files(store: Store, under: str = "") -> list[str]:
    top = Path(store.path) / under
    return sorted(str(p.relative_to(store.path)) for p in top.rglob("*") if p.is_file())


def temporaries(store: Store) -> list[str]:
    return [f for f in files(store) if "/.tmp-" in f or f.startswith(".tmp-")]
