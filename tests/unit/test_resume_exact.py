"""Prevents a resumed training from drifting away from the one that was never interrupted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from captured import bits
from restoring import Keeper
from torch import nn
from torch.optim import lr_scheduler

from deltackpt.restore import restore_into


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Run:
    """A small training: dropout, NumPy noise, Python flips, BatchNorm, a schedule."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        seed_everything(seed)
        self.model = nn.Sequential(
            nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.ReLU(), nn.Linear(24, 4)
        ).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.dtype = dtype

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self) -> float:
        data = torch.from_numpy(np.random.randn(6, 12)).to(self.dtype)
        if random.random() < 0.5:
            data = -data
        loss = self.model(data).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def picture(self) -> list[bytes]:
        return [bits(t) for t in self.model.state_dict().values()]


@pytest.mark.parametrize("low_memory", [False, True])
def test_resume_at_every_step(keeper: Keeper, low_memory: bool) -> None:
    # case 153, case 37: each time a new process's worth of fresh objects
    run = Run(0)
    losses: list[float] = []
    for step in range(21):
        keeper.save(run.state(), step)
        losses.append(run.step())
    final = run.picture()
    for step in range(1, 21, 1 if not low_memory else 5):
        other = Run(100 + step)
        done = restore_into(keeper.path, other.state(), step=step, low_memory=low_memory)
        assert done is not None
        assert [other.step() for _ in range(step, 21)] == losses[step:]
        assert other.picture() == final


def test_going_back_in_the_same_process(keeper: Keeper) -> None:
    # case 153
    run = Run(0)
    for _ in range(3):
        run.step()
    keeper.save(run.state(), 3)
    expected = [run.step() for _ in range(5)], run.picture()
    for _ in range(3):
        restore_into(keeper.path, run.state())
        assert ([run.step() for _ in range(5)], run.picture()) == expected


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam,
        torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
        torch.optim.RMSprop, torch.optim.Rprop,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True, capturable=False),
        torch.optim.Adafactor,
    ],
)  # fmt: skip
def test_every_optimizer_continues_fresh(
    keeper: Keeper, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    # case 37
    def fresh(seed: int) -> Run:
        run = Run(seed)
        run.optimizer = make(run.model.parameters())  # any will do
        run.schedule = lr_scheduler.StepLR(run.optimizer, 3)
        return run

    run = fresh(0)
    for _ in range(5):
        run.step()
    keeper.save(run.state(), 5)
    expected = [run.step() for _ in range(5)], run.picture()
    other = fresh(1)
    restore_into(keeper.path, other.state())
    assert ([other.step() for _ in range(5)], other.picture()) == expected


class Master:
    """bf16 parameters with fp32 moments and an fp32 update, as mixed-precision trainers do it."""

    def __init__(self, seed: int) -> None:
        seed_everything(seed)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 4)).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self) -> float:
        loss = self.model(torch.randn(6, 12, dtype=torch.bfloat16)).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            state = self.optimizer.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros(p.shape)
                state["master"] = p.detach().float()
            state["step"] += 1
            assert p.grad is not None
            state["exp_avg"].mul_(0.9).add_(p.grad.float(), alpha=0.1)
            state["master"].sub_(0.05 * state["exp_avg"])
            p.data.copy_(state["master"])
        return loss.item()


def test_low_precision_parameters_with_full_precision_state(keeper: Keeper) -> None:
    # case 43: rounding the state to the parameters' dtype shows in the next losses
    run = Master(0)
    for _ in range(4):
        run.step()
    keeper.save({"model": run.model, "optimizer": run.optimizer}, 4)
    expected = [run.step() for _ in range(8)]
    final = [bits(p) for p in run.model.parameters()]
    other = Master(1)
    restore_into(keeper.path, {"model": other.model, "optimizer": other.optimizer})
    assert all(s["master"].dtype == torch.float32 for s in other.optimizer.state.values())
    assert [other.step() for _ in range(8)] == expected
    assert [bits(p) for p in other.model.parameters()] == final


Scheduler = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Scheduler] = {
    "step": lambda o: lr_scheduler.StepLR(o, 4, gamma=0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [3, 4, 9], gamma=0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=14),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.StepLR(o, 5)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_around_their_milestones(keeper: Keeper, name: str) -> None:
    # case 156: at, before and after each milestone
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.5)
        return optimizer, SCHEDULES[name](optimizer)

    def advance(optimizer: torch.optim.Optimizer, schedule: Any, step: int) -> float:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        if name == "plateau":
            schedule.step(1.0 if step < 2 else 2.0)
        else:
            schedule.step()
        return optimizer.param_groups[0]["lr"]

    optimizer, schedule = make()
    rates: list[float] = []
    for step in range(13):
        keeper.save({"optimizer": optimizer, "schedule": schedule}, step)
        rates.append(advance(optimizer, schedule, step))
    assert len(set(rates)) > 1
    for step in range(13):
        other, again = make()
        restore_into(keeper.path, {"optimizer": other, "schedule": again}, step=step)
        assert [advance(other, again, s) for s in range(step, 13)] == rates[step:]


class Sampler:
    """Shuffled ids with the position consumed, as stateful loaders keep it."""

    def __init__(self, size: int, batch: int) -> None:
        self.size, self.batch = size, batch
        self.epoch, self.taken = 0, 0
        self.order: list[int] = []

    def next(self) -> list[int]:
        if self.taken >= len(self.order):
            self.order = torch.randperm(self.size).tolist()
            self.taken = 0
            self.epoch += 1
        ids = self.order[self.taken : self.taken + self.batch]
        self.taken += len(ids)
        return ids

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self.taken, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.taken, self.order = state["epoch"], state["taken"], state["order"]


def test_sample_order_through_two_epochs(keeper: Keeper) -> None:
    # case 157: killed at every batch; none twice, none lost
    seed_everything(0)
    sampler = Sampler(23, 4)
    batches: list[list[int]] = []
    for step in range(12):
        keeper.save({"sampler": sampler}, step)
        batches.append(sampler.next())
    assert sorted(itertools.chain(*batches[:6])) == list(range(23))
    assert sorted(itertools.chain(*batches[6:])) == list(range(23))
    for step in range(12):
        seed_everything(step + 50)
        other = Sampler(23, 4)
        restore_into(keeper.path, {"sampler": other}, step=step)
        assert [other.next() for _ in range(step, 12)] == batches[step:]


def test_dataloader_order_by_its_generator(keeper: Keeper) -> None:
    # case 157: torch's own loader, its generator's state as a plain tensor in the state
    data = torch.arange(20)

    def epochs(generator: torch.Generator, skip: int) -> Iterator[list[int]]:
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(data), batch_size=3, shuffle=True, generator=generator
        )
        for _ in range(2):
            for batch in loader:
                if skip:
                    skip -= 1
                    continue
                yield batch[0].tolist()

    generator = torch.Generator().manual_seed(1)
    keeper.save({"generator": generator.get_state(), "batch": 0}, 0)
    expected = list(epochs(generator, 0))
    for taken in range(14):
        state = {"generator": torch.Generator().get_state(), "batch": taken}
        restore_into(keeper.path, state, only="generator")
        other = torch.Generator()
        other.set_state(state["generator"])
        assert list(epochs(other, taken)) == expected[taken:]
