"""Prevents: live tensors that share memory holding something else than what was saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from captured import same
from deltackpt_store.errors import MismatchError
from restoring import Keeper, back
from torch import nn


def windows() -> dict[str, torch.Tensor]:
    """Rows that begin three elements after each other."""
    return {"w": torch.arange(400.0).unfold(0, 8, 3)}


def windows_with_gaps() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(999.0)[::2].unfold(0, 8, 1)}


def windows_and_base() -> dict[str, torch.Tensor]:
    base = torch.arange(4000.0)
    return {"w": base.unfold(0, 8, 3), "base": base, "middle": base[100:300]}


def conjugate_parts() -> dict[str, torch.Tensor]:
    z = torch.complex(torch.arange(600.0), -torch.arange(600.0))
    return {"imag": z.imag, "negative": z.conj().imag}


def transposed_with_gaps() -> dict[str, torch.Tensor]:
    base = torch.arange(4000.0).view(40, 100)[:, ::3]
    return {"a": base, "b": base.t(), "bits": base.view(torch.int32)}


def unaligned() -> dict[str, torch.Tensor]:
    raw = bytearray(range(256)) * 20
    return {
        "a": torch.frombuffer(raw, dtype=torch.float32, offset=1, count=600),
        "b": torch.frombuffer(raw, dtype=torch.float64, offset=3, count=400),
    }


def buffer_of_parameters() -> dict[str, torch.Tensor]:
    flat = torch.arange(900.0)
    return {"flat": flat, "a": flat[:300].view(10, 30), "b": flat[200:500].view(30, 10).t()}


def hankel() -> dict[str, torch.Tensor]:
    return {"h": torch.arange(3999.0).as_strided((2000, 2000), (1, 1))}


def expanded_lazily() -> dict[str, torch.Tensor]:
    row = torch.complex(torch.arange(600.0), -torch.arange(600.0)).conj()
    return {"conj": row.expand(4, 600), "negative": row.imag.unsqueeze(1).expand(600, 3)}


def expanded_without_elements() -> dict[str, torch.Tensor]:
    """Of strides by which the last element would lie before the first."""
    none = torch.arange(9.0)[:0]
    return {"every other": none[::2].expand(4, 0), "nested": none[::3].expand(7, 5, 0)}


OVERLAPPING = [
    hankel, expanded_lazily,
    windows, windows_with_gaps, windows_and_base, conjugate_parts, transposed_with_gaps, unaligned,
    buffer_of_parameters,
]  # fmt: skip


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("make", [*OVERLAPPING, expanded_without_elements])
def test_any_overlap_takes_back_what_was_saved(
    keeper: Keeper, make: Callable[[], dict[str, torch.Tensor]], separate: bool, low_memory: bool
) -> None:
    # case 2, case 5, case 7: such a state was saved, and could never be restored in place
    state = {"t": make()}
    expected = {key: t.clone() for key, t in state["t"].items()}
    keeper.save({"t": expected} if separate else state, 1)
    tensors = list(state["t"].items())
    for _, tensor in tensors:
        # the physical bytes of its storage, by no view of ours
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(7)
    back(keeper, state, low_memory=low_memory)
    for key, tensor in tensors:
        assert state["t"][key] is tensor
        assert same(tensor, expected[key]), key


@pytest.mark.parametrize("low_memory", [False, True])
def test_what_lies_between_windows_is_left_alone(keeper: Keeper, low_memory: bool) -> None:
    base = torch.arange(9999.0)
    state = {"t": {"w": base[::2].unfold(0, 8, 1)}}
    keeper.save(state, 1)
    base.fill_(-1)
    back(keeper, state, low_memory=low_memory)
    assert base[1::2].eq(-1).all()
    assert base[::2].equal(torch.arange(9999.0)[::2])


@pytest.mark.parametrize("make", OVERLAPPING)
def test_what_overlapping_memory_cannot_hold_is_refused(
    keeper: Keeper, make: Callable[[], dict[str, torch.Tensor]]
) -> None:
    # case 3: the last one written would win silently
    state = {"t": make()}
    keeper.save({"t": {key: torch.randn(t.shape).to(t.dtype) for key, t in state["t"].items()}}, 1)
    before = {key: t.clone() for key, t in state["t"].items()}
    with pytest.raises(MismatchError, match=r"memory|expanded"):
        back(keeper, state)
    for key, tensor in state["t"].items():
        assert same(tensor, before[key]), key


@pytest.mark.parametrize("low_memory", [False, True])
def test_without_strict_one_of_two_tied_values_is_told_and_left(
    keeper: Keeper, low_memory: bool
) -> None:
    # case 146: the report named the one that had won
    a, b = torch.randn(700), torch.randn(700)
    plain, model = torch.zeros(700), nn.Module()
    model.a = nn.Parameter(torch.zeros(700))
    model.b = model.a
    saved = nn.Module()
    saved.a, saved.b = nn.Parameter(a), nn.Parameter(b)
    keeper.save({"m": saved, "t": {"a": a, "b": b}}, 1)
    target = {"m": model, "t": {"a": plain, "b": plain}}
    done = back(keeper, target, strict=False, low_memory=low_memory)
    assert {mismatch.path for mismatch in done.mismatched} == {"m/b", "t/b"}
    assert set(done.loaded) == {"m/a", "t/a"}
    assert same(model.a, nn.Parameter(a))
    assert target["t"]["b"] is plain
    assert same(plain, a)
