"""A save that reads memory which training is already changing stores two instants as one."""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from captured import bits, memory_of, rebuild, same, take
from deltackpt_store.errors import InvalidInputError, StateError
from torch import Tensor, nn

from deltackpt import spans, tree
from deltackpt.buffers import BufferPool
from deltackpt.capture import Capture
from deltackpt.state_check import check_state


def trained(
    steps: int = 2, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Dropout(0.5), nn.Linear(40, 40))
    opt = optimizer(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": opt}
    for _ in range(steps):
        advance(state)
    return state


def advance(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 40)).square().sum().backward()
    state["optimizer"].step()


def live_paths(taken: Capture) -> set[str]:
    out: set[str] = set()
    for view in taken.layout.tensors:
        source = taken.sources.get(view.extent)
        if source is not None and source.live:
            out.add(taken.layout.paths[view.slot])
    return out


def reference(state: Any) -> Any:
    """A deep copy of everything, made by torch and the standard library."""
    if hasattr(state, "state_dict"):
        return copy.deepcopy(state.state_dict())
    if isinstance(state, dict):
        return {key: reference(value) for key, value in state.items()}
    return copy.deepcopy(state)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert same(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert type(a) is type(b)
        assert a == b


def without_own(state: Any) -> Any:
    return {key: value for key, value in state.items() if not str(key).startswith("#")}


# what is live ---------------------------------------------------------------------------------


def test_only_what_the_optimizer_alone_changes_is_live() -> None:
    # case 48
    state = trained()
    state["loose"] = torch.randn(500)
    state["ema"] = copy.deepcopy(state["model"])
    taken = take(state)
    expected = {"model/0.weight", "model/3.weight"}
    expected |= {f"optimizer/state/{i}/{k}" for i in (0, 4) for k in ("exp_avg", "exp_avg_sq")}
    assert live_paths(taken) == expected
    for number, source in taken.sources.items():
        assert source.data.dtype == torch.uint8
        assert source.data.dim() == 1
        assert source.data.is_contiguous()
        assert source.data.numel() == taken.layout.extents[number].nbytes
        assert (source.owner is not None) == source.live
    weight = state["model"][0].weight
    first = taken.sources[taken.layout.tensors[0].extent]
    assert first.data.data_ptr() == weight.data_ptr()
    assert first.owner is weight


def test_nothing_is_live_without_an_optimizer() -> None:
    # case 48
    model = nn.Linear(100, 100)
    taken = take({"model": model, "w": nn.Parameter(torch.zeros(300))})
    expected = reference({"model": model})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert live_paths(taken) == set()
    assert_same(rebuild(taken)["model"], expected["model"])


def test_frozen_parameters_beside_trained_ones_are_live_and_others_are_not() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    model[0].requires_grad_(False)
    other = nn.Linear(40, 40)  # somebody else trains it
    teacher = nn.Linear(40, 40).requires_grad_(False)
    model.add_module("other", other)
    trained_parameters = [p for p in model[:3].parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained_parameters, lr=0.1)
    taken = take({"model": model, "teacher": teacher, "optimizer": optimizer})
    assert live_paths(taken) == {"model/0.weight", "model/1.weight", "model/2.weight"}
    optimizer.add_param_group({"params": list(other.parameters())})
    again = take({"model": model, "teacher": teacher, "optimizer": optimizer}, previous=taken)
    assert "model/other.weight" in live_paths(again)


def test_a_parameter_that_starts_to_train_elsewhere_is_copied() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    taken = take(state)
    assert "model/0.weight" in live_paths(taken)
    model[0].requires_grad_(True)
    assert "model/0.weight" not in live_paths(take(state, previous=taken))


def test_copies_stay_as_they_were() -> None:
    # case 48, case 49
    state = trained()
    taken = take(state, live=lambda path, tensor: False)
    expected = reference(state)
    advance(state)
    assert not any(source.live for source in taken.sources.values())
    assert_same(without_own(rebuild(taken)), expected)


def test_a_predicate_decides_instead() -> None:
    state = {**trained(), "loose": torch.randn(500)}
    taken = take(state, live=lambda path, tensor: path == "loose")
    assert live_paths(taken) == {"loose"}


def test_memory_that_is_only_partly_live_is_copied() -> None:
    flat = torch.randn(3000)
    model = nn.Linear(10, 100, bias=False)
    model.weight = nn.Parameter(flat[:1000].view(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    assert live_paths(take(state)) == {"model/weight"}
    assert live_paths(take({**state, "same": flat[:1000]})) == {"model/weight", "same"}
    assert live_paths(take({**state, "flat": flat})) == set()


def test_what_is_not_live_is_of_one_instant() -> None:
    # case 49
    state = trained()
    state["counters"] = {"seen": torch.tensor(5), "table": torch.randn(5000), "n": 3, "list": [1]}
    state["array"] = np.arange(100_000)
    taken = take(state)
    expected = reference(state)
    frozen = {p for p in taken.layout.paths if p not in live_paths(taken)}
    state["model"](torch.randn(8, 40))  # batch statistics move
    state["counters"]["seen"] += 1
    state["counters"]["table"].zero_()
    state["counters"]["list"].append(2)
    state["array"][:] = 0
    back = rebuild(taken)
    assert_same(without_own({**back, "array": None}), {**expected, "array": None})
    assert back["array"].tolist() == expected["array"].tolist()
    assert {"model/1.running_mean", "optimizer/state/0/step"} <= frozen
    advance(state)
    assert int(rebuild(taken)["optimizer"]["state"][0]["step"]) == 2


@pytest.mark.parametrize("write", ["data", "view", "pointer", "numpy"])
def test_writes_that_no_version_counter_sees_are_seen(write: str) -> None:
    # case 76
    p = nn.Parameter(torch.zeros(1000))
    small = torch.zeros(3)
    state = {"p": p, "small": small}
    first = take(state)
    version = p._version
    with torch.no_grad():
        for t in (p, small):
            if write == "data":
                t.data[1] = 7
            elif write == "view":
                t.detach().view(-1)[1] = 7
            elif write == "pointer":
                ctypes.c_float.from_address(t.data_ptr() + 4).value = 7
            else:
                t.detach().numpy()[1] = 7
    second = take(state, previous=first)
    assert second.layout is first.layout
    back = rebuild(second)
    assert float(back["p"][1]) == 7
    assert float(back["small"][1]) == 7
    assert float(rebuild(first)["p"][1]) == 0
    assert version <= p._version


def test_saving_touches_nothing() -> None:
    # case 39
    state = trained()
    before = reference(state)
    grads = [p.grad.clone() for p in state["model"].parameters()]
    flags = [(p.requires_grad, p.grad_fn, p.is_leaf) for p in state["model"].parameters()]
    versions = [p._version for p in state["model"].parameters()]
    training = [m.training for m in state["model"].modules()]
    taken = take(state)
    take(state, previous=taken).release()
    assert_same(reference(state), before)
    parameters = list(state["model"].parameters())
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, grads, strict=True))
    assert [(p.requires_grad, p.grad_fn, p.is_leaf) for p in parameters] == flags
    assert [p._version for p in parameters] == versions
    assert [m.training for m in state["model"].modules()] == training
    assert_same(without_own(rebuild(taken)), before)


def test_rebuilt_values_are_nobodys_memory() -> None:
    # case 44
    state = trained()
    taken = take(state)
    back = rebuild(taken)
    expected = reference(state)
    first, second = trained(0), trained(0)
    first["optimizer"].load_state_dict(back["optimizer"])
    first["model"].load_state_dict(back["model"])
    second["model"].load_state_dict(back["model"])
    advance(first)
    assert_same(reference(state), expected)
    assert same(second["model"][0].weight, expected["model"]["0.weight"])


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor, torch.optim.LBFGS,
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_continue_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    # case 37
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(20, 20)
        return model, make(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = build()
    for i in range(3):
        step(model, optimizer, i)
    back = rebuild(take({"m": model, "o": optimizer}))
    step(model, optimizer, 3)
    twin, twin_optimizer = build()
    twin.load_state_dict(back["m"])
    twin_optimizer.load_state_dict(back["o"])
    step(twin, twin_optimizer, 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert bits(a) == bits(b)


def test_every_scheduler_of_torch() -> None:
    # case 32, case 156
    lr = torch.optim.lr_scheduler
    makers: list[Callable[[Any], Any]] = [
        lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.9),
        lambda o: lr.StepLR(o, 2), lambda o: lr.MultiStepLR(o, [1, 3, 3]),
        lr.ConstantLR, lr.LinearLR, lambda o: lr.ExponentialLR(o, 0.9),
        lambda o: lr.CosineAnnealingLR(o, 5), lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
        lr.PolynomialLR, lambda o: lr.CyclicLR(o, 0.1, 0.2), lambda o: lr.OneCycleLR(o, 1.0, 20),
        lr.ReduceLROnPlateau,
        lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.StepLR(o, 2)], [2]),
        lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.StepLR(o, 2)]),
    ]  # fmt: skip
    for make in makers:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        expected = reference(scheduler)
        assert_same(rebuild(take({"s": scheduler}))["s"], expected)


# layout reuse ---------------------------------------------------------------------------------


def test_an_unchanged_form_keeps_the_layout_object() -> None:
    # case 168
    state = {**trained(), "meta": {"epoch": 1, "names": ["a", "b"]}, "t": torch.zeros(1000)}
    first = take(state, rng=True)
    advance(state)
    state["meta"]["epoch"] = 2
    state["meta"]["names"] = ["c", "d", "e"]
    state["t"] = torch.ones(1000)
    second = take(state, rng=True, previous=first)
    assert second.layout is first.layout
    assert_same(without_own(rebuild(second)), reference(state))


def change_shape(state: dict[str, Any]) -> None:
    state["t"] = torch.zeros(999)


def change_stride(state: dict[str, Any]) -> None:
    state["t"] = torch.zeros(25, 40).t()[:, :]


def change_dtype(state: dict[str, Any]) -> None:
    state["t"] = torch.zeros(1000, dtype=torch.int32)


def change_grad(state: dict[str, Any]) -> None:
    state["t"].requires_grad_()


def change_type(state: dict[str, Any]) -> None:
    state["t"] = nn.Parameter(state["t"], requires_grad=False)


def change_key(state: dict[str, Any]) -> None:
    state["renamed"] = state.pop("t")


def change_order(state: dict[str, Any]) -> None:
    state["meta"] = {"names": ["a"], "epoch": 1}


def change_kind(state: dict[str, Any]) -> None:
    state["meta"]["epoch"] = torch.tensor(1)


def change_nesting(state: dict[str, Any]) -> None:
    state["meta"]["names"] = [["a"]]


def change_container(state: dict[str, Any]) -> None:
    state["pair"] = list(state["pair"])


def change_object(state: dict[str, Any]) -> None:
    state["model"] = nn.Sequential(nn.Linear(40, 40))
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())


def change_alias(state: dict[str, Any]) -> None:
    state["twin"] = state["t"]


def change_untie(state: dict[str, Any]) -> None:
    state["tied"] = state["weight"].clone()


def change_overlap(state: dict[str, Any]) -> None:
    state["other"] = state["weight"][:500]


def change_conj(state: dict[str, Any]) -> None:
    state["complex"] = state["complex"].conj()


CHANGES = [value for name, value in sorted(globals().items()) if name.startswith("change_")]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_every_change_of_form_is_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    # case 3, case 28, case 50
    weight = torch.randn(1000)
    state = {
        **trained(), "t": torch.zeros(1000), "meta": {"epoch": 1, "names": ["a"]},
        "pair": (torch.ones(2), 5), "weight": weight, "tied": weight, "twin": torch.zeros(1000),
        "other": torch.zeros(500), "complex": torch.zeros(80, dtype=torch.complex64),
    }  # fmt: skip
    first = take(state)
    change(state)
    second = take(state, previous=first)
    assert second.layout is not first.layout
    assert second.layout == take(state).layout
    assert_same(without_own(rebuild(second)), reference(state))


def test_storages_that_move_between_saves_are_read_anew() -> None:
    # case 50
    state = trained()
    first = take(state)
    for p in state["model"].parameters():
        p.data = p.data.clone() + 1
    for entry in state["optimizer"].state.values():
        for key in entry:
            entry[key] = entry[key].clone() * 2
    second = take(state, previous=first)
    assert second.layout is first.layout
    assert_same(without_own(rebuild(second)), reference(state))


def test_another_chunk_size_is_another_layout() -> None:
    first = take({"t": torch.zeros(5000)})
    second = take({"t": torch.zeros(5000)}, previous=first, chunk_bytes=8192)
    assert second.layout.extents[0].chunk_bytes == 8192


def test_wrapping_a_module_changes_paths_only() -> None:
    # case 147
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    plain, wrapped = take({"m": model}), take({"m": nn.DataParallel(model)})
    assert [p.replace("module.", "") for p in wrapped.layout.paths] == list(plain.layout.paths)
    assert wrapped.layout.extents == plain.layout.extents
    assert {k: bytes(v.tolist()) for k, v in memory_of(plain).items()} == {
        k: bytes(v.tolist()) for k, v in memory_of(wrapped).items()
    }


def test_change_table_keys_hold_no_address() -> None:
    # case 50
    def keys(state: dict[str, Any]) -> list[str]:
        taken = take(state)
        return [taken.sources[e].key for e in sorted(taken.sources)]

    first, second = keys(trained()), keys(trained())
    assert first == second
    assert len(set(first)) == len(first)
    assert keys({"t": torch.zeros(1000)}) != keys({"t": torch.zeros(1000, dtype=torch.int32)})


# buffers --------------------------------------------------------------------------------------


def test_private_copies_reuse_released_buffers() -> None:
    # case 72, case 168
    pool = BufferPool()
    state = {"a": torch.randn(5000), "b": torch.randn(300)[::2], "c": torch.zeros(100_000)}
    first = take(state, pool=pool)
    address = first.sources[0].data.untyped_storage().data_ptr()
    second = take(state, pool=pool, previous=first)
    assert second.sources[0].data.untyped_storage().data_ptr() != address
    expected = rebuild(second)
    first.release()
    first.release()
    assert not first.sources
    state["a"] = torch.zeros(5000)
    third = take(state, pool=pool, previous=second)
    assert third.sources[0].data.untyped_storage().data_ptr() == address
    assert same(rebuild(second)["a"], expected["a"])
    assert not rebuild(third)["a"].any()


def test_a_released_capture_holds_no_training_memory() -> None:
    """Keeping the previous capture must not keep a deleted model alive."""
    state = trained()
    taken = take(state)
    held = [weakref.ref(source.data) for source in taken.sources.values()]
    weights = [weakref.ref(p) for p in state["model"].parameters()]
    taken.release()
    assert not any(ref() is not None for ref in held)
    state.clear()
    gc.collect()
    assert not any(ref() is not None for ref in weights)


# refusals -------------------------------------------------------------------------------------


def resized() -> Tensor:
    t = torch.zeros(600)
    t.untyped_storage().resize_(0)
    return t


def resized_view() -> Tensor:
    t = torch.zeros(600)
    view = t[100:]
    t.untyped_storage().resize_(400)
    return view


def fake() -> Tensor:
    with torch._subclasses.FakeTensorMode():
        return torch.zeros(3)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


class Subclass(Tensor):
    pass


def wrapper() -> Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.zeros(3), torch.ones(3))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.zeros(3, device="meta"), "materialise"),
    "meta-parameter": (lambda: nn.Linear(2, 2, device="meta"), "materialise"),
    "fake": (fake, "FakeTensor"),
    "resized": (resized, "resized to 0"),
    "resized-view": (resized_view, "resized to 400"),
    "quantized": (quantized, "int_repr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "unbind",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "to_dense"),
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "as_subclass"),
    "parameter-subclass": (
        lambda: nn.Parameter(torch.ones(3).as_subclass(Subclass)), "as_subclass",
    ),
    "wrapper": (wrapper, "__tensor_flatten__"),
    "frozen-subclass": (
        lambda: nn.Parameter(torch.ones(3).as_subclass(Subclass), requires_grad=False),
        r"if p\.requires_grad",
    ),
    "frozen-wrapper": (
        lambda: nn.Parameter(wrapper(), requires_grad=False), r"if p\.requires_grad",
    ),
    "uninitialized": (lambda: nn.LazyLinear(3), "forward pass"),
    "zero": (lambda: torch._efficientzerotensor(3), "clone"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*nested tensors", "ignore:.*TypedStorage")
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_tensors_without_plain_memory_are_refused_by_key(name: str, small: bool) -> None:
    # case 20, case 22, case 78
    make, word = REFUSED[name]
    state: dict[str, Any] = {"good": torch.ones(3), "bad": [torch.ones(2)], "last": torch.ones(700)}
    good = take(state)
    state["bad"] = [torch.ones(2), {"x": make()}] if small else [make()]
    for previous in (None, good):
        with pytest.raises(InvalidInputError, match=word) as caught:
            take(state, previous=previous)
        assert caught.value.context["path"].startswith("bad/1/x" if small else "bad/0")
        assert caught.value.kind == "unsupported-value"
        assert caught.value.hint


def test_distributed_tensors_are_refused() -> None:
    # case 20
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

        tensor = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(InvalidInputError, match="to_local"):
            take({"t": tensor})
        with pytest.raises(InvalidInputError, match="to_local"):
            take({"t": nn.Parameter(tensor)})
    finally:
        dist.destroy_process_group()


def test_tensors_inside_a_transform_are_refused() -> None:
    # case 20
    def inside(x: Tensor) -> Tensor:
        with pytest.raises(InvalidInputError, match=r"torch\.func"):
            take({"x": x})
        return x

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(lambda x: inside(x).sum())(torch.ones(3))


def test_a_storage_resized_after_the_first_save_is_refused() -> None:
    # case 78
    for size in (3, 5000):
        p = nn.Parameter(torch.zeros(size + 10)[10:])
        first = take({"p": p})
        p.untyped_storage().resize_(0)
        with pytest.raises(InvalidInputError, match="'p'"):
            take({"p": p}, previous=first)


def test_bad_values_are_refused_again_with_a_known_form() -> None:
    # case 32
    state: dict[str, Any] = {"s": {"f": None}}
    first = take(state)
    state["s"]["f"] = lambda: 1
    with pytest.raises(InvalidInputError, match="s/f"):
        take(state, previous=first)


# many small tensors -----------------------------------------------------------------------------


def test_many_small_tensors_are_cheap() -> None:
    # case 16, case 168
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 1025, (20_000,), generator=generator).tolist()
    state = {"d": {f"t{i}": torch.full((n,), float(i)) for i, n in enumerate(sizes)}}
    pool = BufferPool()
    first = take(state, pool=pool)
    assert len({s.data.untyped_storage().data_ptr() for s in first.sources.values()}) == 1
    first.release()
    state["d"]["t7"].add_(1)
    started = time.perf_counter()
    second = take(state, previous=first, pool=pool)
    per_tensor = (time.perf_counter() - started) / len(sizes)
    print(f"{per_tensor * 1e6:.1f} microseconds per tensor")
    assert second.layout is first.layout
    back = rebuild(second)["d"]
    assert all(same(back[key], tensor) for key, tensor in state["d"].items())


def unsorted_columns() -> Tensor:
    crow, col = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1])
    return torch.sparse_csr_tensor(crow, col, torch.ones(3), (2, 2), check_invariants=False)


def falsely_coalesced() -> Tensor:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 0, 1]]), torch.ones(3), (3,))
    return tensor._coalesced_(True)


def outside() -> Tensor:
    indices = torch.tensor([[0, 7]])
    return torch.sparse_coo_tensor(indices, torch.ones(2), (3,), check_invariants=False)


@pytest.mark.filterwarnings("ignore:.*Sparse")
@pytest.mark.parametrize("make", [unsorted_columns, falsely_coalesced, outside])
def test_sparse_tensors_that_no_load_would_take_are_refused(make: Callable[[], Tensor]) -> None:
    # case 19: the fault was first seen at load, which took the step for damaged
    state: dict[str, Any] = (
        {"s": {"t": make().to_dense().to_sparse(layout=make().layout)}}
        if (make is unsorted_columns)
        else {"s": {"t": torch.eye(3).to_sparse()}}
    )
    good = take(state)
    state["s"]["t"] = make()
    for previous in (None, good):
        with pytest.raises(InvalidInputError, match="indices") as caught:
            take(state, previous=previous)
        assert caught.value.context["path"] == "s/t"


def test_more_dimensions_than_a_manifest_holds_are_refused() -> None:
    take({"t": torch.zeros([1] * 64)})
    with pytest.raises(InvalidInputError, match="65 dimensions") as caught:
        take({"t": torch.zeros([1] * 65)})
    assert caught.value.context["path"] == "t"


class Refusing(Tensor):
    """As sharded tensors do: hardly any attribute may be asked for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} is not supported")


def test_subclasses_that_answer_nothing_are_refused_by_key() -> None:
    # case 20
    with pytest.raises(InvalidInputError, match="Refusing") as caught:
        take({"a": {"t": torch.ones(3).as_subclass(Refusing)}})
    assert caught.value.context["path"] == "a/t"


def test_no_save_without_real_memory() -> None:
    # case 22: fake memory in place of copies
    state = {"m": nn.Linear(30, 30)}
    for previous in (None, take(state)):
        with torch._subclasses.FakeTensorMode(), pytest.raises(StateError, match="FakeTensor"):
            take(state, previous=previous)


class Failing:
    def __init__(self) -> None:
        self.fails = True

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("not consolidated")
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_an_object_that_gives_no_state_is_named() -> None:
    # case 32
    failing = Failing()
    failing.fails = False
    state = {"a": [1, {"b": failing}]}
    good = take(state)
    failing.fails = True
    for previous in (None, good):
        with pytest.raises(StateError, match="not consolidated") as caught:
            take(state, previous=previous)
        assert caught.value.kind == "state-failed"
        assert caught.value.context["path"] == "a/1/b"
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_state_of_a_parameter_that_was_taken_out_is_named() -> None:
    """PyTorch says `KeyError: 140057004469504`."""
    # case 45
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    bias = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(StateError, match=r"of shape \[2\].*delete optimizer.state"):
        take({"model": module, "optimizer": optimizer})
    del optimizer.state[bias]
    take({"model": module, "optimizer": optimizer})


class Attributes(dict[str, Any]):
    """Whose items are its attributes, without an AttributeError for those that it lacks."""

    __getattr__ = dict.__getitem__


class Broken:
    @property
    def state_dict(self) -> Any:
        raise RuntimeError("not ready")

    @property
    def load_state_dict(self) -> Any:
        raise RuntimeError("not ready")


def test_what_raises_for_an_attribute_is_named() -> None:
    """Prevents: `KeyError: 'state_dict'`, which tells neither where nor what to do."""
    # case 32
    settings = Attributes(lr=0.1)
    for state, path in (({"a": [settings]}, "a/0"), ({"a": {"b": [settings, 1]}}, "a/b/0")):
        with pytest.raises(InvalidInputError, match=r"subclass of dict.*save dict") as caught:
            take(state)
        assert caught.value.context["path"] == path
    with pytest.raises(StateError, match="'a' gives no state_dict: RuntimeError: not ready"):
        take({"a": Broken()})


@pytest.mark.parametrize(
    ("limit", "state"),
    [("MAX_LEAVES", {i: i for i in range(60)}), ("MAX_STRUCTURE_BYTES", {"k" * 60: 1, "l": 2})],
)
def test_more_than_a_manifest_holds_is_refused_where_it_is(
    limit: str, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million values in dicts were saved, and no load took the step."""
    monkeypatch.setattr(tree, limit, 50)
    with pytest.raises(InvalidInputError, match="limit 50") as caught:
        take({"a": 1, "seen": {"ids": state}})
    assert caught.value.context["path"] == "seen/ids"
    assert caught.value.hint


@pytest.mark.parametrize("leaf", [1, torch.ones(1), {}])
def test_containers_that_are_met_again_and_again_are_refused_in_time(
    leaf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty dicts that each hold the next one twice kept a save busy until memory was out."""
    monkeypatch.setattr(tree, "MAX_LEAVES", 50)
    monkeypatch.setattr(tree, "MAX_STRUCTURE_BYTES", 1000)
    state = leaf
    for _ in range(12):
        state = {"a": state, "b": state}
    for use in (take, check_state):
        with pytest.raises(InvalidInputError, match=r"limit (50|1000)") as caught:
            use({"x": state})
        found = re.search(r"(\d+) (or more|bytes)", str(caught.value))
        assert found
        assert int(found[1]) < 1100


def test_deep_keys_in_deep_containers_are_refused() -> None:
    key: Any = 1
    state: Any = 1
    for _ in range(58):
        key = (key,)
    for _ in range(58):
        state = {"x": state, key: 1}
    with pytest.raises(InvalidInputError, match="nest"):
        take({"a": state})
    key = Deep(None)
    for _ in range(500):
        key = Deep(key)
    with pytest.raises(InvalidInputError, match="key") as caught:
        take({"a": {"b": {key: 1}}})
    assert caught.value.context["path"] == "a/b"


class Deep(NamedTuple):
    inner: Any


def test_another_rule_of_what_is_live_keeps_the_layout() -> None:
    """A training without an optimizer's step so far, or after a restore, has read all in place."""

    def everything(path: str, tensor: Tensor) -> bool:
        return True

    state = trained()
    state["tied"] = {"part": state["model"][0].weight[:20], "loose": torch.randn(600)}
    before = take(state, live=everything)
    assert live_paths(before) > live_paths(take(state)) > set()
    for live in (None, everything, lambda path, tensor: "weight" in path):
        fresh, again = take(state, live=live), take(state, live=live, previous=before)
        assert again.layout is before.layout
        assert live_paths(again) == live_paths(fresh)
        assert {e: source.still for e, source in again.sources.items()} == {
            e: source.still for e, source in fresh.sources.items()
        }
        before = again


def test_tensors_alike_are_thought_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of very many small tensors is mostly the work that is done for each."""
    counts: dict[str, int] = {}

    def counted(where: Any, name: str) -> None:
        real = getattr(where, name)

        def count(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **options)

        monkeypatch.setattr(where, name, count)

    counted(spans, "form")
    counted(spans, "cut")
    counted(tree, "MappingNode")
    counted(tree, "encode_key")
    moments: dict[Any, Any] = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.randn(7), "exp_avg_sq": torch.randn(7)}
        for i in range(500)
    }
    state = {"state": moments}
    expected = {"form": 2, "MappingNode": 4, "encode_key": 2 + 500 + 3}
    first = take(state)
    assert counts == expected
    for entry in moments.values():
        entry["step"] += 1
    second = take(state, previous=first)
    assert second.layout is first.layout
    assert counts == expected
    assert second.inline != first.inline
    entry = moments[499]
    moments[499] = {"exp_avg": entry["exp_avg"], "step": entry["step"], "exp_avg_sq": torch.ones(7)}
    third = take(state, previous=second)
    assert third.layout.paths != second.layout.paths


@pytest.mark.parametrize("live", [None, lambda path, tensor: True])
@pytest.mark.parametrize("numel", [3, 300])
def test_what_was_made_of_many_tensors_wakes_no_collector(live: Any, numel: int) -> None:
    """Objects that the garbage collector tracks are visited again and again while many are made."""
    state = {"t": {f"layer.{i}.weight": torch.randn(numel) for i in range(2000)}}
    take(state)  # PyTorch keeps an object for each storage that was asked for
    gc.collect()
    before = len(gc.get_objects())
    taken = take(state, live=live)
    gc.collect()
    assert len(gc.get_objects()) - before < 500
    taken.release()
