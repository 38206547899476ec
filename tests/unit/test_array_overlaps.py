"""Prevents: arrays that share memory with others, or with themselves, holding wrong values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from restoring import Keeper, back

SIZES = [600, 60_000]  # encoded as values, and kept as tensors


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_what_shares_memory_and_fits_is_written_in_place(
    keeper: Keeper, size: int, low_memory: bool
) -> None:
    def make(array: np.ndarray[Any, Any]) -> dict[str, Any]:
        parts = [array[::-2], {"middle": array[100:300].reshape(10, 20).T}]
        return {"a": array, "parts": parts, "t": torch.from_numpy(array), "s": array.view("V8")}

    keeper.save(make(np.arange(float(size))), 1)
    array = np.zeros(size)
    state = make(array)
    kept = dict(state)
    back(keeper, state, low_memory=low_memory)
    values = make(np.arange(float(size)))
    assert np.array_equal(state["a"], values["a"])
    assert np.array_equal(state["parts"][0], values["parts"][0])
    assert torch.equal(state["t"], values["t"])
    assert state["t"] is kept["t"]
    if not low_memory:  # what is streamed into a tensor is not known before
        assert all(state[key] is kept[key] for key in ("a", "parts"))
        assert np.shares_memory(state["parts"][1]["middle"], array)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_what_does_not_fit_is_replaced(keeper: Keeper, size: int, low_memory: bool) -> None:
    # case 3: the last one written would win silently
    saved = {
        "a": np.full(size, 1.0),
        "b": np.full(size, 2.0),
        "t": torch.full((size,), 3.0, dtype=torch.float64),
        "rows": np.arange(4.0 * size).reshape(4, size),
        "apart": np.full(5, 5.0),
    }
    keeper.save(saved, 1)
    memory = np.zeros(2 * size)
    row = np.zeros(size)
    apart = np.zeros(5)
    state = {
        "a": memory[:size], "b": memory[size // 2 : size // 2 + size],
        "t": torch.from_numpy(memory[-size:]), "rows": as_strided(row, (4, size), (0, 8)),
        "apart": apart,
    }  # fmt: skip
    tensor = state["t"]
    back(keeper, state, low_memory=low_memory)
    for key, value in saved.items():
        assert np.array_equal(np.asarray(state[key]), np.asarray(value)), key
    assert state["t"] is tensor
    assert state["apart"] is apart


def test_views_that_are_lazy_and_numbers_of_no_bytes(keeper: Keeper) -> None:
    z = np.zeros(400, np.complex128)
    saved = {
        "z": np.arange(400) * (1 + 2j), "c": torch.arange(400.0).to(torch.complex128),
        "none": np.zeros(3, "S0"), "nothing": np.zeros((0, 3)), "scalar": np.array(7.0),
    }  # fmt: skip
    keeper.save(saved, 1)
    scalar = np.array(0.0)
    state = {
        "z": z, "c": torch.from_numpy(z).conj(), "none": np.zeros(3, "S0"),
        "nothing": np.zeros((0, 3)), "scalar": scalar,
    }  # fmt: skip
    back(keeper, state)
    assert np.array_equal(state["z"], saved["z"])
    assert torch.equal(state["c"], saved["c"])
    assert state["scalar"] is scalar
    assert scalar == 7
