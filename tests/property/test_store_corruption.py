"""Any damage to any file of a store: an error or no effect, never wrong bytes, never a crash."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deltackpt_store import Commit, CorruptionError, DeltackptError, NotFoundError, Store
from deltackpt_store.errors import UnsupportedFormatError
from deltackpt_store.verify import verify
from small_store import SmallStore, pattern

DETECTED = (CorruptionError, UnsupportedFormatError, NotFoundError)
PER_FILE = 240


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, base and delta manifests, raw and encoded chunks, inline tensors, a pin."""
    path = tmp_path_factory.mktemp("corruption") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("small_store.CHUNK", 8192)
        small = SmallStore(path, codec="auto")
        parent = None
        first: Commit | None = None
        for step in (1, 2, 3):
            noise = pattern(20_000, 1)
            noise[: 2000 * step] *= step
            weights = {
                "w/noise": noise,
                "w/smooth": np.linspace(0, step, 10_000, dtype=np.float32),
                "w/frozen": pattern(9_000, 99),
                "step": np.array([step]),
            }
            parent = small.save("main", step, weights, {"lr": step / 7}, parent=parent,
                                base=None if step == 3 else first)  # fmt: skip
            first = first or parent
        small.save("fork", 9, {"w": pattern(5_000, 5)}, parent=parent)
        assert first is not None
        small.store.pin("best", first)
        small.close()
    return path


def everything(path: Path) -> dict[tuple[str, int], dict[str, bytes]]:
    """All that can be restored from the store: (run, step) -> path -> bytes. Raises nothing that
    is not in DETECTED; a step or run that raises one of those is left out."""
    found: dict[tuple[str, int], dict[str, bytes]] = {}
    try:
        store = Store.open(path)
        runs = store.runs()
        store.pins()
    except DETECTED:
        return found
    for run in runs:
        try:
            commits = store.commits(run)
            store.steps(run)
        except DETECTED:
            continue
        for commit in commits:
            try:
                found[run, commit.step] = restore(store, commit)
            except DETECTED:
                continue
    return found


def restore(store: Store, commit: Commit) -> dict[str, bytes]:
    snapshot = store.snapshot(commit)
    requests: list[tuple[bytes, memoryview]] = []
    extents: dict[int, bytes | bytearray] = dict(snapshot.inline)
    for extent, ids in snapshot.chunks.items():
        spec = snapshot.layout.extents[extent]
        data = extents[extent] = bytearray(spec.nbytes)
        for i, row in enumerate(ids):
            piece = memoryview(data)[i * spec.chunk_bytes :][: spec.chunk_length(i)]
            requests.append((row.tobytes(), piece))
    store.reader(snapshot.packs).read(requests)
    out = {snapshot.layout.paths[v.slot]: bytes(extents[v.extent]) for v in snapshot.layout.tensors}
    return out | {snapshot.layout.paths[s]: d for s, d in snapshot.objects.items()}


def files(path: Path) -> list[Path]:
    return sorted(Path(d, f) for d, _, names in os.walk(path) for f in names)


Damage = Callable[[bytearray, random.Random], None]


def bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def zeros(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data)) & ~511
    data[start : start + 512] = bytes(len(data[start : start + 512]))


def truncated(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def garbage(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start : start + 64] = rng.randbytes(len(data[start : start + 64]))


def grown(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, 600))


def shifted(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :][:1]
    data.insert(rng.randrange(len(data) + 1), rng.randrange(256))


def swapped(data: bytearray, rng: random.Random) -> None:
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    length = min(32, b - a, len(data) - b)
    data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]


DAMAGES: list[Damage] = [bit, bit, bit, zeros, truncated, garbage, grown, shifted, swapped]


@pytest.mark.parametrize("kind", ["FORMAT", "packs", "manifests", "runs", "pins"])
def test_random_damage_to_every_file(original: Path, tmp_path: Path, kind: str) -> None:
    """Wrong weights without a word are the worst that a checkpoint can do."""  # case 112
    good = everything(original)
    assert {key[1] for key in good} == {1, 2, 3, 9}
    path = tmp_path / "store"
    shutil.copytree(original, path)
    rng = random.Random(f"{kind} 5")
    victims = [f for f in files(path) if f.relative_to(path).parts[0] == kind]
    assert victims
    for victim in victims:
        content = victim.read_bytes()
        for attempt in range(-(-PER_FILE // len(victims)) + 10):
            data = bytearray(content)
            rng.choice(DAMAGES)(data, rng)
            victim.write_bytes(data)
            where = f"{victim.relative_to(path)} attempt {attempt}"
            for key, tensors in everything(path).items():
                assert tensors == good[key], where
            if attempt % 8 == 0 and data != content and kind != "FORMAT":
                report = verify(Store.open(path), level="restore")
                lost = {key for key in good if key not in everything(path)}
                assert lost <= {*report.damaged_steps} | {
                    (h.run, s) for f in report.findings for h in f.hits if h.step < 0
                    for r, s in good if r == h.run
                }, where  # fmt: skip
        victim.write_bytes(content)
    assert everything(path) == good


def test_files_lost_swapped_and_replaced(original: Path, tmp_path: Path) -> None:
    """Files that are whole but in the wrong place are not believed either."""
    good = everything(original)
    path = tmp_path / "store"
    shutil.copytree(original, path)
    for victim in files(path):
        content = victim.read_bytes()
        victim.unlink()
        for key, tensors in everything(path).items():
            assert tensors == good[key]
        for other in files(path):
            shutil.copy(other, victim)
            for key, tensors in everything(path).items():
                assert tensors == good[key], (victim, other)
        victim.unlink()
        victim.mkdir()
        for key, tensors in everything(path).items():
            assert tensors == good[key]
        victim.rmdir()
        victim.write_bytes(content)
    assert everything(path) == good


def test_only_typed_errors_from_every_entry(original: Path, tmp_path: Path) -> None:
    """A caller that handles the documented errors is never surprised by another one."""
    path = tmp_path / "store"
    rng = random.Random(8)
    for _ in range(60):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, path)
        for victim in rng.sample(files(path), 3):
            data = bytearray(victim.read_bytes())
            rng.choice(DAMAGES)(data, rng)
            victim.write_bytes(data)
        for call in (
            lambda: Store.open(path),
            lambda: Store.open(path).runs(),
            lambda: Store.open(path).resolve_name("best"),
            lambda: Store.open(path).resolve_name("main@2"),
            lambda: Store.open(path).snapshot(Store.open(path).head("main")),
            lambda: Store.open(path).index(),
            lambda: verify(Store.open(path), level="restore"),
        ):
            with contextlib.suppress(DeltackptError):
                call()
