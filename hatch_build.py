"""Build hook: compiles the inner loops of the chunk codecs into the wheel, if there is a compiler.

Without one (or with ``DELTACKPT_KERNELS=off``) the package is pure Python and does the same with
NumPy. ``DELTACKPT_KERNELS=on`` makes a missing compiler an error; ``CC`` names the compiler.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("store/deltackpt_store/coding/kernels.c")
# No fused multiply-add: predictions of optimizer steps must have the same bits everywhere.
FLAGS = ["-O3", "-std=c11", "-Wall", "-Wextra", "-Werror=implicit", "-ffp-contract=off",
         "-fno-math-errno", "-fPIC", "-shared"]  # fmt: skip


def compile_kernels(source: Path, target: Path) -> str | None:
    """Compile `source` into the shared library `target`; what went wrong, or None."""
    hash_of_source = zlib.crc32(source.read_bytes())
    building = target.with_suffix(".tmp")
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, f"-DSOURCE={hash_of_source}u",
               "-o", str(building), str(source), "-lm"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    if done.returncode:
        building.unlink(missing_ok=True)
        return done.stderr.strip() or f"{command[0]} failed"
    building.replace(target)  # at once: another process may have the old one open
    return None


class KernelBuild(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("DELTACKPT_KERNELS", "")
        if wish not in ("", "on", "off"):
            raise ValueError(f"DELTACKPT_KERNELS must be on or off, not {wish!r}")
        source = Path(self.root) / SOURCE
        target = source.with_name("kernels.lib")
        target.unlink(missing_ok=True)
        if wish == "off":
            return
        problem = compile_kernels(source, target)
        if problem is not None:
            if wish == "on":
                raise RuntimeError(f"the codecs' inner loops do not compile: {problem}")
            print(f"deltackpt: built without compiled inner loops: {problem}", file=sys.stderr)
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
