"""A progress line on stderr, for people at a terminal only: logs and pipes never see it."""

from __future__ import annotations

import sys
import time

import click

from deltackpt_tools.output import size

_INTERVAL = 0.1  # seconds between two drawings


class Progress:
    """``with Progress("verify", total) as p: p.advance(n)``; counts bytes unless `unit` is given.

    Draws nothing unless stderr is a terminal, nor with ``--json``.
    Calls may come from one thread at a time.
    """

    def __init__(self, label: str, total: int | None = None, *, unit: str = "bytes") -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._unit = unit
        context = click.get_current_context(silent=True)
        quiet = context is not None and bool(context.meta.get("deltackpt.json"))
        self._live = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._last = 0.0
        self._width = 0

    def advance(self, count: int) -> None:
        self.update(self.done + count, self.total)

    def update(self, done: int, total: int | None) -> None:
        self.done, self.total = done, total
        now = time.monotonic()
        if self._live and now - self._last >= _INTERVAL:
            self._last = now
            self._draw()

    def _count(self, value: int) -> str:
        return size(value) if self._unit == "bytes" else f"{value} {self._unit}".rstrip()

    def _draw(self) -> None:
        text = f"{self.label}: {self._count(self.done)}"
        if self.total:
            share = min(1.0, self.done / self.total)
            bar = "#" * round(share * 30)
            counts = f"{self._count(self.done)}/{self._count(self.total)}"
            text = f"{self.label}: [{bar:<30}] {share:4.0%}  {counts}"
        self._width = max(self._width, len(text))
        sys.stderr.write(f"\r{text:<{self._width}}")
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
