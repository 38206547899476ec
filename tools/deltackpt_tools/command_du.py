"""``deltackpt du``: where the bytes are, by run and step."""

from __future__ import annotations

from typing import Any

import click

from deltackpt_tools.depths import depth_option
from deltackpt_tools.exits import Exit
from deltackpt_tools.module_paths import Depth
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    safe,
    size,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.progress import Progress
from deltackpt_tools.stores import open_store
from deltackpt_tools.usage import RunUsage, Usage, measure
from deltackpt_tools.usage_modules import ModuleUsage, measure_modules


def _lines(path: str, usage: Usage) -> list[str]:
    files = usage.files

    def row(title: str, folder: str) -> list[str]:
        count = counted(files.count.get(folder, 0), "file")
        return [title, size(files.bytes.get(folder, 0)), count]

    other = files.total - sum(files.bytes.get(name, 0) for name in ("packs", "manifests", "runs"))
    rows = [
        row("packs", "packs"),
        ["  referenced", size(usage.referenced), "chunks that a step or pin reaches"],
        ["  unreferenced", size(usage.unreferenced), "chunks that nothing reaches"],
        ["  duplicates", size(usage.duplicates), "further copies of chunks"],
        ["  overhead", size(usage.overhead), "record heads, padding, tables"],
        row("manifests", "manifests"),
        row("runs", "runs"),
        ["other", size(other), ""],
    ]
    lines = [f"{path}: {size(files.total)}"]
    lines += [f"  {line}" for line in table(rows, right=frozenset({1}))]
    for run in usage.runs:
        lines += ["", *_run_lines(run)]
    lines += [f"not counted: {safe(what)}: {why}" for what, why in usage.unreadable]
    return lines


def _module_lines(modules: list[ModuleUsage]) -> list[str]:
    rows = [["module", "total", "only here", "shared", "newest step", "chunks"]]
    for one in modules:
        sizes = (one.total_bytes, one.unique_bytes, one.shared_bytes, one.newest_bytes)
        rows.append([safe(one.module), *map(size, sizes), str(one.chunks)])
    right = frozenset({1, 2, 3, 4, 5})
    return ["", "modules, over all steps", *(f"  {line}" for line in table(rows, right=right))]


def _run_lines(run: RunUsage) -> list[str]:
    head = (
        f"run {run.run}: {counted(len(run.steps), 'step')}, {size(run.total)}, "
        f"of which {size(run.unique)} in no other run"
    )
    rows = [["step", "total", "only here", "added", ""]]
    for step in run.steps:
        note = f"{counted(step.missing, 'chunk')} missing" if step.missing else ""
        rows.append(
            [str(step.commit.step), size(step.total), size(step.unique), size(step.added), note]
        )
    right = frozenset({0, 1, 2, 3})
    return [head, *(f"  {line}" for line in table(rows, right=right))]


def _document(path: str, usage: Usage, modules: list[ModuleUsage]) -> dict[str, Any]:
    return document(
        "du",
        store=path,
        total_bytes=usage.files.total,
        files={
            folder or "top": {"bytes": usage.files.bytes[folder], "files": count}
            for folder, count in sorted(usage.files.count.items())
        },
        referenced_bytes=usage.referenced,
        unreferenced_bytes=usage.unreferenced,
        duplicate_bytes=usage.duplicates,
        overhead_bytes=usage.overhead,
        runs=[
            {
                "run": run.run,
                "total_bytes": run.total,
                "unique_bytes": run.unique,
                "steps": [
                    {
                        "step": step.commit.step,
                        "number": step.commit.number,
                        "total_bytes": step.total,
                        "unique_bytes": step.unique,
                        "added_bytes": step.added,
                        "missing_chunks": step.missing,
                    }
                    for step in run.steps
                ],
            }
            for run in usage.runs
        ],
        modules=[one.to_dict() for one in modules],
        unreadable=[{"what": what, "reason": why} for what, why in usage.unreadable],
    )


@click.command("du")
@store_argument
@depth_option("Also by module of the tensors")
@json_option
@click.pass_context
def command(context: click.Context, store_path: str, depth: Depth | None, as_json: bool) -> None:
    """Show where the bytes are, by run and step, and with --depth by module.

    'total' is what a step (or module) needs, 'only here' what no other step (module) needs and
    would become free without it, 'added' what no step listed before it needs. Exit code 3 when
    something could not be read and is not counted.
    """
    store = open_store(store_path)
    with Progress("steps", unit="") as progress:
        usage = measure(store, progress.update)
    modules: list[ModuleUsage] = []
    if depth is not None:
        with Progress("modules", unit="") as progress:
            modules = measure_modules(store, depth, progress.update)
    if as_json:
        write_json(_document(store.path, usage, modules))
    else:
        lines = _lines(store.path, usage)
        click.echo("\n".join(lines + (_module_lines(modules) if modules else [])))
    missing = any(step.missing for run in usage.runs for step in run.steps)
    context.exit(Exit.PARTIAL if usage.unreadable or missing else Exit.OK)
