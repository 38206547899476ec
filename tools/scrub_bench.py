"""`deltackpt verify` against `borg check` on the same bytes, in turns.

    python tools/scrub_bench.py --borg /usr/bin/borg [--mb 2000] [--rounds 5]

The bytes are one training state: half fp32 weights, a quarter bf16 weights, a quarter small
integers. `--fp32` makes all of it fp32 weights. borg keeps them without encryption, with its
default compression (lz4) and chunker. Prints ratios of medians: to the default level of `verify`,
which decodes every chunk and proves it by its id, as `borg check --verify-data` does, and to level
records, which compares stored bytes with checksums, as `borg check --repository-only` does. All
files are in the page cache, as they have just been written: what is compared is the work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from deltackpt_store.store import Store
from deltackpt_store.store_writer import Chunk, StoreWriter
from deltackpt_store.verify import verify
from numpy.typing import NDArray

CHUNK = 512 * 1024
VERIFY, RECORDS = "deltackpt verify", "deltackpt verify --level records"


def state(megabytes: int, fp32: bool) -> list[tuple[str, NDArray[Any]]]:
    """(dtype, values) of four tensors."""
    rng = np.random.default_rng(7)
    quarter = megabytes * 1_000_000 // 4
    weights = [("float32", rng.standard_normal(quarter // 4, np.float32)) for _ in range(4)]
    if fp32:
        return weights
    bf16 = (rng.standard_normal(quarter // 2, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    small = np.where(rng.random(quarter // 8) < 0.5, 0, rng.integers(0, 50, quarter // 8))
    return [*weights[:2], ("bfloat16", bf16), ("int64", small)]


def fill(path: Path, tensors: list[tuple[str, NDArray[Any]]]) -> int:
    """Put the tensors into a new store as records that nothing names; bytes stored."""
    store = Store.create(path)
    with StoreWriter(store) as writer:
        for dtype, values in tensors:
            raw = values.view(np.uint8).reshape(-1).data
            for start in range(0, len(raw), 64 * CHUNK):
                part = raw[start : start + 64 * CHUNK]
                pieces = [part[i : i + CHUNK] for i in range(0, len(part), CHUNK)]
                writer.put_many([Chunk(piece, dtype) for piece in pieces])
        writer.flush()
    return verify(Store.open(path), level="structure").bytes


class Cost(NamedTuple):
    """Seconds of the clock, and of processors (of child processes too)."""

    wall: float
    cpu: float


def measured(work: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    work()
    return Cost(time.perf_counter() - wall, sum(os.times()[:4]) - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--borg", default=shutil.which("borg"), help="the borg command")
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fp32", action="store_true", help="only fp32 weights")
    parser.add_argument("--dir", help="where to work (default: the temporary directory)")
    options = parser.parse_args()
    if not options.borg:
        sys.exit("no borg: name it with --borg")
    with tempfile.TemporaryDirectory(dir=options.dir) as where:
        raw, stored = prepare(Path(where), state(options.mb, options.fp32))
        compare(Path(where), options.borg, options.rounds)
        print(f"{raw / 1e6:.0f} MB of tensors, {stored / 1e6:.0f} MB stored, {os.cpu_count()} CPUs")


def prepare(where: Path, tensors: list[tuple[str, NDArray[Any]]]) -> tuple[int, int]:
    """Files for borg and a store of the same; bytes of tensors, and bytes stored."""
    (where / "data").mkdir()
    for number, (_, values) in enumerate(tensors):
        values.tofile(where / "data" / f"{number}.bin")
    return sum(values.nbytes for _, values in tensors), fill(where / "store", tensors)


def compare(where: Path, borg: str, rounds: int) -> None:
    env = {**os.environ, "BORG_BASE_DIR": str(where / "home"), "BORG_REPO": str(where / "repo"),
           "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}  # fmt: skip

    def run(*arguments: str) -> None:
        subprocess.run([borg, *arguments], env=env, check=True, cwd=where)

    run("init", "--encryption", "none")
    run("create", "::state", "data")
    contestants: dict[str, Callable[[], object]] = {
        VERIFY: lambda: verify(Store.open(where / "store")),
        RECORDS: lambda: verify(Store.open(where / "store"), level="records"),
        "borg check --verify-data": lambda: run("check", "--verify-data"),
        "borg check --archives-only --verify-data": lambda: run(
            "check", "--archives-only", "--verify-data"
        ),
        "borg check --repository-only": lambda: run("check", "--repository-only"),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            costs[name].append(measured(work))
    for level, ours in (("chunks", VERIFY), ("records", RECORDS)):
        wall, cpu = (statistics.median(cost[i] for cost in costs[ours]) for i in (0, 1))
        for name, each in costs.items():
            if name not in (VERIFY, RECORDS):
                slower = statistics.median(cost.wall for cost in each) / wall
                dearer = statistics.median(cost.cpu for cost in each) / cpu
                print(f"{level:8} {name:42} time x {slower:5.1f}   processor time x {dearer:5.1f}")


if __name__ == "__main__":
    main()
