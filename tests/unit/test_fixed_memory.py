"""Prevents: a restore that ends the process, as it writes into a file that is mapped read-only."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captured import same
from deltackpt_store.errors import MismatchError
from restoring import Keeper, back
from torch import nn

from deltackpt.fixed_memory import FixedMemory


def mapped(path: Path, values: np.ndarray[Any, Any], mode: Any = "r") -> torch.Tensor:
    np.save(path, values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to
        return torch.from_numpy(np.load(path, mmap_mode=mode))


class Hooked(nn.Embedding):
    """One that is loaded by its own load_state_dict."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign)


def embedding(weight: torch.Tensor, kind: type[nn.Embedding]) -> nn.Sequential:
    table = kind(*weight.shape)
    table.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(table, nn.Linear(8, 2))


VALUES = np.arange(8000, dtype=np.float32).reshape(1000, 8)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, Hooked])
def test_a_frozen_table_in_a_mapped_file_is_compared(
    keeper: Keeper, tmp_path: Path, kind: type[nn.Embedding], low_memory: bool
) -> None:
    model = embedding(mapped(tmp_path / "table.npy", VALUES), kind)
    keeper.save({"model": model}, 1)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model[1].parameters():
        parameter.data.zero_()
    done = back(keeper, {"model": model}, low_memory=low_memory)
    assert "model/0.weight" in done.loaded
    assert all(same(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [nn.Embedding, Hooked])
def test_other_values_than_the_file_has_are_a_mismatch(
    keeper: Keeper, tmp_path: Path, kind: type[nn.Embedding]
) -> None:
    keeper.save({"model": embedding(torch.from_numpy(VALUES + 1), kind)}, 1)
    model = embedding(mapped(tmp_path / "table.npy", VALUES), kind)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(MismatchError, match=r"model/0\.weight: other values .* mapped read-only"):
        back(keeper, {"model": model})
    assert all(same(value, before[key]) for key, value in model.state_dict().items())
    done = back(keeper, {"model": model}, strict=False)
    assert "model/1.weight" in done.loaded
    assert "model/0.weight" not in done.loaded


def test_plain_tensors_in_mapped_files(keeper: Keeper, tmp_path: Path) -> None:
    keeper.save({"t": {"table": torch.from_numpy(VALUES), "n": 3}}, 1)
    table = mapped(tmp_path / "table.npy", VALUES)
    state = {"t": {"table": table, "n": 0}}
    back(keeper, state)
    assert state["t"] == {"table": table, "n": 3}
    other = {"t": {"table": mapped(tmp_path / "other.npy", VALUES + 1)[:, :8], "n": 0}}
    with pytest.raises(MismatchError, match="t/table: other values"):
        back(keeper, other)
    assert other["t"]["n"] == 0


def test_files_that_may_be_written_are(keeper: Keeper, tmp_path: Path) -> None:
    keeper.save({"t": torch.from_numpy(VALUES)}, 1)
    tensors = {mode: mapped(tmp_path / f"{mode}.npy", VALUES + 1, mode) for mode in ("r+", "c")}
    for mode, tensor in tensors.items():
        back(keeper, {"t": tensor})
        assert torch.equal(tensor, torch.from_numpy(VALUES))
        assert np.array_equal(np.load(tmp_path / f"{mode}.npy"), VALUES) is (mode == "r+")


def test_which_memory_is_fixed(tmp_path: Path) -> None:
    table = mapped(tmp_path / "table.npy", VALUES)
    memory = FixedMemory()
    for tensor in (table, table[3:], table[-1, -1], table.t()[1::2], table.expand(2, 1000, 8)):
        assert memory.holds(tensor)
    for tensor in (table[:0], table.clone(), torch.ones(()), table.to("meta"), torch.ones(10**6)):
        assert not memory.holds(tensor)
