"""Records as plain values and as pandas tables, for notebooks. Imports pandas when asked for it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from deltackpt_store.errors import InvalidInputError


def as_dict(value: Any) -> dict[str, Any]:
    """A frozen dataclass as nested dicts and lists; digests stay as they are."""
    return {
        field.name: _plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.repr
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        to_dict = getattr(value, "to_dict", None)
        return as_dict(value) if to_dict is None else to_dict()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of `rows`; nested dicts become ``outer.inner`` columns.

    InvalidInputError when pandas is not installed.
    """
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise InvalidInputError(
            "to_dataframe() needs pandas, which is not installed",
            kind="missing-package",
            hint="pip install pandas, or use to_dict()",
        ) from error
    flat: list[dict[str, Any]] = []
    for row in rows:
        columns: dict[str, Any] = {}
        for key, value in row.items():
            if isinstance(value, dict):
                inner = cast("dict[str, Any]", value)
                columns.update({f"{key}.{name}": item for name, item in inner.items()})
            else:
                columns[key] = value
        flat.append(columns)
    return pandas.DataFrame(flat)
