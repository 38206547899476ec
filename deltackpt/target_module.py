"""Restoring into an nn.Module: in place, into the tensors it has, whatever their layout.

A module that loads in the ordinary way is written to directly. One with code of its own in the
path (hooks, ``set_extra_state``, an overridden ``load_state_dict`` or ``_load_from_state_dict``)
gets its ``load_state_dict`` called, once, with entries that have been checked before. Buffers of a
submodule with such code may change their shape by it (the observers of quantisation do).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from .copying import (
    copy_bits,
    copy_values,
    duplicate,
    exchange_bits,
    repeats_like,
    same_bits,
    writable_layout,
)
from .fixed_memory import FIXED, OTHER_VALUES, FixedMemory
from .keys import KeyMap, of_module, pair_keys, renaming_hint, wrapping_hint
from .nodes import ask, kind_of, state_of
from .paths import segments
from .reading import Step, shown
from .targets import Leaf, Mismatch, Report, Target, compare, slots_of, spelled_in_full
from .undo import Attributes, alike, private_copy
from .undo import undo as take_back
from .values import dtype_name

_log = logging.getLogger("deltackpt.restore")

# They insert entries that old checkpoints lack; ours are complete or refused.
_PLAIN_LOADERS = tuple(
    cast(Any, kind)._load_from_state_dict for kind in (nn.Module, _NormBase, _InstanceNorm)
)


def flat_state(module: nn.Module, path: str) -> dict[str, Any] | None:
    """The state_dict of the module at `path`, with its own tensors in it; None when it is not flat
    and by name. Raises as :func:`ask`."""
    state: Any = ask(module, path)
    if isinstance(state, dict) and all(isinstance(k, str) for k in cast("dict[Any, Any]", state)):
        return cast("dict[str, Any]", state)
    return None


class ModuleTarget(Target):
    """One module; `state` is its :func:`flat_state`.

    `strict`: buffers of another shape are left to code of their module, which must take all that it
    gives; else they do not fit, and it may take what it likes. What lies in `fixed` memory is
    compared, and not written.
    """

    def __init__(
        self,
        path: str,
        keys: tuple[Any, ...],
        module: nn.Module,
        state: dict[str, Any],
        *,
        strict: bool,
        fixed: FixedMemory,
    ) -> None:
        self.path = path
        self.keys = keys
        self._module = module
        self._strict = strict
        self._state = state
        self._tensors: dict[str, torch.Tensor] = {
            key: value for key, value in state.items() if isinstance(value, torch.Tensor)
        }
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        self._own = {key for key, tensor in self._tensors.items() if id(tensor) in own}
        self.trusted = len(self._own) == len(state) and not _runs_user_code(module)
        self.keeps = not self.trusted
        self._pairs: dict[str, str] = {}
        self._spare: set[str] = set()
        self._slots: list[int] = []
        self._goals: dict[int, torch.Tensor] = {}
        self._sources: dict[int, str] = {}  # the entry in the checkpoint of each goal
        self._shared: set[str] = set()
        self._adapting = _adapting_buffers(module) if strict and not self.trusted else set[str]()
        self._reshaped: list[tuple[str, str]] = []  # entries of another shape than is here
        self._odd: list[tuple[str, str]] = []
        self._expanded: list[tuple[str, str]] = []
        self._fixed_memory = fixed
        self._fixed: list[tuple[str, str]] = []  # entries that cannot be written
        self._undo: list[Callable[[], None]] = []

    # looking -------------------------------------------------------------------------------

    def match(
        self,
        step: Step,
        node: Any,
        key_map: KeyMap | None,
        wanted: Callable[[str], bool],
        report: Report,
    ) -> None:
        """Pair the step's entries with the module's, and note all that differs."""
        paths = dict(zip(self._state, segments(self._state), strict=True))
        places = {key: f"{self.path}/{part}" for key, part in paths.items()}
        if not isinstance(node, dict):
            if node is not None:
                report.mismatched.append(Mismatch(self.path, "not a module", "a module"))
            elif not step.partial:
                report.missing += places.values() or [self.path]
            return
        saved = cast("dict[Any, Any]", node)
        strange = [key for key in saved if not isinstance(key, str)]
        named = {k: saved[k] for k in saved if isinstance(k, str) and (
            not step.partial or any(True for _ in slots_of(saved[k])))}  # fmt: skip
        if step.partial and not named:
            return
        self._pairs = pair_keys(of_module(key_map, self.path), named, self._state, path=self.path)
        spare = [key for key in named if key not in self._pairs]
        absent = set(self._state).difference(self._pairs.values())
        missing = [key for key in self._state if key in absent and wanted(places[key])]
        names = dict(zip(saved, segments(saved), strict=True))
        report.unexpected += [f"{self.path}/{names[key]}" for key in (*spare, *strange)]
        report.missing += [places[key] for key in missing]
        whole = not self._pairs
        report.hint(wrapping_hint(spare, missing) or renaming_hint(spare, missing, whole=whole))
        self._spare = set() if self.trusted else set(spare)
        if not self._pairs and (named or self._state):
            report.fatal.append(
                f"{self.path}: not one of the {len(named)} entries in the checkpoint has a "
                f"partner among the {len(self._state)} here"
            )
            return
        for source, target in list(self._pairs.items()):
            self._match_entry(step, named[source], source, target, places[target], report)
        kept = [named[key] for key in (*self._pairs, *self._spare)]
        self._slots = [slot for entry in kept for slot in slots_of(entry)]
        report.loaded += [step.paths[slot] for slot in self._slots]
        self._find_shared(step, named)

    def _match_entry(
        self, step: Step, node: Any, source: str, target: str, place: str, report: Report
    ) -> None:
        tensor = self._tensors.get(target)
        if tensor is None or nn.parameter.is_lazy(tensor):
            return
        view = step.views.get(node.slot) if isinstance(node, Leaf) else None
        if view is None:
            self._odd.append((source, target))
            return
        difference = compare(place, view, tensor)
        if difference is not None:
            if target in self._adapting and view.dtype == dtype_name(tensor.dtype):
                self._reshaped.append((source, target))
                return
            report.mismatched.append(difference)
            del self._pairs[source]
            return
        if self._fixed_memory.holds(tensor):
            self._fixed.append((source, target))
            return
        if not writable_layout(tensor):
            self._expanded.append((source, target))
        if target in self._own:
            self._goals[view.slot] = tensor
            self._sources[view.slot] = source

    def _find_shared(self, step: Step, named: Mapping[str, Any]) -> None:
        """Entries of the step that look at one extent: swapping contents would mix them up."""
        first: dict[int, str] = {}
        for source in self._pairs:
            for slot in slots_of(named[source]):
                view = step.views.get(slot)
                if view is not None and first.setdefault(view.extent, source) != source:
                    self._shared.update((source, first[view.extent]))

    def goals(self) -> Mapping[int, torch.Tensor]:
        return self._goals

    def leave(self, slot: int) -> None:
        self._pairs.pop(self._sources[slot], None)

    def inspect(self, state: Any, report: Report) -> None:
        for source, target in self._odd:
            value, tensor = state[source], self._tensors[target]
            saved = (
                spelled_in_full(value) if isinstance(value, torch.Tensor) else type(value).__name__
            )
            if saved != spelled_in_full(tensor):
                report.differs(f"{self.path}/{target}", saved, spelled_in_full(tensor))
                del self._pairs[source]
        for source, target in self._expanded:
            if source in self._pairs and not repeats_like(self._tensors[target], state[source]):
                place = f"{self.path}/{target}"
                report.differs(place, "all elements", "an expanded tensor, which has fewer")
                del self._pairs[source]

        for source, target in self._fixed:
            if not same_bits(self._tensors[target], state[source]):
                report.differs(f"{self.path}/{target}", OTHER_VALUES, FIXED)
            self._pairs.pop(source, None)  # nothing is to be written

    # doing ---------------------------------------------------------------------------------

    def apply(self, state: Any, *, undo: bool) -> None:
        if self._pairs and self.trusted:
            self._write(state, undo)
        elif self._pairs:
            self._load(state, undo)

    def _write(self, state: Mapping[str, torch.Tensor], undo: bool) -> None:
        for source, target in self._pairs.items():
            value, tensor = state[source], self._tensors[target]
            if value is tensor:  # streamed into it already
                continue
            if value.layout != torch.strided:
                old = tensor.detach().clone() if undo else None
                copy_values(tensor, value)
                if old is not None:
                    self._undo.append(lambda t=tensor, o=old: copy_values(t, o))
            elif not undo:
                copy_bits(tensor, value)
            elif source in self._shared or not writable_layout(tensor):
                old = duplicate(tensor)
                copy_bits(tensor, value)
                self._undo.append(lambda t=tensor, o=old: copy_bits(t, o))
            else:
                exchange_bits(tensor, value)
                self._undo.append(lambda t=tensor, v=value: copy_bits(t, v))

    def _load(self, state: Mapping[str, Any], undo: bool) -> None:
        entries: OrderedDict[str, Any] = OrderedDict()
        for key in state:
            if key in self._pairs:
                entries[self._pairs[key]] = state[key]
            elif key in self._spare:
                entries[key] = state[key]
        renamed = any(source != target for source, target in self._pairs.items())
        metadata = None if renamed else getattr(state, "_metadata", None)
        if metadata is None:
            metadata = getattr(self._state, "_metadata", None)
        if metadata is not None:
            cast(Any, entries)._metadata = metadata
        if undo:
            self._back_up()
        answer: Any = self._module.load_state_dict(entries, strict=False)
        self._check_taken(answer)
        if self._reshaped:
            now: Any = state_of(self._module)
            for source, target in self._reshaped:
                if source in self._pairs and not alike(now[target], state[source]):
                    raise RuntimeError(f"{target} has not taken the saved shape or values")

    def _check_taken(self, answer: Any) -> None:
        """`RuntimeError` when the module says that it has left entries of its own aside."""
        left = set(getattr(answer, "unexpected_keys", ())).intersection(self._pairs.values())
        if not left:
            return
        told = f"load_state_dict does not take what state_dict gives: {shown(sorted(left))}"
        if self._strict:
            raise RuntimeError(
                f"{told}; define set_extra_state, or a hook that takes it (or restore with"
                " strict=False, which leaves it out)"
            )
        _log.warning("%r has not taken all of its state: %s", self.path, told)

    def _back_up(self) -> None:
        extra: OrderedDict[str, Any] = OrderedDict(
            (key, private_copy(value)) for key, value in self._state.items() if key not in self._own
        )
        attributes = Attributes(self._module.modules())
        self._undo.append(lambda: take_back(attributes, extra, self._extra, self._reload))
        for key in self._own.difference(target for _, target in self._fixed):
            tensor = self._tensors[key]
            if not nn.parameter.is_lazy(tensor):
                old = duplicate(tensor)
                self._undo.append(lambda t=tensor, o=old: _put_back(t, o))

    def _extra(self) -> Any:
        """What the module's state_dict holds besides its own tensors."""
        state: Any = state_of(self._module)
        return OrderedDict((key, value) for key, value in state.items() if key not in self._own)

    def _reload(self, entries: Mapping[str, Any]) -> None:
        self._module.load_state_dict(entries, strict=False)

    def rollback(self) -> None:
        while self._undo:
            self._undo.pop()()


def _put_back(tensor: torch.Tensor, old: torch.Tensor) -> None:
    if tensor.shape != old.shape:
        tensor.resize_(old.shape)
    copy_values(tensor, old)


def _adapting_buffers(module: nn.Module) -> set[str]:
    """Keys of buffers whose module has code of its own for loading them."""
    named = cast(Any, module).named_modules(remove_duplicate=False)
    return {
        f"{name}.{key}" if name else key
        for name, child in named
        if kind_of(child)._load_from_state_dict not in _PLAIN_LOADERS
        for key in child._buffers
    }


def _runs_user_code(module: nn.Module) -> bool:
    """Whether loading a state_dict does anything but copy tensors."""
    if cast(Any, type(module)).load_state_dict is not nn.Module.load_state_dict:
        return True
    return any(_special(child) for child in module.modules())


def _special(module: Any) -> bool:
    kind = cast(Any, type)(module)
    return bool(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or kind._load_from_state_dict not in _PLAIN_LOADERS
        or kind.set_extra_state is not nn.Module.set_extra_state
        or not {"load_state_dict", "_load_from_state_dict"}.isdisjoint(module.__dict__)
    )
