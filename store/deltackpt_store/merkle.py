"""The identity of tensors, objects and steps: domain-separated BLAKE3-256 over exact content.

Two steps, replicas or restores are bit-identical when their roots are equal. What enters: bytes
(through chunk ids), dtype, shape, stride, offset, conj/neg/parameter/requires_grad flags, global
shape and shard offsets, the cutting into chunks, which tensors share bytes, the container
structure and every path. What does not: devices, environment, metrics, packs, codecs, step number.

Every digest starts with a text line that names its domain, so that no two kinds of record can be
confused; all that follows is of fixed or declared length (see docs/format.md).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

from blake3 import blake3

from deltackpt_store.manifest import ExtentSpec, Layout, Snapshot, TensorView

_TENSOR = b"deltackpt tensor 1\n"
_OBJECT = b"deltackpt object 1\n"
_ROOT = b"deltackpt root 1\n"
_SUBTREE = b"deltackpt subtree 1\n"
_LENGTH = struct.Struct("<I")  # of a path
_LEAF = struct.Struct("<?I")  # whether it is a tensor, and which extent it views


def _numbers(values: Sequence[int] | None) -> str:
    return "-" if values is None else ",".join(map(str, values))


def tensor_header(view: TensorView, extent: ExtentSpec) -> bytes:
    """The canonical description that precedes a tensor's chunk ids or inline bytes in its hash."""
    flags = view.conj | view.neg << 1 | view.parameter << 2 | view.requires_grad << 3
    return _TENSOR + (
        f"{view.dtype} shape={_numbers(view.shape)} stride={_numbers(view.stride)} "
        f"offset={view.offset} flags={flags} global={_numbers(view.global_shape)} "
        f"shard={_numbers(view.shard_offsets)} bytes={extent.nbytes} chunk={extent.chunk_bytes}\n"
    ).encode("ascii")


class _Plan:
    """The part of a root that depends on the layout only, kept between the steps of a run.

    `kept[slot]` is the content last hashed for a leaf and its digest: the same object has the same
    digest, provided that it cannot be written to.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        count = len(layout.paths)
        views: list[TensorView | None] = [None] * count
        for view in layout.tensors:
            views[view.slot] = view
        self.views = views
        self.headers = [
            _OBJECT if view is None else tensor_header(view, layout.extents[view.extent])
            for view in views
        ]
        self.extents = [None if view is None else view.extent for view in views]
        self.paths = [path.encode() for path in layout.paths]
        self.kept: list[tuple[object, bytes]] = [(None, b"")] * count

    def digest(self, snapshot: Snapshot, slot: int) -> bytes:
        """Digest of one leaf, from `kept` when its content is the very object hashed before."""
        extent = self.extents[slot]
        if extent is None:
            content = snapshot.objects[slot]
        else:
            content = snapshot.chunks.get(extent)
            if content is None:
                content = snapshot.inline[extent]
        known, digest = self.kept[slot]
        if known is not content:
            hasher = blake3(self.headers[slot])
            data = content if isinstance(content, bytes) else content.reshape(-1).data
            digest = hasher.update(data).digest()
            if isinstance(content, bytes) or not content.flags.writeable:
                self.kept[slot] = (content, digest)
        return digest


_plans: OrderedDict[int, _Plan] = OrderedDict()
_PLANS_KEPT = 2


def _plan(layout: Layout) -> _Plan:
    # Keyed by address, which is safe because a kept plan holds its layout alive.
    plan = _plans.get(id(layout))
    if plan is None or plan.layout is not layout:
        plan = _plans[id(layout)] = _Plan(layout)
        while len(_plans) > _PLANS_KEPT:
            try:
                _plans.popitem(last=False)
            except KeyError:  # another thread emptied it first
                break
    return plan


def tensor_digest(snapshot: Snapshot, slot: int) -> bytes:
    """Digest of the tensor in `slot`: description, then chunk ids (or the inline bytes)."""
    plan = _plan(snapshot.layout)
    if plan.views[slot] is None:
        raise IndexError(f"slot {slot} holds no tensor")
    return plan.digest(snapshot, slot)


def _leaves(snapshot: Snapshot, slots: Sequence[int], skip: int) -> bytes:
    """One entry per leaf: path, kind, number of its extent in order of first use, digest.

    `skip` bytes are cut from the front of every path.
    """
    plan = _plan(snapshot.layout)
    numbers: dict[int, int] = {}
    out = [struct.pack("<Q", len(slots))]
    for slot in slots:
        path, extent = plan.paths[slot][skip:], plan.extents[slot]
        number = 0 if extent is None else numbers.setdefault(extent, len(numbers))
        out += (_LENGTH.pack(len(path)), path, _LEAF.pack(extent is not None, number))
        out.append(plan.digest(snapshot, slot))
    return b"".join(out)


def root(snapshot: Snapshot, prefix: str | None = None) -> bytes:
    """Identity of the whole step, or of the leaves at or below the path `prefix`.

    The root of a subtree does not depend on where it hangs (paths count from the prefix) but
    leaves the types of its containers out. KeyError when nothing lies below the prefix.
    """
    layout = snapshot.layout
    if prefix is None:
        hasher = blake3(_ROOT)
        hasher.update(struct.pack("<Q", len(layout.structure)) + layout.structure)
        return hasher.update(_leaves(snapshot, range(len(layout.paths)), 0)).digest()
    below = prefix + "/"
    slots = [i for i, p in enumerate(layout.paths) if p == prefix or p.startswith(below)]
    if not slots:
        raise KeyError(prefix)
    return blake3(_SUBTREE).update(_leaves(snapshot, slots, len(prefix.encode()))).digest()
