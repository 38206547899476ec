"""Copying bytes from one buffer to another, beside other threads where that pays."""

from __future__ import annotations

import numpy as np

GIL_FREE_BYTES = 65536
"""From here on bytes are copied without the GIL; fewer are cheaper to copy than to hand over."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equally long buffers; above 64 KiB without the GIL."""
    if len(source) < GIL_FREE_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
