"""A step matched with live objects, and then put into them: all of it or nothing.

Everything that can be found out without changing anything is found out first: keys, dtypes,
shapes, parameter names, shared memory, whether the random generators take their states. Then, in
this order: optimizers and torch's own objects, modules, objects that run code of the user's,
plain values. What may still fail (somebody's ``load_state_dict``) is undone when it does; what
comes after that cannot fail.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from deltackpt_store.errors import CorruptionError, DeltackptError, InvalidInputError, StateError
from deltackpt_store.manifest import TensorView
from deltackpt_store.values import MAX_DEPTH
from torch import nn
from torch.optim import Optimizer

from .array_overlaps import conflicting
from .containers import items_of, places_of
from .copying import overwritten, writable_layout
from .fixed_memory import FixedMemory
from .keys import KeyMap, check_matched, map_key, of_module, unwrapped
from .nodes import Leaves, has_method, is_object
from .options import entries_of
from .params import PARAMS_KEY, optimizer_names
from .paths import key_of, segments
from .reading import Step, matcher
from .target_module import ModuleTarget, flat_state
from .target_object import ObjectTarget
from .target_optimizer import OptimizerTarget, has_groups
from .target_plain import PlainTarget, Taken
from .targets import ABSENT, Leaf, Parts, Report, Target, descend, is_a, is_stateful, slots_of
from .ties import find_ties
from .undo import alike
from .views import dress, rebuild

_log = logging.getLogger("deltackpt.restore")

_PLAIN_OWNER = -1

Memory = Mapping[int, torch.Tensor]
"""Extent -> its verified bytes."""


class Plan:
    """What of `step` goes where in `state`. Making it changes nothing and reads no chunk.

    Raises `MismatchError` with the full list when the two do not fit (see `Report.check`).
    """

    def __init__(
        self,
        step: Step,
        state: Mapping[Any, Any],
        *,
        strict: bool,
        only: str | Iterable[str] | None,
        key_map: KeyMap | None,
    ) -> None:
        self.step = step
        self.report = Report()
        self._state = state
        self._entries = entries = entries_of(state, "state")
        self._strict = strict
        self._plain: list[tuple[Any, PlainTarget]] = []
        self._modules: list[ModuleTarget] = []
        self._optimizers: list[OptimizerTarget] = []
        self._objects: list[Target] = []  # every live object, in the order of the state
        self._at: dict[int, list[Target]] = {}  # those of one live object, which has several places
        self._fixed = FixedMemory()
        taken: Taken = {}
        found = _Found()
        for (key, value), path in zip(entries.items(), segments(entries), strict=True):
            found.walk(value, (key,), path)
            if not is_stateful(value):
                plain = PlainTarget(path, (key,), value, fixed=self._fixed, taken=taken)
                self._plain.append((key, plain))
        root = step.outline(Leaf, Parts)
        self._match_objects(found, root, matcher(only), key_map)
        for key, target in self._plain:
            target.match(step, _selected(step, root.get(key)), self.report)
        self._match_rest(root)
        self._slots = {slot for target in self._targets() for slot in target.slots()}
        self._goals = self._find_goals()
        self._refuse_nothing()
        if self.report.fatal:
            if root.keys().isdisjoint(entries):
                names = dict.fromkeys(path.partition("/")[0] for path in self.report.unexpected)
                self.report.hint(f"the checkpoint calls them {', '.join(map(repr, names))}")
        elif left := [key for key in root if key not in entries]:
            both = [
                path for key, path in zip(entries, segments(entries), strict=True) if key in root
            ]
            self._hint_only(both, segments(left))
        self.report.check(step, strict=strict)

    def _hint_only(self, both: list[str], left: list[str]) -> None:
        """Name `only=` where all that is wrong are top-level entries that are `left` over."""
        report = self.report
        tops = {path.partition("/")[0] for path in report.unexpected}
        if tops and tops.issubset(left) and not report.missing and not report.mismatched:
            only = repr(both[0] if len(both) == 1 else both)
            report.hint(f"only={only} restores just that, strict=False whatever fits")

    def _refuse_nothing(self) -> None:
        """No mode restores nothing at all, lest it looks like a restore."""
        if self.step.selected and not self.report.loaded:
            self.report.fatal.append("nothing in it fits one of them")

    def _match_objects(
        self,
        found: _Found,
        root: Any,
        wanted: Callable[[str], bool],
        key_map: KeyMap | None,
    ) -> None:
        step, report = self.step, self.report
        leaves = Leaves(modules=[m for _, _, m in found.modules],
                        optimizers=[o for _, _, o in found.optimizers])  # fmt: skip
        module_paths = [path for path, _, _ in found.modules]
        present = optimizer_names(
            module_paths, [path for path, _, _ in found.optimizers], leaves, found.tensors
        )
        ordered = sorted(step.paths)
        if key_map is not None:
            keys = {path: _keys_below(step, ordered, path) for path in module_paths}
            check_matched(key_map, keys)
        recorded = _recorded_names(step, key_map, module_paths)
        if key_map is not None:  # wrapper names of either side count no more than in the modules
            recorded, present = _without_wrappers(recorded, present, module_paths)
        for path, keys, value in found.all:
            node = _selected(step, descend(root, keys))
            if step.partial and not isinstance(value, nn.Module) and node is not None:
                _refuse_part(step, ordered, path, node)
            state = flat_state(value, path) if isinstance(value, nn.Module) else None
            if isinstance(value, nn.Module) and state is not None:
                module = ModuleTarget(
                    path, keys, value, state, strict=self._strict, fixed=self._fixed
                )
                module.match(step, node, key_map, wanted, report)
                self._modules.append(module)
                self._objects.append(module)
            elif isinstance(value, Optimizer) and has_groups(value):
                optimizer = OptimizerTarget(path, keys, value)
                optimizer.match(step, node, recorded.get(path), present[path], report)
                self._optimizers.append(optimizer)
                self._objects.append(optimizer)
            else:
                other = ObjectTarget(path, keys, value)
                if path not in present or other.fits(recorded.get(path), present[path], report):
                    other.match(step, node, report)
                self._objects.append(other)
            self._at.setdefault(id(value), []).append(self._objects[-1])

    def _match_rest(self, root: Mapping[Any, Any]) -> None:
        """Top-level entries of the step that the state does not have."""
        self.report.one_sided.update(
            path for key, path in zip(self._entries, segments(self._entries), strict=True)
            if key not in root
        )  # fmt: skip
        for key, node in root.items():
            if key not in self._entries:
                self.report.one_sided.add(segments([key])[0])
                slots = list(slots_of(node))
                names = [self.step.paths[slot] for slot in slots]
                if names or not self.step.partial:
                    self.report.unexpected += names or [segments([key])[0]]

    def _find_goals(self) -> dict[int, torch.Tensor]:
        """Slots that go into a live tensor, less those whose values must be compared first."""
        written = {slot: t for target in self._targets() for slot, t in target.goals().items()}
        self._unsure = find_ties(self.step, written.items())
        goals = {slot: t for slot, t in written.items() if writable_layout(t)}
        for group in self._unsure:
            for slot, _ in group:
                goals.pop(slot, None)
        return goals

    def _untie(self, group: list[tuple[int, torch.Tensor]], memory: Memory) -> None:
        """Report tensors in shared memory that cannot be restored beside the others, and leave
        them as they are, as far as the others do."""
        views = [self.step.views[slot] for slot, _ in group]
        pairs = [
            (tensor, rebuild(view, memory[view.extent]))
            for view, (_, tensor) in zip(views, group, strict=True)
        ]
        if not overwritten(pairs):
            return
        kept: list[int] = []
        for number, (slot, _) in enumerate(group):
            lost = overwritten([pairs[k] for k in (*kept, number)])
            if not lost:
                kept.append(number)
            elif not overwritten([pairs[number]]):  # else its target will say so
                first = self.step.paths[group[kept[lost[0]]][0]]
                self.report.differs(
                    self.step.paths[slot], f"another value than {first!r}", "memory shared by both"
                )
                for target in self._targets():
                    if slot in target.goals():
                        target.leave(slot)

    def _targets(self) -> list[Target]:
        return [*self._objects, *(target for _, target in self._plain)]

    # reading -------------------------------------------------------------------------------

    @property
    def slots(self) -> frozenset[int]:
        """All slots that are wanted."""
        return frozenset(self._slots)

    @property
    def goals(self) -> Mapping[int, torch.Tensor]:
        """Those of them that may be written straight into the given live tensor."""
        return self._goals

    def make_room(self) -> None:
        """Let go of optimizer state that will be replaced; for restores that cannot be undone."""
        for optimizer in self._optimizers:
            optimizer.make_room()

    def build(self, memory: Memory, streamed: Mapping[int, torch.Tensor]) -> Any:
        """The wanted state as nested containers.

        Tensors look at `memory` (extent -> bytes), except those that were `streamed` (slot -> live
        tensor). An object that keeps what it is given gets memory that nobody else has.
        """
        owners: dict[int, int] = {}
        for number, target in enumerate(self._objects):
            if target.keeps:
                owners.update(dict.fromkeys(target.slots(), number))
        for _, target in self._plain:
            written = {slot for slot, t in target.goals().items() if writable_layout(t)}
            owners.update(dict.fromkeys(set(target.slots()) - written, _PLAIN_OWNER))
        users: dict[int, set[int | None]] = {}
        for slot in self._slots:
            if slot in self.step.views and slot not in streamed:
                users.setdefault(self.step.views[slot].extent, set()).add(owners.get(slot))
        private: dict[tuple[int, int], torch.Tensor] = {}

        def tensor(slot: int, view: TensorView) -> torch.Tensor:
            if slot in streamed:
                return streamed[slot]
            owner, data = owners.get(slot), memory[view.extent]
            if owner is None:
                return rebuild(view, data)
            if len(users[view.extent]) > 1:
                data = private.setdefault((owner, view.extent), data.clone())
            return dress(view, rebuild(view, data))

        return self.step.build(tensor, self.slots)

    # applying ------------------------------------------------------------------------------

    def inspect(self, built: Any, memory: Memory) -> None:
        """Check what only values can show. Raises `MismatchError`; nothing has been changed."""
        for group in self._unsure:
            self._untie(group, memory)
        for targets in self._at.values():
            if len(targets) > 1:
                self._leave_other_states(targets, built)
        self._set_arrays_apart(built, memory)
        for target in self._targets():
            state = descend(built, target.keys)
            if state is not ABSENT:
                target.inspect(state, self.report)
        self._refuse_nothing()
        self.report.check(self.step, strict=self._strict)

    def _leave_other_states(self, targets: Sequence[Target], built: Any) -> None:
        """Report places of one live object for which another state was saved than for its first,
        and leave them."""
        first: tuple[str, Any] | None = None
        for target in targets:
            state = descend(built, target.keys)
            if state is ABSENT or not any(True for _ in target.slots()):
                continue
            if first is None:
                first = target.path, state
            elif not alike(state, first[1]):
                self.report.differs(
                    target.path, f"another state than {first[0]!r}", "one object at both places"
                )
                self._objects.remove(target)
                self._modules = [module for module in self._modules if module is not target]

    def _set_arrays_apart(self, built: Any, memory: Memory) -> None:
        """Have arrays replaced that share memory in a way in which what was saved does not fit."""
        arrays: list[tuple[Any, Any]] = []
        for _, target in self._plain:
            state = descend(built, target.keys)
            if state is not ABSENT:
                arrays += target.arrays(state)
        if not arrays:
            return
        views = self.step.views
        tensors = [
            (live, rebuild(views[slot], memory[views[slot].extent])
             if views[slot].extent in memory else None)
            for target in self._targets()
            for slot, live in target.goals().items()
        ]  # fmt: skip
        apart = conflicting(arrays, tensors)
        for _, target in self._plain:
            target.apart = apart

    def apply(self, built: Any, *, undo: bool) -> dict[Any, Any]:
        """Put the state into the live objects; returns the top-level values that were replaced.

        With `undo`, a failure leaves everything as it was. Raises `StateError` naming the part
        that failed (kind "incomplete-target" when it could not be undone).
        """
        first = [t for t in self._objects if t.trusted and not isinstance(t, ModuleTarget)]
        modules: list[Target] = [m for m in self._modules if m.trusted]
        others = [t for t in self._objects if not t.trusted]
        work = [*first, *modules, *others] if others else first
        done: list[Target] = []
        target: Target | None = None
        try:
            for target in work:
                done.append(target)
                self._apply(target, built, undo=undo)
        except BaseException as error:
            left = _roll_back(done) if undo else [t.path for t in done]
            if isinstance(error, Exception):
                assert target is not None
                raise _failure(target, error, left) from error
            raise
        rest: list[Target] = [*(() if others else modules), *(t for _, t in self._plain)]
        self._apply_certain(rest, built)
        values = {key: t.result for key, t in self._plain if t.result is not self._entries[key]}
        if values and isinstance(self._state, MutableMapping):
            self._replace(self._state, values)
        return values

    def _replace(self, state: MutableMapping[Any, Any], values: Mapping[Any, Any]) -> None:
        try:
            state.update(values)
        except Exception as error:
            paths = [target.path for key, target in self._plain if key in values]
            raise StateError(
                "the mapping given as state does not take what was restored:"
                f" {type(error).__name__}: {error}; the target is incomplete",
                kind="incomplete-target",
                hint="mend it, or give a dict",
                option="state",
                incomplete=tuple(paths),
            ) from error

    def _apply(self, target: Target, built: Any, *, undo: bool) -> None:
        state = descend(built, target.keys)
        if state is not ABSENT:
            target.apply(state, undo=undo)

    def _apply_certain(self, targets: Sequence[Target], built: Any) -> None:
        """What nothing stands in the way of; an interrupt waits until it is done."""
        target: Target | None = None
        try:
            for target in targets:
                self._apply(target, built, undo=False)
        except Exception as error:
            assert target is not None
            raise _failure(target, error, [target.path]) from error
        except BaseException:
            for target in targets:  # again from the start: it only copies
                self._apply(target, built, undo=False)
            raise


class _Found:
    """The live objects in a state: (path, keys, object), in the order of the state."""

    def __init__(self) -> None:
        self.all: list[tuple[str, tuple[Any, ...], Any]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []  # in plain containers, by path

    @property
    def modules(self) -> list[tuple[str, tuple[Any, ...], nn.Module]]:
        return [entry for entry in self.all if isinstance(entry[2], nn.Module)]

    @property
    def optimizers(self) -> list[tuple[str, tuple[Any, ...], Optimizer]]:
        return [entry for entry in self.all if isinstance(entry[2], Optimizer)]

    def walk(self, value: Any, keys: tuple[Any, ...], path: str) -> None:
        if len(keys) > MAX_DEPTH:
            raise InvalidInputError(
                f"the state to restore into nests deeper than {MAX_DEPTH} levels at {path!r}",
                hint="flatten it, or break the cycle",
                path=path,
            )
        if is_object(value):
            return
        if is_stateful(value):
            self.all.append((path, keys, value))
        elif is_a(value, torch.Tensor):
            self.tensors.append((path, value))
        elif items := items_of(value):
            for key, place in places_of(value, path).items():
                self.walk(items[key], (*keys, key), place)
        elif has_method(value, "state_dict"):
            raise InvalidInputError(
                f"the object at {path!r} has state_dict, but no load_state_dict to restore with",
                hint="give it one, or leave it out of the state",
                path=path,
            )


def _selected(step: Step, node: Any) -> Any:
    """`node`, or None when it is absent or no part of it is wanted."""
    if node is ABSENT or (step.partial and not any(True for _ in slots_of(node))):
        return None
    return node


def _below(ordered: Sequence[str], path: str) -> Sequence[str]:
    """Those of the `ordered` paths that lie below `path`."""
    start = bisect.bisect_left(ordered, f"{path}/")
    end = bisect.bisect_left(ordered, f"{path}0")  # no character is between / and 0
    return ordered[start:end]


def _refuse_part(step: Step, ordered: Sequence[str], path: str, node: Any) -> None:
    """An optimizer or other object takes its whole state or nothing."""
    whole = (path in step.slots) + len(_below(ordered, path))
    part = sum(1 for _ in slots_of(node))
    if part != whole:
        raise InvalidInputError(
            f"only= selects {part} of the {whole} leaves of {path!r}, which can only be restored "
            "whole",
            kind="part-of-object",
            hint=f'select all of it ("{path}/*") or nothing, or take values from deltackpt.load',
            option="only",
            path=path,
        )


def _keys_below(step: Step, ordered: Sequence[str], path: str) -> list[str]:
    """The keys of the object at `path` in the checkpoint, selected or not."""
    below = sorted(_below(ordered, path), key=step.slots.__getitem__)
    return list(dict.fromkeys(key_of(p[len(path) + 1 :].partition("/")[0]) for p in below))


def _recorded_names(
    step: Step, key_map: KeyMap | None, modules: Sequence[str]
) -> dict[str, list[str | None]]:
    """The parameter names the step holds, as they read after `key_map`."""
    recorded: Any = step.reserved_value(PARAMS_KEY, {}) or {}
    if not (is_a(recorded, dict) and all(map(_are_names, recorded.values()))):
        raise CorruptionError(
            f"step {step.name} is damaged: it has no list of names for an optimizer's parameters",
            kind="structure", run=step.commit.run, step=step.commit.step,
        )  # fmt: skip
    if key_map is None or key_map == "unwrap":
        return recorded

    def renamed(path: str, name: str) -> str:
        return map_key(of_module(key_map, path), name)

    return {path: _renamed(names, modules, renamed) for path, names in recorded.items()}


_Names = dict[str, list[str | None]]


def _without_wrappers(
    recorded: _Names, present: _Names, modules: Sequence[str]
) -> tuple[_Names, _Names]:
    """The names of both sides without what wrappers put into them, where that keeps them apart."""
    there, here = dict(recorded), dict(present)
    for path in recorded.keys() & present.keys():
        both = recorded[path], present[path]
        old, new = (_renamed(names, modules, lambda _, name: unwrapped(name)) for names in both)
        if [len(set(old)), len(set(new))] == [len(set(names)) for names in both]:
            there[path], here[path] = old, new
    return there, here


def _renamed(
    names: Iterable[str | None], modules: Sequence[str], rename: Callable[[str, str], str]
) -> list[str | None]:
    """Names of parameters, in which `rename` (of a module's path and the rest) made the rest."""

    def renamed(name: str | None) -> str | None:
        for path in sorted(modules, key=len, reverse=True):
            if name is not None and name.startswith(f"{path}/"):
                return f"{path}/{rename(path, name[len(path) + 1 :])}"
        return name

    return list(map(renamed, names))


def _are_names(names: Any) -> bool:
    return is_a(names, list) and all(name is None or is_a(name, str) for name in names)


def _roll_back(done: Sequence[Target]) -> list[str]:
    """Undo in reverse; returns the paths of what could not be."""
    left: list[str] = []
    for target in reversed(done):
        try:
            target.rollback()
        except Exception as error:
            _log.error("%s could not be put back: %s", target.path, error)
            left.append(target.path)
    return left


def _failure(target: Target, error: Exception, left: Sequence[str]) -> DeltackptError:
    reason = f"restoring {target.path!r} failed: {type(error).__name__}: {error}"
    if not left:
        return StateError(
            f"{reason}; everything is as it was before",
            kind="apply-failed",
            hint="mend the object, or leave it out with only=",
            path=target.path,
        )
    return StateError(
        f"{reason}; the target is incomplete",
        kind="incomplete-target",
        hint="restore again before using any of it, or make the objects anew",
        path=target.path,
        incomplete=tuple(left),
    )
