"""How a user's typed training script uses the library. Checked with mypy, never run."""

from __future__ import annotations

import torch
from deltackpt_store import Commit, NotFoundError, Store

import deltackpt


def train(path: str, steps: int) -> float:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = deltackpt.Checkpointer(
        path, {"model": model, "optimizer": optimizer, "meta": {"seed": 1}}, run="main", every=50
    )
    stall = 0.0
    with checkpointer as ckpt:
        last = ckpt.restore()
        first: int = last.step + 1 if last else 0
        for step in range(first, steps):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            save = ckpt.step(step, metrics={"loss": float(loss)})
            if save is not None:
                report = save.result(timeout=60.0)
                stall += report.stall_seconds
    return stall


def newest(path: str) -> int | None:
    try:
        commit: Commit = Store.open(path).head("main")
    except NotFoundError as error:
        print(error.kind, error.hint)
        return None
    return commit.step


def weights(path: str) -> list[str]:
    state = deltackpt.load(path, run="main", only="model/*")
    return [*state["model"], *map(str, deltackpt.steps(path, run="main"))]
