"""The two questions that people ask first, answered on real training with the commands alone:
which layers did a LoRA run change, and at which step did a NaN first appear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import run
from torch import nn

from deltackpt import Checkpointer

BROKEN = 6  # the step whose loss is NaN
ADAPTED = ("layers.2.q", "layers.3.q")


class Lora(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self, width: int, adapted: bool) -> None:
        super().__init__()
        q = nn.Linear(width, width)
        self.q: nn.Module = Lora(q) if adapted else q
        self.mlp = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(torch.relu(self.q(x)))


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width, i in (2, 3)) for i in range(depth))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuning in bfloat16 of which the loss breaks at one step and stays broken."""
    path = tmp_path_factory.mktemp("lora") / "store"
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".a", ".b")))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(path, state, run="lora", writer="thread") as ckpt:
        for step in range(9):
            ids = torch.randint(0, 50, (16,))
            loss = nn.functional.cross_entropy(model(ids).float(), ids)
            if step == BROKEN:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.save(step, metrics={"loss": loss.item()})
        ckpt.wait()
    return path


def test_which_layers_a_lora_run_changed(store: Path) -> None:
    result = run("diff", store, "@0", "@5", "--only", "model/*", "--depth", 4)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    start = lines.index("modules") + 2
    changed = [line.split()[0] for line in lines[start:] if not line.startswith("  (")]
    assert sorted(changed) == [f"model/{name}" for name in ADAPTED]


def test_only_the_thin_matrices_moved(store: Path) -> None:
    document = json.loads(
        run("diff", store, "@0", "@5", "--only", "model/*", "--values", "--json").stdout
    )
    moved = {one["path"]: one["values"] for one in document["tensors"]}
    assert set(moved) == {f"model/{name}.{part}" for name in ADAPTED for part in "ab"}
    assert all(values["relative_update"] > 0 for values in moved.values())
    assert all(values["new_nan"] == 0 for values in moved.values())


def test_at_which_step_a_nan_first_appeared(store: Path) -> None:
    result = run("blame", store, "*", "--nan")
    assert result.exit_code == 1
    assert f"NaN or Inf appeared first in lora@{BROKEN}" in result.output
    document = json.loads(run("blame", store, "model/*", "--nan", "--json").stdout)
    first = {t["path"]: t["not_finite"] for t in document["tensors"] if t["not_finite"]}
    assert set(first) == {f"model/{name}.{part}" for name in ADAPTED for part in "ab"}
    assert {one["step"] for one in first.values()} == {BROKEN}


def test_diff_around_that_step_shows_it_first(store: Path) -> None:
    lines = run("diff", store, f"@{BROKEN}", "--values").output.splitlines()
    assert lines[0].startswith(f"lora@{BROKEN - 1} -> lora@{BROKEN}: ")
    assert lines[4].split()[-1].endswith("/0")  # elements that became NaN / Inf
    assert int(lines[4].split()[-1].split("/")[0]) > 0


def test_the_report_says_it_too(store: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = run("report", store, "--values", "-o", page)
    assert f"NaN or Inf appeared first in lora@{BROKEN}" in result.output
    assert f"<b>step {BROKEN}</b>" in page.read_text()


def test_the_help_texts_lead_there() -> None:
    """A new user has nothing else: the words of the questions are in the help."""
    assert "which layers a fine-tuning changed" in " ".join(run("diff", "--help").output.split())
    assert "find when a NaN appeared" in " ".join(run("diff", "--help").output.split())
    assert "where a NaN came from" in " ".join(run("blame", "--help").output.split())
    for command in ("diff", "blame", "report", "advise", "watch"):
        assert command in run("--help").output
