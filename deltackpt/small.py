"""Small extents on a device: brought to the host together, without the training thread waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .devices import DeviceEvent, page_locked


class SmallBytes:
    """Bytes of small extents of one device, frozen when this was made, perhaps still on their way.

    The copy is queued on the current stream of the making (training) thread, into page-locked
    memory; :meth:`resolve` waits for it and may be called from any thread.
    """

    def __init__(self, extents: Sequence[int], pieces: Sequence[Tensor]) -> None:
        """`pieces`: the flat uint8 bytes of each extent, all on one device, read right now."""
        self._extents = tuple(extents)
        self._sizes = [piece.numel() for piece in pieces]
        joined = torch.cat(list(pieces))
        self._event: DeviceEvent | None = None
        if joined.device.type == "cuda":
            self._host = page_locked(joined.numel(), joined.device)
            self._host.copy_(joined, non_blocking=True)
            self._event = DeviceEvent(joined.device)
        else:
            self._host = joined.cpu()

    def resolve(self) -> dict[int, bytes]:
        """Extent -> its bytes."""
        if self._event is not None:
            self._event.synchronize()
        whole = self._host.numpy().tobytes()
        out: dict[int, bytes] = {}
        at = 0
        for extent, size in zip(self._extents, self._sizes, strict=True):
            out[extent] = whole[at : at + size]
            at += size
        return out
