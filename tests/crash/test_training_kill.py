"""Real training in real processes, killed at random moments of its saves, and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deltackpt_store.store import Store

SCRIPT = Path(__file__).parent.parent / "support" / "kill_training.py"
KILLS = int(os.environ.get("DELTACKPT_KILLS", "60"))


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_all_the_time_ends_like_one_that_is_not(
    tmp_path: Path, figure: Callable[[str, int], None]
) -> None:
    """Prevents: a kill that leaves nothing to resume from, or a resume that is not exact."""
    # case 66
    path, steps = tmp_path / "store", 5 * KILLS
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path), str(KILLS), str(steps), "11"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    story = json.loads(done.stdout)
    assert sum(story["killed"].values()) >= KILLS * 3 // 4
    assert min(story["killed"].values()) > 0
    figure("kills survived, at random times", sum(story["killed"].values()))
    assert story["steps"] == {"main": steps - 1, "reference": steps - 1}
    assert story["roots"]["main"] == story["roots"]["reference"]  # bit for bit, RNG included
    assert story["losses"]["main"] == story["losses"]["reference"]
    check_every_commit(path)


def check_every_commit(path: Path) -> None:
    """No manual repair: whatever is listed can be read, whole."""
    from deltackpt_store.verify import verify

    report = verify(Store.open(path), level="chunks")
    assert report.ok, report
