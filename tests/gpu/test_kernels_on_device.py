"""The kernels on a real GPU: what the interpreter and the PTX machine show, on silicon."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deltackpt.cuda.runtime import CudaRuntime

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))

import device_checks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's and the compiler's, about the device
]

KIB = 1024


@pytest.fixture
def runtime() -> Any:
    return CudaRuntime(torch.device("cuda", torch.cuda.current_device()))


def test_every_short_length_at_five_alignments(runtime: Any) -> None:
    assert device_checks.short_lengths(runtime, 0, 300) == 299 * 5 * 4
    assert device_checks.empty(runtime) == 4


def test_edges_of_stripes_blocks_and_chunks(runtime: Any) -> None:
    lengths = [near + step for near in (1024, 2048, 4 * KIB, 16 * KIB, 64 * KIB, 1024 * KIB)
               for step in (-1, 0, 1)]  # fmt: skip
    skews = [0, 8, 4, 2, 1]
    assert device_checks.edge_lengths(runtime, lengths, 0xFEDCBA9876543210, skews) == 90


def test_waves(runtime: Any) -> None:
    assert device_checks.waves(runtime) > 5


def test_gathering(runtime: Any) -> None:
    lengths = [1, 15, 16, 17, 1000, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 50_000, 1024 * KIB]
    assert device_checks.gathered(runtime, lengths) == 50


def test_staging_from_end_to_end(runtime: Any) -> None:
    assert device_checks.staged(runtime, 4096) == 60


def test_beyond_four_gigabytes(runtime: Any) -> None:
    """Prevents 32-bit offsets: one tensor of 6 GiB, a change in its last chunk."""
    import numpy as np

    from deltackpt.cuda.hasher import Counters, Hasher
    from deltackpt.cuda.table import ChunkTable

    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free device memory")
    memory = torch.zeros(6 << 30, dtype=torch.uint8, device=runtime.device)
    torch.cuda.synchronize()
    table = ChunkTable([(memory.numel(), 256 * KIB)])
    hasher = Hasher(runtime, runtime.stream(), table, 1, Counters())
    hasher.set_addresses([memory.data_ptr()])
    hasher.set_digests(np.zeros((table.count, 2), np.uint64))
    hasher.detect()
    assert len(hasher.changes().rows) == table.count
    memory[-1] = 1
    torch.cuda.synchronize()
    hasher.detect()
    assert hasher.changes().rows.tolist() == [table.count - 1]
