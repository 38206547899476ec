"""Prevents: a process killed in the middle of a file operation leaves what needs a repair.

Savers, sessions, retention, collection, compaction, repair and creation are killed at one file call
after the other, each on a copy of one store; see `kill_operations`. At a call that changes nothing
a kill leaves what it leaves at the next one that does; DELTACKPT_KILL_CALLS=all tries those too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "support" / "kill_operations.py"
CALLS = os.environ.get("DELTACKPT_KILL_CALLS", "changes")


# case 66, case 130
def test_a_kill_at_any_call_leaves_a_working_store(
    tmp_path: Path, figure: Callable[[str, int], None]
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), CALLS],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kills: dict[str, int] = json.loads(done.stdout)
    assert min(kills.values()) > 1
    assert sum(kills.values()) > 220
    figure("kills survived, at the n-th file call", sum(kills.values()))
