"""A training without torch, whose state at a step is a function of the step alone.

``weights``: float32, every element moves a little each step (chunks are stored as deltas).
``rows``: chunk c changes every c + 1 steps (chunks are found in older packs).
``noise``: new at every step, and large enough to be written past the page cache. One small tensor
and one plain value travel inside the manifest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import xxhash
from blake3 import blake3
from deltackpt_store.client import Outcome, WriterClient
from deltackpt_store.errors import NotFoundError
from deltackpt_store.fileio import FileIO
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, TensorView
from deltackpt_store.protocol import RECORD, WriterOptions
from deltackpt_store.retention import Keep
from deltackpt_store.store import Store
from deltackpt_store.verify import verify

CHUNK = 16 * 1024
SEED = 0xDECAF
KEEP = 4
"""Steps that retention keeps, the newest ones."""

_NAMES = ("weights", "rows", "noise", "small")
_DTYPES = ("float32", "uint8", "uint8", "uint8")
_SIZES = (12 * CHUNK + 400, 10 * CHUNK + 7, (2 << 20) + 3000, 24)


def _endless(*key: int, length: int) -> bytes:
    return blake3(b" ".join(b"%d" % part for part in key)).digest(length=length)


_WEIGHTS = np.frombuffer(_endless(0, length=_SIZES[0]), np.uint32) & 0x3FFFFFFF  # finite
_MOVES = np.frombuffer(_endless(1, length=_SIZES[0]), np.uint32) & 0xF


def state_at(step: int) -> list[bytes]:
    """The bytes of every tensor at `step`, in the order of the layout."""
    weights = (_WEIGHTS + _MOVES * np.uint32(step)).astype("<u4").tobytes()
    rows = b"".join(
        _endless(2, chunk, step // (chunk + 1), length=min(CHUNK, _SIZES[1] - chunk * CHUNK))
        for chunk in range(-(-_SIZES[1] // CHUNK))
    )
    noise, small = (_endless(i, step, length=_SIZES[i]) for i in (2, 3))
    return [weights, rows, noise, small]


def plain_at(step: int) -> bytes:
    return msgspec.msgpack.encode(step)


def layout() -> Layout:
    names = [*_NAMES, "step"]
    width = {"float32": 4, "uint8": 1}
    return Layout(
        structure=msgspec.msgpack.encode(["d", [[n, slot] for slot, n in enumerate(names)]]),
        paths=tuple(names),
        tensors=tuple(
            TensorView(i, i, dtype, (size // width[dtype],), (1,), 0)
            for i, (dtype, size) in enumerate(zip(_DTYPES, _SIZES, strict=True))
        ),
        extents=tuple(ExtentSpec(n, CHUNK, d) for n, d in zip(_SIZES, _DTYPES, strict=True)),
        objects=(len(_NAMES),),
    )


class Trainer:
    """Saves steps through a real writer, staging what changed against the last good save."""

    def __init__(
        self, path: str, run: str = "main", *, mode: Any = "process", io: FileIO | None = None,
        keep: Keep | None = None, told: Callable[[int, Outcome], None] | None = None,
        lock_timeout: float = 60.0,
    ) -> None:  # fmt: skip
        self.client = WriterClient(
            path, run, seed=SEED, ring_bytes=16 << 20, slot_bytes=64 * CHUNK, mode=mode, io=io,
            options=WriterOptions(lock_timeout=lock_timeout, keep=keep), on_result=told,
        )  # fmt: skip
        self._path, self._run = path, run
        self.layout = layout()
        self._encoded = msgspec.msgpack.encode(self.layout)
        self._table: dict[tuple[int, int], bytes] = {}
        self._relative: int | None = None

    def next_step(self) -> int:
        """The step after the newest one in the store; waits until the writer holds the run."""
        self.client.ready(120)
        try:
            return Store.open(self._path).head(self._run).step + 1
        except NotFoundError:
            return 1

    def save(self, step: int) -> int:
        """Hand `step` over; returns the id of the save. It is durable when it is told so."""
        client, state = self.client, state_at(step)
        client.wait_room(120)
        save = client.begin(step=step, layout=self._encoded, relative=self._relative)
        table = dict(self._table)
        slot, offset, records = client.acquire_slot(120), 0, b""
        for extent, chunk, data in self._changed(state, table):
            if offset + len(data) > client.slot_bytes:
                client.slot(save, slot, records)
                slot, offset, records = client.acquire_slot(120), 0, b""
            client.view(slot)[offset : offset + len(data)] = data
            digest = np.frombuffer(table[extent, chunk], np.uint8)
            records += np.array((extent, chunk, offset, len(data), digest), RECORD).tobytes()
            offset += len(data)
        client.slot(save, slot, records)
        client.finish(
            save, objects={len(_NAMES): plain_at(step)},
            inline={i: state[i] for i, spec in enumerate(self.layout.extents) if spec.inline},
        )  # fmt: skip
        self._table, self._relative = table, save
        return save

    def _changed(
        self, state: list[bytes], table: dict[tuple[int, int], bytes]
    ) -> Iterable[tuple[int, int, bytes]]:
        """What differs from `table`, which is brought up to date."""
        for extent, spec in enumerate(self.layout.extents):
            for chunk in range(spec.chunk_count):
                data = state[extent][chunk * CHUNK : chunk * CHUNK + spec.chunk_length(chunk)]
                digest = xxhash.xxh3_128_digest(data, SEED)
                if table.get((extent, chunk)) != digest:
                    table[extent, chunk] = digest
                    yield extent, chunk, data

    def forget(self) -> None:
        """After a failed save: the next one stages everything."""
        self._table, self._relative = {}, None


class Unsynced(FileIO):
    """A deliberately broken file layer: chosen syncs are left out. A trial must notice."""

    def __init__(self, without: str) -> None:
        self._without = {"files", "directories"} if without == "all" else {without}

    def sync(self, handle: int) -> None:
        if "files" not in self._without:
            super().sync(handle)

    def sync_directory(self, path: str) -> None:
        if "directories" not in self._without:
            super().sync_directory(path)


# checking ------------------------------------------------------------------------------------


def wrong_with_step(store: Store, commit: Commit) -> str:
    """Why `commit` does not restore exactly; "" when it does. Every chunk is read and proved."""
    try:
        snapshot = store.snapshot(commit)
        found = [
            snapshot.inline[extent] if spec.inline else _bytes_of(store, snapshot, extent, spec)
            for extent, spec in enumerate(snapshot.layout.extents)
        ]
        plain = list(snapshot.objects.values())
    except Exception as error:  # whatever it is, the step is lost
        return f"step {commit.step}: {type(error).__name__}: {error}"
    if found != state_at(commit.step) or plain != [plain_at(commit.step)]:
        return f"step {commit.step} holds other bytes than were saved"
    return ""


def _bytes_of(store: Store, snapshot: Any, extent: int, spec: ExtentSpec) -> bytes:
    data = bytearray(spec.nbytes)
    view = memoryview(data)
    requests = [
        (ids.tobytes(), view[c * CHUNK : c * CHUNK + spec.chunk_length(c)])
        for c, ids in enumerate(snapshot.chunks[extent])
    ]
    store.reader(snapshot.packs).read(requests, 1)
    return bytes(data)


def violations(
    path: str, acknowledged: Iterable[int], *, run: str = "main", keep: int | None = KEEP,
    pins: Iterable[str] = (), deep: bool = False,
) -> list[str]:  # fmt: skip
    """Everything that is wrong with the store at `path`, given what was acknowledged.

    Each listed or pinned step must restore exactly; each acknowledged one must be listed unless
    retention may have taken it (`keep` newer steps are listed); no newer number may be missing.
    `deep` verifies all of the store as well.
    """
    acknowledged = sorted(set(acknowledged))
    try:
        store = Store.open(path)
        commits = store.commits(run) if run in store.runs() else None
    except Exception as error:
        return [f"{type(error).__name__}: {error}"] if acknowledged else []
    found = [f"damaged record: {error}" for error in getattr(commits, "damaged", [])]
    listed = [commit.step for commit in commits or ()]
    safe = sorted(listed)[-keep:][0] if keep and len(listed) >= keep else 0
    missing = [step for step in acknowledged if step >= safe and step not in listed]
    if missing:
        found.append(f"acknowledged steps {missing} are gone; there are {sorted(listed)}")
    found += [wrong_with_step(store, commit) for commit in commits or ()]
    for name in pins:
        try:
            found.append(wrong_with_step(store, store.pinned(name)))
        except Exception as error:
            found.append(f"pin {name}: {type(error).__name__}: {error}")
    if deep:
        with contextlib.suppress(Exception):  # the checks above have said so
            found += [str(finding) for finding in verify(store, level="restore").findings]
    return [text for text in found if text]
