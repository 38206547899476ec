"""What compaction is to rewrite, decided from one marking. Reads no chunk and writes nothing.

Three kinds of work, each a set of chunks:

``own``     chunks of a run's new base that every record codes against something else: they get a
            record without references. A chunk coded against another one of the same step stays.
``recode``  chunks of other listed steps whose record needs an old base, a chunk that no listed
            step names: they are coded against the chunk of the new base at their place. Those
            that follow from several chunks only where their share of what goes is larger than a
            chunk: predicted ones are small, and would not be when coded anew.
``copy``    records that packs to be got rid of hold alone: packs of which less than a bound is
            needed, and many small ones. They move as they are.

What is rewritten is decided by what *any* record of a chunk offers, not by the record chosen at
present: a plan made after a compaction that was killed finds its work done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.catalogue import Bools, Catalogue, Ints
from deltackpt_store.mark import Marking
from deltackpt_store.pack import ENTRY_BYTES, RECORD_BYTES
from deltackpt_store.step_groups import Shape, StepGroups

SMALL_BYTES = 4 * 1024 * 1024
"""Packs up to this size are merged..."""
MANY = 16
"""...when there are this many of them."""

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Recode:
    """Chunks to recode, by family: those that need one old base chunk at one place.

    Parallel arrays, sorted by `base`, then `old`, then from the newest chunk to the oldest.
    """

    groups: Ints
    base: Ints
    """Group of the new base chunk."""
    old: Ints
    """Group of the old base chunk."""
    stored: Ints
    """Bytes that the chunk takes at present."""

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, and which packs to get rid of then."""

    own: Ints = field(default_factory=lambda: _NONE)
    """Groups, in the order of the new bases."""
    recode: Recode = field(default_factory=lambda: Recode(_NONE, _NONE, _NONE, _NONE))
    copy: Ints = field(default_factory=lambda: _NONE)
    """Rows, in the order of packs and offsets."""
    victims: frozenset[str] = frozenset()
    dtypes: NDArray[np.str_] = field(default_factory=lambda: np.empty(0, np.str_))
    """Of each group."""

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to write."""
        return not (len(self.own) or len(self.recode) or len(self.copy))


class Survey:
    """One marking with what its listed steps name. `listed` and `plain` are by group."""

    def __init__(self, marking: Marking, steps: Iterable[StepGroups]) -> None:
        catalogue = self.catalogue = marking.catalogue
        self.marking = marking
        self.listed = self.of_steps(steps)
        self._kept: Ints = np.flatnonzero(marking.kept)
        self._kept_groups = marking.groups_of(self._kept)
        self.row_of: Ints = np.zeros(catalogue.groups, np.int64)
        self.row_of[self._kept_groups] = self._kept
        self._of_coded = marking.groups_of(catalogue.coded.rows.astype(np.int64))
        records = np.diff(catalogue.start.astype(np.int64))
        coded = np.bincount(self._of_coded, minlength=catalogue.groups)
        self.plain: Bools = coded < records

    def of_steps(self, steps: Iterable[StepGroups]) -> Bools:
        """Of each group whether one of the steps has it."""
        result = np.zeros(self.catalogue.groups, np.bool_)
        for step in steps:
            result[step.groups[step.groups >= 0]] = True
        return result

    def with_needed(self, groups: Bools) -> Bools:
        """The groups, and all that the records chosen for them are coded against."""
        while True:
            more = groups.copy()
            more[self.marking.needs_of(self.rows(groups))[1]] = True
            if np.array_equal(more, groups):
                return groups
            groups = more

    def rows(self, wanted: Bools) -> Ints:
        """The chosen records of the groups that `wanted` says."""
        return self._kept[wanted[self._kept_groups]]

    def self_contained(self, step: StepGroups) -> Bools:
        """Of each group whether it has a record that needs nothing outside of the step.

        What a record within the step needs must be stored without references itself.
        """
        return self._having(self.of_steps([step]) & self.plain)

    def lacking(self, step: StepGroups) -> Bools:
        """Of each group of the step whether it must be stored by itself for the step to be whole.

        A chunk that is coded against others of the step need not be, when these are or will be.
        """
        inside = self.of_steps([step])
        bound_outside = inside & ~self._having(inside)
        return inside & ~self._having(inside & (self.plain | bound_outside))

    def free(self) -> Bools:
        """Of each group whether it has a record that needs listed chunks only."""
        return self._having(self.listed)

    def _having(self, allowed: Bools) -> Bools:
        result = self.plain.copy()
        result[self._of_coded[self.marking.held_by(allowed)]] = True
        return result

    def reads(self, groups: Ints) -> tuple[int, int]:
        """Packs, and stored bytes, that reading these groups takes with all they need."""
        catalogue = self.catalogue
        wanted = np.zeros(catalogue.groups, np.bool_)
        wanted[groups[groups >= 0]] = True
        rows = self.rows(self.with_needed(wanted))
        return len(np.unique(catalogue.pack_of(rows))), int(catalogue.stored[rows].sum())

    def delta_share(self, step: StepGroups) -> float:
        """Stored bytes of the step's coded chunks by those of what they are coded against."""
        marking, catalogue = self.marking, self.catalogue
        rows = self.rows(self.of_steps([step]))
        where, needs = marking.needs_of(rows)
        if not len(needs):
            return 0.0
        base = np.zeros(catalogue.groups, np.bool_)
        base[needs] = True
        taken = int(catalogue.stored[self.rows(base)].sum())
        return int(catalogue.stored[rows[np.unique(where)]].sum()) / max(1, taken)


def kept_rows(marking: Marking, wanted: Bools) -> Ints:
    """The chosen records of the groups that `wanted` says."""
    rows = np.flatnonzero(marking.kept)
    return rows[wanted[marking.groups_of(rows)]]


def make_plan(
    survey: Survey,
    steps: Iterable[StepGroups],
    bases: Mapping[str, StepGroups],
    *,
    min_live_share: float | None,
    only: Bools | None = None,
) -> Plan:
    """Plan new bases for the runs of `bases`, from `steps`, all that are listed.

    `min_live_share` None: no packs are emptied; `only`: none but those that keep one of these
    groups.
    """
    own, replaced = _own(survey, bases)
    place = _Places(survey.catalogue, steps, bases)
    recode = _recode(survey, place, replaced)
    replaced[recode.groups] = True
    if min_live_share is None:
        return Plan(own=own, recode=recode, dtypes=place.dtypes)
    victims, copy = _repack(survey, replaced, min_live_share, only)
    return Plan(own=own, recode=recode, copy=copy, victims=victims, dtypes=place.dtypes)


def leaving(survey: Survey, plan: Plan) -> set[str]:
    """Packs of which nothing is needed once the plan is carried out."""
    replaced = np.zeros(survey.catalogue.groups, np.bool_)
    replaced[plan.own] = replaced[plan.recode.groups] = True
    names = survey.catalogue.names
    rows = _staying(survey.marking, survey.listed, replaced)
    records = np.bincount(survey.catalogue.pack_of(rows), minlength=len(names))
    unneeded = {name for name, count in zip(names, records, strict=True) if not count}
    return unneeded | plan.victims


def _own(survey: Survey, bases: Mapping[str, StepGroups]) -> tuple[Ints, Bools]:
    wanted = np.zeros(survey.catalogue.groups, np.bool_)
    parts: list[Ints] = []
    for base in bases.values():
        groups = base.groups[base.groups >= 0]
        fresh = groups[(survey.lacking(base) & ~wanted)[groups]]
        distinct, first = np.unique(fresh, return_index=True)
        parts.append(distinct[np.argsort(first)])
        wanted[distinct] = True
    return (np.concatenate(parts) if parts else _NONE), wanted


def _old_chunks(survey: Survey, rows: Ints) -> tuple[Ints, Ints]:
    """All chunks that no listed step names and that these records need, however indirectly.

    As pairs (position in `rows`, group), each once.
    """
    groups = survey.catalogue.groups
    seen = _NONE
    origin, needs = survey.marking.needs_of(rows)
    while len(needs):
        old = ~survey.listed[needs]
        fresh = np.setdiff1d(origin[old] * groups + needs[old], seen)
        seen = np.concatenate([seen, fresh])
        where, needs = survey.marking.needs_of(survey.row_of[fresh % max(1, groups)])
        origin = (fresh // max(1, groups))[where]
    return seen // max(1, groups), seen % max(1, groups)


class _Places:
    """Where listed chunks belong: the chunk of the new base at their place, dtype, and age."""

    def __init__(
        self,
        catalogue: Catalogue,
        steps: Iterable[StepGroups],
        bases: Mapping[str, StepGroups],
    ) -> None:
        self.base: Ints = np.full(catalogue.groups, -1, np.int64)
        self.age: Ints = np.zeros(catalogue.groups, np.int64)
        names: dict[str, int] = {"": 0}
        kinds = np.zeros(catalogue.groups, np.uint16)
        shapes: tuple[Shape, Shape] | None = None  # those that `codes` and `at` are of
        codes, at = np.zeros(0, np.uint16), _NONE
        for step in steps:
            groups = step.groups
            there = groups >= 0
            self.age[groups[there]] = np.maximum(self.age[groups[there]], step.commit.number)
            base = bases.get(step.commit.run)
            if base is None:
                continue
            if shapes != (step.shape, base.shape):  # steps of one shape come together
                shapes = (step.shape, base.shape)
                codes = step.shape.dtype_codes(names)
                at = step.shape.places_in(base.shape)
            kinds[groups[there]] = codes[there]
            there &= at >= 0
            self.base[groups[there]] = base.groups[at[there]]
        self.dtypes = np.array(list(names), np.str_)[kinds]


def _recode(survey: Survey, place: _Places, replaced: Bools) -> Recode:
    """Listed chunks whose records all need something that no listed step names."""
    marking, catalogue = survey.marking, survey.catalogue
    bound = survey.listed & ~survey.free() & ~replaced
    rows = survey.rows(bound)
    group = marking.groups_of(rows)
    where, needs = marking.needs_of(rows)
    direct = np.bincount(where, minlength=len(rows))
    old = ~survey.listed[needs]
    where, needs = where[old], needs[old]
    origin, deep = _old_chunks(survey, rows)
    share = catalogue.stored[survey.row_of[deep]] / np.bincount(deep, minlength=1)[deep]
    largest = np.zeros(len(rows))
    np.maximum.at(largest, where, catalogue.stored[survey.row_of[needs]])
    # An old chunk that something else still needs stays: recoding the others frees nothing.
    stuck = np.zeros(catalogue.groups, np.bool_)
    while True:
        # What follows from several chunks is small, and takes about a chunk when coded anew: only
        # where letting go of its share of old chunks gives more than that.
        freed = np.bincount(origin, np.where(stuck[deep], 0, share), len(rows))
        movable = (place.base[group] >= 0) & ((direct == 1) | (freed > largest))
        more = stuck.copy()
        more[deep[~movable[origin]]] = True
        if np.array_equal(more, stuck):
            break
        stuck = more
    useful = ~stuck[needs] & movable[where]
    where, needs = where[useful], needs[useful]
    where, first = np.unique(where, return_index=True)
    needs, rows, group = needs[first], rows[where], group[where]
    group, first = np.unique(group, return_index=True)  # of several records kept, one speaks
    needs, rows = needs[first], rows[first]
    base = place.base[group]
    order = np.lexsort((-place.age[group], needs, base))
    return Recode(
        group[order], base[order], needs[order], catalogue.stored[rows[order]].astype(np.int64)
    )


def _staying(marking: Marking, listed: Bools, replaced: Bools) -> Ints:
    """The records that go on to serve their chunks."""
    staying = listed & ~replaced
    while True:
        rows = kept_rows(marking, staying)
        more = staying.copy()
        more[marking.needs_of(rows)[1]] = True
        more &= ~replaced
        if np.array_equal(more, staying):
            return rows
        staying = more


def _repack(
    survey: Survey, replaced: Bools, min_live_share: float, only: Bools | None
) -> tuple[frozenset[str], Ints]:
    """Packs to be emptied, and the records of which these hold the best copy there is."""
    catalogue = survey.catalogue
    packs = len(catalogue.names)
    allowed = np.ones(packs, np.bool_)
    if only is not None:
        allowed = np.bincount(catalogue.pack_of(survey.rows(only)), minlength=packs) > 0
    # Not the payload alone: there are records without any, of chunks that follow from others.
    size = catalogue.stored.astype(np.int64) + RECORD_BYTES + ENTRY_BYTES
    total = np.bincount(catalogue.pack_of(np.arange(len(size))), size, packs)
    small = np.array(catalogue.sizes, np.int64) <= SMALL_BYTES
    marking = survey.marking
    victims = np.zeros(packs, np.bool_)
    while True:  # what one pack need not hold any more, another one may have to
        rows = _staying(marking, survey.listed, replaced)
        live = np.bincount(catalogue.pack_of(rows), size[rows], packs)
        thin = (live > 0) & (live < min_live_share * total) & allowed
        tiny = (live > 0) & ~thin & ~victims & small & allowed
        if np.count_nonzero(tiny) >= MANY:
            thin |= tiny
        more = victims | thin
        names = frozenset(n for n, goes in zip(catalogue.names, more, strict=True) if goes)
        if np.array_equal(more, victims):
            return names, rows[victims[catalogue.pack_of(rows)]]
        victims = more
        marking = Marking(catalogue, avoid=names)
        marking.reach(np.flatnonzero(survey.listed))
        marking.choose()
