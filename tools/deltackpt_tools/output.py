"""How commands speak: JSON documents for programs, aligned columns for people.

Every JSON document is one object on one line of stdout with `format` (``deltackpt.<command>/1``);
docs/cli.md lists the fields. New fields may appear; a field never changes its meaning under the
same number. Digests are lower-case hex, sizes are bytes, times are Unix seconds (UTC).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

FORMAT_VERSION = 1

PATH = click.Path(path_type=str, readable=False)
"""A path as it was given: reading it reports when it may not be read (exit code 14)."""


def _remember_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.meta["deltackpt.json"] = value
    return value


def json_option(function: _F) -> _F:
    """Adds ``--json`` (parameter `as_json`), which also decides how errors are reported."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_remember_json,
        help="One JSON document on stdout (fields: docs/cli.md).",
    )(function)


def store_argument(function: _F) -> _F:
    """Adds the positional STORE (parameter `store_path`)."""
    return click.argument("store_path", metavar="STORE", type=PATH)(function)


def document(command: str, **fields: Any) -> dict[str, Any]:
    return {"format": f"deltackpt.{command}/{FORMAT_VERSION}", **fields}


def error_document(
    error: BaseException, message: str, hint: str | None, code: int
) -> dict[str, Any]:
    context: dict[str, Any] = getattr(error, "context", {})
    kind = "internal"
    if isinstance(error, OSError):
        kind = "storage"
    elif isinstance(error, MemoryError):
        kind = "memory"
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    return document(
        "error",
        exit_code=code,
        error={
            "type": type(error).__name__,
            "kind": getattr(error, "kind", kind),
            "message": message,
            "hint": hint,
            "context": {key: plain(value) for key, value in context.items()},
        },
    )


def plain(value: Any) -> Any:
    """`value` as JSON knows it: bytes become hex, numbers that JSON lacks become strings."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - any mapping
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType] - any sequence
    return str(value)


def write_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(plain(value), ensure_ascii=True, allow_nan=False))


def size(count: float | None) -> str:
    """Bytes for people, in powers of 1000: ``999 B``, ``1.2 kB``, ``12.3 GB``."""
    if count is None:
        return "-"
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} PB"


def moment(seconds: float) -> str:
    """A time for people, in UTC, the same in every time zone: ``2026-01-31 12:00:00Z``."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "?"


def span(seconds: float) -> str:
    """A length of time for people, to one unit: ``45 s``, ``12 min``, ``3 h``, ``7 days``."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def seconds(value: float | None) -> str:
    """What something took, for people: ``12 ms``, ``1.25 s``, ``3.1 min``."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.2f} s"
    return f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


def percent(share: float) -> str:
    """``0 %``, ``0.03 %``, ``12.5 %``, ``100 %``: never 0 for what is not, nor 100."""
    if share <= 0 or share >= 1:
        return "0 %" if share <= 0 else "100 %"
    value = share * 100
    if value < 0.01:
        return "<0.01 %"
    return f"{min(value, 99.99):.2f} %" if value < 1 or value > 99 else f"{value:.1f} %"


def small_percent(share: float | None) -> str:
    """Two digits that count, or all before the point: ``0.0042 %``, ``112 %``."""
    if share is None:
        return "-"
    return f"{share * 100:.2g} %" if share < 0.995 else f"{share * 100:.0f} %"


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def safe(text: str) -> str:
    """`text` from a store with control characters shown, not obeyed, by the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


LONGEST_NAME = 40
"""Characters of a metric's name that are shown."""
_METRICS_WIDTH = 160


def shortened(text: str) -> str:
    """`text` from a store, safe to print, cut to `LONGEST_NAME` characters."""
    text = safe(text[: LONGEST_NAME + 1])
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 3] + "..."


def metrics_text(metrics: Mapping[str, float], digits: int = 6) -> str:
    """Metrics for people, on one line of a table: as many as fit, long names cut. JSON has all."""
    shown: list[str] = []
    width = 0
    for name, value in metrics.items():
        word = f"{shortened(name)}={value:.{digits}g}"
        width += len(word) + 1
        if shown and width > _METRICS_WIDTH:
            return " ".join([*shown, f"... ({len(metrics)} in all)"])
        shown.append(word)
    return " ".join(shown) or "-"


def table(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Aligned columns, two spaces apart, no trailing blanks; column numbers in `right` are flushed
    right."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths.get(column, 0), len(cell))
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
