"""A view saved as its whole storage, a stride dropped, a tie cut: wrong bytes or too many."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from captured import bits, memory_of, rebuild, roundtrip, same, saved_bytes, take
from deltackpt_store.errors import CorruptionError, UnsupportedFormatError, WriterError
from deltackpt_store.manifest import TensorView
from torch import Tensor, nn

from deltackpt import buffers, views
from deltackpt.buffers import BufferPool


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def test_a_small_view_of_a_big_buffer_costs_its_own_bytes() -> None:
    # case 1
    big = torch.randn(1_000_000, 25)
    taken = take({"view": big[:10]})
    assert saved_bytes(taken) == 10 * 25 * 4
    assert same(rebuild(taken)["view"], big[:10])


def test_views_of_a_saved_buffer_are_stored_once() -> None:
    # case 2
    buffer = torch.randn(200 * 1000)
    state: dict[str, Any] = {f"v{i}": buffer[i * 1000 : (i + 1) * 1000] for i in range(200)}
    alone = take(state)
    assert len(alone.layout.extents) == 200
    assert saved_bytes(alone) == buffer.nbytes
    taken = take({**state, "buffer": buffer})
    assert len(taken.layout.extents) == 1
    assert saved_bytes(taken) == buffer.nbytes
    back = rebuild(taken)
    assert same(back["buffer"], buffer)
    assert all(same(back[key], state[key]) for key in state)
    back["buffer"].zero_()
    assert not back["v7"].any()


def test_tied_weights_stay_tied() -> None:
    # case 3
    embed, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = embed.weight
    taken = take({"embed": embed, "head": head})
    assert saved_bytes(taken) == embed.weight.nbytes
    assert [view.extent for view in taken.layout.tensors] == [0, 0]
    back = rebuild(taken)
    back["embed"]["weight"].fill_(3)
    assert bool((back["head"]["weight"] == 3).all())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        numbers(30, 40).t(),
        numbers(3, 4, 5).permute(2, 0, 1),
        numbers(5, 1, 7).transpose(0, 1),
    ],
    ids=["channels_last", "channels_last_3d", "transposed", "permuted", "size-1"],
)
def test_dense_layouts_keep_their_strides(tensor: Tensor) -> None:
    # case 5, case 7
    back = roundtrip({"t": tensor})["t"]
    assert same(back, tensor)
    assert back.stride() == tensor.stride()
    taken = take({"t": tensor})
    assert saved_bytes(taken) == tensor.nbytes
    storage_order = tensor.as_strided((tensor.numel(),), (1,))
    assert bytes(memory_of(taken)[0].tolist()) == bits(storage_order)


@pytest.mark.parametrize(
    "tensor",
    [
        numbers(2000).as_strided((1000, 1001), (1, 1)),
        numbers(1000).unfold(0, 20, 3),
        numbers(60, 40).unfold(0, 8, 1).transpose(0, 2),
        numbers(1000)[::2].unfold(0, 20, 1),
        numbers(1000).as_strided((3, 20, 30), (0, 1, 1), 100),
        torch.randn(500, dtype=torch.complex64).unfold(0, 9, 2).conj(),
    ],
    ids=["hankel", "windows", "windows-of-rows", "windows-with-gaps", "expanded", "conjugate"],
)
def test_windows_are_saved_as_the_series_that_they_look_at(tensor: Tensor) -> None:
    # case 1, case 8: a million elements in the memory of two thousand were saved as a million
    taken = take({"t": tensor})
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    assert saved_bytes(taken) == reach * tensor.itemsize
    back = rebuild(taken)["t"]
    assert same(back, tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        numbers(40, 30)[:, ::3],
        numbers(40, 30)[5:20, 3:9],
        numbers(40, 30).t()[::2, 1:],
        numbers(1000).as_strided((20, 10), (30, 1)),
        numbers(4, 6, 8)[:, 1, None, ::2].expand(4, 5, 4),
        torch.randn(64, dtype=torch.complex64).imag[::2],
    ],
    ids=["columns", "block", "of-transposed", "rows", "expanded-columns", "imag"],
)
def test_tensors_with_gaps_are_packed(tensor: Tensor) -> None:
    # case 5
    taken = take({"t": tensor})
    assert saved_bytes(taken) <= tensor.nbytes
    back = rebuild(taken)["t"]
    assert same(back, tensor)
    real = [(s, n) for n, s in zip(back.shape, back.stride(), strict=True) if n > 1 and s]
    assert int(np.prod([n for _, n in real])) * back.itemsize == saved_bytes(taken)


def test_expanded_dims_are_stored_once() -> None:
    # case 8
    tensor = torch.ones(1, 1024).expand(4096, 1024)
    taken = take({"t": tensor})
    assert saved_bytes(taken) == 4096
    back = rebuild(taken)["t"]
    assert same(back, tensor)
    assert back.stride() == (0, 1)
    scalar = torch.tensor(2.5).expand(7, 9)
    assert saved_bytes(take({"t": scalar})) == 4
    assert same(roundtrip({"t": scalar})["t"], scalar)


def test_empty_tensors_are_nobodys_alias() -> None:
    # case 10, case 17
    shapes = [(0,), (0, 3), (2, 0), (0, 4, 4), (3, 0, 2)]
    kinds = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    state = {
        str(i): torch.empty(shape, dtype=kind)
        for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    }
    taken = take(state)
    assert [view.extent for view in taken.layout.tensors] == [0, 1, 2, 3, 4]
    assert [spec.nbytes for spec in taken.layout.extents] == [0] * 5
    back = rebuild(taken)
    for key, tensor in state.items():
        assert same(back[key], tensor)
        assert back[key].stride() == tensor.stride()


def test_a_key_that_grows_from_nothing_and_shrinks_again() -> None:
    # case 17
    previous = None
    for shape in [(0, 3), (4, 3), (4, 3), (0, 3)]:
        tensor = torch.randn(shape)
        previous = take({"t": tensor}, previous=previous)
        assert same(rebuild(previous)["t"], tensor)


def supported() -> list[torch.dtype]:
    every = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    return sorted((d for d in every if not str(d).startswith(("torch.q"))), key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("count", [5, 1500])
@pytest.mark.parametrize("dtype", supported(), ids=str)
def test_every_dtype(dtype: torch.dtype, count: int) -> None:
    # case 13
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (count,), (1,))
    taken = take({"t": tensor})
    assert taken.layout.tensors[0].dtype == str(dtype).removeprefix("torch.")
    back = rebuild(taken)["t"]
    assert (back.dtype, back.shape) == (dtype, (count,))
    again = torch.empty(0, dtype=torch.uint8).set_(back.untyped_storage(), 0, (raw.numel(),), (1,))
    assert torch.equal(again, raw)
    every_third = take({"t": tensor[::3]})
    assert saved_bytes(every_third) == tensor[::3].numel() * dtype.itemsize
    packed = memory_of(every_third)[0].reshape(-1, dtype.itemsize)
    assert torch.equal(packed, raw.reshape(-1, dtype.itemsize)[::3])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_in_one_state() -> None:
    # case 13
    named = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16",
             "uint32", "uint64", "complex32", "complex64", "complex128", "bool", "int64",
             "bfloat16"]  # fmt: skip
    state = {
        name: torch.randint(0, 2, (600 * getattr(torch, name).itemsize,), dtype=torch.uint8).view(
            getattr(torch, name)
        )
        for name in named
    }
    back = roundtrip(state)
    assert all(same(back[name], state[name]) for name in named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_scalars_keep_their_empty_shape(dtype: torch.dtype) -> None:
    # case 16
    previous = None
    for value in (0, 1, 1, 0):
        tensor = torch.tensor(value, dtype=dtype)
        taken = take({"t": tensor}, previous=previous)
        back = rebuild(taken)["t"]
        assert back.shape == ()
        assert same(back, tensor)
        previous = taken


def test_lazy_conjugates_and_negatives() -> None:
    data = torch.randn(300, dtype=torch.complex64)
    state = {"data": data, "conj": data.conj(), "imag": data.conj().imag, "alone": data[:9].conj()}
    assert state["imag"].is_neg()
    taken = take(state)
    assert saved_bytes(taken) == data.nbytes
    back = rebuild(taken)
    for key, tensor in state.items():
        assert same(back[key], tensor)
        assert back[key].is_conj() == tensor.is_conj()
        assert back[key].is_neg() == tensor.is_neg()
    back["data"].zero_()
    assert not back["conj"].any()
    strided = roundtrip({"t": data.conj()[::2]})["t"]
    assert same(strided, data.conj()[::2])


def test_not_a_number_and_signed_zero_keep_their_bits() -> None:
    # case 23
    words = torch.tensor([0x7FC00001, 0x7FC00002, -0x80000000, 0], dtype=torch.int64)
    tensor = words.to(torch.int32).view(torch.float32)
    assert bits(roundtrip({"t": tensor})["t"]) == bits(tensor)


def test_interleaved_views_do_not_save_what_lies_between() -> None:
    whole = numbers(1000, 100)
    taken = take({"a": whole[:, 0], "b": whole[:, 1], "c": whole[:, 50:53]})
    assert saved_bytes(taken) == 1000 * 5 * 4
    assert len({view.extent for view in taken.layout.tensors}) == 3
    back = rebuild(taken)
    assert same(back["a"], whole[:, 0])
    assert same(back["c"], whole[:, 50:53])


def test_views_that_share_elements_stay_aliases_even_with_gaps() -> None:
    whole = numbers(50, 20)
    state = {"a": whole[:, 0:3], "b": whole[:, 2:5], "far": whole[:, 10]}
    back = rebuild(take(state))
    assert all(same(back[key], state[key]) for key in state)
    back["a"][:, 2] = -1
    assert bool((back["b"][:, 0] == -1).all())
    back["far"].zero_()
    assert bool((back["a"][:, 0] == whole[:, 0]).all())


def test_the_same_strided_view_twice_is_one_packed_extent() -> None:
    whole = numbers(50, 20)
    taken = take({"a": whole[:, ::5], "b": whole[:, ::5], "t": whole[:, ::5].t()})
    assert saved_bytes(taken) == 200 * 4
    back = rebuild(taken)
    assert same(back["t"], whole[:, ::5].t())
    back["a"].zero_()
    assert not back["b"].any()
    assert not back["t"].any()


def test_views_of_other_dtypes_share_the_extent() -> None:
    raw = torch.randint(0, 255, (4099,), dtype=torch.uint8)
    state = {
        "raw": raw[3:],
        "double": raw[8:4096].view(torch.float64),
        "half": raw[6:20].view(torch.float16),
    }
    taken = take(state)
    assert len(taken.layout.extents) == 1
    assert saved_bytes(taken) <= 4099
    back = rebuild(taken)
    assert all(same(back[key], state[key]) for key in state)


def test_two_storages_over_one_memory_are_one_extent() -> None:
    array = np.arange(1000, dtype=np.float32)
    state = {"a": torch.from_numpy(array), "b": torch.from_numpy(array)}
    taken = take(state)
    assert len(taken.layout.extents) == 1
    halves = {"a": torch.from_numpy(array[:600]), "b": torch.from_numpy(array[400:])}
    for live in (None, lambda path, tensor: True):
        joined = take(halves, live=live)
        assert [spec.nbytes for spec in joined.layout.extents] == [4000]
        assert [s.live for s in joined.sources.values()] == [False]  # no one storage holds it all
        back = rebuild(joined)
        assert all(same(back[key], halves[key]) for key in halves)
    tiny = {"a": torch.from_numpy(array[:6]), "b": torch.from_numpy(array[4:9])}
    assert all(same(rebuild(take(tiny))[key], tiny[key]) for key in tiny)


def test_unaligned_neighbours_keep_their_values() -> None:
    """Memory that storages of several dtypes see at odd distances: values first, then aliases."""
    memory = bytearray(range(256)) * 8
    state = {
        "bytes": torch.frombuffer(memory, dtype=torch.uint8),
        "ints": torch.frombuffer(memory, dtype=torch.int32, offset=3, count=200),
        "longs": torch.frombuffer(memory, dtype=torch.int64, offset=6, count=200),
    }
    back = rebuild(take(state))
    assert all(same(back[key], state[key]) for key in state)


def test_parameters_and_gradients_are_recorded() -> None:
    layout = take(
        {
            "p": nn.Parameter(torch.zeros(3)),
            "frozen": nn.Parameter(torch.zeros(3), requires_grad=False),
            "leaf": torch.zeros(3, requires_grad=True),
            "buffer": nn.Buffer(torch.zeros(3)),
        }
    ).layout
    assert [(v.parameter, v.requires_grad) for v in layout.tensors] == [
        (True, True), (True, False), (False, True), (False, False),
    ]  # fmt: skip
    dressed = [views.dress(view, torch.zeros(3)) for view in layout.tensors]
    assert [type(t) for t in dressed] == [nn.Parameter, nn.Parameter, Tensor, Tensor]
    assert [t.requires_grad for t in dressed] == [True, False, True, False]


def view(**changes: Any) -> TensorView:
    facts: dict[str, Any] = {"dtype": "float32", "shape": (2, 3), "stride": (3, 1), "offset": 0}
    return TensorView(**{"slot": 0, "extent": 0, **facts, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 4}, {"offset": -4}, {"shape": (3, 3)}, {"stride": (4, 1)}, {"offset": 2},
        {"shape": (2,)}, {"shape": (-1, 3)}, {"stride": (-3, 1)}, {"dtype": "qint8"},
        {"shape": (2**40, 2**40), "stride": (0, 0)}, {"shape": (0, 3), "offset": 100},
        {"shape": (2**70,), "stride": (0,)},
    ],
    ids=str,
)  # fmt: skip
def test_views_that_reach_outside_their_bytes_are_refused(changes: dict[str, Any]) -> None:
    """set_() would enlarge the storage and hand out uninitialised memory."""
    memory = torch.zeros(24, dtype=torch.uint8)
    with pytest.raises(CorruptionError):
        views.rebuild(view(**changes), memory)
    assert memory.untyped_storage().nbytes() == 24


def test_rebuild_inside_a_larger_buffer() -> None:
    arena = torch.zeros(4096, dtype=torch.uint8)
    inside = arena[64:88]
    inside.view(torch.float32).copy_(torch.arange(6.0))
    assert torch.equal(views.rebuild(view(), inside), torch.arange(6.0).reshape(2, 3))
    with pytest.raises(UnsupportedFormatError):
        views.rebuild(view(dtype="float2"), inside)


def test_large_pool_buffers_are_memory_of_their_own() -> None:
    """Prevents: huge pages that are shared, or unmapped while a tensor still looks at them."""
    cpu, size = torch.device("cpu"), (5 << 20) + 3
    pool = BufferPool()
    one, other = pool.take(cpu, size), pool.take(cpu, size)
    assert len(one) == len(other) == size
    one.fill_(1)
    other.fill_(2)
    part = one[size - 100 :]
    pool.give(one)
    pool.clear()
    del one, pool
    gc.collect()
    assert (part == 1).all()
    assert (other == 2).all()


def test_no_memory_for_a_large_buffer_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(buffers.mmap, "mmap", refuse)
    with pytest.raises(WriterError, match="8388608") as found:
        BufferPool().take(torch.device("cpu"), 8 << 20)
    assert found.value.kind == "memory"


def test_pool_buffers_are_reused_and_bounded() -> None:
    # case 72
    pool, cpu = BufferPool(keep=2), torch.device("cpu")
    first = pool.take(cpu, 1000)
    address = first.data_ptr()
    pool.give(first)
    assert pool.take(cpu, 900).data_ptr() == address
    given = [torch.empty(1000, dtype=torch.uint8) for _ in range(5)]
    pool.clear()
    for buffer in given:
        pool.give(buffer)
    kept = {buffer.data_ptr() for buffer in given}
    held = [pool.take(cpu, 1000) for _ in range(3)]
    assert [buffer.data_ptr() in kept for buffer in held] == [True, True, False]
    pool.give(torch.empty(100_000, dtype=torch.uint8))
    assert pool.take(cpu, 10).numel() == 10
    assert pool.take(cpu, 100_000).numel() == 100_000
    pool.clear()
