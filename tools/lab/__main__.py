"""``python -m lab [--only crash,replay,...] [--seed N] [--crashes N] ... [--json FILE]``

Runs the trials of this folder, prints what each has found, and exits with 1 when anything that
docs/durability.md promises did not hold, or a trial did not run; with 2 when something is missing.

Everything happens in a temporary folder and in mount and process namespaces of its own, so that
no mount, loop device or process is left, however it ends.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from lab.host import FILE_SYSTEMS
from lab.needs import missing
from lab.outcome import Outcome

TRIALS = ("crash", "blind", "replay", "nfs", "full", "errors")
_INSIDE = "DELTACKPT_LAB_FOLDER"

Trial = tuple[str, Callable[[], Outcome]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lab", description=__doc__)
    parser.add_argument("--only", default=",".join(TRIALS), help=f"of {', '.join(TRIALS)}")
    parser.add_argument("--kinds", default=",".join(FILE_SYSTEMS), help="file systems")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--crashes", type=int, default=20, help="kernel crashes per file system")
    parser.add_argument("--points", type=int, default=200, help="replayed states per file system")
    parser.add_argument("--rounds", type=int, default=12, help="full disks per file system")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--dir", help="make the temporary folder in this one")
    chosen = parser.parse_args()
    chosen.only = chosen.only.split(",")
    chosen.kinds = chosen.kinds.split(",")
    unknown = set(chosen.only) - set(TRIALS) | set(chosen.kinds) - set(FILE_SYSTEMS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    return chosen


def trials(chosen: argparse.Namespace, work: Path) -> Iterator[Trial]:
    """What was asked for, in order. Modules are imported when they are needed: torch is slow."""
    seed, kinds = chosen.seed, chosen.kinds
    if "crash" in chosen.only:
        from lab.kernel_crash import crash

        for kind in kinds:
            yield f"crash {kind}", lambda kind=kind: crash(kind, chosen.crashes, seed, work)
    if "blind" in chosen.only:
        from lab.block_replay import replay
        from lab.kernel_crash import BROKEN, prove_not_blind

        for kind in kinds:
            yield f"blind {kind}", lambda kind=kind: prove_not_blind(kind, seed, work)
            for without in BROKEN:
                yield (
                    f"blind replay {kind} {without}",
                    lambda kind=kind, without=without: replay(
                        kind, chosen.points // 4, seed, work, without=without
                    ),
                )
    if "replay" in chosen.only:
        from lab.block_replay import replay

        for kind in kinds:
            yield f"replay {kind}", lambda kind=kind: replay(kind, chosen.points, seed, work)
    if "nfs" in chosen.only:
        from lab.nfs import nfs

        yield "nfs", lambda: nfs(work)
    if "full" in chosen.only:
        from lab.full_disk import full_disk

        for kind in ("tmpfs", *kinds):
            yield f"full {kind}", lambda kind=kind: full_disk(kind, chosen.rounds, seed, work)
    if "errors" in chosen.only:
        from lab.device_errors import FAULTS, device_errors

        for kind in kinds:
            for fault in FAULTS:
                yield (
                    f"errors {kind} {fault}",
                    lambda kind=kind, fault=fault: device_errors(kind, fault, work),
                )


def run_trials(chosen: argparse.Namespace, work: Path) -> int:
    """Run and report; the exit code."""
    logging.getLogger("deltackpt").setLevel(logging.CRITICAL)  # errors are what is asked for
    outcomes: list[Outcome] = []
    for name, trial in trials(chosen, work):
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        folder = set(work.iterdir())
        try:
            outcome = trial()
        except Exception:
            outcome = Outcome(name, violations=[f"the trial broke off:\n{traceback.format_exc()}"])
        outcome.seconds = round(time.monotonic() - began, 1)
        for left in set(work.iterdir()) - folder:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        outcomes.append(outcome)
        _print(outcome)
    bad = sum(bool(outcome.violations) for outcome in outcomes)
    result = {
        "seed": chosen.seed, "kernel": platform.release(), "crashes": chosen.crashes,
        "points": chosen.points, "rounds": chosen.rounds, "failed": bad,
        "trials": [vars(outcome) for outcome in outcomes],
    }  # fmt: skip
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(outcomes)} trials, {bad} failed, seed {chosen.seed}")
    return 1 if bad or not outcomes else 0


def _print(outcome: Outcome) -> None:
    print(f"{outcome.trial}: {'FAILED' if outcome.violations else 'passed'}")
    for name, value in outcome.figures.items():
        print(f"    {name}: {value}")
    for text in outcome.violations[:20]:
        print(f"  VIOLATION: {text}")
    sys.stdout.flush()


def main() -> int:
    chosen = arguments()
    if _INSIDE in os.environ:
        return run_trials(chosen, Path(os.environ[_INSIDE]))
    lacking = missing()
    if lacking:
        print("The lab cannot run here; missing:", *lacking, sep="\n  ")
        return 2
    print(f"seed {chosen.seed}: run it again with --seed {chosen.seed}", flush=True)
    return _isolated(chosen)


def _isolated(chosen: argparse.Namespace) -> int:
    """Run this program again where all it does vanishes with it."""
    work = tempfile.mkdtemp(prefix="deltackpt-lab-", dir=chosen.dir)
    command = [
        "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
        "--mount-proc", sys.executable, "-m", "lab", *sys.argv[1:], f"--seed={chosen.seed}",
    ]  # fmt: skip

    def give_up(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, give_up)
    environment = {
        **os.environ, _INSIDE: work, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    finally:
        process.kill()  # and everything inside, by --kill-child
        process.wait()
        _remove(Path(work))


def _remove(work: Path) -> None:
    """The last processes inside may take a moment to let go of their mounts."""
    for _ in range(50):
        shutil.rmtree(work, ignore_errors=True)
        if not work.exists():
            return
        time.sleep(0.1)
    print(f"could not remove {work}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
