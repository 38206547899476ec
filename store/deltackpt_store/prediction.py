"""Predicting Adam states from save to save, when exactly one optimizer step lies between.

What the trainer says of its optimizer (:class:`protocol.AdamTensors`: which extents belong
together, the numbers of the step) only decides what is tried; chunks are proved by their ids. The
writer keeps for every chunk of a group what the optimizer step, as :mod:`coding.adam` takes it,
makes of it: with each new chunk of ``exp_avg`` the others are moved on by one step, and what then
arrives of them is coded as the difference. The chunks from which a replay begins (the *anchor*) are
stored otherwise; after `STEPS` steps a new one follows, so a restore replays no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deltackpt_store import codecs
from deltackpt_store.coding import adam
from deltackpt_store.coding.adam import Betas, Floats, Step
from deltackpt_store.coding.arithmetic import exact
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import AdamTensors
from deltackpt_store.recipes import Coded, Near

STEPS = 8
"""Optimizer steps replayed from one anchor, at most."""

_CHUNK_BYTES = 4 * 1024 * 1024
"""Larger chunks are not predicted: a reader takes 512 MiB of references for a chunk, no more."""

_FIRST_DEPTH = 6  # of references of exp_avg: the others come on top
_DEPTH = 7  # of what is predicted: its rounding to 16 bits comes on top
_SIT_OUT = 16  # anchors for which a tensor that cannot be predicted is left alone, at most

FIRST, SECOND, WEIGHT, LARGEST = range(4)
"""exp_avg, exp_avg_sq, the weight, max_exp_avg_sq."""


class _Chain:
    """One chunk of every tensor of a group: where the replay stands."""

    __slots__ = ("anchors", "at", "firsts", "known", "since", "steps")

    def __init__(self) -> None:
        self.known: dict[int, Floats] = {}
        self.anchors: dict[int, bytes] = {}  # chunk ids by tensor, at the anchor
        self.firsts: list[bytes] = []  # chunk ids of exp_avg from the anchor on
        self.steps: list[Step] = []
        self.since = -1  # number of the save that is the anchor
        self.at = -1  # number of the save that the chain has reached

    def whole(self) -> bool:
        return FIRST in self.anchors and SECOND in self.anchors


class _Tried:
    """How the predictions of one tensor of a group do."""

    __slots__ = ("noise", "rest", "sits_out", "tried", "won")

    def __init__(self) -> None:
        self.tried = self.won = self.noise = 0
        self.rest = 0  # anchors to sit out
        self.sits_out = 1  # saves to sit out when it fails again

    def judge(self) -> bool:
        """Close the books on a save; False when the predictions were of no use."""
        good = not self.tried or 2 * self.won >= self.tried
        if not good:
            self.rest = self.sits_out
            self.sits_out = min(_SIT_OUT, 2 * self.sits_out)
        elif self.won:
            self.sits_out = 1
        self.tried = self.won = 0
        return good


class _Group:
    """One parameter of the optimizer."""

    def __init__(self, tensors: AdamTensors, place: int) -> None:
        self.extents = {FIRST: tensors.first, SECOND: tensors.second}
        if tensors.weight >= 0:
            self.extents[WEIGHT] = tensors.weight
        if tensors.largest >= 0:
            self.extents[LARGEST] = tensors.largest
        self.numbers = tensors
        self.chains: dict[int, _Chain] = {}
        self.tried = {kind: _Tried() for kind in self.extents}
        self.length: int | None = None  # steps since the anchor; None when there is none
        self.limit = STEPS - place % STEPS  # not all store their anchors in the same save
        self.betas: Betas | None = None
        self.step: Step | None = None  # None in the save of an anchor

    def drop(self) -> None:
        self.chains.clear()
        self.length = self.step = None


class Predictor:
    """What the writer of one run knows of its optimizer states. Used by one thread.

    Holds as many bytes as the extents concerned have, and no more than `budget`.
    """

    def __init__(self) -> None:
        self.budget = 0
        self._layout: Layout | None = None
        self._groups: list[_Group] = []
        self._places: dict[int, tuple[_Group, int]] = {}
        self._save = 0
        self._ended = True
        self._late = True  # the learning rate of a step is what the save before it says

    def begin(self, layout: Layout, tensors: Sequence[AdamTensors]) -> None:
        """A save with this layout starts."""
        self._save += 1
        if not self._ended:
            self.forget()
        self._ended = False
        known = [group.numbers for group in self._groups]
        if layout is not self._layout or [*map(_extents, known)] != [*map(_extents, tensors)]:
            self._rebuild(layout, tensors)
        before = [group.numbers for group in self._groups]
        changed = any(old.lr != new.lr for old, new in zip(before, tensors, strict=True))
        good = [self._judge(group) for group in self._groups]
        if changed and not all(good):
            self._late = not self._late
        for group, old, new in zip(self._groups, before, tensors, strict=True):
            self._turn(group, old, new)

    def _judge(self, group: _Group) -> bool:
        """Whether the weight was predicted well; a group with a weight that was not starts over."""
        good = {kind: tried.judge() for kind, tried in group.tried.items() if kind != FIRST}
        if not all(good.values()):
            group.limit = 0
        return good.get(WEIGHT, True)

    def _rebuild(self, layout: Layout, tensors: Sequence[AdamTensors]) -> None:
        self._layout = layout
        self._groups, self._places = [], {}
        left = self.budget
        for place, one in enumerate(tensors):
            group = _Group(one, place)
            specs = [layout.extents[extent] for extent in group.extents.values()
                     if 0 <= extent < len(layout.extents)]  # fmt: skip
            size = sum(spec.nbytes for spec in specs)
            alike = len(specs) == len(group.extents) and len(set(specs)) == 1
            alike &= len(set(group.extents.values())) == len(specs)
            fits = alike and size <= left and specs[0].chunk_length(0) <= _CHUNK_BYTES
            if fits and specs[0].dtype == "float32" and not specs[0].inline:
                left -= size
                for kind, extent in group.extents.items():
                    self._places.setdefault(extent, (group, kind))
            self._groups.append(group)

    def _turn(self, group: _Group, old: AdamTensors, new: AdamTensors) -> None:
        """Decide whether this save continues a replay, stores an anchor, or neither."""
        group.numbers = new
        betas = Betas(new.beta1, new.beta2, new.eps)
        step = _numbers(new, old.lr if self._late else new.lr)
        if new.step != old.step + 1 or step is None:
            group.drop()
        elif group.length is not None and group.length < group.limit and betas == group.betas:
            group.length += 1
            group.step = step
        else:
            if group.length is not None:
                group.limit = STEPS
            for tried in group.tried.values():
                tried.rest = max(0, tried.rest - 1)
            group.length, group.step, group.betas = 0, None, betas

    def end(self) -> None:
        """The save has been committed."""
        self._ended = True

    def forget(self) -> None:
        """Chunks put since the last save may be lost: start over."""
        for group in self._groups:
            group.drop()

    # chunks ------------------------------------------------------------------------------------

    def is_first(self, extent: int) -> bool:
        """Whether it is one of those that others wait for."""
        place = self._places.get(extent)
        return place is not None and place[1] == FIRST

    def waits(self, extent: int, chunk: int) -> bool:
        """Whether the chunk can be predicted as soon as that of exp_avg has arrived."""
        group, kind, chain = self._find(extent, chunk)
        if group is None or chain is None or group.step is None or kind == FIRST:
            return False
        return chain.at == self._save - 1 and kind in chain.known

    def recipes(self, extent: int, chunk: int) -> tuple[Near, ...]:
        """What to try for a chunk; of others than exp_avg, after it has been moved on."""
        group, kind, chain = self._find(extent, chunk)
        if group is None or chain is None or group.step is None or group.betas is None:
            return ()
        tried = group.tried[kind]
        if kind not in chain.known or (tried.rest and kind != FIRST):
            return ()
        near = chain.known[kind].view(np.uint8).data
        if kind == FIRST:
            if chain.at != self._save - 1:
                return ()
            last = (chain.firsts[-1],)
            return (Near(codecs.DELTA, last, near, _FIRST_DEPTH, noise=tried.noise),)
        if chain.at != self._save:
            return ()
        role, needed = _role(kind, chain)
        anchors = tuple(chain.anchors[one] for one in needed)
        front = adam.numbers(group.betas, chain.steps)
        return (Near(codecs.ADAM, (*anchors, *chain.firsts), near, _DEPTH, role=role, front=front),)

    def learned(self, extent: int, coded: Coded) -> None:
        """What became of a recipe."""
        group, kind = self._places[extent]
        tried = group.tried[kind]
        tried.tried += 1
        tried.won += coded.encoded is not None
        # Planes that are noise once are looked at again now and then.
        tried.noise = coded.noise if kind == FIRST and tried.tried % 16 else 0

    def put(self, extent: int, chunk: int, chunk_id: bytes, raw: memoryview) -> None:
        """A chunk has been put: move on, or remember, what follows from it."""
        group, kind, chain = self._find(extent, chunk)
        if group is None or group.length is None:
            return
        if group.step is None:
            self._keep(group, kind, chunk, chunk_id, raw)
        elif kind == FIRST and chain is not None and chain.at == self._save - 1:
            self._move(group, chain, chunk_id, raw)

    def unchanged(self, extent: int, chunk: int) -> None:
        """exp_avg has not changed in a chunk that others wait for: move these on all the same."""
        group, _, chain = self._find(extent, chunk)
        if group is None or chain is None or group.step is None or chain.at != self._save - 1:
            return
        self._move(group, chain, chain.firsts[-1], None)

    def _find(self, extent: int, chunk: int) -> tuple[_Group | None, int, _Chain | None]:
        place = self._places.get(extent)
        if place is None:
            return None, FIRST, None
        group, kind = place
        chain = group.chains.get(chunk)
        if chain is not None and not chain.whole():
            chain = None
        return group, kind, chain

    def _keep(self, group: _Group, kind: int, chunk: int, chunk_id: bytes, raw: memoryview) -> None:
        chain = group.chains.setdefault(chunk, _Chain())
        if chain.since != self._save:
            chain.since = chain.at = self._save
            chain.anchors.clear()
            chain.firsts.clear()
            chain.steps.clear()
        if kind == FIRST:
            chain.firsts.append(chunk_id)
        elif group.tried[kind].rest:
            return
        chain.anchors[kind] = chunk_id
        kept = chain.known.get(kind)
        values = adam.floats(raw)
        if kept is None or len(kept) != len(values):
            chain.known[kind] = values.copy()
        else:
            kept[:] = values

    def _move(self, group: _Group, chain: _Chain, chunk_id: bytes, raw: memoryview | None) -> None:
        assert group.step is not None
        assert group.betas is not None
        chain.at = self._save
        chain.firsts.append(chunk_id)
        chain.steps.append(group.step)
        chain.known = {kind: kept for kind, kept in chain.known.items() if kind in chain.anchors}
        _advance(group.betas, group.step, chain.known, raw)


def _advance(betas: Betas, step: Step, known: dict[int, Floats], raw: memoryview | None) -> None:
    before = known[FIRST]
    after = before if raw is None else adam.floats(raw)
    with exact():
        adam.advance(betas, step, before, after, known[SECOND],
                     weight=known.get(WEIGHT), largest=known.get(LARGEST))  # fmt: skip
    if raw is not None:
        before[:] = after


def _extents(of: AdamTensors) -> tuple[int, int, int, int]:
    return of.first, of.second, of.weight, of.largest


def _role(kind: int, chain: _Chain) -> tuple[int, tuple[int, ...]]:
    """Role of a tensor's chunk, and whose anchors it needs, in the order of the format."""
    if kind == SECOND:
        return adam.SECOND, (SECOND,)
    if kind == LARGEST:
        return adam.LARGEST, (LARGEST, SECOND)
    if LARGEST in chain.anchors:
        return adam.WEIGHT_BY_LARGEST, (WEIGHT, LARGEST, SECOND)
    return adam.WEIGHT, (WEIGHT, SECOND)


def _numbers(of: AdamTensors, lr: float) -> Step | None:
    """The numbers of the step to `of.step` with that learning rate; None when they are not ones."""
    try:
        decay = 1 - lr * of.weight_decay if of.decoupled else 1.0
        step_size = lr / (1 - of.beta1**of.step)
        root = math.sqrt(1 - of.beta2**of.step)
    except (ArithmeticError, ValueError):
        return None
    good = 0 <= of.beta1 < 1 and 0 <= of.beta2 < 1 and of.eps >= 0 and root > 0
    good &= all(map(math.isfinite, (decay, step_size, root, of.eps)))
    return Step(decay, step_size, root) if good else None
