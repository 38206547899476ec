"""Tensors as byte runs: which bytes to save, and how each tensor looks at them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltackpt_store.manifest import TensorView


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of one extent are until they have been staged.

    `data`: flat contiguous uint8 tensor of exactly the extent's length, on the tensor's device.
    `live`: True when `data` is the training memory itself: read it before the next optimizer step;
    False when it is a private copy that stays as it was at the call until `Capture.release`.
    `key`: names the extent in the change table (path, length, dtype, chunk size, device); it holds
    no address, and equal keys in two captures mean comparable chunks.
    `owner`: for live data, a tensor over the same storage (its `_version` is a hint, no proof).
    `data` keeps the storage alive; a storage that is resized while it is read is the caller's to
    notice (``data.untyped_storage().nbytes()``).
    """

    data: Tensor
    live: bool
    key: str
    owner: Tensor | None


class BufferPool:
    """Warm memory for private copies, reused between captures (fresh memory page-faults).

    Thread-safe. Holds at most `keep` idle buffers per device.
    """

    def __init__(self, keep: int = 2) -> None:
        raise NotImplementedError


def rebuild(view: TensorView, memory: Tensor) -> Tensor:
    """The tensor that `view` describes, looking at `memory` (no copy).

    `memory` is the extent's bytes: flat contiguous uint8, any device, at a storage offset that is
    a multiple of 16. Views of one extent built on one `memory` share its storage, as they did when
    saved. The result is a plain tensor that requires no grad; see :func:`dress`.
    Raises `CorruptionError` when the view reaches outside `memory`, `UnsupportedFormatError` for a
    dtype this torch does not have.
    """
    raise NotImplementedError


def dress(view: TensorView, tensor: Tensor) -> Tensor:
    """`tensor` as an nn.Parameter or with requires_grad, as recorded in `view`."""
    raise NotImplementedError


def dtype_name(dtype: object) -> str:
    """``"bfloat16"`` for torch.bfloat16: the name under which a dtype is recorded."""
    raise NotImplementedError
