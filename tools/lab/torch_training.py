"""A small real training (torch, AdamW) that remembers what it saved, for trials on this machine."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any, cast

import torch
from deltackpt_store.errors import DeltackptError, NotFoundError
from deltackpt_store.store import Store
from torch import nn

import deltackpt
from deltackpt.policy import Codec

WIDTH = 192
STEP_BYTES = 3 * 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)
"""Weights and both moments: what a save writes at most, about."""


class Training:
    """Trains and saves; knows the digest of the state of each step that became durable."""

    def __init__(
        self, store: Path, *, durable_timeout: float = 120.0, codec: Codec = "auto"
    ) -> None:  # fmt: skip
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.path = store
        self.durable: dict[int, str] = {}
        self.step = 0
        self.timeout = durable_timeout
        self.codec: Codec = codec
        self.checkpointer = self._open()

    def _open(self) -> deltackpt.Checkpointer:
        return deltackpt.Checkpointer(
            self.path, self._state(), writer="process", final=False, lock_timeout=60.0,
            durable_timeout=self.timeout, codec=self.codec,
        )  # fmt: skip

    def _state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        self.model(torch.randn(16, WIDTH)).square().mean().backward()
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    def save(self) -> DeltackptError | None:
        """Save the current step and wait; the error, if that is how it ended."""
        digest = digest_of({name: thing.state_dict() for name, thing in self._state().items()})
        try:
            self.checkpointer.save(self.step)
            self.checkpointer.wait()
        except DeltackptError as error:
            return error
        self.durable[self.step] = digest
        return None

    def reopen(self) -> int:
        """As a new process would: a new checkpointer, and the newest step restored."""
        self.close()
        self.checkpointer = self._open()
        restored = self.checkpointer.restore()
        self.step = 0 if restored is None else restored.step
        return self.step

    def is_step(self, step: int, loaded: dict[str, Any]) -> bool:
        """Whether `loaded` is, bit for bit, the state that was saved as `step`."""
        return digest_of({name: loaded[name] for name in self._state()}) == self.durable[step]

    def close(self) -> None:
        """Close, whatever failed before."""
        with contextlib.suppress(DeltackptError):  # told before, or looked for by the trial
            self.checkpointer.close()

    def violations(self, *, gone: frozenset[int] = frozenset()) -> list[str]:
        """Every durable step that is not in `gone` must be there, bit for bit."""
        try:
            listed = set(Store.open(self.path).steps("main"))
        except NotFoundError:
            listed = set[int]()
        found: list[str] = []
        for step in self.durable:
            if step in gone:
                continue
            if step not in listed:
                found.append(f"step {step} was durable and is gone")
                continue
            try:
                state = deltackpt.load(self.path, step=step)
            except DeltackptError as error:
                found.append(f"step {step}: {error}")
                continue
            if not self.is_step(step, state):
                found.append(f"step {step} holds other bytes than were saved")
        return found


def digest_of(state: object) -> str:
    """One digest of a state tree: keys, types, and the bits of tensors."""
    hashed = hashlib.sha256()

    def feed(value: object) -> None:
        if isinstance(value, torch.Tensor):
            raw = value.detach().cpu().contiguous().view(-1)
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b"")
        elif isinstance(value, dict):
            for key, item in cast("dict[object, object]", value).items():
                hashed.update(repr(key).encode())
                feed(item)
        elif isinstance(value, (list, tuple)):
            for item in cast("list[object]", value):
                feed(item)
        else:
            hashed.update(repr(value).encode())

    feed(state)
    return hashed.hexdigest()
