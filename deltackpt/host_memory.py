"""How much host memory this process could still get."""

from __future__ import annotations

from collections.abc import Iterator


def available_bytes(root: str = "") -> int | None:
    """Bytes to be had without swapping, within the limits of all cgroups (version 2) that the
    process is in; None when the system does not say. `root` stands before all paths read."""
    free = list(_within_cgroups(root))
    machine = _fields(f"{root}/proc/meminfo").get("MemAvailable")
    if machine is not None:
        free.append(machine * 1024)
    return max(0, min(free)) if free else None


def _within_cgroups(root: str) -> Iterator[int]:
    try:
        with open(f"{root}/proc/self/cgroup", encoding="ascii", errors="replace") as lines:
            path = next((line.strip()[3:] for line in lines if line.startswith("0::")), "")
    except OSError:
        return
    while True:
        folder = f"{root}/sys/fs/cgroup{path.rstrip('/')}"
        limit, used = (_number(f"{folder}/memory.{name}") for name in ("max", "current"))
        if limit is not None and used is not None:
            # What files have in memory counts as used, and is given up when memory is short.
            stat = _fields(f"{folder}/memory.stat")
            yield limit - used + stat.get("inactive_file", 0) + stat.get("active_file", 0)
        if not path.strip("/"):
            return
        path = path.rstrip("/").rpartition("/")[0]


def _number(path: str) -> int | None:
    """The number in a file; None for one that is not there, or says "max"."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _fields(path: str) -> dict[str, int]:
    """Number by name, of lines such as ``MemAvailable:  1024 kB`` or ``active_file 4096``."""
    found: dict[str, int] = {}
    try:
        with open(path, encoding="ascii") as lines:
            for name, number, *_ in map(str.split, lines):
                found[name.rstrip(":")] = int(number)
    except (OSError, ValueError):
        pass
    return found
