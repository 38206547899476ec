"""``deltackpt delete``: take all steps of a run off its list."""

from __future__ import annotations

from typing import Any

import click
from deltackpt_store.run_deletion import DeletionPlan, delete_run

from deltackpt_tools.output import counted, document, json_option, store_argument, write_json
from deltackpt_tools.stores import open_store


def _lines(plan: DeletionPlan, dry_run: bool) -> list[str]:
    if not plan.retired:
        return [f"run {plan.run} has no step"]
    verb = "would be taken off" if dry_run else "taken off"
    steps = [str(number) if step is None else f"@{step}" for number, step in plan.retired]
    first, last = steps[0], steps[-1]
    which = first if len(steps) == 1 else f"{first} to {last}"
    lines = [f"{counted(len(steps), 'step')} {verb} the list of run {plan.run}: {which}"]
    return lines if dry_run else [*lines, "run 'deltackpt gc' to free their space"]


def _document(path: str, plan: DeletionPlan, dry_run: bool) -> dict[str, Any]:
    return document(
        "delete",
        store=path,
        run=plan.run,
        dry_run=dry_run,
        retired=[{"step": step, "number": number} for number, step in plan.retired],
    )


@click.command("delete")
@store_argument
@click.argument("run")
@click.option("--dry-run", is_flag=True, help="Only show which steps would go; takes no lock.")
@json_option
def command(store_path: str, run: str, dry_run: bool, as_json: bool) -> None:
    """Take all steps of RUN off its list; 'gc' then frees their space.

    Refused while the run is written, or one of its steps read (exit code 11), and while any of them
    is pinned (exit code 2). Runs that were forked from it stay whole.
    """
    store = open_store(store_path)
    plan = delete_run(store, run, dry_run=dry_run)
    if as_json:
        write_json(_document(store.path, plan, dry_run))
    else:
        click.echo("\n".join(_lines(plan, dry_run)))
