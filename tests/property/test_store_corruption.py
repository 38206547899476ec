"""Any damage to any file of a store: an error or no effect, never wrong bytes, never a crash."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest
from deltackpt_store import Commit, CorruptionError, DeltackptError, NotFoundError, Store
from deltackpt_store.errors import StorageError, UnsupportedFormatError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.generation import read_generation
from deltackpt_store.retention import retire
from deltackpt_store.testing import Mutant, SimulatedDisk, check_mutants, damaged
from deltackpt_store.testing.corruption import Content
from deltackpt_store.verify import verify
from small_store import SmallStore, pattern

DETECTED = (CorruptionError, UnsupportedFormatError, NotFoundError)
MUTATIONS = int(os.environ.get("DELTACKPT_MUTATIONS", "5000"))


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
        retire(small.store, [small.save("gone", 7, {"w": pattern(5_000, 6)})])
        small.close()
    assert collect(Store.open(path)).packs  # leaves a record of its generation
    (path / "runs" / "gone").rmdir()
    return path


Found = dict[tuple[str, int], dict[str, bytes]]


def everything(path: Path | str, io: FileIO | None = None) -> Found:
    """All that can be restored from the store: (run, step) -> path -> bytes. Raises nothing that
    is not in DETECTED; a step or run that raises one of those is left out."""
    found: Found = {}
    try:
        store = Store.open(path, io=io)
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


# case 112
@pytest.mark.parametrize("part", range(2))
def test_random_damage_to_every_file(
    original: Path, part: int, figure: Callable[[str, int], None]
) -> None:
    """Wrong weights without a word are the worst that a checkpoint can do."""
    root = str(original)
    disk = SimulatedDisk.of_directory(root)
    good = everything(root)
    assert {key[1] for key in good} == {1, 2, 3, 9}
    reports = 0

    def read(disk: SimulatedDisk) -> Content:
        found: dict[Hashable, object] = {**everything(root, disk)}
        for what, act in (("pin", pinned), ("generation", generation)):
            with contextlib.suppress(*DETECTED, StorageError):  # the latter: the file is lost
                found[what] = act(disk)
        return found

    def pinned(disk: SimulatedDisk) -> object:
        return Store.open(root, io=disk).resolve_name("best").digest

    def generation(disk: SimulatedDisk) -> object:
        return read_generation(disk, root, 1)

    def verified(mutant: Mutant, found: Content) -> None:
        """Now and then: verification names what cannot be restored."""
        nonlocal reports
        reports += 1
        if reports % 24 or mutant.path.endswith("FORMAT"):
            return
        try:
            report = verify(Store.open(root, io=mutant.disk), level="restore")
        except DETECTED:
            return
        lost = {key for key in good if key not in found}
        assert lost <= {*report.damaged_steps} | {
            (h.run, s) for f in report.findings for h in f.hits if h.step < 0
            for r, s in good if r == h.run
        }, mutant  # fmt: skip

    verdict = check_mutants(disk, root, read, MUTATIONS // 2, seed=part, also=verified)
    kinds = {"FORMAT", "packs", "manifests", "runs", "pins", "gc"}
    assert {*verdict.detected} | {*verdict.harmless} >= kinds
    assert sum(verdict.detected.values()) > MUTATIONS // 8
    figure("mutations of files, detected or harmless", verdict.mutations)
    figure("mutations of files, detected", sum(verdict.detected.values()))


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
            victim.write_bytes(damaged(victim.read_bytes(), rng))
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
