"""Saves of every step of a real optimizer: predicted, small, and restored bit for bit."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store import codecs
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from saving import bits
from torch import nn

import deltackpt
from deltackpt.adam import AdamStates
from deltackpt.capture import capture
from deltackpt.detect import staging_order

CHUNK = 16 * 1024
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Mixed:
    """A bfloat16 model whose optimizer steps float32 masters, or a float32 model (`mixed` off)."""

    def __init__(self, make: Make, *, mixed: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 96))
        self.masters: list[torch.Tensor] = list(self.model.parameters())
        if mixed:
            self.masters = [p.detach().clone() for p in self.masters]
            self.model.to(torch.bfloat16)
        self.mixed = mixed
        self.optimizer = make(self.masters)

    def step(self) -> None:
        for master in self.masters:
            master.grad = 0.01 * torch.randn_like(master)
        self.optimizer.step()
        if self.mixed:
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.data.copy_(master)

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        return {**state, "masters": self.masters} if self.mixed else state


def train(
    path: Path, one: Mixed, steps: int, *, shadow: bool = True
) -> dict[int, deltackpt.SaveReport]:
    reports: dict[int, deltackpt.SaveReport] = {}
    with deltackpt.Checkpointer(
        path, one.state, writer="thread", chunk_bytes=CHUNK, final=False, rng=False, threads=1,
        shadow=shadow,
    ) as ckpt:  # fmt: skip
        for step in range(1, steps + 1):
            one.step()
            reports[step] = ckpt.save(step).result(60)
    return reports


def check(path: Path, one: Mixed, make: Make, steps: int, *, strict: bool = True) -> None:
    """The newest step, restored into other objects, is what the live ones hold now."""
    other = Mixed(make, mixed=one.mixed, seed=1)
    other.step()
    deltackpt.restore_into(path, other.state, step=steps, strict=strict)
    for mine, restored in zip(one.masters, other.masters, strict=True):
        assert bits(mine) == bits(restored)
        for key, value in one.optimizer.state[mine].items():
            assert bits(value) == bits(other.optimizer.state[restored][key]), key
    for mine, restored in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert bits(mine) == bits(restored)
    assert not list(verify(Store.open(path)).findings)


def adamw(**options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, **options)


VARIANTS: dict[str, Make] = {
    "plain": adamw(foreach=False, fused=False),
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "amsgrad": adamw(amsgrad=True),
    "maximize": adamw(maximize=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95)),
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_predicted(tmp_path: Path, name: str, mixed: bool) -> None:
    """What one step does to an Adam state follows from exp_avg; most of it need not be stored."""
    make = VARIANTS[name]
    one = Mixed(make, mixed=mixed)
    reports = train(tmp_path / "s", one, 5)
    assert reports[5].codecs["adam"] >= 8
    assert reports[5].written_bytes < 0.45 * reports[5].state_bytes
    raw, written = reports[5].codec_bytes["adam"]
    assert 0 < written < 0.1 * raw
    assert sum(size for _, size in reports[5].codec_bytes.values()) == reports[5].written_bytes
    if mixed:
        assert reports[5].codecs["cast"] >= 2
    check(tmp_path / "s", one, make, 5)


def test_verification_decodes_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all chunks of a step, or of steps with one anchor, need is not decoded for each."""
    train(tmp_path / "s", Mixed(adamw(), mixed=True), 6)
    store = Store.open(tmp_path / "s")
    tables = [store.index().entries(name) for name in store.packs.names()]
    coded = sum(int((table.table["codec"] > 0).sum()) for table in tables if table is not None)
    predicted = sum(int((table.table["refs"] > 1).sum()) for table in tables if table is not None)
    assert predicted >= 30
    decoded: list[int] = []
    decode = codecs.decode

    def counted(codec: int, *arguments: Any) -> None:
        decoded.append(codec)
        decode(codec, *arguments)

    monkeypatch.setattr(codecs, "decode", counted)
    assert verify(Store.open(tmp_path / "s"), threads=1).ok
    assert len(decoded) == coded


OTHERS: dict[str, Make] = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_stored_as_ever(tmp_path: Path, name: str) -> None:
    """Moments of the same name do not make it the same formula."""
    one = Mixed(OTHERS[name], mixed=False)
    plain = Mixed(OTHERS[name], mixed=False)
    reports = train(tmp_path / "s", one, 6)
    before = train(tmp_path / "plain", plain, 6, shadow=False)
    check(tmp_path / "s", one, OTHERS[name], 6)
    mine, theirs = (sum(r.written_bytes for r in run.values()) for run in (reports, before))
    assert mine <= 1.02 * theirs


def test_clipping_schedules_and_pauses(tmp_path: Path) -> None:
    """Learning rates change, saves leave steps out, gradients are missing: all is restored."""
    make = VARIANTS["fused"]
    one = Mixed(make, mixed=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(one.optimizer, lambda s: 1 / (1 + s))
    with deltackpt.Checkpointer(
        tmp_path / "s", {**one.state, "schedule": schedule}, writer="thread", chunk_bytes=CHUNK,
        final=False, rng=False, threads=1, shadow=True,
    ) as ckpt:  # fmt: skip
        predicted = 0
        for step in range(1, 15):
            one.step()
            if step == 6:
                one.step()
            schedule.step()
            predicted += bool(ckpt.save(step).result(60).codecs.get("adam"))
            if step == 9:
                ckpt.restore(8)
    assert predicted >= 6
    check(tmp_path / "s", one, make, 14, strict=False)


def test_what_the_writer_is_told() -> None:
    one = Mixed(adamw(amsgrad=True), mixed=True)
    one.step()
    taken = capture(one.state, chunk_bytes=CHUNK, rng=False)
    told = AdamStates(taken).tensors(taken)
    layout = taken.layout
    paths = {view.extent: layout.paths[view.slot] for view in layout.tensors}
    assert len(told) == 4
    for index, one_told in enumerate(told):
        state = f"optimizer/state/{index}"
        assert paths[one_told.first] == f"{state}/exp_avg"
        assert paths[one_told.second] == f"{state}/exp_avg_sq"
        assert paths[one_told.largest] == f"{state}/max_exp_avg_sq"
        assert paths[one_told.weight] == f"masters/{index}"
        assert one_told.step == 1
        assert one_told.lr == 1e-3
        assert (one_told.beta1, one_told.beta2, one_told.eps) == (0.9, 0.999, 1e-8)
        assert one_told.decoupled


def test_what_others_follow_from_is_staged_first() -> None:
    """Chunks that arrive before what predicts them have to wait in the ring, or go without."""
    one = Mixed(adamw(), mixed=True)
    one.step()
    layout = capture(one.state, chunk_bytes=CHUNK, rng=False).layout
    large = [extent for extent, spec in enumerate(layout.extents) if not spec.inline]
    order = staging_order(layout, large)
    assert sorted(order) == large
    paths = {view.extent: layout.paths[view.slot] for view in layout.tensors}
    kinds = [paths[extent].rpartition("/")[2] for extent in order]
    count = kinds.count("exp_avg")
    assert count >= 2
    assert kinds[:count] == ["exp_avg"] * count
    assert {layout.extents[extent].dtype for extent in order[-2:]} == {"bfloat16"}


def test_bfloat16_states_have_nothing_to_predict() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    taken = capture({"model": model, "optimizer": optimizer}, chunk_bytes=CHUNK, rng=False)
    assert AdamStates(taken).tensors(taken) == []
