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
from collections.abc import Iterable, Sequence

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

    `entries[slot]` is what the root of the whole has of a leaf before its digest. `kept[slot]` is
    the content last hashed for a leaf and its digest: equal bytes have the same one, and so has the
    same array, provided that it cannot be written to.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        count = len(layout.paths)
        views: list[TensorView | None] = [None] * count
        for view in layout.tensors:
            views[view.slot] = view
        self.views = views
        self.headers = _headers(views, layout.extents)
        self.extents = [None if view is None else view.extent for view in views]
        self.entries = _entries(map(str.encode, layout.paths), self.extents)
        self.kept: list[tuple[object, bytes]] = [(None, b"")] * count

    def digest(self, snapshot: Snapshot, slot: int) -> bytes:
        """Digest of one leaf, from `kept` when its content is what was hashed before."""
        extent = self.extents[slot]
        if extent is None:
            content = snapshot.objects[slot]
        else:
            content = snapshot.chunks.get(extent)
            if content is None:
                content = snapshot.inline[extent]
        known, digest = self.kept[slot]
        if isinstance(content, bytes):
            if not isinstance(known, bytes) or known != content:
                digest = blake3(self.headers[slot]).update(content).digest()
                self.kept[slot] = (content, digest)
        elif known is not content:
            digest = blake3(self.headers[slot]).update(content.reshape(-1).data).digest()
            if not content.flags.writeable:
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


def _headers(views: Iterable[TensorView | None], extents: Sequence[ExtentSpec]) -> list[bytes]:
    """What precedes the content of each leaf in its hash; one object for all that are alike."""
    known: dict[tuple[object, ...], bytes] = {}
    out: list[bytes] = []
    for view in views:
        if view is None:
            out.append(_OBJECT)
            continue
        spec = extents[view.extent]
        look = (
            view.dtype, view.shape, view.stride, view.offset, view.conj, view.neg, view.parameter,
            view.requires_grad, view.global_shape, view.shard_offsets, spec.nbytes,
            spec.chunk_bytes,
        )  # fmt: skip
        header = known.get(look)
        if header is None:
            header = known[look] = tensor_header(view, spec)
        out.append(header)
    return out


def _entries(paths: Iterable[bytes], extents: Iterable[int | None]) -> list[bytes]:
    """One per leaf: path, kind, number of its extent in order of first use."""
    numbers: dict[int, int] = {}
    return [
        _LENGTH.pack(len(path))
        + path
        + _LEAF.pack(
            extent is not None, 0 if extent is None else numbers.setdefault(extent, len(numbers))
        )
        for path, extent in zip(paths, extents, strict=True)
    ]


def _leaves(snapshot: Snapshot, slots: Sequence[int], entries: Iterable[bytes]) -> bytes:
    """The entries of leaves, each with the digest after it."""
    digest = _plan(snapshot.layout).digest
    parts = [entry + digest(snapshot, slot) for entry, slot in zip(entries, slots, strict=True)]
    return b"".join((struct.pack("<Q", len(slots)), *parts))


def root(snapshot: Snapshot, prefix: str | None = None) -> bytes:
    """Identity of the whole step, or of the leaves at or below the path `prefix`.

    The root of a subtree does not depend on where it hangs (paths count from the prefix) but
    leaves the types of its containers out. KeyError when nothing lies below the prefix.
    """
    layout = snapshot.layout
    if prefix is None:
        hasher = blake3(_ROOT)
        hasher.update(struct.pack("<Q", len(layout.structure)) + layout.structure)
        entries = _plan(layout).entries
        return hasher.update(_leaves(snapshot, range(len(entries)), entries)).digest()
    below = prefix + "/"
    slots = [i for i, p in enumerate(layout.paths) if p == prefix or p.startswith(below)]
    if not slots:
        raise KeyError(prefix)
    paths = (layout.paths[slot][len(prefix) :].encode() for slot in slots)
    extents = _plan(layout).extents
    entries = _entries(paths, (extents[slot] for slot in slots))
    return blake3(_SUBTREE).update(_leaves(snapshot, slots, entries)).digest()
