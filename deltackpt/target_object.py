"""Restoring into any object with ``state_dict`` and ``load_state_dict``: schedulers, loaders, ...

The object gets a private copy of the saved state, with exact container and key types, in one call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from .containers import items_of, refilled
from .nodes import kind_of
from .reading import Step
from .targets import Mismatch, Report, Target, is_a, slots_of
from .undo import Attributes, private_copy
from .undo import undo as take_back

_log = logging.getLogger("deltackpt.restore")


class ObjectTarget(Target):
    """One stateful object that is neither a plain module nor an optimizer."""

    keeps = True

    def __init__(self, path: str, keys: tuple[Any, ...], value: Any) -> None:
        self.path = path
        self.keys = keys
        self._object = value
        self.trusted = _home(value).startswith("torch.")
        self._slots: list[int] = []
        self._wanted = False
        self._before: tuple[Attributes, Any] | None = None

    def match(self, step: Step, node: Any, report: Report) -> None:
        """Note whether the step has a state for it; what is in there is the object's business."""
        if node is None:
            if not step.partial:
                report.missing.append(self.path)
            return
        self._slots = list(slots_of(node))
        self._wanted = bool(self._slots) or not step.partial
        report.loaded += [step.paths[slot] for slot in self._slots]

    def fits(
        self,
        recorded: Sequence[str | None] | None,
        present: Sequence[str | None],
        report: Report,
    ) -> bool:
        """Whether an optimizer has the saved parameters, in the saved order; ask before `match`.

        Its state_dict is of a form of its own, in which nobody else can match them by name.
        """
        if recorded is None or list(recorded) == list(present):
            return True
        there, here = (", ".join(map(str, names)) for names in (recorded, present))
        report.mismatched.append(Mismatch(self.path, f"parameters {there}", f"parameters {here}"))
        report.hint("build the optimizer over the same named parameters, in the same order")
        return False

    def apply(self, state: Any, *, undo: bool) -> None:
        if not self._wanted:
            return
        present = self._present()
        if undo:
            self._before = Attributes([self._object]), private_copy(present)
        self._object.load_state_dict(_placed(state, present))

    def _present(self) -> Any:
        try:
            return self._object.state_dict()
        except Exception as error:
            _log.warning("%s: its present state cannot be had: %s", self.path, error)
            return None

    def rollback(self) -> None:
        if self._before is not None:
            attributes, state = self._before
            self._before = None
            take_back(attributes, state, self._present, self._object.load_state_dict)


def _home(value: Any) -> str:
    """The module that defines its ``load_state_dict``; "" where that cannot be had."""
    try:
        return str(getattr(value.load_state_dict, "__module__", ""))
    except Exception:  # of a property: applying it will report it
        return ""


def _placed(saved: Any, present: Any) -> Any:
    """`saved` with each tensor on the device where the object has its counterpart now."""
    if is_a(saved, torch.Tensor) and is_a(present, torch.Tensor):
        there = present.device
        return saved if saved.device == there or present.is_meta else saved.to(there)
    new, old = items_of(saved), items_of(present)
    if new is None or old is None or kind_of(saved) is not kind_of(present):
        return saved
    if not is_a(saved, dict) and len(new) != len(old):
        return saved
    return refilled(saved, {key: _placed(value, old.get(key)) for key, value in new.items()})
