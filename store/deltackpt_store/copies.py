"""Memory to copy into, and copying bytes there, beside other threads where that pays."""

from __future__ import annotations

import mmap

import numpy as np

GIL_FREE_BYTES = 65536
"""From here on bytes are copied without the GIL; fewer are cheaper to copy than to hand over."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equally long buffers; above 64 KiB without the GIL."""
    if len(source) < GIL_FREE_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def whole_pages(size: int) -> memoryview:
    """Memory that begins on a page's boundary, of this process alone: a forked child has its own
    from then on. OSError."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
