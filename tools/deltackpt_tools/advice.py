"""``deltackpt_tools.advise``: how often to save, from what this store's saves and restores took.

Failures come at random with a mean time M between them. A save stops training for C seconds (its
stall; the rest happens beside training) and is durable D seconds after it began; a restore takes R
seconds. Saving every T seconds wastes the share

    w(T) = C / T  +  (T / 2 + D + R) / M

of the time: stalls, and for each failure half an interval of work, what was not durable yet, and
the restore. It is smallest at T = sqrt(2 C M): J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974. J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37, holds for large C as well:

    T = sqrt(2 C M) [1 + sqrt(C / 2M) / 3 + (C / 2M) / 9] - C   for C < 2M,   T = M   otherwise

and is what is advised here, unless a save would begin before the last one is durable, or stalls
would take more than the share of time that was allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from statistics import median
from typing import Any, Literal

from deltackpt_store.errors import InvalidInputError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

from deltackpt_tools.arguments import check_seconds, check_share
from deltackpt_tools.damage import naming_tensors
from deltackpt_tools.frames import Record, frame
from deltackpt_tools.history_stat import durable_seconds
from deltackpt_tools.named import StoreLike, as_store

Bound = Literal["failures", "overhead", "durability"]

RECENT = 200  # saves that figures are taken from
SAMPLE_BYTES = 256 * 1000 * 1000  # read to measure how fast a restore reads
_BUSY = 0.8  # a writer that is busy for more of the time has no reserve


def young(stall: float, mtbf: float) -> float:
    """Young's interval, seconds."""
    return sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Daly's interval (time between the end of a save and the begin of the next), seconds."""
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return sqrt(2 * stall * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall


def waste(interval: float, stall: float, durable: float, restore: float, mtbf: float) -> float:
    """Share of the time that is lost when saving every `interval` seconds (at most 1)."""
    return min(1.0, stall / interval + (interval / 2 + durable + restore) / mtbf)


@dataclass(frozen=True, slots=True)
class Advice(Record):
    """Times in seconds; figures of saves are medians of the newest ones."""

    store: str
    run: str
    saves: int
    """How many saves the figures come from."""
    mtbf: float
    overhead_limit: float | None
    stall: float
    durable: float
    restore: float
    restore_measured: bool
    """Whether `restore` was measured now, by reading; else it was given."""
    step_seconds: float | None
    """Time of one training step, None when it cannot be told from the commits."""
    interval: float | None
    every: int | None
    """Training steps between two saves at present."""
    young: float
    daly: float
    best_interval: float
    best_every: int | None
    bound: Bound
    """What sets `best_interval`: failures (Daly), the overhead allowed, or time until durable."""
    lost: float | None
    """Expected time lost for each failure at the present interval: work and restore."""
    best_lost: float
    waste: float | None
    best_waste: float
    writer_busy: float | None
    """Share of the time that encoding and writing take at the present interval."""
    storage_keeps_up: bool | None
    ring_keeps_up: bool | None
    """Whether staging waits for the trainer's memory only, and not for the writer to free slots."""
    skipped: int
    """Saves dropped because earlier ones were in flight."""
    write_speed: float | None
    """Bytes per second of new chunks while the writer flushes."""

    def to_dataframe(self) -> Any:
        """A pandas DataFrame of one row."""
        return frame([self.to_dict()])


def advise(
    store: StoreLike,
    *,
    mtbf: float,
    run: str | None = None,
    overhead: float | None = None,
    restore: float | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Advice:
    """Advise on the interval between saves of `run` (None: the only one, or the newest).

    `mtbf` is the mean time between failures in seconds, `overhead` the largest share of time that
    stalls may take. Unless `restore` (seconds) is given, up to `SAMPLE_BYTES` of the newest step
    are read to measure it. InvalidInputError for a number that cannot be one of these, and when the
    run has too few saves that recorded figures.
    """
    check_seconds("mtbf", mtbf)
    if overhead is not None:
        check_share("overhead", overhead)
    if restore is not None:
        check_seconds("restore", restore, zero=True)
    where = as_store(store)
    name = run if run is not None else newest_run(where)
    line = where.lineage(name)
    recent = recent_saves(line)
    if len(recent) < 2:
        raise InvalidInputError(
            f"run {name!r} has {len(recent)} saves that recorded how long they took; 2 are needed",
            kind="too-few-saves",
            hint="train on for some saves, or name another run",
            run=name,
        )
    measured = restore is None
    seconds = measure_restore(where, line[-1], progress) if restore is None else restore
    return from_commits(
        recent, store=where.path, mtbf=mtbf, overhead=overhead, restore=seconds, measured=measured
    )


def recent_saves(line: Sequence[Commit]) -> list[Commit]:
    """The newest commits of `line` that recorded how long they took; `RECENT` at most."""
    return [commit for commit in line if "stall_seconds" in commit.stats][-RECENT:]


def from_commits(
    recent: Sequence[Commit],
    *,
    store: str,
    mtbf: float,
    overhead: float | None,
    restore: float,
    measured: bool,
) -> Advice:
    """The advice for saves that look like `recent` (of one lineage, oldest first)."""
    stall = median(commit.stats["stall_seconds"] for commit in recent)
    durable = median(durable_seconds(commit.stats) or 0.0 for commit in recent)
    pace = Pace.of(recent)
    ideal = max(daly(stall, mtbf), 0.0)
    candidates: list[tuple[float, Bound]] = [(ideal, "failures"), (durable, "durability")]
    if overhead is not None:
        candidates.append((stall / overhead, "overhead"))
    best, bound = max(candidates, key=lambda candidate: candidate[0])
    best = max(best, 1e-3)
    every = None
    if pace.step_seconds:
        every = max(1, ceil(best / pace.step_seconds - 1e-9))
        best = every * pace.step_seconds
    interval = pace.interval
    busy = None
    work = median(
        commit.stats.get("encode_seconds", 0.0) + commit.stats.get("flush_seconds", 0.0)
        for commit in recent
    )
    skipped = int(sum(commit.stats.get("skipped", 0.0) for commit in recent))
    if interval:
        busy = work / interval
    flushed = sum(commit.stats.get("flush_seconds", 0.0) for commit in recent)
    written = sum(commit.stats.get("written_bytes", 0.0) for commit in recent)
    return Advice(
        store=store,
        run=recent[-1].run,
        saves=len(recent),
        mtbf=mtbf,
        overhead_limit=overhead,
        stall=stall,
        durable=durable,
        restore=restore,
        restore_measured=measured,
        step_seconds=pace.step_seconds,
        interval=interval,
        every=pace.every,
        young=young(stall, mtbf),
        daly=ideal,
        best_interval=best,
        best_every=every,
        bound=bound,
        lost=None if interval is None else interval / 2 + durable + restore,
        best_lost=best / 2 + durable + restore,
        waste=None if not interval else waste(interval, stall, durable, restore, mtbf),
        best_waste=waste(best, stall, durable, restore, mtbf),
        writer_busy=busy,
        storage_keeps_up=None if busy is None else busy < _BUSY and not skipped,
        ring_keeps_up=_ring_keeps_up(recent),
        skipped=skipped,
        write_speed=written / flushed if flushed > 0 else None,
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast training went between the saves, in the middle: pauses do not count."""

    interval: float | None
    every: int | None
    step_seconds: float | None

    @classmethod
    def of(cls, commits: Sequence[Commit]) -> Pace:
        gaps = [
            (b.created - a.created, b.step - a.step)
            for a, b in pairwise(commits)
            if b.created > a.created and b.step > a.step
        ]
        if not gaps:
            return cls(None, None, None)
        per_step = median(seconds / steps for seconds, steps in gaps)
        every = round(median(steps for _, steps in gaps))
        return cls(per_step * every, every, per_step)


def _ring_keeps_up(recent: Sequence[Commit]) -> bool | None:
    """Staging that ends only when the writer has nearly finished has waited for free slots."""
    pairs = [
        (c.stats["staged_seconds"], c.stats["writer_seconds"])
        for c in recent
        if "staged_seconds" in c.stats and c.stats.get("writer_seconds", 0.0) > 0.1
    ]
    if not pairs:
        return None if not any("staged_seconds" in c.stats for c in recent) else True
    return median(staged / writer for staged, writer in pairs) < _BUSY


def newest_run(store: Store) -> str:
    """The run whose head was made last; NotFoundError when there is none."""
    runs = store.runs()
    if len(runs) == 1:
        return runs[0]
    heads = [store.head(run) for run in runs if store.numbers(run)]
    if not heads:
        return store.resolve_name("latest").run  # raises what there is to say
    return max(heads, key=lambda commit: commit.created).run


def measure_restore(
    store: Store, commit: Commit, progress: Callable[[int, int | None], None] | None = None
) -> float:
    """Seconds that reading and checking the step takes, measured on up to `SAMPLE_BYTES` of it.

    Files that the system holds in memory are read faster than after a failure on another machine.
    """
    snapshot = store.snapshot(commit)
    layout = snapshot.layout
    wanted: list[tuple[bytes, int]] = []
    for extent, ids in snapshot.chunks.items():
        spec = layout.extents[extent]
        wanted += [(row.tobytes(), spec.chunk_length(i)) for i, row in enumerate(ids)]
    total = sum(length for _, length in wanted)
    if not total:
        return 0.0
    stride = max(1, ceil(total / SAMPLE_BYTES))
    starts = range(0, len(wanted), 64 * stride)
    sample = [item for start in starts for item in wanted[start : start + 64]]
    size = sum(length for _, length in sample)
    batch, done, spent = 512, 0, 0.0
    reader = store.reader(snapshot.packs)
    began = time.perf_counter()
    store.packs.load(snapshot.packs)
    opened = time.perf_counter() - began
    for first in range(0, len(sample), batch):
        some = sample[first : first + batch]
        buffers = [(chunk, memoryview(bytearray(length))) for chunk, length in some]
        began = time.perf_counter()
        with naming_tensors(snapshot):
            reader.read(buffers)
        spent += time.perf_counter() - began
        done += sum(length for _, length in some)
        if progress is not None:
            progress(done, size)
    return opened + spent * total / size
