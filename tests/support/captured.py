"""A capture put back together in memory, and comparisons by bits that know nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltackpt.building import build
from deltackpt.capture import Capture, capture
from deltackpt.values import decode
from deltackpt.views import rebuild as rebuild_view


def take(state: dict[Any, Any], **options: Any) -> Capture:
    return capture(state, **{"chunk_bytes": 4096, "rng": False, **options})


def memory_of(taken: Capture) -> dict[int, Tensor]:
    """Every extent's bytes, copied now: inline ones and those behind sources."""
    out: dict[int, Tensor] = {}
    for number, spec in enumerate(taken.layout.extents):
        if number in taken.inline:
            data = torch.frombuffer(
                bytearray(taken.inline[number]) or bytearray(1), dtype=torch.uint8
            )
            data = data[: len(taken.inline[number])].clone()
        else:
            data = taken.sources[number].data.clone()
        assert data.numel() == spec.nbytes
        out[number] = data
    assert not set(taken.inline) & set(taken.sources)
    assert len(taken.inline) + len(taken.sources) == len(taken.layout.extents)
    return out


def rebuild(taken: Capture) -> Any:
    """The state that the capture holds, as a restore without live objects would build it."""
    memory = memory_of(taken)
    views = {view.slot: view for view in taken.layout.tensors}

    def leaf(slot: int) -> Any:
        view = views.get(slot)
        if view is None:
            return decode(taken.objects[slot], taken.layout.paths[slot])
        return rebuild_view(view, memory[view.extent])

    return build(taken.layout.structure, leaf)


def roundtrip(state: dict[Any, Any], **options: Any) -> Any:
    out = rebuild(take(state, **options))
    out.pop("#params")
    return out


def saved_bytes(taken: Capture) -> int:
    return sum(spec.nbytes for spec in taken.layout.extents)


def bits(tensor: Tensor) -> bytes:
    """The logical elements in order, as raw bytes, through NumPy's integers (never by value)."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return plain.view(widths[plain.itemsize]).numpy().tobytes()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, dtype and shape."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
