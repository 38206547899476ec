"""What callers from Python hand over, checked: each error names the argument.

The command line has checked its own options before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from deltackpt_store.errors import InvalidInputError, told


def check_text(name: str, value: Any) -> str:
    """InvalidInputError unless `value` is a str."""
    if not isinstance(value, str):
        raise _refused(name, "a str", value)
    return value


def check_globs(value: str | Iterable[str]) -> tuple[str, ...]:
    """The argument `only`: one glob, or several."""
    globs: Any = (value,) if isinstance(value, str) else value
    if not isinstance(globs, Iterable):
        raise _refused("only", "a glob or several", value)
    return tuple(check_text("only", glob) for glob in cast("Iterable[Any]", globs))


def check_whole(name: str, value: Any) -> None:
    """InvalidInputError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(name, "a whole number of at least 1", value)


def check_depth(value: Any) -> None:
    """InvalidInputError unless `value` is a number of parts, or "auto"."""
    if value != "auto":
        try:
            check_whole("depth", value)
        except InvalidInputError as error:
            raise _refused("depth", 'a whole number of at least 1, or "auto"', value) from error


def check_seconds(name: str, value: Any, *, zero: bool = False) -> None:
    """InvalidInputError unless `value` is a number of seconds: larger than 0, or also 0."""
    least = "of at least 0" if zero else "larger than 0"
    if not _is_number(value) or value < 0 or not (value or zero):
        raise _refused(name, f"a number of seconds {least}", value)


def check_share(name: str, value: Any) -> None:
    """InvalidInputError unless `value` is a share: larger than 0, at most 1."""
    if not _is_number(value) or not 0 < value <= 1:
        raise _refused(name, "a share larger than 0 and at most 1", value)


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _refused(name: str, wanted: str, value: object) -> InvalidInputError:
    return InvalidInputError(f"{name} must be {wanted}, got {told(value)}", option=name)
