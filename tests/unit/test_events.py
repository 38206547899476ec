"""Observers hear everything in order, and cannot break a save."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from typing import Any

import pytest
from deltackpt_store.errors import InvalidInputError, StorageError

from deltackpt import events
from deltackpt.events import Observer, Observers

EVENTS: list[events.Event] = [
    events.Staged("main", 1, 0.5, 100),
    events.Skipped("main", 2, "skip"),
    events.Failed("main", 3, StorageError("full")),
    events.Preempted("main", 5, 15),
    events.Compacted("main", 6, (1, 2)),
]


class Recorder:
    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def on_event(self, event: events.Event, /) -> None:
        self.events.append(event)


class Broken:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error or RuntimeError("observer is broken")

    def on_event(self, event: events.Event, /) -> None:
        raise self.error


def test_every_observer_gets_every_event() -> None:
    one, two = Recorder(), Recorder()
    tell = Observers([one, two])
    for event in EVENTS:
        tell(event)
    assert one.events == two.events == EVENTS


def test_a_failing_observer_is_logged_and_bothers_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Prevents: a metrics hook that takes the training run down."""
    good = Recorder()
    with caplog.at_level(logging.ERROR, "deltackpt.events"):
        Observers([Broken(), good])(EVENTS[0])
    assert good.events == EVENTS[:1]
    assert "Broken" in caplog.text
    assert "observer is broken" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
def test_an_observer_that_exits_ends_no_thread_but_the_main_one(error: BaseException) -> None:
    """Prevents: saves that wait for ever for a thread which an observer ended."""
    good, survived = Recorder(), list[str]()
    tell = Observers([Broken(error), good])

    def background() -> None:
        tell(EVENTS[0])
        survived.append("it")

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert survived == ["it"]
    assert good.events == EVENTS[:1]
    with pytest.raises(type(error)):
        tell(EVENTS[1])


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_are_frozen(event: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 9


def test_what_is_no_observer_is_refused() -> None:
    assert isinstance(Recorder(), Observer)
    for bad in (print, object(), "observer"):
        with pytest.raises(InvalidInputError, match="observers"):
            Observers([bad])  # users' mistake
