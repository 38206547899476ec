"""SIGKILL of the writer, of the trainer, and of both, at random moments of a save loop.

After each one, with no repair: the newest commit restores bit for bit, every acknowledged step is
there, and the next writer starts at once. Seeds are fixed, so that a failure can be repeated.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltackpt_store.client import WriterClient
from deltackpt_store.errors import DeltackptError, NotFoundError, StateError, WriterError
from deltackpt_store.protocol import Committed, WriterOptions
from deltackpt_store.store import Store
from processes import ended
from toy_trainer import CHUNK, SEED, ToyTrainer, check_run, read_arrays, state_at

SCRIPT = Path(__file__).parents[1] / "support" / "toy_trainer.py"
ROUNDS = 50
OPTIONS = WriterOptions(lock_timeout=60)
Figure = Callable[[str, int], None]


def temporary_files(path: str) -> list[str]:
    return [f for _, _, names in os.walk(path) for f in names if f.startswith(".tmp-")]


def newest_is_exact(path: str) -> int | None:
    """The newest step, proven bit for bit; None when nothing was ever committed."""
    store = Store.open(path)
    try:
        head = store.head("main")
    except NotFoundError:
        return None
    assert read_arrays(store, head) == state_at(head.step)
    return head.step


# the writer dies -----------------------------------------------------------------------------


class Killer:
    """Kills the writer just before or after one of the trainer's calls to its client."""

    def __init__(self, client: WriterClient, at: int, spin: int) -> None:
        self.pid = client.writer_pid
        self.left = at
        self.spin = spin
        for name in ("begin", "acquire_slot", "slot", "finish", "result"):
            setattr(client, name, self.wrapped(getattr(client, name)))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                for _ in range(self.spin):  # lets the writer come a random way further
                    os.getppid()
                os.kill(self.pid, signal.SIGKILL)
            return call(*args, **kwargs)

        return counted


def test_writer_killed_at_random_protocol_points(tmp_path: Path, figure: Figure) -> None:
    # case 66, case 130, case 88
    chance = random.Random(20)
    path = str(tmp_path / "store")
    acknowledged: int | None = None
    died = 0
    for _ in range(ROUNDS):
        outcomes: list[Any] = []
        client = WriterClient(
            path, "main", seed=SEED, ring_bytes=3 * 4 * CHUNK, slot_bytes=4 * CHUNK,
            options=OPTIONS, on_result=lambda save, outcome, to=outcomes: to.append(outcome),
        )  # fmt: skip
        try:
            client.ready(60)
            head = newest_is_exact(path)
            assert acknowledged is None or (head is not None and head >= acknowledged)
            Killer(client, at=chance.randrange(1, 60), spin=chance.randrange(20_000))
            trainer = ToyTrainer(client)
            step = 0 if head is None else head + 1
            last = step + 6
            while step < last:
                save = trainer.save(step)
                if chance.random() < 0.5:
                    client.result(save, 60)
                client.wait_room(60)
                step += 1
            client.result(save, 60)
        except WriterError:
            assert "SIGKILL" in str(client.error)
            assert ended(client.writer_pid)
            died += 1
        finally:
            client.close(60)  # returns: nothing waits for the dead
        assert client.pending == 0
        steps = [outcome.step for outcome in outcomes if isinstance(outcome, Committed)]
        acknowledged = max(steps, default=acknowledged)
        for outcome in outcomes:
            assert isinstance(outcome, (Committed, WriterError)), outcome
    assert died >= ROUNDS // 2
    figure("kills survived, at random times", died)
    steps = check_run(path)
    assert steps[-1] >= (acknowledged or 0)


def test_every_caller_is_woken_by_the_writers_death(tmp_path: Path) -> None:
    client = WriterClient(
        tmp_path / "store", "main", seed=SEED, ring_bytes=1, slot_bytes=4 * CHUNK, options=OPTIONS
    )
    client.ready(60)
    os.kill(client.writer_pid, signal.SIGSTOP)
    trainer = ToyTrainer(client)
    save = trainer.begin(0)
    os.kill(client.writer_pid, signal.SIGKILL)
    with pytest.raises(WriterError):
        trainer.stage(save, state_at(0))
    with pytest.raises(WriterError):
        client.result(save, 60)
    client.abort(save)
    client.close(60)
    with pytest.raises(StateError):
        client.view(0)


# the trainer dies ----------------------------------------------------------------------------


class Job:
    """The toy trainer as a process."""

    def __init__(self, path: str, **config: Any) -> None:
        config = {"store": path, "first": 0, "last": 10_000, "ring_bytes": 16 * CHUNK, **config}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(config)], stdout=subprocess.PIPE, text=True
        )
        words = self.line().split()
        assert words[0] == "ready"
        self.writer = int(words[1])
        self.acknowledged: list[int] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def watch(self, lines: int) -> None:
        for _ in range(lines):
            self.note(self.line())

    def note(self, line: str) -> None:
        assert not line.startswith("failed"), line
        if line.strip():
            self.acknowledged.append(int(line))

    def finish(self) -> int:
        """Collect what it still said; returns its exit code."""
        rest, _ = self.process.communicate(timeout=60)
        for line in rest.splitlines(keepends=True):
            if line.endswith("\n"):
                self.note(line)
        return self.process.returncode


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(path: str, **config: Any) -> Job:
        jobs.append(Job(path, **config))
        return jobs[-1]

    yield start
    for each in jobs:
        each.process.kill()
        each.process.communicate()


def test_trainer_killed_at_random_moments(
    tmp_path: Path, job: Callable[..., Job], figure: Figure
) -> None:
    # case 66, case 61, case 130
    chance = random.Random(21)
    path = str(tmp_path / "store")
    known = -1
    for _ in range(ROUNDS):
        trainer = job(path)
        trainer.watch(chance.randrange(0, 6))
        for _ in range(chance.randrange(30_000)):
            os.getppid()
        trainer.process.kill()
        assert trainer.finish() == -signal.SIGKILL
        assert ended(trainer.writer)  # by itself, and it leaves nothing behind
        assert temporary_files(path) == []
        head = newest_is_exact(path)
        known = max([known, *trainer.acknowledged])
        assert (-1 if head is None else head) >= known
    assert check_run(path)[-1] >= known
    figure("kills survived, at random times", ROUNDS)


def test_both_killed_at_random_moments(
    tmp_path: Path, job: Callable[..., Job], figure: Figure
) -> None:
    # case 66
    chance = random.Random(22)
    path = str(tmp_path / "store")
    known = -1
    for _ in range(ROUNDS):
        trainer = job(path)
        trainer.watch(chance.randrange(0, 6))
        for _ in range(chance.randrange(30_000)):
            os.getppid()
        victims = [trainer.process.pid, trainer.writer]
        chance.shuffle(victims)
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # the writer has already followed its trainer
                assert pid == trainer.writer
        trainer.process.wait(60)
        for line in trainer.process.stdout or []:
            if line.endswith("\n") and not line.startswith("failed"):
                trainer.note(line)
        assert ended(trainer.writer)
        head = newest_is_exact(path)
        known = max([known, *trainer.acknowledged])
        assert (-1 if head is None else head) >= known
    assert check_run(path)[-1] >= known
    figure("kills survived, at random times", ROUNDS)


def test_what_was_handed_over_is_committed_without_the_trainer(
    tmp_path: Path, job: Callable[..., Job]
) -> None:
    # The trainer dies right after Finish was sent: the save is complete, so it must exist.
    path = str(tmp_path / "store")
    trainer = job(path, die_after_finish=3)
    assert trainer.finish() == -signal.SIGKILL
    assert ended(trainer.writer)
    assert check_run(path) == [0, 1, 2, 3]


def test_what_was_not_handed_over_leaves_nothing(tmp_path: Path, job: Callable[..., Job]) -> None:
    # case 54: the tensors are all there, the rest is not
    path = str(tmp_path / "store")
    trainer = job(path, die_before_finish=3, ring_bytes=60 * CHUNK)
    assert trainer.finish() == -signal.SIGKILL
    assert ended(trainer.writer)
    assert check_run(path) == [0, 1, 2]
    assert temporary_files(path) == []
    packs = {f.removesuffix(".pack") for _, _, names in os.walk(f"{path}/packs") for f in names}
    store = Store.open(path)
    needed = {pack for c in store.lineage("main") for pack in store.snapshot(c).packs}
    assert packs == needed


@pytest.mark.parametrize("how", ["fork", "leak"])
def test_a_child_that_outlives_the_trainer_does_not_keep_the_writer(
    tmp_path: Path, job: Callable[..., Job], how: str
) -> None:
    # A data-loader worker (or a child started by other code, holding every descriptor) lives on.
    path = str(tmp_path / "store")
    trainer = job(path, child=how, ring_bytes=60 * CHUNK)
    child = int(trainer.line())
    try:
        trainer.watch(2)
        trainer.process.kill()
        trainer.process.wait(60)
        assert ended(trainer.writer)
        assert not ended(child, 0)
        with WriterClient(
            path, "main", seed=SEED, ring_bytes=16 * CHUNK, slot_bytes=4 * CHUNK,
            options=WriterOptions(lock_timeout=0),
        ) as client:  # fmt: skip
            client.ready(60)
            newest_is_exact(path)
    finally:
        os.kill(child, signal.SIGKILL)


def test_thread_mode_killed_at_random_moments(
    tmp_path: Path, job: Callable[..., Job], figure: Figure
) -> None:
    # case 66, for writer="thread": trainer and writer die together
    chance = random.Random(23)
    path = str(tmp_path / "store")
    known = -1
    for _ in range(8):
        trainer = job(path, mode="thread")
        trainer.watch(chance.randrange(0, 6))
        for _ in range(chance.randrange(30_000)):
            os.getppid()
        trainer.process.kill()
        trainer.finish()
        head = newest_is_exact(path)
        known = max([known, *trainer.acknowledged])
        assert (-1 if head is None else head) >= known
    assert check_run(path)[-1] >= known
    figure("kills survived, at random times", 8)


def test_a_stopped_writer_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    client = WriterClient(
        tmp_path / "store", "main", seed=SEED, ring_bytes=60 * CHUNK, slot_bytes=4 * CHUNK,
        options=OPTIONS,
    )  # fmt: skip
    trainer = ToyTrainer(client)
    trainer.save_now(0)
    os.kill(client.writer_pid, signal.SIGSTOP)
    save = trainer.save(1)
    with pytest.raises(DeltackptError) as info:
        client.result(save, 0.05)
    assert info.value.kind == "timeout"
    os.kill(client.writer_pid, signal.SIGKILL)
    client.close(60)
    assert newest_is_exact(str(tmp_path / "store")) == 0
