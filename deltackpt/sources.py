"""What a capture says of where the bytes are."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from torch import Tensor

from .buffers import Arrival, Lease
from .landing import CopyFigures
from .small import SmallBytes

Sign = tuple[int, int]
"""(address, version counter): another one means that memory was written to or replaced; an equal
one means nothing."""

Signs = tuple[Sign, ...]
"""Those of each tensor over an extent."""


class Source(msgspec.Struct, frozen=True, gc=False):
    """Where the bytes of one extent are until they have been staged.

    `data`: flat contiguous uint8 tensor of exactly the extent's length, on the tensor's device, or
    on the host for a copy that has landed there (see `landing`).
    `live`: True when `data` is the training memory itself: read it before the next optimizer step;
    False when it is a private copy that stays as it was at the call until `Capture.release`.
    `key`: names the extent in the change table (path, length, dtype, chunk size, device); it holds
    no address, and equal keys in two captures mean comparable chunks.
    `owner`: for live data, a tensor over the same storage (its `_version` is a hint, no proof).
    `arrived`: for a landed copy, what to wait for before `data` is read.
    `still`: live data that no optimizer steps: it ought to be what it was at the save before.
    `data` keeps the storage alive; a storage that is resized while it is read is the caller's to
    notice (``data.untyped_storage().nbytes()``).
    """

    data: Tensor
    live: bool
    key: str
    owner: Tensor | None
    arrived: Arrival | None = None
    still: bool = False


def version_of(tensor: Tensor) -> int:
    """How often it was written to, as PyTorch counts (-1: nobody does, of an inference tensor)."""
    return -1 if tensor.is_inference() else tensor._version


def sign_of(data: Tensor, owner: Tensor) -> Sign:
    """Where `data` lies now, and the version of `owner`."""
    return data.data_ptr(), version_of(owner)


class Taken(NamedTuple):
    """What :meth:`Plan.take` delivers: inline bytes by extent, more of them on their way, sources
    by extent, the pool's buffers that sources look at, what that cost each device, and key -> signs
    of life of each extent that ought to be still."""

    inline: dict[int, bytes]
    small: list[SmallBytes]
    sources: dict[int, Source]
    leases: list[Lease]
    figures: dict[str, CopyFigures]
    signs: dict[str, Signs]
