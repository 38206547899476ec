"""A kill campaign: one training run that is SIGKILLed again and again, and one that is not.

    python kill_training.py STORE KILLS STEPS SEED

Trainers are forked from this process, which has imported torch but not used it, so that starting
one takes milliseconds. Each saves every step. As soon as a trainer has begun a random save, after
a random moment, the trainer, its writer, or both are killed. A trainer whose writer died goes on.
Prints one JSON line: how many were killed, and the Merkle roots of both runs' ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # imported by the first optimizer otherwise, in every trainer anew
from deltackpt_store.store import Store
from torch import nn

from deltackpt.checkpointer import Checkpointer


class Batches:
    """A data source with a position and a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.taken = 0

    def next(self) -> torch.Tensor:
        self.taken += 1
        return torch.randn(8, 96, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.taken = state["taken"]


def train(path: str, run: str, steps: int, saving: int) -> None:
    """One trainer; writes a byte to `saving` whenever a save has begun."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Linear(96, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 96)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    batches = Batches()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    ckpt = Checkpointer(path, state, run=run, every=1, chunk_bytes=4096, on_error="warn")
    with ckpt:
        last = ckpt.restore()
        for step in range(last.step + 1 if last else 0, steps):
            data = batches.next()
            noise = random.random() + float(np.random.rand())
            loss = (model(data) - noise * data.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step(step, metrics={"loss": loss.item()})
            os.write(saving, b"s")


def fork_trainer(path: str, run: str, steps: int) -> tuple[int, int]:
    """(process id, descriptor that a byte arrives at for every save)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        train(path, run, steps, writing)
        code = 0
    except BaseException:
        logging.exception("the trainer failed")
    finally:
        os._exit(code)


def writers_of(pid: int) -> list[int]:
    """Children of any thread of `pid`."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def campaign(path: str, kills: int, steps: int, rng: random.Random) -> dict[str, int]:
    done = {"trainer": 0, "writer": 0, "both": 0}
    while True:
        pid, saving = fork_trainer(path, "main", steps)
        try:
            while True:
                for _ in range(rng.randrange(1, 8)):
                    if not os.read(saving, 1):
                        _, status = os.waitpid(pid, 0)
                        code = os.waitstatus_to_exitcode(status)
                        if code != 0:
                            raise SystemExit(f"a trainer ended with {code}")
                        return done
                if sum(done.values()) >= kills:
                    continue  # to the end, undisturbed
                until = time.perf_counter() + rng.random() * 0.03
                while time.perf_counter() < until:
                    pass
                kind = rng.choice(list(done))
                done[kind] += 1
                writers = writers_of(pid)
                kill(([pid] if kind != "writer" else []) + (writers if kind != "trainer" else []))
                if kind != "writer":
                    os.waitpid(pid, 0)
                    break
        finally:
            os.close(saving)


def main() -> None:
    path, kills, steps, seed = sys.argv[1], *map(int, sys.argv[2:5])
    done = campaign(path, kills, steps, random.Random(seed))
    pid, saving = fork_trainer(path, "reference", steps)
    while os.read(saving, 1 << 16):
        pass
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise SystemExit("the reference run failed")
    store = Store.open(path)
    heads = {run: store.head(run) for run in ("main", "reference")}
    print(
        json.dumps(
            {
                "killed": done,
                "steps": {run: head.step for run, head in heads.items()},
                "roots": {run: head.root.hex() for run, head in heads.items()},
                "losses": {run: head.metrics["loss"] for run, head in heads.items()},
                "lineage": len(store.steps("main")),
            }
        )
    )


if __name__ == "__main__":
    main()
