"""Real training in real processes, killed at random moments of its saves, and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltackpt_store.store import Store

SCRIPT = Path(__file__).parent.parent / "support" / "kill_training.py"
Figure = Callable[[str, int], None]
KILLS = int(os.environ.get("DELTACKPT_KILLS", "60"))


def campaign(path: Path, kills: int, steps: int, *options: str) -> dict[str, Any]:
    """What `kill_training` tells; the kills have fallen, and both runs are the same."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path), str(kills), str(steps), "11", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    story: dict[str, Any] = json.loads(done.stdout)
    assert sum(story["killed"].values()) >= kills * 3 // 4
    assert min(story["killed"].values()) > 0
    assert story["steps"] == {"main": steps - 1, "reference": steps - 1}
    assert story["differ"] == []  # every step bit for bit, RNG included
    assert story["losses"]["main"] == story["losses"]["reference"]
    check_every_commit(path)
    return story


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_all_the_time_ends_like_one_that_is_not(
    tmp_path: Path, figure: Figure
) -> None:
    """Prevents: a kill that leaves nothing to resume from, or a resume that is not exact."""
    # case 66
    story = campaign(tmp_path / "store", KILLS, 5 * KILLS)
    assert all(predicted == 0 for _, predicted in story["predicted"])
    figure("kills survived, at random times", sum(story["killed"].values()))


@pytest.mark.timeout(600)
def test_a_run_whose_writer_predicts_may_be_killed_all_the_time(
    tmp_path: Path, figure: Figure
) -> None:
    """Prevents: a step that was coded against what a dead writer had only in its memory."""
    # case 66
    kills = 2 * KILLS // 5
    story = campaign(tmp_path / "store", kills, 7 * kills, "shadow")
    figure("kills survived, at random times", sum(story["killed"].values()))
    # A writer's first saves are what it predicts from; whoever lives longer goes on predicting.
    going = [those for saves, those in story["predicted"] if saves >= 4]
    assert len(going) > 3
    assert min(going) > 0, story["predicted"]


def check_every_commit(path: Path) -> None:
    """No manual repair: whatever is listed can be read, whole."""
    from deltackpt_store.verify import verify

    report = verify(Store.open(path), level="chunks")
    assert report.ok, report
