"""Helpers for tests that save: small training setups, gates for the disk, and reading back."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import NotFoundError
from deltackpt_store.fileio import FileIO
from deltackpt_store.store import Store
from torch import nn

from deltackpt import events, stage
from deltackpt.checkpointer import Checkpointer
from deltackpt.load import load
from deltackpt.stage import Packer


def saved(path: Path | str, step: int | None = None, run: str = "main") -> dict[str, Any]:
    """The state of a committed step, every chunk verified; no live object involved."""
    return load(path, run, step)


def steps(path: Path | str, run: str = "main") -> list[int]:
    store = Store.open(path)
    try:
        return store.steps(run)
    except NotFoundError:
        return []


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Equal structure, types and values; tensors by their bits."""
    assert isinstance(left, torch.Tensor) == isinstance(right, torch.Tensor), path
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert left.shape == right.shape, path
        assert bits(left) == bits(right), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}/{index}")
    else:
        assert left == right, path


class Training:
    """A small model with buffers that forward mutates, and an AdamW that owns its parameters."""

    def __init__(self, width: int = 64, *, layers: int = 3, seed: int = 0) -> None:
        torch.manual_seed(seed)
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()]
        self.model = nn.Sequential(*parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.width = width
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        data = torch.randn(8, self.width)
        self.optimizer.zero_grad()
        self.model(data).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def copy(self) -> dict[str, Any]:
        """An independent deep copy of the state as it is now."""
        return {name: _copied(thing.state_dict()) for name, thing in self.objects.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


class Gate:
    """Something that waits while closed. Opens by itself at the end of the test."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Event()
        """Somebody has come to the closed gate."""

    def close(self) -> None:
        self.waiting.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_for_visitor(self) -> None:
        assert self.waiting.wait(60)

    def pass_through(self) -> None:
        if not self._open.is_set():
            self.waiting.set()
            assert self._open.wait(60), "a gate was left closed"


class Recorder:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def on_event(self, event: events.Event, /) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if type(event) is kind]


Opener = Callable[..., Checkpointer]


@contextlib.contextmanager
def opener(default_path: Path) -> Iterator[Opener]:
    """Opens checkpointers (thread writers unless said otherwise) and closes what is left open."""
    opened: list[Checkpointer] = []

    def open_one(state: Any, path: Path | None = None, **options: Any) -> Checkpointer:
        chosen = {"writer": "thread", "chunk_bytes": 4096, "final": False, **options}
        ckpt = Checkpointer(path or default_path, state, **chosen)
        opened.append(ckpt)
        return ckpt

    yield open_one
    for ckpt in opened:
        with contextlib.suppress(Exception):
            ckpt.close()


def save(path: Path, state: dict[str, Any]) -> None:
    """Make `state` durable as step 1."""
    with opener(path) as opened:
        opened(state).save(1).result(120)


def set_timeout(ckpt: Checkpointer, seconds: float) -> None:
    """Change `durable_timeout` from the next save on."""
    ckpt._pipeline._options = dataclasses.replace(ckpt._options, durable_timeout=seconds)


def gate_disk(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before every fdatasync of this process (writer="thread")."""
    gate, real = Gate(), FileIO.sync

    def sync(self: FileIO, handle: int) -> None:
        gate.pass_through()
        real(self, handle)

    monkeypatch.setattr(FileIO, "sync", sync)
    return gate


def gate_staging(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before the copy of a chunk: into the ring, or for the table of a restored step."""
    gate, real, real_bytes = Gate(), Packer.copy, stage.copy_bytes

    def copy(self: Packer, slot: int, at: int, data: memoryview) -> None:
        gate.pass_through()
        real(self, slot, at, data)

    def copy_bytes(target: memoryview, source: memoryview) -> None:
        gate.pass_through()
        real_bytes(target, source)

    monkeypatch.setattr(Packer, "copy", copy)
    monkeypatch.setattr(stage, "copy_bytes", copy_bytes)
    return gate


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")
