"""Triton kernels: XXH3-128 of every chunk in a table, for chunks of more than 240 bytes.

The sum that a block of 1 KiB adds to the accumulator does not depend on the accumulator, so all
blocks are summed at once (the part that reads the data, bound by memory). What is sequential, the
scramble between blocks, reads only 64 bytes per KiB. A *wave* is a run of chunks whose sums fit in
half of a fixed scratch; one launch of :func:`sweep` finishes the chunks of one wave and sums the
blocks of the next, so the two overlap while plain stream order keeps them apart.

Layouts in device memory, all rows in chunk order:

- ``table``: two int64 per chunk: address; bytes in the low half, first block within its wave in
  the high half. Chunks are shorter than 2 GiB and may lie at any address.
- ``keys``: the words of :func:`deltackpt.cuda.xxh3.key_table`.
- ``sums``: eight uint64 per block of the wave.
- ``digests``: (low, high) uint64 per chunk: holds the digests of the state before, is overwritten
  with those of this state.
- ``flags``: one byte per chunk, 1 where the digest differs from the one it replaced.

Importing this module imports triton; everything else in the package does so only when it launches.
"""

# Triton compiles these functions from their source: pyright cannot see types through its operators
# (hence basic mode); its language has capitals for compile-time constants and no star in tuples.
# pyright: basic, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
# ruff: noqa: N803, N806, RUF005  (constants in capitals, and no star in tuples, as said above)

import triton
import triton.language as tl

from deltackpt.cuda import xxh3

P32_1 = tl.constexpr(xxh3.PRIME32_1)
P32_2 = tl.constexpr(xxh3.PRIME32_2)
P32_3 = tl.constexpr(xxh3.PRIME32_3)
P64_1 = tl.constexpr(xxh3.PRIME64_1)
P64_2 = tl.constexpr(xxh3.PRIME64_2)
P64_3 = tl.constexpr(xxh3.PRIME64_3)
P64_4 = tl.constexpr(xxh3.PRIME64_4)
P64_5 = tl.constexpr(xxh3.PRIME64_5)
MX1 = tl.constexpr(xxh3.PRIME_MX1)
SHORT = tl.constexpr(xxh3.SHORT_BYTES)
SCRAMBLE_KEYS = tl.constexpr(xxh3.SCRAMBLE_KEYS)
LAST_KEYS = tl.constexpr(xxh3.LAST_KEYS)
MERGE_LOW = tl.constexpr(xxh3.MERGE_LOW)
MERGE_HIGH = tl.constexpr(xxh3.MERGE_HIGH)


@triton.jit
def word_at(address, mask):
    """The little-endian 64-bit words at any byte addresses.

    Only aligned words that hold wanted bytes are read, so nothing outside an allocation is touched.
    """
    shift = ((address & 7) * 8).to(tl.uint64)
    aligned = (address - (address & 7)).to(tl.pointer_type(tl.uint64))
    low = tl.load(aligned, mask=mask, other=0)
    high = tl.load(aligned + 1, mask=mask & (shift != 0), other=0)
    return (low >> shift) | ((high << 1) << (63 - shift))  # a shift by 64 would be undefined


@triton.jit
def avalanche(h):
    h = (h ^ (h >> 37)) * MX1
    return h ^ (h >> 32)


@triton.jit
def fold(a, b):
    """Low half XOR high half of the 128-bit product."""
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def store_digest(digests, flags, row, low, high, mask):
    """Replace the digests of ``row`` and flag those that differ from what was there."""
    before_low = tl.load(digests + row * 2, mask=mask, other=0)
    before_high = tl.load(digests + row * 2 + 1, mask=mask, other=0)
    changed = (before_low != low) | (before_high != high)
    tl.store(digests + row * 2, low, mask=mask)
    tl.store(digests + row * 2 + 1, high, mask=mask)
    tl.store(flags + row, changed.to(tl.uint8), mask=mask)


@triton.jit
def _take(words, keys):
    """What stripes add to the accumulator, lane by lane. A masked word and key of 0 add nothing."""
    keyed = words ^ keys
    even, odd = tl.split(words)
    return (keyed & 0xFFFFFFFF) * (keyed >> 32) + tl.join(odd, even)


@triton.jit
def _sum_whole(address, keys, BLOCKS: tl.constexpr, STRIPES: tl.constexpr):
    """Sums of a tile of whole blocks at an address divisible by 16.

    All data is asked for before any of it is used (the barrier keeps the compiler from sinking the
    loads to their uses). The cast and its alignment hint must stand here: on the result of a helper
    the hint would be lost, and with it the 128-bit loads.
    """
    block = tl.arange(0, BLOCKS)[:, None, None, None]
    stripe = tl.arange(0, STRIPES)[None, :, None, None]
    lane = tl.arange(0, 4)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    data = base + block * 128 + stripe * 8 + lane
    key = keys + stripe * 8 + lane
    words = ()
    for step in tl.static_range(16 // STRIPES):
        words = words + (tl.load(data + step * STRIPES * 8),)
    tl.debug_barrier()
    total = tl.zeros((BLOCKS, STRIPES, 4, 2), tl.uint64)
    for step in tl.static_range(16 // STRIPES):
        total += _take(words[step], tl.load(key + step * STRIPES * 8))
    return tl.sum(total, axis=1)


@triton.jit
def _sum_part(
    address, stripes, keys, BLOCKS: tl.constexpr, STRIPES: tl.constexpr, ALIGNED: tl.constexpr
):
    """Sums of a tile of which only the first ``stripes`` stripes count, at any address.

    Masks change between stripes only, never inside one, else the loads would get narrower.
    """
    block = tl.arange(0, BLOCKS)[:, None, None, None]
    stripe = tl.arange(0, STRIPES)[None, :, None, None]
    lane = tl.arange(0, 4)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    total = tl.zeros((BLOCKS, STRIPES, 4, 2), tl.uint64)
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    GROUP: tl.constexpr = 4 if ALIGNED else 2  # steps in flight together: what 64 registers hold
    for some in range(0, tl.minimum(16 // STRIPES, tl.cdiv(stripes, STRIPES)), GROUP):
        at = some * STRIPES * 8 + stripe * 8 + lane
        words = ()
        for step in tl.static_range(GROUP):
            wanted = block * 16 + stripe + (some + step) * STRIPES < stripes
            word = block * 128 + at + step * STRIPES * 8
            if ALIGNED:
                words = words + (tl.load(base + word, mask=wanted, other=0),)
            else:
                words = words + (word_at(address + word * 8, wanted),)
        for step in tl.static_range(GROUP):
            wanted = block * 16 + stripe + (some + step) * STRIPES < stripes
            key = tl.load(keys + at + step * STRIPES * 8 + block * 0, mask=wanted, other=0)
            total += _take(words[step], key)
    return tl.sum(total, axis=1)


@triton.jit
def sum_blocks(table, keys, sums, row, tile, BLOCKS: tl.constexpr, STRIPES: tl.constexpr):
    """Sum the blocks of one tile (``BLOCKS`` KiB) of one chunk into ``sums``."""
    address = tl.load(table + row * 2)
    extent = tl.load(table + row * 2 + 1)
    length = (extent & 0xFFFFFFFF).to(tl.int32)
    stripes = (length - 1) // 64 - tile * (BLOCKS * 16)
    # the address is tested so that both loads are issued before either is waited for
    if (stripes > 0) & (length > SHORT) & (address != 0):
        start = address + tile.to(tl.int64) * (BLOCKS * 1024)
        if address & 15 == 0:
            if stripes >= BLOCKS * 16:
                total = _sum_whole(start, keys, BLOCKS, STRIPES)
            else:
                total = _sum_part(start, stripes, keys, BLOCKS, STRIPES, True)
        else:
            total = _sum_part(start, stripes, keys, BLOCKS, STRIPES, False)
        block = tl.arange(0, BLOCKS)[:, None, None]
        lane = tl.arange(0, 4)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        out = sums + ((extent >> 32) + tile * BLOCKS) * 8
        tl.store(out + block * 8 + lane, total, mask=block * 16 < stripes)


@triton.jit
def finish_chunks(
    table, keys, sums, digests, flags, first, end, CHUNKS: tl.constexpr, STAGES: tl.constexpr
):
    """Hash the chunks of rows ``first`` to ``first + CHUNKS`` (before ``end``) from their sums."""
    row = first + tl.arange(0, CHUNKS)[:, None, None]
    lane = tl.arange(0, 4)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    inside = row < end
    address = tl.load(table + row * 2, mask=inside, other=0)
    extent = tl.load(table + row * 2 + 1, mask=inside, other=0)
    length = (extent & 0xFFFFFFFF).to(tl.int32)
    active = length > SHORT
    scrambles = tl.where(active, (length - 1) // 1024, 0)
    blocks = tl.where(active, ((length - 1) // 64 + 15) // 16, 0)
    most = tl.max(tl.max(tl.max(blocks, axis=2), axis=1), axis=0)

    prime = tl.where(lane == 0, P32_3, 0).to(tl.uint64)
    prime = tl.where(lane == 1, P64_1, prime)
    prime = tl.where(lane == 2, P64_2, prime)
    prime = tl.where(lane == 3, P64_3, prime)
    prime = tl.where(lane == 4, P64_4, prime)
    prime = tl.where(lane == 5, P32_2, prime)
    prime = tl.where(lane == 6, P64_5, prime)
    prime = tl.where(lane == 7, P32_1, prime)
    acc = prime + tl.zeros((CHUNKS, 4, 2), tl.uint64)

    scramble_key = tl.load(keys + SCRAMBLE_KEYS + lane)
    sum_at = sums + (extent >> 32) * 8 + lane
    for block in tl.range(0, most, num_stages=STAGES):
        acc += tl.load(sum_at + block * 8, mask=block < blocks, other=0)
        scrambled = (acc ^ (acc >> 47) ^ scramble_key) * P32_1
        acc = tl.where(block < scrambles, scrambled, acc)

    last = word_at(address + (length - 64) + lane * 8, active)
    acc += _take(last, tl.load(keys + LAST_KEYS + lane))

    flat_row = first + tl.arange(0, CHUNKS)
    flat_extent = tl.load(table + flat_row * 2 + 1, mask=flat_row < end, other=0)
    size = flat_extent & 0xFFFFFFFF
    total = size.to(tl.uint64)
    low_a, low_b = tl.split(acc ^ tl.load(keys + MERGE_LOW + lane))
    low = avalanche(total * P64_1 + tl.sum(fold(low_a, low_b), axis=1))
    high_a, high_b = tl.split(acc ^ tl.load(keys + MERGE_HIGH + lane))
    high = avalanche((0 - total * P64_2 - 1) + tl.sum(fold(high_a, high_b), axis=1))
    store_digest(digests, flags, flat_row.to(tl.int64), low, high, size > SHORT)


@triton.jit(
    do_not_specialize=["done_first", "done_end", "done_programs", "done_sums", "next_first",
                       "next_sums", "tiles_log2"]
)  # fmt: skip
def sweep(
    table,
    keys,
    sums,
    digests,
    flags,
    done_first,
    done_end,
    done_programs,
    done_sums,
    next_first,
    next_sums,
    tiles_log2,
    BLOCKS: tl.constexpr,
    STRIPES: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Finish the chunks ``done_first .. done_end`` and sum those from ``next_first`` on.

    The first ``done_programs`` programs finish ``CHUNKS`` chunks each; each of the others sums one
    tile of ``BLOCKS`` KiB, ``2 ** tiles_log2`` tiles to a chunk. ``done_sums`` and ``next_sums``
    are where the sums of each wave start, in blocks: the two halves of the scratch in turn.
    """
    program = tl.program_id(0)
    if program < done_programs:
        first = done_first + program * CHUNKS
        finish_chunks(table, keys, sums + done_sums.to(tl.int64) * 8, digests, flags, first,
                      done_end, CHUNKS, STAGES)  # fmt: skip
    else:
        index = program - done_programs
        row = next_first + (index >> tiles_log2)
        tile = index & ((1 << tiles_log2) - 1)
        sum_blocks(table, keys, sums + next_sums.to(tl.int64) * 8, row.to(tl.int64), tile, BLOCKS,
                   STRIPES)  # fmt: skip
