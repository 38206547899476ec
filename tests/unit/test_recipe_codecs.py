"""Chunks stored as what follows from others: rounded weights, and predicted Adam states."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adam_trainer as at
import numpy as np
import pytest
from adam_trainer import AdamState
from blake3 import blake3
from coded import encode, replayed_blobs
from deltackpt_store import codecs, prediction
from deltackpt_store.client import WriterClient
from deltackpt_store.coding import adam, cast
from deltackpt_store.coding.adam import Betas, Step
from deltackpt_store.coding.arithmetic import exact
from deltackpt_store.compact import compact
from deltackpt_store.errors import CorruptionError, UnsupportedFormatError
from deltackpt_store.gc import collect
from deltackpt_store.pack import Location
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.retention import retire
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_trainer import CHUNK, SEED, ToyTrainer, read_arrays

Start = Callable[..., ToyTrainer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clients: list[WriterClient] = []

    def begin(state: AdamState, slots: int = 64, **options: Any) -> ToyTrainer:
        client = WriterClient(
            tmp_path / "store", "main", seed=SEED, ring_bytes=slots * CHUNK,
            slot_bytes=4 * CHUNK, mode="thread", options=WriterOptions(**options),
        )  # fmt: skip
        clients.append(client)
        return ToyTrainer(client, state.layout())

    yield begin
    for client in clients:
        client.close(60)


def store_of(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def save_steps(trainer: ToyTrainer, state: AdamState, steps: int) -> dict[int, Any]:
    """Step -> arrays and figures."""
    saved: dict[int, Any] = {}
    for _ in range(steps):
        arrays = state.advance()
        report = trainer.save_now(state.step, arrays, adam=state.hints())
        saved[state.step] = arrays, report.stats
    return saved


def check(store: Store, saved: dict[int, Any]) -> None:
    for step, (arrays, _) in saved.items():
        assert read_arrays(store, store.find("main", step)) == arrays, step


def locations(store: Store) -> dict[bytes, Location]:
    index, found = store.index(), dict[bytes, Location]()
    for name in index.packs():
        entries = index.entries(name)
        assert entries is not None
        found.update(entries.items(name))
    return found


def codecs_of(store: Store, step: int, extent: int) -> list[int]:
    found = locations(store)
    ids = store.snapshot(store.find("main", step)).chunks[extent]
    return [found[row.tobytes()].codec for row in ids]


def depth(found: dict[bytes, Location], chunk_id: bytes) -> int:
    return max((1 + depth(found, ref) for ref in found[chunk_id].refs), default=0)


# rounding ----------------------------------------------------------------------------------------


def test_rounded_weights_take_only_their_records(start: Start, tmp_path: Path) -> None:
    """The 16-bit copy of a mixed-precision state is a seventh of it, and says nothing new."""
    state = AdamState()
    saved = save_steps(start(state), state, 4)
    store = store_of(tmp_path)
    check(store, saved)
    for step in saved:
        assert set(codecs_of(store, step, at.HALF)) == {codecs.CAST}
    stats = saved[2][1]
    chunks = stats["codec.cast.chunks"]
    assert chunks == 2
    assert stats["codec.cast.written_bytes"] <= chunks * (64 + 2 * 32 + 8)
    assert stats["codec.cast.raw_bytes"] == len(saved[2][0][at.HALF])
    assert not list(verify(store).findings)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("elements", [CHUNK // 4, CHUNK // 2, CHUNK // 2 + 1, 3 * CHUNK // 4 + 333])
def test_tails_of_every_kind(start: Start, tmp_path: Path, elements: int, kind: str) -> None:
    state = AdamState(elements, kind=kind)
    saved = save_steps(start(state), state, 2)
    check(store_of(tmp_path), saved)
    assert set(codecs_of(store_of(tmp_path), 2, at.HALF)) == {codecs.CAST}


def test_what_only_looks_like_rounding_is_stored(start: Start, tmp_path: Path) -> None:
    """One element that is not the rounding of its float32 value must come back as it was."""
    state = AdamState()
    trainer = start(state)
    saved: dict[int, Any] = {}
    for _ in range(3):
        arrays = state.advance()
        half = bytearray(arrays[at.HALF])
        half[-1] ^= 1
        arrays[at.HALF] = bytes(half)
        saved[state.step] = arrays, trainer.save_now(state.step, arrays).stats
    check(store_of(tmp_path), saved)
    kinds = codecs_of(store_of(tmp_path), 3, at.HALF)
    assert kinds[0] == codecs.CAST
    assert kinds[-1] != codecs.CAST


def test_a_pair_without_a_name_in_common_is_found(start: Start, tmp_path: Path) -> None:
    """Masters are often a list, in the order of the parameters; moments have the same shapes."""
    import msgspec

    state = AdamState()
    trainer = start(state)
    paths = ("net/w", "optimizer/state/0/kept", *at.NAMES[2:4], "small", "step")
    layout = msgspec.structs.replace(trainer.layout, paths=paths)
    trainer.layout, trainer.encoded = layout, msgspec.msgpack.encode(layout)
    saved = save_steps(trainer, state, 3)
    check(store_of(tmp_path), saved)
    assert set(codecs_of(store_of(tmp_path), 3, at.HALF)) == {codecs.CAST}


def test_one_changed_half_of_what_a_chunk_follows_from(start: Start, tmp_path: Path) -> None:
    """The other float32 chunk is not staged then: it is read."""
    state = AdamState(CHUNK // 2)
    trainer = start(state)
    saved = save_steps(trainer, state, 1)
    state.values[at.WEIGHT][5] += 1
    state.step += 1
    arrays = state.arrays()
    saved[2] = arrays, trainer.save_now(2, arrays).stats
    check(store_of(tmp_path), saved)
    assert saved[2][1]["staged_chunks"] == 2
    assert codecs_of(store_of(tmp_path), 2, at.HALF) == [codecs.CAST]


def test_16_bits_before_32_wait_in_the_ring(start: Start, tmp_path: Path) -> None:
    """The layout has the 16-bit weights first, so they are staged first: they are put aside."""
    state = AdamState(6 * CHUNK // 4)
    trainer = start(state, slots=12)  # what waits does not always find room
    saved = save_steps(trainer, state, 3)
    check(store_of(tmp_path), saved)
    assert verify(store_of(tmp_path)).findings == ()


SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC12345, 0xFFFFFFFF,
     0x7F800001, 0xFF812345, 0x007FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x3F808001,
     0x7F7FFFFF, 0x477FE000, 0x477FF000, 0x33000000, 0x33000001, 0x387FC000], "<u4",
)  # fmt: skip


@pytest.mark.parametrize("kind", cast.KINDS)
def test_rounding_is_that_of_torch(kind: str) -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 1 << 32, 70_000, np.uint32)
    words = np.concatenate([bits, SPECIAL, SPECIAL])
    dtype = getattr(torch, kind)
    expected = torch.from_numpy(words.view(np.float32).copy()).to(dtype).view(torch.int16).numpy()
    results = [
        cast.round_to(cast.KINDS[kind], words, rule) for rule in cast.RULES[cast.KINDS[kind]]
    ]
    assert any((rounded == expected.view(np.uint16)).all() for rounded, _ in results)
    one = torch.tensor([float("nan")]).to(dtype).view(torch.int16).numpy().view(np.uint16)
    nan = np.array([0x7FC00000], "<u4")
    rules = cast.RULES[cast.KINDS[kind]]
    assert any(cast.round_to(cast.KINDS[kind], nan, rule)[0] == one for rule in rules)


# replay ------------------------------------------------------------------------------------------


def test_per_step_saves_take_little_more_than_exp_avg(start: Start, tmp_path: Path) -> None:
    state = AdamState(8 * CHUNK // 4)
    trainer = start(state, shadow=True)
    saved = save_steps(trainer, state, 22)
    store = store_of(tmp_path)
    check(store, saved)
    assert not list(verify(store).findings)
    found = locations(store)
    assert max(depth(found, chunk_id) for chunk_id in found) <= 8
    for step in range(4, 23):
        kinds = {extent: set(codecs_of(store, step, extent)) for extent in (at.WEIGHT, at.SECOND)}
        if kinds[at.WEIGHT] == {codecs.ADAM}:
            assert kinds[at.SECOND] == {codecs.ADAM}
            stats = saved[step][1]
            assert stats["codec.adam.written_bytes"] < 0.1 * stats["codec.adam.raw_bytes"]
            assert set(codecs_of(store, step, at.HALF)) == {codecs.CAST}
    predicted = [step for step in saved if set(codecs_of(store, step, at.WEIGHT)) == {codecs.ADAM}]
    assert len(predicted) >= 22 - 3 - 4
    assert 1 not in predicted
    longest = max(len(place.refs) for place in found.values())
    assert longest == 2 + 1 + prediction.STEPS


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"decoupled": False}])
def test_variants_of_adam(start: Start, tmp_path: Path, options: dict[str, Any]) -> None:
    state = AdamState(4 * CHUNK // 4, **options)
    saved = save_steps(start(state, shadow=True), state, 7)
    store = store_of(tmp_path)
    check(store, saved)
    extents = [at.WEIGHT, at.SECOND, *([at.LARGEST] if state.amsgrad else [])]
    for extent in extents:
        assert set(codecs_of(store, 4, extent)) == {codecs.ADAM}, extent


def test_large_chunks_are_not_predicted() -> None:
    """What a reader may read to decode one chunk is bounded: nothing beyond that may be written."""
    import msgspec

    for chunk_bytes, predicted in ((4 << 20, True), (8 << 20, False)):
        state = AdamState(CHUNK)
        layout = state.layout()
        extents = tuple(
            msgspec.structs.replace(extent, nbytes=chunk_bytes, chunk_bytes=chunk_bytes)
            for extent in layout.extents
        )
        layout = msgspec.structs.replace(layout, extents=extents)
        predictor = prediction.Predictor()
        predictor.budget = 1 << 30
        predictor.begin(layout, state.hints())
        assert predictor.is_first(at.FIRST) == predicted


def test_wrong_numbers_cost_only_bytes(start: Start, tmp_path: Path) -> None:
    """A hint is not trusted: another optimizer, or a wrong learning rate, saves all the same."""
    state = AdamState()
    trainer = start(state, shadow=True)
    saved: dict[int, Any] = {}
    for number in range(12):
        arrays = state.advance()
        hints = state.hints(lr=LR_WRONG[number % len(LR_WRONG)])
        saved[state.step] = arrays, trainer.save_now(state.step, arrays, adam=hints).stats
    check(store_of(tmp_path), saved)
    for _, stats in saved.values():
        assert stats["written_bytes"] <= stats["staged_bytes"] + 72 * stats["staged_chunks"]


LR_WRONG = [float("nan"), 1e30, 0.0, -1.0, float("inf"), 5e-324, 1e-3]


def test_steps_that_are_not_one_apart_are_not_predicted(start: Start, tmp_path: Path) -> None:
    state = AdamState()
    trainer = start(state, shadow=True)
    saved: dict[int, Any] = {}
    for _ in range(5):
        state.advance()
        arrays = state.advance()
        saved[state.step] = arrays, trainer.save_now(state.step, arrays, adam=state.hints()).stats
    check(store_of(tmp_path), saved)
    assert all("codec.adam.chunks" not in stats for _, stats in saved.values())


def test_a_schedule_that_moves_before_the_save(start: Start, tmp_path: Path) -> None:
    """The learning rate in the state is then that of the next step, or, saved before, of this."""
    for late in (True, False):
        state = AdamState()
        trainer = start(state, shadow=True)
        trainer.forget()
        saved: dict[int, Any] = {}
        state.step = 0 if late else 100
        for number in range(8):
            used = state.lr = at.LR * (1 + number)
            arrays = state.advance()
            hints = state.hints(lr=at.LR * (2 + number) if late else used)
            report = trainer.save_now(state.step, arrays, adam=hints)
            saved[state.step] = arrays, report.stats
        check(store_of(tmp_path), saved)
        last = state.step
        kinds = [codecs_of(store_of(tmp_path), step, at.WEIGHT)[0] for step in (last - 1, last)]
        assert codecs.ADAM in kinds
        trainer.client.close(60)


def test_after_a_failed_save_nothing_refers_to_it(start: Start, tmp_path: Path) -> None:
    """Chunks of a failed save may be gone: what comes next must not be coded against them."""
    state = AdamState()
    trainer = start(state, shadow=True)
    saved = save_steps(trainer, state, 5)
    arrays = state.advance()
    save = trainer.begin(state.step, adam=state.hints())
    trainer.stage(save, arrays)
    trainer.client.abort(save)
    with pytest.raises(Exception, match="given up"):
        trainer.client.result(save, 60)
    saved |= save_steps(trainer, state, 6)
    check(store_of(tmp_path), saved)
    assert not list(verify(store_of(tmp_path)).findings)


def test_collection_and_compaction_keep_what_is_needed(start: Start, tmp_path: Path) -> None:
    """A predicted chunk needs many others, of steps that retention has taken off the list."""
    state = AdamState(4 * CHUNK // 4)
    trainer = start(state, shadow=True)
    saved = save_steps(trainer, state, 15)
    trainer.client.close(60)
    kept = {step: saved[step] for step in (2, 9, 10, 15)}
    store = store_of(tmp_path)
    retire(store, [store.find("main", step) for step in saved if step not in kept])
    for work in (collect, compact, collect):
        work(store_of(tmp_path))
        assert store_of(tmp_path).steps("main") == list(kept)
        check(store_of(tmp_path), kept)
        assert not list(verify(store_of(tmp_path)).findings)
    # the newest step now needs nothing but itself
    assert {codecs.ADAM, codecs.DELTA}.isdisjoint(codecs_of(store_of(tmp_path), 15, at.WEIGHT))


def test_a_lost_link_names_every_chunk_that_needs_it(start: Start, tmp_path: Path) -> None:
    state = AdamState(CHUNK // 4)
    trainer = start(state, shadow=True)
    saved = save_steps(trainer, state, 6)
    trainer.client.close(60)
    store = store_of(tmp_path)
    found = locations(store)
    first = store.snapshot(store.find("main", 3)).chunks[at.FIRST][0].tobytes()
    place = found[first]
    path = Path(store.path) / "packs" / place.pack[:2] / f"{place.pack}.pack"
    content = bytearray(path.read_bytes())
    content[place.payload + place.stored // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    check(store_of(tmp_path), {step: saved[step] for step in (1, 2)})
    for step in (3, 4, 5, 6):
        with pytest.raises(CorruptionError):
            read_arrays(store_of(tmp_path), store_of(tmp_path).find("main", step))
    assert {4, 5, 6} <= {
        hit.step for finding in verify(store_of(tmp_path)).findings for hit in finding.hits
    }


def test_damaged_packs_never_give_other_bytes(start: Start, tmp_path: Path) -> None:
    """Whatever byte of whatever pack is wrong: the bytes that were saved, or an error."""
    state = AdamState(CHUNK // 4)
    trainer = start(state, shadow=True)
    saved = save_steps(trainer, state, 5)
    trainer.client.close(60)
    assert {codecs.ADAM, codecs.CAST} <= {p.codec for p in locations(store_of(tmp_path)).values()}
    packs = sorted((tmp_path / "store/packs").rglob("*.pack"))
    noise, refused = random.Random(1), 0
    for trial in range(60):
        path = packs[trial % len(packs)]
        whole = path.read_bytes()
        bad = bytearray(whole)
        bad[noise.randrange(len(bad))] ^= 1 << noise.randrange(8)
        path.chmod(0o644)
        path.write_bytes(bad)
        store = store_of(tmp_path)
        for step, (arrays, _) in saved.items():
            try:
                assert read_arrays(store, store.find("main", step)) == arrays
            except (CorruptionError, UnsupportedFormatError):
                refused += 1
        path.write_bytes(whole)
    assert refused > 20
    check(store_of(tmp_path), saved)


def test_every_pack_that_is_needed_is_in_the_closure(start: Start, tmp_path: Path) -> None:
    """Collection may delete a pack that a step does not name; a copy leaves it out."""
    state = AdamState(6 * CHUNK // 4)
    saved = save_steps(start(state, shadow=True, pack_bytes=64 * 1024), state, 12)
    store = store_of(tmp_path)
    check(store, saved)
    found = locations(store)

    def needed(chunk_id: bytes) -> set[str]:
        place = found[chunk_id]
        return {place.pack}.union(*map(needed, place.refs))

    for step in saved:
        snapshot = store.snapshot(store.find("main", step))
        for ids in snapshot.chunks.values():
            for row in ids:
                assert needed(row.tobytes()) <= set(snapshot.packs)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_any_bits_in_the_state(start: Start, tmp_path: Path, amsgrad: bool) -> None:
    """NaN payloads, infinities, denormals and negative zeros in weights and moments come back."""
    state = AdamState(3 * CHUNK // 4 + 7, amsgrad=amsgrad)
    trainer = start(state, shadow=True)
    noise = np.random.default_rng(3)
    saved: dict[int, Any] = {}
    for step in range(8):
        with np.errstate(all="ignore"):
            state.advance()
        for values in state.values.values():
            words = values.view(np.uint32)
            if step % 3 == 1:
                words[:] = noise.integers(0, 1 << 32, len(words), np.uint32)
            words[step::11] = SPECIAL[(step + np.arange(len(words[step::11]))) % len(SPECIAL)]
        arrays = state.arrays()
        saved[state.step] = arrays, trainer.save_now(state.step, arrays, adam=state.hints()).stats
    check(store_of(tmp_path), saved)
    assert not list(verify(store_of(tmp_path)).findings)


def test_parts_without_gradients(start: Start, tmp_path: Path) -> None:
    """Chunks of which exp_avg stays zero are not staged, but their weights decay."""
    state = AdamState(6 * CHUNK // 4)
    trainer = start(state, shadow=True)
    saved: dict[int, Any] = {}
    for _ in range(7):
        gradient = np.zeros(len(state.values[at.WEIGHT]), np.float32)
        gradient[: CHUNK // 4] = np.random.default_rng(state.step).standard_normal(CHUNK // 4)
        arrays = state.advance(gradient)
        saved[state.step] = arrays, trainer.save_now(state.step, arrays, adam=state.hints()).stats
    check(store_of(tmp_path), saved)


def test_a_later_session_reads_and_goes_on(start: Start, tmp_path: Path) -> None:
    state = AdamState()
    first = start(state, shadow=True)
    saved = save_steps(first, state, 6)
    first.client.close(60)
    second = start(state, shadow=True)
    number = store_of(tmp_path).head("main").number
    arrays = state.advance()
    save = second.begin(state.step, relative_commit=("main", number), relative=None,
                        adam=state.hints())  # fmt: skip
    table = second.stage(save, arrays)
    second.finish(save, state.step)
    saved[state.step] = arrays, second.client.result(save, 60).stats
    second.table, second.relative = table, save
    saved |= save_steps(second, state, 4)
    check(store_of(tmp_path), saved)
    assert codecs_of(store_of(tmp_path), state.step, at.WEIGHT)[0] == codecs.ADAM


def test_denormals_are_kept_when_training_flushes_them() -> None:
    """The training thread restores, and torch can make it flush denormals: bits must not change."""
    import torch

    tiny = [np.full(64, value, np.float32) for value in (1e-39, 2e-39, 3e-42, 1e-40)]
    results: list[bytes] = []
    for flush in (False, True):
        if flush and not torch.set_flush_denormal(True):
            return
        try:
            second, weight = tiny[2].copy(), tiny[3].copy()
            with exact():
                adam.advance(Betas(0.9, 0.999, 0.0), Step(1.0, 1e-3, 0.5), tiny[0], tiny[1],
                             second, weight=weight)  # fmt: skip
        finally:
            torch.set_flush_denormal(False)
        results.append(second.tobytes() + weight.tobytes())
    assert results[0] == results[1]


# any bytes, and damage ---------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 9000), steps=st.integers(1, 9), seed=st.integers(0, 1 << 20))
def test_any_bits_are_replayed_alike(count: int, steps: int, seed: int) -> None:
    """NaN payloads, infinities, denormals and nonsense: twice the same prediction, bit for bit."""
    blobs = replayed_blobs(count, steps, seed)
    raw = {blake3(blob.raw).digest(): blob.raw for blob in blobs}
    for blob in blobs[-4:]:
        made = encode(blob)
        out = bytearray(len(blob.raw))
        payload = memoryview(b"".join(map(bytes, made.payload)))
        refs = [memoryview(raw[ref]) for ref in made.refs]
        codecs.decode(codecs.ADAM, made.params, payload, memoryview(out), refs)
        assert bytes(out) == blob.raw


@pytest.mark.parametrize("role", [0, 1, 2, 3])
def test_damaged_replays_end_in_an_error_or_in_other_bytes(role: int) -> None:
    blobs = replayed_blobs(700, 3, 5)
    raw = {blake3(blob.raw).digest(): blob.raw for blob in blobs}
    made = encode(blobs[-4 + role])
    params, payload = made.params, b"".join(map(bytes, made.payload))
    references = [raw[ref] for ref in made.refs]
    noise = random.Random(role)
    for trial in range(400):
        bad = [bytearray(params), bytearray(payload)]
        one = bad[trial % 2]
        kind, where = trial // 2 % 3, noise.randrange(len(one))
        if kind == 0:
            one[where] ^= 1 << noise.randrange(8)
        elif kind == 1:
            del one[where:]
        else:
            one[where : where + 16] = noise.randbytes(16)
        out = bytearray(2800)
        with contextlib.suppress(CorruptionError):
            codecs.decode(codecs.ADAM, bytes(bad[0][:255]), memoryview(bad[1]), memoryview(out),
                          [memoryview(r) for r in references])  # fmt: skip
    for refs in ([], references[:-3], [references[0][:-4], *references[1:]]):
        with pytest.raises(CorruptionError):
            codecs.decode(codecs.ADAM, params, memoryview(payload), memoryview(bytearray(2800)),
                          [memoryview(r) for r in refs])  # fmt: skip


GOOD = cast.cast_params(1, cast.RULES[1][0], 8)


@pytest.mark.parametrize(
    ("params", "payload", "size", "references"),
    [
        (b"", b"", 200, [bytes(800)]),
        (b"\x09" + GOOD[1:], b"", 200, [bytes(800)]),
        (GOOD[:-1], b"", 200, [bytes(800)]),
        (GOOD + b"\x00", b"", 200, [bytes(800)]),
        (GOOD, b"x", 200, [bytes(800)]),
        (GOOD, b"", 201, [bytes(800)]),
        (GOOD, b"", 200, []),
        (GOOD, b"", 200, [bytes(403)]),
        (GOOD[:-1] + b"\xff\xff\xff\xff\x0f", b"", 200, [bytes(800)]),
    ],
)
def test_wrong_roundings_are_damage(
    params: bytes, payload: bytes, size: int, references: list[bytes]
) -> None:
    with pytest.raises(CorruptionError):
        codecs.decode(codecs.CAST, params, memoryview(payload), memoryview(bytearray(size)),
                      [memoryview(r) for r in references])  # fmt: skip


@pytest.mark.parametrize("cuts", [(10, 402), (12, 400), (40, 840), (44, 844), (0, 1200)])
def test_a_range_over_several_references(cuts: tuple[int, int]) -> None:
    values = np.arange(300, dtype="<f4")
    data = values.tobytes()
    parts = [memoryview(data[a:b]) for a, b in zip((0, *cuts), (*cuts, 1200), strict=True)]
    out = bytearray(400)
    codecs.decode(codecs.CAST, cast.cast_params(2, cast.RULES[2][0], 40), memoryview(b""),
                  memoryview(out), parts)  # fmt: skip
    assert bytes(out) == values[10:210].astype("<f2").tobytes()
    assert struct.unpack("<H", out[:2]) == (0x4900,)
