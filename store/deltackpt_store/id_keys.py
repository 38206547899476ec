"""Numbers of 64 bits that stand for chunk ids where whole ids would take too much memory.

They are hashes of the whole id by factors drawn at random. Numbers cut from an id would be shared
by as many ids as somebody who makes up a store likes, and each look-up would go through all of
them.
"""

from __future__ import annotations

import os
import struct
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.manifest import ID_BYTES

Keys = NDArray[np.uint64]

_WORDS = struct.Struct(f"<{ID_BYTES // 4}I")
_MASK = (1 << 64) - 1


class IdKeys:
    """Keys of ids; two objects give an id different ones.

    Words of 32 bits times factors of 64: also ids that differ in a few bits only, wherever these
    are, hardly ever have one key.
    """

    def __init__(self) -> None:
        self._factors = np.frombuffer(os.urandom(8 * ID_BYTES // 4), np.uint64) | np.uint64(1)
        self._numbers: list[int] = self._factors.tolist()

    def of(self, ids: NDArray[Any]) -> Keys:
        """The key of each id (rows of shape (n, 32))."""
        words = np.ascontiguousarray(ids).view("<u4").reshape(-1, ID_BYTES // 4)
        keys = np.zeros(len(words), np.uint64)
        for factor, column in zip(self._factors, words.T, strict=True):
            keys += column.astype(np.uint64) * factor
        return keys

    def one(self, chunk_id: bytes) -> int:
        """The key of one id."""
        return sum(map(mul, _WORDS.unpack(chunk_id), self._numbers)) & _MASK
