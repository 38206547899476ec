"""Everything about GPUs that only a GPU can show, in one command of under 10 minutes.

    python tools/gpu_check.py [--only hash,tests,copy] [--out FILE] [--dry]

Run it from a checkout (nothing need be installed but the packages below). The result file is
docs/benchmarks/gpu-<name of the device>.json unless `--out` names another. Each section runs in a
process of its own, so that a device error, a crash or a hang ends that section alone, and writes
each figure into the result file at once; run again with `--only` for those that are missing, the
others are kept. Within a section, too, what fails leaves the rest to go on. Exit code 1, and a line
in capitals, when anything is wrong: a hash that differs from xxhash's, a restored byte that
differs, a test that fails, a context on an unused device, a section that died. Warnings that the
library logged are in the result, under "warnings": a figure of a save that had to copy all is none
of the kernels.

In this order, what matters most first:

`hash`      every kernel path against xxhash; bandwidth by chunk size, beside a device copy and a
            plain read; thousands of tiny tensors; tensors at odd addresses
`tests`     all of tests/gpu, each test in a process of its own (needs pytest)
`stage`     staging of a dense and of a 1 % changed state; what it costs a matmul loop
`train`     a transformer with AdamW: stall and slowdown of saves every step and every tenth, mostly
            frozen and dense; a restore that is compared bit for bit
`multi`     states on two devices, and no context on a device that is not used
`copy`      page-locking the ring; slot-sized copies, one large copy, a kernel writing straight to
            the host
`peers`     the same state through torch.save, DCP's async_save and a full pinned copy
`variants`  other ways to compile the sweep

Sizes follow the memory and the disk that there are. `--dry` runs all sections at toy sizes on the
CPU, kernels under Triton's interpreter: it shows that the tool works, its figures mean nothing.

Needs torch >= 2.11 (a CUDA or ROCm build, which brings triton 3.6 or newer) and these wheels, to be
carried along where there is no network: numpy xxhash lz4 zstandard lmdb blake3 msgspec click. The
section `tests` needs pytest, too. What is missing is told at once, before anything runs.
Triton needs a C compiler and Python's headers (gcc, python3-dev). No network and no nvcc is used.
"""

# pyright: basic
# ruff: noqa: E402  (what is missing is told, and where the sources are, before anything is imported)

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "store"), str(ROOT / "tools")]

PACKAGES = ("torch", "numpy", "xxhash", "lz4", "zstandard", "lmdb", "blake3", "msgspec", "click")
if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    sys.exit(f"not installed: {' '.join(missing)}")

from gpu_figures import DRY, Check, WrongError  # isort: skip  (before what imports triton)

import gpu_kernels
import gpu_training
import numpy as np
import torch

import deltackpt

RESERVE = 40.0
"""Seconds that a section which hangs leaves to each one after it."""


def environment(device: torch.device) -> dict[str, Any]:
    try:
        triton = importlib.import_module("triton").__version__
    except ImportError as error:
        triton = str(error)
    facts: dict[str, Any] = {
        "dry": DRY, "torch": torch.__version__, "triton": triton,
        "python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip,
        "numpy": np.__version__, "deltackpt": deltackpt.__version__, "cores": os.cpu_count(),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "headers": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
    }  # fmt: skip
    if not DRY:
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name, "device_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(device)),
            "devices": torch.cuda.device_count(), "driver": driver(),
        }  # fmt: skip
    return facts


def driver() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return "unknown"


TEST_SECONDS = 170
"""Of each test, which gives processes of its own 140."""


def section_tests(check: Check) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise WrongError("pytest is not installed")
    found = pytest("--collect-only", "-q", "tests/gpu")
    names = [line for line in found.stdout.splitlines() if "::" in line]
    if not names:
        raise WrongError(f"no test was found: {(found.stdout + found.stderr)[-2000:]}")
    if DRY:
        names = [name for name in names if "restored" in name][:2]

    def run(name: str) -> tuple[str, str]:
        if check.deadline - time.monotonic() < 20:
            return name, "not run: no time is left"
        try:
            done = pytest("-q", "-rs", name)
        except subprocess.TimeoutExpired:
            return name, f"not done in {TEST_SECONDS} s"
        if done.returncode:
            return name, f"code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
        return name, "skipped" if " skipped" in done.stdout.splitlines()[-1] else "passed"

    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2))) as pool:
        for name, outcome in pool.map(run, names):
            check.put(name, outcome)
            if outcome not in ("passed", "skipped"):
                check.wrong.append(name)


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest without the project's settings, which ask for its plugins and forbid warnings."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT),
               "--import-mode=importlib", "-o", f"pythonpath={ROOT / 'tests' / 'support'}",
               "-p", "no:cacheprovider"]  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "store")]))
    environment.pop("TRITON_INTERPRET", None)
    if DRY:
        environment["DELTACKPT_TEST_DEVICE"] = "cpu"
    running = subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = running.communicate(timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # and what it has started, which holds the pipes
        running.communicate()
        raise
    return subprocess.CompletedProcess(command, running.returncode, out, err)


SECTIONS = {
    "hash": gpu_kernels.section_hash,
    "tests": section_tests,
    "stage": gpu_kernels.section_stage,
    "train": gpu_training.section_train,
    "multi": gpu_training.section_multi,
    "copy": gpu_kernels.section_copy,
    "peers": gpu_training.section_peers,
    "variants": gpu_kernels.section_variants,
}


def default_out() -> Path:
    if DRY:
        return Path(tempfile.gettempdir()) / "gpu-dry.json"
    name = torch.cuda.get_device_name(0)
    slug = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "docs" / "benchmarks" / f"gpu-{slug}.json"


class Warnings(logging.Handler):
    """Keeps what the library warns of in the section's result."""

    def __init__(self, check: Check) -> None:
        super().__init__(logging.WARNING)
        self.check = check

    def emit(self, record: logging.LogRecord) -> None:
        known = self.check.section.setdefault("warnings", [])
        if record.getMessage() not in known:
            known.append(record.getMessage())
            print(f"  WARNING: {record.getMessage()}", flush=True)


def run_here(check: Check, name: str) -> bool:
    """Run one section, report it, and tell whether all was well."""
    print(f"{name}:", flush=True)
    check.begin(name)
    logging.getLogger("deltackpt").addHandler(Warnings(check))
    began = time.monotonic()
    check.wrong.clear()
    try:
        check.result["environment"] = environment(check.device)
    except Exception as error:
        check.wrong.append(f"environment: {error}")
    check.part(name, SECTIONS[name], check)
    del check.section["error"]
    if check.wrong:
        check.section["error"] = "; ".join(check.wrong)
    check.section.update(ok=not check.wrong, seconds=time.monotonic() - began)
    check.save()
    return not check.wrong


def command(check: Check, name: str) -> list[str]:
    """What runs one section in a process of its own, in the time that is left."""
    left = max(1.0, check.deadline - time.monotonic())
    own = [sys.executable, __file__, "--only", name, "--out", str(check.out)]
    return [*own, "--seconds", f"{left:.0f}", *(["--dry"] if DRY else [])]


def run_apart(check: Check, name: str, command: list[str], reserve: float = 0.0) -> bool:
    """Let another process run a section; report it as failed when that dies, or hangs until only
    `reserve` seconds are left."""
    check.load()
    check.begin(name)
    left = check.deadline - time.monotonic() - reserve
    if left < 5:
        end = "not run: no time is left, run it with --only"
    else:
        try:
            code = subprocess.run(command, timeout=left, check=False).returncode
            end = None if code in (0, 1) else f"its process ended with code {code}"
        except subprocess.TimeoutExpired:
            end = f"not done in {left:.0f} s"
    check.load()
    section = check.result["sections"][name]
    if end is not None:
        print(f"  FAILED: {name}: {end}", flush=True)
        section.update(ok=False, error=end)
        check.save()
    return section["ok"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument("--out", type=Path, help="result file (see above)")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for all sections")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = set(names) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    if not DRY and not torch.cuda.is_available():
        parser.error("no GPU is in reach (torch.cuda.is_available() is False); --dry needs none")
    check = Check(options.out or default_out(), options.seconds)
    if len(names) == 1:
        good = run_here(check, names[0])
    else:
        good = True
        for number, name in enumerate(names):
            reserve = RESERVE * (len(names) - 1 - number)
            good &= run_apart(check, name, command(check, name), reserve)
    print(f"{'ok' if good else 'FAILED'}: {check.out}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
