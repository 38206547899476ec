"""The lock between training and staging: whoever modifies saved tensors waits for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .devices import is_capturing
from .pipeline import SavePipeline

_log = logging.getLogger("deltackpt")


class Guard:
    """Has every optimizer of the process wait before it steps, until :meth:`remove`.

    A global hook, because an optimizer outside of the saved state may own parameters inside of it.
    Holds no reference to the checkpointer. Does nothing in a forked child.
    """

    def __init__(self, pipeline: SavePipeline) -> None:
        self._pipeline = pipeline
        self._pid = os.getpid()
        self.seen = False
        """An optimizer's step or a call of `lock` was seen: whoever modifies the state waits."""
        self.replayed = False
        """An optimizer's step has been captured in a CUDA graph. Replays of it do not come here."""
        self._handle = register_optimizer_step_pre_hook(self._hook)

    def lock(self) -> None:
        """Wait until no live tensor is being read; for any thread, never raises for a save."""
        first, self.seen = not self.seen, True
        if os.getpid() == self._pid:
            if first:
                self._pipeline.expect()
            self._pipeline.lock()

    def remove(self) -> None:
        self._handle.remove()

    def let_go(self) -> None:
        """A checkpointer was dropped without close: what is in flight still becomes durable."""
        if os.getpid() == self._pid:
            self.remove()
            self._pipeline.abandon()

    def _hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.replayed and is_capturing():
            self.replayed = True
            _log.warning(
                "an optimizer's step was captured in a CUDA graph: replays of it cannot wait for a"
                " save, so from now on saves return only when they have read all tensors"
            )
        self.lock()

    # As torch.compiler.disable, which would import the compiler: a compiled step calls these as
    # they are, before its graph, and does not look inside.
    for _method in (lock, _hook):
        _method.__dict__["_torchdynamo_disable"] = True
    del _method


def has_optimizer(value: Any, depth: int = 4) -> bool:
    """Whether a `torch.optim.Optimizer` is among the objects of a state."""
    if isinstance(value, Optimizer):
        return True
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
    return depth > 0 and any(has_optimizer(item, depth - 1) for item in items)
