"""``deltackpt watch``: the saves of a running training, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import click

from deltackpt_tools.named import StoreLike
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    metrics_text,
    moment,
    safe,
    seconds,
    size,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.quantities import Seconds
from deltackpt_tools.watching import StoreState, await_store, look, watch

_CLEAR = "\x1b[H\x1b[J"


def lines(state: StoreState) -> list[str]:
    """The state as text; one row per run, the one saved to last first."""
    backlog = "nothing in flight"
    if state.in_flight_bytes:
        backlog = f"{size(state.in_flight_bytes)} being written"
    rows = [["run", "step", "saved", "every", "stall", "staged in", "durable in", "state",
             "staged", "new", "skipped", "metrics", "last writer"]]  # fmt: skip
    for run in state.runs:
        rows.append(
            [
                run.run,
                str(run.step),
                f"{seconds(run.age)} ago",
                seconds(run.interval),
                seconds(run.stall),
                seconds(run.staged),
                seconds(run.durable),
                size(run.state_bytes),
                size(run.staged_bytes),
                size(run.written_bytes),
                str(run.skipped),
                metrics_text(run.metrics, digits=5),
                safe(run.writer or "-"),
            ]
        )
    head = f"{state.store}  {moment(state.time)}  {counted(len(state.runs), 'run')}, {backlog}"
    return [head, *table(rows, right=frozenset(range(1, 11)))] if state.runs else [head]


@click.command("watch")
@store_argument
@click.argument("run", required=False)
@click.option("--once", is_flag=True, help="Show the present state and end.")
@click.option(
    "--interval",
    type=Seconds(min=0.05),
    default=1.0,
    show_default=True,
    help="Time between two looks.",
)
@json_option
def command(store_path: str, run: str | None, once: bool, interval: float, as_json: bool) -> None:
    """Watch a running training save: newest step, stall, time until staged and durable, bytes.

    Reads the store only, so it works on any machine that mounts it. On a terminal the picture is
    updated in place; otherwise (and with --json, one document a line) it is printed again whenever
    a step was saved. 'being written' are bytes that belong to no step yet. Without --once, a store
    or run that is not there yet is waited for. Ctrl-C ends it.
    """
    live = sys.stdout.isatty() and not as_json and not once
    place: StoreLike = store_path
    if not once:
        place = await_store(
            store_path, run, poll=interval, told=lambda words: click.echo(safe(words), err=True)
        )
    for state in _states(place, run, once, live, interval):
        if as_json:
            write_json(document("watch", **state.to_dict()))
        else:
            text = "\n".join(lines(state))
            click.echo(_CLEAR + text if live else text)
        sys.stdout.flush()


def _states(
    place: StoreLike, run: str | None, once: bool, live: bool, interval: float
) -> Iterator[StoreState]:
    if once:
        yield look(place, run)
    elif not live:
        yield from watch(place, run, poll=interval)
    while live:  # the ages go on even when nothing else does
        yield look(place, run)
        time.sleep(interval)
