"""The figures of ``log --stat``: what each save staged, stored and cost, as commits record it."""

from __future__ import annotations

from deltackpt_tools.logbook import LoggedStep, RunLog, note
from deltackpt_tools.output import metrics_text, safe, seconds, size, table

HEAD = [
    "step", "state", "changed", "staged", "new", "dedup", "codecs", "stall", "staged in",
    "durable in", "metrics", "note",
]  # fmt: skip


def durable_seconds(stats: dict[str, float]) -> float | None:
    """How long the save took to be durable, as far as the commit tells.

    The writer records the time from the begin of the save until every chunk was durable, before it
    writes manifest and commit. Commits of older writers have the parts only.
    """
    whole = stats.get("writer_seconds")
    if whole is not None:
        return max(whole, stats.get("staged_seconds", 0.0))
    parts = [stats.get("encode_seconds"), stats.get("flush_seconds")]
    known = [part for part in parts if part is not None]
    return max(sum(known), stats.get("staged_seconds", 0.0)) if known else None


def changed_bytes(stats: dict[str, float]) -> float | None:
    """Bytes that differ from the save before: of chunks, and of small tensors and plain values,
    which lie in the manifest (commits of older writers do not tell of these)."""
    chunks = stats.get("changed_bytes")
    return None if chunks is None else chunks + stats.get("small_changed_bytes", 0.0)


def codec_shares(stats: dict[str, float]) -> dict[str, float]:
    """Share of the new raw bytes that each codec took, largest first."""
    sizes = {
        name[len("codec.") : -len(".raw_bytes")]: value
        for name, value in stats.items()
        if name.startswith("codec.") and name.endswith(".raw_bytes") and value
    }
    total = sum(sizes.values())
    return {n: v / total for n, v in sorted(sizes.items(), key=lambda item: -item[1])}


def rows(run: RunLog) -> list[list[str]]:
    """Table cells, head included."""
    cells = [HEAD]
    for entry in run.commits:
        cells.append(_row(entry, run.before.get(entry.number)))
    return cells


def _row(entry: LoggedStep, before: int | None) -> list[str]:
    stats = entry.stats
    staged, dedup = stats.get("staged_bytes"), stats.get("dedup_bytes")
    share = "-" if not staged or dedup is None else f"{dedup / staged:.0%}"
    codecs = " ".join(f"{safe(name)} {part:.0%}" for name, part in codec_shares(stats).items())
    return [
        str(entry.step),
        size(stats.get("state_bytes")),
        size(changed_bytes(stats)),
        size(staged),
        size(stats.get("written_bytes")),
        share,
        codecs or "-",
        seconds(stats.get("stall_seconds")),
        seconds(stats.get("staged_seconds")),
        seconds(durable_seconds(stats)),
        metrics_text(entry.metrics),
        note(entry, before),
    ]


def lines(run: RunLog) -> list[str]:
    """The table of one run, without its head line."""
    return table(rows(run), right=frozenset({0, 1, 2, 3, 4, 5, 7, 8, 9}))
