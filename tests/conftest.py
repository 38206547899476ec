"""Figures that tests tell, summed up and printed at the end of a run.

`figure("kills survived", 1)` in a test; figures of tests that pass are added up by name, over all
processes of the run, and printed under "figures" (docs/durability.md names them). Figures called
"... lost" are printed even when they are 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

Figure = Callable[[str, int], None]


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    def tell(name: str, value: int) -> None:
        request.node.user_properties.append(("figure", (name, value)))

    return tell


def pytest_terminal_summary(terminalreporter: Any) -> None:
    figures: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", ()):
        if report.when == "teardown":
            continue
        for key, told in report.user_properties:
            if key == "figure":
                figures[told[0]] += told[1]
    if figures:
        terminalreporter.section("figures")
        for name, value in sorted(figures.items()):
            terminalreporter.write_line(f"{value:>10,}  {name}")
