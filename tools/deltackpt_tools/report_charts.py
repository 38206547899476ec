"""The data behind the charts of the report page: what the script in the page draws."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from deltackpt_tools.survey import RunSurvey, SavePoint, Shares

COLUMNS = 150  # of the heat-map: more steps are put together

Series = list[float | None]


def line(
    title: str, unit: str, saves: tuple[SavePoint, ...], *series: tuple[str, Series], log: bool
) -> dict[str, Any]:
    """A chart of one or more series over the steps; `unit` is bytes, seconds or number."""
    return {
        "kind": "line",
        "title": title,
        "unit": unit,
        "log": log,
        "x": [save.step for save in saves],
        "series": [
            {"name": name, "values": _finite(values), "color": i % 4, "dash": i >= 4}
            for i, (name, values) in enumerate(series)
        ],
    }


def _finite(values: Series) -> Series:
    return [None if v is None or v - v != 0 else float(f"{v:.6g}") for v in values]


def bins(count: int) -> list[tuple[int, int]]:
    """(first, end) of the saves that share a column of the heat-map."""
    columns = min(count, COLUMNS)
    edges = [round(i * count / columns) for i in range(columns + 1)]
    return list(pairwise(edges))


def binned(values: Shares, count: int) -> Shares:
    """`values` (modules x saves) with the saves of one column replaced by their mean."""
    found: list[Shares] = []
    for first, end in bins(count):
        part = values[:, first:end]
        there = ~np.isnan(part)
        sums = np.where(there, part, 0).sum(axis=1)
        counts = there.sum(axis=1)
        found.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).astype(np.float32))
    return np.stack(found, axis=1) if found else values[:, :0]


def heat(survey: RunSurvey) -> dict[str, Any]:
    """The heat-map: rows of modules, columns of steps."""
    count = len(survey.saves)
    steps = [save.step for save in survey.saves]

    def matrix(values: Shares) -> list[Series]:
        rows: list[list[float]] = binned(values, count).tolist()
        return [[None if v != v else float(f"{v:.4g}") for v in row] for row in rows]

    return {
        "kind": "heat",
        "rows": survey.module_labels(),
        "columns": [[steps[first], steps[end - 1]] for first, end in bins(count)],
        "share": matrix(survey.share),
        "update": None if survey.update is None else matrix(survey.update),
    }


def cumulated(values: Series) -> Series:
    """Running totals; what is not known counts as nothing."""
    total = 0.0
    sums: Series = []
    for value in values:
        total += value or 0.0
        sums.append(total)
    return sums
