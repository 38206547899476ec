"""``deltackpt verify``: prove that what is stored is what was saved, and list all damage."""

from __future__ import annotations

from typing import Any, cast, get_args

import click
import msgspec
from deltackpt_store.budgeted import WINDOW, Budget, Coverage
from deltackpt_store.verify import Finding, Hit, Level, VerifyReport, verify

from deltackpt_tools.exits import Exit
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    moment,
    safe,
    size,
    span,
    store_argument,
    write_json,
)
from deltackpt_tools.progress import Progress
from deltackpt_tools.quantities import DURATION, parse_duration, parse_size
from deltackpt_tools.stores import open_store

_LEFT = ("pack", "chunk")  # kinds of notes on what collection left behind
_SHOWN = 8  # tensors named per step in text


def _step(hit: Hit) -> str:
    """``run@step``, or the commit's number where its step could not be read."""
    return f"{hit.run}@{hit.step}" if hit.step >= 0 else f"{hit.run} commit {hit.number}"


def _hit(hit: Hit) -> str:
    if not hit.tensors:
        return f"{_step(hit)}: the whole step"
    shown = ", ".join(map(safe, hit.tensors[:_SHOWN]))
    more = len(hit.tensors) - _SHOWN
    return f"{_step(hit)}: {shown}" + (f" and {more} more" if more > 0 else "")


def _finding(finding: Finding) -> list[str]:
    where = f" in {finding.pack}" if finding.pack else ""
    state = "unreadable" if finding.unreadable else "damaged"
    lines = [f"{state} {finding.kind} {safe(finding.name)}{where}: {safe(finding.reason)}"]
    if not finding.hits and not finding.needed_by:
        lines.append("  no step depends on it")
    lines += [f"  hits {_hit(hit)}" for hit in finding.hits]
    if finding.needed_by:
        lines.append("  keep this file: records in it can still be read, and are needed by")
    return [*lines, *(f"    {_hit(hit)}" for hit in finding.needed_by)]


def _notes(report: VerifyReport) -> list[str]:
    """What no step needs: no damage."""
    lines: list[str] = []
    left = 0
    for note in report.notes:
        where = f" in {note.pack}" if note.pack else ""
        left += note.kind in _LEFT
        if note.kind != "store":
            lines.append(f"fine: {note.kind} {safe(note.name)}{where}: {safe(note.reason)}")
    if left:
        lines.append(f"fine: {counted(left, 'thing')} that no step needs, left by collection")
    return lines


def _advice(report: VerifyReport) -> list[str]:
    """What is no damage, and can be done something about."""
    lines = [
        f"note: {safe(note.name)}: {safe(note.reason)}; put the folder itself in its place"
        for note in report.notes
        if note.kind == "store"
    ]
    orphans = sum(note.kind == "manifest" for note in report.notes)
    if orphans:
        them = "it" if orphans == 1 else "them"
        lines.append(
            f"note: {counted(orphans, 'manifest')} that no step names, of saves broken off or "
            f"steps let go of: `deltackpt gc` takes {them} away (unless a save under way has just "
            f"written {them})"
        )
    return lines


def _lines(report: VerifyReport, verbose: bool) -> list[str]:
    lines = [line for finding in report.findings for line in _finding(finding)]
    lines += _notes(report) if verbose else []
    lines.append(
        f"checked {counted(report.commits, 'commit')}, {counted(report.manifests, 'manifest')}, "
        f"{counted(report.packs, 'pack')}, {counted(report.chunks, 'chunk')} "
        f"({size(report.bytes)}), level {report.level}"
    )
    if report.coverage is not None:
        lines += _coverage(report.coverage)
    lines += _advice(report)
    if report.ok:
        lines.append("no damage found")
    else:
        steps = sorted({_step(hit) for finding in report.findings for hit in finding.hits})
        lines.append(
            f"{counted(len(report.findings), 'finding')}; steps that cannot be restored whole: "
            + (", ".join(steps) if steps else "none")
        )
        if any(finding.needed_by for finding in report.findings):
            lines.append(
                "no file may be deleted by hand: `deltackpt repair` writes what can still be read "
                "to sound packs"
            )
    return lines


def _coverage(coverage: Coverage) -> list[str]:
    share = coverage.window_bytes / max(1, coverage.total_bytes)
    oldest = "unknown" if coverage.oldest is None else moment(coverage.oldest)
    read = f"{counted(coverage.checked_packs, 'pack')} ({size(coverage.checked_bytes)})"
    lines = [
        f"read {read} this time",
        f"{share:.0%} of bytes checked in the last {span(coverage.window)}; oldest check {oldest}; "
        f"{counted(coverage.never_packs, 'pack')} never checked",
    ]
    if coverage.remembered is None:
        lines.append(f"this cannot be remembered for the next time: {safe(coverage.problem)}")
    return lines


def _budget(text: str | None) -> Budget | None:
    if text is None:
        return None
    count = parse_size(text)
    if count is not None:
        return Budget(bytes=count)
    try:
        if text.strip()[-1:].isdigit():  # seconds, bytes?
            raise ValueError(text)
        return Budget(seconds=parse_duration(text))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is neither a time (30s, 10min, 2h) nor a size (500MB, 20GB); say the unit",
            param_hint="'--budget'",
        ) from None


def _document(path: str, report: VerifyReport) -> dict[str, Any]:
    def hit(one: Hit) -> dict[str, Any]:
        return {
            "run": one.run,
            "step": one.step if one.step >= 0 else None,
            "number": one.number,
            "whole_step": not one.tensors,
            "tensors": list(one.tensors),
        }

    return document(
        "verify",
        store=path,
        level=report.level,
        ok=report.ok,
        runs=report.runs,
        commits=report.commits,
        manifests=report.manifests,
        packs=report.packs,
        chunks=report.chunks,
        bytes=report.bytes,
        findings=[
            {
                "kind": finding.kind,
                "name": finding.name,
                "pack": finding.pack,
                "reason": finding.reason,
                "unreadable": finding.unreadable,
                "hits": [hit(one) for one in finding.hits],
                "needed_by": [hit(one) for one in finding.needed_by],
            }
            for finding in report.findings
        ],
        notes=[
            {"kind": note.kind, "name": note.name, "pack": note.pack, "reason": note.reason}
            for note in report.notes
        ],
        coverage=None if report.coverage is None else msgspec.structs.asdict(report.coverage),
    )


@click.command("verify")
@store_argument
@click.option(
    "--level",
    type=click.Choice(get_args(Level)),
    default="chunks",
    show_default=True,
    help="structure: commits, manifests, tables. records: also every stored byte, against its "
    "checksum. chunks: also decoded, against its id. "
    "restore: also read every step the way a restore does.",
)
@click.option("--run", help="Only what this run needs.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: as many as processors.")
@click.option(
    "--budget",
    help="Read at most for this time (30s, 10min, 2h) or this much (500MB, 20GB), the longest "
    "unchecked packs first, and remember where to go on.",
)
@click.option(
    "--within",
    type=DURATION,
    default=f"{WINDOW / 86400:g}d",
    show_default=True,
    help="With --budget: report how much was checked in that time.",
)
@click.option("--verbose", is_flag=True, help="Also list what no step needs, which is no damage.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    store_path: str,
    level: str,
    run: str | None,
    threads: int | None,
    budget: str | None,
    within: float,
    verbose: bool,
    as_json: bool,
) -> None:
    """Check what is stored, and list all damage with the steps and tensors it hits.

    Never stops at the first finding, and writes nothing but, with --budget, a note of what was
    checked when. Exit code 12 when anything is damaged, 14 when nothing is, and something could not
    be read.
    """
    store = open_store(store_path)
    with Progress("verify") as progress:
        report = verify(
            store,
            level=cast("Level", level),
            run=run,
            progress=progress.update,
            threads=threads,
            budget=_budget(budget),
            window=within,
        )
    if as_json:
        write_json(_document(store.path, report))
    else:
        click.echo("\n".join(_lines(report, verbose)))
    if report.unread:
        context.exit(Exit.STORAGE)
    context.exit(Exit.OK if report.ok else Exit.CORRUPT)
