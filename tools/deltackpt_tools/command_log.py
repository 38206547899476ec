"""``deltackpt log``: the saved steps of each run, newest first."""

from __future__ import annotations

import click

from deltackpt_tools.exits import Exit
from deltackpt_tools.logbook import Log, LoggedStep, RunLog, log, note
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    metrics_text,
    moment,
    safe,
    size,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.stores import SHORT_DIGEST


def _table(run: RunLog) -> list[str]:
    rows = [["step", "number", "saved", "state", "new", "root", "metrics", "note"]]
    for entry in run.commits:
        rows.append(
            [
                str(entry.step),
                str(entry.number),
                moment(entry.created),
                size(entry.state_bytes),
                size(entry.written_bytes),
                entry.root[:SHORT_DIGEST],
                metrics_text(entry.metrics),
                note(entry, run.before.get(entry.number)),
            ]
        )
    return table(rows, right=frozenset({0, 1, 3, 4}))


def _run_lines(run: RunLog, stat: bool) -> list[str]:
    from deltackpt_tools import history_stat

    head = f"run {run.run}: {counted(run.steps, 'step')}"
    lines = [head if run.newest is None else f"{head}, newest {run.newest}"]
    if run.commits:
        body = history_stat.lines(run) if stat else _table(run)
        lines += [f"  {line}" for line in body]
    if len(run.commits) < run.steps:
        lines.append(f"  ... {run.steps - len(run.commits)} older")
    return [*lines, *(f"  damaged: {safe(path)}: {why}" for path, why in run.damaged)]


def _graph_lines(result: Log) -> list[str]:
    from deltackpt_tools.history_graph import graph

    before = {(run.run, number): b for run in result.runs for number, b in run.before.items()}
    entries = [entry for run in result.runs for entry in run.commits]
    width = max((len(f"{e.run}@{e.step}") for e in entries), default=0)

    def describe(entry: LoggedStep) -> str:
        words = [f"{entry.run}@{entry.step}".ljust(width), moment(entry.created)]
        words += [size(entry.written_bytes).rjust(8), metrics_text(entry.metrics)]
        extra = note(entry, before.get((entry.run, entry.number)))
        return "  ".join([*words, *([extra] if extra else [])])

    lines = graph(entries, describe)
    return lines + [f"damaged: {safe(p)}: {why}" for run in result.runs for p, why in run.damaged]


def _lines(result: Log, stat: bool, graph: bool) -> list[str]:
    text: list[str] = []
    if graph:
        text += _graph_lines(result)
    else:
        for run in result.runs:
            text += [*([""] if text else []), *_run_lines(run, stat)]
    return text + [f"damaged: {safe(path)}: {why}" for path, why in result.damaged_pins]


@click.command("log")
@store_argument
@click.argument("run", required=False)
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Only the newest N of each run.")
@click.option(
    "--stat",
    is_flag=True,
    help="What each save cost: bytes changed, staged and new, share found in the store (dedup), "
    "codecs, stall of the training thread, time until staged and until durable.",
)
@click.option("--graph", is_flag=True, help="Draw runs, forks and abandoned steps as lines.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    store_path: str,
    run: str | None,
    limit: int | None,
    stat: bool,
    graph: bool,
    as_json: bool,
) -> None:
    """List the saved steps of each run (or of RUN), newest first.

    'state' is the size of all tensors, 'new' what the step added to the store in chunks (small
    tensors and plain values lie in the manifest). Of many metrics the first are shown; --json has
    all. A step marked 'abandoned' is not among those that the newest step continues. Exit code 3
    when a record could not be read: the others are listed.
    """
    if stat and graph:
        raise click.UsageError("--stat and --graph cannot be combined")
    result = log(store_path, run, limit=limit)
    if as_json:
        write_json(document("log", **result.to_dict()))
    else:
        click.echo("\n".join(_lines(result, stat, graph)) or "no run yet")
    context.exit(Exit.PARTIAL if result.damaged else Exit.OK)
