"""Saves of a dense training state: coded against earlier steps, and read back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltackpt_store import codecs
from deltackpt_store.client import WriterClient
from deltackpt_store.errors import CorruptionError
from deltackpt_store.pack import Location, pack_path
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.store import Store
from dense_trainer import DenseState
from toy_trainer import CHUNK, SEED, ToyTrainer, read_arrays

Start = Callable[..., ToyTrainer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clients: list[WriterClient] = []

    def begin(state: DenseState, **options: Any) -> ToyTrainer:
        client = WriterClient(
            tmp_path / "store", "main", seed=SEED, ring_bytes=64 * CHUNK, slot_bytes=4 * CHUNK,
            mode="thread", options=WriterOptions(**options),
        )  # fmt: skip
        clients.append(client)
        return ToyTrainer(client, state.layout())

    yield begin
    for client in clients:
        client.close(60)


def store_of(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def save_steps(trainer: ToyTrainer, state: DenseState, steps: int) -> dict[int, list[bytes]]:
    saved: dict[int, list[bytes]] = {}
    for _ in range(steps):
        arrays = state.advance()
        saved[state.step] = arrays
        trainer.save_now(state.step, arrays)
    return saved


def check(store: Store, saved: dict[int, list[bytes]]) -> None:
    for step, arrays in saved.items():
        assert read_arrays(store, store.find("main", step)) == arrays, step


def locations(store: Store) -> dict[bytes, Location]:
    index = store.index()
    found: dict[bytes, Location] = {}
    for name in index.packs():
        entries = index.entries(name)
        assert entries is not None
        found.update(entries.items(name))
    return found


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_every_step_comes_back_and_depth_is_one(
    start: Start, tmp_path: Path, mode: str, shadow: bool
) -> None:
    """One wrong bit in a difference would make every step that is coded against it unreadable."""
    state = DenseState()
    saved = save_steps(start(state, codec=mode, shadow=shadow), state, 25)
    store = store_of(tmp_path)
    check(store, saved)
    found = locations(store)
    coded = [place for place in found.values() if place.refs]
    assert bool(coded) == (mode != "none")
    for place in coded:
        assert len(place.refs) == 1
        assert found[place.refs[0]].refs == ()  # the base of a star is plain
    for step in saved:
        snapshot = store.snapshot(store.find("main", step))
        for ids in snapshot.chunks.values():
            for row in ids:
                place = found[row.tobytes()]
                needed = {place.pack, *(found[ref].pack for ref in place.refs)}
                assert needed <= set(snapshot.packs), "a pack that is needed is not in the closure"


def test_dense_steps_take_far_less_than_their_bytes(start: Start, tmp_path: Path) -> None:
    state = DenseState(8 * CHUNK)
    trainer = start(state, codec="small")
    sizes: list[tuple[float, float]] = []
    for _ in range(12):
        report = trainer.save_now(state.step + 1, state.advance())
        sizes.append((report.stats["written_bytes"], report.stats["staged_bytes"]))
    own = sizes[0][0] / sizes[0][1]
    later = sum(written for written, _ in sizes[1:]) / sum(staged for _, staged in sizes[1:])
    assert 0.7 < own < 0.95
    assert later < 0.85 * own
    stats = store_of(tmp_path).find("main", 2).stats
    assert stats["codec.delta.raw_bytes"] > stats["codec.delta.written_bytes"] > 0
    assert stats["tensors.delta"] + stats["tensors.sparse"] >= 2
    assert stats["tensors.raw"] == 1  # the noise
    assert stats["hurried_chunks"] == 0


def test_noise_costs_no_more_than_its_records(start: Start) -> None:
    """Encoding that does not pay must not make a save larger than its bytes."""
    state = DenseState()
    trainer = start(state)
    for _ in range(6):
        report = trainer.save_now(state.step + 1, state.advance())
        noise = report.stats["codec.raw.written_bytes"], report.stats["codec.raw.raw_bytes"]
        assert noise[0] <= noise[1] + 64 * report.stats["codec.raw.chunks"]


def test_a_later_session_goes_on_from_the_same_bases(start: Start, tmp_path: Path) -> None:
    """A restart must not make the next save a full one: training restarts often."""
    state = DenseState()
    first = start(state)
    saved = save_steps(first, state, 3)
    first.client.close(60)
    second = start(state)
    commit = store_of(tmp_path).head("main")
    save = second.begin(state.step + 1, relative_commit=("main", commit.number), relative=None)
    arrays = state.advance()
    second.stage(save, arrays)
    second.finish(save, state.step)
    report = second.client.result(save, 60)
    assert report.stats["codec.delta.chunks"] > 3
    check(store_of(tmp_path), {**saved, state.step: arrays})


def test_a_base_is_stored_again_when_the_differences_have_grown(
    start: Start, tmp_path: Path
) -> None:
    """Differences to a base that is far away cost as much as no base at all."""
    state = DenseState(8 * CHUNK)
    trainer = start(state)
    saved = save_steps(trainer, state, 60)
    found = locations(store_of(tmp_path))
    snapshots = {
        step: store_of(tmp_path).snapshot(store_of(tmp_path).find("main", step)) for step in saved
    }
    own = [s for s, snap in snapshots.items() if not found[snap.chunks[0][0].tobytes()].refs]
    assert own[0] == 1
    assert 2 <= len(own) <= 20
    check(store_of(tmp_path), {step: saved[step] for step in (1, 30, 60)})


def test_a_damaged_base_names_every_chunk_that_needs_it(start: Start, tmp_path: Path) -> None:
    state = DenseState()
    trainer = start(state, codec="small")
    save_steps(trainer, state, 2)
    trainer.client.close(60)
    store = store_of(tmp_path)
    found = locations(store)
    ids = store.snapshot(store.find("main", 2)).chunks[0]
    base = found[found[ids[1].tobytes()].refs[0]]
    assert base.codec == codecs.PLANES
    path = Path(pack_path(store.path, base.pack))
    content = bytearray(path.read_bytes())
    content[base.payload + base.stored // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(CorruptionError) as failure:
        read_arrays(store_of(tmp_path), store.find("main", 2))
    assert failure.value.context["ids"] == (ids[1].tobytes(),)


def test_a_base_that_cannot_be_read_is_not_used(start: Start, tmp_path: Path) -> None:
    """A save must not depend on a chunk that was damaged on disk meanwhile."""
    state = DenseState()
    trainer = start(state)
    save_steps(trainer, state, 1)
    for path in (tmp_path / "store/packs").rglob("*.pack"):
        content = bytearray(path.read_bytes())
        for place in locations(store_of(tmp_path)).values():
            if place.codec == codecs.PLANES:
                content[place.payload + 3] ^= 0x40
        path.chmod(0o644)
        path.write_bytes(content)
    arrays = state.advance()
    trainer.forget()
    trainer.save_now(2, arrays)
    check(store_of(tmp_path), {2: arrays})
