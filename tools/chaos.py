"""An outside judge of crash safety, `ckpt-chaos`, over a real training, and over broken layers.

    make chaos                              at most 24 crash points for each layer
    make chaos ARGS="--points 1000"         every crash point
    make chaos ARGS="--layer no-sync"       one layer only

The judge runs tools/chaos_train.py once without a fault, kills it at the file events that it saw
(before the event; with the file torn; with everything lost that was not synced), runs it again, and
wants the same final weights from the newest commit. The sound layer must pass at every point; to
show that the judge sees what it must, the broken layers (a file named before its bytes; nothing
synced) must fail. Ends with 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("sound", "late-data", "no-sync")
VERDICTS = "HARD_FAIL,SILENT_DIVERGENCE,CONTROL_FAIL,LOST_WORK"


def judged(layer: str, points: int, work: Path, jobs: int) -> int:
    """Exit code of the judge: 0 when every crash point passed."""
    command = [
        sys.executable, "-m", "ckpt_chaos", "run",
        "--work", str(work / layer), "--jobs", str(jobs), "--max-points", str(points),
        "--modes", "before,torn,unsynced", "--fail-on", VERDICTS,
        "--result-file", "{out}/result", "--step-regex", r"resumed from commit (\d+)",
        "--checkpoint-glob", "{out}/store/runs/main/[0-9]*", "--ckpt-ignore-size",
        "--", sys.executable, str(ROOT / "tools" / "chaos_train.py"), "{out}", "--layer", layer,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=work, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=24, help="crash points for each layer")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--layer", choices=LAYERS, action="append")
    options = parser.parse_args()
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        for layer in options.layer or LAYERS:
            print(f"== layer: {layer}", flush=True)
            code = judged(layer, options.points, Path(directory), options.jobs)
            if (code == 0) != (layer == "sound"):
                bad.append(layer)
    for layer in bad:
        print(f"{layer}: {'a crash point failed' if layer == 'sound' else 'no crash point failed'}")
    print("judge: " + ("not as it must be" if bad else "sound passes, what is broken fails"))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
