"""How many cores the writer takes for encoding: never one that somebody else uses."""

from __future__ import annotations

import os

import pytest
from deltackpt_store import idle
from deltackpt_store.idle import IdleCores


class Machine:
    """Cores and a clock of which the test says what they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.now = self.idle = self.own = 0.0
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr(idle.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(idle, "_idle_seconds", lambda: self.idle)

    def run(self, seconds: float, *, idle: float, own: float) -> None:
        """So many cores are idle, and so many used by the writer and its helpers."""
        self.now += seconds
        self.idle += seconds * idle
        self.own += seconds * own


@pytest.mark.parametrize(
    ("cores", "idle_cores", "own", "count"),
    [
        (2, 2.0, 0.0, 2),  # the trainer waits
        (2, 1.0, 1.0, 2),  # the writer alone works
        (2, 0.0, 2.0, 2),  # it has both cores already, and keeps them
        (2, 0.0, 1.0, 1),  # the trainer uses the other
        (2, 0.0, 0.6, 1),  # the trainer uses both
        (8, 7.0, 1.0, 4),
        (8, 0.5, 2.0, 2),
        (1, 1.0, 0.0, 1),
    ],
)
def test_idle_cores_are_counted_and_own_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch, cores: int, idle_cores: float, own: float, count: int
) -> None:
    machine = Machine(monkeypatch, cores)
    found = IdleCores(4, lambda: machine.own)
    machine.run(0.06, idle=idle_cores, own=own)
    assert found.count() == count


def test_it_follows_what_others_do_within_steps_of_20_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    found = IdleCores(4, lambda: machine.own)
    machine.run(10.0, idle=2, own=0)
    assert found.count() == 2
    machine.run(0.015, idle=0, own=1)
    assert found.count() == 2
    machine.run(0.015, idle=0, own=1)
    assert found.count() == 1
    machine.run(0.025, idle=1, own=1)
    assert found.count() == 2


def test_where_nothing_tells_it_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(idle, "_idle_seconds", lambda: None)
    found = IdleCores(4, lambda: 0.0)
    monkeypatch.setattr(idle.time, "monotonic", lambda: 1e12)
    assert found.count() == 1
