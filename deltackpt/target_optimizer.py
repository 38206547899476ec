"""Restoring into an optimizer: state made from the checkpoint, matched by parameter name.

``Optimizer.load_state_dict`` does the work and runs its hooks, once; what it would change is put
right afterwards: it casts floating state to the dtype of the parameter, and makes containers anew,
by which a deque loses its length and a string its content. What it cannot make anew is kept from
it. The optimizer keeps the tensors it is given, which nobody else holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deltackpt_store.errors import MismatchError
from torch import nn
from torch.optim import Optimizer

from .containers import items_of, refilled
from .nodes import kind_of, state_of
from .optimizer_fit import is_torchs, moment, other_class
from .params import align, parameters_of
from .paths import segment
from .reading import Step
from .targets import Leaf, Mismatch, Report, Target, is_a, slots_of
from .undo import private_copy
from .views import shape_of


def has_groups(optimizer: Optimizer) -> bool:
    """Whether its state_dict has the form that `torch.optim.Optimizer` gives it."""
    if kind_of(optimizer).state_dict is Optimizer.state_dict:
        return True
    try:
        state: Any = state_of(optimizer)
    except Exception:  # what it is made of cannot be had, but it may take a state
        return True
    return is_a(state, dict) and {"state", "param_groups"} <= state.keys()


class OptimizerTarget(Target):
    """One optimizer. `recorded` and `present` name its parameters in the step and here."""

    keeps = True

    def __init__(self, path: str, keys: tuple[Any, ...], optimizer: Optimizer) -> None:
        self.path = path
        self.keys = keys
        self._optimizer: Any = optimizer
        self._ordinary = kind_of(optimizer).load_state_dict is Optimizer.load_state_dict
        self.trusted = (
            self._ordinary
            and kind_of(optimizer).__setstate__.__module__.startswith("torch.")
            and not self._optimizer._optimizer_load_state_dict_pre_hooks
            and not self._optimizer._optimizer_load_state_dict_post_hooks
        )
        self._recorded: Sequence[str | None] = ()
        self._present: Sequence[str | None] = ()
        self._slots: list[int] = []
        self._left: list[torch.Tensor] = []  # parameters whose state is left alone
        self._before: tuple[Any, Any] | None = None
        self._backup: Any = None

    # looking -------------------------------------------------------------------------------

    def match(
        self,
        step: Step,
        node: Any,
        recorded: Sequence[str | None] | None,
        present: Sequence[str | None],
        report: Report,
    ) -> None:
        """Find out whether the saved state fits, without its tensors' values."""
        if node is None:
            if not step.partial:
                report.missing.append(self.path)
            return
        saved = _without_values(step, node)
        if not _is_state(saved):
            report.mismatched.append(Mismatch(self.path, "not an optimizer", "an optimizer"))
            return
        if recorded is None and any(present):
            report.mismatched.append(
                Mismatch(self.path, "a plain state_dict, which names no parameters", "an optimizer")
            )
            report.hint("give it to load_state_dict of the optimizer yourself (deltackpt.load)")
            return
        self._slots = list(slots_of(node))
        count = sum(len(group["params"]) for group in saved["param_groups"])
        self._recorded = recorded if recorded is not None else [None] * count
        self._present = present
        try:
            aligned = self._aligned(saved)
        except MismatchError as error:
            report.mismatched.append(Mismatch(self.path, error.message, ""))
            report.hint(error.hint)
            self._slots = []
            return
        difference = other_class(self.path, saved, self._optimizer)
        if difference is not None:
            report.mismatched.append(difference)
            report.hint("make an optimizer of the class that was saved")
            self._slots = []
            return
        self._match_state(step, node, aligned, report)
        report.loaded += [step.paths[slot] for slot in self._slots]

    def _aligned(self, state: Mapping[str, Any]) -> dict[str, Any]:
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        return align(state, self._recorded, self._present, groups, path=self.path)

    def _match_state(self, step: Step, node: Any, aligned: dict[str, Any], report: Report) -> None:
        """Moments that are not their parameter's, and state that the checkpoint ought to have.

        The state of a parameter whose moments do not fit is left alone, or all of it, where the
        class has a `load_state_dict` of its own.
        """
        saved: dict[Any, Any] = aligned["state"]
        for number, (index, parameter) in enumerate(self._pairs(aligned)):
            entry: Any = saved.get(index)
            present: Any = self._optimizer.state.get(parameter)
            found = self._moments(step, number, index, entry, parameter)
            if found:
                report.mismatched += found
                self._left.append(parameter)
                below = set(slots_of(node["state"][index]))
                self._slots = [slot for slot in self._slots if slot not in below]
            elif saved and is_a(present, dict):
                report.missing += [
                    f"{self.path}/state/{number}/{segment(key)}"
                    for key in present
                    if not (is_a(entry, dict) and key in entry)
                ]
        if self._left and not self._ordinary:
            self._slots = []

    def _moments(
        self, step: Step, number: int, index: Any, entry: Any, parameter: torch.Tensor
    ) -> list[Mismatch]:
        if not is_a(entry, dict) or nn.parameter.is_lazy(parameter):
            return []
        name = self._present[number] if number < len(self._present) else None
        saved = step.views.get(step.slots[name]) if name in step.slots else None
        present: Any = self._optimizer.state.get(parameter, {})
        own = is_torchs(self._optimizer)
        found = [
            moment(
                f"{self.path}/state/{index}/{key}", key, value, parameter, present.get(key), saved,
                own=own,
            )
            for key, value in entry.items()
            if isinstance(value, torch.Tensor)
        ]  # fmt: skip
        return [mismatch for mismatch in found if mismatch is not None]

    def _pairs(self, aligned: Mapping[str, Any]) -> list[tuple[Any, torch.Tensor]]:
        """(index in the aligned state_dict, live parameter)."""
        indices = [index for group in aligned["param_groups"] for index in group["params"]]
        return list(zip(indices, parameters_of(self._optimizer), strict=True))

    # doing ---------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Let go of the present state, which :meth:`apply` will replace. Cannot be undone."""
        if self._ordinary and self._slots:
            state = self._optimizer.state
            for parameter in set(state).difference(self._left):
                del state[parameter]

    def apply(self, state: Any, *, undo: bool) -> None:
        if self._slots:
            with torch.inference_mode(False):  # training goes on outside of it
                self._apply(state, undo=undo)

    def _apply(self, state: Any, *, undo: bool) -> None:
        optimizer = self._optimizer
        if undo:
            self._before = optimizer.state, optimizer.param_groups
            if not self._ordinary:
                self._backup = private_copy(optimizer.state_dict())
        aligned = self._aligned({"state": {}, **state})  # of no parameter, when none fits
        groups = list(optimizer.param_groups)
        before = optimizer.state
        optimizer.load_state_dict(_loadable(aligned) if self._ordinary else aligned)
        left = set(self._left)
        for parameter in left:
            optimizer.state.pop(parameter, None)
            if parameter in before:
                optimizer.state[parameter] = before[parameter]
        for index, parameter in self._pairs(aligned):
            if index in aligned["state"] and parameter in optimizer.state and parameter not in left:
                entry, saved = optimizer.state[parameter], aligned["state"][index]
                if self._ordinary and is_a(entry, dict) and is_a(saved, dict):
                    entry.update(_withheld(saved, parameter.device))
                optimizer.state[parameter] = _as_saved(entry, saved)
        for group, old in zip(optimizer.param_groups, groups, strict=False):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and isinstance(old.get(key), torch.Tensor):
                    group[key] = value.to(old[key].device)

    def rollback(self) -> None:
        if self._before is None:
            return
        if self._backup is not None:
            self._optimizer.load_state_dict(self._backup)
        else:
            self._optimizer.state, self._optimizer.param_groups = self._before
        self._before = None


def _is_state(saved: Any) -> bool:
    """Whether it has the form of an optimizer's state_dict, which a store may only claim."""
    if not (is_a(saved, dict) and is_a(saved.get("state"), dict)):
        return False
    groups: Any = saved.get("param_groups")
    return is_a(groups, list) and all(
        is_a(group, dict)
        and is_a(group.get("params"), list)
        and all(is_a(index, int, str) for index in group["params"])
        for group in groups
    )


def _without_values(step: Step, node: Any) -> Any:
    """The saved state_dict with meta tensors for its tensors."""
    if isinstance(node, Leaf):
        view = step.views.get(node.slot)
        return step.value(node.slot) if view is None else shape_of(view)
    if is_a(node, dict):
        return {key: _without_values(step, value) for key, value in node.items()}
    if is_a(node, list, tuple):
        return [_without_values(step, item) for item in node]
    return None


def _loadable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` without the entries that `Optimizer.load_state_dict` fails at."""
    state: Mapping[Any, Any] = state_dict["state"]
    lighter = {
        index: {key: value for key, value in entry.items() if _made_anew(value)}
        if is_a(entry, dict)
        else entry
        for index, entry in state.items()
    }
    return {**state_dict, "state": lighter}


def _withheld(entry: Mapping[Any, Any], device: torch.device) -> dict[Any, Any]:
    """The rest of an entry, its tensors where load_state_dict would have put them."""
    rest = {key: value for key, value in entry.items() if not _made_anew(value)}
    return {key: _moved(value, device) for key, value in rest.items()}


def _made_anew(value: Any) -> bool:
    """Whether `Optimizer.load_state_dict` can copy it, by ``type(value)(items)`` if iterable."""
    if is_a(value, torch.Tensor, str, bytes) or not is_a(value, Iterable):
        return True
    if is_a(value, dict):
        return all(map(_made_anew, value.values()))
    plain = kind_of(value) in (list, tuple, deque, set, frozenset)
    return plain and all(map(_made_anew, value))


def _moved(saved: Any, device: torch.device) -> Any:
    if is_a(saved, torch.Tensor):
        return saved.to(device)
    items = items_of(saved)
    if items is None:
        return saved
    return refilled(saved, {key: _moved(item, device) for key, item in items.items()})


def _as_saved(live: Any, saved: Any) -> Any:
    """`live` in the form of `saved`: dtypes, kinds of containers, what they hold besides items.

    What the optimizer has made otherwise of it (a tensor of a number, other keys) stays.
    """
    if is_a(live, torch.Tensor) and is_a(saved, torch.Tensor):
        changed = live.dtype != saved.dtype and live.shape == saved.shape
        return saved.to(live.device) if changed else live
    if is_a(live, str, bytes) and is_a(saved, str, bytes):
        return saved
    old, new = items_of(live), items_of(saved)
    if old is None or new is None or is_a(live, dict) is not is_a(saved, dict):
        return live
    if not is_a(live, dict) and len(old) != len(new):
        return live
    order = [*(key for key in new if key in old), *(key for key in old if key not in new)]
    return refilled(saved, {key: _as_saved(old[key], new.get(key)) for key in order})
