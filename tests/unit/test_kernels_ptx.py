"""The compiled kernels, run instruction by instruction on the CPU, hash as the xxhash package does.

Prevents the disaster of a compiler (or an upgrade of it) that breaks what the source got right:
here runs what was compiled, with bounds, alignment, barriers and shared memory checked.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))

import device_checks
from ptx_memory import DeviceError
from ptx_runtime import PtxRuntime

KIB = 1024
CAPABILITIES = [80, 90, 100]


@pytest.fixture(params=CAPABILITIES, ids=lambda capability: f"sm_{capability}")
def runtime(request: pytest.FixtureRequest) -> PtxRuntime:
    return PtxRuntime(request.param)


def test_every_short_length_at_five_alignments(runtime: PtxRuntime) -> None:
    assert device_checks.short_lengths(runtime, 0, 300) == 299 * 5 * 4
    assert device_checks.empty(runtime) == 4


def test_edges_of_stripes_blocks_and_chunks(runtime: PtxRuntime) -> None:
    lengths = [near + step for near in (1024, 2048, 4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)
               for step in (-1, 0, 1)]  # fmt: skip
    lengths += [1087, 1088, 1089, 3135, 3137, 256 * KIB]
    assert device_checks.edge_lengths(runtime, lengths, 0xFEDCBA9876543210, [0, 8, 4, 2, 1]) == 120


def test_waves(runtime: PtxRuntime) -> None:
    assert device_checks.waves(runtime) > 5


def test_gathering(runtime: PtxRuntime) -> None:
    lengths = [1, 7, 15, 16, 17, 100, 1000, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 50_000]
    assert device_checks.gathered(runtime, lengths) == 55


def test_staging_from_end_to_end(runtime: PtxRuntime) -> None:
    assert device_checks.staged(runtime, 4096) == 60


def test_self_test_of_devices(runtime: PtxRuntime) -> None:
    assert device_checks.self_test(runtime) == 72


# That the machine would notice: each edit of the compiled code must be caught. -----------------


def replaced(pattern: str, by: str, count: int = 0) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, by, text, count=count)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(replaced(r"bar\.sync \t0;", ""), id="barriers removed"),
        pytest.param(replaced(r"wait_group \t6", "wait_group \t99"), id="copies never waited for"),
        pytest.param(replaced(r"wait_group \t6", "wait_group \t7"), id="copies read too early"),
        pytest.param(replaced(r"(ld\.global\.v2.*) \+ 0 \]", r"\1 + 8 ]"), id="misaligned loads"),
        pytest.param(replaced(r"(ld\.global\.b64.*) \+ 0 \]", r"\1 + 1024 ]"), id="loads outside"),
        pytest.param(replaced(r"(st\.global\.b64.*) \+ 0 \]", r"\1 + 4096 ]"), id="stores outside"),
        pytest.param(replaced(r"@%p\d+ (ld\.global\.b64)", r"\1"), id="masks of loads dropped"),
        pytest.param(replaced(r"shfl\.sync\.bfly\.b32(.*), 4, 31", r"shfl.sync.bfly.b32\1, 2, 31"),
                     id="another lane"),
        pytest.param(replaced(r"mul\.hi\.u64", "mul.lo.s64", 1), id="wrong half of a product"),
        pytest.param(replaced(r"xor\.b64", "or.b64", 1), id="or for xor"),
        pytest.param(replaced(r"shr\.u64", "shr.s64"), id="signed shifts"),
    ],
)  # fmt: skip
def test_broken_code_is_noticed(edit: Callable[[str], str]) -> None:
    """Prevents a machine that proves nothing because it would accept anything."""
    runtime = PtxRuntime(90, edit=edit)
    lengths = [1, 5, 12, 20, 150, 240, 300, 2049, 16384, 17000, 65536]
    with pytest.raises((DeviceError, AssertionError)):
        device_checks.edge_lengths(runtime, lengths, 5, [0, 4])


def test_a_store_beyond_a_chunk_is_noticed() -> None:
    edit = replaced(r"(st\.global\.b8.*) \+ 0 \]", r"\1 + 1 ]")
    with pytest.raises(DeviceError):
        device_checks.gathered(PtxRuntime(90, edit=edit), [17, 100])


def faults_of(runtime: Any, lengths: list[int]) -> str:
    with pytest.raises(DeviceError) as caught:
        device_checks.edge_lengths(runtime, lengths, 5, [0])
    return str(caught.value)


def test_faults_say_where() -> None:
    edit = replaced(r"bar\.sync \t0;", "")
    message = faults_of(PtxRuntime(90, edit=edit), [3000])
    assert "race" in message
    assert "sweep, line" in message
