"""``deltackpt compact``: make old steps independent of old bases, and few packs of many."""

from __future__ import annotations

import time
from typing import Any

import click
from deltackpt_store.compact import MIN_LIVE_SHARE, compact
from deltackpt_store.compact_report import CompactReport
from deltackpt_store.errors import ConflictError, StorageError
from deltackpt_store.settling import ACK_SECONDS

from deltackpt_tools.cli import report_error
from deltackpt_tools.exits import exit_code
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
from deltackpt_tools.quantities import DURATION, RATE, Seconds
from deltackpt_tools.stores import open_store


def _lines(report: CompactReport) -> list[str]:
    would = "would " if report.dry_run else ""
    lines: list[str] = []
    for base in report.bases:
        line = f"{safe(base.run)}@{base.step} "
        line += "would become a base" if report.dry_run else "is a base now"
        after = "" if report.dry_run else f", now {counted(base.packs_after, 'pack')}"
        after += "" if report.dry_run else f" ({size(base.bytes_after)})"
        line += f": it took {counted(base.packs_before, 'pack')} ({size(base.bytes_before)})"
        lines.append(line + after)
    lines += [f"{safe(run)}: no new base is due" for run in report.not_due]
    if report.nothing:
        return [*lines, "nothing to do"]
    verb = "would rewrite" if would else "rewrote"
    lines.append(
        f"{verb} {counted(report.chunks, 'chunk')}: {report.chunks_own} by themselves, "
        f"{report.chunks_recoded} against a new base, {report.chunks_copied} as they were"
    )
    lines.append(
        f"{would + 'remove' if would else 'removed'} {counted(len(report.removed), 'pack')}"
    )
    if not report.dry_run:
        need = "needs" if report.lighter_steps == 1 else "need"
        lines.append(
            f"packs {report.packs_before} -> {report.packs_after}, "
            f"{size(report.bytes_before)} -> {size(report.bytes_after)}; "
            f"{counted(report.lighter_steps, 'step')} {need} fewer packs; "
            f"wrote {size(report.written_bytes)} in {report.seconds:.1f} s"
        )
    return lines


def to_document(path: str, report: CompactReport) -> dict[str, Any]:
    """The JSON document of one compaction."""
    return document(
        "compact",
        store=path,
        dry_run=report.dry_run,
        nothing=report.nothing,
        bases=[
            {
                "run": base.run,
                "step": base.step,
                "number": base.number,
                "packs_before": base.packs_before,
                "bytes_before": base.bytes_before,
                "packs_after": None if report.dry_run else base.packs_after,
                "bytes_after": None if report.dry_run else base.bytes_after,
            }
            for base in report.bases
        ],
        not_due=report.not_due,
        chunks_own=report.chunks_own,
        chunks_recoded=report.chunks_recoded,
        chunks_copied=report.chunks_copied,
        read_bytes=report.read_bytes,
        written_bytes=report.written_bytes,
        packs_before=report.packs_before,
        bytes_before=report.bytes_before,
        packs_after=None if report.dry_run else report.packs_after,
        bytes_after=None if report.dry_run else report.bytes_after,
        removed=report.removed,
        lighter_steps=report.lighter_steps,
        seconds=report.seconds,
    )


@click.command("compact")
@store_argument
@click.option("--run", help="Only this run, and the packs that it needs.")
@click.option(
    "--when-ratio",
    type=click.FloatRange(min=0),
    help="A new base only when what the newest step has coded against an older base takes more "
    "than so many times what it is coded against.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    help="A new base only when at least so many commits followed the last one.",
)
@click.option(
    "--min-live-share",
    type=click.FloatRange(0, 1),
    default=MIN_LIVE_SHARE,
    show_default=True,
    help="Rewrite packs of which a smaller share is needed.",
)
@click.option("--max-rate", type=RATE, help="Read and write no faster than this, e.g. 50MB/s.")
@click.option("--watch", is_flag=True, help="Repeat it until interrupted.")
@click.option(
    "--interval",
    type=DURATION,
    default="5m",
    show_default=True,
    help="With --watch: time between the end of one round and the next.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done; takes no lock.")
@click.option(
    "--timeout",
    type=Seconds(min=0),
    default=ACK_SECONDS,
    show_default=True,
    help="Seconds to wait for running trainings, and for another 'gc'.",
)
@json_option
def command(
    store_path: str,
    run: str | None,
    when_ratio: float | None,
    every: int | None,
    min_live_share: float,
    max_rate: float | None,
    watch: bool,
    interval: float,
    dry_run: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Give runs a new base, let old ones go, and rewrite packs with little in them.

    The chunks of the newest step of each run are stored so that reading them needs nothing else.
    Chunks of other steps that are coded against a base no listed step names any more are coded
    against the new one; then the old one goes. Steps stay what they are, bit for bit.

    Safe beside running trainings, readers and 'gc', and to interrupt at any time: run it again. A
    training that goes on saving uses the new base. Deletes, as 'gc' does, what nothing needs.
    """
    store = open_store(store_path)
    while True:
        try:
            with Progress("compact") as progress:
                report = compact(
                    store, run=run, when_ratio=when_ratio, every=every,
                    min_live_share=min_live_share, max_rate=max_rate, dry_run=dry_run,
                    timeout=timeout, progress=progress.update,
                )  # fmt: skip
        except (ConflictError, StorageError) as error:
            # Somebody else is at work, or storage refuses at the moment: the next round may do.
            code = exit_code(error)
            if not watch or code is None:
                raise
            report_error(error, code)
        else:
            if as_json:
                write_json(to_document(store.path, report))
            elif not (watch and report.nothing):
                click.echo("\n".join(_lines(report)))
        if not watch:
            return
        time.sleep(interval)
