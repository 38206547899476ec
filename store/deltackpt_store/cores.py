"""How many processor cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores by affinity or, if that is less, by the quota of the control group (as in containers).

    At least 1. The quota is the least of the group's and of the groups around it, versions 1 and 2
    (``cpu.cfs_quota_us``, ``cpu.max``; Linux kernel, Documentation/admin-guide/cgroup-v2.rst).
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(_quota(), cores)))


def _quota() -> float:
    """Cores that the control groups of this process allow; infinite where nothing says so."""
    try:
        lines = _GROUPS.read_text().splitlines()
    except (OSError, ValueError):
        return math.inf
    least = math.inf
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = PurePosixPath(path.lstrip("/"))
        mount = _MOUNT if not controllers else _MOUNT / "cpu"
        if not controllers or "cpu" in controllers.split(","):
            least = min([least, *(_allowed(mount / one) for one in (group, *group.parents))])
    return least


def _allowed(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf
