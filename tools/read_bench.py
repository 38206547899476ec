"""Reading a coded step with one thread, with several, and with helper processes, in turns.

    python tools/read_bench.py [--state dense-adamw] [--size MB] [--rounds N] [--dir DIR]

Saves a state of the benchmark (`bench_states`) three times, so that most chunks are coded against
the first, and reads the last step, from the page cache, into memory that is there: what is compared
is the work of reading, decoding and proving. Prints medians, and their ratios to one thread.
"""

# pyright: basic

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
from bench_states import STATES
from deltackpt_store import Store, read_crew

import deltackpt
from deltackpt.reading import Step

WAYS = {"1 thread": 1, "2 threads": 2, "helpers": None}


def saved(state_name: str, size: int, path: str) -> Store:
    state = STATES[state_name](size * 1_000_000)
    with deltackpt.Checkpointer(path, state.objects) as checkpointer:
        for step in range(3):
            state.advance()
            save = checkpointer.save(step)
            checkpointer.lock()
            save.result(600)
    return Store.open(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--state", choices=STATES, default="dense-adamw")
    parser.add_argument("--size", type=int, default=600, help="state size in MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=None, help="where to save")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="read-bench-", dir=arguments.dir) as folder:
        store = saved(arguments.state, arguments.size, os.path.join(folder, "store"))
        step = Step(store, store.head("main"), None)
        sizes = {e: step.layout.extents[e].nbytes for e in step.extents_of(step.selected)}
        memory = {e: torch.zeros(size, dtype=torch.uint8) for e, size in sizes.items()}
        step.fill(memory, 1)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way, threads in WAYS.items():
                began = time.perf_counter()
                step.fill(memory, threads)
                seconds[way].append(time.perf_counter() - began)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    for way, median in medians.items():
        print(f"{way:10} {median:.3f} s   x {median / medians['1 thread']:.2f}")
    total = sum(sizes.values())
    print(
        f"{total / 1e6:.0f} MB, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.0f}"
    )
    if total < read_crew.CREW_BYTES:
        print("too little for helpers: they were not used")


if __name__ == "__main__":
    main()
