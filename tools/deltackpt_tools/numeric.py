"""Elements of two versions of a tensor compared by value, block by block.

Integers of up to 32 bits are compared exactly, of 64 bits in extended precision; floating point in
float64. bfloat16 and the 8-bit floats need ml_dtypes (``pip install deltackpt[inspect]``); without
it, and for dtypes that no package here knows, only bits are compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from deltackpt_store.manifest import element_bytes
from numpy.typing import NDArray

from deltackpt_tools.changes import ValueStats

BLOCK = 1 << 18  # elements converted at once, so that all temporaries stay within a few MB

_NUMPY = {
    "float16", "float32", "float64", "complex64", "complex128", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
}  # fmt: skip
_QUANTIZED = {"quint8": "uint8", "qint8": "int8", "qint32": "int32"}


@lru_cache(maxsize=64)
def numeric_dtype(name: str) -> np.dtype[Any] | None:
    """The NumPy dtype that reads the torch dtype called `name`, None when there is none."""
    name = _QUANTIZED.get(name, name)
    if name in _NUMPY:
        return np.dtype(name)
    if name == "complex32":  # pairs of float16
        return np.dtype("float16")
    if name.startswith(("bfloat", "float8")):
        try:
            found: Any = getattr(importlib.import_module("ml_dtypes"), name, None)
        except ImportError:
            return None
        return None if found is None else np.dtype(found)
    return None


def needs_package(name: str) -> bool:
    """Whether `name` would be read if ml_dtypes were installed."""
    return name.startswith(("bfloat", "float8")) and numeric_dtype(name) is None


def _widen(dtype: np.dtype[Any], name: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    if name == "complex32":
        return lambda a: a.astype(np.float32).view(np.complex64).astype(np.complex128)
    if dtype.kind == "c":
        return lambda a: a.astype(np.complex128)
    if dtype.kind in "iu":
        wide = np.longdouble if dtype.itemsize == 8 else np.int64
        return lambda a: a.astype(wide)
    return lambda a: a.astype(np.float64)


@dataclass(slots=True)
class Sums:
    """Running totals of one tensor. `add` may be called with any number of whole elements, each of
    which counts `repeats` times."""

    dtype: str
    total_elements: int
    repeats: int = 1
    changed: int = 0
    largest: float | None = None
    squared_difference: float = 0.0
    squared_old: float = 0.0
    new_nan: int = 0
    new_inf: int = 0
    _numeric: np.dtype[Any] | None = field(init=False)
    _width: int = field(init=False)

    def __post_init__(self) -> None:
        self._numeric = numeric_dtype(self.dtype)
        self._width = element_bytes(self.dtype)

    def add(self, old: memoryview, new: memoryview) -> None:
        """Compare as many bytes of both versions, at the same place of the tensor."""
        size = BLOCK * self._width
        for start in range(0, len(new), size):
            self._block(old[start : start + size], new[start : start + size])

    def _block(self, old: memoryview, new: memoryview) -> None:
        a, b = _bits(old, self._width), _bits(new, self._width)
        differs = a != b
        if differs.ndim == 2:
            differs = differs.any(axis=1)
        self.changed += int(differs.sum())
        if self._numeric is None:
            return
        widen = _widen(self._numeric, self.dtype)
        x = widen(np.frombuffer(old, self._numeric))
        y = widen(np.frombuffer(new, self._numeric))
        if x.dtype.kind in "fc" and self._numeric.kind not in "iu":
            self._floats(x, y)
            return
        self._sums(x, y - x)

    def _floats(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        finite_x, finite_y = np.isfinite(x), np.isfinite(y)
        if not finite_y.all():
            self.new_nan += int((np.isnan(y) & ~np.isnan(x)).sum())
            self.new_inf += int((np.isinf(y) & ~np.isinf(x)).sum())
        both = finite_x & finite_y
        if not both.all():
            x, y = x[both], y[both]
        self._sums(x, y - x)

    def _sums(self, x: NDArray[Any], difference: NDArray[Any]) -> None:
        if not len(x):
            return
        size = np.abs(difference).astype(np.float64)
        self.largest = max(self.largest or 0.0, float(size.max()))
        self.squared_difference += float(np.square(size).sum())
        self.squared_old += float(np.square(np.abs(x).astype(np.float64)).sum())

    def stats(self) -> ValueStats:
        changed = self.changed * self.repeats
        if self._numeric is None:
            return ValueStats(self.total_elements, changed, None, None, None, None, None)
        floating = self._numeric.kind not in "iub"
        relative = None
        if self.squared_old > 0:
            relative = (self.squared_difference / self.squared_old) ** 0.5
        rms = None
        if self.largest is not None:
            rms = (self.squared_difference * self.repeats / self.total_elements) ** 0.5
        return ValueStats(
            elements=self.total_elements,
            changed_elements=changed,
            max_difference=self.largest,
            rms=rms,
            relative_update=relative,
            new_nan=self.new_nan * self.repeats if floating else 0,
            new_inf=self.new_inf * self.repeats if floating else 0,
        )


def may_be_nonfinite(dtype: str) -> bool:
    """Whether elements of the dtype can be NaN or infinite, as far as is known here."""
    numeric = numeric_dtype(dtype)
    return numeric is not None and numeric.kind not in "iub"


def count_nonfinite(data: memoryview, dtype: str) -> tuple[int, int]:
    """(NaN, infinite) elements in `data`; (0, 0) for a dtype that has none or is not known here."""
    numeric = numeric_dtype(dtype)
    if numeric is None or not may_be_nonfinite(dtype):
        return 0, 0
    nan = inf = 0
    values = np.frombuffer(data, numeric)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        if numeric.kind not in "fc":  # a dtype of ml_dtypes
            block = block.astype(np.float32)
        if np.isfinite(block).all():
            continue
        nan += int(np.isnan(block).sum())
        inf += int(np.isinf(block).sum())
    return nan, inf


def _bits(data: memoryview, width: int) -> NDArray[Any]:
    """The elements as unsigned integers (one row of bytes each, for odd widths)."""
    if width in (1, 2, 4, 8):
        return np.frombuffer(data, f"u{width}")
    return np.frombuffer(data, np.uint8).reshape(-1, width)
