"""``deltackpt advise``: how often to save."""

from __future__ import annotations

import click

from deltackpt_tools.advice import Advice, advise
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    seconds,
    size,
    small_percent,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.progress import Progress
from deltackpt_tools.quantities import DURATION, DURATION_OR_NONE, SHARE

_BOUND = {
    "failures": "smallest expected loss (Daly 2006)",
    "overhead": "stalls may not take more than --overhead",
    "durability": "a save must be durable before the next begins",
}


def _every(steps: int | None, interval: float | None) -> str:
    if interval is None:
        return "unknown"
    return seconds(interval) + (f", every {counted(steps, 'step')}" if steps else "")


def _keeps_up(does: bool | None, otherwise: str) -> str:
    return "not known from these commits" if does is None else "keeps up" if does else otherwise


def _lines(advice: Advice) -> list[str]:
    restore = seconds(advice.restore) + (
        " (measured by reading now; slower where files are not in memory)"
        if advice.restore_measured
        else " (given)"
    )
    measured = [
        ["stall", f"{seconds(advice.stall)} for each save"],
        ["durable", f"{seconds(advice.durable)} after a save begins"],
        ["restore", restore],
        ["failures", f"one in {seconds(advice.mtbf)} (given)"],
    ]
    choice = [
        ["", "present", "best"],
        [
            "save each",
            _every(advice.every, advice.interval),
            _every(advice.best_every, advice.best_interval),
        ],
        [
            "lost per failure",
            "-" if advice.lost is None else seconds(advice.lost),
            seconds(advice.best_lost),
        ],
        ["time wasted", small_percent(advice.waste), small_percent(advice.best_waste)],
    ]
    busy = "" if advice.writer_busy is None else f", busy {advice.writer_busy:.0%} of the time"
    speed = "" if advice.write_speed is None else f", writes {size(advice.write_speed)}/s"
    skipped = f", {counted(advice.skipped, 'save')} skipped" if advice.skipped else ""
    keeping = [
        ["storage", _keeps_up(advice.storage_keeps_up, "FALLS BEHIND") + busy + speed + skipped],
        ["ring", _keeps_up(advice.ring_keeps_up,
                           "TOO SMALL: staging waits for the writer to free it")],
    ]  # fmt: skip
    return [
        f"run {advice.run}: medians of {counted(advice.saves, 'save')}",
        *(f"  {line}" for line in table(measured)),
        "",
        *table(choice),
        f"bound by: {_BOUND[advice.bound]}; Young 1974 says {seconds(advice.young)}, "
        f"Daly 2006 {seconds(advice.daly)}",
        "",
        *table(keeping),
    ]


@click.command("advise")
@store_argument
@click.argument("run", required=False)
@click.option(
    "--mtbf",
    type=DURATION,
    required=True,
    metavar="TIME",
    help="Mean time between failures of the whole job: 90s, 45m, 6h, 1d12h.",
)
@click.option(
    "--overhead",
    type=SHARE,
    metavar="SHARE",
    help="Largest share of the time that stalls may take: 2% or 0.02.",
)
@click.option(
    "--restore",
    type=DURATION_OR_NONE,
    metavar="TIME",
    help="Do not measure a restore: it takes this long.",
)
@json_option
def command(
    store_path: str,
    run: str | None,
    mtbf: float,
    overhead: float | None,
    restore: float | None,
    as_json: bool,
) -> None:
    """Advise how often to save, so that the least work is lost.

    Takes stall and time until durable from the newest saves of RUN (default: the run saved to
    last), measures a restore by reading a part of the newest step, and weighs the stalls of saving
    often against the work lost in a failure. Also tells whether storage and staging ring keep up.
    """
    with Progress("restore") as progress:
        advice = advise(
            store_path, mtbf=mtbf, run=run, overhead=overhead, restore=restore,
            progress=progress.update,
        )  # fmt: skip
    if as_json:
        write_json(document("advise", **advice.to_dict()))
    else:
        click.echo("\n".join(_lines(advice)))
