"""Prevents: a step coded against a chunk that a power cut took away.

Dense saves, coded against the first step, on a simulated disk with small packs, so that bases and
differences lie in different ones; after every crash state each step that was acknowledged, and
each commit that shows, must read back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from deltackpt_store.codecs import DELTA
from deltackpt_store.errors import NotFoundError
from deltackpt_store.fileio import make_directories
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, Snapshot, TensorView
from deltackpt_store.manifest_io import to_base
from deltackpt_store.recipes import Near
from deltackpt_store.store import Store
from deltackpt_store.store_writer import Chunk, Put, StoreWriter
from deltackpt_store.testing import CrashState, SimulatedDisk, check_crash_states

PATH = "/disk/store"
Figure = Callable[[str, int], None]
CHUNK = 8192
CHUNKS = 3
LAYOUT = Layout(
    structure=msgspec.msgpack.encode(["d", [["w", 0]]]),
    paths=("w",),
    tensors=(TensorView(0, 0, "uint8", (CHUNKS * CHUNK,), (1,), 0),),
    extents=(ExtentSpec(CHUNKS * CHUNK, CHUNK, "float32"),),
    objects=(),
)


def state_at(step: int) -> np.ndarray:
    """Weights that take a small random step each step."""
    weights = np.random.default_rng(0).standard_normal(CHUNKS * CHUNK // 4) * 0.05
    for s in range(1, step + 1):
        weights += np.random.default_rng(s).standard_normal(len(weights)) * 1e-5
    return weights.astype(np.float32).view(np.uint8).reshape(CHUNKS, CHUNK)


def save(
    store: Store, writer: StoreWriter, step: int, bases: list[bytes], parent: Commit | None
) -> Commit:
    """Save one step; the first fills `bases`, whose chunks the later ones are coded against."""
    chunks = [
        Chunk(chunk.tobytes(), "float32", "w", bases[i] if bases else None)
        for i, chunk in enumerate(state_at(step))
    ]
    puts = writer.put_many(chunks)
    writer.flush()
    packs = {put.pack for put in puts}
    if bases:
        assert all(put.codec == DELTA and put.refs == (bases[i],) for i, put in enumerate(puts))
        packs.update(store.snapshot(store.find("main", 0)).packs)
    else:
        bases += [put.id for put in puts]
    ids = np.stack([np.frombuffer(put.id, np.uint8) for put in puts])
    manifest = to_base(Snapshot(LAYOUT, {}, {}, {0: ids}, packs=tuple(sorted(packs))), packs)
    digest = writer.write_manifest(manifest)
    writer.next_save()
    return writer.commit(
        run="main", step=step, parent=parent, manifest=digest, base=None, root=manifest.root,
        packs=packs,
    )  # fmt: skip


def read_step(store: Store, commit: Commit) -> np.ndarray:
    snapshot = store.snapshot(commit)
    out = np.zeros((CHUNKS, CHUNK), np.uint8)
    requests = [(snapshot.chunks[0][i].tobytes(), memoryview(out[i])) for i in range(CHUNKS)]
    store.reader(snapshot.packs).read(requests, threads=1)
    return out


def recover(crash: CrashState, expected: Callable[[int], np.ndarray] = state_at) -> frozenset[int]:
    """The steps that are there, each proven bit for bit."""
    try:
        after = Store.open(PATH, io=crash.disk())
    except NotFoundError:
        return frozenset()
    commits = after.commits("main") if "main" in after.runs() else []
    for commit in commits:
        assert np.array_equal(read_step(after, commit), expected(commit.step)), crash
    return frozenset(commit.step for commit in commits)


def accept(steps: frozenset[int], crash: CrashState) -> None:
    assert {step for step in crash.marks if isinstance(step, int)} <= steps, crash


# case 83
def test_references_are_durable_before_the_commit(figure: Figure) -> None:
    disk = SimulatedDisk()
    make_directories(disk, "/disk")
    disk.sync_directory("/")
    store = Store.create(PATH, io=disk)
    writer = StoreWriter(store, pack_bytes=CHUNK)
    parent, bases = None, list[bytes]()
    for step in range(4):
        parent = save(store, writer, step, bases, parent)
        disk.mark(step)
    writer.close()
    found = check_crash_states(disk, recover, accept, exhaustive=128, random_states=8)
    figure("crash states of delta-coded saves", found.states)
    figure("crash states that differ", found.distinct)
    assert found.states > 3000
    assert found.distinct > 300


def linked_at(step: int) -> np.ndarray:
    """As `state_at`, but the last chunk is nearly the first one."""
    state = state_at(step).copy()
    state[-1] = (state[0].view(np.float32) * np.float32(1.000001)).view(np.uint8)
    return state


def save_linked(store: Store, writer: StoreWriter, step: int, parent: Commit | None) -> Commit:
    """Code each chunk against the one of the step before, and the last against the first, which
    has just been put and is not durable yet."""
    state = linked_at(step)
    before = None if parent is None else store.snapshot(parent)
    puts: list[Put] = []
    for i, chunk in enumerate(state):
        recipes: tuple[Near, ...] = ()
        if i == CHUNKS - 1:
            recipes = (Near(DELTA, (puts[0].id,), memoryview(state[0].tobytes()), 8),)
        elif before is not None:
            old = memoryview(linked_at(step - 1)[i].tobytes())
            recipes = (Near(DELTA, (before.chunks[0][i].tobytes(),), old, 8),)
        puts += writer.put_many([Chunk(chunk.tobytes(), "float32", recipes=recipes)])
        assert bool(puts[-1].refs) == bool(recipes)
    packs = {pack for put in puts for pack in put.packs}
    writer.flush()
    ids = np.stack([np.frombuffer(put.id, np.uint8) for put in puts])
    manifest = to_base(Snapshot(LAYOUT, {}, {}, {0: ids}, packs=tuple(sorted(packs))), packs)
    digest = writer.write_manifest(manifest)
    writer.next_save()
    return writer.commit(
        run="main", step=step, parent=parent, manifest=digest, base=None, root=manifest.root,
        packs=packs,
    )  # fmt: skip


def recover_linked(crash: CrashState) -> frozenset[int]:
    return recover(crash, linked_at)


# case 83
def test_chains_are_durable_before_the_commit(figure: Figure) -> None:
    """References of references, and ones within the same save: all there, or no step."""
    disk = SimulatedDisk()
    make_directories(disk, "/disk")
    disk.sync_directory("/")
    store = Store.create(PATH, io=disk)
    writer = StoreWriter(store, pack_bytes=CHUNK // 2)
    parent = None
    for step in range(3):
        parent = save_linked(store, writer, step, parent)
        disk.mark(step)
    writer.close()
    found = check_crash_states(disk, recover_linked, accept, exhaustive=64, random_states=4)
    figure("crash states of chained saves", found.states)
    assert found.states > 1000
    assert found.distinct > 200
