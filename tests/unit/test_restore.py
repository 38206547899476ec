"""Prevents a resume from a damaged, half-written, foreign or older step than it claims."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captured import same
from deltackpt_store.errors import (
    CorruptionError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.manifest_io import COMMIT_MAGIC, digest_of
from deltackpt_store.store import Store
from restoring import Keeper
from torch import nn

import deltackpt.restore
from deltackpt.load import load
from deltackpt.restore import Restored, restore_into


def numbered(step: int) -> dict[str, Any]:
    """A state of which one chunk and one number change per step."""
    weight = torch.arange(6000, dtype=torch.float32)
    weight[0] = step
    return {"w": weight, "more": torch.full((2000,), float(step)), "n": step}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(6000), "more": torch.zeros(2000), "n": -1}


def back(keeper: Keeper, state: Any, **options: Any) -> Restored:
    done = restore_into(Store.open(keeper.path), state, **options)
    assert done is not None
    return done


def assert_step(state: dict[str, Any], step: int) -> None:
    expected = numbered(step)
    assert state["n"] == step
    assert same(state["w"], expected["w"])
    assert same(state["more"], expected["more"])


def damage(path: Path, at: int = -1) -> None:
    """Flip one bit, in the middle unless said otherwise."""
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))


def packs(keeper: Keeper) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(keeper.path.glob("packs/*/*"))}


def new_packs(keeper: Keeper, before: dict[Path, bytes]) -> list[Path]:
    return [path for path in packs(keeper) if path not in before]


# which step -------------------------------------------------------------------------------------


def test_the_newest_step_comes_back_with_its_facts(keeper: Keeper) -> None:
    for step in (1, 5, 100, 20_000):
        commit = keeper.save(numbered(step), step, metrics={"loss": step / 2})
    state = blank()
    done = back(keeper, state)
    assert_step(state, 20_000)
    assert (done.run, done.step, done.number) == ("main", 20_000, 4)
    assert done.root == commit.root.hex()
    assert done.commit == commit
    assert done.metrics == {"loss": 10_000.0}
    assert set(done.loaded) == {"w", "more", "n"}
    assert (done.missing, done.unexpected, done.mismatched, done.skipped) == ((), (), (), ())
    assert done.rng
    assert done.bytes >= 32_000
    assert done.seconds > 0
    told = json.loads(json.dumps(done.to_dict()))
    assert (told["step"], told["loaded"], told["skipped"]) == (20_000, 3, [])
    back(keeper, state, step=5)
    assert_step(state, 5)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("saved", ["aside", "there"])
def test_a_default_device_is_not_where_bytes_are_read(keeper: Keeper, saved: str) -> None:
    """`torch.set_default_device` decides where new tensors go; none of it is for read buffers."""
    dense = torch.randn(64, 64)
    parts = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "bsc": dense.to_sparse_bsc(8)}
    expected = {"w": dense, "s": torch.randn(1000).to(torch.bfloat16), **parts}
    with torch.device("meta" if saved == "there" else "cpu"):
        keeper.save({"m": expected}, 1)
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    with torch.device("meta"):
        restore_into(keeper.path, {"m": target})
        back = load(keeper.path)["m"]
    for name, value in expected.items():
        assert same(target[name].to_dense(), value.to_dense())
        assert same(back[name].to_dense(), value.to_dense())
        assert back[name].layout == value.layout


def test_a_run_without_steps_restores_nothing(keeper: Keeper) -> None:
    state = blank()
    assert restore_into(keeper.store, state) is None
    keeper.save(numbered(1), 1, run="other")
    assert restore_into(keeper.path, state, run="main") is None
    assert state["n"] == -1
    with pytest.raises(NotFoundError, match="main"):
        restore_into(keeper.path, state, step=1)


def test_wrong_arguments_name_the_way_out(keeper: Keeper, tmp_path: Path) -> None:
    for step in (3, 7):
        keeper.save(numbered(step), step)
    with pytest.raises(NotFoundError, match="3, 7"):
        restore_into(keeper.path, blank(), step=5)
    for step in (-1, True, "7"):
        with pytest.raises(InvalidInputError, match="step"):
            restore_into(keeper.path, blank(), step=step)  # on purpose
    with pytest.raises(NotFoundError, match="not a deltackpt store"):
        restore_into(tmp_path, blank())
    with pytest.raises(InvalidInputError, match="mapping"):
        restore_into(keeper.path, nn.Linear(2, 2))  # on purpose
    with pytest.raises(InvalidInputError, match="name of a run"):
        restore_into(keeper.path, blank(), run="../x")


def test_steps_given_up_by_going_back_are_not_the_newest(keeper: Keeper) -> None:
    commits = [keeper.save(numbered(step), step) for step in (10, 20, 5000)]
    keeper._heads["main"] = commits[0]
    keeper.save(numbered(15), 15)
    state = blank()
    assert back(keeper, state).step == 15
    assert_step(state, 15)


# damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_damaged_newest_step_falls_back_and_says_so(
    keeper: Keeper, low_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # case 87, case 112, I6
    keeper.save(numbered(1), 1)
    before = packs(keeper)
    keeper.save(numbered(2), 2)
    for path in new_packs(keeper, before):
        damage(path, 300)
    state = blank()
    with caplog.at_level(logging.WARNING):
        done = back(keeper, state, low_memory=low_memory)
    assert_step(state, 1)
    (skipped,) = done.skipped
    assert (skipped.run, skipped.number, skipped.step) == ("main", 2, 2)
    assert "more" in skipped.reason or "w" in skipped.reason
    assert "main@2" in caplog.text
    assert "main@1" in caplog.text


def test_a_damaged_step_that_is_asked_for_names_its_tensors(keeper: Keeper) -> None:
    # case 112
    keeper.save(numbered(1), 1)
    before = packs(keeper)
    other = numbered(2)
    other["w"] = numbered(1)["w"]
    keeper.save(other, 2)
    for path in new_packs(keeper, before):
        damage(path, 300)
    state = blank()
    kept = copy.deepcopy(state)
    with pytest.raises(CorruptionError, match="damaged in more") as caught:
        back(keeper, state, step=2)
    assert caught.value.context["tensors"] == ("more",)
    assert (caught.value.context["run"], caught.value.context["step"]) == ("main", 2)
    assert state["n"] == kept["n"]
    assert same(state["w"], kept["w"])
    assert same(state["more"], kept["more"])
    back(keeper, state, step=2, only=["w", "n"])  # what is not hit still restores
    assert state["n"] == 2
    assert same(state["w"], numbered(1)["w"])


def test_a_streamed_restore_that_meets_damage_says_the_target_is_incomplete(
    keeper: Keeper,
) -> None:
    # case 143
    keeper.save(numbered(1), 1)
    for path in packs(keeper):
        damage(path, 300)
    with pytest.raises(CorruptionError, match="the target is incomplete") as caught:
        back(keeper, blank(), step=1, low_memory=True)
    assert caught.value.kind == "incomplete-target"
    assert caught.value.context["tensors"]
    with pytest.raises(CorruptionError, match="the target is incomplete"):
        back(keeper, blank(), low_memory=True)


def test_when_nothing_verifies_every_reason_is_told(keeper: Keeper) -> None:
    for step in (1, 2):
        keeper.save(numbered(step), step)
    for path in packs(keeper):
        damage(path, 300)
    state = blank()
    with pytest.raises(CorruptionError) as caught:
        back(keeper, state)
    assert caught.value.kind == "nothing-verifies"
    assert "commit 2 (step 2)" in str(caught.value)
    assert "commit 1 (step 1)" in str(caught.value)
    assert state["n"] == -1
    with pytest.raises(CorruptionError, match="commit 1"):
        load(keeper.path)


@pytest.mark.parametrize("what", ["commit", "manifest", "pack"])
@pytest.mark.parametrize("how", ["missing", "empty", "cut"])
def test_every_part_of_the_newest_save_missing_in_turn(keeper: Keeper, what: str, how: str) -> None:
    # case 87
    keeper.save(numbered(1), 1)
    before = {path for path in keeper.path.rglob("*") if path.is_file()}
    keeper.save(numbered(2), 2)
    folder = {"commit": "runs", "manifest": "manifests", "pack": "packs"}[what]
    (victim,) = [path for path in keeper.path.glob(f"{folder}/**/*")
                 if path.is_file() and path not in before]  # fmt: skip
    data = victim.read_bytes()
    if how == "missing":
        victim.unlink()
    else:
        victim.write_bytes(data[: len(data) // 2] if how == "cut" else b"")
    state = blank()
    done = back(keeper, state)
    assert_step(state, 1)
    ignored = [] if (what, how) == ("commit", "missing") else [2]
    assert [skipped.number for skipped in done.skipped] == ignored
    (keeper.path / "runs" / "main" / "00000000000000000009").mkdir()  # a number is no commit
    assert back(keeper, blank()).step == 1


def test_a_damaged_commit_in_the_middle_does_not_hide_older_ones(keeper: Keeper) -> None:
    for step in (1, 2, 3):
        before = packs(keeper)
        keeper.save(numbered(step), step)
    for path in new_packs(keeper, before):
        damage(path, 300)
    damage(keeper.path / "runs" / "main" / f"{2:020d}")
    state = blank()
    done = back(keeper, state)
    assert_step(state, 1)
    assert {skipped.number for skipped in done.skipped} == {2, 3}
    assert {skipped.step for skipped in done.skipped} == {None, 3}


def test_another_base_is_refused(keeper: Keeper, tmp_path: Path) -> None:
    # case 105
    keeper.save(numbered(1), 1)
    base = {path.name for path in keeper.path.glob("manifests/*")}
    commit = keeper.save(numbered(2), 2)
    assert commit.base is not None
    other = Keeper(tmp_path / "other")
    other.save(numbered(7), 1)
    foreign = next(other.path.glob("manifests/*"))
    (name,) = base
    (keeper.path / "manifests" / name).write_bytes(foreign.read_bytes())
    state = blank()
    with pytest.raises(CorruptionError):
        back(keeper, state, step=2)
    with pytest.raises(CorruptionError):
        back(keeper, state)
    assert state["n"] == -1


def test_a_newer_format_is_not_passed_over(keeper: Keeper) -> None:
    # I9: falling back would fork the run behind the user's back
    keeper.save(numbered(1), 1)
    body = COMMIT_MAGIC + b"\x63" + b"\x80"
    path = keeper.path / "runs" / "main" / f"{2:020d}"
    path.write_bytes(body + digest_of(body))
    with pytest.raises(UnsupportedFormatError):
        back(keeper, blank())
    assert back(keeper, blank(), step=1).step == 1


def test_differences_are_no_damage(keeper: Keeper) -> None:
    keeper.save(numbered(1), 1)
    keeper.save({**numbered(2), "extra": torch.ones(3)}, 2)
    with pytest.raises(MismatchError, match="extra"):
        back(keeper, blank())


def test_storage_errors_that_are_no_damage_do_not_fall_back(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.save(numbered(1), 1)
    keeper.save(numbered(2), 2)
    real = FileIO.open

    def refuse(self: FileIO, path: str) -> int:
        if "/packs/" in path:
            raise PermissionError(13, "Permission denied", path)
        return real(self, path)

    monkeypatch.setattr(FileIO, "open", refuse)
    state = blank()
    with pytest.raises(StorageError, match="Permission denied"):
        back(keeper, state)
    assert state["n"] == -1


@pytest.mark.parametrize("name", ["EIO", "EUCLEAN", "EBADMSG", "EILSEQ", "ENODATA", "EREMOTEIO"])
def test_what_the_file_system_knows_to_be_bad_falls_back(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # I6
    keeper.save(numbered(1), 1)
    before = set(keeper.path.glob("packs/*/*"))
    keeper.save(numbered(2), 2)
    bad = {str(path) for path in set(keeper.path.glob("packs/*/*")) - before}
    assert bad
    real = FileIO.open

    def refuse(self: FileIO, path: str) -> int:
        if path in bad:
            raise OSError(getattr(errno, name), "bad", path)
        return real(self, path)

    monkeypatch.setattr(FileIO, "open", refuse)
    assert back(keeper, blank()).step == 1


@pytest.mark.parametrize("call", range(1, 40))
def test_a_read_error_at_any_call_changes_nothing_or_restores(
    keeper: Keeper, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 152, I8
    keeper.save(numbered(1), 1)
    keeper.save(numbered(2), 2)
    real, calls = FileIO.read_into, [0]

    def failing(self: FileIO, handle: int, buffers: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] == call:
            raise OSError(5, "Input/output error")
        return real(self, handle, buffers, offset)

    monkeypatch.setattr(FileIO, "read_into", failing)
    state = blank()
    try:
        done = back(keeper, state, threads=1)
    except (CorruptionError, StorageError):
        assert state["n"] == -1
        assert not state["w"].any()
        assert not state["more"].any()
    else:
        assert_step(state, done.step)


# what is around ---------------------------------------------------------------------------------


def test_a_read_only_store_of_another_user(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # case 85: restore needs to read, and nothing else, and does not say that it restored nothing
    keeper.save(numbered(1), 1)

    def forbid(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")  # root is not held up by modes

    for name in ("create", "write", "sync", "link", "unlink", "sync_directory", "mkdir", "rmdir"):
        monkeypatch.setattr(FileIO, name, forbid)
    for module in list(sys.modules):
        if module == "lmdb" or module.startswith("lmdb."):
            monkeypatch.setitem(sys.modules, module, None)
    files = {path: (path.stat().st_mtime_ns, path.stat().st_ino)
             for path in sorted(keeper.path.rglob("*"))}  # fmt: skip
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        state = blank()
        back(keeper, state)
        assert_step(state, 1)
        assert_step(load(keeper.path), 1)
        assert not caplog.records
    finally:
        for path in files:
            path.chmod(0o755 if path.is_dir() else 0o644)
    after = {path: (path.stat().st_mtime_ns, path.stat().st_ino)
             for path in sorted(keeper.path.rglob("*"))}  # fmt: skip
    assert after == files


def test_no_lmdb_is_imported_by_a_restore(keeper: Keeper) -> None:
    # case 85
    keeper.save({"n": 1, "w": torch.ones(5000)}, 1)
    code = (
        "import sys; sys.modules['lmdb'] = None\n"
        "from deltackpt.restore import restore_into\nimport torch\n"
        f"s = {{'n': 0, 'w': torch.zeros(5000)}}\nrestore_into({str(keeper.path)!r}, s)\n"
        "assert s['n'] == 1 and s['w'].all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_pickle_on_any_path(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    # case 162
    model = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    state = {
        "model": model, "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "meta": {"a": np.arange(4), "b": np.arange(60_000.0), "c": (1, {2}, torch.float16)},
    }  # fmt: skip
    keeper.save(state, 1)

    def forbid(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbid)
    monkeypatch.setattr(torch, "load", forbid)
    for low_memory in (False, True):
        back(keeper, state, low_memory=low_memory)
    load(keeper.path)
    evil = b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93."
    for pattern in ("manifests/*", "runs/main/*", "packs/*/*"):
        for path in keeper.path.glob(pattern):
            data = path.read_bytes()
            path.write_bytes(evil)
            with pytest.raises(CorruptionError):
                back(keeper, state)
            path.write_bytes(data)
    back(keeper, state)


def test_another_process_sees_whole_steps_only(keeper: Keeper) -> None:
    # case 55: everything but the commit is there, as while a save is under way
    keeper.save(numbered(1), 1)
    keeper.save(numbered(2), 2)
    (keeper.path / "runs" / "main" / f"{2:020d}").unlink()
    (keeper.path / "runs" / "main" / ".tmp-abc-2").write_bytes(b"half")
    state = blank()
    done = back(keeper, state)
    assert (done.step, done.skipped) == (1, ())
    assert_step(state, 1)


def test_restored_tensors_do_not_follow_the_store(keeper: Keeper) -> None:
    # case 149
    keeper.save(numbered(1), 1)
    state, loaded = blank(), load(keeper.path)
    back(keeper, state)
    kept = copy.deepcopy(state)
    keeper.save(numbered(2), 2)
    for path in sorted(keeper.path.rglob("*"), reverse=True):
        if path.is_file():
            path.write_bytes(os.urandom(path.stat().st_size))
    assert_step(state, 1)
    assert_step(kept, 1)
    assert_step(loaded, 1)


def test_generators_come_last(keeper: Keeper) -> None:
    # case 153: an object that draws numbers while it loads must not shift the sequence
    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(10)
            np.random.rand(3)

    torch.manual_seed(3)
    keeper.save({"x": Drawing()}, 1)
    expected = torch.rand(4), np.random.rand(2)
    back(keeper, {"x": Drawing()})
    assert torch.equal(torch.rand(4), expected[0])
    assert (np.random.rand(2) == expected[1]).all()
    done = back(keeper, {"x": Drawing()}, rng=False)
    assert not done.rng
    keeper.save({"x": Drawing()}, 2, rng=False)
    assert not back(keeper, {"x": Drawing()}).rng


def test_generators_that_do_not_fit_are_refused_first(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.save(numbered(1), 1)

    def refuse(states: Any) -> None:
        raise MismatchError("the state of the random generator does not fit")

    monkeypatch.setattr(deltackpt.restore.generators, "check", refuse)
    for low_memory in (False, True):
        state = blank()
        with pytest.raises(MismatchError, match="generator"):
            back(keeper, state, low_memory=low_memory)
        assert state["n"] == -1
        assert not state["w"].any()
        back(keeper, state, low_memory=low_memory, rng=False)


def test_too_little_memory_streams_instead(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # case 143
    keeper.save(numbered(1), 1)
    monkeypatch.setattr(deltackpt.restore, "available_bytes", lambda: 1000)
    state = blank()
    with caplog.at_level(logging.WARNING):
        back(keeper, state)
    assert_step(state, 1)
    assert "straight into the target" in caplog.text


MEMORY = """
import resource, sys, torch
from deltackpt.restore import restore_into
torch.set_num_threads(1)
path, low, kind = sys.argv[1], sys.argv[2] == "low", sys.argv[3]
if kind == "turned":
    target = {"w": torch.zeros(1024, 1024, 12).permute(2, 1, 0), "v": torch.zeros(1024, 1024, 12)}
else:
    target = {"w": torch.zeros(12, 1024, 1024), "v": torch.zeros(12, 1024, 1024).permute(2, 1, 0)}
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the peak counts from here
def peak():
    with open("/proc/self/status") as f:
        return next(int(l.split()[1]) * 1024 for l in f if l.startswith("VmHWM"))
before = peak()
restore_into(path, target, low_memory=low)
print(peak() - before, int(target["w"].sum(dtype=torch.float64)), int(target["v"][5, 6, 7]))
"""


def test_streaming_needs_little_beyond_the_target(tmp_path: Path) -> None:
    # case 143
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not let a process reset its peak memory")
    keeper = Keeper(tmp_path / "store", chunk=1 << 18, codec="none")
    w = torch.randint(0, 9, (12, 1024, 1024)).float()
    v = torch.randint(0, 9, (1024, 1024, 12)).float()
    keeper.save({"w": w, "v": v}, 1)
    size = 2 * w.numel() * 4
    used: dict[str, int] = {}
    for low, kind in (("low", "straight"), ("low", "turned"), ("no", "straight")):
        out = subprocess.run(
            [sys.executable, "-c", MEMORY, str(keeper.path), low, kind],
            capture_output=True, text=True, check=True, timeout=240,
        ).stdout.split()  # fmt: skip
        assert int(out[1]) == int(w.sum(dtype=torch.float64))
        assert int(out[2]) == int(v[5, 6, 7])
        used[f"{low} {kind}"] = int(out[0])
    assert used["no straight"] > 0.9 * size  # the measurement sees what it should
    assert used["low straight"] < 48 << 20  # a window, the readers' buffers, Python
    assert used["low turned"] < 48 << 20
