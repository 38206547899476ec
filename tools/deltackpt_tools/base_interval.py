"""How often a base manifest pays, from the sizes of the manifests that a run has written.

A delta manifest lists all that differs from its base, so deltas grow as training goes on: about by
d bytes a save. With a base of B bytes every n saves, a save costs (B + d n (n - 1) / 2) / n bytes
of manifest in the mean, which is smallest at n = sqrt(2 B / d). The writer makes a new base when a
delta would exceed half of one, and when a restart or another layout asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from deltackpt_tools.frames import Record


@dataclass(frozen=True, slots=True)
class Bases(Record):
    saves: int
    bases: int
    manifest_bytes: int
    """Of all manifests together."""
    present: float | None
    """Saves for each base."""
    best: int | None
    """Saves for each base at which manifests would be smallest; None when it cannot be told."""
    best_bytes: float | None
    """Mean bytes of manifest for a save then."""


def base_interval(manifests: Sequence[tuple[bool, int]]) -> Bases:
    """`manifests` are (whether it is a base, its bytes) of a run's saves, oldest first."""
    count = sum(1 for is_base, _ in manifests if is_base)
    total = sum(size for _, size in manifests)
    growth: list[float] = []
    since = 0
    for is_base, size in manifests:
        since = 0 if is_base else since + 1
        if since:
            growth.append(size / since)
    best = best_bytes = None
    sizes = [size for is_base, size in manifests if is_base]
    if growth and sizes and median(growth) > 0:
        base, step = median(sizes), median(growth)
        best = max(1, round(sqrt(2 * base / step)))
        best_bytes = (base + step * best * (best - 1) / 2) / best
    present = len(manifests) / count if count else None
    return Bases(len(manifests), count, total, present, best, best_bytes)
