"""How much host memory this process could still get."""

from __future__ import annotations

from collections.abc import Iterator

_VERSION_1 = ("limit_in_bytes", "usage_in_bytes", "total_")
_VERSION_2 = ("max", "current", "")


def available_bytes(root: str = "") -> int | None:
    """Bytes available without swapping, within the limits of all cgroups that the process is in;
    None when the system does not say. `root` stands before all paths read."""
    free = list(_within_cgroups(root))
    machine = _fields(f"{root}/proc/meminfo").get("MemAvailable")
    if machine is not None:
        free.append(machine * 1024)
    return max(0, min(free)) if free else None


def _within_cgroups(root: str) -> Iterator[int]:
    try:
        with open(f"{root}/proc/self/cgroup", encoding="ascii", errors="replace") as lines:
            groups = [line.rstrip("\n").split(":", 2) for line in lines]
    except OSError:
        return
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if not controllers:
            yield from _within(f"{root}/sys/fs/cgroup", path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _within(f"{root}/sys/fs/cgroup/memory", path, _VERSION_1)


def _within(top: str, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """What a cgroup and those above it leave. In a container `path` may be that of the host: `top`
    is its own group there."""
    limit_name, used_name, prefix = names
    while True:
        folder = top + path.rstrip("/")
        limit, used = (
            _number(f"{folder}/memory.{limit_name}"),
            _number(f"{folder}/memory.{used_name}"),
        )
        if limit is not None and used is not None:
            # What files have in memory counts as used, and is given up when memory is short.
            stat = _fields(f"{folder}/memory.stat")
            files = (stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
            yield limit - used + sum(files)
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
