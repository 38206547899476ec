"""What must hold on any device, as functions of a runtime: run on the CPU by Triton's interpreter
(in a process of its own, because the interpreter must be chosen before triton is imported), on the
compiled code by the PTX machine, and on a GPU where there is one.

``python device_checks.py NAME [JSON ARGUMENTS]`` runs one of them under the interpreter.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

SEEDS = (0, 1, 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF)


def short_lengths(runtime: Any, start: int, stop: int) -> int:
    """Every length from `start` to `stop`, every seed, five alignments: equal to xxhash."""
    from deltackpt.cuda.selftest import SKEWS, hash_pieces

    pieces = [(length, skew) for length in range(max(1, start), stop) for skew in SKEWS]
    for seed in SEEDS:
        assert hash_pieces(runtime, pieces, seed=seed, changes=seed == SEEDS[2]) == []
    return len(pieces) * len(SEEDS)


def edge_lengths(runtime: Any, lengths: list[int], seed: int, skews: list[int]) -> int:
    """Chosen lengths at chosen alignments: equal to xxhash."""
    from deltackpt.cuda.selftest import hash_pieces

    pieces = [(length, skew) for length in lengths for skew in skews]
    assert hash_pieces(runtime, pieces, seed=seed) == []
    return len(pieces)


def empty(runtime: Any) -> int:
    """A chunk of no bytes, which no table ever has, hashes as xxhash says."""
    from deltackpt.cuda.hasher import Counters, Hasher
    from deltackpt.cuda.table import ChunkTable
    from deltackpt.cuda.xxh3 import digest_bytes

    for seed in SEEDS:
        hasher = Hasher(runtime, runtime.stream(), ChunkTable([(1, 1)]), seed, Counters())
        hasher.set_addresses([0])
        hasher.rows[1] = 0  # on the current stream
        runtime.synchronize(runtime.mark())
        hasher.set_digests(np.zeros((1, 2), np.uint64))
        hasher.detect()
        found = digest_bytes(hasher.changes().digests)[0].tobytes()
        assert found == xxhash.xxh3_128_digest(b"", seed=seed)
    return len(SEEDS)


def self_test(runtime: Any) -> int:
    """The check that every device passes before it is used."""
    from deltackpt.cuda.selftest import LENGTHS, check_device

    assert check_device(runtime, seed=SEEDS[2]) == []
    return 2 * len(LENGTHS)


def waves(runtime: Any) -> int:
    """A scratch so small that chunks go through it in many waves, sizes mixed."""
    from deltackpt.cuda.selftest import hash_pieces
    from deltackpt.cuda.specs import sum_blocks_per_program
    from deltackpt.cuda.table import ChunkTable

    rng = np.random.default_rng(5)
    sizes = [1, 200, 1024, 5000, 16384, 16385, 40000]
    pieces = [(int(rng.choice(sizes)) + int(rng.integers(0, 3)), 0) for _ in range(60)]
    scratch = 12 * 1024
    table = ChunkTable([(n, n) for n, _ in pieces], scratch_bytes=scratch,
                       blocks_per_program=sum_blocks_per_program(runtime.wave))  # fmt: skip
    assert len(table.waves) > 5
    assert hash_pieces(runtime, pieces, seed=7, scratch_bytes=scratch) == []
    return len(table.waves)


def gathered(runtime: Any, lengths: list[int]) -> int:
    """Chunks of any length and alignment arrive at their offsets, and no other byte is written."""
    from deltackpt.cuda.selftest import SKEWS, gather_pieces

    pieces = [(length, skew) for length in lengths for skew in SKEWS]
    assert gather_pieces(runtime, pieces) == []
    return len(pieces)


def staged(runtime: Any, chunk_bytes: int) -> int:
    """Save, save unchanged, save with a few changes, through the whole stager and a small ring."""
    import time

    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from staging_ring import SEED, MemoryRing, Tensors

    from deltackpt.cuda.stager import DeviceStager
    from deltackpt.stage import Job

    rng = np.random.default_rng(4)
    stream = runtime.stream()
    host: dict[str, Any] = {}
    state: dict[str, torch.Tensor] = {}
    for name, length in {"big": 200_000, "tail": 40_100, "small": 1000}.items():
        host[name] = rng.integers(0, 256, length, np.uint8)
        state[name] = runtime.empty(stream, length)

    def upload(name: str) -> None:
        pinned = runtime.pinned(len(host[name]))
        pinned.numpy()[:] = host[name]
        runtime.copy(stream, state[name], pinned)
        runtime.synchronize(runtime.record(stream))

    for name in host:
        upload(name)
    described = Tensors(state, chunk_bytes=chunk_bytes, live=False)
    stager = DeviceStager(runtime, seed=SEED, gather_bytes=4 * 65536, scratch_bytes=8192)
    table: Any = {}
    sizes: list[int] = []
    for changes in ({}, {}, {"big": [5, 199_999], "tail": [40_099]}):
        for name, places in changes.items():
            for place in places:
                host[name][place] ^= 1
            upload(name)
        ring = MemoryRing(3, 65536, keep=False)
        job = Job(save=1, layout=described.layout, sources=described.sources, table=table,
                  versions={}, deadline=time.monotonic() + 60, unlock=lambda: None,
                  cancelled=lambda: False)  # fmt: skip
        staging = stager.finish(job, ring, stager.start(job, runtime.mark()))
        table = staging.table
        sizes.append(staging.changed_chunks)
        assert ring.torn == []
        for (extent, chunk), data in ring.chunks.items():
            whole = host[list(host)[extent]].tobytes()
            assert data == whole[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        stager._mover._slots.forget()
    chunks = sum(-(-len(data) // chunk_bytes) for data in host.values())
    assert sizes == [chunks, 0, 3]
    stager.close()
    return chunks


def main() -> None:
    """Run one check under Triton's interpreter and print what it returned as JSON."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from deltackpt.cuda.runtime import HostRuntime

    name, arguments = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    wave = arguments.pop("wave", 32)
    print(json.dumps(globals()[name](HostRuntime(wave), **arguments)))


if __name__ == "__main__":
    main()
