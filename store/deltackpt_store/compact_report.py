"""The report of a compaction."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class NewBase:
    """A step that became the base of its run, and what reading it took and takes.

    `packs` are files, `bytes` of stored records, with all that these are coded against.
    """

    run: str
    step: int
    number: int
    packs_before: int
    bytes_before: int
    packs_after: int = 0
    bytes_after: int = 0


@dataclass(slots=True)
class CompactReport:
    """What a compaction did, or with `dry_run` would do. Sizes in bytes of files.

    `chunks_own` were stored without references, `chunks_recoded` against a new base,
    `chunks_copied` moved as they are. `read_bytes` (of chunks) and `written_bytes` (of records)
    are those of rewriting. A dry run cannot know `written_bytes` and what comes after.
    """

    dry_run: bool = False
    bases: list[NewBase] = field(default_factory=list[NewBase])
    not_due: list[str] = field(default_factory=list[str])
    """Runs whose newest step is no new base because `when_ratio` or `every` says so."""
    chunks_own: int = 0
    chunks_recoded: int = 0
    chunks_copied: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    packs_before: int = 0
    bytes_before: int = 0
    packs_after: int = 0
    bytes_after: int = 0
    removed: list[str] = field(default_factory=list[str])
    """Packs that were deleted; with `dry_run` those that would be emptied, or go anyway."""
    lighter_steps: int = 0
    """Steps that need fewer packs than before."""
    seconds: float = 0.0

    @property
    def chunks(self) -> int:
        """Chunks rewritten."""
        return self.chunks_own + self.chunks_recoded + self.chunks_copied

    @property
    def nothing(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.chunks or self.removed)
