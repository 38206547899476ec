"""Durations, sizes, rates and shares as people type them: ``6h``, ``20GB``, ``50MB/s``, ``2%``."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import click

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PIECE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d|w)?\s*")


LONGEST = 3_155_760_000.0
"""Seconds: a hundred years. What waits for longer is refused by the operating system."""


def parse_duration(text: str) -> float:
    """Seconds, up to `LONGEST`. ValueError for anything else, and for a number without its unit,
    of which nobody can tell whether it means seconds, minutes or hours."""
    position, total = 0, 0.0
    while position < len(text) or not position:
        match = _PIECE.match(text, position)
        if match is None or not match[0]:
            raise ValueError(f"{text!r} is no duration: write for example 90s, 45m, 6h or 1d12h")
        if match[2] is None:
            raise ValueError(f"{text!r} lacks the unit: write for example 90s, 45m, 6h or 1d12h")
        total += float(match[1]) * _UNITS[match[2]]
        position = match.end()
    if total > LONGEST:
        raise ValueError(f"{text!r} is more than a hundred years")
    return total


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B\Z")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int | None:
    """Bytes: ``20GB`` (powers of 1000) or ``512MiB`` (of 1024). None when it is no size."""
    match = _SIZE.match(text.strip())
    if match is None:
        return None
    size = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]]
    return int(size) if math.isfinite(size) else None


_RATE_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*(?:/\s*s)?\s*\Z")


def parse_rate(text: str) -> float:
    """Bytes per second; ``/s`` may be left out. ValueError for anything else, for zero, and for a
    number without its unit, which would rarely mean bytes."""
    match = _RATE.match(text)
    if match is not None and not match[2]:
        raise ValueError(f"{text!r} lacks the unit: write for example 50MB/s or 200MiB/s")
    unit = _RATE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is no rate: write for example 50MB/s or 200MiB/s")
    return float(match[1]) * unit


def parse_share(text: str) -> float:
    """``2%`` or ``0.02`` as 0.02. ValueError unless between 0 and 1 (exclusive)."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ValueError(f"{text!r} is no share: write for example 2% or 0.02")
    return value


if TYPE_CHECKING:  # older versions of click do not know the argument
    _ParamType = click.ParamType[float]
else:
    _ParamType = click.ParamType


class _Parsed(_ParamType):
    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.FloatRange):
    """A number of seconds from `min` up to `LONGEST`."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            known = float(value) <= LONGEST  # which NaN is not
        except ValueError:
            known = False
        if not known:
            self.fail(
                f"{value!r} is no number of seconds, or more than a hundred years", param, ctx
            )
        return super().convert(value, param, ctx)


def _parse_positive(text: str) -> float:
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError(f"{text!r} is no time at all: write for example 90s, 45m, 6h or 1d12h")
    return seconds


DURATION = _Parsed("duration", _parse_positive)
DURATION_OR_NONE = _Parsed("duration", parse_duration)
"""Also ``0s``."""
SHARE = _Parsed("share", parse_share)
RATE = _Parsed("rate", parse_rate)
