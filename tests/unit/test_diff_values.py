"""`diff --values`: figures of elements, computed again with torch on the saved tensors."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from deltackpt_store import ChunkReader
from deltackpt_store.errors import CorruptionError, StorageError
from deltackpt_tools import chunk_rows, numeric, tensor_bytes
from deltackpt_tools.blaming import NotFinite, blame
from deltackpt_tools.changes import ValueStats
from deltackpt_tools.diffing import diff
from restoring import save_state
from small_store import CHUNK, SmallStore, pattern

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
          torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]  # fmt: skip
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.uint16, torch.uint32, torch.uint64]  # fmt: skip


def stats_of(path: Path, old: torch.Tensor, new: torch.Tensor, chunk: int = 4096) -> ValueStats:
    save_state(path, {"w": old}, step=1, chunk=chunk)
    save_state(path, {"w": new}, step=2, chunk=chunk)
    (change,) = diff(path, "@1", "@2", only=["w"], values=True).tensors
    assert change.values is not None
    return change.values


def changed_chunks(old: torch.Tensor, new: torch.Tensor, chunk: int) -> torch.Tensor:
    """For each element whether its chunk differs in any byte."""
    a, b = (t.contiguous().view(torch.uint8).reshape(-1) for t in (old, new))
    flags = [(a[i : i + chunk] != b[i : i + chunk]).any() for i in range(0, len(a), chunk)]
    per = chunk // old.element_size()
    return torch.stack(flags).repeat_interleave(per)[: old.numel()]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    old = (torch.randn(9000, dtype=torch.float64) * 3).to(dtype)
    new = old.clone()
    where = torch.cat([torch.arange(10, 200, 7), torch.tensor([8999])])
    new[where] = (new[where].double() * 1.5 + 0.25).to(dtype)
    found = stats_of(tmp_path / "s", old, new)
    width = old.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    x, y = old.double(), new.double()
    read = changed_chunks(old, new, 4096)
    assert found.elements == 9000
    assert found.changed_elements == int((old.view(bits) != new.view(bits)).sum())
    assert found.max_difference == float((y - x).abs().max())
    assert found.rms == pytest.approx(float((y - x).square().mean().sqrt()), rel=1e-12)
    expected = float((y - x).norm() / x[read].norm())
    assert found.relative_update == pytest.approx(expected, rel=1e-12)
    assert (found.new_nan, found.new_inf) == (0, 0)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """Converted to floats, counters beyond 2**53 that differ by one would look equal."""
    old = torch.arange(9000).remainder(2).to(dtype)
    new = old.clone()
    new[5] = 1 - int(old[5])
    if dtype in (torch.int64, torch.uint64):
        old[7], new[7] = 2**62 + 1, 2**62 + 4
    found = stats_of(tmp_path / "s", old, new)
    large = dtype in (torch.int64, torch.uint64)
    assert found.changed_elements == (2 if large else 1)
    assert found.max_difference == (3.0 if large else 1.0)
    assert found.rms == pytest.approx(((9 + 1 if large else 1) / 9000) ** 0.5)
    assert (found.new_nan, found.new_inf) == (0, 0)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex_differences_are_distances(tmp_path: Path, dtype: torch.dtype) -> None:
    old = torch.complex(torch.ones(2000), torch.zeros(2000)).to(dtype)
    new = old.clone()
    new[3] = complex(1 + 3, 4)
    found = stats_of(tmp_path / "s", old, new)
    assert (found.changed_elements, found.max_difference) == (1, 5.0)


@pytest.mark.parametrize("dtype", [*FLOATS[:6], torch.complex64], ids=str)
def test_what_stops_being_finite_is_counted_and_left_out(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """One NaN in a sum makes every figure NaN, and hides how far the others moved."""
    old = torch.zeros(9000).to(dtype)
    old[0] = float("nan")
    new = old.clone()
    new[[1, 2, 3]] = torch.tensor([float("nan")] * 3).to(dtype)
    new[4] = 1
    infinite = dtype not in (torch.float8_e4m3fn,)  # which has no infinity
    if infinite:
        new[5] = float("inf")
    found = stats_of(tmp_path / "s", old, new)
    assert (found.new_nan, found.new_inf) == (3, int(infinite))
    assert found.max_difference == 1.0
    assert found.changed_elements == 4 + int(infinite)


def test_a_changed_sign_of_zero_or_payload_of_nan_is_a_changed_element(tmp_path: Path) -> None:
    old = torch.zeros(2000)
    new = old.clone()
    new[1] = -0.0
    found = stats_of(tmp_path / "s", old, new)
    assert (found.changed_elements, found.max_difference) == (1, 0.0)


@pytest.mark.parametrize("how", ["transposed", "offset", "negative", "conjugate", "odd"])
def test_views_of_any_kind(tmp_path: Path, how: str) -> None:
    torch.manual_seed(2)
    base = torch.randn(60, 70, dtype=torch.complex64 if how == "conjugate" else torch.float32)
    other = base.clone()
    other[3, 5] += 2

    def view(t: torch.Tensor) -> torch.Tensor:
        if how == "transposed":
            return t.t()
        if how == "offset":
            return t[1:, :]
        if how == "negative":
            return torch._neg_view(t)
        if how == "conjugate":
            return t.conj()
        return t.reshape(-1)[1::3]

    new = view(other)
    expected = int((view(base) != new).sum())
    save_state(tmp_path / "s", {"w": view(base)}, step=1)
    save_state(tmp_path / "s", {"w": new}, step=2)
    tensors = diff(tmp_path / "s", "@1", "@2", only=["w"], values=True).tensors
    if not expected:
        assert not tensors  # bytes between its elements differ, it does not
        return
    assert tensors[0].values is not None
    assert tensors[0].values.changed_elements == expected == 1
    assert tensors[0].values.max_difference == pytest.approx(2.0)


@pytest.mark.parametrize("repeats", [3, 1 << 45])
def test_an_expanded_tensor_costs_what_is_stored_of_it(small: SmallStore, repeats: int) -> None:
    """Prevents: the elements of `torch.zeros(1).expand(10**12)` are counted one by one."""
    old = np.array([1, 2, 4, np.inf], np.float32)
    new = np.array([1, 4, np.nan, np.inf], np.float32)
    views = {"w": {"shape": (repeats, 4), "stride": (0, 1)}}
    first = small.save("main", 1, {"w": old}, views=views)
    small.save("main", 2, {"w": new}, views=views, parent=first)
    (change,) = diff(Path(small.path), "@1", "@2", values=True).tensors
    assert change.values is not None
    assert (change.values.elements, change.values.changed_elements) == (4 * repeats, 2 * repeats)
    assert (change.values.new_nan, change.values.max_difference) == (repeats, 2.0)
    assert change.values.rms == pytest.approx(1.0)
    (blamed,) = blame(small.store, "w", nan=True).tensors
    assert blamed.not_finite == NotFinite("main", 1, 1, 0, repeats)


def test_steps_cut_differently_are_compared_by_reading(tmp_path: Path) -> None:
    w = torch.randn(5000)
    save_state(tmp_path / "s", {"w": w, "v": w * 2}, step=1, chunk=4096)
    save_state(tmp_path / "s", {"w": w, "v": w * 3}, step=2, chunk=1000)
    kinds = {c.path: c.change for c in diff(tmp_path / "s", "@1", "@2").tensors}
    assert (kinds["w"], kinds["v"]) == ("unproven", "unproven")
    result = diff(tmp_path / "s", "@1", "@2", values=True, only=["w", "v"])
    assert [(c.path, c.change) for c in result.tensors] == [("v", "changed")]


def test_only_chunks_that_differ_are_read(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading whole checkpoints is what the manifest spares one."""
    old = pattern(40 * CHUNK // 4)
    new = old.copy()
    new[5 * CHUNK // 4] += 1
    new[-1] += 1
    first = small.save("main", 1, {"w": old, "same": pattern(9000, 3)})
    second = small.save("main", 2, {"w": new, "same": pattern(9000, 3)}, parent=first)
    asked: list[bytes] = []
    read = ChunkReader.read

    def spy(self: ChunkReader, requests: Any, threads: int | None = None) -> None:
        asked.extend(request[0] for request in requests)
        read(self, requests, threads)

    monkeypatch.setattr(ChunkReader, "read", spy)
    diff(small.store, first, second, values=True)
    ids = [small.store.snapshot(commit).chunks[0] for commit in (first, second)]
    assert sorted(asked) == sorted(ids[side][row].tobytes() for side in (0, 1) for row in (5, 39))


def test_memory_is_bounded_and_batches_join_up(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures must not depend on how the work was cut into batches and blocks."""
    old = pattern(50_000)
    new = (old * np.float32(1.01)).astype(np.float32)
    first = small.save("main", 1, {"w": old})
    second = small.save("main", 2, {"w": new}, parent=first)
    (whole,) = diff(small.store, first, second, values=True).tensors
    monkeypatch.setattr(chunk_rows, "BATCH", 3 * CHUNK)
    monkeypatch.setattr(numeric, "BLOCK", 1000)
    (pieces,) = diff(small.store, first, second, values=True).tensors
    assert whole.values is not None
    assert pieces.values is not None
    assert pieces.values.changed_elements == whole.values.changed_elements
    assert pieces.values.rms == pytest.approx(whole.values.rms, rel=1e-9)
    assert pieces.values.relative_update == pytest.approx(0.01, rel=1e-3)


def test_progress_reaches_its_total(small: SmallStore) -> None:
    first = small.save("main", 1, {"w": pattern(9000, 1), "b": pattern(10, 1)})
    second = small.save("main", 2, {"w": pattern(9000, 2), "b": pattern(10, 2)}, parent=first)
    seen: list[tuple[int, int | None]] = []
    diff(small.store, first, second, values=True, progress=lambda *a: seen.append(a))
    assert seen[-1] == (36040, 36040)


def test_without_the_extra_bits_are_compared_and_the_way_out_is_named(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    numeric.numeric_dtype.cache_clear()
    views = {"w": {"dtype": "bfloat16"}}
    small.save("main", 1, {"w": np.zeros(2000, np.uint16)}, views=views)
    small.save("main", 2, {"w": np.ones(2000, np.uint16)}, views=views)
    (change,) = diff(small.store, "@1", "@2", values=True).tensors
    assert change.values == ValueStats(2000, 2000, None, None, None, None, None)
    output = run("diff", small.path, "@1", "@2", "--values").output
    assert "pip install 'deltackpt[inspect]'" in output
    numeric.numeric_dtype.cache_clear()


def test_a_damaged_chunk_is_no_figure(small: SmallStore) -> None:
    first = small.save("main", 1, {"w": pattern(9000, 1)})
    second = small.save("main", 2, {"w": pattern(9000, 2)}, parent=first)
    pack = next(Path(small.path).glob("packs/*/*-00000002.pack"))
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptionError) as caught:
        diff(small.store, first, second, values=True)
    assert caught.value.context["tensors"] == ("w",)
    # case 112: no command named the tensor, only the chunk
    for arguments in (["diff", "--values"], ["blame", "w", "--nan"]):
        result = run(arguments[0], small.path, *arguments[1:])
        assert result.exit_code == 12
        assert "damaged in 'w': " in result.output


def test_no_folder_for_temporary_files_is_needed_but_for_large_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    old = torch.arange(9000.0).view(90, 100).t()
    assert stats_of(tmp_path / "s", old, old + 1).changed_elements == 9000
    monkeypatch.setattr(tensor_bytes, "SCRATCH", 100)
    with pytest.raises(StorageError, match="TMPDIR"):
        stats_of(tmp_path / "t", torch.ones(90, 100), torch.zeros(100, 90).t())
