"""Prevents: limits of time that overflow, count as none, or are found wrong at the first save."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import InvalidInputError
from saving import Opener, steps


@pytest.mark.parametrize("limit", [None, math.inf, 1e10, 1e300, 10**400], ids=str)
def test_no_limit_and_very_long_ones_are_no_limit(path: Path, opened: Opener, limit: Any) -> None:
    state = {"x": torch.arange(400.0)}
    ckpt = opened(state, durable_timeout=limit, lock_timeout=limit, on_busy="wait")
    for step in range(4):
        state["x"].add_(1)
        save = ckpt.save(step)
    save.staged(limit)
    assert save.result(limit).step == 3
    ckpt.wait(limit)
    ckpt.close()
    assert steps(path) == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [-1, -math.inf, math.nan, "60", True, [1]], ids=str)
def test_what_is_no_limit_of_time_is_refused_by_name(
    path: Path, opened: Opener, limit: Any
) -> None:
    state = {"x": torch.arange(400.0)}
    for option in ("durable_timeout", "lock_timeout"):
        with pytest.raises(InvalidInputError, match=option):
            opened(state, **{option: limit})
    ckpt = opened(state)
    save = ckpt.save(0)
    for call in (save.result, save.staged, ckpt.wait):
        with pytest.raises(InvalidInputError, match="timeout"):
            call(limit)
    ckpt.close()


def test_a_save_needs_some_time(opened: Opener) -> None:
    with pytest.raises(InvalidInputError, match=r"durable_timeout.*larger than 0"):
        opened({"x": torch.arange(400.0)}, durable_timeout=0)
