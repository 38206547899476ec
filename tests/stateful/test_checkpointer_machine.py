"""Checkpointer, restore and load against copies kept in plain dicts: through training, restarts,
forks, going back, full disks and damage, what comes back are the bits that were saved, or an
error."""

from __future__ import annotations

import contextlib
import copy
import errno
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import bits
from damaging import damage, files
from deltackpt_store import DeltackptError, Store
from deltackpt_store.errors import ConflictError, NotFoundError
from deltackpt_store.fileio import FileIO
from deltackpt_store.verify import verify
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import budget
from torch import nn

import deltackpt
from deltackpt import Checkpointer

RUNS = ("main", "fork")
SEEDS = st.integers(0, 2**32)
OPTIONS = st.fixed_dictionaries({
    "chunk_bytes": st.sampled_from([1024, 4096]),
    "codec": st.sampled_from(["auto", "fast", "none"]),
    "overlap": st.booleans(),
})  # fmt: skip


def frozen(value: Any) -> Any:
    """A private copy made of plain values, tensors as their dtype, shape and bits."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), bits(value))
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list):
        return [frozen(item) for item in value]
    return copy.deepcopy(value)


class Objects:
    """What a training script holds: a model with tied weights and buffers, AdamW, a table of rows,
    and plain values whose structure changes."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 24))
        self.model[2].weight = self.model[0].weight
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(self.noise(*parameter.shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "rows": self.noise(700, 4),
            "meta": {"seed": seed, "history": []},
        }

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def train(self, rng: random.Random) -> None:
        if rng.random() < 0.7:
            for parameter in self.model.parameters():
                parameter.grad = self.noise(*parameter.shape)
            self.optimizer.step()
        if rng.random() < 0.7:
            self.state["rows"][rng.randrange(700)] += 1
        if rng.random() < 0.5:
            with torch.no_grad():
                self.model[1].running_mean.add_(self.noise(24))
        if rng.random() < 0.4:
            meta = self.state["meta"]
            meta["history"] = [*meta["history"], {"loss": rng.random()}][-3:]
            meta[f"key{rng.randrange(3)}"] = rng.choice([None, 1, "text", (1, 2.5)])
        if rng.random() < 0.1:
            self.state["rows"] = self.state["rows"].clone()


@dataclass(frozen=True)
class Saved:
    run: str
    number: int
    step: int
    content: Any
    lineage: tuple[Saved, ...] = ()
    """The commits of the same run that it continues, oldest first."""


@contextlib.contextmanager
def bad_disk(call: int, number: int, *, forever: bool) -> Iterator[None]:
    """The `call`-th writing call of this process fails, or all from then on."""
    lock, count = threading.Lock(), 0

    def broken(real: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                failing = count >= call if forever else count == call
            if failing:
                raise OSError(number, "injected")
            return real(*arguments)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create", "write", "sync", "link", "unlink", "sync_directory", "mkdir"):
            patch.setattr(FileIO, name, broken(getattr(FileIO, name)))
        yield


class CheckpointerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="checkpointer-machine-"))
        self.path = self.top / "store"
        self.saved: dict[tuple[str, int], Saved] = {}
        self.current: Saved | None = None  # what the next save continues
        self.ckpt: Checkpointer | None = None

    def teardown(self) -> None:
        try:
            if self.ckpt is not None:
                self.ckpt.close()
            for saved in self.saved.values():
                if saved in (*self.head(saved.run).lineage, self.head(saved.run)):
                    self.check_load(saved)
            assert not verify(Store.open(self.path), level="restore", threads=1).findings
        finally:
            shutil.rmtree(self.top)

    def head(self, run: str) -> Saved:
        """The commit of the run with the largest number."""
        return max((s for s in self.saved.values() if s.run == run), key=lambda s: s.number)

    def steps(self, run: str) -> list[int]:
        if not self.has(run):
            return []
        head = self.head(run)
        steps = [s.step for s in (*head.lineage, head)]
        return [step for i, step in enumerate(steps) if step not in steps[i + 1 :]]

    def has(self, run: str) -> bool:
        return any(saved.run == run for saved in self.saved.values())

    def named(self, run: str, step: int) -> Saved:
        """The commit that a step of the lineage means."""
        head = self.head(run)
        return [s for s in (*head.lineage, head) if s.step == step][-1]

    # opening ------------------------------------------------------------------------------

    @initialize(options=OPTIONS)
    def start(self, options: dict[str, Any]) -> None:
        self.open("main", 1, options)

    def open(self, run: str, seed: int, options: dict[str, Any]) -> None:
        """New objects, as in a new process; nothing is restored yet."""
        if self.ckpt is not None:
            self.ckpt.close()
        self.objects = Objects(seed)
        self.run = run
        self.ckpt = Checkpointer(
            self.path, self.objects.state, run=run, writer="thread", rng=False, final=False,
            threads=1, **options,
        )  # fmt: skip
        self.current = self.head(run) if self.has(run) else None

    @rule(run=st.sampled_from(RUNS), seed=SEEDS, options=OPTIONS, restore=st.booleans(),
          forget=st.booleans())  # fmt: skip
    def restart(
        self, run: str, seed: int, options: dict[str, Any], restore: bool, forget: bool
    ) -> None:
        self.open(run, seed, options)
        if forget:
            shutil.rmtree(self.path / "cache", ignore_errors=True)
        if restore:
            self.check_restored(self.ckpt.restore(), self.head(run) if self.has(run) else None)

    @precondition(lambda self: bool(self.saved))
    @rule(run=st.sampled_from(RUNS), pick=st.integers(0, 99), seed=SEEDS, options=OPTIONS)
    def start_from_another_run(
        self, run: str, pick: int, seed: int, options: dict[str, Any]
    ) -> None:
        sources = [s for s in self.saved.values() if s.run != run]
        if not sources or self.has(run):
            return
        step = self.steps(sources[0].run)[pick % len(self.steps(sources[0].run))]
        self.open(run, seed, options)
        restored = self.ckpt.restore(run=sources[0].run, step=step)
        self.check_restored(restored, self.named(sources[0].run, step))

    # training and saving ------------------------------------------------------------------

    @rule(seed=SEEDS)
    def train(self, seed: int) -> None:
        self.objects.train(random.Random(seed))

    def last_step(self) -> int:
        current = self.current
        return current.step if current is not None and current.run == self.run else -1

    def note(self, number: int, step: int, content: Any) -> Saved:
        """A commit of this session: it continues the newest one with a smaller step."""
        base = self.current
        lineage: tuple[Saved, ...] = ()
        if base is not None and base.run == self.run:
            lineage = tuple(s for s in (*base.lineage, base) if s.step < step)
        saved = Saved(self.run, number, step, content, lineage)
        self.saved[self.run, number] = saved
        return saved

    def next_number(self) -> int:
        return self.head(self.run).number + 1 if self.has(self.run) else 1

    @rule(gap=st.integers(1, 4), count=st.integers(1, 4), seed=SEEDS)
    def save(self, gap: int, count: int, seed: int) -> None:
        """One save, or several in a row of which two are in flight; training goes on at once."""
        rng, handles = random.Random(seed), []
        for _ in range(count):
            step = self.last_step() + gap
            handles.append(self.ckpt.save(step, metrics={"loss": float(step)}))
            self.current = self.note(self.next_number(), step, frozen(self.objects.state))
            self.ckpt.lock()
            self.objects.train(rng)
        for handle in handles:
            handle.result(60)

    @precondition(lambda self: self.last_step() >= 0)
    @rule(back=st.integers(0, 6), overwrite=st.booleans())
    def save_an_earlier_step(self, back: int, overwrite: bool) -> None:
        step = max(self.last_step() - back, 0)
        if not overwrite:
            with pytest.raises(ConflictError):
                self.ckpt.save(step)
            return
        report = self.ckpt.save(step, overwrite=True).result(60)
        assert report.step == step
        self.current = self.note(self.next_number(), step, frozen(self.objects.state))

    @rule(gap=st.integers(1, 3), call=st.integers(1, 40), full=st.booleans(), seed=SEEDS)
    def save_on_a_bad_disk(self, gap: int, call: int, full: bool, seed: int) -> None:
        step, number = self.last_step() + gap, self.next_number()
        content = frozen(self.objects.state)
        acknowledged = True
        with bad_disk(call, errno.ENOSPC if full else errno.EIO, forever=full):
            try:
                self.ckpt.save(step).result(60)
            except DeltackptError:
                acknowledged = False
        store = Store.open(self.path)
        try:
            there = number in store.numbers(self.run)
        except NotFoundError:
            there = False
        assert there or not acknowledged
        if there:
            saved = self.note(number, step, content)
            if acknowledged:
                self.current = saved
        self.objects.train(random.Random(seed))

    # going back ---------------------------------------------------------------------------

    def check_restored(self, restored: Any, expected: Saved | None) -> None:
        if expected is None:
            assert restored is None
            return
        assert (restored.run, restored.number, restored.step) == (
            expected.run, expected.number, expected.step,
        )  # fmt: skip
        assert not restored.skipped
        assert frozen(self.objects.state) == expected.content
        assert self.objects.model[2].weight is self.objects.model[0].weight
        self.current = expected

    @rule(pick=st.none() | st.integers(0, 99))
    def restore(self, pick: int | None) -> None:
        steps = self.steps(self.run)
        if not steps:
            assert self.ckpt.restore() is None
        elif pick is None:
            self.check_restored(self.ckpt.restore(), self.head(self.run))
        else:
            step = steps[pick % len(steps)]
            self.check_restored(self.ckpt.restore(step), self.named(self.run, step))

    def check_load(self, saved: Saved) -> None:
        assert frozen(deltackpt.load(self.path, saved.run, saved.step, threads=1)) == saved.content

    # damage -------------------------------------------------------------------------------

    @precondition(lambda self: bool(self.saved))
    @rule(run=st.sampled_from(RUNS), seed=SEEDS)
    def damage_a_file_and_restore(self, run: str, seed: int) -> None:
        """What is restored is a step of the run with its bits, or it is an error; then the file is
        put back."""
        rng = random.Random(seed)
        victim = rng.choice(files(self.path))
        content = victim.read_bytes()
        if rng.random() < 0.2 or not content:
            victim.unlink()
        else:
            victim.write_bytes(damage(content, rng))
        others = Objects(seed)
        before = frozen(others.state)
        try:
            restored = deltackpt.restore_into(
                self.path, others.state, run=run, rng=False, threads=1,
                low_memory=rng.random() < 0.3,
            )  # fmt: skip
        except DeltackptError as error:
            if error.kind != "incomplete-target":
                assert frozen(others.state) == before
        else:
            if restored is None:  # the run does not exist, or all that is left of it is damaged
                assert frozen(others.state) == before
            else:
                assert frozen(others.state) == self.saved[run, restored.number].content
        finally:
            victim.write_bytes(content)

    # what must hold -----------------------------------------------------------------------

    @invariant()
    def same_history(self) -> None:
        if self.ckpt is None:
            return
        assert self.ckpt.steps() == self.steps(self.run)
        if self.has(self.run):
            saved = self.head(self.run)
            assert Store.open(self.path).head(self.run).number == saved.number
            if saved.number % 3 == 0:
                self.check_load(saved)


CheckpointerMachine.TestCase.settings = budget(15, 20)
TestCheckpointerMachine = CheckpointerMachine.TestCase
