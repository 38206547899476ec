"""Tensors that something other than an optimizer's step modifies while a save reads them.

A save that meets one cannot be committed. What it costs a training is that one save: the tensors
are remembered, later saves copy them before they return, and the next `step` saves at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import cast

from deltackpt_store.errors import CorruptionError, DeltackptError

_log = logging.getLogger("deltackpt")

LIMIT = 3
"""Torn saves after which nothing is read any more while training goes on."""
_SHOWN = 5


_LOCK_HINT = (
    "call lock() of the checkpointer before modifying it outside of an optimizer's step,"
    " or save with overlap=False"
)


def torn(paths: Sequence[str], hint: str = _LOCK_HINT) -> CorruptionError:
    """The error of a save whose tensors `paths` were modified while it read them."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return CorruptionError(
        f"tensor {paths[0]}{more} was modified while it was being saved",
        kind="torn",
        hint=hint,
        tensor=paths[0],
        tensors=tuple(paths),
    )


def is_torn(error: DeltackptError) -> bool:
    """Whether another save, made right away, may well succeed: this one's tensors moved."""
    return error.kind in ("torn", "relative-failed")


class Restless:
    """What the saves of one checkpointer have met. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self.paths: frozenset[str] = frozenset()
        """Tensors to copy before `save` returns (those whose path names their memory)."""

    @property
    def overlap(self) -> bool:
        """Whether saves may still read anything after they returned."""
        return self._count < LIMIT

    def met(self, step: int, error: DeltackptError) -> None:
        """Learn from the error of a torn save, and log what becomes of it, once per tensor."""
        named = cast("Sequence[str]", error.context.get("tensors") or (_tensor_of(error),))
        with self._lock:
            self._count += error.kind == "torn"
            new = [path for path in named if path and path not in self.paths]
            self.paths |= frozenset(new)
        if not new:
            return
        more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
        _log.warning(
            "step %d was not saved: %s%s changed between save() and the optimizer's next step;"
            " the next step() saves again, and from now on %s before save() returns. Call lock()"
            " before such changes to let saves overlap training",
            step, ", ".join(new[:_SHOWN]), more,
            "what changed so is copied" if self.overlap else "everything is read",
        )  # fmt: skip


def _tensor_of(error: DeltackptError) -> str | None:
    name = error.context.get("tensor") or error.context.get("key")
    return name if isinstance(name, str) else None
