"""Prevents: raw Python errors, hangs and silence where an option, step or observer is wrong."""

from __future__ import annotations

import importlib
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.client import WriterClient
from deltackpt_store.errors import DeltackptError, InvalidInputError, StateError
from deltackpt_store.store import Store
from saving import Opener, Training, steps

import deltackpt
from deltackpt import events

STATE = {"x": torch.arange(400.0)}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "x"}, "mode"),
        ({"mode": -1}, "mode"),
        ({"mode": 0o070}, "mode"),
        ({"mode": 1 << 20}, "mode"),
        ({"mode": True}, "mode"),
        ({"observers": 5}, "observers"),
        ({"observers": [5]}, "observers"),
    ],
    ids=str,
)
def test_unusable_options_are_refused_by_name(
    path: Path, opened: Opener, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInputError, match=named) as caught:
        opened(STATE, **options)
    assert caught.value.context["option"] == named
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "a\ud800b", "a\0b", b"a\0b", 7, None], ids=ascii)
def test_unusable_paths_are_refused(name: Any) -> None:
    for call in (lambda: deltackpt.Checkpointer(name, STATE), lambda: deltackpt.load(name)):
        with pytest.raises(InvalidInputError, match="path of a store"):
            call()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("s3://bucket/run", "name a directory"),
        (Path("gs://bucket/run"), "name a directory"),
        ("~/runs", "expanduser"),
    ],
    ids=str,
)
def test_a_place_that_is_no_directory_is_refused(
    name: Any, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: checkpoints in a directory called 's3:' or '~' below the current one."""
    monkeypatch.chdir(tmp_path)
    for call in (lambda: deltackpt.Checkpointer(name, STATE), lambda: deltackpt.load(name)):
        with pytest.raises(InvalidInputError, match=advice):
            call()
    assert not list(tmp_path.iterdir())
    deltackpt.Checkpointer(f"./{name}", STATE).close()  # the one who means it


def test_errors_are_a_module() -> None:
    module = importlib.import_module("deltackpt.errors")
    store = importlib.import_module("deltackpt_store.errors")
    assert deltackpt.errors is module
    kinds = {name for name, one in vars(store).items()
             if isinstance(one, type) and issubclass(one, DeltackptError)}  # fmt: skip
    assert set(module.__all__) == kinds
    assert all(getattr(module, name) is getattr(store, name) for name in kinds)


@pytest.mark.parametrize("step", [-1, 1 << 63])
def test_no_commit_has_a_step_that_is_none(path: Path, step: int) -> None:
    Store.create(path)
    with WriterClient(path, "main", seed=1, ring_bytes=1 << 20, mode="thread") as client:
        save = client.begin(step=step, layout=b"")
        with pytest.raises(InvalidInputError):
            client.result(save, 60)
    assert steps(path) == []


# observers ---------------------------------------------------------------------------------------


class Meddler:
    """Calls a checkpointer from where its saves wait for it."""

    def __init__(self, kind: type, call: str) -> None:
        self.kind, self.call = kind, call
        self.ckpt: Any = None
        self.save: Any = None
        self.ready = threading.Event()
        self.errors: list[BaseException] = []
        self.heard = threading.Event()

    def on_event(self, event: events.Event, /) -> None:
        if type(event) is not self.kind:
            return
        assert self.ready.wait(60)
        calls = {
            "wait": lambda: self.ckpt.wait(),
            "save": lambda: self.ckpt.save(9),
            "step": lambda: self.ckpt.step(9),
            "close": lambda: self.ckpt.close(),
            "restore": lambda: self.ckpt.restore(),
            "lock": lambda: self.ckpt.lock(),
            "result": lambda: self.save.result(),
        }
        try:
            calls[self.call]()
        except DeltackptError as error:
            self.errors.append(error)
        self.heard.set()


@pytest.mark.parametrize("call", ["wait", "save", "step", "close", "restore", "lock", "result"])
def test_an_observer_that_would_wait_for_itself_is_told(
    path: Path, opened: Opener, call: str
) -> None:
    meddler = Meddler(events.Staged, call)
    ckpt = meddler.ckpt = opened(STATE, observers=[meddler])
    meddler.save = ckpt.save(0)
    meddler.ready.set()
    assert meddler.heard.wait(60)
    assert [type(error) for error in meddler.errors] == [StateError]
    assert meddler.errors[0].kind == "in-observer"
    assert meddler.save.result(60).step == 0
    ckpt.close()
    assert steps(path) == [0]


def test_an_observer_may_ask_for_what_is_there(opened: Opener) -> None:
    meddler = Meddler(events.Committed, "result")
    ckpt = meddler.ckpt = opened(STATE, observers=[meddler])
    meddler.save = ckpt.save(0)
    meddler.ready.set()
    assert meddler.heard.wait(60)
    assert not meddler.errors
    ckpt.close()


# going back ------------------------------------------------------------------------------------


def left(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "leaves its steps" in r.message]


def test_steps_that_leave_the_list_are_named(
    path: Path, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    ckpt = opened(training.objects)
    for step in (1, 3, 5, 7):
        training.step()
        ckpt.save(step).result(120)
    ckpt.restore()
    ckpt.save(8).result(120)
    assert left(caplog) == []
    ckpt.restore(3)
    assert steps(path) == [1, 3, 5, 7, 8]
    for step in (4, 6):
        training.step()
        ckpt.save(step).result(120)
    assert steps(path) == [1, 3, 4, 6]
    assert len(left(caplog)) == 1
    assert "saving step 4 of run 'main' leaves its steps 5, 7, 8:" in left(caplog)[0]
    ckpt.save(3, overwrite=True).result(120)
    assert steps(path) == [1, 3]
    assert "leaves its steps 4, 6:" in left(caplog)[1]
    ckpt.save(4, overwrite=True).result(120)
    assert len(left(caplog)) == 2


# torch.compile ---------------------------------------------------------------------------------


def test_a_compiled_step_waits_and_says_nothing(opened: Opener) -> None:
    training = Training()
    ckpt = opened(training.objects)
    step = torch.compile(training.optimizer.step, backend="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3):
            training.backward()
            ckpt._guard.seen = False
            step()
            assert ckpt._guard.seen
            ckpt.save(number)
    ckpt.wait()
    assert not [w for w in told if "getpid" in str(w.message)]
