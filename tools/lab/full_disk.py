"""A real training in process mode on a file system that is full, again and again.

A file takes the space away until between nothing and two saves' worth is free, so that the disk
is full at different files of a save. Each time the trainer must be told, earlier steps must be
intact, retention and collection must work on the full disk, and saving goes on afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Generator
from pathlib import Path

from deltackpt_store.errors import StorageError
from deltackpt_store.gc import collect
from deltackpt_store.retention import Keep
from deltackpt_store.retention import apply as retain
from deltackpt_store.store import Store

from lab.host import make_image, mounted, run
from lab.outcome import Outcome
from lab.torch_training import STEP_BYTES, Training

MEGABYTES = {"tmpfs": 48, "ext4": 64, "xfs": 320, "btrfs": 128}
FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(kind: str, rounds: int, seed: int, work: Path) -> Outcome:
    """`rounds` times a full file system of `kind` under one training."""
    outcome = Outcome(f"full disk, {kind}")
    with _file_system(kind, work) as place:
        trial = _Trial(place, outcome, random.Random(f"{seed} full {kind}"))
        try:
            trial.begin()
            for number in range(rounds):
                trial.round()
                if outcome.violations:
                    outcome.violations[0] += f" ({kind}, round {number + 1}, seed {seed})"
                    break
            trial.end()
        finally:
            trial.training.close()
    return outcome


@contextlib.contextmanager
def _file_system(kind: str, work: Path) -> Generator[Path]:
    if kind == "tmpfs":
        place = work / "tmpfs"
        place.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES[kind]}m", "tmpfs", place)
        try:
            yield place
        finally:
            run("umount", place)
        return
    with mounted(make_image(work / f"full-{kind}.img", kind, MEGABYTES[kind]), kind) as place:
        yield place


class _Trial:
    def __init__(self, place: Path, outcome: Outcome, chance: random.Random) -> None:
        self.place = place
        self.filler = place / "filler"
        self.outcome = outcome
        self.chance = chance
        # Saves of equal size: so that the disk can be made full just before the end of one.
        self.training = Training(place / "store", codec="none")
        self.gone: frozenset[int] = frozenset()
        self.cost = STEP_BYTES
        """Bytes of the packs of the last save, in whole blocks."""
        self.started_anew = False

    def begin(self) -> None:
        for _ in range(3):
            self.training.train()
            self._must_save("on an empty disk")

    def round(self) -> None:
        """Fill the disk, save until it is full, look, make room in one of two ways, save."""
        training = self.training
        anywhere = self.chance.randint(0, 2 * STEP_BYTES)
        near_the_end = self.cost + 4096 * self.chance.randint(-1, 2)  # at the manifest or record
        self._fill(self.chance.choice([anywhere, near_the_end, near_the_end]))
        for _ in range(20):
            training.train()
            error = training.save()
            if error is not None:
                break
        else:
            self.outcome.violations.append("20 saves went onto a full disk")
            return
        self.outcome.count("saves refused")
        self.outcome.count(f"... at: {_where(str(error))}")
        if not isinstance(error, StorageError) or error.errno not in FULL:
            self.outcome.violations.append(f"a full disk was called {error.kind}: {error}")
        if error.hint is None or str(self.place) not in str(error):
            self.outcome.violations.append(f"the error names no path or no way out: {error}")
        self._look()
        if self.chance.random() < 0.5:
            self._fill(0)
            self._collect()
        elif self.chance.random() < 0.5:
            self._fill(0)
            self._start_anew()
        self.filler.unlink(missing_ok=True)
        self._go_on()
        self._must_save("after there was room again")
        self._look()
        self._collect()

    def _start_anew(self) -> None:
        """A new checkpointer on the full disk restores, or is refused in so many words."""
        try:
            self.training.reopen()
            self.outcome.count("restarts on a full disk")
        except StorageError as error:
            self.outcome.count("restarts on a full disk that were refused")
            if error.errno not in FULL:
                self.outcome.violations.append(f"a full disk was called {error.kind}: {error}")
            self.started_anew = True

    def _go_on(self) -> None:
        if self.started_anew:
            self.training.reopen()
            self.started_anew = False
        if self.training.step < (newest := max(self.training.durable)):
            self.outcome.violations.append(f"{self.training.step} was restored, not {newest}")
        if self.training.step in self.training.durable:
            self.training.train()

    def end(self) -> None:
        """What a new process finds."""
        if self.filler.exists():
            self.filler.unlink(missing_ok=True)
        newest = max(self.training.durable)
        if self.training.reopen() != newest:
            self.outcome.violations.append(f"the newest step {newest} was not restored")
        self.training.train()
        self._must_save("by a new checkpointer")
        self._look()

    def _must_save(self, when: str) -> None:
        packs = self.training.path / "packs"
        before = set(packs.glob("*/*.pack"))
        error = self.training.save()
        if error is not None:
            self.outcome.violations.append(f"a save failed {when}: {error}")
        fresh = set(packs.glob("*/*.pack")) - before
        self.cost = sum(-(-path.stat().st_size // 4096) * 4096 for path in fresh)
        self.outcome.count("saves")

    def _look(self) -> None:
        self.outcome.violations += self.training.violations(gone=self.gone)

    def _collect(self) -> None:
        """Retention and collection beside the open trainer; they must always work."""
        store = Store.open(self.training.path)
        retired = retain(store, "main", Keep(last=2)).retired
        self.gone |= {commit.step for commit in retired}
        report = collect(store)
        self.outcome.count("collections on a full disk" if self.filler.exists() else "collections")
        self.outcome.count("packs collected", len(report.packs))

    def _fill(self, leave: int) -> None:
        """Leave about `leave` bytes."""
        for piece in (1 << 20, 1 << 16, 1 << 12):
            with contextlib.suppress(OSError), open(self.filler, "ab", buffering=0) as file:
                while _free(self.place) >= leave + piece:
                    file.write(bytes(piece))
                    os.fsync(file.fileno())


def _free(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def _where(text: str) -> str:
    """Which kind of file an error is about, as far as its message tells."""
    for word in ("packs", "manifests", "runs", "gc", "cache"):
        if f"store/{word}" in text:
            return word
    return "elsewhere"
