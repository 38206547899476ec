"""HTML tables of the report page, which sort and filter in the browser and read well without it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from deltackpt_tools.output import safe


class Cell(NamedTuple):
    """A table cell: what is shown, and the number to sort by (None: the text)."""

    text: str
    value: float | None = None


class Column(NamedTuple):
    """A column's title; `numeric` ones are flushed right and sort by `Cell.value`."""

    title: str
    numeric: bool = False
    path: bool = False


def text(value: str) -> str:
    """`value` from a store, safe inside HTML."""
    return escape(safe(value), quote=True)


def table(
    name: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    caption: str,
    filtered: bool = False,
) -> str:
    """A table with the id `name`; `filtered` puts a search field above it."""
    head = "".join(
        f'<th scope="col"{_class(column)}><button type="button">{text(column.title)}</button></th>'
        for column in columns
    )
    body = "".join(
        "<tr>" + "".join(map(_cell, row, columns)) + "</tr>\n" for row in rows
    )  # fmt: skip
    tools = ""
    if filtered:
        tools = (
            f'<div class="tools"><label>Filter <input type="search" data-filters="{name}" '
            f'aria-label="Filter rows: {text(caption)}"></label>'
            f'<span class="count" aria-live="polite"></span></div>'
        )
    return (
        f'{tools}<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f'<table class="sortable" id="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def details(summary: str, inner: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{inner}</details>"


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """Figures that matter: (figure, what it is, "" or "good" or "bad")."""
    inner = "".join(
        f'<div class="tile {mood}"><b>{text(figure)}</b><span>{text(what)}</span></div>'
        for figure, what, mood in items
    )
    return f'<div class="tiles">{inner}</div>'


def _class(column: Column) -> str:
    return ' class="n"' if column.numeric else ""


def _cell(cell: Cell, column: Column) -> str:
    if column.numeric:
        value = "" if cell.value is None else f' data-v="{cell.value:.9g}"'
        return f'<td class="n"{value}>{text(cell.text)}</td>'
    kind = ' class="path"' if column.path else ""
    return f"<td{kind}>{text(cell.text)}</td>"
