"""What tests of all folders share: figures, and runs that repeat exactly.

`figure("kills survived", 1)` in a test; figures of tests that pass are added up by name, over all
processes of the run, and printed under "figures" (docs/durability.md names them). Figures called
"... lost" are printed even when they are 0.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

Figure = Callable[[str, int], None]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


if "mix_stderr" in inspect.signature(CliRunner).parameters:  # click before 8.2
    CliRunner.__init__ = functools.partialmethod(CliRunner.__init__, mix_stderr=False)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    def tell(name: str, value: int) -> None:
        request.node.user_properties.append(("figure", (name, value)))

    return tell


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs are written by the thread that saves: file calls come in the same order every time."""
    from deltackpt_store.io_thread import IoThread

    monkeypatch.setattr(IoThread, "_start", lambda _: False)


class Names:
    """Random names are numbers, which begin again when `count` is set to 0."""

    count = 0

    def token_hex(self, size: int = 32) -> str:
        self.count += 1
        return f"{self.count:0{2 * size}x}"


@pytest.fixture
def names(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Names:
    """File calls, and the names in them, are the same every time."""
    names = Names()
    monkeypatch.setattr(secrets, "token_hex", names.token_hex)
    return names


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
