"""Prevents: a step that retention and collection take from under whoever reads or continues it."""

# case 103, case 107

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import NotFoundError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.leases import held_commits
from deltackpt_store.retention import Keep, apply
from deltackpt_store.retention import retire as retire_all
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from saving import Opener, Training, assert_same, steps

import deltackpt
import deltackpt.choosing as choosing_module
import deltackpt.restore as restore_module


def fill(opened: Opener, count: int = 3) -> tuple[Training, list[Any]]:
    training, copies = Training(), []
    ckpt = opened(training.objects, rng=False)
    for step in range(count):
        training.step()
        copies.append(training.copy())
        ckpt.save(step).result(120)
    ckpt.close()
    return training, copies


def retire(path: Path) -> list[int]:
    """Let retention keep the newest step alone; what is left."""
    apply(Store.open(path), "main", Keep(last=1))
    return steps(path)


def holds(path: Path) -> set[Any]:
    return held_commits(FileIO(), str(path))


def test_a_step_that_is_loaded_is_not_retired(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copies = fill(opened)
    load_module = importlib.import_module("deltackpt.load")  # the name is that of the function
    real, left = load_module._build, list[list[int]]()

    def build(*args: Any) -> Any:
        left.append(retire(path))
        return real(*args)

    monkeypatch.setattr(load_module, "_build", build)
    assert_same(deltackpt.load(path, step=0), copies[0])
    assert left == [[0, 2]]
    assert not holds(path)
    assert retire(path) == [2]
    with pytest.raises(NotFoundError):
        deltackpt.load(path, step=0)


def test_a_step_that_is_restored_into_is_held_as_long(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, copies = fill(opened)
    real = restore_module.Step

    def step(*args: Any) -> Any:
        assert [held.number for held in holds(path)] == [1]
        assert retire(path) == [0, 2]
        return real(*args)

    monkeypatch.setattr(restore_module, "Step", step)
    deltackpt.restore_into(path, training.objects, step=0)
    assert_same(training.copy(), copies[0])
    assert not holds(path)


def test_what_training_continues_is_held_until_it_has_a_step_of_its_own(
    path: Path, opened: Opener
) -> None:
    fill(opened)
    training = Training(seed=5)
    ckpt = opened(training.objects)
    ckpt.restore(1)
    assert retire(path) == [1, 2]
    ckpt.restore(2)
    assert retire(path) == [2]
    ckpt.close()
    assert not holds(path)

    ckpt = opened(training.objects)
    ckpt.restore()
    assert len(holds(path)) == 1
    ckpt.restore(only="model/*")
    assert len(holds(path)) == 1
    training.step()
    ckpt.save(7).result(120)
    assert ckpt._pipeline._held is None  # the writer lets go of its own hold a moment later
    ckpt.close()
    assert not holds(path)
    assert retire(path) == [7]


@pytest.mark.parametrize("run", ["main", "fork"])
def test_training_goes_on_from_a_step_retired_in_the_moment_of_its_restore(
    path: Path, opened: Opener, run: str
) -> None:
    """Who retired it (`retain`, `delete`) had looked for holds before: no save succeeded then."""
    fill(opened)
    training, store = Training(seed=5), Store.open(path)
    ckpt = opened(training.objects, run=run)
    assert ckpt.restore(run="main") is not None
    retire_all(store, store.commits("main"))
    assert [number for _, number in collect(store).commits] == [1, 2]
    training.step()
    ckpt.save(7).result(120)
    collect(store)
    training.step()
    ckpt.save(8).result(120)
    ckpt.close()
    assert steps(path, run) == [7, 8]
    assert_same(deltackpt.load(path, run=run), training.copy())
    assert verify(store).ok


def test_a_step_retired_just_before_it_is_held_is_passed_over(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = fill(opened)
    real, first = choosing_module.hold, iter([True])

    def late(*args: Any) -> Any:
        if next(first, False):
            other = opened(training.objects)
            other.save(9).result(120)
            other.close()
            assert retire(path) == [9]
        return real(*args)

    monkeypatch.setattr(choosing_module, "hold", late)
    restored = deltackpt.restore_into(path, training.objects)
    assert restored is not None
    assert restored.step == 9
    assert not restored.skipped


@pytest.mark.parametrize("how", ["read-only", "other error"])
def test_where_nothing_can_be_held_everything_can_be_read(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    training, copies = fill(opened)

    def refuse(self: FileIO, path: str, **_: Any) -> int:
        raise OSError(30 if how == "read-only" else 5, os.strerror(30), path)

    monkeypatch.setattr(FileIO, "lock", refuse)
    assert_same(deltackpt.load(path), copies[2])
    restored = deltackpt.restore_into(path, training.objects)
    assert restored is not None
    assert torch.equal(training.model[0].weight, copies[2]["model"]["0.weight"])
