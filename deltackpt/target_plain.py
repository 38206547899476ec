"""Restoring plain values: nested dicts, lists and tuples of tensors and Python values.

The checkpoint says what exists. Dicts, lists and deques of the target are changed in place to hold
exactly the saved entries, in the saved order; entries that the checkpoint lacks are removed. A
tensor (or NumPy array) that is there with the saved dtype and shape is written in place, so that
other references to it see the restored values; an array whose memory cannot hold them, as others
have it too, is replaced, and so is a container at a further one of its places for which something
else was saved. Everything else is replaced by a new value. What cannot change in place (a number,
a tuple, a set, a dict where an OrderedDict was saved, ...) is replaced in the container that holds
it.

A tensor of another dtype or shape is a mismatch and stays as it is, unless one of the two has no
elements: then the saved one takes its place. Live objects inside the containers (modules,
optimizers, ...) stay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from deltackpt_store.values_decode import FACTORIES

from .containers import items_of, places_of, refill, refill_deque, refilled
from .copying import copy_bits, copy_values, repeats_like, same_bits, writable_layout
from .fixed_memory import FIXED, OTHER_VALUES, FixedMemory
from .nodes import MAPPINGS, is_object, kind_of
from .reading import Step
from .targets import (
    ABSENT,
    Leaf,
    Parts,
    Report,
    Target,
    compare,
    is_a,
    is_stateful,
    slots_of,
    spelled,
    spelled_in_full,
)
from .undo import alike

Taken = dict[int, tuple[str, Any]]
"""Id of a live container -> the first of its places, and what was saved there."""


class PlainTarget(Target):
    """The plain values of one top-level entry.

    `result` is what belongs at the entry after a restore: the very value that was there when it
    can change in place.
    """

    keeps = True
    trusted = True

    def __init__(
        self, path: str, keys: tuple[Any, ...], value: Any, *, fixed: FixedMemory, taken: Taken
    ) -> None:
        """`fixed` and `taken` are those of all plain values that are restored together."""
        self.path = path
        self.keys = keys
        self.result: Any = value
        self._value = value
        self._node: Any = None
        self._partial = False
        self._slots: list[int] = []
        self._goals: dict[int, torch.Tensor] = {}
        self._goal_paths: dict[int, str] = {}
        self._written: set[str] = set()  # tensors that are written in place
        self._sparse: set[str] = set()  # sparse tensors that are written in place
        self._left: set[str] = set()  # tensors that stay as they are
        self._fixed_memory = fixed
        self._taken = taken
        self._fixed: set[str] = set()  # tensors that cannot be written, and have to be equal
        self._expanded: list[tuple[str, torch.Tensor]] = []
        self._tensors = 0  # in the target
        self._met = 0  # of them, those for which the checkpoint has something
        self._actions: list[Callable[[], None]] = []
        self.apart: frozenset[int] = frozenset()
        """Ids of arrays that are replaced: their memory cannot hold all that belongs there."""

    # looking -------------------------------------------------------------------------------

    def match(self, step: Step, node: Any, report: Report) -> None:
        """Pair tensors with tensors, and note what differs or has no place any more."""
        if node is None and not step.partial:
            report.missing.append(self.path)
            return
        self._node = node
        self._partial = step.partial
        self._match(step, self._value, node, self.path, report)
        saved = sum(slot in step.views for slot in self._slots)
        if self._tensors and saved and not self._met and not step.partial:
            report.fatal.append(
                f"{self.path}: not one of the {saved} tensors in the checkpoint has a partner "
                f"among the {self._tensors} here"
            )
            report.hint("empty the container first if all of it is to be replaced")

    def _match(self, step: Step, value: Any, node: Any, path: str, report: Report) -> None:
        if node is None or is_stateful(value):
            if not step.partial:
                self._gone(value, path, report)
            return
        if is_a(value, torch.Tensor):
            self._tensors += 1
            self._met += 1
            self._match_tensor(step, value, node, path, report)
            return
        items, saved = items_of(value), items_of(node)
        if items is None or saved is None:
            self._gone(value, path, report)
            self._take(step, node, report)
            return
        if step.partial and not is_a(value, Mapping) and len(items) != len(saved):
            report.differs(path, f"{len(saved)} items", f"{len(items)} items")
            return
        if not step.partial:
            for key, place in places_of(value, path).items():
                if key not in saved:
                    self._gone(items[key], place, report)
        for key, place in places_of(node, path).items():
            if key in items:
                self._match(step, items[key], saved[key], place, report)
            else:
                self._take(step, saved[key], report)

    def _match_tensor(
        self, step: Step, tensor: torch.Tensor, node: Any, path: str, report: Report
    ) -> None:
        view = step.views.get(node.slot) if isinstance(node, Leaf) else None
        live = is_a(tensor, torch.nn.Parameter) or tensor.requires_grad
        if view is None:
            sparse = isinstance(node, Parts) and tensor.layout != torch.strided
            if sparse and live:
                self._sparse.add(path)
            elif not sparse:
                kind = "a sparse tensor or array" if isinstance(node, Parts) else "no tensor"
                report.differs(path, kind, "a tensor")
                self._left.add(path)
        elif (difference := compare(path, view, tensor)) is None:
            if self._fixed_memory.holds(tensor):
                self._fixed.add(path)
                self._take(step, node, report)
                return
            self._goals[view.slot] = tensor
            self._goal_paths[view.slot] = path
            if writable_layout(tensor):
                self._written.add(path)
            else:
                self._expanded.append((path, tensor))
        elif live or not (tensor.numel() == 0 or 0 in view.shape):
            report.mismatched.append(difference)
            self._left.add(path)
        self._take(step, node, report, loaded=path not in self._left)

    def _take(self, step: Step, node: Any, report: Report, *, loaded: bool = True) -> None:
        slots = list(slots_of(node))
        self._slots += slots
        if loaded:
            report.loaded += map(step.paths.__getitem__, slots)

    def _gone(self, value: Any, path: str, report: Report) -> None:
        """Tensors that go because the checkpoint has nothing in their place."""
        if is_object(value) or is_stateful(value):
            return  # no tensor is in it; or it has a target of its own, which says so
        if is_a(value, torch.Tensor):
            self._tensors += 1
            report.removed.append(path)
        items = items_of(value) or {}
        for key, place in places_of(value, path).items():
            self._gone(items[key], place, report)

    def goals(self) -> Mapping[int, torch.Tensor]:
        return self._goals

    def leave(self, slot: int) -> None:
        self._left.add(self._goal_paths[slot])

    def arrays(self, state: Any) -> list[tuple[Any, Any]]:
        """Live arrays that can be written in place, with what is to be written there."""
        return list(_arrays(self._value, state)) if self._node is not None else []

    def inspect(self, state: Any, report: Report) -> None:
        """Work out what :meth:`apply` will do; nothing is changed yet."""
        self._actions = []
        fits = {path for path, _ in self._expanded}
        if self._node is not None and state is not ABSENT:
            self.result = self._merge(self._value, state, self._node, self.path, report, fits)

    def _merge(
        self, value: Any, saved: Any, node: Any, path: str, report: Report, expanded: set[str]
    ) -> Any:
        """What belongs in the place of `value`."""
        if node is None or is_stateful(value) or path in self._left:
            return value
        if is_a(value, torch.Tensor):
            return self._merge_tensor(value, saved, path, report, expanded)
        if is_a(value, np.ndarray) and is_a(saved, np.ndarray):
            if _takes(value, saved) and id(value) not in self.apart:
                self._actions.append(lambda: np.copyto(_raw(value), _raw(saved)))
                return value
            return saved
        old, new = items_of(value), items_of(saved)
        if old is None or new is None or is_a(value, Mapping) is not is_a(saved, Mapping):
            return saved
        merged = new
        if not is_object(value):  # else nothing in it can be written to
            nodes = items_of(node)
            places = places_of(saved if nodes is None else node, path)
            merged = {
                key: item
                if key not in old
                else self._merge(
                    old[key], item, node if nodes is None else nodes.get(key),
                    places.get(key, path), report, expanded,
                )
                for key, item in new.items()
            }  # fmt: skip
        kept = {k: v for k, v in old.items() if k not in merged and (self._partial or _live(v))}
        merged = {**old, **merged} if self._partial else {**merged, **kept}
        return self._put(value, saved, merged, path)

    def _merge_tensor(
        self, value: torch.Tensor, saved: Any, path: str, report: Report, expanded: set[str]
    ) -> Any:
        if path in self._written:
            if saved is not value:  # else it was streamed into it already
                self._actions.append(lambda: copy_bits(value, saved))
            return value
        if path in self._fixed:
            if not same_bits(value, saved):
                report.differs(path, OTHER_VALUES, FIXED)
            return value
        if path in self._sparse:
            if is_a(saved, torch.Tensor) and spelled_in_full(saved) == spelled_in_full(value):
                self._actions.append(lambda: copy_values(value, saved))
            else:
                there = spelled_in_full(saved) if is_a(saved, torch.Tensor) else "no sparse tensor"
                report.differs(path, there, spelled_in_full(value))
            return value
        if path in expanded:
            if repeats_like(value, saved):
                self._actions.append(lambda: copy_bits(value, saved))
                return value
            here = f"an expanded tensor, {spelled(str(value.dtype), value.shape)}"
            report.differs(path, "one with a value for each element", here)
            return value
        return saved

    def _put(self, value: Any, saved: Any, merged: dict[Any, Any], path: str) -> Any:
        """`value` changed (later, by an action) to hold `merged`, or a new container that does."""
        if self._is_taken(value, saved, path):
            return refilled(saved, merged)
        items = list(merged.values())
        if is_a(value, dict) and not _of_other_kind(value, saved):
            if is_a(value, defaultdict) and is_a(saved, defaultdict):
                self._actions.append(lambda: _take_factory(value, saved))
            self._actions.append(lambda: refill(value, merged))
            return value
        if is_a(value, list) and is_a(saved, list):
            self._actions.append(lambda: value.__setitem__(slice(None), items))
            return value
        if is_a(value, deque) and is_a(saved, deque) and value.maxlen == saved.maxlen:
            self._actions.append(lambda: refill_deque(value, items))
            return value
        fits = is_a(value, tuple) and kind_of(value) is kind_of(saved) and len(value) == len(items)
        if fits and all(a is b for a, b in zip(value, items, strict=True)):
            return value
        return refilled(saved, merged)  # which is new

    def _is_taken(self, value: Any, saved: Any, path: str) -> bool:
        """Whether a container that can change is at an earlier place, too, and to hold other items
        there."""
        if not is_a(value, dict, list, deque):
            return False
        first, items = self._taken.setdefault(id(value), (path, saved))
        return first != path and not alike(saved, items)

    # doing ---------------------------------------------------------------------------------

    def apply(self, state: Any, *, undo: bool) -> None:
        """Carry out what :meth:`inspect` found. Cannot fail; may be repeated, not undone."""
        for action in self._actions:
            action()

    def rollback(self) -> None:
        pass


def _takes(value: Any, saved: Any) -> bool:
    """Whether one array can be copied into another."""
    same = (value.dtype, value.shape) == (saved.dtype, saved.shape)
    return same and value.flags.writeable and not value.dtype.hasobject


def _arrays(value: Any, saved: Any) -> Iterator[tuple[Any, Any]]:
    if is_a(value, np.ndarray) and is_a(saved, np.ndarray):
        if _takes(value, saved):
            yield value, saved
    elif not (is_object(value) or is_stateful(value) or is_a(value, torch.Tensor)):
        old, new = items_of(value) or {}, items_of(saved) or {}
        for key, item in new.items():
            if key in old:
                yield from _arrays(old[key], item)


def _raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory by whole elements, so that also the padding between fields is copied."""
    return array.view(f"V{array.dtype.itemsize}") if array.dtype.names else array


def _live(value: Any) -> bool:
    """Whether a live object is or lies in `value`: such an entry is never taken away."""
    if is_object(value):
        return False
    return is_stateful(value) or any(map(_live, (items_of(value) or {}).values()))


def _of_other_kind(value: Any, saved: Any) -> bool:
    """Whether two mappings are of two of the kinds that are saved. (A dict takes what a module's
    state_dict holds.)"""
    kinds = {kind_of(value), kind_of(saved)}
    of_module = hasattr(saved, "_metadata") and kind_of(value) is dict
    return len(kinds) == 2 and kinds <= MAPPINGS.keys() and not of_module


def _take_factory(target: defaultdict[Any, Any], saved: defaultdict[Any, Any]) -> None:
    """A factory that is code was not saved: it stays."""
    if target.default_factory is None or target.default_factory in FACTORIES.values():
        target.default_factory = saved.default_factory
