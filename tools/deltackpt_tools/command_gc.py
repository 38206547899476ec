"""``deltackpt gc``: delete what no step, pin or reader needs."""

from __future__ import annotations

from typing import Any

import click
from deltackpt_store.gc import GcReport, collect
from deltackpt_store.settling import ACK_SECONDS

from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    safe,
    size,
    store_argument,
    write_json,
)
from deltackpt_tools.progress import Progress
from deltackpt_tools.quantities import Seconds
from deltackpt_tools.stores import open_store

_SHOWN = 20  # names listed of each kind in text


def _lines(report: GcReport) -> list[str]:
    verb = "would delete" if report.dry_run else "deleted"
    if report.nothing:
        lines = ["there is nothing to delete"]
    else:
        lines = [
            f"{verb} {counted(len(report.packs), 'pack')} ({size(report.pack_bytes)}), "
            f"{counted(len(report.commits), 'retired commit')}, "
            f"{counted(len(report.manifests), 'manifest')}, "
            f"{counted(len(report.leftovers), 'unfinished file')}"
        ]
    if report.dry_run:
        names = [f"pack {name}" for name in report.packs]
        names += [f"commit {run}/{number}" for run, number in report.commits]
        names += [f"manifest {name}" for name in report.manifests]
        names += [f"unfinished {safe(name)}" for name in report.leftovers]
        lines += [f"  {name}" for name in names[:_SHOWN]]
        if len(names) > _SHOWN:
            lines.append(f"  and {len(names) - _SHOWN} more (all with --json)")
    if report.accepted:
        verb = "would give up" if report.dry_run else "gave up"
        lines.append(f"{verb} {counted(len(report.accepted), 'lost commit')}")
    if report.pardoned:
        lines.append(f"{counted(len(report.pardoned), 'pack')} turned out to be needed")
    stay = "stays" if report.kept_packs == 1 else "stay"
    lines.append(f"{counted(report.kept_packs, 'pack')} {stay} ({size(report.kept_bytes)})")
    return lines


def _document(path: str, report: GcReport) -> dict[str, Any]:
    return document(
        "gc",
        store=path,
        dry_run=report.dry_run,
        generation=report.generation,
        packs=report.packs,
        manifests=report.manifests,
        commits=[{"run": run, "number": number} for run, number in report.commits],
        accepted_lost=[{"run": run, "number": number} for run, number in report.accepted],
        leftovers=report.leftovers,
        pack_bytes=report.pack_bytes,
        pardoned=report.pardoned,
        kept_packs=report.kept_packs,
        kept_bytes=report.kept_bytes,
        writers=report.writers,
    )


@click.command("gc")
@store_argument
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted; takes no lock.")
@click.option(
    "--accept-lost",
    is_flag=True,
    help="Give up steps whose commit file is lost, which otherwise stops the collection: what only "
    "they need is deleted. Try 'repair --from' a copy of the store first.",
)
@click.option(
    "--timeout",
    type=Seconds(min=0),
    default=ACK_SECONDS,
    show_default=True,
    help="Seconds to wait for running trainings to let go of what is to be deleted.",
)
@json_option
def command(
    store_path: str, dry_run: bool, accept_lost: bool, timeout: float, as_json: bool
) -> None:
    """Delete what no step, pin or reader needs.

    Safe beside running trainings, readers and another 'gc', and to interrupt at any time. Deletes
    nothing when anything that may be needed cannot be read or is lost (exit code 12), when a
    training does not answer, or while another collection runs (exit code 11). Which steps are
    needed is for 'retain' and 'pin' to say.
    """
    store = open_store(store_path)
    with Progress("gc", unit="") as progress:

        def told(stage: str, done: int, total: int) -> None:
            progress.label = f"gc: {stage}"
            progress.update(done, total)

        report = collect(
            store, dry_run=dry_run, accept_lost=accept_lost, timeout=timeout, progress=told
        )
    if as_json:
        write_json(_document(store.path, report))
    else:
        click.echo("\n".join(_lines(report)))
