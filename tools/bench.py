"""Stall, durable time, bytes, restore time and memory of checkpointers, side by side in one run.

    python tools/bench.py [--size MB] [--saves N] [--rounds N] [--states ...] [--peers ...]
    python tools/bench.py --slowdown [--size MB]

Every (state, peer) pair runs in a process of its own, the peers taking turns within each round, so
that ratios hold when the machine's speed drifts; figures are medians over all saves of all rounds,
`load` is the machine's load average while they were taken. Training takes one step of a second
before the first save, and the files of the last one are read once before they are restored, for
every peer.

`stall`     seconds training is blocked: in `save`, plus waiting before the optimizer may update
`durable`   seconds from `save` until the step is on disk and fsynced, nothing else running
`MB/save`   growth of the checkpoint folder per later save
`restore`   seconds to put the last step into a fresh model and optimizer, from the page cache
`slowdown`  how much longer blocks of ten training steps take with saving than without
`memory`    peak growth of memory (process and children, the staging ring included) during two more
            saves, which are not timed
"""

# pyright: basic

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from bench_peers import PEERS, Peer, tree_bytes
from bench_states import STATES, State

FIRST_STEP_SECONDS = 1.0
SLOWDOWN_STEPS = 10  # per block
SLOWDOWN_PAIRS = 5  # of blocks


class Memory:
    """Peak memory, in bytes, of this process and its children: proportional set sizes, and memory
    files that nobody has mapped. Growth is from when it was made; watched for when asked to, as
    looking takes processor time."""

    def __init__(self) -> None:
        self.start = self.now()
        self.peak = self.start
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def watch(self) -> None:
        self.thread.start()

    @staticmethod
    def now() -> int:
        own = shared = 0
        files: dict[int, int] = {}  # bytes by inode: mapped or not, they are there
        pids = [os.getpid()]
        for pid in pids:
            try:
                rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                size = {row.split(":")[0]: int(row.split()[1]) * 1024 for row in rows[1:]}
                own += size["Pss"] - size["Pss_Shmem"]
                shared += size["Pss_Shmem"]
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    if os.readlink(link).startswith("/memfd:"):
                        status = os.stat(link)
                        files[status.st_ino] = 512 * status.st_blocks
            except (FileNotFoundError, ProcessLookupError):
                continue
        return own + max(shared, sum(files.values()))

    def _watch(self) -> None:
        while not self.stop.wait(0.1):
            self.peak = max(self.peak, self.now())

    def growth(self) -> int:
        self.stop.set()
        self.thread.join()
        return max(self.peak, self.now()) - self.start


def same_bits(one: Any, other: Any) -> bool:
    """Whether all tensors of two state dicts are equal, compared as bits."""
    if isinstance(one, torch.Tensor):
        flat = [t.detach().reshape(-1).view(torch.uint8) for t in (one, other)]
        return torch.equal(*flat)
    if isinstance(one, dict):
        return all(k in other and same_bits(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return True  # plain values: some peers hold tensors only


def compute(seconds: float) -> None:
    """Stand-in for forward and backward: matrix products that change no state."""
    a = torch.randn(512, 512)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.mm(a, a)


def read_all(folder: Path) -> None:
    """Bring all files below `folder` into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def measure(state: State, peer: Peer, build: Any, saves: int, folder: Path) -> dict[str, Any]:
    memory = Memory()
    compute(FIRST_STEP_SECONDS)
    state.advance()
    result: dict[str, Any] = {"stall": [], "durable": [], "bytes": []}
    began = time.perf_counter()
    peer.save(0)
    stall = time.perf_counter() - began
    began_lock = time.perf_counter()
    peer.before_update()
    result["first_stall"] = stall + time.perf_counter() - began_lock
    peer.wait()
    result["first_durable"] = time.perf_counter() - began
    result["first_bytes"] = tree_bytes(folder)
    step = 0
    for step in range(1, 2 * saves + 1):
        state.advance()
        before = tree_bytes(folder)
        began = time.perf_counter()
        peer.save(step)
        stall = time.perf_counter() - began
        if step % 2:
            compute(0.5)
        began_lock = time.perf_counter()
        peer.before_update()
        stall += time.perf_counter() - began_lock
        peer.wait()
        if step % 2:
            result["stall"].append(stall)
        else:
            result["durable"].append(time.perf_counter() - began)
        result["bytes"].append(tree_bytes(folder) - before)
        peer.forget(step - 1)
    memory.watch()
    for step in range(2 * saves + 1, 2 * saves + 3):
        state.advance()
        peer.save(step)
        peer.before_update()
        peer.wait()
        peer.forget(step - 1)
    result["memory"] = memory.growth()
    saved = state.state_dict()
    gc.collect()
    target = build()
    read_all(folder)
    began = time.perf_counter()
    peer.restore(target, step)
    result["restore"] = getattr(peer, "restore_seconds", time.perf_counter() - began)
    result["exact"] = same_bits(saved, target.state_dict())
    peer.close()
    return result


def slowdown(state: State, peer: Peer, every: int, seconds: float) -> dict[str, Any]:
    """Blocks of ten steps without and with saving, in turn; the ratio of their times.

    A block that saves once does so in its first step, so that what the save costs later on shows.
    """
    a = torch.randn(1024, 1024)
    torch.mm(a, a)
    began = time.perf_counter()
    for _ in range(5):
        torch.mm(a, a)
    products = max(1, round(5 * seconds / (time.perf_counter() - began)))
    number = 0

    def block(saving: bool) -> float:
        nonlocal number
        first = number + 1
        began = time.perf_counter()
        for _ in range(SLOWDOWN_STEPS):
            for _ in range(products):
                torch.mm(a, a)
            peer.before_update()
            state.advance()
            number += 1
            if saving and (number - first) % every == 0:
                peer.save(number)
        peer.before_update()
        elapsed = time.perf_counter() - began
        if saving:
            peer.wait()
            for step in range(first, number):
                peer.forget(step)
        return elapsed

    peer.save(0)
    peer.before_update()
    peer.wait()
    block(True)
    ratios = [block(True) / block(False) for _ in range(SLOWDOWN_PAIRS)]
    peer.close()
    return {"every": every, "slowdown": statistics.median(ratios) - 1, "ratios": ratios}


def worker(arguments: argparse.Namespace) -> None:
    import warnings

    warnings.simplefilter("ignore")
    folder = Path(arguments.folder)

    def build() -> State:
        return STATES[arguments.state](arguments.size * 1_000_000)

    state = build()
    peer = PEERS[arguments.peer](folder, state)
    if arguments.slowdown:
        every = SLOWDOWN_STEPS if arguments.state == "dense-adamw" else 1
        result = slowdown(state, peer, every, arguments.step_seconds)
    else:
        result = measure(state, peer, build, arguments.saves, folder)
    result["load"] = os.getloadavg()[0]
    result["state_bytes"] = sum(t.nbytes for t in _tensors(state.state_dict()))
    print(json.dumps(result))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple)):
        return []
    return [t for item in items for t in _tensors(item)]


def run_one(arguments: argparse.Namespace, state: str, peer: str) -> dict[str, Any] | None:
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=arguments.dir))
    command = [sys.executable, __file__, "--worker", "--state", state, "--peer", peer,
               "--size", str(arguments.size), "--saves", str(arguments.saves),
               "--folder", str(folder)]  # fmt: skip
    if arguments.slowdown:
        command += ["--slowdown", "--step-seconds", str(arguments.step_seconds)]
    # As an installed package: compiled once, not again by every process.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": arguments.compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment,
                              timeout=1800)  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        print(f"{state} {peer}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    lines: list[str] = []
    for state, peers in results.items():
        size = next(r for runs in peers.values() for r in runs)["state_bytes"]
        lines += [f"\n**{state}** ({size / 1e6:.0f} MB)\n",
                  "| peer | stall s | first stall s | durable s | first durable s | MB/save "
                  "| restore s | memory MB | load | bit-exact |",
                  "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for peer, runs in peers.items():

            def middle(key: str, runs: list[dict[str, Any]] = runs) -> float:
                lists = [r[key] if isinstance(r[key], list) else [r[key]] for r in runs]
                return statistics.median(value for values in lists for value in values)

            lines.append(
                f"| {peer} | {middle('stall'):.4f} | {middle('first_stall'):.3f} "
                f"| {middle('durable'):.3f} | {middle('first_durable'):.3f} "
                f"| {middle('bytes') / 1e6:.2f} | {middle('restore'):.3f} "
                f"| {middle('memory') / 1e6:.0f} | {middle('load'):.0f} "
                f"| {'yes' if all(r['exact'] for r in runs) else 'NO'} |")  # fmt: skip
    return "\n".join(lines)


def slowdown_table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    lines = ["| state | saved every | peer | slowdown | range | load |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for state, peers in results.items():
        for peer, runs in peers.items():
            ratios = [100 * (ratio - 1) for r in runs for ratio in r["ratios"]]
            load = statistics.median(r["load"] for r in runs)
            lines.append(
                f"| {state} | {runs[0]['every']} | {peer} | {statistics.median(ratios):.1f} % "
                f"| {min(ratios):.0f} .. {max(ratios):.0f} % | {load:.0f} |")  # fmt: skip
    return "\n".join(lines)


def run_all(
    arguments: argparse.Namespace, peers: list[str]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for round_number in range(arguments.rounds):
        for state in arguments.states:
            for peer in peers:
                print(f"round {round_number + 1}: {state} {peer}", file=sys.stderr, flush=True)
                result = run_one(arguments, state, peer)
                if result is not None:
                    results.setdefault(state, {}).setdefault(peer, []).append(result)
                if arguments.output:  # after each process: a run that is ended is not lost
                    write(arguments.output, results)
    return results


def write(output: Path, results: Any) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
               "torch": torch.__version__, "python": platform.python_version(),
               "command": " ".join(sys.argv[1:])}  # fmt: skip
    output.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--size", type=int, default=600, help="state size in MB")
    parser.add_argument("--saves", type=int, default=3, help="saves per figure, process and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=None)
    parser.add_argument("--dir", default=None, help="where the peers write (a real disk)")
    parser.add_argument("--slowdown", action="store_true", help="measure training slowdown instead")
    parser.add_argument("--step-seconds", type=float, default=1.0,
                        help="computing per training step with --slowdown")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, default=None, help="write JSON here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    if arguments.dir:
        Path(arguments.dir).mkdir(parents=True, exist_ok=True)
    peers = arguments.peers
    if peers is None:
        import importlib.util

        missing = {p for p, module in {"moonclip": "moonclip", "safetensors": "safetensors"}.items()
                   if importlib.util.find_spec(module) is None}  # fmt: skip
        peers = [p for p in PEERS if p not in missing and not p.endswith("KiB")]
        if arguments.slowdown:
            peers = ["deltackpt", "dcp.async_save", "dcp.async_save-cached"]
    arguments.compiled = tempfile.mkdtemp(prefix="bench-compiled-", dir=arguments.dir)
    try:
        results = run_all(arguments, peers)
    finally:
        shutil.rmtree(arguments.compiled, ignore_errors=True)
    print(slowdown_table(results) if arguments.slowdown else table(results))
    expected = len(arguments.states) * len(peers) * arguments.rounds
    return 0 if sum(len(r) for p in results.values() for r in p.values()) == expected else 1


if __name__ == "__main__":
    sys.exit(main())
