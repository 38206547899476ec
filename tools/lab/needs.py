"""What the lab needs of this machine, and how Debian provides it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

COMMANDS = {
    "linux.uml": "user-mode-linux",
    "modprobe": "kmod",
    "dmsetup": "dmsetup",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "rpc.nfsd": "nfs-kernel-server",
    "mount.nfs4": "nfs-common",
    "nbdkit": "nbdkit",
    "nbdfuse": "libnbd-bin",
    "fusermount3": "fuse3",
    "unshare": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
}
"""Command -> Debian package."""

_PLUGIN = "nbdkit/plugins/nbdkit-python-plugin.so"
_FOLDERS = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")


def missing() -> list[str]:
    """Everything that is not there, in words; empty when the lab can run."""
    packages = {
        package for command, package in COMMANDS.items()
        if not any(shutil.which(command, path=folder) for folder in _FOLDERS)
    }  # fmt: skip
    if not list(Path("/usr/lib").glob(f"*/{_PLUGIN}")) and not Path("/usr/lib", _PLUGIN).exists():
        packages.add("nbdkit-plugin-python")
    found: list[str] = []
    if packages:
        found.append(f"packages: apt-get install {' '.join(sorted(packages))}")
    if os.geteuid() != 0:
        found.append("root (mounts, loop devices): run it as root")
    found += [
        f"{device}: this kernel has none, or it is not passed in"
        for device in ("/dev/loop-control", "/dev/fuse")
        if not Path(device).exists()
    ]
    known = Path("/proc/filesystems").read_text().split()
    for kind in ("ext4", "xfs", "btrfs"):
        if kind not in known and not Path("/sbin/modprobe").exists():
            found.append(f"{kind} in this machine's kernel")
    return found
