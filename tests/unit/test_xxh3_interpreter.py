"""The kernels' source, run by Triton's interpreter on the CPU, hashes as the xxhash package does.

Prevents the disaster of a device hash that misses a change or differs from the writer's. Each
check runs in a process of its own: the interpreter must be chosen before triton is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

CHECKS = Path(__file__).parents[1] / "ptx" / "device_checks.py"
KIB = 1024


def interpreted(name: str, **arguments: Any) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(CHECKS), name, json.dumps(arguments)],
        env=dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("start", "stop"), [(0, 241), (241, 271), (271, 300)])
def test_every_short_length_at_five_alignments(start: int, stop: int) -> None:
    assert interpreted("short_lengths", start=start, stop=stop) > 0


def test_no_bytes() -> None:
    assert interpreted("empty") == 4


@pytest.mark.parametrize("skews", [[0], [8, 1]])
def test_edges_of_blocks_and_stripes(skews: list[int]) -> None:
    lengths = [1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 3072, 3135, 3137]
    assert interpreted("edge_lengths", lengths=lengths, seed=0xFEDCBA9876543210, skews=skews) > 0


@pytest.mark.parametrize("size", [4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB])
def test_edges_of_chunk_sizes(size: int) -> None:
    lengths = [size - 1, size, size + 1]
    assert interpreted("edge_lengths", lengths=lengths, seed=11, skews=[0, 4]) == 6


def test_a_scratch_too_small_for_all_chunks_is_used_in_waves() -> None:
    assert interpreted("waves") > 5


def test_warps_of_64_lanes() -> None:
    lengths = [240, 1025, 16384, 32768, 40961]
    assert interpreted("edge_lengths", lengths=lengths, seed=3, skews=[0, 2], wave=64) == 10


def test_staging_from_end_to_end() -> None:
    assert interpreted("staged", chunk_bytes=16384) == 17


def test_self_test_passes() -> None:
    assert interpreted("self_test") == 72


def test_the_reference_hashes_as_published() -> None:
    """Guards the oracle itself: XXH3-128 of the xxHash project's documentation and test vectors."""
    assert xxhash.xxh3_128_hexdigest(b"", seed=0) == "99aa06d3014798d86001c324468d497f"
    assert xxhash.xxh3_128_hexdigest(b"a", seed=0) == "a96faf705af16834e6c632b61e964e1f"
