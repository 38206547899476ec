"""An AdamW state in float32 with bfloat16 weights, without torch, one optimizer step at a time."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from deltackpt_store.manifest import Layout
from deltackpt_store.protocol import AdamTensors
from numpy.typing import NDArray
from toy_trainer import CHUNK, inline_at, layout_of

Floats = NDArray[np.float32]

NAMES = [
    "model/weight", "master/weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq",
    "optimizer/state/0/max_exp_avg_sq",
]  # fmt: skip
HALF, WEIGHT, FIRST, SECOND, LARGEST = range(5)
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-3, 0.01


def rounded(values: Floats) -> bytes:
    """bfloat16 by the definition: nearest, ties to even; no NaNs."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


class AdamState:
    """`elements` weights; `decoupled` for AdamW, else Adam with L2; `amsgrad` as in torch."""

    def __init__(
        self, elements: int = 2 * CHUNK // 4 + 1001, *, amsgrad: bool = False,
        decoupled: bool = True, kind: str = "bfloat16", seed: int = 0,
    ) -> None:  # fmt: skip
        self._random = np.random.default_rng(seed)
        self.amsgrad, self.decoupled, self.kind = amsgrad, decoupled, kind
        self.step = 0
        self.lr = LR
        self.values: dict[int, Floats] = {
            WEIGHT: (0.05 * self._random.standard_normal(elements)).astype(np.float32),
            FIRST: np.zeros(elements, np.float32), SECOND: np.zeros(elements, np.float32),
            LARGEST: np.zeros(elements, np.float32),
        }  # fmt: skip

    def layout(self) -> Layout:
        count = 5 if self.amsgrad else 4
        sizes = tuple(map(len, self.arrays()[:count]))
        layout = layout_of(NAMES[:count], sizes)
        kinds = [self.kind, "float32", "float32", "float32", "float32"][:count]
        extents = tuple(
            msgspec.structs.replace(extent, dtype=kind)
            for extent, kind in zip(layout.extents, [*kinds, "uint8"], strict=True)
        )
        return msgspec.structs.replace(layout, extents=extents)

    def hints(self, *, step: int | None = None, lr: float | None = None) -> list[AdamTensors]:
        return [AdamTensors(
            FIRST, SECOND, WEIGHT, LARGEST if self.amsgrad else -1,
            self.step if step is None else step, self.lr if lr is None else lr,
            *BETAS, EPS, DECAY, self.decoupled,
        )]  # fmt: skip

    def advance(self, gradient: Floats | None = None) -> list[bytes]:
        """One optimizer step, in binary64 where torch has binary32; the arrays after it."""
        self.step += 1
        weight, first = self.values[WEIGHT], self.values[FIRST]
        second, largest = self.values[SECOND], self.values[LARGEST]
        if gradient is None:
            gradient = (0.01 * self._random.standard_normal(len(weight))).astype(np.float32)
        if not self.decoupled:
            gradient = gradient + np.float32(DECAY) * weight
        first += np.float32(1 - BETAS[0]) * (gradient - first)
        second *= np.float32(BETAS[1])
        second += np.float32(1 - BETAS[1]) * gradient * gradient
        np.maximum(largest, second, out=largest)
        by = largest if self.amsgrad else second
        root = math.sqrt(1 - BETAS[1] ** self.step)
        update = first / (np.sqrt(by) / np.float32(root) + np.float32(EPS))
        if self.decoupled:
            weight *= np.float32(1 - self.lr * DECAY)
        weight -= np.float32(self.lr / (1 - BETAS[0] ** self.step)) * update
        return self.arrays()

    def arrays(self) -> list[bytes]:
        weight = self.values[WEIGHT]
        half = rounded(weight) if self.kind == "bfloat16" else weight.astype("<f2").tobytes()
        kept = [WEIGHT, FIRST, SECOND, LARGEST] if self.amsgrad else [WEIGHT, FIRST, SECOND]
        moments = [self.values[kind].tobytes() for kind in kept]
        return [half, *moments, inline_at(self.step)]
