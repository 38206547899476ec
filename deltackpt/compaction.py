"""Compacting the store while training goes on: the option, and the process that does it."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

import msgspec
from deltackpt_store.compact_job import JobSettings, Told
from deltackpt_store.compact_report import CompactReport
from deltackpt_store.errors import DeltackptError, InvalidInputError, WriterError, from_wire, told
from deltackpt_store.launch import error_file, last_words, start_compactions

from .events import CompactionFailed, StoreCompacted
from .policy import by_name, is_count, is_number, shown_as_made

_log = logging.getLogger("deltackpt")

_END_SECONDS = 5.0


@shown_as_made
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """When and how a running training's store is compacted: see `deltackpt_store.compact`.

    `interval`: seconds between compactions. `when_ratio`: a new base only when the coded chunks of
    the newest step take more than so many times what they are coded against; `every`: only after
    at least so many commits; None: no such condition. `min_live_share`: packs of which less is
    needed are rewritten. `max_rate`: bytes read and written per second, None for no bound.
    `InvalidInputError` names the value that cannot be used.
    """

    interval: float = 300.0
    when_ratio: float | None = 0.5
    every: int | None = None
    min_live_share: float = 0.5
    max_rate: float | None = 100e6

    def __new__(cls, *values: object, **_: object) -> Self:
        return by_name(cls, values, "Compact(interval=600)")

    def __post_init__(self) -> None:
        for name in ("interval", "max_rate", "when_ratio", "min_live_share"):
            value: Any = getattr(self, name)
            optional, zero = name in ("max_rate", "when_ratio"), name.startswith(("when", "min"))
            if optional and value is None:
                continue
            if not is_number(value) or value < 0 or not (value or zero):
                kind = "a number of at least 0" if zero else "a positive number"
                raise InvalidInputError(
                    f"compact.{name} must be {kind}{' or None' if optional else ''}, got"
                    f" {told(value)}",
                    option=f"compact.{name}",
                )
        if self.min_live_share > 1:
            raise InvalidInputError(
                f"compact.min_live_share is a share of at most 1, got {told(self.min_live_share)}",
                option="compact.min_live_share",
            )
        if self.every is not None and (not is_count(self.every) or self.every < 1):
            raise InvalidInputError(
                f"compact.every must be a whole number of at least 1, got {told(self.every)}",
                option="compact.every",
            )


def check_compact(value: Any) -> Compact | None:
    """The option `compact`: None, "auto" or :class:`Compact`."""
    if value is None or isinstance(value, Compact):
        return value
    if isinstance(value, str) and value == "auto":
        return Compact()
    raise InvalidInputError(
        f'compact must be "auto", Compact(...) or None, got {told(value)}', option="compact"
    )


class Compactions:
    """The compacting process of one checkpointer.

    A thread starts the process, waits for its reports, and hands each outcome to the
    observers. When the process itself ends, that is told too, once, and training goes on without.
    """

    def __init__(
        self,
        store: str,
        run: str,
        options: Compact,
        tell: Callable[[StoreCompacted | CompactionFailed], None],
    ) -> None:
        self._store, self._run = store, run
        self._settings = JobSettings(
            run=run, when_ratio=options.when_ratio, every=options.every,
            min_live_share=options.min_live_share, max_rate=options.max_rate,
            interval=options.interval,
        )  # fmt: skip
        self._tell = tell
        self._lock = threading.RLock()  # a finalizer may call `end` in a thread that has it
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._begun = self._closed = False

    def start(self) -> None:
        """Begin, at the first call. Returns at once; a failure to begin is reported like others."""
        if self._begun or self._closed:
            return
        self._begun = True
        _living.add(self)
        thread = threading.Thread(target=self._watch, name="deltackpt-compactions", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            self._deliver(WriterError(
                f"no thread can be started for compaction: {error}", kind="no-thread",
                hint="raise the limit on threads, processes or memory (ulimit -u, -v)",
            ))  # fmt: skip
        else:
            self._thread = thread

    def close(self) -> None:
        """End the process, in whatever it is doing: nothing is lost by that. Idempotent."""
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    def end(self) -> None:
        """Kill the process, and do not wait for that."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        if self._process is not None:
            self._process.returncode = 0

    def _watch(self) -> None:
        words = error_file()
        try:
            with self._lock:
                if self._closed:
                    return
                settings = msgspec.json.encode(self._settings).decode()
                self._process = start_compactions(self._store, settings, words)
                if self._closed:  # in the meantime, by a finalizer
                    self._process.kill()
            self._listen(self._process)
            code = self._process.wait()
            if not self._closed:
                self._deliver(WriterError(
                    f"the compacting process ended with code {code}: {last_words(words)}",
                    kind="compaction", hint="training goes on without compaction",
                ))  # fmt: skip
        except Exception as error:  # also what nobody has thought of: it must not fail unseen
            closed = self._closed
            self.end()
            if not closed:  # else it was killed in the middle of a line
                self._deliver(_as_failure(error))
            if self._process is not None:
                self._process.wait()
        finally:
            if words is not None:
                words.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if not line.startswith(b"{"):  # of a sitecustomize, which may print what it likes
                    continue
                message = msgspec.json.decode(line, type=Told)
                if message.report is not None:
                    self._deliver(message.report)
                elif message.error is not None:
                    self._deliver(from_wire(message.error))

    def _deliver(self, outcome: CompactReport | DeltackptError) -> None:
        if isinstance(outcome, DeltackptError):
            _log.warning("compaction failed, training goes on: %s", outcome)
            self._tell(CompactionFailed(self._run, outcome))
        else:
            self._tell(StoreCompacted(self._run, outcome))


def _as_failure(error: Exception) -> DeltackptError:
    """What is reported of an error in the thread itself."""
    if isinstance(error, DeltackptError):
        return error
    what = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return WriterError(f"cannot compact: {what}", kind="compaction")


_living: weakref.WeakSet[Compactions] = weakref.WeakSet()


def _forked() -> None:
    for one in list(_living):
        one.forget()


os.register_at_fork(after_in_child=_forked)
