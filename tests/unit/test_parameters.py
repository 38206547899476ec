"""Prevents: rows of optimizer state that nobody can tell apart, or with the name of another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from command_line import run
from deltackpt_store.store import Store
from deltackpt_tools.parameters import ParameterNames
from small_store import SmallStore

import deltackpt


def output(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code in (0, 1), result.output
    return result.output


def test_optimizer_state_is_told_by_its_parameter(tmp_path: Path) -> None:
    path = tmp_path / "store"
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    weights = [model[1].weight, model[0].weight]  # not the order of the model
    optimizers = {"a/b": torch.optim.AdamW(weights), "sgd": torch.optim.SGD([model[0].bias], 0.1)}
    with deltackpt.Checkpointer(path, {"m": model, "opt": optimizers}, writer="thread") as ckpt:
        for step in (1, 2):
            model(torch.ones(3, 8)).sum().backward()
            optimizers["a/b"].step()
            ckpt.save(step).result()
    expected = {
        "opt/a~1b/state/0/exp_avg": "m/1.weight",
        "opt/a~1b/state/1/exp_avg": "m/0.weight",
        "m/0.weight": None,
    }
    names = ParameterNames(Store.open(path).snapshot(Store.open(path).head("main")))
    for entry, name in expected.items():
        assert names.of(entry) == name
        for command in (["show", path, "latest"], ["diff", path, "@1", "@2"]):
            found = json.loads(output(*command, "--json"))
            row = next(t for t in found["tensors"] if t["path"] == entry)
            assert row["parameter_name"] == name
        (blamed,) = json.loads(output("blame", path, entry, "--json"))["tensors"]
        assert blamed["parameter_name"] == name
    report = json.loads(output("report", path, "-o", tmp_path / "r.html", "--json"))
    habits = {t["path"]: t["parameter_name"] for r in report["runs"] for t in r["tensors"]}
    assert habits["opt/a~1b/state/1/exp_avg"] == "m/0.weight"
    assert "opt/a~1b/state/0/exp_avg (m/1.weight)" in (tmp_path / "r.html").read_text()
    assert "opt/a~1b/state/0/exp_avg (m/1.weight)" in output("diff", path, "@1", "@2")
    folded = output("diff", path, "@1", "@2", "--depth", "4")
    assert "opt/a~1b/state/0 (m/1.weight)" in folded  # also where its tensors are folded
    assert "(m/" not in output("diff", path, "@1", "@2", "--depth", "3").partition("modules")[2]
    assert "opt/a~1b/state/0/exp_avg (m/1.weight)" in output("blame", path, "opt/*/exp_avg")
    shown = [
        line for line in output("show", path, "latest").splitlines() if "state/0/exp_avg " in line
    ]
    assert "of m/1.weight" in shown[0]


def test_nothing_is_guessed(tmp_path: Path) -> None:
    tensors = {"model/w": np.ones(300, np.float32), "optimizer/state/0/m": np.ones(300, np.float32)}
    recorded = {
        "none": {},
        "other": {"#params/optimizer": ["model/w"]},
        "short": {"#params/optimizer": []},
        "odd": {"#params/optimizer": "model/w"},
        "odd too": {"#params/optimizer": [3]},
        "flat": {"#params": ["model/w"]},
    }
    small = SmallStore(tmp_path / "store")
    for step, values in enumerate(recorded.values()):
        small.save("main", step, tensors, values)
    small.close()
    store = Store.open(tmp_path / "store")
    for step, kind in enumerate(recorded):
        names = ParameterNames(store.snapshot(store.find("main", step)))
        found = names.of("optimizer/state/0/m")
        assert found == ("model/w" if kind == "other" else None), kind
        for path in ("optimizer/state/1/m", "optimizer/state/x", "optimizer/state/", "model/w"):
            assert names.of(path) is None
