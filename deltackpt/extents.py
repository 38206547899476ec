"""Tensors as byte runs: which bytes to save, where they are, and how a tensor looks at them.

`plan` decides once per layout (extents, views, aliases); at every capture `probing.probe` measures
the tensors as they are now, `Plan.fits` says whether the plan still holds, and `Plan.take` delivers
the bytes. `views.rebuild` is the way back. Addresses are compared inside one capture only.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from deltackpt_store.manifest import ExtentSpec, TensorView
from numpy.typing import NDArray
from torch import Tensor, nn

from . import landing, spans
from .buffers import BufferPool, Lease
from .landing import Landing
from .probing import Facts, Probe, of_each
from .report import DeviceFigures
from .restless import torn
from .small import SmallBytes
from .sources import Signs, Source, Taken, bytes_of, sign_of, version_of
from .tensors import refuse_unsupported
from .values import dtype_name

_ALIGN = 256  # of private copies inside one buffer
_MEMMOVE_BYTES = 256 << 10  # up to here a plain memmove beats the overhead of a tensor copy
_ROUNDS = 4  # of copying what another thread is changing
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Cut(msgspec.Struct, frozen=True, gc=False):
    """How one extent is read: from the address of tensor `members[0]` plus `shift`, or packed.

    `plain`: all of its bytes lie in CPU memory of its members, so that the address is enough.
    `path`: names it in change tables.
    """

    members: tuple[int, ...]
    shift: int
    dims: spans.Dims | None
    plain: bool
    path: str


class _Clusters(NamedTuple):
    """Tensors that share memory, directly or through others: of each tensor with elements, its
    cluster and how far behind the start of that it lies; of each cluster, one of its tensors,
    its length in bytes and its device. (Numbers of others mean nothing.)"""

    of: NDArray[np.int64]
    relative: NDArray[np.int64]
    first: NDArray[np.int64]
    length: NDArray[np.int64]
    devices: list[torch.device]


class _Places(NamedTuple):
    """Of each tensor: the address of its first element, which byte of its storage that is, and the
    bytes of the storage. (Lists, as reading single elements of arrays is slow.)"""

    address: list[int]
    begin: list[int]
    storage: list[int]


class Plan:
    """Layout of the tensors of a state; holds no tensor and no address."""

    def __init__(
        self,
        facts: list[Facts],
        views: tuple[TensorView, ...],
        specs: tuple[ExtentSpec, ...],
        keys: list[str],
        cuts: list[_Cut],
        clusters: _Clusters,
        need: NDArray[np.int64],
    ) -> None:
        self.facts = facts
        self.views = views
        self.specs = specs
        self._keys = keys
        self._cuts = cuts
        self._clusters = clusters
        self._need = need  # per tensor: bytes from its first to past its last element
        self._filled = need > 0
        self._live: list[bool] = []  # per extent, see `live_where`
        self._still: list[bool] = []
        self._by_device = [
            np.array([i for i, d in enumerate(clusters.devices) if d == device], np.int64)
            for device in dict.fromkeys(clusters.devices)
        ]
        self._itemsize = np.array(of_each(facts, lambda own: own[2].itemsize), np.int64)
        self._inline: list[int] = []
        self._packed_inline: list[int] = []
        for number, (spec, c) in enumerate(zip(specs, cuts, strict=True)):
            if spec.inline and spec.nbytes:
                (self._inline if c.plain else self._packed_inline).append(number)
        self._inline_first = np.array([cuts[e].members[0] for e in self._inline], np.int64)
        self._inline_shift = np.array([cuts[e].shift for e in self._inline], np.int64)
        self._inline_bytes = [specs[e].nbytes for e in self._inline]
        self._empty = [e for e, spec in enumerate(specs) if not spec.nbytes]
        self._large = [e for e, spec in enumerate(specs) if not spec.inline]

    def live_where(
        self, measured: Probe, live: Sequence[bool], still: Sequence[bool] | None = None
    ) -> Plan:
        """This plan for tensors of which those with `live` may be read after the capture returned.

        An extent is live when live tensors cover all of its bytes, and still when all of those are
        (`still[i]`). `measured` are tensors that it fits.
        """
        plan = copy.copy(self)
        plan._live, plan._still = [], []
        forms: list[spans.Form] = []
        filled: list[bool] = self._filled.tolist()
        for spec, c in zip(self.specs, self._cuts, strict=True):
            alive = [i for i in c.members if live[i] and filled[i]]
            covered = bool(alive) and c.dims is None
            if covered and len(c.members) > 1:
                forms = forms or _forms(self.facts)
                start = int(measured.address[c.members[0]]) + c.shift
                there = [spans.Span(int(measured.address[i]), forms[i]) for i in alive]
                covered = spans.covered(there, start, start + spec.nbytes)
            plan._live.append(covered)
            plan._still.append(bool(alive) and still is not None and all(still[i] for i in alive))
        return plan

    def fits(self, measured: Probe) -> bool:
        """Whether tensors of the plan's own facts also have its aliases, and no others."""
        clusters = self._clusters
        shifted = measured.address - clusters.relative
        base = shifted[clusters.first]
        if not len(base):
            return True
        moved = shifted != base[clusters.of]
        if (moved & self._filled).any():
            return False
        for numbers in self._by_device:
            starts, lengths = base[numbers], clusters.length[numbers]
            order = np.argsort(starts)
            if (starts[order][1:] < (starts + lengths)[order][:-1]).any():
                return False
        return True

    def check_memory(self, paths: Sequence[str], tensors: Sequence[Tensor], p: Probe) -> None:
        """`InvalidInputError` naming the path of a tensor that its storage does not hold."""
        begin = p.offset * self._itemsize
        bad = self._filled & ((p.storage < begin + self._need) | (p.address == begin))
        for i in np.flatnonzero(bad).tolist():
            refuse_unsupported(paths[i], tensors[i])

    def take(
        self,
        tensors: Sequence[Tensor],
        measured: Probe,
        *,
        pool: BufferPool,
        copied: Collection[str] = (),
        before: Mapping[str, Signs] | None = None,
        by_hand: bool = False,
    ) -> Taken:
        """The bytes of all extents, frozen or (live ones) as the training memory holds them.

        Copied although live are those of the paths `copied`, and those that ought to be still and
        have other signs of life than `before` (when it is given). With `by_hand` they are not held
        to have been still.
        """
        at = (measured.address[self._inline_first] + self._inline_shift).tolist()
        string_at = ctypes.string_at
        inline: dict[int, bytes] = dict.fromkeys(self._empty, b"")
        inline.update(zip(self._inline, map(string_at, at, self._inline_bytes), strict=True))
        places = _Places(
            measured.address.tolist(),
            (measured.offset * self._itemsize).tolist(),
            measured.storage.tolist(),
        )
        small = self._gather_small(tensors, places)
        sources: dict[int, Source] = {}
        copies: list[int] = []
        signs: dict[str, Signs] = {}
        for e in self._large:
            c, key, still = self._cuts[e], self._keys[e], self._still[e]
            live = self._live[e] and c.path not in copied
            if still:
                signs[key] = _signs(tensors, c.members)
                live = live and (before is None or before.get(key) == signs[key])
            found = self._place(e, places) if live else None
            if found is not None:
                i, at = found
                storage, device = tensors[i].untyped_storage(), self.facts[i][3]
                sources[e] = Source(
                    storage, at, self.specs[e].nbytes, device, True, key, tensors[c.members[0]],
                    still=still and not by_hand,
                )  # fmt: skip
            else:
                copies.append(e)
        leases, figures = self._copy(copies, tensors, places, sources, pool)
        return Taken(inline, small, sources, leases, figures, signs)

    def _place(self, extent: int, places: _Places) -> tuple[int, int] | None:
        """A member whose storage holds all of the extent, and the byte of it where that begins."""
        c, nbytes = self._cuts[extent], self.specs[extent].nbytes
        start = places.address[c.members[0]] + c.shift
        for i in c.members:
            at = start - places.address[i] + places.begin[i]
            if at >= 0 and at + nbytes <= places.storage[i]:
                return i, at
        return None

    def _flat(self, extent: int, tensors: Sequence[Tensor], places: _Places) -> Tensor | None:
        """The extent in place, where a storage holds all of it."""
        found = self._place(extent, places)
        if found is None:
            return None
        return _bytes_of(tensors[found[0]], found[1], self.specs[extent].nbytes)

    def _fill(self, extent: int, out: Tensor, tensors: Sequence[Tensor], places: _Places) -> None:
        """Copy the extent into `out`: as it is, packed, or pieced together from storages."""
        c = self._cuts[extent]
        data = self._flat(extent, tensors, places) if c.dims is None else None
        if data is not None:
            out.copy_(data)
            return
        if c.dims is not None:
            source = _strided(tensors[c.members[0]], c.dims)
            out.view(source.dtype).view(source.shape).copy_(source)
            return
        out.zero_()
        for at, own in self._parts(c, tensors, places):
            out[at : at + own.numel()].copy_(own)

    def _parts(
        self, c: _Cut, tensors: Sequence[Tensor], places: _Places
    ) -> Iterator[tuple[int, Tensor]]:
        """What each member has of an extent that no storage holds whole, and where it belongs."""
        start = places.address[c.members[0]] + c.shift
        for i in c.members:
            own = _bytes_of(tensors[i], places.begin[i], int(self._need[i]))
            yield places.address[i] - start, own

    def _gather_small(self, tensors: Sequence[Tensor], places: _Places) -> list[SmallBytes]:
        """Small extents that are not plain CPU bytes: one transfer per device, not waited for."""
        parts: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for e in self._packed_inline:
            data = self._flat(e, tensors, places) if self._cuts[e].dims is None else None
            if data is None:
                device = tensors[self._cuts[e].members[0]].device
                data = torch.empty(self.specs[e].nbytes, dtype=torch.uint8, device=device)
                self._fill(e, data, tensors, places)
            parts.setdefault(data.device, []).append((e, data))
        return [
            SmallBytes([e for e, _ in items], [data for _, data in items])
            for items in parts.values()
        ]

    def _copy(
        self,
        copies: list[int],
        tensors: Sequence[Tensor],
        places: _Places,
        sources: dict[int, Source],
        pool: BufferPool,
    ) -> tuple[list[Lease], dict[str, DeviceFigures]]:
        """Private copies of extents, side by side in one buffer per device, and what is more than
        a device may hold in one on the host."""
        by_device: dict[torch.device, list[int]] = {}
        for e in copies:
            by_device.setdefault(tensors[self._cuts[e].members[0]].device, []).append(e)
        leases: list[Lease] = []
        figures: dict[str, DeviceFigures] = {}
        for device, extents in by_device.items():
            way = landing.transport(device)
            stay, landed = extents, list[int]()
            if way is not None:
                rooms = [_rounded(self.specs[e].nbytes) for e in extents]
                here = landing.staying(rooms, 0 if device in pool.full else landing.COPY_BYTES)
                stay = [e for e, stays in zip(extents, here, strict=True) if stays]
                landed = [e for e, stays in zip(extents, here, strict=True) if not stays]
            held = 0
            if stay:
                try:
                    buffer, starts = self._room(stay, partial(pool.take, device))
                except torch.OutOfMemoryError as error:
                    if way is None:
                        raise
                    landing.warn_of_full_device(device, error)
                    pool.full.add(device)
                    landed = extents
                else:
                    held = buffer.numel()
                    versions = self._versions(stay, tensors)
                    self._keep(stay, buffer, starts, tensors, places, sources)
                    leases.append(Lease(buffer, arrived=None if way is None else way.record()))
                    if way is None:
                        self._settle(stay, versions, tensors, places, sources)
            if way is not None:
                cost = self._land(landed, device, way, tensors, places, sources, pool, leases)
                figures[str(device)] = replace(cost, device_bytes=cost.device_bytes + held)
        return leases, figures

    def _room(self, extents: list[int], take: Callable[[int], Tensor]) -> tuple[Tensor, list[int]]:
        """A buffer, and where in it the part for each extent begins."""
        sizes = [_rounded(self.specs[e].nbytes) for e in extents]
        *starts, total = accumulate(sizes, initial=0)
        return take(total), starts

    def _keep(
        self,
        extents: list[int],
        buffer: Tensor,
        starts: list[int],
        tensors: Sequence[Tensor],
        places: _Places,
        sources: dict[int, Source],
    ) -> None:
        """Copy extents into the parts of a buffer on their own device."""
        storage, begin, device = (
            buffer.untyped_storage(),
            int(buffer.storage_offset()),
            buffer.device,
        )
        address = buffer.data_ptr()
        for e, at in zip(extents, starts, strict=True):
            c, nbytes = self._cuts[e], self.specs[e].nbytes
            if c.plain and nbytes <= _MEMMOVE_BYTES:
                ctypes.memmove(address + at, places.address[c.members[0]] + c.shift, nbytes)
            else:
                self._fill(e, buffer[at : at + nbytes], tensors, places)
            sources[e] = Source(storage, begin + at, nbytes, device, False, self._keys[e], None)

    def _versions(self, extents: list[int], tensors: Sequence[Tensor]) -> list[int]:
        """What PyTorch counts of writes to the tensors over each extent, one after another."""
        return [version_of(tensors[i]) for e in extents for i in self._cuts[e].members]

    def _moved(self, extents: list[int], before: list[int], now: list[int]) -> list[int]:
        """The extents whose number in :meth:`_versions` has changed."""
        if now == before:
            return []
        owners = (e for e in extents for _ in self._cuts[e].members)
        found = zip(owners, before, now, strict=True)
        return list(dict.fromkeys(e for e, old, new in found if old != new))

    def _settle(
        self,
        extents: list[int],
        versions: list[int],
        tensors: Sequence[Tensor],
        places: _Places,
        sources: Mapping[int, Source],
    ) -> None:
        """Make copies that another thread may have written into ones of a single moment.

        What was written to since its `versions` is copied again, until nothing differs from the
        copy before: all extents held what they hold now when the last round began.
        `CorruptionError` (kind "torn") when that does not come to an end.
        """
        changed: list[int] = []
        for _ in range(_ROUNDS):
            now = self._versions(extents, tensors)
            moved = self._moved(extents, versions, now)
            versions, changed = now, []
            for e in moved:
                kept = sources[e].data
                again = torch.empty_like(kept)
                self._fill(e, again, tensors, places)
                if not torch.equal(again, kept):
                    kept.copy_(again)
                    changed.append(e)
            if not changed:
                return
        raise torn(
            [self._cuts[e].path for e in changed],
            "keep other threads from changing it while save() or step() runs",
        )

    def _land(
        self,
        extents: list[int],
        device: torch.device,
        way: landing.Transport,
        tensors: Sequence[Tensor],
        places: _Places,
        sources: dict[int, Source],
        pool: BufferPool,
        leases: list[Lease],
    ) -> DeviceFigures:
        """Bring extents into host memory; nothing waits here for their bytes."""
        if not extents:
            return DeviceFigures()
        buffer, starts = self._room(extents, partial(pool.take, device, landing=way.locked))
        gaps = [self.specs[e].nbytes for e in extents if self._cuts[e].dims is not None]
        landed = Landing(way, max(gaps, default=0))
        for e, start in zip(extents, starts, strict=True):
            c, out = self._cuts[e], buffer[start : start + self.specs[e].nbytes]
            if c.dims is not None:
                landed.packed(out, _strided(tensors[c.members[0]], c.dims))
            elif (data := self._flat(e, tensors, places)) is not None:
                landed.dense(out, data)
            else:
                out.zero_()
                for at, own in self._parts(c, tensors, places):
                    landed.dense(out[at : at + own.numel()], own)
        arrived = way.record()
        leases.append(Lease(buffer, device, arrived))
        storage, begin = buffer.untyped_storage(), int(buffer.storage_offset())
        for e, start in zip(extents, starts, strict=True):
            sources[e] = Source(
                storage, begin + start, self.specs[e].nbytes, buffer.device, False, self._keys[e],
                None, arrived,
            )  # fmt: skip
        return DeviceFigures(
            transfers=landed.transfers,
            transferred_bytes=landed.nbytes,
            device_bytes=landed.device_bytes,
            pinned_bytes=buffer.numel(),
        )


def _signs(tensors: Sequence[Tensor], members: Sequence[int]) -> Signs:
    return tuple(sign_of(tensors[i]) for i in members)


def _strided(tensor: Tensor, dims: spans.Dims) -> Tensor:
    """The elements of a tensor with gaps in the order in which they are saved, as bits."""
    flat = torch.empty(0, dtype=_BITS[tensor.itemsize], device=tensor.device)
    sizes, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset(), sizes, strides)


def _bytes_of(tensor: Tensor, offset: int, nbytes: int) -> Tensor:
    """Bytes of the tensor's storage as a flat uint8 tensor (no copy)."""
    return bytes_of(tensor.untyped_storage(), offset, nbytes, tensor.device)


def _rounded(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN


def plan(
    paths: Sequence[str],
    slots: Sequence[int],
    measured: Probe,
    *,
    live: Sequence[bool],
    still: Sequence[bool] | None = None,
    chunk_bytes: int,
) -> Plan:
    """Cut `tensors` into extents. For `live` and `still` see :meth:`Plan.live_where`.

    The tensors must have passed `tensors.refuse_unsupported`.
    """
    facts, forms = measured.facts, _forms(measured.facts)
    need = np.array([own.nbytes for own in forms], np.int64)
    clusters, groups = _grouped(measured, forms, need)
    groups += [spans.Group((i,), 0, 0, None) for i in np.flatnonzero(need == 0).tolist()]
    groups.sort(key=lambda g: g.members[0])
    marks = of_each(facts, _marks)
    views: list[Any] = [None] * len(facts)
    specs: list[ExtentSpec] = []
    keys: list[str] = []
    cuts: list[_Cut] = []
    address: list[int] = measured.address.tolist()
    for number, g in enumerate(groups):
        first = g.members[0]
        mark, nbytes, path = marks[first], g.end - g.start, paths[first]
        specs.append(ExtentSpec(nbytes, chunk_bytes, mark.dtype))
        keys.append(f"{path}\n{nbytes} {mark.dtype} {chunk_bytes} {mark.device}")
        shift = g.start - address[first] if nbytes else 0
        padded = nbytes > 0 and g.start < min(address[i] for i in g.members)
        plain = g.dims is None and mark.on_host and not padded
        cuts.append(_Cut(g.members, shift, g.dims, plain, path))
        for i in g.members:
            offset = address[i] - g.start if nbytes and g.dims is None else 0
            views[i] = _view(
                slots[i], number, facts[i], marks[i], offset, packed=g.dims is not None
            )
    own = Plan(facts, tuple(views), tuple(specs), keys, cuts, clusters, need)
    return own.live_where(measured, live, still)


class _Marks(msgspec.Struct, frozen=True, gc=False):
    """What the views of all tensors of the same facts have in common."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    on_host: bool


def _marks(facts: Facts) -> _Marks:
    shape, stride, dtype, device, *_ = facts
    return _Marks(dtype_name(dtype), tuple(shape), tuple(stride), str(device), device.type == "cpu")


def _forms(facts: Sequence[Facts]) -> list[spans.Form]:
    return of_each(facts, lambda own: spans.form(own[2].itemsize, own[0], own[1]))


def _grouped(
    measured: Probe, forms: Sequence[spans.Form], need: NDArray[np.int64]
) -> tuple[_Clusters, list[spans.Group]]:
    """The tensors with elements as clusters, and as the groups that become extents."""
    filled: dict[torch.device, list[int]] = {}
    for i in np.flatnonzero(need).tolist():
        filled.setdefault(measured.facts[i][3], []).append(i)
    groups: list[spans.Group] = []
    of, relative = np.zeros_like(need), np.zeros_like(need)
    firsts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    devices: list[torch.device] = []
    for device, indices in filled.items():
        numbers = np.array(indices, np.int64)
        starts = measured.address[numbers]
        found = spans.clusters(starts, starts + need[numbers])
        sizes = np.diff(found.begins, append=len(indices))
        members = numbers[found.order]
        of[members] = np.repeat(np.arange(len(sizes)) + len(devices), sizes)
        relative[members] = starts[found.order] - np.repeat(found.start, sizes)
        firsts.append(members[found.begins])
        lengths.append(found.length)
        devices += [device] * len(sizes)
        ordered: list[int] = members.tolist()
        at: list[int] = starts[found.order].tolist()
        begins: list[int] = found.begins.tolist()
        counts: list[int] = sizes.tolist()
        for begin, size in zip(begins, counts, strict=True):
            first, start = ordered[begin], at[begin]
            if size == 1 and forms[first].gapless:
                groups.append(spans.Group((first,), start, start + forms[first].nbytes, None))
            else:
                groups += _groups_of(ordered[begin : begin + size], measured, forms)
    return (
        _Clusters(of, relative, np.concatenate(firsts), np.concatenate(lengths), devices),
        groups,
    )


def _groups_of(
    members: list[int], measured: Probe, forms: Sequence[spans.Form]
) -> list[spans.Group]:
    """The groups of one cluster, whose `members` are given by address; but members that do not lie
    at whole elements of each other are groups of their own."""
    ordered = sorted(members)
    here = [spans.Span(int(measured.address[i]), forms[i]) for i in ordered]
    number = {i: k for k, i in enumerate(ordered)}
    groups: list[spans.Group] = []
    for group in spans.cut(here, [number[i] for i in members]):
        if group.dims is not None or spans.aligned(here, group):
            groups.append(group)
        else:
            groups += [spans.cut(here, [k])[0] for k in group.members]
    return [
        spans.Group(tuple(ordered[k] for k in g.members), g.start, g.end, g.dims) for g in groups
    ]


def _view(
    slot: int, extent: int, facts: Facts, marks: _Marks, offset: int, *, packed: bool
) -> TensorView:
    shape, stride, _, _, requires_grad, kind, _, conj, neg = facts
    return TensorView(
        slot=slot,
        extent=extent,
        dtype=marks.dtype,
        shape=marks.shape,
        stride=spans.packed_stride(shape, stride) if packed else marks.stride,
        offset=0 if packed else offset,
        conj=conj,
        neg=neg,
        parameter=kind is nn.Parameter,
        requires_grad=requires_grad,
        device=marks.device,
    )
