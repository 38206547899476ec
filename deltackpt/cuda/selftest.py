"""Are the kernels right on this device? Hashes are compared with the xxhash package's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from .hasher import Counters, Hasher
from .runtime import Runtime
from .specs import SCRATCH_BYTES, sum_blocks_per_program
from .table import ChunkTable
from .xxh3 import digest_bytes

LENGTHS: Final = (
    1, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 159, 160, 161, 192, 224, 240,
    241, 256, 300, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 16384, 16385, 65537, 262144,
)  # fmt: skip
"""Every algorithm of XXH3 and the edges of stripes, blocks and tiles."""
SKEWS: Final = (0, 8, 4, 2, 1)
"""Address modulo 16 of the pieces, in turn."""


MOVED: Final = ((1, 0), (17, 8), (16384, 0), (16401, 1), (16401, 0))
"""(length, skew) of the pieces that are gathered: one tile or two, with and without odd bytes."""


class Mismatch(NamedTuple):
    """A piece whose digest is not the one xxhash gives, or that was not moved as it is."""

    length: int
    skew: int
    expected: str
    found: str


def hash_pieces(
    runtime: Runtime,
    pieces: Sequence[tuple[int, int]],
    *,
    seed: int,
    scratch_bytes: int = SCRATCH_BYTES,
    data_seed: int = 0,
    changes: bool = True,
) -> list[Mismatch]:
    """Hash pieces of (length, skew) filled with random bytes; return those that come out wrong.

    With `changes` also checks that a second pass over the same bytes reports no change, and that
    after one byte of every third piece was modified exactly those pieces are reported, in order.
    """
    ends = np.cumsum([16 + -(-length // 16) * 16 for length, _ in pieces])
    starts = [int(end) - (-(-length // 16) * 16 + 16) + skew
              for end, (length, skew) in zip(ends, pieces, strict=True)]  # fmt: skip
    generator = np.random.default_rng(data_seed)
    content = generator.integers(0, 256, int(ends[-1]), np.uint8)

    table = ChunkTable(
        [(length, max(length, 1)) for length, _ in pieces],
        scratch_bytes=scratch_bytes,
        blocks_per_program=sum_blocks_per_program(runtime.wave),
    )
    stream = runtime.stream()
    counters = Counters()
    hasher = Hasher(runtime, stream, table, seed, counters)
    memory = runtime.empty(stream, content.nbytes)
    host = runtime.pinned(content.nbytes)

    def upload() -> None:
        host.numpy()[:] = content
        runtime.copy(stream, memory, host)
        runtime.synchronize(runtime.record(stream))

    def changed() -> list[int]:
        hasher.detect()
        changes = hasher.changes()
        for row, digest in zip(changes.rows, digest_bytes(changes.digests), strict=True):
            found[int(row)] = digest.tobytes()
        return [int(row) for row in changes.rows]

    upload()
    found: dict[int, bytes] = {}
    hasher.set_addresses([memory.data_ptr() + start for start in starts])
    hasher.set_digests(np.zeros((table.count, 2), np.uint64))
    present = [index for index, (length, _) in enumerate(pieces) if length]
    wrong: list[Mismatch] = []
    if changed() != list(range(table.count)):
        wrong.append(Mismatch(-1, 0, "every chunk listed as changed", "some missing"))
    if changes:
        if changed():
            wrong.append(Mismatch(-1, 0, "no chunk listed as changed", "some listed"))
        touched = list(range(0, table.count, 3))
        for row in touched:
            length = pieces[present[row]][0]
            content[starts[present[row]] + int(generator.integers(length))] ^= 0x10
        upload()
        if changed() != touched:
            wrong.append(Mismatch(-1, 0, "every third chunk listed as changed", "another list"))
    for row, index in enumerate(present):
        length, skew = pieces[index]
        data = content[starts[index] : starts[index] + length].tobytes()
        expected = xxhash.xxh3_128_digest(data, seed=seed)
        if expected != found.get(row):
            got = found.get(row, b"").hex() or "nothing"
            wrong.append(Mismatch(length, skew, expected.hex(), got))
    return wrong


def gather_pieces(runtime: Runtime, pieces: Sequence[tuple[int, int]]) -> list[Mismatch]:
    """Gather pieces of (length, skew) in an order of chance; return those that arrive wrong.

    A last entry of length -1 means that other bytes were written, too.
    """
    rng = np.random.default_rng(9)
    room = [length + 64 & -16 for length, _ in pieces]
    starts = np.cumsum([0, *room])
    content = rng.integers(0, 256, int(starts[-1]), np.uint8)
    stream = runtime.stream()
    hasher = Hasher(
        runtime, stream, ChunkTable([(length, length) for length, _ in pieces]), 0, Counters()
    )
    source, target, plan = (
        runtime.empty(stream, nbytes) for nbytes in (len(content), len(content), 16 * len(pieces))
    )

    def upload(to: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        host = runtime.pinned(values.nbytes)
        host.numpy()[:] = values.view(np.uint8).reshape(-1)
        runtime.copy(stream, to, host)
        runtime.synchronize(runtime.record(stream))

    order = rng.permutation(len(pieces))
    offsets = np.cumsum([0, *(room[int(row)] for row in order)])[:-1]
    expected = np.full(len(content), 0x77, np.uint8)
    upload(source, content)
    upload(target, expected)
    upload(plan, np.stack([order, offsets], axis=1))
    hasher.set_addresses([source.data_ptr() + int(start) + skew
                          for start, (_, skew) in zip(starts, pieces, strict=False)])  # fmt: skip
    longest, half = max(length for length, _ in pieces), len(pieces) // 2
    for first, entries in ((0, half), (half, len(pieces) - half)):
        hasher.gather(plan.view(torch.int64), first, entries, longest, target.data_ptr())
    back = runtime.pinned(len(content))
    runtime.copy(stream, back, target)
    runtime.synchronize(runtime.record(stream))
    found = back.numpy()
    wrong: list[Mismatch] = []
    for row, at in zip(order, offsets, strict=True):
        length, skew = pieces[int(row)]
        begin = int(starts[row]) + skew
        expected[at : at + length] = content[begin : begin + length]
        if (found[at : at + length] != expected[at : at + length]).any():
            wrong.append(Mismatch(length, skew, "the same bytes", "others"))
    if not wrong and (found != expected).any():
        wrong.append(Mismatch(-1, 0, "no byte written beside the pieces", "some"))
    return wrong


def check_device(runtime: Runtime, *, seed: int) -> list[Mismatch]:
    """A few dozen pieces that together take every path of every kernel; 0.9 MB."""
    pieces = [(length, SKEWS[index % len(SKEWS)]) for index, length in enumerate(LENGTHS)]
    aligned = [(length, 0) for length in LENGTHS]
    return hash_pieces(runtime, aligned + pieces, seed=seed) + gather_pieces(runtime, MOVED)
