"""Random damage to files of a store, and the errors by which it may be noticed."""

from __future__ import annotations

import os
import random
from pathlib import Path

from deltackpt_store.errors import CorruptionError, NotFoundError, UnsupportedFormatError

DETECTED = (CorruptionError, UnsupportedFormatError, NotFoundError)


def files(store: Path) -> list[Path]:
    """Every file of the store that is part of its content, in a fixed order but for random names.

    Sorted by kind and size, so that the n-th one is the same kind of file in every run.
    """
    found = [Path(folder, name) for folder, _, names in os.walk(store) for name in names]
    own = [path for path in found if path.relative_to(store).parts[0] not in ("cache", "gc")
           and not path.name.startswith(".")]  # fmt: skip
    return sorted(own, key=lambda path: (path.relative_to(store).parts[0], path.stat().st_size))


def damage(content: bytes, rng: random.Random) -> bytes:
    """`content` with a bit flipped, a sector zeroed, its end cut off, or garbage written into it.

    Never `content` itself.
    """
    data = bytearray(content)
    at = rng.randrange(len(data))
    kind = rng.choice(["bit", "zeros", "cut", "garbage", "grown"])
    if kind == "zeros":
        start = at & ~511
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    elif kind == "cut":
        del data[at:]
    elif kind == "garbage":
        data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
    elif kind == "grown":
        data += rng.randbytes(rng.randrange(1, 600))
    if kind == "bit" or data == content:
        data = bytearray(content)
        data[at] ^= 1 << rng.randrange(8)
    return bytes(data)
