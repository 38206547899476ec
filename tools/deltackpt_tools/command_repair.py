"""``deltackpt repair``: undo damage from other copies, and say what stays hit."""

from __future__ import annotations

from typing import Any

import click
from deltackpt_store.repair import LostStep, RepairReport, repair
from deltackpt_store.settling import ACK_SECONDS
from deltackpt_store.store import absolute_path

from deltackpt_tools.exits import Exit
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    safe,
    store_argument,
    write_json,
)
from deltackpt_tools.progress import Progress
from deltackpt_tools.quantities import Seconds
from deltackpt_tools.stores import quiet_logs

_SHOWN = 20  # things listed of each kind in text


def _step(lost: LostStep) -> str:
    return f"{lost.run}@{lost.step}" if lost.step >= 0 else f"{lost.run} commit {lost.number}"


def _ranges(ranges: tuple[tuple[int, int], ...]) -> str:
    shown = ", ".join(f"{start}-{stop}" for start, stop in ranges[:_SHOWN])
    return shown + (f" and {len(ranges) - _SHOWN} more" if len(ranges) > _SHOWN else "")


def _lost(lost: LostStep) -> list[str]:
    if not lost.tensors:
        return [f"{_step(lost)} is lost: its commit or manifest cannot be read"]
    lines = [f"{_step(lost)} has {counted(len(lost.tensors), 'damaged tensor')}:"]
    lines += [f"  {safe(t.path)}: bytes {_ranges(t.ranges)}" for t in lost.tensors[:_SHOWN]]
    if len(lost.tensors) > _SHOWN:
        lines.append(f"  and {len(lost.tensors) - _SHOWN} more (all with --json)")
    return lines


def _lines(report: RepairReport) -> list[str]:
    if not report.found:
        return ["no damage found"]
    word = "can be " if report.dry_run else ""
    lines = [
        f"{word}repaired: {one.kind} {safe(one.name)} from {safe(one.source)}"
        for one in report.mended[:_SHOWN]
    ]
    if len(report.mended) > _SHOWN:
        lines.append(f"and {len(report.mended) - _SHOWN} more (all with --json)")
    lines += [f"set aside: {safe(path)}" for path in report.quarantined[:_SHOWN]]
    lines += [f"left: {one.kind} {safe(one.name)}: {safe(one.reason)}" for one in report.left]
    lines += [line for lost in report.lost for line in _lost(lost)]
    lines.append(
        f"{counted(report.found, 'finding')}; {word}repaired: {len(report.mended)}, "
        f"{word}copied: {counted(report.copied, 'healthy record')} of damaged packs"
    )
    if report.lost:
        steps = ", ".join(sorted({_step(lost) for lost in report.lost}))
        lines.append(f"steps that stay damaged: {steps}; try --from ANOTHER_STORE")
    return lines


def _document(path: str, report: RepairReport) -> dict[str, Any]:
    return document(
        "repair",
        store=path,
        dry_run=report.dry_run,
        ok=report.ok,
        found=report.found,
        mended=[{"kind": m.kind, "name": m.name, "source": m.source} for m in report.mended],
        copied=report.copied,
        packs=list(report.packs),
        quarantined=list(report.quarantined),
        left=[{"kind": one.kind, "name": one.name, "reason": one.reason} for one in report.left],
        lost=[
            {
                "run": lost.run,
                "step": lost.step if lost.step >= 0 else None,
                "number": lost.number,
                "whole_step": not lost.tensors,
                "tensors": [
                    {"path": t.path, "ranges": [list(r) for r in t.ranges]} for t in lost.tensors
                ],
            }
            for lost in report.lost
        ],
    )


@click.command("repair")
@store_argument
@click.option(
    "--from",
    "sources",
    metavar="OTHER_STORE",
    multiple=True,
    help="Another store to take chunks and records from: a copy, or one of related runs. "
    "May be given several times.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done; takes no lock.")
@click.option(
    "--timeout",
    type=Seconds(min=0),
    default=ACK_SECONDS,
    show_default=True,
    help="Seconds to wait for running trainings to let go of damaged packs.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Default: as many as processors.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    store_path: str,
    sources: tuple[str, ...],
    dry_run: bool,
    timeout: float,
    threads: int | None,
    as_json: bool,
) -> None:
    """Verify every byte, and put right what is damaged from any other copy of it.

    Copies are looked for in other packs, in what earlier repairs set aside, and in the stores given
    with --from. Damaged files are moved to 'quarantine' in the store, never deleted; healthy
    records of a damaged pack are copied first. Safe beside running trainings and to interrupt: run
    it again.

    Exit codes: 0 all is whole; 1 with --dry-run, there is damage and all of it can be repaired; 3
    all steps are whole, but something could not be put right; 12 some step stays damaged.
    """
    quiet_logs()
    with Progress("verify") as progress:
        report = repair(
            store_path,
            sources=sources,
            dry_run=dry_run,
            timeout=timeout,
            threads=threads,
            progress=progress.update,
        )
    if as_json:
        write_json(_document(absolute_path(store_path), report))
    else:
        click.echo("\n".join(_lines(report)))
    context.exit(_exit(report))


def _exit(report: RepairReport) -> Exit:
    if report.lost:
        return Exit.CORRUPT
    if report.left:
        return Exit.PARTIAL
    return Exit.FINDING if report.dry_run and report.found else Exit.OK
