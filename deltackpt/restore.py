"""Restore into live objects: choose the step, verify it, apply it, or fall back and say so."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from deltackpt_store.errors import DeltackptError
from deltackpt_store.leases import Hold
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

from . import rng as generators
from .choosing import Skipped, held_candidates, named_step, nothing_verifies
from .host_memory import available_bytes
from .into import Plan
from .keys import KeyMap, check_key_map
from .options import check_flags, check_mapping, check_threads
from .reading import Step, is_damage, matcher, patterns
from .stream import Goal, stream
from .targets import Mismatch
from .tensors import check_mode

_log = logging.getLogger("deltackpt.restore")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did.

    `number` and `root` (hex) identify the commit and its content; `commit` is the whole record.
    Paths are those of the checkpoint (`missing`: of the target). `missing`, `unexpected` and
    `mismatched` are empty after a strict restore; `removed` are tensors of plain containers that
    the checkpoint does not have. `values` holds the top-level entries that cannot change in place
    (numbers, tuples, ...); they have been assigned in the state when it is a mutable mapping.
    `skipped` are newer commits that did not verify. `bytes` were read and verified in `seconds`.
    """

    run: str
    step: int
    number: int
    root: str
    commit: Commit = field(repr=False)
    loaded: tuple[str, ...] = field(default=(), repr=False)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    removed: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    values: Mapping[Any, Any] = field(default_factory=lambda: dict[Any, Any]())
    rng: bool = False
    seconds: float = 0.0
    bytes: int = 0

    def __repr__(self) -> str:
        shown = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}
        shown["metrics"] = dict(self.metrics)
        return f"Restored({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics saved with the step."""
        return self.commit.metrics

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a log line or JSON; leaves are counted, not listed."""
        return {
            "run": self.run,
            "step": self.step,
            "number": self.number,
            "root": self.root,
            "loaded": len(self.loaded),
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "mismatched": [str(mismatch) for mismatch in self.mismatched],
            "removed": list(self.removed),
            "skipped": [
                {"run": s.run, "number": s.number, "step": s.step, "reason": s.reason}
                for s in self.skipped
            ],
            "metrics": dict(self.metrics),
            "rng": self.rng,
            "seconds": self.seconds,
            "bytes": self.bytes,
        }


def restore_into(
    store: Store | str | os.PathLike[str],
    state: Mapping[Any, Any],
    *,
    run: str = "main",
    step: int | None = None,
    strict: bool = True,
    only: str | Iterable[str] | None = None,
    key_map: KeyMap | None = None,
    low_memory: bool = False,
    rng: bool = True,
    threads: int | None = None,
) -> Restored | None:
    """Put a committed step into the live objects of `state`; None when `run` has no commit yet.

    `run` may name a step, too, as ``RUN@STEP``. Without a step, the newest commit that verifies is
    taken; newer ones that are damaged are logged and listed in ``Restored.skipped``. A `step` that
    is asked for and damaged raises `CorruptionError` naming its tensors.

    The step is read into host memory and every chunk checked before anything is touched; then all
    of it is applied, or, when an object refuses its state, nothing (`StateError`). With
    `low_memory`, or when the step would not fit into memory, verified chunks go straight into the
    live tensors instead: damage or a failure found on the way leaves the target incomplete, which
    the error says (kind "incomplete-target"), unless an older step can be restored instead.

    What each kind of object gets:

    - modules: in place, into their tensors, whose layout, device and ties stay; dtypes and shapes
      must be the saved ones, nothing is cast or broadcast (`MismatchError`);
    - optimizers: parameter groups and state as saved, matched by parameter name, also into a fresh
      optimizer of the same class; dtypes of the state stay the saved ones. Without `strict`, the
      state of a parameter whose moments do not fit stays as it is;
    - other objects with ``load_state_dict``: one call with a private copy of their state;
    - plain containers: in place, and hold exactly the saved entries then;
    - random generators, last, unless `rng` is False, the step has none, or `only` leaves "#rng"
      out.

    `strict` demands that both sides have the same entries and refuses with the full list;
    otherwise what fits is restored and the rest reported. Nothing fitting is always an error.
    `only` are globs over paths (``model/*``; `*` crosses "/"): the rest of the target stays.
    `key_map` renames keys of modules: "unwrap" ignores what wrappers add, a mapping renames
    prefixes (``{"module.": ""}``), a function gives the target's key. Optimizers' gradients, steps
    and hooks are not touched, but for the hooks of ``load_state_dict``, which run once. `threads`
    read in parallel (default: as many as processors, at most 8, and helper processes where much is
    to be decoded). What is read is held meanwhile: retention and collection leave it alone, where
    the store can be written to.

    Call it in the thread that uses the objects, while no save of them is in flight
    (`Checkpointer.restore` waits for that). Beside the errors above it raises `NotFoundError` for
    an unknown store or `step`, `UnsupportedFormatError`, `StorageError` when the store cannot be
    read, and `InvalidInputError` for an unusable option or a `state` that cannot be restored into.
    """
    store = store if isinstance(store, Store) else Store.open(store)
    restored, held = restore_and_hold(
        store, state, run=run, step=step, strict=strict, only=only, key_map=key_map,
        low_memory=low_memory, rng=rng, threads=threads,
    )  # fmt: skip
    if held is not None:
        held.release()
    return restored


def restore_and_hold(
    store: Store | str | os.PathLike[str],
    state: Mapping[Any, Any],
    *,
    run: str,
    step: int | None,
    strict: bool,
    only: str | Iterable[str] | None,
    key_map: KeyMap | None,
    low_memory: bool,
    rng: bool,
    threads: int | None,
    expected: bool = False,
) -> tuple[Restored | None, Hold | None]:
    """As :func:`restore_into`; the restored step stays held until the caller releases it.

    When `run` is `expected` to exist, `NotFoundError` names the runs of a store that lacks it.
    """
    began = time.perf_counter()
    check_mode()
    store = store if isinstance(store, Store) else Store.open(store)
    check_mapping(state)
    run, step = named_step(store, run, step)
    check_key_map(key_map)
    check_flags(strict=strict, low_memory=low_memory, rng=rng)
    check_threads(threads)
    only = None if only is None else patterns(only)
    job = _Job(state, strict, only, key_map, low_memory, rng, threads)
    skipped: list[Skipped] = []
    for held in held_candidates(store, run, step, skipped):
        commit = held.commit
        try:
            job.restore(Step(store, commit, only))
        except DeltackptError as error:
            if step is not None or not is_damage(error):
                if job.incomplete:
                    raise job.finished(error) from error
                raise
            skipped.append(Skipped(commit.run, commit.number, commit.step, str(error)))
            _log.warning("step %s@%d is passed over: %s", commit.run, commit.step, error)
            continue
        return job.result(commit, skipped, time.perf_counter() - began), held.take_over()
    if not skipped:
        others = [name for name in store.runs() if name != run]
        if expected and others:
            store.numbers(run)  # names the runs there are when it is not one of them
        if others:  # a mistyped name would train from the beginning
            _log.warning(
                "nothing is restored: store %s has no step of run %r (its runs are %s)",
                store.path, run, ", ".join(others),
            )  # fmt: skip
        return None, None
    raise job.finished(nothing_verifies(run, skipped))


class _Job:
    """One restore: what was asked for, and how far it got."""

    def __init__(
        self,
        state: Mapping[Any, Any],
        strict: bool,
        only: list[str] | None,
        key_map: KeyMap | None,
        low_memory: bool,
        rng: bool,
        threads: int | None,
    ) -> None:
        self._state = state
        self._strict = strict
        self._only = only
        self._key_map: KeyMap | None = key_map
        self._low_memory = low_memory
        self._rng = rng and (only is None or matcher(only)(generators.RNG_KEY))
        self._threads = threads
        self.incomplete = False
        """Whether live tensors hold parts of a step that was not restored to its end."""
        self._bytes = 0
        self._plan: Plan | None = None
        self._values: dict[Any, Any] = {}
        self._rng_restored = False

    def restore(self, step: Step) -> None:
        """Plan, read, verify, apply. Raises before anything is changed, or sets `incomplete`."""
        self._plan = plan = Plan(
            step, self._state, strict=self._strict, only=self._only, key_map=self._key_map
        )
        reserved = step.reserved(generators.RNG_KEY) if self._rng else []
        wanted = step.extents_of({*plan.slots, *reserved})
        self._bytes = step.nbytes(wanted)
        if self._streams():
            self._stream(step, plan, reserved)
            return
        with torch.inference_mode(False):  # what objects keep must be usable outside of it, too
            memory = step.read_all(wanted, self._threads)
            states = self._generators(step, memory)
            built = plan.build(memory, {})
        plan.inspect(built, memory)
        self._values = plan.apply(built, undo=True)
        self._restore_generators(states)

    def _streams(self) -> bool:
        available = available_bytes()
        if not self._low_memory and available is not None and self._bytes > available:
            _log.warning(
                "the step has %d bytes, and %d are free: it is read straight into the target",
                self._bytes,
                available,
            )
            return True
        return self._low_memory

    def _stream(self, step: Step, plan: Plan, reserved: list[int]) -> None:
        """Small and kept things first, into memory; then the live tensors, in place."""
        goals = plan.goals
        rest = step.extents_of({*plan.slots.difference(goals), *reserved})
        states = self._generators(step, step.read_all(step.extents_of(reserved), self._threads))
        plan.make_room()
        self.incomplete = True
        with torch.inference_mode(False):
            memory = step.read_all(rest, self._threads)
            built = plan.build(memory, goals)
        plan.inspect(built, memory)
        by_extent: dict[int, list[Goal]] = {}
        for slot, tensor in goals.items():
            view = step.views[slot]
            by_extent.setdefault(view.extent, []).append(Goal(view, tensor))
        stream(step, by_extent, self._threads)
        self._values = plan.apply(built, undo=False)
        self._restore_generators(states)
        self.incomplete = False

    def _generators(self, step: Step, memory: Mapping[int, torch.Tensor]) -> Any:
        states = step.reserved_value(generators.RNG_KEY, memory) if self._rng else None
        if states is not None:
            generators.check(states)
        return states

    def _restore_generators(self, states: Any) -> None:
        if states is not None:
            generators.restore(states)
            self._rng_restored = True

    def finished(self, error: DeltackptError) -> DeltackptError:
        """`error`, saying so when the target is incomplete."""
        if not self.incomplete or error.kind == "incomplete-target":
            return error
        return type(error)(
            f"{error.message}; the target is incomplete: parts of it were overwritten",
            kind="incomplete-target",
            hint="restore another step before using any of it, or make the objects anew",
            **error.context,
        )

    def result(self, commit: Commit, skipped: list[Skipped], seconds: float) -> Restored:
        assert self._plan is not None
        report = self._plan.report
        report.log(self._plan.step)
        if skipped:
            _log.warning(
                "restored step %s@%d instead of %d newer or unreadable ones",
                commit.run, commit.step, len(skipped),
            )  # fmt: skip
        return Restored(
            run=commit.run,
            step=commit.step,
            number=commit.number,
            root=commit.root.hex(),
            commit=commit,
            loaded=tuple(report.loaded),
            missing=tuple(report.missing),
            unexpected=tuple(report.unexpected),
            mismatched=tuple(report.mismatched),
            removed=tuple(report.removed),
            skipped=tuple(skipped),
            values=self._values,
            rng=self._rng_restored,
            seconds=seconds,
            bytes=self._bytes,
        )
