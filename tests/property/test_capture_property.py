"""Any nesting of values and strided tensors comes back: bits, dtypes, strides, aliases, types."""

from __future__ import annotations

import collections
import math
import struct
from typing import Any

import torch
from captured import bits, rebuild, saved_bytes, take
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [
    torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.int64,
    torch.float8_e5m2, torch.complex64, torch.complex128, torch.uint16,
]  # fmt: skip
PLAIN = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def addresses(tensor: Tensor) -> list[int]:
    """Address of every element in logical order, from first principles."""
    out = [tensor.data_ptr()]
    for n, s in zip(tensor.shape, tensor.stride(), strict=True):
        out = [at + i * s * tensor.itemsize for at in out for i in range(n)]
    return out


def overlaps_itself(tensor: Tensor) -> bool:
    real = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]
    return len(set(addresses(tensor))) != math.prod(n for n, _ in real)


def gapless(tensor: Tensor) -> bool:
    at = addresses(tensor)
    return len(set(at)) * tensor.itemsize == max(at) + tensor.itemsize - min(at)


def raw(tensor: Tensor) -> bytes:
    return bits(tensor.view(torch.uint8)) if tensor.dtype == torch.bool else bits(tensor)


@st.composite
def strided(draw: st.DrawFn, base: Tensor) -> Tensor:
    """A view of `base` (flat uint8) of any dtype, shape, stride and offset that it holds."""
    dtype = draw(st.sampled_from(DTYPES))
    size = dtype.itemsize
    room = base.numel() // size
    offset = draw(st.integers(0, room - 1))
    shape: list[int] = []
    stride: list[int] = []
    left = room - 1 - offset
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, 4))
        s = draw(st.integers(0, max(0, left // max(1, n - 1)))) if n else draw(st.integers(0, 5))
        left -= max(0, n - 1) * s
        shape.append(n)
        stride.append(s)
    if draw(st.booleans()):  # dense more often than chance would have it
        stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if math.prod(shape) > room - offset:
            offset, shape, stride = 0, [room], [1]
    tensor = torch.empty(0, dtype=dtype).set_(base.untyped_storage(), offset, shape, stride)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor


@st.composite
def families(draw: st.DrawFn) -> list[Tensor]:
    """Tensors over a few storages."""
    out: list[Tensor] = []
    for _ in range(draw(st.integers(1, 3))):
        data = draw(st.binary(min_size=64, max_size=160))
        base = torch.frombuffer(bytearray(data[: len(data) // 16 * 16]), dtype=torch.uint8).clone()
        base &= 1  # any byte is a valid bool
        base[1::2] |= draw(st.integers(0, 1))
        out += draw(st.lists(strided(base), min_size=1, max_size=4))
        if draw(st.booleans()):
            out.append(base)
    return out


@PLAIN
@given(families())
def test_strided_tensors(tensors: list[Tensor]) -> None:
    # case 2, case 3, case 5, case 8, case 10
    state: dict[Any, Any] = dict(enumerate(tensors))
    taken = take(state)
    back = rebuild(taken)
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for i, tensor in enumerate(tensors):
        other = back[i]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert raw(other) == raw(tensor)
        assert other.is_conj() == tensor.is_conj()
        if not tensor.numel():
            continue
        for old, new in zip(addresses(tensor), addresses(other), strict=True):
            for k in range(tensor.itemsize):
                assert backward.setdefault(new + k, old + k) == old + k  # no alias is invented
                if gapless(tensor) or not overlaps_itself(tensor):
                    assert forward.setdefault(old + k, new + k) == new + k  # and none is lost
    if len(tensors) == 1:
        assert saved_bytes(taken) <= tensors[0].numel() * tensors[0].itemsize
        if tensors[0].numel() and gapless(tensors[0]):
            assert saved_bytes(taken) == len(set(addresses(tensors[0]))) * tensors[0].itemsize
    again = take(state, previous=taken)
    assert again.layout is taken.layout
    assert all(raw(rebuild(again)[i]) == raw(t) for i, t in enumerate(tensors))


@PLAIN
@given(families(), families())
def test_reused_layouts_are_those_of_a_fresh_capture(
    before: list[Tensor], after: list[Tensor]
) -> None:
    # case 50
    first = take(dict(enumerate(before)))
    state: dict[Any, Any] = dict(enumerate(after))
    second, fresh = take(state, previous=first), take(state)
    assert second.layout == fresh.layout
    if second.layout is first.layout:
        assert fresh.layout == first.layout
    assert all(raw(rebuild(second)[i]) == raw(t) for i, t in enumerate(after))


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.complex_numbers(), st.text(alphabet=st.characters(categories=["Cs"])),
)  # fmt: skip
keys = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary(),
    st.tuples(st.integers(), st.text()), st.text(alphabet="/~\"'#()0123456789.-\0\n"),
)  # fmt: skip
leaves = st.one_of(
    scalars,
    st.lists(st.integers(-128, 127), max_size=200).map(lambda v: torch.tensor(v, dtype=torch.int8)),
)


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=4)
    pairs = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        items, items.map(tuple), pairs, pairs.map(collections.OrderedDict),
        items.map(collections.deque), st.frozensets(st.integers() | st.text(), max_size=3),
        st.sets(st.binary(), max_size=3),
    )  # fmt: skip


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert raw(a) == raw(b)
    elif isinstance(a, dict):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
        for x, y in zip(a.values(), b.values(), strict=True):
            assert_equal(x, y)
    elif isinstance(a, (list, tuple, collections.deque)):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    elif isinstance(a, complex):
        assert struct.pack("<2d", a.real, a.imag) == struct.pack("<2d", b.real, b.imag)
    else:
        assert a == b


@PLAIN
@given(st.dictionaries(keys, st.recursive(leaves, nest, max_leaves=25), max_size=5))
def test_nested_states(state: dict[Any, Any]) -> None:
    # case 28, case 29, case 34, case 172
    state = {k: v for k, v in state.items() if not (type(k) is str and k.startswith("#"))}
    taken = take(state)
    shown = taken.layout.paths
    assert len(set(shown)) == len(shown)
    back = rebuild(taken)
    del back["#params"]
    assert_equal(back, state)
    again = take(state, previous=taken)
    assert again.layout is taken.layout
    assert again.objects == taken.objects
    assert again.inline == taken.inline
