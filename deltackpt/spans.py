"""Which byte runs hold a set of strided tensors: pure arithmetic, no tensor is touched.

A tensor is seen as a `Span`: its address (comparable inside one capture only), element size and
the dims that really step through memory. `cut` groups spans into *groups*, each of which becomes
one extent:

- spans that share bytes go together (tied weights, overlapping views, views of a saved buffer);
- a span or group whose bytes are one run without gaps is saved from where it is, also one that
  overlaps itself (windows into a series), which has more elements than memory;
- a lone span with gaps is packed into a dense copy, unless it has more elements than memory;
- spans that lie in each other's gaps without sharing a byte are separate groups, so that the
  bytes between them are never saved. Only spans that do share elements keep a gap they enclose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Dims = tuple[tuple[int, int], ...]  # (size, stride in elements), steepest first

_MASK_CELLS = 1 << 28


class Form(msgspec.Struct, frozen=True, gc=False):
    """A span without its address: `nbytes` from the first to past the last element.

    `gapless`: every byte of it belongs to an element, or to several.
    """

    itemsize: int
    dims: Dims
    nbytes: int
    gapless: bool


class Span(msgspec.Struct, frozen=True, gc=False):
    """Memory of one tensor: bytes from its first to past its last element."""

    start: int
    form: Form

    @property
    def end(self) -> int:
        return self.start + self.form.nbytes

    @property
    def itemsize(self) -> int:
        return self.form.itemsize

    @property
    def dims(self) -> Dims:
        return self.form.dims

    @property
    def gapless(self) -> bool:
        return self.form.gapless


class Group(msgspec.Struct, frozen=True, gc=False):
    """Spans that become one extent. `members` are indices into the spans given to :func:`cut`.

    `dims` is None when the bytes ``[start, end)`` are the extent; else the one geometry of all
    members, to be packed into ``end - start`` bytes (`start` is then the source address).
    """

    members: tuple[int, ...]
    start: int
    end: int
    dims: Dims | None


def order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Indices of the dims that step through memory, steepest first (stable)."""
    real = [i for i, (n, s) in enumerate(zip(shape, stride, strict=True)) if n > 1 and s > 0]
    return sorted(real, key=lambda i: -stride[i])


def form(itemsize: int, shape: Sequence[int], stride: Sequence[int]) -> Form:
    """The form of a tensor; one without elements has no bytes."""
    dims = tuple((shape[i], stride[i]) for i in order(shape, stride))
    reach = 1 + sum((n - 1) * s for n, s in dims) if all(shape) else 0
    return Form(itemsize, dims, reach * itemsize, _gapless(dims))


def _gapless(dims: Dims) -> bool:
    """Whether the elements leave nothing out between the first and the last of them."""
    run = 1  # elements, without gaps
    for n, stride in reversed(dims):
        if stride > run:
            return False
        run += (n - 1) * stride
    return True


def span(address: int, itemsize: int, shape: Sequence[int], stride: Sequence[int]) -> Span:
    """The span of a tensor with at least one element."""
    return Span(address, form(itemsize, shape, stride))


def packed(dims: Dims) -> Dims:
    """The same sizes with the strides of a dense tensor, order kept."""
    out: list[tuple[int, int]] = []
    step = 1
    for n, _ in reversed(dims):
        out.append((n, step))
        step *= n
    return tuple(reversed(out))


def packed_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor after packing: expanded dims keep stride 0."""
    axes = order(shape, stride)
    steps = [s for _, s in packed(tuple((shape[i], stride[i]) for i in axes))]
    out = [0 if n > 1 and s == 0 else 1 for n, s in zip(shape, stride, strict=True)]
    for axis, step in zip(axes, steps, strict=True):
        out[axis] = step
    return tuple(out)


class Clusters(NamedTuple):
    """Byte ranges that overlap, directly or through others: `order` numbers the ranges by address,
    and each cluster is a run of it that begins where `begins` says; `start` and `length` in bytes.
    """

    order: NDArray[np.int64]
    begins: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


def clusters(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Clusters:
    """Which of at least one range ``[starts[i], ends[i])``, none of them empty, overlap."""
    order = np.argsort(starts, kind="stable")
    start, reach = starts[order], np.maximum.accumulate(ends[order])
    begins = np.flatnonzero(np.concatenate(([True], start[1:] >= reach[:-1])))
    last = np.append(begins[1:], len(order)) - 1
    return Clusters(order, begins, start[begins], reach[last] - start[begins])


def cut(spans: Sequence[Span], cluster: Sequence[int]) -> list[Group]:
    """The groups of one cluster (see the module's docstring)."""
    if len(cluster) == 1 and spans[cluster[0]].gapless:
        return [Group((cluster[0],), spans[cluster[0]].start, spans[cluster[0]].end, None)]
    kinds: dict[tuple[int, int, Dims], list[int]] = {}
    for i in cluster:
        kinds.setdefault((spans[i].start, spans[i].itemsize, spans[i].dims), []).append(i)
    distinct = [members[0] for members in kinds.values()]
    if len(distinct) > 1 and not covered([spans[i] for i in distinct]):
        parts = _components([spans[i] for i in distinct])
    else:
        parts = [list(range(len(distinct)))]
    every = list(kinds.values())
    return [_group(spans, [every[k] for k in part]) for part in parts]


def covered(spans: Sequence[Span], start: int | None = None, end: int | None = None) -> bool:
    """Whether those of `spans` without gaps cover ``[start, end)`` (default: all of the spans)."""
    reach = min(s.start for s in spans) if start is None else start
    end = max(s.end for s in spans) if end is None else end
    for s in sorted((s for s in spans if s.gapless), key=lambda s: s.start):
        if s.start > reach:
            return False
        reach = max(reach, s.end)
    return reach >= end


def _group(spans: Sequence[Span], kinds: list[list[int]]) -> Group:
    members = tuple(sorted(i for kind in kinds for i in kind))
    first = spans[members[0]]
    if len(kinds) == 1 and not first.gapless:
        packed = math.prod(n for n, _ in first.dims) * first.itemsize
        if packed < first.form.nbytes:  # else it overlaps itself
            return Group(members, first.start, first.start + packed, first.dims)
    start = min(spans[i].start for i in members)
    end = max(spans[i].end for i in members)
    widest = max((spans[i] for i in members), key=lambda s: s.itemsize)
    start -= (start - widest.start) % widest.itemsize  # offsets in whole elements, for every dtype
    return Group(members, start, end, None)


def aligned(spans: Sequence[Span], group: Group) -> bool:
    """Whether every member starts at a multiple of its element size within the group.

    False only for memory that different storages look at with odd distances.
    """
    return all((spans[i].start - group.start) % spans[i].itemsize == 0 for i in group.members)


def _components(spans: Sequence[Span]) -> list[list[int]]:
    """Spans that share bytes, directly or through others, by painting them one after another.

    Ranges of more than 2**28 cells are taken as sharing (an alias is kept rather than lost).
    """
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    steps = [s.start - start for s in spans]
    steps += [s.itemsize for s in spans]
    steps += [stride * s.itemsize for s in spans for _, stride in s.dims]
    cell = math.gcd(*steps)
    cells = (end - start) // cell
    if cells > _MASK_CELLS:
        return [list(range(len(spans)))]
    paint = np.zeros(cells, np.uint8 if len(spans) < 255 else np.uint32)
    leader = list(range(len(spans)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for i, s in enumerate(spans):
        shape = [n for n, _ in s.dims] + [s.itemsize // cell]
        strides = [stride * s.itemsize // cell for _, stride in s.dims] + [1]
        here = np.lib.stride_tricks.as_strided(
            paint[(s.start - start) // cell :], shape, [t * paint.itemsize for t in strides]
        )
        for seen in np.unique(here).tolist():
            if seen:
                leader[find(seen - 1)] = find(i)
        here[...] = i + 1
    parts: dict[int, list[int]] = {}
    for i in range(len(spans)):
        parts.setdefault(find(i), []).append(i)
    return list(parts.values())
