"""Typed events for observers of a checkpointer.

An observer is any object with an ``on_event(event)`` method. The events of one save come in order;
those of different saves may come at once, on whichever thread the thing happened: `Staged` on the
staging thread; `Committed`, `Compacted` and `Failed` on a thread of their own, except that a save
which fails while it is staged fails there; `StoreCompacted` and `CompactionFailed` on another
one (in the caller's, when the system has none to give); `Skipped`, `Restored` and `Preempted` in
the caller's. An observer should return quickly: what that thread does next waits for it; so it
cannot save, wait or close, which is refused there. What an observer raises is logged and goes no
further, but for an exit or Ctrl-C in the main thread. `Restored` is what `Checkpointer.restore`
returns.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import threading
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from deltackpt_store.compact_report import CompactReport
from deltackpt_store.errors import DeltackptError, InvalidInputError, told

from .report import SaveReport
from .restore import Restored

_log = logging.getLogger("deltackpt.events")


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """The bytes of `step` are safe from mutation; `staged_bytes` of them were copied."""

    run: str
    step: int
    seconds: float
    staged_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    """`report.step` is durable and listed: it survives power loss from here on."""

    run: str
    step: int
    report: SaveReport


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """No save of `step` was made because others were in flight. `policy`: "skip", "coalesce"."""

    run: str
    step: int
    policy: str


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The save of `step` failed; earlier steps are untouched. One that `durable_timeout` gave up
    may be on the list all the same; as far as that can be seen, its error says so."""

    run: str
    step: int
    error: DeltackptError


@dataclasses.dataclass(frozen=True, slots=True)
class Preempted:
    """A signal of `save_on` was noticed and `step` is being saved because of it."""

    run: str
    step: int
    signal: int


@dataclasses.dataclass(frozen=True, slots=True)
class Compacted:
    """After `step` became durable, retention took the `removed` steps of `run` off the list."""

    run: str
    step: int
    removed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StoreCompacted:
    """A compaction during the training of `run` has done something: `Checkpointer(compact=)`."""

    run: str
    report: CompactReport


@dataclasses.dataclass(frozen=True, slots=True)
class CompactionFailed:
    """A compaction during the training of `run` failed, or its process ended. Nothing is lost."""

    run: str
    error: DeltackptError


Event = (
    Staged
    | Committed
    | Skipped
    | Failed
    | Restored
    | Preempted
    | Compacted
    | StoreCompacted
    | CompactionFailed
)


@runtime_checkable
class Observer(Protocol):
    """Receives events. Called on several threads; must return quickly, and cannot save or wait."""

    def on_event(self, event: Event, /) -> None: ...


class Observers:
    """The observers of one checkpointer; calling it delivers an event to each of them."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        try:
            self._observers = tuple(observers)
        except TypeError as error:
            raise InvalidInputError(
                f"observers must be a sequence of observers, got {told(observers)}",
                hint="write observers=[one]",
                option="observers",
            ) from error
        for observer in self._observers:
            method: object = getattr(observer, "on_event", None)
            if not callable(method):
                raise InvalidInputError(
                    f"observers: {type(observer).__name__} has no method on_event(event)",
                    option="observers",
                )
            if isinstance(observer, type) and inspect.isfunction(method):
                raise InvalidInputError(
                    f"observers: {observer.__name__} is a class, and its on_event is for objects",
                    hint=f"write observers=[{observer.__name__}()]",
                    option="observers",
                )

    def __call__(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer.on_event(event)
            except BaseException as error:
                main = threading.current_thread() is threading.main_thread()
                if main and not isinstance(error, Exception):  # Ctrl-C, or an exit that works there
                    raise
                _log.exception(
                    "observer %s failed on %s", type(observer).__name__, type(event).__name__
                )
