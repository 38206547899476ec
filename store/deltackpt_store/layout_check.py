"""Proof that a layout read from a store is consistent, before anything relies on it.

After :func:`check_layout`, every tensor view is aligned and inside its extent, every extent is
viewed (and so enters the root), every slot is exactly one leaf, and every size fits in 63 bits.
:func:`check_structure` bounds the depth of the tree. Both raise CorruptionError naming the file.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import msgspec

from deltackpt_store.errors import CorruptionError
from deltackpt_store.manifest import (
    MAX_CHUNK_BYTES,
    ExtentSpec,
    Layout,
    TensorView,
    element_bytes,
)

MAX_LEAVES = 1 << 20
MAX_DIMENSIONS = 64
MAX_STRUCTURE_BYTES = 64 * 1024 * 1024
MAX_STRUCTURE_DEPTH = 3 * 64 + 64  # a container of the state takes up to three msgpack levels
_LIMIT = 1 << 63
_PLAIN = frozenset((list, int, float, bool, str, bytes, type(None)))


def _bad(reason: str, name: str) -> CorruptionError:
    return CorruptionError(
        f"manifest {name} is damaged: {reason}", kind="damaged-manifest", path=name
    )


def check_structure(structure: bytes, name: str) -> None:
    """The tree is one well-formed msgpack document of bounded size and depth."""
    if len(structure) > MAX_STRUCTURE_BYTES:
        raise _bad(f"its structure has {len(structure)} bytes", name)
    try:
        level: list[Any] = [msgspec.msgpack.decode(structure)]
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
        raise _bad(f"its structure cannot be read: {error}", name) from error
    for _ in range(MAX_STRUCTURE_DEPTH):
        if not {*map(type, level)} <= _PLAIN:
            raise _bad("its structure holds more than lists and scalars", name)
        lists = [cast("list[Any]", node) for node in level if type(node) is list]
        if not lists:
            return
        level = list(chain.from_iterable(lists))
    raise _bad("its structure is nested too deeply", name)


def nesting(node: Any) -> int:
    """How many lists lie in each other at the deepest place of a decoded document."""
    level, count = [node], 0
    while lists := [cast("list[Any]", part) for part in level if type(part) is list]:
        level, count = list(chain.from_iterable(lists)), count + 1
    return count


def check_counts(layout: Layout, name: str) -> None:
    """No list of the layout is longer than a reader takes."""
    for field, what in ((layout.paths, "paths"), (layout.tensors, "tensors"),
                        (layout.extents, "extents"), (layout.objects, "objects")):  # fmt: skip
        if len(field) > MAX_LEAVES:
            raise _bad(f"{len(field)} {what} are more than {MAX_LEAVES}", name)


def check_layout(layout: Layout, name: str) -> None:
    """Every slot, extent, shape, stride and offset is in range (see the module)."""
    count = len(layout.paths)
    slots = sorted(chain((view.slot for view in layout.tensors), layout.objects))
    if slots != list(range(count)):
        raise _bad("its leaves are not numbered from 0, each once", name)
    if len(set(layout.paths)) != count:
        raise _bad("two leaves have one path", name)
    for index, extent in enumerate(layout.extents):
        if not (0 <= extent.nbytes < _LIMIT and 1 <= extent.chunk_bytes <= MAX_CHUNK_BYTES):
            raise _bad(f"extent {index} has an impossible size", name)
    viewed = {view.extent for view in layout.tensors}
    if viewed != set(range(len(layout.extents))):
        raise _bad("its tensors do not view all of its extents, and no others", name)
    widths: dict[str, int] = {}
    for view in layout.tensors:
        width = widths.get(view.dtype)
        if width is None:
            width = widths[view.dtype] = element_bytes(view.dtype)
        if not _fits(view, layout.extents[view.extent], width):
            raise _bad(f"tensor {layout.paths[view.slot]!r} does not fit its bytes", name)


def _fits(view: TensorView, extent: ExtentSpec, width: int) -> bool:
    shape, stride, offset = view.shape, view.stride, view.offset
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS or offset < 0 or offset % width:
        return False
    elements, last = 1, 0
    for size, step in zip(shape, stride, strict=True):
        if size < 0 or step < 0:
            return False
        elements *= size
        last += (size - 1) * step
    end = offset + (last + 1) * width if elements else offset
    return elements < _LIMIT and end <= extent.nbytes and _shard_fits(view)


def _shard_fits(view: TensorView) -> bool:
    whole, offsets = view.global_shape, view.shard_offsets
    if whole is None or offsets is None:
        return whole is None and offsets is None
    return len(whole) == len(offsets) == len(view.shape) and all(
        start >= 0 and start + size <= total and total < _LIMIT
        for start, size, total in zip(offsets, view.shape, whole, strict=True)
    )
