"""A small store with enough in it for a report: frozen, sparse, dense and broken tensors, two runs.

The figures of every save are set by hand, so that tests know what charts and tables must say.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_store import CHUNK, SmallStore, pattern

SAVES = 12
PER = CHUNK // 4  # float32 elements of one chunk


def make_report_store(path: Path, saves: int = SAVES) -> SmallStore:
    """``train`` has `saves` saves every 10 steps: `frozen` never changes, `sparse` changes one of
    eight chunks, `dense` changes whole with noise, `late` changes from the middle on, and gets a
    NaN in the last save. ``fork`` continues from the second save."""
    small = SmallStore(path)
    rng = np.random.default_rng(5)
    frozen = pattern(4 * PER, 1)
    sparse = pattern(8 * PER, 2)
    dense = pattern(4 * PER, 3)
    late = pattern(4 * PER, 4)
    parent = second = None
    for number in range(1, saves + 1):
        if number > 1:
            sparse = sparse.copy()
            row = number % 8
            sparse[row * PER : (row + 1) * PER] += np.float32(0.01)
            dense = dense + rng.standard_normal(len(dense), np.float32)
            if number > saves // 2:
                late = late + np.float32(1)
            if number == saves:
                late[7] = np.nan
        tensors = {
            "model/layers.0.frozen": frozen, "model/layers.1.sparse": sparse,
            "model/layers.2.dense": dense, "model/layers.10.late": late,
        }  # fmt: skip
        parent = small.save(
            "train", number * 10, tensors, {"lr": 0.1 / number}, parent=parent,
            metrics={"loss": 4.0 / number, "accuracy<b>": number / saves},
            stats={
                "stall_seconds": 0.01 * number, "staged_seconds": 0.02 * number,
                "writer_seconds": 0.1 * number, "encode_seconds": 0.03, "flush_seconds": 0.04,
                "changed_bytes": 1000.0 * number, "staged_bytes": 2000.0 * number, "skipped": 0.0,
                "dedup_bytes": 0.0,
            },
        )  # fmt: skip
        if number == 2:
            second = parent
    small.save("fork", 25, {"model/layers.0.frozen": frozen}, parent=second)
    assert parent is not None
    small.store.pin("good", parent)
    small.close()
    return small
