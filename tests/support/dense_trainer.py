"""A dense AdamW state without torch, for tests of saves in which every chunk changes every step."""

from __future__ import annotations

import msgspec
import numpy as np
from deltackpt_store.manifest import Layout
from numpy.typing import NDArray
from toy_trainer import CHUNK, inline_at, layout_of

NAMES = ["weight", "half", "exp_avg", "exp_avg_sq", "noise"]


class DenseState:
    """Weight (float32), its bfloat16 cut, both moments, and a tensor that is noise each step."""

    def __init__(
        self, elements: int = 3 * CHUNK // 4 + 100, seed: int = 0, lr: float = 1e-4
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._lr = lr
        self.step = 0
        self.weight = self._normal(elements) * np.float32(0.05)
        self.first = np.zeros(elements, np.float32)
        self.second = np.full(elements, 1e-6, np.float32)

    def layout(self) -> Layout:
        sizes = tuple(len(array) for array in self.arrays()[:-1])
        layout = layout_of(NAMES, sizes)
        kinds = ["float32", "bfloat16", "float32", "float32", "uint8", "uint8"]
        extents = tuple(
            msgspec.structs.replace(extent, dtype=kind)
            for extent, kind in zip(layout.extents, kinds, strict=True)
        )
        return msgspec.structs.replace(layout, extents=extents)

    def advance(self) -> list[bytes]:
        """One optimizer step; the arrays after it."""
        self.step += 1
        gradient = self._normal(len(self.weight)) * np.float32(1e-3)
        self.first += np.float32(0.1) * (gradient - self.first)
        self.second += np.float32(0.001) * (gradient * gradient - self.second)
        self.weight -= np.float32(self._lr) * self.first / (np.sqrt(self.second) + np.float32(1e-8))
        return self.arrays()

    def arrays(self) -> list[bytes]:
        half = (self.weight.view(np.uint32) >> 16).astype(np.uint16)
        noise = np.random.default_rng(self.step).bytes(2 * CHUNK + 5)
        floats = [self.weight.tobytes(), half.tobytes(), self.first.tobytes()]
        return [*floats, self.second.tobytes(), noise, inline_at(self.step)]

    def _normal(self, count: int) -> NDArray[np.float32]:
        return self._random.standard_normal(count, np.float32)
