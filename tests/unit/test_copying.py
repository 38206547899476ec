"""Prevents restored weights from being scrambled, rounded or quieted on their way into a target."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from deltackpt.copying import (
    bits,
    copy_bits,
    dense_bytes,
    exchange_bits,
    memory_order,
    repeats_like,
    same_bits,
    scatter,
    writable_layout,
)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern: signalling NaNs, negative zeros, odd bools and all."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (math.prod(shape) * width,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "channels_last"])
def test_copies_every_bit_into_any_layout(dtype: torch.dtype, layout: str) -> None:
    # case 5, case 7, case 23
    source = random_bits((2, 3, 4, 5), dtype, 1)
    target = {
        "contiguous": lambda: torch.empty((2, 3, 4, 5), dtype=dtype),
        "transposed": lambda: torch.empty((5, 4, 3, 2), dtype=dtype).permute(3, 2, 1, 0),
        "strided": lambda: torch.empty((2, 3, 4, 15), dtype=dtype)[..., ::3],
        "channels_last": lambda: torch.empty((2, 4, 5, 3), dtype=dtype).permute(0, 3, 1, 2),
    }[layout]()
    strides = target.stride()
    copy_bits(target, source)
    assert target.stride() == strides
    for index in itertools.product(*map(range, source.shape)):
        assert raw_bytes(target[index].reshape(1)) == raw_bytes(source[index].reshape(1))


def test_compares_bits_not_values() -> None:
    # case 23
    nan = torch.tensor([float("nan"), 1.0])
    other = nan.clone()
    assert same_bits(nan, other)
    bits(other)[0] ^= 1
    assert not same_bits(nan, other)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))


def test_lazy_conjugate_and_negation_are_values() -> None:
    source = torch.tensor([1 + 2j, 3 - 4j]).conj()
    target = torch.empty(2, dtype=torch.complex64)
    copy_bits(target, source)
    assert target.tolist() == [1 - 2j, 3 + 4j]
    lazy = torch.empty(2, dtype=torch.complex64).conj()
    copy_bits(lazy, target)
    assert lazy.is_conj()
    assert lazy.resolve_conj().tolist() == [1 - 2j, 3 + 4j]
    assert same_bits(lazy, source)


def test_expanded_target_is_written_through_its_one_row() -> None:
    base = torch.zeros(1, 4)
    target = base.expand(3, 4)
    source = torch.arange(4.0).expand(3, 4)
    assert not writable_layout(target)
    assert repeats_like(target, source)
    copy_bits(target, source)
    assert base.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert not repeats_like(target, torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("lazy", [False, True])
def test_expanded_target_with_a_lazy_bit(lazy: bool) -> None:
    """PyTorch refuses the copy, which had begun to change the objects of a restore."""
    base = torch.zeros(4, dtype=torch.complex64)
    source = torch.tensor([1 + 2j, 3j, 4, -5 - 6j])
    source = (source.conj().resolve_conj().conj() if lazy else source).expand(3, 4)
    copy_bits(base.conj().expand(3, 4), source)
    assert base.tolist() == [1 - 2j, -3j, 4, -5 + 6j]
    copy_bits(base.conj().imag.expand(3, 4), torch.full((3, 1), -7.0).expand(3, 4))
    assert base.imag.tolist() == [7.0] * 4
    assert base.real.tolist() == [1.0, 0.0, 4.0, -5.0]


def test_parameters_are_written_without_a_graph() -> None:
    target = torch.nn.Parameter(torch.zeros(3))
    copy_bits(target, torch.ones(3))
    assert target.is_leaf
    assert target.requires_grad
    assert target.grad is None
    assert target.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (lambda: torch.empty(2, 3, 4), (0, 1, 2)),
        (lambda: torch.empty(4, 3, 2).permute(2, 1, 0), (2, 1, 0)),
        (lambda: torch.empty(2, 3, 4)[:, :, ::2], None),
        (lambda: torch.empty(1, 4).expand(3, 4), None),
        (lambda: torch.empty(6)[1:], (0,)),
        (lambda: torch.empty(()), ()),
    ],
)  # fmt: skip
def test_memory_order_of_dense_tensors(make, order) -> None:
    tensor = make()
    found = memory_order(tensor.shape, tensor.stride())
    assert found == order
    if order is not None:
        assert tensor.permute(order).is_contiguous()


def test_dense_bytes_is_the_memory_itself() -> None:
    tensor = torch.arange(24, dtype=torch.int32).view(2, 3, 4).permute(2, 0, 1)
    order = memory_order(tensor.shape, tensor.stride())
    assert order is not None
    flat = dense_bytes(tensor, order)
    assert flat is not None
    assert flat.numpy().tobytes() == torch.arange(24, dtype=torch.int32).numpy().tobytes()
    flat.zero_()
    assert not tensor.any()
    assert dense_bytes(tensor, (0, 1, 2)) is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_one_element_is_dense_whatever_its_strides(shape, dtype) -> None:
    tensor = torch.zeros(8, dtype=dtype).as_strided(shape, (3, 2)[: len(shape)], 5)
    order = memory_order(tensor.shape, tensor.stride())
    assert order is not None
    flat = dense_bytes(tensor, order)
    assert flat is not None
    flat.fill_(1)
    width = tensor.element_size()
    assert list(tensor.untyped_storage()) == [0] * (5 * width) + [1] * width + [0] * (2 * width)


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_scatter_of_any_range(permutation: tuple[int, ...]) -> None:
    shape = (3, 4, 5)
    for start, count in [(0, 60), (0, 1), (59, 1), (7, 30), (13, 40), (20, 20), (1, 3), (5, 0)]:
        target = torch.zeros([shape[dim] for dim in permutation], dtype=torch.int32)
        back = [permutation.index(dim) for dim in range(3)]
        view = target.permute(back)
        expected = torch.zeros(60, dtype=torch.int32)
        expected[start : start + count] = torch.arange(1, count + 1, dtype=torch.int32)
        scatter(view, start, torch.arange(1, count + 1, dtype=torch.int32))
        assert torch.equal(view.reshape(-1), expected)


def test_scatter_into_gaps_leaves_the_gaps_alone() -> None:
    backing = torch.full((4, 9), -1, dtype=torch.int16)
    target = backing[:, ::3]
    scatter(target, 2, torch.arange(7, dtype=torch.int16))
    assert target.reshape(-1).tolist() == [-1, -1, 0, 1, 2, 3, 4, 5, 6, -1, -1, -1]
    assert (backing[:, 1::3] == -1).all()
    assert (backing[:, 2::3] == -1).all()


@pytest.mark.parametrize("shape", [(3, 5), (300, 500)])
def test_autograd_notices_the_write(shape: tuple[int, int]) -> None:
    weight = torch.ones(shape, requires_grad=True)
    loss = (weight * weight).sum()
    copy_bits(weight, torch.zeros(shape))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "turn",
    [
        (lambda t: t, lambda t: t),
        (lambda t: t.permute(2, 0, 1), lambda t: t.permute(2, 0, 1)),
        (lambda t: t.permute(2, 0, 1), lambda t: t.permute(2, 0, 1).contiguous()),
        (lambda t: t[::2], lambda t: t[::2].clone()),
    ],
)
def test_exchange_swaps_all_bits(turn) -> None:
    shape = (40, 50, 70)
    for dtype in (torch.float32, torch.complex128, torch.uint8):
        left, right = turn[0](random_bits(shape, dtype, 1)), turn[1](random_bits(shape, dtype, 2))
        before = raw_bytes(left), raw_bytes(right)
        strides = left.stride(), right.stride()
        exchange_bits(left, right)
        assert (raw_bytes(right), raw_bytes(left)) == before
        assert (left.stride(), right.stride()) == strides
    lazy, plain = torch.tensor([1 + 2j]).conj(), torch.tensor([3 + 4j])
    exchange_bits(lazy, plain)
    assert (lazy.tolist(), plain.tolist()) == ([3 + 4j], [1 - 2j])
