"""The program that saves inside a guest, until it has saved enough or the kernel is killed.

``python -m lab.writing '{"store": ..., "last": ..., ...}'``. Tells on the console what it has
found at the start, and each step the moment it is acknowledged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

from deltackpt_store.client import Outcome
from deltackpt_store.compact import compact
from deltackpt_store.errors import ConflictError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.protocol import Committed
from deltackpt_store.retention import Keep
from deltackpt_store.store import Store

from lab.guest import PREFIX
from lab.workload import KEEP, Trainer, Unsynced, violations


def tell(**message: Any) -> None:
    """One line to the host, at once."""
    print(PREFIX + json.dumps(message), flush=True)


def main() -> None:
    config = json.loads(sys.argv[1])
    path, run = config["store"], config.get("run", "main")
    acknowledged = config.get("acknowledged")
    if acknowledged is not None:
        pins = config.get("pins", ())
        tell(found=violations(path, acknowledged, run=run, pins=pins))
    io = Unsynced(config["without"]) if config.get("without") else None
    marks = config.get("marks")

    def told(save: int, outcome: Outcome) -> None:
        del save
        if not isinstance(outcome, Committed):
            tell(failed=str(outcome))
            return
        if marks:
            subprocess.run(
                ["dmsetup", "message", marks, "0", "mark", f"ack-{outcome.step}"], check=True
            )
        tell(ack=outcome.step)

    keep = Keep(last=KEEP) if config.get("keep") else None
    mode = config.get("mode", "process")
    trainer = Trainer(path, run, mode=mode, io=io, keep=keep, told=told)
    first = trainer.next_step()
    tell(ready=first)
    stop = threading.Event()
    if config.get("collect"):
        threading.Thread(target=_collect, args=(path, io, stop), daemon=True).start()
    for step in range(first, first + config["steps"]):
        save = trainer.save(step)
        if config.get("one_by_one"):
            trainer.client.result(save, 300)
        if config.get("pin_every") and step % config["pin_every"] == 0:
            _pin(path, io, run, trainer.client.result(save, 300).number)
        time.sleep(config.get("pause", 0.0))
    trainer.client.close(300)
    stop.set()
    tell(closed=True)


def _collect(path: str, io: FileIO | None, stop: threading.Event) -> None:
    """Collect garbage and compact beside the writer, again and again."""
    while not stop.wait(0.2):
        try:
            report = collect(Store.open(path, io=io), timeout=120)
            tell(collected=len(report.packs))
            if not stop.wait(0.2):
                tell(compacting=1)
                compact(Store.open(path, io=io), min_live_share=0.9, timeout=120)
                tell(compacted=1)
        except ConflictError:
            continue


def _pin(path: str, io: FileIO | None, run: str, number: int) -> None:
    """Pin the newest step: it must outlive retention and collection from here on."""
    store = Store.open(path, io=io)
    for name in sorted(store.pins())[:-2]:
        tell(unpinning=name)
        store.unpin(name)
    commit = store.read_commit(run, number)
    name = f"step-{commit.step:08d}"
    store.pin(name, commit)
    tell(pinned=name)


if __name__ == "__main__":
    main()
