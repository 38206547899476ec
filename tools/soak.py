"""Random operations for as long as wanted, on simulated disks whose power fails and by real
processes that are killed.

    make soak ARGS="--minutes 60 --seed 7"   rounds 7:0, 7:1, ... until the time is over
    make soak ARGS="--round 7:12"            that round again, with all its operations
    make soak ARGS="--rounds 40"             so many rounds; a seed is chosen and printed
    make soak ARGS="--orders 2"              instead: two writers, a collection and a reader, in
                                             every order with at most so many preemptions

Every round prints its seed. Rounds over simulated disks repeat exactly: operations, file calls,
power cuts and what these left. One round in twenty works with real processes; its operations
repeat, the moments of kills do not. Ends with 1 at the first broken promise.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

Life = Callable[[str, str], Any]
expedition: Life = import_module("expedition").Expedition
voyage: Life = import_module("soaking").Voyage

_REAL_EVERY = 20


def sail(seed: str, show: bool) -> tuple[str, dict[str, int] | None]:
    """Kind of the round, and its figures; None when it has failed, which is told."""
    number = int(seed.rpartition(":")[2])
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        real = number % _REAL_EVERY == _REAL_EVERY - 1
        round_ = (expedition if real else voyage)(seed, f"{directory}/store")
        try:
            round_.go()
        except Exception:
            traceback.print_exc()
            print("\n".join(round_.log))
            return ("processes" if real else "disk"), None
        if show:
            print("\n".join(round_.log))
        return ("processes" if real else "disk"), round_.figures


def seeds(options: argparse.Namespace) -> Iterator[str]:
    if options.round:
        yield from options.round
        return
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    end = time.monotonic() + 60 * options.minutes
    number = options.first
    while number < options.first + options.rounds if options.rounds else time.monotonic() < end:
        yield f"{seed}:{number}"
        number += 1


def every_order(preemptions: int) -> int:
    """Exit code; tells how many schedules of the actors of `gc_world` there were."""

    def no_thread(_: object) -> bool:
        return False

    import_module("deltackpt_store.io_thread").IoThread._start = no_thread  # only actors
    world = import_module("gc_world").World()
    names = ("brief_session", "brief_author", "reader", "collector")
    began = time.process_time()
    schedules = 0
    try:
        for _ in world.every_order([(name, getattr(world, name)) for name in names], preemptions):
            schedules += 1
            if schedules % 1000 == 0:
                print(f"{schedules} schedules", flush=True)
    except Exception:
        traceback.print_exc()
        print(f"schedule {schedules + 1} FAILED; its operations are told above")
        return 1
    print(f"orders: {schedules} schedules of {', '.join(names)} with at most {preemptions}"
          f" preemptions, processor seconds: {time.process_time() - began:.0f}")  # fmt: skip
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, help="instead of minutes")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--round", action="append", metavar="SEED:NUMBER")
    parser.add_argument("--orders", type=int, metavar="PREEMPTIONS",
                        help="every order of four actors, instead of random rounds")  # fmt: skip
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.orders is not None:
        return every_order(options.orders)
    figures: Counter[str] = Counter()
    for seed in seeds(options):
        kind, told = sail(seed, show=bool(options.round))
        if told is None:
            print(f'round {seed} FAILED; again: make soak ARGS="--round {seed}"')
            return 1
        figures.update(told)
        figures["rounds"] += 1
        print(f"round {seed} ({kind}): " + ", ".join(f"{n} {what}" for what, n in told.items()),
              flush=True)  # fmt: skip
    print("soak: " + ", ".join(f"{n} {what}" for what, n in sorted(figures.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
