"""What a first save costs the writer: nothing is known yet of any tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deltackpt_store import coding_policy
from saving import Opener


@pytest.mark.parametrize(("bits", "small"), [(32, False), (12, True)])
def test_a_first_save_tries_few_chunks_of_each_tensor(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, bits: int, small: bool
) -> None:
    """Prevents: a first save of noise that spends most of its time on finding that out again."""
    tries: list[int] = []
    real = coding_policy.encode

    def counted(plan: Any, *args: Any) -> Any:
        tries.append(len(plan.tries))
        return real(plan, *args)

    monkeypatch.setattr(coding_policy, "encode", counted)
    noise = torch.randint(-(2**31), 2**31, (2 * 16 * 4096,), dtype=torch.int64) >> (32 - bits)
    ckpt = opened({"x": noise.to(torch.int32)}, chunk_bytes=16384, rng=False)
    report = ckpt.save(0).result(60)
    assert len(tries) == report.changed_chunks == 32
    assert sum(tries) <= 32 if small else sum(tries) < 16
    assert (report.written_bytes < 0.6 * report.changed_bytes) == small
