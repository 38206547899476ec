"""Prevents: a trainer started without standard streams (a daemon) that can never save.

Its ring and socket would be descriptors 0 to 2, which a child gets replaced by its own streams.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deltackpt

TRAINER = """
import os
{close}
import deltackpt, torch
model = torch.nn.Linear(40, 40)
with torch.no_grad():
    model.weight.copy_(torch.arange(1600.0).view(40, 40))
with deltackpt.Checkpointer({path!r}, {{"model": model}}, writer={writer!r}) as ckpt:
    for step in range(2):
        ckpt.save(step).result(120)
"""


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_trainer_without_standard_streams_saves(
    tmp_path: Path, closed: tuple[int, ...], writer: str
) -> None:
    path = str(tmp_path / "store")
    close = "\n".join(f"os.close({fd})" for fd in closed)
    text = TRAINER.format(close=close, path=path, writer=writer)
    done = subprocess.run([sys.executable, "-c", text], timeout=300, env=dict(os.environ))
    assert done.returncode == 0
    assert deltackpt.steps(path) == [0, 1]
    weight = deltackpt.load(path)["model"]["weight"]
    assert torch.equal(weight, torch.arange(1600.0).view(40, 40))


def test_files_being_written_are_no_standard_streams(tmp_path: Path) -> None:
    """Prevents: a message of a C library in the middle of a pack."""
    text = (
        "import os; from deltackpt_store.fileio import FileIO; os.close(2);"
        f" print(FileIO().create({str(tmp_path / 'file')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", text], timeout=300, stdout=subprocess.PIPE)
    assert int(done.stdout) > 2
