"""NFSv4.2: a server and two clients that share no cache, all in one guest, which is killed at last.

Two writers on different clients save into two runs of one store, while a reader and a collection
work on the second client; the server is restarted under them. See `nfs_guest` for what is tried.
"""

from __future__ import annotations

from pathlib import Path

from lab.guest import Guest, python
from lab.host import make_image, mounted
from lab.outcome import Outcome
from lab.workload import violations

MEGABYTES = 512
RUNS = ("a", "b")
SECONDS = 900.0

SERVE = "rpc.nfsd --no-nfs-version 3 --grace-time 10 --lease-time 10 8"
"""Starts the server; it waits 10 s for clients that held something before a restart."""

_SERVER = [
    "mount -t ext4 /dev/ubda /mnt/disk",
    "modprobe -d /mnt/root nfsd",
    "modprobe -d /mnt/root nfsv4",
    "mount -t tmpfs tmpfs /var/lib/nfs",
    "mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /var/lib/nfs/nfsdcld",
    "touch /var/lib/nfs/etab /var/lib/nfs/rmtab",
    "mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs",
    "mount -t nfsd nfsd /proc/fs/nfsd",
    "nfsdcld",
    "exportfs -i -o rw,sync,no_root_squash,insecure,no_subtree_check,fsid=0 127.0.0.1:/mnt/disk",
    "rpc.mountd --no-nfs-version 2 --no-nfs-version 3",
    SERVE,
    "mkdir /mnt/a /mnt/b",
    *(
        f"mount -t nfs4 -o vers=4.2,hard,nosharecache,noatime 127.0.0.1:/ /mnt/{client}"
        for client in RUNS
    ),
]


def nfs(work: Path) -> Outcome:
    """One boot of everything, ended by a kernel crash under both writers."""
    outcome = Outcome("NFSv4.2, two clients")
    image = make_image(work / "nfs.img", "ext4", MEGABYTES)
    guest = Guest(work, [*_SERVER, python("lab.nfs_guest", {})], [image], memory="1G")
    try:
        guest.wait_for(lambda message: "done" in message or "exit" in message, SECONDS)
    finally:
        guest.kill()
    acknowledged: dict[str, list[int]] = {run: [] for run in RUNS}
    for message in guest.messages():
        outcome.figures |= message.get("figures", {})
        outcome.violations += message.get("violations", [])
        if "ack" in message:
            acknowledged[message["run"]].append(message["ack"])
    if not any("done" in message for message in guest.messages()):
        outcome.violations.append("\n".join(["the trial did not come to its end", *guest.lines]))
    with mounted(image, "ext4") as place:
        for run, steps in acknowledged.items():
            outcome.figures[f"steps acknowledged by writer {run}"] = len(steps)
            found = violations(str(place / "store"), steps, run=run, deep=True)
            outcome.violations += [f"after the crash, run {run}: {text}" for text in found]
    image.unlink()
    return outcome
