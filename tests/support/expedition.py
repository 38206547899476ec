"""Random operations on one store by real processes, some of which are killed.

Operations are determined by the seed; when exactly a kill falls is not. After each operation the
newest acknowledged step restores bit for bit, and so does everything that is listed.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

from beside import beside
from deltackpt_store.client import WriterClient
from deltackpt_store.errors import DeltackptError
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.retention import Keep
from toy_trainer import CHUNK, SEED, ToyTrainer, check_run


class Expedition:
    """One store's life with real processes in the directory `path`."""

    def __init__(self, seed: str, path: str, operations: int = 8) -> None:
        self.log: list[str] = []
        self.figures = {"operations": 0, "kills": 0}
        self._path = path
        self._operations = operations
        self._chance = random.Random(f"expedition {seed}")
        self._step = 0
        self._acknowledged = -1
        self._trainer: ToyTrainer | None = None

    def go(self) -> None:
        """AssertionError when a promise was broken."""
        try:
            self._train("a training")
            for _ in range(self._operations):
                name = self._chance.choice(("train", "kill_writer", "collect", "compact"))
                operation: Callable[[str], None] = getattr(self, f"_{name}")
                self.log.append(name)
                self.figures["operations"] += 1
                operation(name)
                found = check_run(self._path)
                assert found[-1] >= self._acknowledged, f"{self._acknowledged} is gone: {found}"
        finally:
            self._end()

    def _client(self) -> ToyTrainer:
        if self._trainer is None:
            client = WriterClient(
                self._path, "main", seed=SEED, ring_bytes=64 * 4 * CHUNK, slot_bytes=4 * CHUNK,
                options=WriterOptions(keep=Keep(last=3), lock_timeout=120),
            )  # fmt: skip
            client.ready(120)
            self._trainer = ToyTrainer(client)
        return self._trainer

    def _save(self) -> None:
        self._client().save_now(self._step)
        self._acknowledged = self._step
        self._step += 1

    def _train(self, _: str) -> None:
        for _ in range(self._chance.randrange(1, 5)):
            self._save()

    def _kill_writer(self, _: str) -> None:
        """While a save is in flight, which may come to its end or not."""
        trainer = self._client()
        trainer.save(self._step)
        self._step += 1
        for _ in range(self._chance.randrange(20_000)):
            os.getppid()
        os.kill(trainer.client.writer_pid, signal.SIGKILL)
        self.figures["kills"] += 1
        self._end()

    def _collect(self, name: str) -> None:
        """A process that works beside the training, until it is killed."""
        with beside(self._path, name):
            for _ in range(self._chance.randrange(1, 4)):
                self._save()
        self.figures["kills"] += 1

    _compact = _collect

    def _end(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            try:
                trainer.client.close(120)
            except DeltackptError as error:
                self.log.append(f"closed: {type(error).__name__}")
