"""Rates and sizes as people type them: ``50MB/s``, ``2 GiB``, ``1500000``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*(?:/\s*s)?\s*\Z")


def parse_rate(text: str) -> float:
    """Bytes per second; ``/s`` may be left out. ValueError for anything else, and for zero."""
    match = _RATE.match(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is no rate: write for example 50MB/s or 200MiB/s")
    return float(match[1]) * unit


if TYPE_CHECKING:  # older versions of click do not know the argument
    _ParamType = click.ParamType[float]
else:
    _ParamType = click.ParamType


class RateType(_ParamType):
    """An option's value that is a rate."""

    name = "rate"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_rate(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


RATE = RateType()
