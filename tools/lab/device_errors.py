"""A real training in process mode on a disk (nbdkit) whose reads, writes or flushes fail.

nbdkit serves an image through a plugin that fails on demand; nbdfuse makes a file of it, and the
file system lies on a loop device over that file, so the errors come from below the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

from deltackpt_store.errors import DeltackptError, StorageError

import deltackpt
from lab.guest import HERE
from lab.host import check_image, make_image, mounted
from lab.outcome import Outcome
from lab.torch_training import Training

MEGABYTES = {"ext4": 64, "xfs": 320, "btrfs": 128}
FAULTS = ("write", "flush", "read")
TIMEOUT = 60.0


def device_errors(kind: str, fault: str, work: Path) -> Outcome:
    """One training whose disk begins to fail, is mended, mounted again and goes on."""
    outcome = Outcome(f"device errors, {fault} on {kind}")
    image = make_image(work / f"{kind}-{fault}.img", kind, MEGABYTES[kind])
    flags = work / f"{kind}-{fault}.flags"
    flags.mkdir()
    at = work / f"{kind}-{fault}.mounted"
    with _served(image, flags, work / f"{kind}-{fault}") as disk:
        with mounted(disk, kind, at) as place, contextlib.ExitStack() as mended:
            mended.callback(lambda: (flags / fault).unlink(missing_ok=True))
            training = Training(place / "store", durable_timeout=TIMEOUT)
            mended.callback(training.close)
            _before(training, outcome)
            if fault == "read":
                _reads(training, flags / fault, outcome)
            else:
                _fail(flags / fault, 1)
                _writes(training, outcome)
        with mounted(disk, kind, at):
            _afterwards(training, outcome)
    outcome.violations += [f"after: {kind}: {text}" for text in [check_image(image, kind)] if text]
    image.unlink()
    return outcome


@contextlib.contextmanager
def _served(image: Path, flags: Path, folder: Path) -> Generator[Path]:
    """The image as a file in `folder` that nbdkit serves."""
    folder.mkdir()
    disk = folder / "disk"
    process = subprocess.Popen(  # nbdkit tells every failure that was asked for: not shown
        [
            "nbdfuse", str(disk), "--command", "nbdkit", "-s", "--exit-with-parent", "python",
            str(HERE / "failing_disk.py"), f"file={image}", f"flags={flags}",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not disk.is_file():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("nbdfuse did not serve the disk")
            time.sleep(0.05)
        yield disk
    finally:
        subprocess.run(["fusermount3", "-u", str(folder)], check=False)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _before(training: Training, outcome: Outcome) -> None:
    for _ in range(4):
        training.train()
        error = training.save()
        if error is not None:
            outcome.violations.append(f"a save failed on a good disk: {error}")
    outcome.figures["steps before"] = len(training.durable)


def _writes(training: Training, outcome: Outcome) -> None:
    """Saves must fail, say so in time, and training must be able to go on."""
    errors: list[str] = []
    slowest = 0.0
    for _ in range(3):
        training.train()
        began = time.monotonic()
        error = training.save()
        slowest = max(slowest, time.monotonic() - began)
        if error is None:
            continue  # the file system had not noticed: judged when it is mounted again
        number = error.errno if isinstance(error, StorageError) else None
        errors.append(errno.errorcode.get(number or 0, error.kind))
        if number is None:
            outcome.violations.append(f"an error of the disk was called {error.kind}: {error}")
    outcome.figures["saves refused"] = errors
    if not errors:
        outcome.violations.append("three saves on a failing disk, and no error was told")
    if slowest > 2 * TIMEOUT:
        outcome.violations.append(f"a save took {slowest:.0f} s to fail; the limit was {TIMEOUT}")


def _fail(flag: Path, share: float) -> None:
    new = flag.with_suffix(".new")
    new.write_text(str(share))
    new.rename(flag)


def _reads(training: Training, flag: Path, outcome: Outcome) -> None:
    """What cannot be read is an error; never other bytes."""
    for share in (0.02, 0.1, 0.3, 1):
        _fail(flag, share)
        for step in sorted(training.durable):
            Path("/proc/sys/vm/drop_caches").write_text("3")
            try:
                state = deltackpt.load(training.path, step=step)
            except DeltackptError as error:
                outcome.count("loads refused")
                outcome.figures[f"... as {type(error).__name__}"] = str(error)[-120:]
                continue
            outcome.count("loads that went well")
            if not training.is_step(step, state):
                outcome.violations.append(f"step {step} was read as other bytes than were saved")
    if not outcome.figures.get("loads refused"):
        outcome.violations.append("every load went well on a disk that cannot be read: blind")


def _afterwards(training: Training, outcome: Outcome) -> None:
    """The disk is well again: every durable step is there, and training goes on."""
    outcome.violations += training.violations()
    newest = training.reopen()
    if newest < max(training.durable):
        outcome.violations.append(f"restored {newest}, but {max(training.durable)} was durable")
    for _ in range(2):
        training.train()
        error = training.save()
        if error is not None:
            outcome.violations.append(f"a save failed on the mended disk: {error}")
    outcome.violations += training.violations()
    training.close()
    outcome.figures["steps at the end"] = len(training.durable)
