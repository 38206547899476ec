"""The host side of the device hash: constants, chunk tables, waves. No triton needed."""

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from deltackpt_store.errors import InvalidInputError

from deltackpt.cuda import xxh3
from deltackpt.cuda.specs import SUM_BYTES
from deltackpt.cuda.table import ChunkTable, list_bytes

MASK = (1 << 64) - 1


def by_the_book(data: bytes, keys: list[int]) -> int:
    """XXH3-128 of more than 240 bytes as the specification words it, from the key table."""
    lanes = [xxh3.PRIME32_3, xxh3.PRIME64_1, xxh3.PRIME64_2, xxh3.PRIME64_3,
             xxh3.PRIME64_4, xxh3.PRIME32_2, xxh3.PRIME64_5, xxh3.PRIME32_1]  # fmt: skip

    def stripe(at: int, key: int) -> None:
        for i in range(8):
            word = int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little")
            keyed = word ^ keys[key + i]
            lanes[i ^ 1] = (lanes[i ^ 1] + word) & MASK
            lanes[i] = (lanes[i] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & MASK

    for n in range((len(data) - 1) // 64):
        stripe(64 * n, xxh3.STRIPE_KEYS + 8 * (n % 16))
        if n % 16 == 15:
            for i, lane in enumerate(lanes):
                lane ^= (lane >> 47) ^ keys[xxh3.SCRAMBLE_KEYS + i]
                lanes[i] = lane * xxh3.PRIME32_1 & MASK
    stripe(len(data) - 64, xxh3.LAST_KEYS)

    def merge(key: int, total: int) -> int:
        for i in range(0, 8, 2):
            product = (lanes[i] ^ keys[key + i]) * (lanes[i + 1] ^ keys[key + i + 1])
            total += (product & MASK) ^ (product >> 64)
        total &= MASK
        total = (total ^ (total >> 37)) * xxh3.PRIME_MX1 & MASK
        return total ^ (total >> 32)

    low = merge(xxh3.MERGE_LOW, len(data) * xxh3.PRIME64_1)
    high = merge(xxh3.MERGE_HIGH, MASK - (len(data) * xxh3.PRIME64_2 & MASK))
    return high << 64 | low


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF0, MASK])
def test_the_key_table_holds_what_a_seed_turns_into(seed: int) -> None:
    keys = [int(word) for word in xxh3.key_table(seed)]
    for length in (241, 1024, 1025, 5000):
        data = np.random.default_rng(length).bytes(length)
        assert by_the_book(data, keys) == xxhash.xxh3_128_intdigest(data, seed=seed)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(OverflowError):
        xxh3.key_table(seed)


def test_digest_bytes_are_canonical() -> None:
    value = xxhash.xxh3_128_intdigest(b"canonical")
    row = np.array([[value & MASK, value >> 64]], np.uint64)
    assert xxh3.digest_bytes(row)[0].tobytes() == xxhash.xxh3_128_digest(b"canonical")


def test_rows_cover_every_byte_once() -> None:
    extents = [(1000, 256), (0, 256), (256, 256), (257, 256), (1, 4096)]
    table = ChunkTable(extents)
    rows = table.rows([10_000, 0, 20_000, 30_000, 40_000])
    spans = [(int(at), int(size) & 0xFFFFFFFF) for at, size in rows]
    assert spans == [(10_000, 256), (10_256, 256), (10_512, 256), (10_768, 232), (20_000, 256),
                     (30_000, 256), (30_256, 1), (40_000, 1)]  # fmt: skip
    assert table.extent.tolist() == [0, 0, 0, 0, 2, 3, 3, 4]
    assert table.chunk.tolist() == [0, 1, 2, 3, 0, 0, 1, 0]
    assert table.starts.tolist() == [0, 4, 4, 5, 7, 8]


def test_addresses_and_offsets_beyond_four_gigabytes() -> None:
    """Prevents 32-bit wrap-around: a tensor of 6 GiB at the top of the address space."""
    chunk = 256 * 1024
    table = ChunkTable([(6 << 30, chunk)])
    base = (1 << 47) - (6 << 30)
    rows = table.rows([base])
    assert int(rows[-1, 0]) == base + (6 << 30) - chunk
    assert (np.diff(rows[:, 0]) == chunk).all()


@pytest.mark.parametrize("scratch", [1 << 14, 1 << 18, 64 << 20])
def test_waves_fit_in_their_half_of_the_scratch(scratch: int) -> None:
    rng = np.random.default_rng(3)
    extents = [(int(rng.integers(1, 300_000)), 65536) for _ in range(300)]
    table = ChunkTable(extents, scratch_bytes=scratch)
    assert table.waves[0].first == 0
    assert table.waves[-1].end == table.count
    for wave, following in zip(table.waves, table.waves[1:], strict=False):
        assert wave.end == following.first
    used = 0
    for wave in table.waves:
        length = table.length[wave.first : wave.end].astype(np.int64)
        blocks = np.where(length > 240, ((length - 1) // 64 + 15) // 16, 0)
        ends = table.first_block[wave.first : wave.end] + blocks
        assert (ends[:-1] <= table.first_block[wave.first + 1 : wave.end]).all()
        assert int(ends.max()) <= table.wave_blocks
        assert int(blocks.max()) <= 16 << wave.tiles_log2
        used = max(used, int(ends.max()))
    halves = 1 if len(table.waves) == 1 else 2
    assert used * SUM_BYTES * halves <= table.sum_bytes
    assert table.sum_bytes >= list_bytes(table.count)
    largest = 64 * SUM_BYTES  # the sums of one chunk of 64 KiB
    assert table.scratch_bytes <= max(scratch, 2 * largest + list_bytes(table.count)) + 1024


def test_a_few_huge_chunks_do_not_launch_programs_for_thousands_of_small_ones() -> None:
    """Prevents a launch of 10^8 idle programs: a 64 MiB chunk among 100,000 small tensors."""
    table = ChunkTable([(1000, 1000)] * 50_000 + [(64 << 20, 64 << 20)] + [(1000, 1000)] * 50_000)
    programs = sum((wave.end - wave.first) << wave.tiles_log2 for wave in table.waves)
    assert programs < 1_000_000
    assert len(table.waves) < 40


@pytest.mark.parametrize("chunk_bytes", [0, -5, (1 << 30) + 1])
def test_impossible_chunk_sizes_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(InvalidInputError, match="chunk_bytes"):
        ChunkTable([(1000, chunk_bytes)])


def test_no_extents_at_all() -> None:
    assert ChunkTable([]).count == 0
    assert ChunkTable([(0, 4096)]).waves == ()


def test_nothing_is_imported_before_it_is_needed() -> None:
    """Prevents an import error, or seconds of import time, where triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import deltackpt.cuda.hasher, deltackpt.cuda.selftest\n"
        "assert not [name for name in sys.modules if name.startswith('triton.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
