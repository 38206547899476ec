"""The kernel is killed under a writer at a random moment; then the store is looked at.

One disk image goes through all crashes of a file system: recovered by this machine's kernel or by
the next guest, checked, then written to by a new writer, which is killed again. Retention,
collection, compaction and pins run beside the writer.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from deltackpt_store.store import Store

from lab.guest import Guest, Message, python
from lab.host import check_image, make_image, mounted
from lab.outcome import Outcome
from lab.workload import Trainer, violations

MEGABYTES = 512
PROOF_TRIES = 10
BROKEN = ("files", "directories", "all")


def _job(kind: str, config: dict[str, Any]) -> list[str]:
    return [
        f"mount -t {kind} /dev/ubda /mnt/disk",
        "cd /mnt/tmp",
        python("lab.writing", {"store": "/mnt/disk/store", **config}),
    ]


class _Disk:
    """An image, and what has been acknowledged on it."""

    def __init__(self, work: Path, kind: str, name: str) -> None:
        self.kind = kind
        self.work = work
        self.image = make_image(work / f"{name}.img", kind, MEGABYTES)
        self.acknowledged: list[int] = []
        self.pins: set[str] = set()

    def learn(self, messages: list[Message]) -> None:
        for message in messages:
            if "ack" in message:
                self.acknowledged.append(message["ack"])
            if "pinned" in message:
                self.pins.add(message["pinned"])
            self.pins.discard(message.get("unpinning", ""))

    def check_here(self, *, keep: bool, go_on: bool, deep: bool = False) -> list[str]:
        """Recover and check with this machine's kernel; with `go_on` a new writer saves a step."""
        with mounted(self.image, self.kind) as place:
            path = str(place / "store")
            options: dict[str, Any] = {"pins": self.pins, "deep": deep}
            if not keep:
                options["keep"] = None
            found = violations(path, self.acknowledged, **options)
            if go_on and not found:
                trainer = Trainer(path, mode="thread")
                step = trainer.next_step()
                trainer.client.result(trainer.save(step), 120)
                trainer.client.close(120)
                self.acknowledged.append(step)
                found = violations(path, self.acknowledged, **options)
        return found


def crash(kind: str, crashes: int, seed: int, work: Path) -> Outcome:
    """`crashes` kernel crashes on one image."""
    outcome = Outcome(f"kernel crash, {kind}")
    disk = _Disk(work, kind, kind)
    for number in range(crashes):
        chance = random.Random(f"{seed} {kind} {number}")
        config = {
            "mode": chance.choice(["process", "thread"]), "keep": True, "collect": True,
            "pin_every": 5, "steps": 100_000, "acknowledged": disk.acknowledged[-50:],
            "pins": sorted(disk.pins),
        }  # fmt: skip
        guest = Guest(work, _job(kind, config), [disk.image])
        try:
            first = guest.wait_for(lambda message: "found" in message)
            _kill_at_random(guest, chance)
        finally:
            guest.kill()
        messages = guest.messages()
        disk.learn(messages)
        found = list(first["found"])
        found += [f"a save failed: {m['failed']}" for m in messages if "failed" in m]
        here = chance.random() < 0.5 or number == crashes - 1
        if here:
            found += disk.check_here(keep=True, go_on=True, deep=number == crashes - 1)
        _count(outcome, messages, "recovered by this machine" if here else "recovered by a guest")
        outcome.violations += [f"{kind}, crash {number + 1}, seed {seed}: {t}" for t in found]
        if found:
            break
    complaint = check_image(disk.image, kind)
    if complaint:
        outcome.violations.append(f"{kind}: the file system itself is damaged: {complaint[-500:]}")
    disk.image.unlink()
    return outcome


def _kill_at_random(guest: Guest, chance: random.Random) -> None:
    """Return at the moment of the kill: at or soon after an acknowledgement, or at any time."""
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0.0, 3.0))  # perhaps while the store is being opened
        return
    for _ in range(chance.randint(1, chance.choice([12, 12, 50]))):
        guest.wait_for(lambda message: "ack" in message)
    time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.05), chance.uniform(0.0, 1.0)]))


def _count(outcome: Outcome, messages: list[Message], recovery: str) -> None:
    outcome.count("crashes")
    outcome.count(recovery)
    outcome.count("acknowledged steps", sum("ack" in message for message in messages))
    outcome.count("packs collected", sum(message.get("collected", 0) for message in messages))
    begun = sum("compacting" in message for message in messages)
    outcome.count("compactions begun", begun)
    outcome.count("compactions completed", sum("compacted" in message for message in messages))
    outcome.count("pins", sum("pinned" in message for message in messages))


def prove_not_blind(kind: str, seed: int, work: Path) -> Outcome:
    """With syncs left out on purpose the same trial must find lost steps."""
    outcome = Outcome(f"kernel crash without syncs, {kind}")
    for without in BROKEN:
        found: list[str] = []
        tries = 0
        while not found and tries < PROOF_TRIES:
            tries += 1
            found = _crash_without(without, kind, random.Random(f"{seed} {without} {tries}"), work)
        outcome.figures[f"without {without}"] = (
            f"noticed at crash {tries}: {found[0][:160]}" if found else f"unnoticed in {tries}"
        )
        if not found:
            outcome.violations.append(
                f"{kind}: {tries} crashes without syncs ({without}) went unnoticed: blind"
            )
    return outcome


def _crash_without(without: str, kind: str, chance: random.Random, work: Path) -> list[str]:
    """One crash right after an acknowledgement that was not honest."""
    disk = _Disk(work, kind, f"{kind}-broken")
    with mounted(disk.image, kind) as place:
        Store.create(place / "store")
    config = {"mode": "thread", "without": without, "steps": 100_000, "one_by_one": True}
    guest = Guest(work, _job(kind, config), [disk.image])
    try:
        for _ in range(chance.randint(1, 6)):
            guest.wait_for(lambda message: "ack" in message)
    finally:
        guest.kill()
    disk.learn(guest.messages())
    found = disk.check_here(keep=False, go_on=False)
    disk.image.unlink()
    return found
