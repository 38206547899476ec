"""Compacting during a training, in a separate process of low priority.

Started by the trainer (`launch.start_compactions`) with `JobSettings` as JSON. Compacts now and
then, tells on stdout, one JSON line for each compaction that did something or failed (beside what
Python is made to print when it starts), and ends with the trainer. Killed at any moment it leaves
nothing to repair.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from deltackpt_store.compact import compact
from deltackpt_store.compact_report import CompactReport
from deltackpt_store.errors import ConflictError, DeltackptError, NotFoundError
from deltackpt_store.protocol import wire_error
from deltackpt_store.store import Store

_LOOK_SECONDS = 1.0


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to compact, as of `compact`, every `interval` seconds."""

    run: str
    when_ratio: float | None = None
    every: int | None = None
    min_live_share: float = 0.5
    max_rate: float | None = None
    interval: float = 300.0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One line of output."""

    report: CompactReport | None = None
    error: dict[str, object] | None = None


class _OrphanedError(Exception):
    """The trainer is gone."""


def run_job(store: str, argument: str, parent: int) -> None:
    """Compact the store at that path until the process `parent` has ended."""
    settings = msgspec.json.decode(argument, type=JobSettings)
    try:
        while True:
            _sleep(settings.interval, parent)
            told = _compact(store, settings, parent)
            if told is not None:
                line = msgspec.json.encode(told)
                sys.stdout.buffer.write(b"\n" + line + b"\n")  # what was printed before has ended
                sys.stdout.buffer.flush()
    except (_OrphanedError, BrokenPipeError):
        return


def _compact(store: str, settings: JobSettings, parent: int) -> Told | None:
    def progress(done: int, total: int) -> None:
        _look(parent)

    try:
        report = compact(
            Store.open(store), run=settings.run, when_ratio=settings.when_ratio,
            every=settings.every, min_live_share=settings.min_live_share,
            max_rate=settings.max_rate, progress=progress,
        )  # fmt: skip
    except (ConflictError, NotFoundError):
        return None  # somebody else is at work, or the run has no step yet: later
    except DeltackptError as error:
        return Told(error=dict(wire_error(error)))
    return None if report.nothing else Told(report=report)


def _sleep(seconds: float, parent: int) -> None:
    end = time.monotonic() + seconds
    while True:
        _look(parent)
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _LOOK_SECONDS))


def _look(parent: int) -> None:
    if os.getppid() != parent:
        raise _OrphanedError
