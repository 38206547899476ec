"""The choice of encodings: what is learned, when it is tried again, and what haste gives up."""

from __future__ import annotations

import random

import numpy as np
import pytest
from deltackpt_store import coding_policy
from deltackpt_store.codecs import DELTA, PLANES, RAW, SORTED, SPARSE, Encoded
from deltackpt_store.coding_policy import CodingPolicy, Outcome, Plan, encode
from deltackpt_store.errors import InvalidInputError

SIZE = 64 * 1024
RANDOM = np.random.default_rng(0)
WEIGHTS = (RANDOM.standard_normal(SIZE // 4) * 0.05).astype(np.float32)


@pytest.fixture(autouse=True)
def auto_takes_what_saves_little(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What is learned is tested with weights of float32, which ``auto`` by itself leaves raw."""
    if "own_worth" not in request.keywords:
        monkeypatch.setitem(coding_policy._WORTH, "auto", coding_policy._WORTH["small"])


@pytest.mark.own_worth
def test_auto_wants_a_fifth_for_what_decoding_costs() -> None:
    """A full save of float32, a sixth smaller, would restore at half the speed."""
    base = WEIGHTS.tobytes()
    halves = (WEIGHTS.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    assert many(CodingPolicy("auto"), 9, base, None) == [RAW] * 9
    assert many(CodingPolicy("small"), 9, base, None) == [PLANES] * 9
    assert many(CodingPolicy("auto"), 9, halves, None, dtype="bfloat16") == [PLANES] * 9
    policy = CodingPolicy("auto")
    many(policy, 1, base, None)
    policy.next_save()
    assert many(policy, 9, moved(2e-5), base)[-1] == DELTA


@pytest.mark.own_worth
def test_auto_takes_a_tenth_of_what_is_saved_again() -> None:
    """Saves of every step want to be small; what they are coded against stays quick to read."""
    policy, base = CodingPolicy("auto"), WEIGHTS.tobytes()
    assert many(policy, 9, base, None) == [RAW] * 9
    policy.next_save()
    assert many(policy, 9, moved(0.08), base)[-1] == PLANES  # a sixth
    noise = np.random.default_rng(2).integers(0, 256, SIZE, np.uint8)
    noise[::16] = 0  # a twentieth
    assert many(policy, 9, noise.tobytes(), None, stream="n") == [RAW] * 9
    policy.next_save()
    assert many(policy, 9, noise.tobytes(), None, stream="n") == [RAW] * 9
    policy._stream("a").rebase = True
    assert many(policy, 3, base, None) == [RAW] * 3


def test_what_is_tried_beside_a_reference() -> None:
    """Saves and compaction try the same."""
    assert coding_policy.tries("small", 4, reference=False) == (PLANES,)
    assert coding_policy.tries("auto", 4, reference=True) == (PLANES, DELTA, SPARSE)
    assert coding_policy.tries("auto", 8, reference=True) == (PLANES, DELTA)
    assert coding_policy.tries("small", 2, reference=True) == (PLANES, DELTA, SPARSE, SORTED)
    assert coding_policy.tries("small", 8, reference=True) == (PLANES, DELTA, SORTED)


def moved(by: float, seed: int = 1) -> bytes:
    step = np.random.default_rng(seed).standard_normal(SIZE // 4).astype(np.float32)
    return (WEIGHTS + np.float32(by) * step).tobytes()


def one(
    policy: CodingPolicy, raw: bytes, base: bytes | None, stream: str = "a", dtype: str = "float32"
) -> tuple[Plan, Outcome]:
    use = base is not None and policy.wants_reference(stream)
    plan = policy.plan(stream, len(raw), dtype, reference=use)
    reference = memoryview(base) if base is not None and use else None
    outcome = encode(plan, memoryview(raw), reference, bytes(32))
    policy.learn(stream, dtype, plan, outcome, len(raw), outcome.best.stored)
    return plan, outcome


def many(
    policy: CodingPolicy, count: int, raw: bytes, base: bytes | None, **kwargs: str
) -> list[int]:
    return [one(policy, raw, base, **kwargs)[1].best.codec for _ in range(count)]


def test_the_best_candidate_is_used_between_probes() -> None:
    policy = CodingPolicy()
    base = WEIGHTS.tobytes()
    assert many(policy, 3, base, None) == [PLANES] * 3
    policy.next_save()
    plans = [one(policy, moved(2e-5), base) for _ in range(200)]
    assert all(outcome.best.codec == DELTA for _, outcome in plans)
    probes = [i for i, (plan, _) in enumerate(plans) if plan.probe]
    assert probes[0] == 0
    assert 4 <= len(probes) <= 10  # rarer and rarer, and never given up
    assert all(len(plan.tries) == 1 for plan, _ in plans if not plan.probe)


def test_no_reference_wins_when_differences_are_as_large(  # exp_avg ten steps on
) -> None:
    policy = CodingPolicy()
    base, far = WEIGHTS.tobytes(), moved(0.08)
    many(policy, 2, base, None)
    policy.next_save()
    assert set(many(policy, 30, far, base)) == {PLANES}
    assert not policy.wants_reference("a")  # and references are not even read


def test_few_changes_are_stored_as_positions() -> None:
    policy = CodingPolicy()
    now = bytearray(WEIGHTS.tobytes())
    for place in random.Random(1).sample(range(SIZE // 2), 2500):
        now[2 * place] ^= 1
    many(policy, 1, WEIGHTS.tobytes(), None, dtype="bfloat16")
    policy.next_save()
    found = many(policy, 20, bytes(now), WEIGHTS.tobytes(), dtype="bfloat16")
    assert found == [SPARSE] * 20


def test_a_chunk_that_changed_more_than_expected_is_still_small() -> None:
    """What was learned of other chunks must not store this one raw."""
    policy = CodingPolicy()
    base = WEIGHTS.tobytes()
    few = bytearray(base)
    few[::1024] = bytes(b ^ 1 for b in few[::1024])
    policy.next_save()
    assert many(policy, 10, bytes(few), base) == [SPARSE] * 10
    assert one(policy, moved(2e-5), base)[1].best.codec == DELTA


def test_noise_is_hardly_ever_tried_again() -> None:
    """Encoding that saves nothing takes time from training."""
    policy = CodingPolicy()
    tries = 0
    for i in range(500):
        plan, outcome = one(policy, np.random.default_rng(i).bytes(SIZE), None)
        assert outcome.best.codec == RAW
        tries += len(plan.tries)
    assert tries < 20


def test_noise_that_becomes_compressible_is_noticed() -> None:
    policy = CodingPolicy()
    for i in range(200):
        one(policy, np.random.default_rng(i).bytes(SIZE), None)
    found = many(policy, 70, WEIGHTS.tobytes(), None)
    assert found[-1] == PLANES


def test_a_base_is_due_when_saves_cost_more_than_their_average() -> None:
    policy = CodingPolicy()
    base = WEIGHTS.tobytes()
    codecs_of_saves: list[int] = []
    many(policy, 8, base, None)
    for save in range(1, 40):
        policy.next_save()
        now = moved(2e-5 * save, seed=save)
        found = many(policy, 8, now, base)
        codecs_of_saves.append(found[-1])
        if found[-1] == PLANES:
            break
    assert codecs_of_saves[:3] == [DELTA] * 3
    assert codecs_of_saves[-1] == PLANES  # although a difference is still smaller than the chunk
    policy.next_save()
    assert set(many(policy, 8, now, now[4:] + now[:4])) <= {DELTA, PLANES, SPARSE}


def test_tensors_of_a_kind_are_not_all_probed() -> None:
    """A state of thousands of small tensors would otherwise be encoded three times over."""
    policy = CodingPolicy()
    base, now = WEIGHTS.tobytes(), moved(2e-5)
    for i in range(50):
        one(policy, base, None, f"optimizer/state/{i}/exp_avg")
    policy.next_save()
    plans = [one(policy, now, base, f"optimizer/state/{i}/exp_avg")[0] for i in range(50)]
    assert sum(plan.probe for plan in plans) <= 6
    assert plans[-1].tries == (DELTA,)


@pytest.mark.parametrize("mode", ["none", "fast", "small", "auto"])
def test_modes(mode: str) -> None:
    policy = CodingPolicy(mode)
    policy.next_save()
    plans = [one(policy, moved(2e-5), WEIGHTS.tobytes())[0] for _ in range(12)]
    assert {plan.entropy for plan in plans if plan.tries} <= {"lz4" if mode == "fast" else "zstd"}
    assert all(plan.probe for plan in plans) == (mode == "small")
    assert any(plan.tries for plan in plans) == (mode != "none")
    with pytest.raises(InvalidInputError, match="codec"):
        CodingPolicy("best")


def test_haste_gives_up_zstd_and_then_encoding() -> None:
    policy = CodingPolicy()
    base = WEIGHTS.tobytes()
    many(policy, 20, moved(2e-5), base)
    policy.hurry = 1
    plan, outcome = one(policy, moved(2e-5), base)
    assert (plan.entropy, outcome.best.codec, plan.probe) == ("lz4", DELTA, False)
    policy.hurry = 2
    assert one(policy, moved(2e-5), base)[1].best == Encoded(RAW, b"", (), [moved(2e-5)])
    policy.hurry = 0
    assert one(policy, moved(2e-5), base)[0].entropy == "zstd"


def test_small_chunks_and_chunks_without_a_name() -> None:
    policy = CodingPolicy()
    assert policy.plan("a", 4096, "float32", reference=False).tries == ()
    assert policy.plan("", SIZE, "float32", reference=True).tries == (PLANES, DELTA, SPARSE)
    assert policy.plan("", SIZE, "float32", reference=True).probe


def test_small_sorts_by_exponent_as_well() -> None:
    base, now = moved(0), moved(2e-5)
    for mode, found in (("auto", DELTA), ("small", SORTED)):
        policy = CodingPolicy(mode)
        assert many(policy, 10, now, base)[-1] == found
