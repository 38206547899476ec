"""Prevents damage anywhere in a store from reaching live objects, or from hiding sound steps."""

from __future__ import annotations

import copy
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import same
from deltackpt_store.errors import DeltackptError
from deltackpt_store.store import Store
from restoring import Keeper

from deltackpt.load import load
from deltackpt.restore import restore_into

STEPS = (1, 2, 3)


def numbered(step: int) -> dict[str, Any]:
    """Of five tensors, one is the same in all steps, one compressible, one tiny."""
    generator = torch.Generator().manual_seed(step)
    return {
        "same": torch.arange(3000.0),
        "noise": torch.randn(3000, generator=generator),
        "easy": torch.full((6000,), float(step)),
        "tiny": torch.tensor([float(step)]),
        "meta": {"n": step, "l": [step, {"t": torch.full((200,), step)}]},
    }


def blank() -> dict[str, Any]:
    state = numbered(0)
    for key in ("same", "noise", "easy", "tiny"):
        state[key].fill_(-1)
    return state


def which(state: dict[str, Any]) -> int | None:
    """The step whose state this is exactly, 0 for the blank one, None for a mixture."""
    for step in (*STEPS, 0):
        expected = numbered(step) if step else blank()
        if state["meta"]["n"] != expected["meta"]["n"]:
            continue
        pairs = [(state[k], expected[k]) for k in ("same", "noise", "easy", "tiny")]
        pairs.append((state["meta"]["l"][1]["t"], expected["meta"]["l"][1]["t"]))
        if state["meta"]["l"][0] == expected["meta"]["l"][0] and all(same(a, b) for a, b in pairs):
            return step
    return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keeper = Keeper(tmp_path_factory.mktemp("sound") / "store")
    for step in STEPS:
        keeper.save(numbered(step), step)
    return keeper.path


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def check(path: Path) -> list[int]:
    """Whatever is wrong: a restore is exact or refuses, and leaves the target alone if it does.

    Returns the steps that can be restored by name.
    """
    good: list[int] = []
    state = blank()
    try:
        done = restore_into(path, state)
    except DeltackptError:
        assert which(state) == 0
    else:
        assert which(state) == (done.step if done else 0)
    for step in STEPS:
        state = blank()
        try:
            restore_into(path, state, step=step)
        except DeltackptError:
            assert which(state) == 0
        else:
            assert which(state) == step
            good.append(step)
        try:
            loaded = load(path, step=step)
        except DeltackptError:
            assert step not in good
        else:
            assert which(loaded) == step
    assert not good or is_found(path), f"steps {good} are sound, and none was taken"
    return good


def is_found(path: Path) -> bool:
    """Whether a sound step is found without naming it, or a newer format stands in the way."""
    try:
        return restore_into(path, blank()) is not None
    except DeltackptError as error:
        return error.kind == "unsupported-format"


def needed_by(path: Path) -> dict[str, set[int]]:
    """File (relative to the store) -> the steps that cannot be without it."""
    store = Store.open(path)
    needs: dict[str, set[int]] = {}
    for commit in store.lineage("main"):
        names = [f"runs/main/{commit.number:020d}", f"manifests/{commit.manifest.hex()}"]
        if commit.base is not None:
            names.append(f"manifests/{commit.base.hex()}")
        names += [f"packs/{pack[:2]}/{pack}.pack" for pack in store.snapshot(commit).packs]
        for name in names:
            needs.setdefault(name, set()).add(commit.step)
    return needs


def test_all_is_well_without_damage(store: Path) -> None:
    assert check(store) == list(STEPS)


def test_one_bit_in_every_file_in_turn(store: Path) -> None:
    # case 112: each file, a bit of each of a few places spread over it
    rng = random.Random(1)
    needs = needed_by(store)
    detected: set[str] = set()
    for path in files(store):
        data, name = path.read_bytes(), str(path.relative_to(store))
        others = set(STEPS) - needs.get(name, set())
        offsets = {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(6))}
        for offset in sorted(offsets):
            changed = bytearray(data)
            changed[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(changed))
            good = set(check(store))
            if name != "FORMAT":
                assert others <= good, f"{name} is not needed by {others - good}"
            if good != set(STEPS):
                detected.add(name)
        path.write_bytes(data)
    assert {name for name in needs if not name.startswith("packs/")} <= detected
    assert any(name.startswith("packs/") for name in detected)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda data: b"", id="emptied"),
        pytest.param(lambda data: data[: len(data) // 2], id="cut"),
        pytest.param(lambda data: data[:-1], id="one-byte-short"),
        pytest.param(lambda data: data + b"\0", id="longer"),
        pytest.param(lambda data: bytes(len(data)), id="zeros"),
        pytest.param(lambda data: data[:512] + bytes(512) + data[1024:], id="zeroed-sector"),
        pytest.param(lambda data: random.Random(2).randbytes(len(data)), id="noise"),
        pytest.param(None, id="missing"),
    ],
)
def test_harm_to_every_file_in_turn(store: Path, harm: Callable[[bytes], bytes] | None) -> None:
    # case 87, case 112
    needs = needed_by(store)
    for path in files(store):
        data, name = path.read_bytes(), str(path.relative_to(store))
        if harm is None:
            path.unlink()
        else:
            path.write_bytes(harm(data))
        good = set(check(store))
        if name != "FORMAT":
            assert set(STEPS) - needs.get(name, set()) <= good
        path.write_bytes(data)


def test_files_of_a_kind_exchanged(store: Path) -> None:
    # case 105, case 112
    for pattern in ("manifests/*", "runs/*/*", "packs/*/*"):
        paths = sorted(store.glob(pattern))
        for a, b in itertools.pairwise(paths):
            left, right = a.read_bytes(), b.read_bytes()
            a.write_bytes(right)
            b.write_bytes(left)
            check(store)
            a.write_bytes(left)
            b.write_bytes(right)


def test_a_fallback_takes_the_newest_sound_step(store: Path) -> None:
    # I6: damage what only steps 2 and 3 use, in every combination
    opened = Store.open(store)
    chunks = {
        step: {bytes(row) for ids in opened.snapshot(opened.find("main", step)).chunks.values()
               for row in ids}
        for step in STEPS
    }  # fmt: skip
    owned = {step: chunks[step] - set().union(*(chunks[s] for s in STEPS if s != step))
             for step in STEPS}  # fmt: skip
    places = {
        step: [(path, path.read_bytes().find(next(iter(ids)))) for path in store.glob("packs/*/*")]
        for step, ids in owned.items()
    }
    for damaged in ({3}, {2}, {2, 3}, {1, 3}):
        before = {path: path.read_bytes() for path in store.glob("packs/*/*")}
        for step in damaged:
            for path, at in places[step]:
                if at >= 0:
                    data = bytearray(path.read_bytes())
                    data[at + 200] ^= 1  # in the payload behind the record's header
                    path.write_bytes(bytes(data))
        good = [step for step in STEPS if step not in damaged]
        assert check(store) == good
        state = blank()
        done = restore_into(store, state)
        assert done is not None
        assert done.step == max(good)
        assert {s.step for s in done.skipped} == {s for s in damaged if s > max(good)}
        for path, data in before.items():
            path.write_bytes(data)


def test_streamed_restores_are_exact_or_say_they_are_incomplete(store: Path) -> None:
    # case 143, case 112
    rng = random.Random(3)
    for path in store.glob("packs/*/*"):
        data = path.read_bytes()
        for _ in range(6):
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(changed))
            for step in (*STEPS, None):
                state = blank()
                kind, done = "", None
                try:
                    done = restore_into(store, state, step=step, low_memory=True)
                except DeltackptError as error:
                    kind = error.kind
                if kind != "incomplete-target":
                    assert which(state) == (done.step if done else 0)
        path.write_bytes(data)


def test_errors_survive_the_trip_to_another_process(store: Path) -> None:
    import pickle

    for path in store.glob("packs/*/*"):
        path.write_bytes(b"")
    with pytest.raises(DeltackptError) as caught:
        restore_into(store, blank(), step=2)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.context["tensors"] == caught.value.context["tensors"]
    assert copy.copy(again).kind == caught.value.kind
