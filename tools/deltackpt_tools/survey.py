"""What a report shows, as typed values: the saves of each run, which modules changed at which step,
which tensors never save anything. Collected in one pass over the manifests of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from deltackpt_store.errors import DeltackptError
from deltackpt_store.manifest import Commit, Layout, Snapshot
from deltackpt_store.store import Store
from numpy.typing import NDArray

from deltackpt_tools.advice import Advice
from deltackpt_tools.base_interval import Bases
from deltackpt_tools.frames import Record
from deltackpt_tools.history_stat import durable_seconds
from deltackpt_tools.module_paths import Folding, natural, suited
from deltackpt_tools.parameters import ParameterNames, labelled
from deltackpt_tools.stored_chunks import chunk_keys

ALWAYS = 0.9  # share of a tensor that changes at each save, from which on it "always" does
NOTHING_GAINED = 0.95  # stored bytes by raw bytes

Shares = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SavePoint(Record):
    """One save of a run. Bytes and seconds; None when not recorded."""

    step: int
    number: int
    created: float
    is_base: bool
    manifest_bytes: int
    state_bytes: float | None
    changed_bytes: float | None
    staged_bytes: float | None
    written_bytes: float | None
    dedup_bytes: float | None
    stall: float | None
    staged: float | None
    durable: float | None
    skipped: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TensorHabit(Record):
    """How one run of bytes behaves from save to save (named by its first tensor)."""

    path: str
    dtype: str
    bytes: int
    compared: int
    """Saves that could be compared with the one before."""
    mean_share: float
    """Share of its chunks that change at a save, in the mean."""
    last_changed: int | None
    """Step; None when it never did."""
    stored_ratio: float | None
    """Stored by raw bytes in the newest step; None when its chunks are missing."""
    parameter_name: str | None = None
    """The parameter that this is optimizer state of, where the save recorded it."""

    @property
    def never_wins(self) -> bool:
        """Changes nearly whole at each save, and in a way that no codec makes smaller."""
        ratio = self.stored_ratio
        often = self.compared >= 2 and self.mean_share >= ALWAYS
        return often and ratio is not None and ratio >= NOTHING_GAINED

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "never_wins": self.never_wins}


@dataclass(frozen=True, slots=True)
class RunSurvey:
    """One run along its lineage, oldest save first. `share[m, s]` is the share of the chunks of
    module `m` that save `s` changed, `update[m, s]` (with values) the largest relative update of a
    tensor in it; NaN where there is nothing to compare with."""

    run: str
    saves: tuple[SavePoint, ...]
    modules: tuple[str, ...]
    module_bytes: tuple[int, ...]
    module_parameters: tuple[str | None, ...]
    """The parameter that a module is optimizer state of, where the save recorded it."""
    share: Shares
    update: Shares | None
    not_finite: tuple[tuple[int, str, int], ...]
    """(step, tensor, elements) where NaN or Inf appeared (with values)."""
    tensors: tuple[TensorHabit, ...]
    bases: Bases
    advice: Advice | None
    unreadable: tuple[tuple[str, str], ...]

    def module_labels(self) -> list[str]:
        """The modules for people: optimizer state with the name of its parameter."""
        return [labelled(*one) for one in zip(self.modules, self.module_parameters, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "saves": [save.to_dict() for save in self.saves],
            "modules": list(self.modules),
            "module_bytes": list(self.module_bytes),
            "module_parameters": list(self.module_parameters),
            "share": _matrix(self.share),
            "update": None if self.update is None else _matrix(self.update),
            "not_finite": [
                {"step": step, "tensor": path, "elements": count}
                for step, path, count in self.not_finite
            ],
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "bases": self.bases.to_dict(),
            "advice": None if self.advice is None else self.advice.to_dict(),
            "unreadable": [{"what": what, "reason": why} for what, why in self.unreadable],
        }


def _matrix(values: Shares) -> list[list[float | None]]:
    return [[None if v != v else round(v, 6) for v in row] for row in values.tolist()]


def _names(layout: Layout) -> list[str]:
    """Path of the first tensor that looks at each extent (a layout has one for each)."""
    names = [""] * len(layout.extents)
    for view in reversed(layout.tensors):
        names[view.extent] = layout.paths[view.slot]
    return names


class _Plan:
    """What one layout says about its extents: names, modules. Kept while the layout stays."""

    def __init__(self, layout: Layout, modules: dict[str, int], fold: Folding) -> None:
        self.layout = layout
        self.names = _names(layout)
        self.modules = np.array([modules.get(fold(name), -1) for name in self.names], np.int64)
        self.chunks = np.array([max(e.chunk_count, 1) for e in layout.extents], np.int64)
        self.bytes = np.array([e.nbytes for e in layout.extents], np.int64)
        self.keys = {
            (name, e.nbytes, e.chunk_bytes): i
            for i, (name, e) in enumerate(zip(self.names, layout.extents, strict=True))
        }


class RunWalk:
    """Goes through the saves of one run once and adds up. Used by one thread."""

    def __init__(self, store: Store, line: Sequence[Commit]) -> None:
        self._store = store
        self._line = line
        self.keys: list[NDArray[np.uint64]] = []
        """Keys of all chunks that the run's saves name, each at least once."""
        self.newest: Snapshot | None = None
        self.unreadable: list[tuple[str, str]] = []
        self.modules: list[str] = []
        self.module_bytes: NDArray[np.int64] = np.zeros(0, np.int64)
        self.share: Shares = np.zeros((0, len(line)), np.float32)
        self._habits: dict[str, list[float]] = {}  # sum of shares, saves, last changed step
        self._numbers: dict[str, int] = {}
        self._fold = Folding(1)
        self._plan: _Plan | None = None

    def walk(
        self,
        progress: Callable[[], None],
        visit: Callable[[int, Snapshot | None, Snapshot], None] | None = None,
    ) -> None:
        """Read every manifest; `visit(number of the save, snapshot before, snapshot)` sees them."""
        older: Snapshot | None = None
        older_plan: _Plan | None = None
        for index, commit in enumerate(self._line):
            progress()
            try:
                snapshot = self._store.snapshot(commit)
            except DeltackptError as error:
                self.unreadable.append((f"{commit.run}@{commit.step}", error.message))
                older = older_plan = None
                continue
            if not self.modules:
                self._choose(snapshot.layout)
            plan = self._planned(snapshot.layout)
            if older is None or older_plan is None:
                self.keys += [chunk_keys(ids) for ids in snapshot.chunks.values()]
            else:
                self._add(index, commit.step, older, older_plan, snapshot, plan)
            if visit is not None:
                visit(index, older, snapshot)
            older, older_plan = snapshot, plan
            self.newest = snapshot

    def _choose(self, layout: Layout) -> None:
        paths = [path for path in _names(layout) if not path.startswith("#")]
        self._fold = suited(paths)
        self.modules = sorted({self._fold(path) for path in paths}, key=natural)
        self._numbers = {module: i for i, module in enumerate(self.modules)}
        self.share = np.full((len(self.modules), len(self._line)), np.nan, np.float32)

    def number_of(self, path: str) -> int | None:
        """Row of the module that the tensor `path` lies in."""
        return self._numbers.get(self._fold(path))

    def _planned(self, layout: Layout) -> _Plan:
        if self._plan is None or (self._plan.layout is not layout and self._plan.layout != layout):
            for name in _names(layout):  # modules that came later get rows of their own
                module = self._fold(name)
                if not module.startswith("#") and module not in self._numbers:
                    self._numbers[module] = len(self.modules)
                    self.modules.append(module)
            missing = len(self.modules) - len(self.share)
            if missing:
                rows = np.full((missing, len(self._line)), np.nan, np.float32)
                self.share = np.concatenate([self.share, rows])
            self._plan = _Plan(layout, self._numbers, self._fold)
            self.module_bytes = np.zeros(len(self.modules), np.int64)
            known = self._plan.modules >= 0
            np.add.at(self.module_bytes, self._plan.modules[known], self._plan.bytes[known])
        return self._plan

    def _add(
        self, index: int, step: int, old: Snapshot, old_plan: _Plan, new: Snapshot, plan: _Plan
    ) -> None:
        changed = self._changed(old, old_plan, new, plan)
        known = (plan.modules >= 0) & ~np.isnan(changed)
        rows = plan.modules[known]
        chunks = plan.chunks[known].astype(np.float64)
        total = np.bincount(rows, chunks, len(self.modules))
        sums = np.bincount(rows, changed[known], len(self.modules))
        with np.errstate(invalid="ignore", divide="ignore"):
            self.share[:, index] = (sums / total).astype(np.float32)
        shares = changed / plan.chunks
        for extent in np.flatnonzero(~np.isnan(changed)).tolist():
            habit = self._habits.setdefault(plan.names[extent], [0.0, 0, -1])
            share = float(shares[extent])
            habit[0] += share
            habit[1] += 1
            if share > 0:
                habit[2] = step

    def _changed(
        self, old: Snapshot, old_plan: _Plan, new: Snapshot, plan: _Plan
    ) -> NDArray[np.float64]:
        """Chunks that differ, by extent of the new step (an inline extent is one chunk); NaN for
        extents that the old step lacks."""
        changed = np.full(len(plan.chunks), np.nan)
        same = old_plan is plan
        before: list[NDArray[np.uint8]] = []
        after: list[NDArray[np.uint8]] = []
        open_: list[int] = []
        for key, extent in plan.keys.items():
            there = extent if same else old_plan.keys.get(key)
            ids = new.chunks.get(extent)
            if there is None:
                if ids is not None:
                    self.keys.append(chunk_keys(ids))
                continue
            if ids is None:
                changed[extent] = float(old.inline.get(there) != new.inline[extent])
                continue
            previous = old.chunks[there]
            changed[extent] = 0.0
            if previous is not ids:
                before.append(previous)
                after.append(ids)
                open_.append(extent)
        if open_:
            joined = np.concatenate(after)
            differs = (_words(np.concatenate(before)) != _words(joined)).any(axis=1)
            starts = np.cumsum([0, *(len(ids) for ids in after[:-1])])
            changed[open_] = np.add.reduceat(differs, starts, dtype=np.int64)
            self.keys.append(chunk_keys(joined[differs]))
        return changed

    def parameters(self) -> tuple[str | None, ...]:
        """For each module the parameter that all of it is optimizer state of."""
        if self.newest is None:
            return (None,) * len(self.modules)
        names = ParameterNames(self.newest)
        return tuple(names.of(module) for module in self.modules)

    def habits(self, newest: Snapshot | None) -> tuple[TensorHabit, ...]:
        """Every extent of the newest step, those that cost most first."""
        if newest is None or self._plan is None:
            return ()
        ratios = _stored_ratios(self._store, newest)
        parameters = ParameterNames(newest)
        found: list[TensorHabit] = []
        for extent, name in enumerate(self._plan.names):
            if name.startswith("#"):
                continue
            spec = newest.layout.extents[extent]
            total, count, last = self._habits.get(name, (0.0, 0, -1))
            found.append(
                TensorHabit(
                    path=name,
                    dtype=spec.dtype,
                    bytes=spec.nbytes,
                    compared=int(count),
                    mean_share=total / count if count else 0.0,
                    last_changed=int(last) if last >= 0 else None,
                    stored_ratio=ratios.get(extent),
                    parameter_name=parameters.of(name),
                )
            )
        return tuple(sorted(found, key=lambda t: (-t.bytes * t.mean_share, natural(t.path))))


def _words(ids: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(ids).view(np.uint64)


def _stored_ratios(store: Store, snapshot: Snapshot) -> dict[int, float]:
    """Stored by raw bytes of each extent, from the tables of the packs."""
    store.packs.load(snapshot.packs)
    ratios: dict[int, float] = {}
    extents = list(snapshot.chunks)
    if not extents:
        return ratios
    ids = np.concatenate([snapshot.chunks[extent] for extent in extents])
    found = store.packs.index.find(ids)
    known = found.packs >= 0
    stored = np.where(known, found.entries["stored"], 0).astype(np.int64)
    raw = np.where(known, found.entries["raw"], 0).astype(np.int64)
    start = 0
    for extent in extents:
        stop = start + len(snapshot.chunks[extent])
        whole = int(raw[start:stop].sum())
        if whole and known[start:stop].all():
            ratios[extent] = int(stored[start:stop].sum()) / whole
        start = stop
    return ratios


def save_points(store: Store, line: Sequence[Commit]) -> tuple[SavePoint, ...]:
    """The figures that the commits of `line` record, and the sizes of their manifests."""
    points: list[SavePoint] = []
    for commit in line:
        stats = commit.stats
        points.append(
            SavePoint(
                step=commit.step,
                number=commit.number,
                created=commit.created,
                is_base=commit.base is None,
                manifest_bytes=_manifest_bytes(store, commit),
                state_bytes=stats.get("state_bytes"),
                changed_bytes=stats.get("changed_bytes"),
                staged_bytes=stats.get("staged_bytes"),
                written_bytes=stats.get("written_bytes"),
                dedup_bytes=stats.get("dedup_bytes"),
                stall=stats.get("stall_seconds"),
                staged=stats.get("staged_seconds"),
                durable=durable_seconds(stats),
                skipped=stats.get("skipped"),
                metrics=dict(commit.metrics),
            )
        )
    return tuple(points)


def _manifest_bytes(store: Store, commit: Commit) -> int:
    try:
        handle = store.io.open(f"{store.path}/manifests/{commit.manifest.hex()}")
    except OSError:
        return 0
    try:
        return store.io.size(handle)
    finally:
        store.io.close(handle)
