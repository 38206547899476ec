"""Constants of XXH3-128 and the tables that a seed turns into, for the device kernels.

The algorithm is the published XXH3 (xxHash 0.8, ``XXH3_128bits_withSeed``); the kernels equal
``xxhash.xxh3_128(data, seed=seed)`` for every length. A seed changes nothing but constants, so all
of them are worked out here on the host and the kernels read one table of 64-bit words:

=====================  =====  ============================================================
first word             words  what
=====================  =====  ============================================================
``STRIPE_KEYS``          128  key of lane ``i`` of stripe ``n`` of a block at ``8 * n + i``
``SCRAMBLE_KEYS``          8  keys of the scramble after each whole block
``LAST_KEYS``              8  keys of the last 64 bytes
``MERGE_LOW``              8  keys of the merge into the low half of the hash
``MERGE_HIGH``             8  keys of the merge into the high half
``SEED``                   1  the seed
``FLIP_*``                 7  what inputs of 0, 1-3, 4-8 and 9-16 bytes are XORed with
``MID_KEYS``              16  keys of the rounds of 17-128 bytes and of the first of 129-240
``FAR_KEYS``              12  keys of the rounds past 128 bytes, 129-240 bytes
``END_KEYS``               4  keys of the final round, 129-240 bytes
=====================  =====  ============================================================

No torch, no triton here.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)

PRIME32_1: Final = 0x9E3779B1
PRIME32_2: Final = 0x85EBCA77
PRIME32_3: Final = 0xC2B2AE3D
PRIME64_1: Final = 0x9E3779B185EBCA87
PRIME64_2: Final = 0xC2B2AE3D27D4EB4F
PRIME64_3: Final = 0x165667B19E3779F9
PRIME64_4: Final = 0x85EBCA77C2B2AE63
PRIME64_5: Final = 0x27D4EB2F165667C5
PRIME_MX1: Final = 0x165667919E3779F9
PRIME_MX2: Final = 0x9FB21C651E98DF25

STRIPE_BYTES: Final = 64
"""Bytes that one step of the accumulator takes in: eight 64-bit lanes."""
BLOCK_BYTES: Final = 1024
"""Bytes between two scrambles: sixteen stripes."""
SHORT_BYTES: Final = 240
"""Inputs of at most this many bytes are hashed by other algorithms, without an accumulator."""

STRIPE_KEYS: Final = 0
SCRAMBLE_KEYS: Final = 128
LAST_KEYS: Final = 136
MERGE_LOW: Final = 144
MERGE_HIGH: Final = 152
SEED: Final = 160
FLIP_0: Final = 161
FLIP_1: Final = 163
FLIP_4: Final = 165
FLIP_9: Final = 166
MID_KEYS: Final = 168
FAR_KEYS: Final = 184
END_KEYS: Final = 196
KEY_WORDS: Final = 200

_MASK64 = 0xFFFFFFFFFFFFFFFF


def _read32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _read64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def derive_secret(seed: int) -> bytes:
    """The 192 secret bytes that inputs of more than 240 bytes use under ``seed`` (64 bits)."""
    words: list[int] = []
    for at in range(0, len(SECRET), 16):
        words.append((_read64(SECRET, at) + seed) & _MASK64)
        words.append((_read64(SECRET, at + 8) - seed) & _MASK64)
    return struct.pack(f"<{len(words)}Q", *words)


def key_table(seed: int) -> npt.NDArray[np.uint64]:
    """The ``KEY_WORDS`` words that the kernels read, for one seed (an unsigned 64-bit number)."""
    if not 0 <= seed <= _MASK64:
        raise OverflowError(f"a seed is an unsigned 64-bit number, not {seed}")
    secret = derive_secret(seed)
    swapped = int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big")
    seed_4to8 = seed ^ (swapped << 32)

    words = [_read64(secret, 8 * (n + i)) for n in range(16) for i in range(8)]
    for start in (128, 121, 11, 117):  # scramble, last stripe, merge low, merge high
        words += [_read64(secret, start + 8 * i) for i in range(8)]
    words.append(seed)
    words += [seed ^ _read64(SECRET, 64) ^ _read64(SECRET, 72),
              seed ^ _read64(SECRET, 80) ^ _read64(SECRET, 88)]  # fmt: skip
    words += [(_read32(SECRET, 0) ^ _read32(SECRET, 4)) + seed,
              (_read32(SECRET, 8) ^ _read32(SECRET, 12)) - seed]  # fmt: skip
    words += [(_read64(SECRET, 16) ^ _read64(SECRET, 24)) + seed_4to8]
    words += [(_read64(SECRET, 32) ^ _read64(SECRET, 40)) - seed,
              (_read64(SECRET, 48) ^ _read64(SECRET, 56)) + seed]  # fmt: skip
    words += [_read64(secret, 8 * i) for i in range(16)]
    for sign, start, count in ((1, 3, 12), (-1, 103, 4)):
        words += [_read64(SECRET, start + 8 * i) + (sign if i % 2 == 0 else -sign) * seed
                  for i in range(count)]  # fmt: skip
    assert len(words) == KEY_WORDS
    return np.array([word & _MASK64 for word in words], dtype=np.uint64)


def digest_bytes(low_high: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Turn rows of (low, high) words, as the kernels write them, into ``digest()`` bytes (n, 16).

    The canonical form of XXH3-128 is the high half, then the low half, both big-endian.
    """
    rows = np.ascontiguousarray(low_high[:, ::-1]).astype(">u8")
    return rows.view(np.uint8).reshape(-1, 16)
