"""Prevents: a chunk that the training still has in memory counts as lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.pack import pack_path
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from saving import Training

import deltackpt


def test_lost_chunks_come_from_the_live_state(tmp_path: Path) -> None:
    path = tmp_path / "store"
    training = Training(layers=2)
    extra = {"loose": torch.randn(5000), "strided": torch.randn(100, 90).t()}
    state = {**training.objects, "extra": extra}
    with deltackpt.Checkpointer(path, state, writer="thread", chunk_bytes=4096) as ckpt:
        training.step()
        ckpt.save(1)
        ckpt.wait()
        training.step()
        extra["loose"].mul_(2)
        ckpt.save(2)
    store = Store.open(path)
    for name in store.packs.names():
        os.unlink(pack_path(store.path, name))
    report = deltackpt.repair(path, dry_run=True)
    assert [lost.step for lost in report.lost] == [1, 2]
    before = {name: thing.state_dict() for name, thing in training.objects.items()}
    report = deltackpt.repair(path, state=state)
    assert {one.source for one in report.mended} == {"the state in memory"}
    assert [lost.step for lost in report.lost] == [1]  # what changed since then is gone
    assert any(tensor.path == "extra/loose" for tensor in report.lost[0].tensors)
    assert not any(tensor.path == "extra/strided" for tensor in report.lost[0].tensors)
    restored = deltackpt.load(path, step=2)
    assert torch.equal(restored["extra"]["loose"], extra["loose"])
    assert torch.equal(restored["extra"]["strided"], extra["strided"])
    for key, value in before["model"].items():
        assert torch.equal(restored["model"][key], value)
    assert {h.step for f in verify(Store.open(path)).findings for h in f.hits} == {1}


@pytest.mark.parametrize(
    "wrong",
    [{"sources": "copy"}, {"sources": [5]}, {"sources": None}, {"state": 5}, {"timeout": "x"},
     {"threads": 0}, {"dry_run": "no"}],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with deltackpt.Checkpointer(tmp_path / "store", {"x": torch.zeros(1)}, writer="thread") as ckpt:
        ckpt.save(0)
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        deltackpt.repair(tmp_path / "store", **wrong)
