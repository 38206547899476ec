"""Commands, images and mounts of this machine. All mounts are private to the lab's namespace."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
_CHECK = {
    "ext4": ["e2fsck", "-f", "-n"],
    "xfs": ["xfs_repair", "-n"],
    "btrfs": ["btrfs", "check", "--readonly"],
}


def run(*command: str | Path, timeout: float = 300.0) -> str:
    """Run a command; its output. RuntimeError with that output when it fails."""
    done = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}")
    return done.stdout


def make_image(path: Path, kind: str, megabytes: int) -> Path:
    """A sparse file with an empty file system on it."""
    with open(path, "wb") as file:
        file.truncate(megabytes << 20)
    run(*_MAKE[kind], path)
    return path


def copy_sparse(source: Path, target: Path) -> None:
    """Copy only what is not a hole."""
    run("cp", "--sparse=always", source, target)


def check_image(path: Path, kind: str) -> str:
    """What the file system's own checker has to complain about; "" when nothing."""
    try:
        run(*_CHECK[kind], path)
    except RuntimeError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def mounted(image: Path, kind: str, place: Path | None = None) -> Generator[Path]:
    """`image` mounted at `place`, or beside it; recovery of the file system happens here."""
    place = place or image.with_suffix(".mounted")
    place.mkdir(exist_ok=True)
    run("mount", "-t", kind, "-o", "loop", image, place)
    try:
        yield place
    finally:
        os.sync()
        run("umount", place)
