"""The lock between training and staging: whoever modifies saved tensors waits for it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

from deltackpt_store.errors import StateError
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .devices import is_capturing
from .pipeline import SavePipeline
from .tensors import PLAIN

_log = logging.getLogger("deltackpt")

_STEP = "Optimizer.profile_hook_step.<locals>.wrapper"
"""The code in which PyTorch runs every optimizer's step, and the hooks before it."""


class Guard:
    """Has every optimizer of the process wait before it steps, until :meth:`remove`.

    Every one, because an optimizer outside of the saved state may own parameters inside of it.
    Holds no reference to the checkpointer. Does nothing in a forked child.
    """

    def __init__(self, pipeline: SavePipeline) -> None:
        self._pipeline = pipeline
        self._pid = os.getpid()
        self.seen = False
        """An optimizer's step or a call of `lock` was seen: whoever modifies the state waits."""
        self.replayed = False
        """An optimizer's step has been captured in a CUDA graph. Replays of it do not come here."""
        self._threads: set[int] = set()  # those that have stepped an optimizer
        self.removed = False
        _in_force.change(self)

    def lock(self) -> None:
        """Wait until no live tensor is being read; for any thread, never raises for a save."""
        first, self.seen = not self.seen, True
        if os.getpid() == self._pid:
            if first:
                self._pipeline.expect()
            self._pipeline.lock()

    def refuse_half_a_step(self, state: Any) -> None:
        """Raise `StateError` (kind "mid-step") while another thread is inside of the step of one of
        the optimizers in `state`: it holds parameters from before the step and from after it."""
        others = self._threads.difference((threading.get_ident(),))
        if not others:
            return
        optimizers = list(optimizers_in(state))
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        if any(_steps(frames.get(thread), optimizers) for thread in others):
            raise StateError(
                "a save was called while another thread was inside of the step of an optimizer of"
                " the state, of which a half would have been saved",
                kind="mid-step",
                hint="call save and step in the thread that trains, or while that one waits; "
                "every=Every(seconds=...) saves by the clock",
            )

    def remove(self) -> None:
        self.removed = True
        _in_force.change()

    def let_go(self) -> None:
        """A checkpointer was dropped without close: what is in flight still becomes durable."""
        if os.getpid() == self._pid:
            self.remove()
            self._pipeline.abandon()

    def before_step(self) -> None:
        """This thread is about to step an optimizer."""
        if not self.replayed and is_capturing():
            self.replayed = True
            _log.warning(
                "an optimizer's step was captured in a CUDA graph: replays of it cannot wait for a"
                " save, so from now on saves return only when they have read all tensors"
            )
        self._threads.add(threading.get_ident())
        self.lock()


class _InForce:
    """The guards that are not removed, and the one hook by which all of them learn of a step.

    PyTorch goes through its hooks in every thread that steps an optimizer, which fails there when
    one is added or taken away meanwhile, and hooks may wait for long. So this one stays for good.
    """

    def __init__(self) -> None:
        self._guards: tuple[Guard, ...] = ()  # never changed, only replaced
        self._hooked = False
        self.renew_lock()

    def renew_lock(self) -> None:
        """In a forked child, where the thread that holds it may not exist."""
        self._lock = threading.RLock()  # a finalizer may come in the midst of a change

    def change(self, *new: Guard) -> None:
        """Take `new` ones up and leave out those that have been removed. For any thread."""
        with self._lock:
            if new and not self._hooked:
                self._hooked = True
                register_optimizer_step_pre_hook(self.before_step)
            guards = tuple(guard for guard in (*self._guards, *new) if not guard.removed)
            self._guards = guards

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for guard in self._guards:
            if not guard.removed:
                guard.before_step()


_in_force = _InForce()
os.register_at_fork(after_in_child=_in_force.renew_lock)

# As torch.compiler.disable, which would import the compiler: a compiled step calls these as they
# are, before its graph, and does not look inside.
for _function in (Guard.lock, _InForce.before_step):
    _function.__dict__["_torchdynamo_disable"] = True
del _function


def has_optimizer(state: Any) -> bool:
    """Whether a `torch.optim.Optimizer` is among the objects of a state."""
    return any(True for _ in optimizers_in(state))


def optimizers_in(value: Any, depth: int = 4) -> Iterator[Optimizer]:
    """Every `torch.optim.Optimizer` among the objects of a state."""
    if isinstance(value, Optimizer):
        yield value
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, (list, tuple, deque)):
        items = cast("Iterable[Any]", value)
    if depth > 0:
        for item in items:
            if type(item) not in PLAIN:
                yield from optimizers_in(item, depth - 1)


def _steps(frame: FrameType | None, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a thread that is at `frame` is inside of the step of one of `optimizers`."""
    while frame is not None:
        if frame.f_code.co_qualname == _STEP:
            stepped = frame.f_locals.get("self")
            if any(stepped is optimizer for optimizer in optimizers):
                return True
        frame = frame.f_back
    return False
