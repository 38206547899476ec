"""What a restore finds when it holds a step against the live objects: partners and differences."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from deltackpt_store.errors import InvalidInputError, MismatchError
from deltackpt_store.manifest import TensorView

from .nodes import has_method
from .reading import Step, shown
from .tensors import refuse_unsupported
from .values import dtype_name

_log = logging.getLogger("deltackpt.restore")

_LISTED = 50


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands for one leaf of the step in its outline (see `Step.outline`)."""

    slot: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Stands for a sparse tensor or a large array, which is made of several slots."""

    slots: tuple[int, ...]


def slots_of(node: object) -> Iterator[int]:
    """The slots below a node of an outline."""
    if isinstance(node, Leaf):
        yield node.slot
    elif isinstance(node, Parts):
        yield from node.slots
    elif isinstance(node, Mapping):
        for child in cast("Mapping[Any, Any]", node).values():
            yield from slots_of(child)
    elif node is not None:
        for child in cast("Iterable[Any]", node):
            yield from slots_of(child)


ABSENT: Any = object()
"""What :func:`descend` finds where there is nothing."""


def descend(root: Any, keys: Sequence[Any]) -> Any:
    """What lies under `keys` in nested containers; :data:`ABSENT` when it is not there."""
    node = root
    for key in keys:
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):
            return ABSENT
    return node


def is_a(value: Any, *kinds: type) -> bool:
    """``isinstance`` for values of unknown type, without narrowing them to partly known ones."""
    return isinstance(value, kinds)


def is_stateful(value: object) -> bool:
    """Whether `value` is a live object that takes a state_dict."""
    return has_method(value, "load_state_dict")


# differences ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What is there on both sides and does not fit: what it is in each.

    `target` is empty when `saved` tells it all. `hint`: what may help, besides the usual.
    """

    path: str
    saved: str
    target: str
    hint: str | None = None

    def __str__(self) -> str:
        if not self.target:
            return f"{self.path}: {self.saved}"
        return f"{self.path}: {self.saved} in the checkpoint, {self.target} here"


def spelled(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} of shape {list(shape)}"


def spelled_in_full(tensor: torch.Tensor) -> str:
    """All that must be equal for a tensor to be copied into another."""
    kind = f"{tensor.layout} {tensor.dtype} of shape {list(tensor.shape)}"
    fixed = tensor.layout not in (torch.strided, torch.sparse_coo)
    return f"{kind} with {tensor.values().numel()} values" if fixed else kind


def compare(path: str, view: TensorView, tensor: torch.Tensor) -> Mismatch | None:
    """Why the saved tensor cannot be copied into the live one; None when it can."""
    saved = spelled(view.dtype, view.shape)
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return Mismatch(path, saved, "a tensor made in inference mode, which cannot be written")
    if tensor.layout != torch.strided:
        return Mismatch(path, saved, f"a tensor of layout {tensor.layout}")
    here = spelled(dtype_name(tensor.dtype), tensor.shape)
    if saved != here:
        return Mismatch(path, saved, here)
    try:
        refuse_unsupported(path, tensor)
    except InvalidInputError as error:
        reason = error.message.partition(": it ")[2]
        hint = "give meta tensors memory first (module.to_empty)" if tensor.is_meta else None
        return Mismatch(path, saved, f"a tensor that {reason}" if reason else error.message, hint)
    return None


@dataclass(slots=True)
class Report:
    """Everything that is found about a step and the live objects, before anything is changed.

    `fatal` are faults that no mode forgives; `hints` what may help; `one_sided` the top-level
    entries that only the step or only the live state has.
    """

    loaded: list[str] = field(default_factory=lambda: list[str]())
    missing: list[str] = field(default_factory=lambda: list[str]())
    unexpected: list[str] = field(default_factory=lambda: list[str]())
    mismatched: list[Mismatch] = field(default_factory=lambda: list[Mismatch]())
    removed: list[str] = field(default_factory=lambda: list[str]())
    fatal: list[str] = field(default_factory=lambda: list[str]())
    hints: list[str] = field(default_factory=lambda: list[str]())
    one_sided: set[str] = field(default_factory=lambda: set[str]())

    def hint(self, text: str | None) -> None:
        if text is not None and text not in self.hints:
            self.hints.append(text)

    def differs(self, path: str, saved: str, target: str) -> None:
        """Note a leaf that does not fit, found after it was taken for one that does."""
        below = f"{path}/"
        self.loaded = [p for p in self.loaded if p != path and not p.startswith(below)]
        self.mismatched.append(Mismatch(path, saved, target))

    def check(self, step: Step, *, strict: bool) -> None:
        """Raise `MismatchError` with all of it when there is something to object to."""
        differs = self.missing or self.unexpected or self.mismatched
        if not self.fatal and not (strict and differs):
            return
        lines = [f"step {step.name} does not fit the objects to restore into"]
        lines += [f"  {text}" for text in self.fatal]
        lines += _listed("missing in the checkpoint", _folded(self.missing, self.one_sided))
        lines += _listed("unexpected in the checkpoint", _folded(self.unexpected, self.one_sided))
        lines += _listed("different", list(map(str, self.mismatched)))
        for mismatch in self.mismatched:
            self.hint(mismatch.hint)
        if any(" of shape " in mismatch.target for mismatch in self.mismatched):
            self.hint("give the target the dtype and shape of the checkpoint (nothing is cast)")
        if not self.fatal and not any("strict=False" in hint for hint in self.hints):
            self.hint("strict=False restores what fits, only= a part")
        raise MismatchError(
            "\n".join(lines),
            kind="no-match" if self.fatal else "mismatch",
            hint="; ".join(self.hints) or None,
            run=step.commit.run,
            step=step.commit.step,
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            mismatched=tuple(map(str, self.mismatched)),
        )

    def log(self, step: Step) -> None:
        """Say what a restore left out or took away, now that it is done."""
        for what, names in (
            ("missing in the checkpoint, left as they are", self.missing),
            ("in the checkpoint, but not here", self.unexpected),
            ("different, left as they are", list(map(str, self.mismatched))),
            ("not in the checkpoint, and removed", self.removed),
        ):
            if names:
                _log.warning("step %s: %s: %s", step.name, what, shown(names))


def _folded(names: list[str], entries: Collection[str]) -> list[str]:
    """`names` (paths), but one line for all that lie below one of the `entries`."""
    tops = [name.partition("/")[0] for name in names]
    sizes = Counter(tops)
    return list(dict.fromkeys(
        f"{top} (all of it, {sizes[top]} values)" if top in entries and sizes[top] > 1 else name
        for top, name in zip(tops, names, strict=True)
    ))  # fmt: skip


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = len(names) - _LISTED
    tail = [f"    ... {more} more (all of them in the error's context)"] if more > 0 else []
    return [f"  {what}:", *(f"    {name}" for name in names[:_LISTED]), *tail]


# partners ---------------------------------------------------------------------------------------


class Target:
    """One live object of the state and what the step holds for it.

    `keeps`: the object goes on using the tensors it is given, so they must be its own; otherwise
    they are only copied from. `trusted`: applying it runs no code of the user's.
    """

    path: str
    keys: tuple[Any, ...]
    keeps: bool
    trusted: bool
    _slots: list[int]

    def slots(self) -> Iterable[int]:
        """What it wants of the step; nothing when the step is not to be applied to it."""
        return self._slots

    def goals(self) -> Mapping[int, torch.Tensor]:
        """Slots that are copied into a live tensor (which may overlap itself and others)."""
        return {}

    def leave(self, slot: int) -> None:
        """Do not restore one of the :meth:`goals` after all; asked before :meth:`inspect`."""

    def inspect(self, state: Any, report: Report) -> None:
        """Before anything is changed: find in the rebuilt state what an outline does not show."""

    def apply(self, state: Any, *, undo: bool) -> None:
        """Put the rebuilt state into the object; with `undo`, so that :meth:`rollback` works.

        Every kind of target has its own way.
        """
        raise NotImplementedError

    def rollback(self) -> None:
        """Undo an :meth:`apply`, also one that raised half-way; in the target's own way, too."""
        raise NotImplementedError
