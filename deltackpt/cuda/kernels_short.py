"""Triton kernel: XXH3-128 of chunks of 0 to 240 bytes, which XXH3 hashes in six other ways.

Such chunks are tails (a tensor's last, partial chunk); one lane hashes one chunk, by masks. They
are few and tiny, so this kernel is built for being right in one launch, not for speed.
"""

# Triton compiles these functions from their source: pyright cannot see types through its operators
# (hence basic mode); its language has capitals for compile-time constants and no star in tuples.
# pyright: basic, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: N803  (constants of the compiler are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from deltackpt.cuda import xxh3
from deltackpt.cuda.kernels import avalanche, fold, store_digest, word_at

P32_2 = tl.constexpr(xxh3.PRIME32_2)
P64_1 = tl.constexpr(xxh3.PRIME64_1)
P64_2 = tl.constexpr(xxh3.PRIME64_2)
P64_3 = tl.constexpr(xxh3.PRIME64_3)
P64_4 = tl.constexpr(xxh3.PRIME64_4)
MX2 = tl.constexpr(xxh3.PRIME_MX2)
SHORT = tl.constexpr(xxh3.SHORT_BYTES)
SEED = tl.constexpr(xxh3.SEED)
FLIP_0 = tl.constexpr(xxh3.FLIP_0)
FLIP_1 = tl.constexpr(xxh3.FLIP_1)
FLIP_4 = tl.constexpr(xxh3.FLIP_4)
FLIP_9 = tl.constexpr(xxh3.FLIP_9)
MID_KEYS = tl.constexpr(xxh3.MID_KEYS)
FAR_KEYS = tl.constexpr(xxh3.FAR_KEYS)
END_KEYS = tl.constexpr(xxh3.END_KEYS)


@triton.jit
def _byte_at(address, mask):
    return tl.load(address.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.uint64)


@triton.jit
def _half_at(address, mask):
    """The little-endian 32-bit words at any byte addresses, as 64-bit numbers."""
    return (
        _byte_at(address, mask)
        | (_byte_at(address + 1, mask) << 8)
        | (_byte_at(address + 2, mask) << 16)
        | (_byte_at(address + 3, mask) << 24)
    )


@triton.jit
def _swap_bytes(x):
    """Reverse the eight bytes of each number."""
    x = ((x >> 8) & 0x00FF00FF00FF00FF) | ((x & 0x00FF00FF00FF00FF) << 8)
    x = ((x >> 16) & 0x0000FFFF0000FFFF) | ((x & 0x0000FFFF0000FFFF) << 16)
    return (x >> 32) | (x << 32)


@triton.jit
def _avalanche64(h):
    """The older finaliser, of XXH64."""
    h = (h ^ (h >> 33)) * P64_2
    h = (h ^ (h >> 29)) * P64_3
    return h ^ (h >> 32)


@triton.jit
def _round(low, high, first, second, key, mask):
    """Take in 16 bytes at each of two addresses, where ``mask``; others keep low and high."""
    a = word_at(first, mask)
    b = word_at(first + 8, mask)
    c = word_at(second, mask)
    d = word_at(second + 8, mask)
    new_low = (low + fold(a ^ tl.load(key), b ^ tl.load(key + 1))) ^ (c + d)
    new_high = (high + fold(c ^ tl.load(key + 2), d ^ tl.load(key + 3))) ^ (a + b)
    return tl.where(mask, new_low, low), tl.where(mask, new_high, high)


@triton.jit
def _up_to_3(address, length, keys, mask):
    size = length.to(tl.uint64)
    first = _byte_at(address, mask)
    middle = _byte_at(address + (length >> 1), mask)
    last = _byte_at(address + (length - 1), mask)
    low = (first << 16) | (middle << 24) | last | (size << 8)
    swapped = _swap_bytes(low) >> 32
    high = ((swapped << 13) | (swapped >> 19)) & 0xFFFFFFFF
    return _avalanche64(low ^ tl.load(keys + FLIP_1)), _avalanche64(
        high ^ tl.load(keys + FLIP_1 + 1)
    )


@triton.jit
def _up_to_8(address, length, keys, mask):
    size = length.to(tl.uint64)
    word = _half_at(address, mask) | (_half_at(address + (length - 4), mask) << 32)
    keyed = word ^ tl.load(keys + FLIP_4)
    factor = (size << 2) + P64_1
    low = keyed * factor
    high = tl.umulhi(keyed, factor) + (low << 1)
    low = low ^ (high >> 3)
    low = (low ^ (low >> 35)) * MX2
    return low ^ (low >> 28), avalanche(high)


@triton.jit
def _up_to_16(address, length, keys, mask):
    size = length.to(tl.uint64)
    first = word_at(address, mask)
    last = word_at(address + (length - 8), mask)
    keyed = first ^ last ^ tl.load(keys + FLIP_9)
    prime = size * 0 + P64_1
    low = keyed * prime + ((size - 1) << 54)
    last = last ^ tl.load(keys + FLIP_9 + 1)
    high = tl.umulhi(keyed, prime) + last + (last & 0xFFFFFFFF) * (P32_2 - 1)
    low = low ^ _swap_bytes(high)
    prime = size * 0 + P64_2
    return avalanche(low * prime), avalanche(tl.umulhi(low, prime) + high * prime)


@triton.jit
def _up_to_240(address, length, keys, mid, far):
    """17 to 128 bytes (``mid``) and 129 to 240 bytes (``far``)."""
    size = length.to(tl.uint64)
    end = address + length
    low = size * P64_1
    high = size * 0
    for step in tl.static_range(3, -1, -1):  # from both ends, the innermost round first
        low, high = _round(low, high, address + 16 * step, end - 16 * (step + 1),
                           keys + MID_KEYS + 4 * step, mid & (length > 32 * step))  # fmt: skip
    for step in tl.static_range(4):
        low, high = _round(low, high, address + 32 * step, address + 32 * step + 16,
                           keys + MID_KEYS + 4 * step, far)  # fmt: skip
    low = tl.where(far, avalanche(low), low)
    high = tl.where(far, avalanche(high), high)
    for step in tl.static_range(3):
        more = far & (length >= 160 + 32 * step)
        low, high = _round(low, high, address + 128 + 32 * step, address + 144 + 32 * step,
                           keys + FAR_KEYS + 4 * step, more)  # fmt: skip
    low, high = _round(low, high, end - 16, end - 32, keys + END_KEYS, far)
    seed = tl.load(keys + SEED)
    both = low * P64_1 + high * P64_4 + (size - seed) * P64_2
    return avalanche(low + high), 0 - avalanche(both)


@triton.jit(do_not_specialize=["chunks"])
def short_chunks(table, keys, digests, flags, chunks, CHUNKS: tl.constexpr):
    """Hash those of the first ``chunks`` rows of the table that have at most 240 bytes."""
    index = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    inside = index < chunks
    row = index.to(tl.int64)
    length = tl.load(table + row * 2 + 1, mask=inside, other=-1) & 0xFFFFFFFF
    inside = inside & (length <= SHORT)
    if tl.max(inside.to(tl.int32), axis=0) > 0:
        address = tl.load(table + row * 2, mask=inside, other=0)
        none = tl.zeros((CHUNKS,), tl.uint64)
        low = _avalanche64(none + tl.load(keys + FLIP_0))
        high = _avalanche64(none + tl.load(keys + FLIP_0 + 1))
        mask = inside & (length >= 1) & (length <= 3)
        new_low, new_high = _up_to_3(address, length, keys, mask)
        low, high = tl.where(mask, new_low, low), tl.where(mask, new_high, high)
        mask = inside & (length >= 4) & (length <= 8)
        new_low, new_high = _up_to_8(address, length, keys, mask)
        low, high = tl.where(mask, new_low, low), tl.where(mask, new_high, high)
        mask = inside & (length >= 9) & (length <= 16)
        new_low, new_high = _up_to_16(address, length, keys, mask)
        low, high = tl.where(mask, new_low, low), tl.where(mask, new_high, high)
        mid = inside & (length >= 17) & (length <= 128)
        far = inside & (length > 128)
        new_low, new_high = _up_to_240(address, length, keys, mid, far)
        low, high = tl.where(mid | far, new_low, low), tl.where(mid | far, new_high, high)
        store_digest(digests, flags, row, low, high, inside)
