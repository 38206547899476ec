"""One instant of a training state, normalised: layout, encoded values, and where the bytes are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deltackpt.extents import BufferPool, Source
from deltackpt_store.manifest import Layout


@dataclass(slots=True)
class Capture:
    """What one save is made of. Owned by the save; not thread-safe except :meth:`release`.

    `layout` is the very object of the previous capture when nothing but values changed, so
    ``capture.layout is previous.layout`` tells the writer to keep its copy.
    `objects`: every object slot -> value document, frozen at the call.
    `inline`: every extent of at most 512 bytes -> its bytes, frozen at the call.
    `sources`: every other extent -> :class:`Source`.
    `state_bytes`: sum of all extents' lengths.
    """

    layout: Layout
    objects: dict[int, bytes]
    inline: dict[int, bytes]
    sources: dict[int, Source]
    state_bytes: int

    def release(self) -> None:
        """Give private copies back to the pool and drop all tensors: call once all is staged.

        May be called from any thread, more than once. After it no `Source.data` may be read. The
        layout stays usable, also as `previous`.
        """
        raise NotImplementedError


def capture(
    state: Mapping[Any, Any],
    *,
    chunk_bytes: int,
    rng: bool = True,
    overlap: bool = True,
    live: Callable[[str, Tensor], bool] | None = None,
    previous: Capture | None = None,
    pool: BufferPool | None = None,
) -> Capture:
    """Walk `state` once, in the calling (training) thread, and freeze what must be frozen.

    Live (read later, until the next optimizer step) are only: parameters and optimizer state
    tensors, and only when `overlap` is on and an optimizer is in the state. A parameter counts
    when a captured optimizer owns it, or when it is frozen (requires_grad False) beside owned ones
    in one module; all else (buffers, EMA copies, loose tensors) is copied before this returns.
    `live(path, tensor)` replaces that rule for tensors when given.
    `previous` lends its layout when the tree has not changed. Nothing of `state` is stepped,
    mutated or kept beyond what `Source` says.
    Raises `InvalidInputError` (kind "unsupported-value", context "path") before anything else
    happens when a value cannot be represented.
    """
    raise NotImplementedError


def describe(state: Mapping[Any, Any], *, chunk_bytes: int = 1 << 18, rng: bool = True) -> Layout:
    """The layout that :func:`capture` would record, without copying or encoding values."""
    raise NotImplementedError
