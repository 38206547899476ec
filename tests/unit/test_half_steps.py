"""Prevents a save, made by another thread than the one that trains, from holding half a step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from saving import Opener
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deltackpt.errors import StateError

WAIT = 60


class Halting(torch.optim.SGD):
    """Waits in the middle of its step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.inside.set()
        assert self.go_on.wait(WAIT)
        return super().step(closure)

    def begin(self) -> threading.Thread:
        """Step in a thread of its own; returns when it is inside."""
        thread = threading.Thread(target=self.step)
        thread.start()
        assert self.inside.wait(WAIT)
        return thread


@pytest.fixture
def halting() -> Iterator[Halting]:
    module = nn.Linear(4, 3)
    module(torch.ones(4)).sum().backward()
    optimizer = Halting(module)
    yield optimizer
    optimizer.go_on.set()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("container", [list, deque])
def test_a_save_inside_of_a_step_of_another_thread_is_refused(
    opened: Opener, halting: Halting, overlap: bool, container: Callable[[Any], Any]
) -> None:
    # case 49
    ckpt = opened({"nested": container([{"optimizer": halting}])}, overlap=overlap)
    ckpt.save(0).result(WAIT)
    thread = halting.begin()
    with pytest.raises(StateError, match="inside of the step") as caught:
        ckpt.save(1)
    assert caught.value.kind == "mid-step"
    halting.go_on.set()
    thread.join(WAIT)
    ckpt.save(1).result(WAIT)
    assert ckpt.steps() == [0, 1]


class Beginning:
    """Has the step begin while it is asked for its state."""

    def __init__(self, halting: Halting) -> None:
        self.halting = halting
        self.thread: threading.Thread | None = None

    def state_dict(self) -> dict[str, Any]:
        self.thread = self.thread or self.halting.begin()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # no test restores it


def test_a_step_that_begins_during_the_save_is_noticed_too(
    opened: Opener, halting: Halting
) -> None:
    beginning = Beginning(halting)
    ckpt = opened({"optimizer": halting, "beginning": beginning}, every=10)
    with pytest.raises(StateError, match="inside of the step"):
        ckpt.step(10)
    halting.go_on.set()
    assert beginning.thread is not None
    beginning.thread.join(WAIT)
    handle = ckpt.step(11)  # makes up for it
    assert handle is not None
    handle.result(WAIT)


def test_steps_of_optimizers_outside_of_the_state_do_not_matter(
    opened: Opener, halting: Halting
) -> None:
    module = nn.Linear(2, 2)
    ckpt = opened({"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)})
    thread = halting.begin()
    ckpt.save(0).result(WAIT)
    halting.go_on.set()
    thread.join(WAIT)


def test_checkpointers_may_come_and_go_while_optimizers_step(opened: Opener) -> None:
    """Prevents: `RuntimeError: OrderedDict mutated during iteration` out of a step whose thread
    waits for a save while another thread makes or closes a checkpointer."""
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(4)).sum().backward()
    opened({"optimizer": optimizer}, run="first")
    others: list[Any] = []

    def meanwhile(*step: Any) -> None:
        if others:
            others.pop().close()
        else:
            others.append(opened({"a": 1}, run="second"))

    handle = register_optimizer_step_pre_hook(meanwhile)
    try:
        for _ in range(2):
            optimizer.step()
    finally:
        handle.remove()
    assert not others


def test_a_closed_checkpointer_holds_up_no_step(opened: Opener, halting: Halting) -> None:
    ckpt = opened({"optimizer": halting})
    guard = ckpt._guard
    halting.go_on.set()
    halting.step()
    assert guard.seen
    ckpt.close()
    guard.seen = False
    halting.step()
    assert not guard.seen
