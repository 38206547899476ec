"""The main job on real input: train, get killed in the middle of a save, resume, prove it.

    python tools/demo.py [--store DIR] [--steps N] [--every N]

Fine-tunes all-MiniLM-L6-v2 on the Python standard library's sources (examples/finetune_minilm.py)
three times over one store: until it is SIGKILLed while a save is in flight; again, resumed, to the
end; and once uninterrupted as the reference. It ends with exit code 0 only if the resumed and the
uninterrupted run have the same Merkle root, that is, the same weights, optimizer state, data
position and random-number state, bit for bit. Progress goes to stdout: on a terminal a line that is
rewritten, else a line every few seconds.
"""

# pyright: basic

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltackpt_store import Store
from deltackpt_store.verify import verify

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "examples" / "finetune_minilm.py"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


class Progress:
    """One line on a terminal, rewritten; elsewhere a line of its own every few seconds."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._told = 0.0

    def tell(self, text: str, *, now: bool = False) -> None:
        """Show `text`, unless the last one is too fresh; `now`: whatever was shown before."""
        moment = time.monotonic()
        if not now and moment - self._told < (0.2 if self._live else 5.0):
            return
        self._told = moment
        if self._live:
            print(f"\r\x1b[K  {text}", end="", flush=True)
        else:
            print(f"  {text}", flush=True)

    def end(self) -> None:
        """Leave the line free for what is printed next."""
        if self._live:
            print("\r\x1b[K", end="", flush=True)


class Phase:
    """One training process and what it said."""

    def __init__(self, title: str, store: Path, run: str, steps: int, every: int) -> None:
        print(f"\n{title}", flush=True)
        self.steps = steps
        self.progress = Progress()
        self.progress.tell("loading PyTorch, the model and the text ...", now=True)
        command = [sys.executable, str(SCRIPT), str(store), "--run", run,
                   "--steps", str(steps), "--every", str(every)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment,
            stderr=None if os.environ.get("DEMO_VERBOSE") else subprocess.PIPE,
        )  # fmt: skip
        self.reports: list[dict[str, Any]] = []
        self.restored: dict[str, Any] | None = None
        self.losses: dict[int, float] = {}

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # some library's own words
                self.progress.tell(line.rstrip(), now=True)
                continue
            if "committed" in said:
                self.reports.append(said["committed"])
            elif "restored" in said:
                self.restored = said["restored"]
            else:
                self.losses[said["step"]] = said["loss"]
            self.progress.tell(self._where(), now=len(self.losses) == 1 and "loss" in said)
            yield said
        self.progress.end()

    def _where(self) -> str:
        """How far the training has come."""
        if not self.losses:
            return "training begins ..." if self.restored else "the first step ..."
        step, loss = next(reversed(self.losses.items()))
        saves = f"{len(self.reports)} save{'' if len(self.reports) == 1 else 's'} durable"
        return f"step {step} of {self.steps}, loss {loss:.3f}, {saves}"

    def to_the_end(self) -> None:
        for _ in self.lines():
            pass
        self._check()

    def _check(self) -> None:
        if self.process.wait() != 0:
            error = self.process.stderr.read() if self.process.stderr else ""
            raise SystemExit(f"the training process failed ({self.process.returncode}):\n{error}")

    def kill_while_saving(self, step: int) -> int:
        """SIGKILL the trainer and its writer as soon as a save at or after `step` has begun."""
        for said in self.lines():
            if said.get("saving") and said["step"] >= step:
                victims = [self.process.pid, *children(self.process.pid)]
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                self.process.wait()
                self.progress.end()
                return int(said["step"])
        self._check()
        raise SystemExit("the training process ended before it could be killed")

    def tell(self) -> None:
        first, later = self.reports[0], self.reports[1:]
        print(f"  {len(self.reports)} saves of {size(first['state_bytes'])} of state")
        print(f"  first save   wrote {size(first['written_bytes']):>9}   "
              f"stall {milliseconds(first['stall_seconds']):>7}   "
              f"durable after {milliseconds(first['durable_seconds'])}")  # fmt: skip
        if later:

            def middle(key: str) -> float:
                return statistics.median(r[key] for r in later)

            print(f"  later saves  wrote {size(middle('written_bytes')):>9}   "
                  f"stall {milliseconds(middle('stall_seconds')):>7}   "
                  f"staged after {milliseconds(middle('staged_seconds'))}   "
                  f"durable after {milliseconds(middle('durable_seconds'))} (medians)")  # fmt: skip
            total = sum(r["written_bytes"] for r in self.reports)
            full = sum(r["state_bytes"] for r in self.reports)
            print(f"  written in all {size(total)}; full saves would have written {size(full)}"
                  + (f" ({full / total:.1f}x)" if total else ""))  # fmt: skip


def children(pid: int) -> list[int]:
    """Process ids of all living children, from /proc."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--store", type=Path, default=HERE.parent / ".demo" / "store")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=3)
    args = parser.parse_args()
    store_path: Path = args.store
    if store_path.exists():
        shutil.rmtree(store_path)
    store_path.parent.mkdir(parents=True, exist_ok=True)

    killed = Phase("1. Fine-tune MiniLM, saving as it goes; SIGKILL it in the middle of a save",
                   store_path, "main", args.steps, args.every)  # fmt: skip
    at = killed.kill_while_saving(args.steps // 2)
    killed.tell()
    store = Store.open(store_path)
    newest = store.head("main")
    print(f"  killed during the save of step {at}; newest whole step in the store: {newest.step}")

    resumed = Phase("2. A new process resumes from the newest step that verifies",
                    store_path, "main", args.steps, args.every)  # fmt: skip
    resumed.to_the_end()
    if resumed.restored is None:
        raise SystemExit("the second process found nothing to resume from")
    print(f"  restored step {resumed.restored['step']} "
          f"({size(resumed.restored['bytes'])}, every chunk verified) "
          f"in {milliseconds(resumed.restored['seconds'])}")  # fmt: skip
    resumed.tell()

    reference = Phase("3. The same training without interruption, into the same store",
                      store_path, "reference", args.steps, args.every)  # fmt: skip
    reference.to_the_end()
    print(f"  {len(reference.reports)} saves wrote "
          f"{size(sum(r['written_bytes'] for r in reference.reports))} in all: "
          "what is bit-identical is already there")  # fmt: skip

    print("\n4. Verification", flush=True)
    began = time.perf_counter()
    report = verify(store, level="chunks")
    verdict = "ok" if report.ok else "DAMAGED"
    print(f"  every chunk of every step re-read and checked in "
          f"{milliseconds(time.perf_counter() - began)}: {verdict}")  # fmt: skip
    ours, theirs = store.head("main"), store.head("reference")
    print(f"  resumed run        step {ours.step}  Merkle root {ours.root.hex()}")
    print(f"  uninterrupted run  step {theirs.step}  Merkle root {theirs.root.hex()}")
    same_losses = all(resumed.losses[s] == reference.losses[s] for s in resumed.losses)
    if ours.root == theirs.root and same_losses and report.ok:
        print("  the same bits: weights, optimizer, scheduler, data position, random numbers")
        program = Path(sys.executable).with_name("deltackpt")  # `make` puts it beside the python
        shown = os.path.relpath(program) if program.exists() else "deltackpt"
        print(f"\nLook around:  {shown} log {os.path.relpath(store_path)}")
        return 0
    print("  DIFFERENT: the resumed run is not the run it should be")
    return 1


if __name__ == "__main__":
    sys.exit(main())
