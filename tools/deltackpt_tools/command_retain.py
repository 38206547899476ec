"""``deltackpt retain``: take the steps of a run off its list that need not stay."""

from __future__ import annotations

import math
from typing import Any

import click
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.records import some_of
from deltackpt_store.retention import Best, Keep, RetentionPlan, apply
from deltackpt_store.store import Store

from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    shortened,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.quantities import DURATION
from deltackpt_tools.stores import open_store


def _best(text: str | None) -> Best | None:
    if text is None:
        return None
    metric, colon, mode = text.rpartition(":")
    if not colon and text:
        return (text, "min")
    if metric and (mode == "min" or mode == "max"):
        return (metric, mode)
    raise InvalidInputError(
        f"{text!r} is not METRIC, METRIC:min or METRIC:max",
        option="--best",
        hint="for example --best loss, or --best accuracy:max",
    )


def _check_metric(store: Store, run: str, keep: Keep) -> None:
    """`InvalidInputError` when no step of the run has the metric of ``--best``, as a number."""
    if keep.best is None:
        return
    lineage = store.lineage(run)
    names = {name for commit in lineage for name in commit.metrics}
    if keep.best[0] in names:
        if all(math.isnan(commit.metrics.get(keep.best[0], math.nan)) for commit in lineage):
            raise InvalidInputError(
                f"metric {keep.best[0]!r} is NaN in every step of run {run!r} that has it: none is "
                "the best, and nothing is taken off its list",
                kind="no-match",
                option="--best",
                hint="name another metric, or leave --best out",
            )
    else:
        raise InvalidInputError(
            f"no step of run {run!r} has a metric {keep.best[0]!r}: nothing is taken off its list",
            kind="no-match",
            option="--best",
            hint=f"its metrics are {some_of([shortened(name) for name in sorted(names)])}"
            if names
            else "it has none; leave --best out",
        )


def _lines(plan: RetentionPlan, dry_run: bool) -> list[str]:
    rows = [[str(commit.step), str(commit.number), "stays", ", ".join(why)]
            for commit, why in plan.kept]  # fmt: skip
    word = "would go" if dry_run else "gone"
    rows += [[str(commit.step), str(commit.number), word, ""] for commit in plan.retired]
    rows.sort(key=lambda row: int(row[1]))
    verb = "would be taken off" if dry_run else "taken off"
    lines = table([["step", "number", "", "why"], *rows], right=frozenset({0, 1}))
    lines.append(f"{counted(len(plan.retired), 'step')} {verb} the list of run {plan.run}")
    if plan.retired and not dry_run:
        lines.append("run 'deltackpt gc' to free their space")
    return lines


def _document(path: str, plan: RetentionPlan, dry_run: bool) -> dict[str, Any]:
    return document(
        "retain",
        store=path,
        run=plan.run,
        dry_run=dry_run,
        kept=[
            {"step": commit.step, "number": commit.number, "reasons": list(why)}
            for commit, why in plan.kept
        ],
        retired=[{"step": commit.step, "number": commit.number} for commit in plan.retired],
    )


@click.command("retain")
@store_argument
@click.argument("run", required=False)
@click.option("--last", type=click.IntRange(min=1), help="Keep this many of the newest steps.")
@click.option("--every", type=click.IntRange(min=1), help="Keep steps that are multiples of it.")
@click.option(
    "--best",
    metavar="METRIC[:min|:max]",
    help="Keep the step whose metric is smallest (or largest).",
)
@click.option("--within", type=DURATION, help="Keep steps of the last DURATION of training: 12h.")
@click.option("--dry-run", is_flag=True, help="Only show which steps would go.")
@json_option
def command(
    store_path: str,
    run: str | None,
    last: int | None,
    every: int | None,
    best: str | None,
    within: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Take the steps of RUN (default: the only one) off its list that no rule keeps; 'gc' then
    frees their space.

    A step stays when any rule keeps it. The newest step that can be restored, pinned steps, and
    those that somebody is reading stay whatever the rules say. A metric of --best that no step
    has is refused.
    """
    keep = Keep(last=last, every=every, best=_best(best), within=within)
    if keep.everything:
        raise InvalidInputError(
            "no rule was given, so every step stays",
            option="--last",
            hint="give --last, --every, --best or --within",
        )
    store = open_store(store_path)
    run = store.only_run() if run is None else run
    _check_metric(store, run, keep)
    plan = apply(store, run, keep, dry_run=dry_run)
    if as_json:
        write_json(_document(store.path, plan, dry_run))
    else:
        click.echo("\n".join(_lines(plan, dry_run)))
