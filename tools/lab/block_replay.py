"""What the disk holds if its power had gone at any moment: dm-log-writes and replay.

A guest records every write that a file system sends to its disk while a writer saves into it. The
log is then replayed up to every flush, and up to points between flushes where some of the writes
that no flush had made durable are left out, as a disk with a write cache may do. Each state is
mounted, which recovers the file system, and the store in it is checked.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lab.guest import Guest, python
from lab.host import copy_sparse, make_image, mounted
from lab.log_writes import FLUSH, FUA, Entry, apply, read_log
from lab.outcome import Outcome
from lab.workload import violations

MEGABYTES = {"ext4": 192, "xfs": 320, "btrfs": 256}
LOG_MEGABYTES = 1024
STEPS = 20


def replay(kind: str, points: int, seed: int, work: Path, *, without: str = "") -> Outcome:
    """Check about `points` states of one recording. `without` leaves syncs out, on purpose."""
    broken = f" without syncs ({without})" if without else ""
    outcome = Outcome(f"block replay{broken}, {kind}")
    chance = random.Random(f"{seed} replay {kind} {without}")
    base, log = _record(kind, work, without)
    entries = read_log(log)
    states = choose_states(entries, points, chance)
    outcome.figures |= {
        "writes recorded": sum(entry.size > 0 for entry in entries),
        "flushes and FUA": sum(bool(entry.flags & (FLUSH | FUA)) for entry in entries),
        "steps acknowledged": sum(entry.mark.startswith("ack-") for entry in entries),
    }
    found = _check(kind, base, log, entries, states, outcome)
    if without:
        outcome.figures["noticed"] = len(found)
        outcome.figures["first"] = found[0][:200] if found else ""
        if not found:
            outcome.violations.append(f"{kind}: states without syncs ({without}) passed: blind")
    else:
        outcome.violations += [f"{kind}, seed {seed}, {text}" for text in found]
    base.unlink()
    log.unlink()
    return outcome


def _record(kind: str, work: Path, without: str) -> tuple[Path, Path]:
    """A recording of a whole training: the disk before it, and the log of its writes."""
    disk = make_image(work / f"{kind}-recorded.img", kind, MEGABYTES[kind])
    base, log = work / f"{kind}-base.img", work / f"{kind}-log.img"
    copy_sparse(disk, base)
    with open(log, "wb") as file:
        file.truncate(LOG_MEGABYTES << 20)
    config = {
        "store": "/mnt/disk/store", "mode": "thread" if without else "process", "steps": STEPS,
        "without": without, "marks": "recorded", "keep": not without, "collect": not without,
        "one_by_one": True,
    }  # fmt: skip
    sectors = (MEGABYTES[kind] << 20) // 512
    job = [
        "modprobe -d /mnt/root dm-log-writes",
        f"dmsetup create recorded --table '0 {sectors} log-writes /dev/ubda /dev/ubdb'",
        "dmsetup mknodes",
        f"mount -t {kind} /dev/mapper/recorded /mnt/disk",
        "cd /mnt/tmp",
        python("lab.writing", config),
        "umount /mnt/disk",
        "dmsetup remove recorded",
    ]
    Guest(work, job, [disk, log]).finish(900)
    disk.unlink()
    return base, log


@dataclass(frozen=True)
class State:
    """Everything before `until` has been written, but for `lost` (numbers of entries)."""

    until: int
    lost: frozenset[int] = frozenset()


def choose_states(entries: list[Entry], points: int, chance: random.Random) -> list[State]:
    """Prefixes that end at flushes and FUA writes, and states between, half and half at most."""
    syncs = [i + 1 for i, entry in enumerate(entries) if entry.durable or entry.flags & FUA]
    if len(syncs) > points // 2:
        syncs = sorted(chance.sample(syncs, points // 2))
    states = [State(until) for until in syncs]
    while len(states) < points:
        until = chance.randint(1, len(entries))
        states.append(State(until, _losable(entries, until, chance)))
    return sorted(states, key=lambda state: state.until)


def _losable(entries: list[Entry], until: int, chance: random.Random) -> frozenset[int]:
    """Some of the writes that the disk may have kept in its cache only."""
    begin = max((i for i in range(until) if entries[i].durable), default=0)
    cached = [i for i in range(begin, until) if entries[i].size and not entries[i].flags & FUA]
    share = chance.choice([0.0, 0.3, 0.7, 1.0])
    return frozenset(i for i in cached if chance.random() < share)


def _check(
    kind: str, base: Path, log: Path, entries: list[Entry], states: list[State], outcome: Outcome
) -> list[str]:
    """Bring `base` from state to state; look at a copy of each."""
    found: list[str] = []
    scratch = base.with_suffix(".scratch")
    done = 0
    acknowledged: list[int] = []
    with open(log, "rb") as source, open(base, "r+b") as disk:
        for state in states:
            # What a state loses comes after the last flush before it, and so do all later states'
            # losses: everything up to that flush can be applied for good.
            firm = min(state.lost, default=state.until)
            done = max(done, _advance(entries, done, firm, source, disk))
            disk.flush()
            copy_sparse(base, scratch)
            with open(scratch, "r+b") as trial:
                for i in range(done, state.until):
                    if i not in state.lost:
                        apply(entries[i], source, trial)
            marks = [e.mark for e in entries[: state.until] if e.mark.startswith("ack-")]
            acknowledged = [int(mark[4:]) for mark in marks]
            where = f"{state.until} of {len(entries)} writes, {len(state.lost)} lost"
            found += [f"after {where}: {text}" for text in _look(kind, scratch, acknowledged)]
            outcome.count("states checked")
            outcome.count("states with lost writes", bool(state.lost))
            if len(found) > 20:
                break
    scratch.unlink()
    return found


def _advance(
    entries: list[Entry], done: int, until: int, source: BinaryIO, disk: BinaryIO
) -> int:  # fmt: skip
    for i in range(done, until):
        apply(entries[i], source, disk)
    return until


def _look(kind: str, image: Path, acknowledged: list[int]) -> list[str]:
    try:
        with mounted(image, kind) as place:
            path = place / "store"
            if not acknowledged and not path.exists():
                return []
            return violations(str(path), acknowledged)
    except RuntimeError as error:
        return [f"the file system cannot be mounted: {error}"]
    finally:
        shutil.rmtree(image.with_suffix(".mounted"), ignore_errors=True)
