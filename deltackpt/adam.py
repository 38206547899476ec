"""What the writer learns of Adam and AdamW states, so that it can predict them from step to step.

Found by the names that torch gives (``state/<i>/exp_avg``, ``param_groups/<g>/betas``, ...), so any
optimizer whose state_dict has them counts; the weight is the parameter itself where it is float32,
else a tensor of the optimizer's state that has "master" in its name. All of it is a hint: the
writer proves what it makes of it, and a wrong one costs bytes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from deltackpt_store.manifest import Layout, TensorView
from deltackpt_store.protocol import AdamTensors

from .capture import Capture
from .values import decode

_SCALARS = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "int32": "<i4"}
_GROUP = ("lr", "betas", "eps", "weight_decay")


class _Member(NamedTuple):
    """One parameter: its extents (-1: none) and where its number of steps is."""

    first: int
    second: int
    weight: int
    largest: int
    step: int


class _Group(NamedTuple):
    """The slots of a parameter group's numbers, and its parameters."""

    numbers: dict[str, int]
    members: list[_Member]


class AdamStates:
    """The Adam states of one layout. Used by one thread; holds no tensor."""

    def __init__(self, capture: Capture) -> None:
        self.layout = capture.layout
        self._slots = {path: slot for slot, path in enumerate(self.layout.paths)}
        self._views = {view.slot: view for view in self.layout.tensors}
        self._masters: dict[str, str] = {}
        for path in self.layout.paths:
            above, _, name = path.rpartition("/")
            if "master" in name.lower():
                self._masters.setdefault(above, path)
        self._groups: list[_Group] = []
        for path, owned in capture.optimizers:
            number = 0
            while f"{path}/param_groups/{number}/betas" in self._slots:
                self._add(f"{path}/param_groups/{number}", path, owned, capture)
                number += 1

    def tensors(self, capture: Capture) -> list[AdamTensors]:
        """For the writer, with the numbers as they are in this capture."""
        found: list[AdamTensors] = []
        for group in self._groups:
            numbers = {name: self._value(capture, slot) for name, slot in group.numbers.items()}
            try:
                beta1, beta2 = numbers["betas"]
                same = (
                    float(numbers["lr"]), float(beta1), float(beta2), float(numbers["eps"]),
                    float(numbers["weight_decay"]),
                    bool(numbers.get("decoupled_weight_decay", True)),
                )  # fmt: skip
                for one in group.members:
                    step = float(self._value(capture, one.step))
                    found.append(AdamTensors(*one[:4], step, *same))
            except (TypeError, ValueError):
                continue
        return found

    def _add(self, group: str, path: str, owned: list[TensorView | None], capture: Capture) -> None:
        slots = self._slots
        names = (*_GROUP, "decoupled_weight_decay")
        numbers = {n: slots[f"{group}/{n}"] for n in names if f"{group}/{n}" in slots}
        listed = slots.get(f"{group}/params")
        if not numbers.keys() >= set(_GROUP) or listed is None:
            return
        indices: Any = self._value(capture, listed)
        if not isinstance(indices, list):
            return
        members = [
            member
            for index in indices  # pyright: ignore[reportUnknownVariableType]
            if isinstance(index, int)
            and (member := self._member(f"{path}/state/{index}", group, _item(owned, index)))
        ]
        if members:
            self._groups.append(_Group(numbers, members))

    def _member(self, state: str, group: str, parameter: TensorView | None) -> _Member | None:
        first = self._whole(f"{state}/exp_avg")
        second = self._whole(f"{state}/exp_avg_sq")
        step = self._slots.get(f"{state}/step", self._slots.get(f"{group}/step"))
        if first is None or second is None or step is None or not _alike(first, second):
            return None
        if parameter is None or not _is_whole(parameter, self.layout):
            parameter = self._master(state)
        largest = self._whole(f"{state}/max_exp_avg_sq")
        weight = parameter.extent if parameter is not None and _alike(first, parameter) else -1
        of_largest = largest.extent if largest is not None and _alike(first, largest) else -1
        return _Member(first.extent, second.extent, weight, of_largest, step)

    def _master(self, state: str) -> TensorView | None:
        """A float32 weight that the optimizer keeps itself."""
        path = self._masters.get(state)
        return None if path is None else self._whole(path)

    def _whole(self, path: str) -> TensorView | None:
        view = self._views.get(self._slots.get(path, -1))
        return view if view is not None and _is_whole(view, self.layout) else None

    def _value(self, capture: Capture, slot: int) -> Any:
        """A plain value, or the only element of a small tensor; None for anything else."""
        view = self._views.get(slot)
        if view is None:
            return decode(capture.objects[slot], self.layout.paths[slot])
        dtype, data = _SCALARS.get(view.dtype), capture.inline.get(view.extent)
        if dtype is None or data is None or math.prod(view.shape) != 1:
            return None
        return np.frombuffer(data, dtype, 1, view.offset)[0]


def _item(owned: list[TensorView | None], index: int) -> TensorView | None:
    return owned[index] if 0 <= index < len(owned) else None


def _is_whole(view: TensorView, layout: Layout) -> bool:
    """Whether a float32 tensor is all of its extent."""
    size = 4 * math.prod(view.shape)
    return (
        view.dtype == "float32" and not view.offset and layout.extents[view.extent].nbytes == size
    )


def _alike(one: TensorView, other: TensorView) -> bool:
    return one.shape == other.shape and one.stride == other.stride
