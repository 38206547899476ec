"""``deltackpt log``: the saved steps of each run, newest first."""

from __future__ import annotations

from typing import Any

import click
from deltackpt_store.history import Commits
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

from deltackpt_tools.exits import Exit
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    moment,
    safe,
    size,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.stores import open_store, short, stat


class _Run:
    """One run as the command reports it. Reads every commit record, no manifest."""

    def __init__(self, store: Store, name: str, pins: dict[tuple[str, int], list[str]]) -> None:
        self.name = name
        self.commits: Commits = store.commits(name)
        line = store.lineage(name) if self.commits else Commits()
        self.lineage = {commit.number for commit in line}
        self._number_of = {commit.number: commit for commit in self.commits}
        self._store = store
        self._pins = pins

    def _parent(self, commit: Commit) -> dict[str, Any] | None:
        if commit.parent is None:
            return None
        run, number, digest = commit.parent
        step: int | None = None
        if run == self.name and number in self._number_of:
            step = self._number_of[number].step
        elif run != self.name:
            step = _step_of(self._store, run, number)
        return {"run": run, "number": number, "step": step, "digest": digest.hex()}

    def record(self, commit: Commit) -> dict[str, Any]:
        return {
            "run": commit.run,
            "step": commit.step,
            "number": commit.number,
            "created": commit.created,
            "digest": commit.digest.hex(),
            "root": commit.root.hex(),
            "manifest": commit.manifest.hex(),
            "base": None if commit.base is None else commit.base.hex(),
            "parent": self._parent(commit),
            "in_lineage": commit.number in self.lineage,
            "pins": self._pins.get((commit.run, commit.number), []),
            "state_bytes": stat(commit, "state_bytes"),
            "written_bytes": stat(commit, "written_bytes"),
            "metrics": dict(commit.metrics),
            "stats": dict(commit.stats),
            "versions": dict(commit.versions),
        }


def _step_of(store: Store, run: str, number: int) -> int | None:
    from deltackpt_store.errors import DeltackptError

    try:
        return store.read_commit(run, number).step
    except DeltackptError:  # removed by retention, or damaged: then its own run reports it
        return None


def _note(record: dict[str, Any], previous: int | None) -> str:
    """What a reader should know about a commit beyond its figures."""
    words: list[str] = []
    parent = record["parent"]
    if parent is not None and parent["run"] != record["run"]:
        step = parent["step"]
        words.append(f"fork of {parent['run']}" + (f"@{step}" if step is not None else ""))
    elif parent is not None and parent["number"] != previous and parent["step"] is not None:
        words.append(f"continues {parent['step']}")
    if not record["in_lineage"]:
        words.append("abandoned")
    words += [f"pin {name}" for name in record["pins"]]
    return ", ".join(words)


def _bytes(value: int | None) -> str:
    return "-" if value is None else size(value)


def _lines(run: _Run, records: list[dict[str, Any]], total: int) -> list[str]:
    newest = max((c.step for c in run.commits if c.number in run.lineage), default=None)
    head = f"run {run.name}: {counted(total, 'step')}"
    if newest is not None:
        head += f", newest {newest}"
    lines = [head]
    rows = [["step", "number", "saved", "state", "new", "root", "metrics", "note"]]
    order = [commit.number for commit in run.commits]
    before = dict(zip(order[1:], order, strict=False))
    for record in records:
        metrics = " ".join(f"{safe(k)}={v:.6g}" for k, v in record["metrics"].items())
        rows.append(
            [
                str(record["step"]),
                str(record["number"]),
                moment(record["created"]),
                _bytes(record["state_bytes"]),
                _bytes(record["written_bytes"]),
                short(bytes.fromhex(record["root"])),
                metrics or "-",
                _note(record, before.get(record["number"])),
            ]
        )
    if records:
        lines += [f"  {line}" for line in table(rows, right=frozenset({0, 1, 3, 4}))]
    if len(records) < total:
        lines.append(f"  ... {total - len(records)} older")
    lines += [f"  damaged: {safe(bad.path)}: {bad.error.message}" for bad in run.commits.damaged]
    return lines


@click.command("log")
@store_argument
@click.argument("run", required=False)
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Only the newest N of each run.")
@json_option
@click.pass_context
def command(
    context: click.Context, store_path: str, run: str | None, limit: int | None, as_json: bool
) -> None:
    """List the saved steps of each run (or of RUN), newest first.

    'state' is the size of the whole state, 'new' what the step added to the store. A step marked
    'abandoned' is no longer on the way to the run's newest step. Exit code 3 when a record could
    not be read: the others are listed.
    """
    store = open_store(store_path)
    names = store.runs() if run is None else [run]
    pins = store.pins()
    pinned: dict[tuple[str, int], list[str]] = {}
    for name, pin in pins.items():
        pinned.setdefault((pin.run, pin.number), []).append(name)
    damaged: list[dict[str, str]] = [
        {"path": bad.path, "reason": bad.error.message} for bad in pins.damaged
    ]
    documents: list[dict[str, Any]] = []
    text: list[str] = []
    for name in names:
        one = _Run(store, name, pinned)
        newest = one.commits[::-1][:limit]
        records = [one.record(commit) for commit in newest]
        documents.append({"run": name, "steps": len(one.commits), "commits": records})
        damaged += [{"path": b.path, "reason": b.error.message} for b in one.commits.damaged]
        text += [*([""] if text else []), *_lines(one, records, len(one.commits))]
    text += [f"damaged: {safe(bad.path)}: {bad.error.message}" for bad in pins.damaged]
    if as_json:
        write_json(document("log", store=store.path, runs=documents, damaged=damaged))
    elif text:
        click.echo("\n".join(text))
    else:
        click.echo("no run yet")
    context.exit(Exit.PARTIAL if damaged else Exit.OK)
