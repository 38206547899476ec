"""Every dtype that torch knows comes back as it was saved, or is refused by key by the save."""

import warnings
from pathlib import Path

import pytest
import torch
from captured import take
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.manifest import element_bytes

import deltackpt
from deltackpt.values import dtype_name

EVERY = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def _tensor(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.arange(1024, dtype=torch.int32).to(torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype)


def _refused(dtype: torch.dtype) -> InvalidInputError | None:
    try:
        take({"a": {"b": _tensor(dtype)}})
    except InvalidInputError as error:
        return error
    return None


def test_only_quantized_dtypes_are_refused_and_by_key_and_dtype() -> None:
    refused = {dtype: error for dtype in EVERY if (error := _refused(dtype)) is not None}
    assert set(refused) == QUANTIZED
    for dtype, error in refused.items():
        assert error.kind == "unsupported-value"
        assert error.context["path"] == "a/b"
        assert str(dtype) in error.message
        assert error.hint


def test_every_other_dtype_comes_back(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {dtype_name(d): _tensor(d) for d in EVERY if _refused(d) is None}
        for name, tensor in state.items():
            assert element_bytes(name) == tensor.itemsize
        with deltackpt.Checkpointer(tmp_path / "store", state, rng=False) as saver:
            saver.save(1)
        loaded = deltackpt.load(tmp_path / "store")
        for name, tensor in state.items():
            back = loaded[name]
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_a_save_of_a_quantized_dtype_fails_at_the_call(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"x": torch.zeros(8)}
    with deltackpt.Checkpointer(tmp_path / "store", state) as saver:
        saver.save(1)
        saver.wait()
        state["x"] = _tensor(dtype)
        with pytest.raises(InvalidInputError, match=str(dtype)):
            saver.save(2)
        state["x"] = torch.ones(8)
        saver.save(3)
    assert torch.equal(deltackpt.load(tmp_path / "store")["x"], torch.ones(8))
