"""What a capture says of where the bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from .buffers import Arrival, Lease
from .report import DeviceFigures
from .small import SmallBytes

Sign = tuple[int, int]
"""(address, version counter): another one means that memory was written to or replaced; an equal
one means nothing."""

Signs = tuple[Sign, ...]
"""Those of each tensor over an extent."""


class Source(msgspec.Struct, frozen=True, gc=False):
    """Where the bytes of one extent are until they have been staged.

    `storage`, `begin`, `nbytes`: they are `nbytes` bytes of that storage, from byte `begin` on, on
    `device`: the tensor's, or the host for a copy that has landed there (see `landing`). No tensor
    is made of them before somebody asks for `data`: tensors wake the garbage collector.
    `live`: True when they are the training memory itself: read it before the next optimizer step;
    False when they are a private copy that stays as it was at the call until `Capture.release`.
    `key`: names the extent in the change table (path, length, dtype, chunk size, device); it holds
    no address, and equal keys in two captures mean comparable chunks.
    `owner`: for live data, a tensor over the same storage (its `_version` is a hint, no proof).
    `arrived`: for a landed copy, what to wait for before it is read.
    `still`: live data that no optimizer steps: it ought to be what it was at the save before.
    `storage` is kept alive; that it is resized while it is read is the caller's to notice (`gone`).
    """

    storage: torch.UntypedStorage
    begin: int
    nbytes: int
    device: torch.device
    live: bool
    key: str
    owner: Tensor | None
    arrived: Arrival | None = None
    still: bool = False

    @classmethod
    def of(cls, data: Tensor, live: bool, key: str, owner: Tensor | None) -> Source:
        """The source of the bytes of a flat contiguous uint8 tensor."""
        storage, begin = data.untyped_storage(), int(data.storage_offset())
        return cls(storage, begin, data.numel(), data.device, live, key, owner)

    @property
    def data(self) -> Tensor:
        """A flat contiguous uint8 tensor over the bytes, a new one."""
        return bytes_of(self.storage, self.begin, self.nbytes, self.device)

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.begin

    @property
    def gone(self) -> bool:
        """Whether the storage was made too small since: then there is nothing to read."""
        return self.storage.nbytes() < self.begin + self.nbytes

    @property
    def sign(self) -> Sign | None:
        """The sign of life of live data; None without an owner."""
        return None if self.owner is None else (self.address, version_of(self.owner))


def parted(sources: Mapping[int, Source]) -> tuple[list[int], list[int]]:
    """The extents that are read from training memory, and those of private copies."""
    live = [extent for extent, source in sources.items() if source.live]
    return live, [extent for extent, source in sources.items() if not source.live]


def bytes_of(
    storage: torch.UntypedStorage, begin: int, nbytes: int, device: torch.device
) -> Tensor:
    """Bytes of a storage as a flat uint8 tensor (no copy)."""
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(storage, begin, (nbytes,), (1,))


def version_of(tensor: Tensor) -> int:
    """How often it was written to, as PyTorch counts (-1: nobody does, of an inference tensor)."""
    return -1 if tensor.is_inference() else tensor._version


def sign_of(tensor: Tensor) -> Sign:
    """Where a tensor lies now, and its version."""
    return tensor.data_ptr(), version_of(tensor)


class Taken(NamedTuple):
    """What :meth:`Plan.take` delivers: inline bytes by extent, more of them on their way, sources
    by extent, the pool's buffers that sources look at, what that cost each device, and key -> signs
    of life of each extent that ought to be still."""

    inline: dict[int, bytes]
    small: list[SmallBytes]
    sources: dict[int, Source]
    leases: list[Lease]
    figures: dict[str, DeviceFigures]
    signs: dict[str, Signs]
