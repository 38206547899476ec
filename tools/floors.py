"""Prints the runtime dependencies of pyproject.toml, extras too, each at exactly its floor.

torch is left out: `make floors` installs the version that is developed with, as older ones may
come as CUDA builds of 5 GB. ``python tools/floors.py torch`` prints it, too.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_FLOOR = re.compile(r"([\w-]+)>=([\d.]+)")


def floors(text: str) -> dict[str, str]:
    """Package -> the floor that the project file `text` gives it; ValueError for one without."""
    project = tomllib.loads(text)["project"]
    found: dict[str, str] = {}
    extras: dict[str, list[str]] = project["optional-dependencies"]
    for wish in (*project["dependencies"], *(w for wishes in extras.values() for w in wishes)):
        match = _FLOOR.fullmatch(wish)
        if match is None:
            raise ValueError(f"{wish!r} in pyproject.toml is no floor, such as 'numpy>=1.26'")
        found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    left_out = {"torch", "triton"} - set(sys.argv[1:])  # a torch wants a triton of its own
    for name, version in floors(_PROJECT.read_text("utf-8")).items():
        if name not in left_out:
            print(f"{name}=={version}")
