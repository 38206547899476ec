"""``deltackpt_tools.show`` and ``du``: one step, and where the bytes are, as typed values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deltackpt_tools.arguments import check_depth, check_globs
from deltackpt_tools.describe import describe
from deltackpt_tools.frames import Record, frame
from deltackpt_tools.module_paths import Depth
from deltackpt_tools.named import StepLike, StoreLike, as_commit, as_store
from deltackpt_tools.usage import measure
from deltackpt_tools.usage_modules import ModuleUsage, measure_modules


@dataclass(frozen=True, slots=True)
class Step(Record):
    """What one step consists of. `tensors`, `values` and `stored` have the fields of the JSON
    document of ``deltackpt show``."""

    store: str
    run: str
    step: int
    number: int
    created: float
    digest: str
    root: str
    base: str | None
    metrics: dict[str, float]
    stats: dict[str, float]
    environment: dict[str, Any]
    packs: tuple[str, ...]
    state_bytes: int
    stored: dict[str, Any]
    tensors: tuple[dict[str, Any], ...]
    values: tuple[dict[str, Any], ...]
    damaged_packs: dict[str, str]

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per tensor."""
        return frame(self.tensors)


@dataclass(frozen=True, slots=True)
class StepBytes(Record):
    """Stored bytes that one step needs; see ``deltackpt du``."""

    run: str
    step: int
    number: int
    total_bytes: int
    unique_bytes: int
    added_bytes: int
    missing_chunks: int


@dataclass(frozen=True, slots=True)
class Usages(Record):
    """Where the bytes of a store are; docs/cli.md (`du`) tells what each figure counts."""

    store: str
    total_bytes: int
    referenced_bytes: int
    unreferenced_bytes: int
    duplicate_bytes: int
    overhead_bytes: int
    steps: tuple[StepBytes, ...]
    modules: tuple[ModuleUsage, ...]
    unreadable: tuple[tuple[str, str], ...]

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per step."""
        return frame([step.to_dict() for step in self.steps])


def show(store: StoreLike, step: StepLike = "latest", *, only: str | Iterable[str] = ()) -> Step:
    """One step: its tensors, plain values, environment, and how it is stored. Reads no payload.

    `only`: a glob of paths, or several (``*`` crosses ``/``).
    """
    where = as_store(store)
    found = describe(where, as_commit(where, step), check_globs(only))
    commit = found.commit
    return Step(
        store=where.path,
        run=commit.run,
        step=commit.step,
        number=commit.number,
        created=commit.created,
        digest=commit.digest.hex(),
        root=commit.root.hex(),
        base=None if commit.base is None else commit.base.hex(),
        metrics=dict(commit.metrics),
        stats=dict(commit.stats),
        environment=found.environment,
        packs=found.snapshot.packs,
        state_bytes=found.state_bytes,
        stored=found.stored.as_json(),
        tensors=tuple(row.as_json() for row in found.tensors),
        values=tuple(row.as_json() for row in found.values),
        damaged_packs=found.damaged_packs,
    )


def du(
    store: StoreLike,
    *,
    depth: Depth | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Usages:
    """Which bytes belong to what, by step and, with `depth`, by module of so many parts ("auto": as
    many as make a readable list)."""
    if depth is not None:
        check_depth(depth)
    where = as_store(store)
    usage = measure(where, progress)
    return Usages(
        store=where.path,
        total_bytes=usage.files.total,
        referenced_bytes=usage.referenced,
        unreferenced_bytes=usage.unreferenced,
        duplicate_bytes=usage.duplicates,
        overhead_bytes=usage.overhead,
        steps=tuple(
            StepBytes(
                run.run,
                step.commit.step,
                step.commit.number,
                step.total,
                step.unique,
                step.added,
                step.missing,
            )
            for run in usage.runs
            for step in run.steps
        ),
        modules=() if depth is None else tuple(measure_modules(where, depth, progress)),
        unreadable=tuple(usage.unreadable),
    )
