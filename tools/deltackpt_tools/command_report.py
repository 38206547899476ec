"""``deltackpt report``: everything about a store on one page."""

from __future__ import annotations

import os

import click

from deltackpt_tools.exits import Exit
from deltackpt_tools.output import counted, document, json_option, size, store_argument, write_json
from deltackpt_tools.progress import Progress
from deltackpt_tools.publish import check_target, published
from deltackpt_tools.quantities import DURATION
from deltackpt_tools.reporting import MTBF, Report, report


def _write(path: str, data: bytes) -> None:
    """Create or replace `path` in one go."""
    with published(path, force=True) as file:
        file.write(data)


def _said(result: Report, output: str, written: int) -> list[str]:
    runs = ", ".join(f"{one.run} ({counted(len(one.saves), 'save')})" for one in result.runs)
    lines = [f"{output}: {size(written)}, {runs or 'no run yet'}"]
    for one in result.runs:
        if one.not_finite:
            step, path, count = one.not_finite[0]
            lines.append(
                f"NaN or Inf appeared first in {one.run}@{step}: "
                f"{counted(count, 'element')} of {path}"
            )
    if result.damage:
        lines.append(f"{counted(result.damage, 'finding')}: damage is listed on the page")
    return lines


@click.command("report")
@store_argument
@click.argument("run", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=str, dir_okay=False, readable=False),
    default="report.html",
    show_default=True,
    help="The page; an existing file is replaced.",
)
@click.option(
    "--values",
    is_flag=True,
    help="Read every chunk that any save changed: update norms, NaN and Inf that appeared.",
)
@click.option("--png", metavar="FILE", help="Also write the heat-map of the first run as an image.")
@click.option(
    "--verify",
    "level",
    type=click.Choice(["none", "structure", "chunks"]),
    default="structure",
    show_default=True,
    help="How much of the store to verify for the page.",
)
@click.option(
    "--mtbf",
    type=DURATION,
    default=f"{MTBF / 3600:g}h",
    show_default=True,
    metavar="TIME",
    help="Mean time between failures, for the advice on how often to save.",
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    store_path: str,
    run: str | None,
    output: str,
    values: bool,
    png: str | None,
    level: str,
    mtbf: float,
    as_json: bool,
) -> None:
    """Write one page that shows a store: sizes, times and metrics of every save, which layers
    changed at which step, savings, how often to save, health.

    The page is one file that fetches nothing: mail it, keep it with the run. All runs are shown
    (or RUN only). Exit code 12 when damage was found (the page lists it).
    """
    check_target(output, force=True)
    if png is not None:
        check_target(png, force=True)
        if os.path.realpath(png) == os.path.realpath(output):
            raise click.UsageError(f"--png and --output both name {output}")
    with Progress("steps", unit="") as progress:
        result = report(
            store_path, run, values=values, verify=None if level == "none" else level, mtbf=mtbf,
            progress=progress.update,
        )  # fmt: skip
    encoded = result.to_html().encode()
    _write(output, encoded)
    if png is not None and result.runs:
        _write(png, result.heatmap_png())
    if as_json:
        write_json(document("report", output=os.path.abspath(output), **result.to_dict()))
    else:
        click.echo("\n".join(_said(result, output, len(encoded))))
    context.exit(Exit.CORRUPT if result.damage else Exit.OK)
