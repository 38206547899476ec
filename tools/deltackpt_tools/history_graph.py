"""Runs and forks drawn as a graph of lines, as version control tools draw branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from deltackpt_tools.logbook import LoggedStep, Parent

Describe = Callable[[LoggedStep], str]


def _gap(parent: Parent, entries: Iterable[LoggedStep]) -> str:
    """Why a line ends at `parent`, which is not listed; nothing when there is nothing older."""
    if parent.step is not None:
        return f"continues {parent.run}@{parent.step}, not listed"
    older = any(e.run == parent.run and e.number < parent.number for e in entries)
    return "continues a step that was removed" if older else ""


def _times(entries: Iterable[LoggedStep]) -> dict[str, float]:
    """When each commit was made, by digest: not before an earlier one of its run, whatever clocks
    say."""
    times: dict[str, float] = {}
    newest: dict[str, float] = {}
    for entry in sorted(entries, key=lambda entry: entry.number):
        newest[entry.run] = max(entry.created, newest.get(entry.run, entry.created))
        times[entry.digest] = newest[entry.run]
    return times


def graph(entries: Iterable[LoggedStep], describe: Describe) -> list[str]:
    """One line per commit, newest first, each after everything that continues it.

    ``*`` is a commit; a ``|`` is a line of commits passing by; ``/`` is where a fork leaves the
    line it continues. Among commits that do not continue each other the later made comes first
    (times only order what nothing else orders: within a run numbers do).
    """
    by_digest = {entry.digest: entry for entry in entries}
    made = _times(by_digest.values())
    children = dict.fromkeys(by_digest, 0)
    for entry in by_digest.values():
        if entry.parent is not None and entry.parent.digest in children:
            children[entry.parent.digest] += 1
    ready: list[tuple[float, int, str]] = []
    for entry in by_digest.values():
        if not children[entry.digest]:
            heappush(ready, (-made[entry.digest], -entry.number, entry.digest))
    columns: list[str | None] = []  # the commit that each line waits for
    lines: list[str] = []
    while ready:
        entry = by_digest[heappop(ready)[2]]
        here = [i for i, waits in enumerate(columns) if waits == entry.digest]
        if not here:
            columns.append(entry.digest)
            here = [len(columns) - 1]
        first, *others = here
        for other in reversed(others):
            marks = "".join(
                "| " if i < other - 1 else "|/" if i == other - 1 else "" for i in range(other)
            )
            rest = "".join(" /" for _ in columns[other + 1 :])
            lines.append((marks + rest).rstrip())
            del columns[other]
        marks = " ".join("*" if i == first else "|" for i in range(len(columns)))
        lines.append(f"{marks}  {describe(entry)}")
        parent = entry.parent
        if parent is None or parent.digest not in by_digest:
            why = "" if parent is None else _gap(parent, by_digest.values())
            if why:
                gone = " ".join(":" if i == first else "|" for i in range(len(columns)))
                lines.append(f"{gone}  ({why})")
            del columns[first]
            continue
        columns[first] = parent.digest
        children[parent.digest] -= 1
        if not children[parent.digest]:
            above = by_digest[parent.digest]
            heappush(ready, (-made[above.digest], -above.number, above.digest))
    return lines
