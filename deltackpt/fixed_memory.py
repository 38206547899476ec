"""Memory that this process may read and not write: files mapped read-only.

PyTorch has no word for it, and writing there ends the process (SIGSEGV).
"""

from __future__ import annotations

import bisect
import functools

import torch

from .copying import reach

OTHER_VALUES, FIXED = "other values", "memory that is mapped read-only"
"""What is there when such memory does not hold what was saved."""


class FixedMemory:
    """What of this process's memory cannot be written to, as it was at the first question.

    Where the system does not say (there is no /proc), nothing counts as fixed.
    """

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether an element of a strided tensor lies there."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        starts, ends = self._ranges
        first = tensor.data_ptr()
        behind = bisect.bisect_right(ends, first)  # the first range that ends behind its start
        return behind < len(starts) and starts[behind] < first + reach(tensor)

    @functools.cached_property
    def _ranges(self) -> tuple[list[int], list[int]]:
        """Where each begins and ends, in order."""
        starts: list[int] = []
        ends: list[int] = []
        try:
            with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
                for line in lines:
                    addresses, permissions, _ = line.split(" ", 2)
                    if permissions[1] != "w":
                        start, _, end = addresses.partition("-")
                        starts.append(int(start, 16))
                        ends.append(int(end, 16))
        except OSError:
            return [], []
        return starts, ends
