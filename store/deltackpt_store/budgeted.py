"""Verifying a part at a time: the longest unchecked packs first, until a budget is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from deltackpt_store.check_log import CheckLog
from deltackpt_store.pack_set import PackSet
from deltackpt_store.scrub import Progress, scrub
from deltackpt_store.scrub_check import BadRecord

_BATCH_BYTES = 256 * 1024 * 1024
_KEEP_SECONDS = 5.0
WINDOW = 7 * 86400.0


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How much to read at most: `seconds`, `bytes`, or both. None: no limit.

    What has been begun is finished, and one pack that is not known to be damaged is always read:
    so every pack has its turn, however small the budget.
    """

    seconds: float | None = None
    bytes: int | None = None


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what is stored has been proved, and when. Bytes are those of payloads.

    `checked_bytes` now; `ever_bytes` at all; `window_bytes` in the last `window` seconds; `oldest`:
    when the longest unchecked of the packs ever checked was (None when there is none, or its time
    lies in the future, so that a clock was wrong); `never_packs` have not been checked yet.
    `remembered` is the file that the next verification goes on from, None when there is none
    (`problem` says why).
    """

    packs: int
    total_bytes: int
    checked_packs: int
    checked_bytes: int
    ever_bytes: int
    window: float
    window_bytes: int
    oldest: float | None
    never_packs: int
    remembered: str | None
    problem: str = ""


def scrub_within(
    packs: PackSet,
    names: list[str],
    existing: list[str],
    budget: Budget,
    *,
    window: float = WINDOW,
    threads: int | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> tuple[list[BadRecord], Coverage]:
    """Check as many of the packs `names` as the budget allows, and remember it.

    `existing` are all packs of the store. It may be killed at any time: what was checked up to a
    few seconds before is remembered.
    """
    sizes = {name: _size(packs, name) for name in names}
    log = CheckLog(packs.io, packs.root, packs.uuid)
    work = _Work(packs, sizes, log, existing, budget, threads, progress, clock)
    try:
        bad = work.run()
    finally:
        log.keep(existing)
    return bad, work.coverage(window)


class _Work:
    def __init__(
        self,
        packs: PackSet,
        sizes: Mapping[str, int],
        log: CheckLog,
        existing: list[str],
        budget: Budget,
        threads: int | None,
        progress: Progress | None,
        clock: Callable[[], float],
    ) -> None:
        self._packs = packs
        self._sizes = sizes
        self._log = log
        self._existing = existing
        self._budget = budget
        self._threads = threads
        self._progress = progress
        self._clock = clock
        self._start = time.monotonic()
        self._kept = self._start
        self._done = 0
        self._checked = 0
        self._total = sum(sizes.values())
        if budget.bytes is not None:
            self._total = min(self._total, budget.bytes)

    def run(self) -> list[BadRecord]:
        bad: list[BadRecord] = []
        order = self._log.order(self._sizes)
        fresh = False  # whether one has been read that is not known to be damaged
        while order and not (fresh and self._spent()):
            batch = self._take(order)
            fresh = fresh or not all(self._known_bad(name) for name in batch)
            found = scrub(self._packs, batch, threads=self._threads, progress=self._report)
            bad += found
            self._done += sum(self._sizes[name] for name in batch)
            self._checked += len(batch)
            hurt = {record.pack for record in found if not record.dangling}
            self._log.checked({n: self._sizes[n] for n in batch}, self._clock(), hurt)
            if time.monotonic() - self._kept > _KEEP_SECONDS:
                self._log.keep(self._existing)
                self._kept = time.monotonic()
        return bad

    def _known_bad(self, name: str) -> bool:
        check = self._log.get(name, self._sizes[name])
        return check is not None and check.bad

    def _spent(self) -> bool:
        budget = self._budget
        over_time = budget.seconds is not None and time.monotonic() - self._start >= budget.seconds
        return over_time or (budget.bytes is not None and self._done >= budget.bytes)

    def _take(self, order: list[str]) -> list[str]:
        """The next few packs: enough for all threads, and not more than the budget allows."""
        room = _BATCH_BYTES
        if self._budget.bytes is not None:
            room = min(room, self._budget.bytes - self._done)
        batch = [order.pop(0)]
        size = self._sizes[batch[0]]
        while order and size + self._sizes[order[0]] <= room:
            size += self._sizes[order[0]]
            batch.append(order.pop(0))
        return batch

    def _report(self, done: int, _: int) -> None:
        if self._progress is not None:
            self._progress(self._done + done, max(self._total, self._done + done))

    def coverage(self, window: float) -> Coverage:
        now = self._clock()
        known = {n: c for n, size in self._sizes.items() if (c := self._log.get(n, size))}
        oldest = min(known.values(), key=lambda check: check.number, default=None)
        return Coverage(
            packs=len(self._sizes),
            total_bytes=sum(self._sizes.values()),
            checked_packs=self._checked,
            checked_bytes=self._done,
            ever_bytes=sum(check.bytes for check in known.values()),
            window=window,
            window_bytes=sum(c.bytes for c in known.values() if now - window <= c.at <= now),
            oldest=oldest.at if oldest is not None and oldest.at <= now else None,
            never_packs=len(self._sizes) - len(known),
            remembered=self._log.path,
            problem=self._log.problem,
        )


def _size(packs: PackSet, name: str) -> int:
    entries = packs.index.entries(name)
    return 0 if entries is None else int(entries.table["stored"].sum(dtype=np.int64))
