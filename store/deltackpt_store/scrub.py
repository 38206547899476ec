"""Reading every record of packs from end to end: each physical copy is checked by itself.

For every record the front must match its checksum and the table, and the payload must decode to
bytes that have the chunk's id. Nothing is kept of what was read; damage is collected and never ends
the scan. Where there is much to check it is shared out to forked processes, which do not wait for
one interpreter; else, and where forking is not safe, to threads.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from multiprocessing import current_process, get_context
from typing import Any

import numpy as np

from deltackpt_store.cores import usable_cores
from deltackpt_store.fetch import unreadable
from deltackpt_store.fileio import FileIO
from deltackpt_store.pack_set import PackSet
from deltackpt_store.read_run import thread_count
from deltackpt_store.scrub_check import BadRecord, Checked, Checker
from deltackpt_store.scrub_order import (
    LEAST_WORK,
    MOST_WORK,
    Table,
    Unit,
    families,
    odd,
    units,
    work_of,
)

FORK_WORK = 256 * 1024 * 1024
"""With less to do threads are enough: they start at once."""
MAX_PROCESSES = 16

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), by the thread that called."""

_log = logging.getLogger("deltackpt.store")
_PR_SET_PDEATHSIG = 1


def scrub(
    packs: PackSet,
    names: Sequence[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    prove: bool = True,
) -> list[BadRecord]:
    """Check every record of the packs `names` (known to `packs.index`); return the bad ones.

    Without `prove` against their checksums alone, as a `Checker` does.

    Errors of reading (of any kind) count against the records they hit. `threads` workers (threads
    or processes; default: as many as there are processors) each take the memory of a `Checker`.
    """
    return _Scrub(packs, names, threads, progress, prove).run()


class _Scrub:
    def __init__(
        self,
        packs: PackSet,
        names: Sequence[str],
        threads: int | None,
        progress: Progress | None,
        prove: bool,
    ) -> None:
        self._packs = packs
        self._prove = prove
        self._tables = [Table(n, e) for n in names if (e := packs.index.entries(n)) is not None]
        self._kin = families(self._tables if prove else ())
        stored = [int(t.entries.table["stored"].sum(dtype=np.int64)) for t in self._tables]
        self._total = sum(stored)
        todo = sum(int(work_of(table.entries.table, prove).sum()) for table in self._tables)
        self._forks = todo >= FORK_WORK and _may_fork(packs.io)
        if self._forks:
            self._workers = max(1, threads or min(MAX_PROCESSES, usable_cores()))
        else:
            records = sum(len(t.entries) for t in self._tables)
            self._workers = thread_count(threads, self._total, records)
        self._share = min(MOST_WORK, max(LEAST_WORK, todo // (16 * self._workers)))
        self._progress = progress
        self._done = 0
        self._bad = [bad for table in self._tables for bad in _impossible(table)]

    def run(self) -> list[BadRecord]:
        left = units(self._tables, self._kin, self._share, prove=self._prove)
        if self._workers > 1:
            left = self._together(left)
        with self._checker() as checker:
            for unit in left:
                self._note(checker.check(unit))
        # A record that is damaged twice counts once, with the worse of it.
        self._bad.sort(key=lambda bad: (bad.pack, bad.offset, not bad.readable))
        return list({(bad.pack, bad.offset): bad for bad in self._bad}.values())

    def _note(self, checked: Checked) -> None:
        self._bad += checked.bad
        for name, error in checked.lost.items():
            self._packs.damaged.setdefault(name, error)
        self._done += checked.bytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _together(self, todo: Iterator[Unit]) -> Iterator[Unit]:
        """Have a crew check the units; those that are left when a process of it died."""
        running: dict[Future[Checked], Unit] = {}
        untaken: list[Unit] = []
        try:
            with self._crew() as crew:
                while True:
                    while len(running) < 3 * self._workers and (unit := next(todo, None)):
                        untaken = [unit]
                        running[crew.submit(_check, unit)] = unit
                        untaken = []
                    if not running:
                        return todo
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        self._note(future.result())
                        del running[future]
        except BrokenProcessPool as error:
            _log.warning("a process that verifies has died; going on without: %s", error)
            return chain(untaken, running.values(), todo)

    @contextmanager
    def _crew(self) -> Generator[Executor]:
        with ExitStack() as checkers, ExitStack() as ending:

            def enter() -> None:
                _mine.checker = checkers.enter_context(self._checker())

            with _uninterrupted():
                crew = self._processes() if self._forks else None
                crew = crew or ThreadPoolExecutor(self._workers, "deltackpt-scrub", enter)
                ending.callback(crew.shutdown, cancel_futures=True)
            yield crew

    def _processes(self) -> Executor | None:
        """Forked workers; None where there is no room for them, or no semaphores."""
        start = _Start(self._checker(), os.getpid())
        pool = None
        try:
            pool = ProcessPoolExecutor(self._workers, get_context("fork"), start)
            with warnings.catch_warnings():
                # Of threads that no Python code has started, such as those of a BLAS library.
                warnings.simplefilter("ignore", DeprecationWarning)
                pool.submit(os.getpid)  # the first task starts all of them
        except (OSError, ImportError, NotImplementedError) as error:  # the last two: no semaphores
            _log.info("verifying with threads, as processes cannot be started: %s", error)
            if pool is not None:
                pool.shutdown()
            return None
        return pool

    def _checker(self) -> Checker:
        return Checker(self._packs, self._tables, self._kin, prove=self._prove)


class _Start:
    """Makes a forked process a worker; it ends with the process that it was forked from."""

    def __init__(self, checker: Checker, parent: int) -> None:
        self._checker = checker
        self._parent = parent

    def __call__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
        with suppress(OSError, AttributeError):
            libc: Any = ctypes.CDLL(None)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)
        gc.freeze()  # what is inherited stays shared
        _mine.checker = self._checker


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Block Ctrl-C in this thread and what it forks; it is delivered here afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_mine = threading.local()


def _check(unit: Unit) -> Checked:
    checker: Checker = _mine.checker
    return checker.check(unit)


def _may_fork(io: FileIO) -> bool:
    """Whether the child of a fork could work: not when there are threads, which may hold locks."""
    alone = threading.active_count() == 1 and not current_process().daemon
    return sys.platform == "linux" and type(io) is FileIO and alone


def _impossible(table: Table) -> Iterator[BadRecord]:
    pack, entries = table
    for row in np.flatnonzero(odd(entries.table)).tolist():
        chunk_id = entries.id(row)
        error = unreadable(chunk_id, f"its record in pack {pack} declares impossible lengths")
        yield BadRecord(pack, int(entries.table["offset"][row]), chunk_id, False, error)
