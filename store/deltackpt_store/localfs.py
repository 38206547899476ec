"""Where a memory-mapped, locked cache may live: never on a network file system, nor on btrfs."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile

_MAPPABLE = frozenset(
    [
        "ext2", "ext3", "ext4", "xfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "aufs", "jfs",
        "reiserfs", "vfat", "exfat", "ntfs", "ntfs3", "fuseblk", "fuse.fuse-overlayfs", "ubifs",
        "rootfs", "apfs", "hfs", "ufs",
    ]
)  # fmt: skip
_OCTAL = re.compile(r"\\([0-7]{3})")


def filesystem_type(path: str, mounts: str = "/proc/self/mountinfo") -> str:
    """Type of the file system that holds `path` ("ext4", "nfs4", ...), "unknown" if not found."""
    real = os.path.realpath(path)
    best, found = -1, "unknown"
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                front, _, back = line.partition(" - ")
                fields, kind = front.split(), back.split()
                if len(fields) < 5 or not kind:
                    continue
                point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), fields[4])
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= best:  # a later mount at the same place hides this one
                    best, found = len(point), kind[0]
    except OSError:
        pass
    return found


def may_map(path: str) -> bool:
    """Whether memory maps and locks can be relied on where `path` lies.

    Not on network file systems (NFS, SMB, Lustre, Ceph, 9p, FUSE mounts, ...) and unknown ones.
    Not on btrfs, bcachefs and nilfs2 either: there a mapped page needs new space whenever it is
    written to again, and a process that does so on a full disk is killed (SIGBUS).
    """
    return filesystem_type(path) in _MAPPABLE


def index_directory(store_path: str, store_uuid: bytes) -> str | None:
    """Where the index of a store lives: inside it, or in the user's local cache directory.

    The latter (``$XDG_CACHE_HOME`` or ``~/.cache``, else the temporary directory) is keyed by
    store uuid and path, so that copies of a store do not share an index. None when no local place
    is known, or where somebody else has made this user's folder in the temporary directory. Nothing
    is created.
    """
    if may_map(store_path) and os.access(store_path, os.W_OK):
        return os.path.join(store_path, "cache", "index")
    place = hashlib.blake2b(os.fsencode(os.path.realpath(store_path)), digest_size=8).hexdigest()
    shared = _shared_folder()
    for top in (os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), shared):
        if top == shared and _is_anothers(top):
            continue
        if os.path.isabs(top) and may_map(_existing_parent(top)):
            return os.path.join(top, "deltackpt", f"{store_uuid.hex()}-{place}")
    return None


def _shared_folder() -> str:
    """This user's folder in the temporary directory; "" where there is none (a container may be
    read-only but for the store)."""
    try:
        return os.path.join(tempfile.gettempdir(), f"deltackpt-{os.getuid()}")
    except OSError:
        return ""


def _existing_parent(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _is_anothers(path: str) -> bool:
    """Whether what lies there is no folder of this user's: others may have made it first."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)
