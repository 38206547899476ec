"""``deltackpt diff``: what differs between two steps, and by how much."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

import click

from deltackpt_tools.changes import Diff, ModuleChange, TensorChange
from deltackpt_tools.depths import depth_option
from deltackpt_tools.diffing import diff
from deltackpt_tools.exits import Exit
from deltackpt_tools.module_paths import Depth
from deltackpt_tools.numeric import needs_package
from deltackpt_tools.output import (
    counted,
    document,
    figure,
    json_option,
    percent,
    safe,
    size,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.parameters import labelled
from deltackpt_tools.progress import Progress

_RENAMES_SHOWN = 3  # of one kind


def _kind(change: TensorChange) -> str:
    if change.change == "reshaped":
        words: list[str] = []
        if change.old_dtype != change.dtype:
            words.append(f"{change.old_dtype} -> {change.dtype}")
        if change.old_shape != change.shape:
            words.append(f"{list(change.old_shape or ())} -> {list(change.shape or ())}")
        return ", ".join([*words, *change.attributes])
    if change.old_value is not None and change.new_value is not None:
        return f"{change.old_value} -> {change.new_value}"
    return {"unproven": "differently cut"}.get(change.change, change.change)


def _found(result: Diff) -> str:
    where = f"{result.old.run}@{result.old.step} -> {result.new.run}@{result.new.step}"
    if result.identical:
        return f"{where}: identical ({counted(len(result.compared), 'tensor')} compared)"
    differing = len(result.tensors)
    return (
        f"{where}: {differing} of {counted(len(result.compared), 'tensor')} and "
        f"{counted(len(result.values), 'value')} differ; "
        f"{size(result.changed_bytes)} of {size(result.bytes)} "
        f"({percent(result.changed_bytes / result.bytes if result.bytes else 0)}), "
        f"{result.changed_chunks} of {counted(result.chunks, 'chunk')}"
    )


def _tensor_rows(result: Diff) -> list[list[str]]:
    head = ["path", "what", "dtype", "shape", "differs", "of", "share", "chunks"]
    if result.with_values:
        head += ["elements", "max", "rms", "update", "new NaN/Inf"]
    rows = [head]
    for change in result.tensors:
        if change.change == "renamed":
            continue
        row = [
            safe(labelled(change.path, change.parameter_name)),
            _kind(change),
            change.dtype or change.old_dtype or "",
            str(list(change.shape or change.old_shape or ())),
            size(change.changed_bytes),
            size(change.bytes),
            percent(change.share),
            f"{change.changed_chunks}/{change.chunks}" if change.chunks else "-",
        ]
        stats = change.values
        if result.with_values and stats is None:
            row += ["-"] * 5
        elif stats is not None:
            broken = "-"
            if stats.new_nan is not None:
                broken = f"{stats.new_nan}/{stats.new_inf}"
            row += [
                percent(stats.share),
                figure(stats.max_difference),
                figure(stats.rms),
                figure(stats.relative_update),
                "" if broken == "0/0" else broken,
            ]
        rows.append(row)
    return rows if len(rows) > 1 else []


def _module_rows(modules: tuple[ModuleChange, ...], values: bool) -> list[list[str]]:
    head = ["module", "tensors", "differs", "of", "share"]
    rows = [[*head, "update", "new NaN"] if values else head]
    for one in modules:
        if not one.differing:
            continue
        row = [
            safe(labelled(one.module, one.parameter_name)),
            f"{one.differing}/{one.tensors}",
            size(one.changed_bytes),
            size(one.bytes),
            percent(one.share),
        ]
        if values:
            row += [figure(one.update), str(one.new_nan) if one.new_nan else ""]
        rows.append(row)
    same = sum(1 for one in modules if not one.differing)
    if same:
        rows.append([f"({counted(same, 'module')} without a difference)"])
    return rows if len(rows) > 1 else []


def _renames(result: Diff) -> list[str]:
    """Renamed tensors, those of one kind (what precedes the common end of the names) together."""
    renamed = [
        (change.old_path or "", change.path)
        for change in result.tensors
        if change.change == "renamed"
    ]

    def kind(names: tuple[str, str]) -> tuple[str, str]:
        old, new = (name.replace(".", "/").split("/") for name in names)
        common = 0
        while common < min(len(old), len(new)) and old[-1 - common] == new[-1 - common]:
            common += 1
        added = "/".join(new[: len(new) - common])
        removed = "/".join(old[: len(old) - common])
        return removed, added

    lines: list[str] = []
    for _, group in groupby(sorted(renamed, key=kind), key=kind):
        names = list(group)
        lines += [f"{safe(old)} -> {safe(new)}" for old, new in names[:_RENAMES_SHOWN]]
        if len(names) > _RENAMES_SHOWN:
            lines.append(f"... and {len(names) - _RENAMES_SHOWN} more like these")
    return lines


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _lines(result: Diff, depth: Depth | None) -> list[str]:
    lines = [_found(result)]
    right = frozenset({4, 5, 6, 7, 8, 9, 10, 11, 12})
    if depth is None:
        lines += _section("tensors", table(_tensor_rows(result), right=right))
    else:
        rows = _module_rows(result.modules(depth), result.with_values)
        lines += _section("modules", table(rows, right=frozenset({1, 2, 3, 4, 5, 6})))
    lines += _section("renamed, with equal content", _renames(result))
    lines += _section(
        "values",
        table(
            [
                [safe(v.path), f"{safe(v.old or '(absent)')} -> {safe(v.new or '(absent)')}"]
                for v in result.values
            ]
        ),
    )
    if result.structure_changed and not (result.tensors or result.values):
        lines += ["", "the containers (their kinds or order) differ, no leaf does"]
    lines += _hints(result)
    return lines


def _hints(result: Diff) -> list[str]:
    hints: list[str] = []
    if any(change.change == "unproven" for change in result.tensors):
        hints.append(
            "'differently cut': the chunks have other sizes or places; --values reads and compares"
        )
    unread = {
        change.dtype
        for change in result.tensors
        if change.values is not None and change.dtype and needs_package(change.dtype)
    }
    if unread:
        names = ", ".join(sorted(unread))
        hints.append(f"{names} compared by bits only: pip install 'deltackpt[inspect]' reads them")
    return ["", *hints] if hints else []


@click.command("diff")
@store_argument
@click.argument("old", metavar="[A]", default="latest")
@click.argument("new", metavar="[B]", required=False)
@click.option("--other", metavar="STORE", help="Take B from this store.")
@click.option(
    "--only",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Only tensors and values whose path matches (may be repeated; '*' crosses '/').",
)
@depth_option("Fold tensors to modules")
@click.option(
    "--values",
    is_flag=True,
    help="Read the chunks that differ: share of elements changed, largest and RMS difference, "
    "relative update (norm of the difference by norm of the old), NaN and Inf that appeared.",
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    store_path: str,
    old: str,
    new: str | None,
    other: str | None,
    globs: tuple[str, ...],
    depth: Depth | None,
    values: bool,
    as_json: bool,
) -> None:
    """Show what differs between the steps A and B: tensors, modules, plain values.

    A and B are each RUN@STEP, @STEP, RUN (its newest step), a pin or 'latest'. Without B, A (or the
    newest step) is compared with the step it continues, or with the newest of --other. Reads
    manifests only, unless --values.
    To find which layers a fine-tuning changed, compare its first and last step with --depth; to
    find when a NaN appeared, see 'blame --nan'. Exit code 0 when bit-identical, 1 when not.
    """
    for name in (old, new):
        if name and os.sep in name:
            raise click.UsageError(
                f"{name!r} does not name a step: of two stores the second is named with --other, "
                f"as in 'diff {store_path} A B --other {name}'"
            )
    with Progress("diff") as progress:
        result = diff(
            store_path, old, new, other=other, only=globs, values=values, progress=progress.update
        )
    if as_json:
        write_json(_document(result, depth))
    else:
        click.echo("\n".join(_lines(result, depth)))
    context.exit(Exit.OK if result.identical else Exit.FINDING)


def _document(result: Diff, depth: Depth | None) -> dict[str, Any]:
    modules = [] if depth is None else [one.to_dict() for one in result.modules(depth)]
    return document("diff", store=result.old.store, **result.to_dict(), modules=modules)
