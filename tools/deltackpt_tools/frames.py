"""Records as plain values and as pandas tables, for notebooks. Imports pandas when asked for it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from deltackpt_store.errors import InvalidInputError


class Record:
    """What the dataclasses of the Python API have in common."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as nested dicts and lists; digests stay as they are."""
        fields = dataclasses.fields(cast("Any", self))
        return {field.name: _plain(getattr(self, field.name)) for field in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
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
