"""A kill campaign: one training run that is SIGKILLed again and again, and one that is not.

    python kill_training.py STORE KILLS STEPS SEED [shadow]

Trainers are forked from this process, which has imported torch but not used it, so that starting
one takes milliseconds. Each saves every step. As soon as a trainer has begun a random save, after
a random moment, the trainer, its writer, or both are killed. A trainer whose writer died goes on,
and one that starts has to find the newest committed step whole. With "shadow" the writer predicts
the optimizer's states. Prints one JSON line: how many were killed, where the runs ended, what
differs between them, and how many saves of each writer of the run that is killed were predicted.
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
from deltackpt_store.codecs import ADAM
from deltackpt_store.errors import NotFoundError
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


def newest(path: str, run: str) -> int:
    """The newest step that is committed, -1 when there is none."""
    try:
        return Store.open(path).head(run).step
    except NotFoundError:
        return -1


def train(path: str, run: str, steps: int, saving: int, *, shadow: bool) -> None:
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
    ckpt = Checkpointer(
        path, state, run=run, every=1, chunk_bytes=4096, on_error="warn", shadow=shadow
    )
    with ckpt:
        committed = newest(path, run)
        last = ckpt.restore()
        first = last.step + 1 if last else 0
        assert first > committed, f"step {committed} was passed over"
        for step in range(first, steps):
            data = batches.next()
            noise = random.random() + float(np.random.rand())
            loss = (model(data) - noise * data.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step(step, metrics={"loss": loss.item()})
            os.write(saving, b"s")


def fork_trainer(path: str, run: str, steps: int, *, shadow: bool) -> tuple[int, int]:
    """(process id, descriptor that a byte arrives at for every save)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        train(path, run, steps, writing, shadow=shadow)
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


def campaign(
    path: str, kills: int, steps: int, rng: random.Random, *, shadow: bool
) -> dict[str, int]:
    done = {"trainer": 0, "writer": 0, "both": 0}
    while True:
        pid, saving = fork_trainer(path, "main", steps, shadow=shadow)
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


def predicted(store: Store) -> list[tuple[int, int]]:
    """Of each writer of main: its commits, and those of them that have predicted chunks."""
    index = store.index()
    adam: set[bytes] = set()
    for name in store.packs.names():
        table = index.entries(name)
        assert table is not None
        adam.update(chunk_id for chunk_id, place in table.items(name) if place.codec == ADAM)
    counts: dict[str, tuple[int, int]] = {}
    for commit in store.commits("main"):
        chunks = store.snapshot(commit).chunks.values()
        found = not adam.isdisjoint(row.tobytes() for table in chunks for row in table)
        total, those = counts.get(commit.writer, (0, 0))
        counts[commit.writer] = total + 1, those + found
    return list(counts.values())


def main() -> None:
    path, kills, steps, seed = sys.argv[1], *map(int, sys.argv[2:5])
    shadow = "shadow" in sys.argv[5:]
    done = campaign(path, kills, steps, random.Random(seed), shadow=shadow)
    pid, saving = fork_trainer(path, "reference", steps, shadow=False)
    while os.read(saving, 1 << 16):
        pass
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise SystemExit("the reference run failed")
    store = Store.open(path)
    heads = {run: store.head(run) for run in ("main", "reference")}
    right = {commit.step: commit.root for commit in store.commits("reference")}
    commits = store.commits("main")
    print(
        json.dumps(
            {
                "killed": done,
                "steps": {run: head.step for run, head in heads.items()},
                "losses": {run: head.metrics["loss"] for run, head in heads.items()},
                "differ": [commit.step for commit in commits if commit.root != right[commit.step]],
                "predicted": predicted(store),
            }
        )
    )


if __name__ == "__main__":
    main()
