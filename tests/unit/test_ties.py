"""Prevents: a restore that takes hours over tensors that share memory, or overlooks one of them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from captured import take
from deltackpt_store.manifest import Snapshot

from deltackpt import ties


def step_of(state: dict[str, torch.Tensor], seed: int = 0) -> Any:
    """As much of a step of `state` as is looked at; chunks and small tensors of few contents."""
    taken = take(state)
    draw = random.Random(seed)
    layout = taken.layout
    inline = {e: bytes([draw.randrange(2)]) for e, spec in enumerate(layout.extents) if spec.inline}
    chunks = {
        e: np.full((spec.chunk_count, 32), draw.randrange(2), np.uint8)
        for e, spec in enumerate(layout.extents)
        if not spec.inline
    }
    views = {view.slot: view for view in layout.tensors}
    slots = {layout.paths[slot]: slot for slot in views}
    taken.release()
    return SimpleNamespace(
        views=views, slots=slots, snapshot=Snapshot(layout, {}, inline, chunks, b"")
    )


def found(step: Any, live: dict[str, torch.Tensor]) -> set[frozenset[int]]:
    goals = [(step.slots[name], tensor) for name, tensor in live.items()]
    groups = ties.find_ties(step, goals)
    for group in groups:
        assert [tensor.data_ptr() for _, tensor in group] == sorted(t.data_ptr() for _, t in group)
    return {frozenset(slot for slot, _ in group) for group in groups}


def each_with_each(step: Any, live: dict[str, torch.Tensor]) -> set[frozenset[int]]:
    """The same, found in the plain way."""
    regions = [
        ties._region(step.slots[name], tensor) for name, tensor in live.items() if tensor.numel()
    ]
    group = {region.slot: frozenset([region.slot]) for region in regions}
    for left in regions:
        for right in regions:
            apart = left.end <= right.start or right.end <= left.start
            if left.slot < right.slot and not apart and not ties._tied_alike(step, left, right):
                joined = group[left.slot] | group[right.slot]
                group.update((slot, joined) for slot in joined)
    return {slots for slots in group.values() if len(slots) > 1}


def views(seed: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    base = torch.arange(draw.choice([40, 400])).float()
    out: dict[str, torch.Tensor] = {}
    for name in range(draw.randint(2, 12)):
        start, step = draw.randrange(12), draw.randint(1, 4)
        out[f"k{name}"] = draw.choice(
            [
                base[start:],
                base[start : start + 9],
                base[start::step],
                base[start : start + 1].expand(3),
                base[:36].view(6, 6)[:, start % 6],
                base[:36].view(6, 6)[start % 6],
                base[:36].view(torch.int32),
                torch.zeros(20),
            ]
        )
    return out


@pytest.mark.parametrize("few", [0, 32])
def test_no_overlap_is_overlooked(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(ties, "_FEW", few)
    several = 0
    for seed in range(300):
        live = views(seed)
        saved = live if seed % 3 == 0 else views(seed + 1 if seed % 3 == 1 else -seed)
        names = live.keys() & saved.keys()
        step = step_of({name: saved[name] for name in sorted(names)}, seed)
        live = {name: live[name] for name in names}
        expected = each_with_each(step, live)
        assert found(step, live) == expected
        several += bool(expected)
    assert several > 50


@pytest.mark.parametrize("kind", ["tied", "columns", "columns and the matrix"])
def test_many_that_overlap_as_they_did_are_not_compared_each_with_each(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One tensor under many names; and the columns of a matrix, which lie in each other's gaps."""
    base = torch.randn(20, 300)
    live = {f"k{i}": base if kind == "tied" else base[:, i] for i in range(300)}
    if kind == "columns and the matrix":
        live["matrix"] = base
    step = step_of(live)
    compared: list[None] = []
    real = ties._tied_alike

    def counted(*args: Any) -> bool:
        compared.append(None)
        return real(*args)

    monkeypatch.setattr(ties, "_tied_alike", counted)
    assert found(step, live) == set()
    assert not compared
