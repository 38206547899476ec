"""Prevents: Ctrl-C in a call of the checkpointer leaves a lock taken; saving and closing hang."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from deltackpt_store.errors import DeltackptError
from saving import steps

import deltackpt
from deltackpt.checkpointer import Checkpointer
from deltackpt.waiting import Condition

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WHERE = (f"{os.path.dirname(deltackpt.__file__)}{os.sep}", threading.__file__)
Call = Callable[[Checkpointer, int], object]
CALLS: dict[str, Call] = {
    "step": lambda ckpt, step: ckpt.step(step),
    "result": lambda ckpt, step: ckpt.save(step).result(60),
    "wait": lambda ckpt, step: (ckpt.save(step), ckpt.wait()),
    "close": lambda ckpt, step: (ckpt.save(step), ckpt.close()),
}


class Interruption:
    """Raises KeyboardInterrupt when this thread comes to the n-th call, or return of one, of
    Python code that takes locks: where a signal handler that raises does it."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "return", "c_return") and frame.f_code.co_filename.startswith(WHERE):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def during(self, call: Callable[[], object]) -> bool:
        """Whether it was raised in `call` (where it may have been swallowed: in a finalizer)."""
        sys.setprofile(self)
        with contextlib.suppress(KeyboardInterrupt):
            call()
        sys.setprofile(None)
        return self.left < 0


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_place_leaves_no_lock_taken(tmp_path: Path, name: str) -> None:
    # case 62
    state, call, at, run = {"x": torch.zeros(100)}, CALLS[name], 0, 0
    while True:
        run += 1
        ckpt = Checkpointer(tmp_path, state, run=f"r{run}", every=1, writer="thread",
                            durable_timeout=20, lock_timeout=20, final=False)  # fmt: skip
        interrupted = Interruption(at).during(lambda c=ckpt: call(c, 1))
        with contextlib.suppress(DeltackptError):
            ckpt.close()
        with Checkpointer(tmp_path, state, run=f"r{run}", writer="thread", durable_timeout=20,
                          lock_timeout=20) as again:  # fmt: skip
            again.save(2)
        assert steps(tmp_path, f"r{run}")[-1] == 2
        if not interrupted:
            return
        at += 1 + at // 5


def test_a_close_after_an_interrupted_one_tells_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpointer(tmp_path / "store", {"x": torch.zeros(100)}, writer="thread", final=False)
    ckpt.save(1).result(60)
    (tmp_path / "store").rename(tmp_path / "away")
    ckpt.save(2)

    def interrupted(timeout: float | None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ckpt, "_wait_idle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
    with pytest.raises(DeltackptError) as caught:
        ckpt.close()
    assert caught.value.kind == "store-vanished"
    ckpt.close()


def test_a_condition_tells_and_times_out() -> None:
    condition, found = Condition(), [False]
    assert not condition.wait_for(lambda: found[0], 0)
    assert not condition.wait_for(lambda: found[0], 0.01)
    told: list[bool] = []
    waiters = [threading.Thread(target=lambda: told.append(condition.wait_for(lambda: found[0])))
               for _ in range(3)]  # fmt: skip
    for waiter in waiters:
        waiter.start()
    with condition.lock, condition.lock:
        found[0] = True
        condition.notify_all()
    for waiter in waiters:
        waiter.join(60)
    assert told == [True] * 3
    assert condition.wait_for(lambda: found[0], 0)
