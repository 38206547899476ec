"""Prevents: a fault that needs several operations, crashes and errors one after the other.

A short soak; `make soak` runs longer ones with other seeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from expedition import Expedition
from soaking import Voyage

Figure = Callable[[str, int], None]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(2))
def test_random_operations_power_cuts_and_errors(part: int, figure: Figure) -> None:
    for number in range(10):
        voyage = Voyage(f"{part}:{number}")
        try:
            voyage.go()
        except BaseException:
            print("\n".join(voyage.log))
            raise
        for name, count in voyage.figures.items():
            figure(f"soak: {name}", count)


def test_a_seed_repeats_every_operation_and_what_came_of_it() -> None:
    first, second = Voyage("repeated"), Voyage("repeated")
    first.go()
    second.go()
    assert first.log == second.log
    assert first.figures == second.figures
    other = Voyage("another")
    other.go()
    assert other.log != first.log


def test_real_processes(tmp_path: Path, figure: Figure) -> None:
    expedition = Expedition("1", str(tmp_path / "store"), operations=5)
    expedition.go()
    figure("kills survived, at random times", expedition.figures["kills"])
    assert expedition.figures["kills"] >= 1
