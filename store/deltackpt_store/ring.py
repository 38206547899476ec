"""The staging ring: bounded shared memory between the trainer and its writer.

One anonymous memory file of `slots` slots of `slot_bytes` each, mapped by both sides. The file is
sparse: a slot costs memory only once it has been written, and because free slots are handed out
lowest number first, a run uses (and keeps warm) no more slots than its saves need. Leases decide
which side may touch a slot; the trainer's :class:`SlotPool` keeps them: free -> acquired (the
trainer fills it) -> sent (the writer reads it) -> free again, when every blob in it is durable.
The memory lives until the last process that maps it ends, so a dead trainer's slots stay readable.

What is copied into memory that no save has used yet is written to the file instead: the kernel then
fills whole new pages, where a mapping would trap at every page, and clear it before it is filled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import mmap
import os
import tempfile
import threading
from typing import Any

from deltackpt_store.copies import GIL_FREE_BYTES, copy_bytes
from deltackpt_store.descriptors import above_standard
from deltackpt_store.errors import (
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    StateError,
    StorageError,
)

DEFAULT_SLOT_BYTES = 4 * 1024 * 1024
MAX_SLOTS = 1 << 20
_NOEXEC_SEAL = 8
"""MFD_NOEXEC_SEAL: systems may refuse memory files that could be executed (vm.memfd_noexec)."""

_NO_MEMORY_FILES = frozenset((errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOSYS))

_FAULT_AROUND = 65536
"""How far apart to look at memory so that each page fault maps its neighbours, too."""


class Ring:
    """Mapping of the shared memory. Views of any slot stay valid until :meth:`close`.

    Not tied to a thread; the memory itself has no locks (leases say who may touch a slot).
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, slots * slot_bytes, mmap.MAP_SHARED)
        self._view: memoryview | None = memoryview(self._map)
        self._writing = threading.Lock()  # held while the descriptor is written to, or closed
        self._used: dict[int, int] = {}  # slot -> how far it has ever been filled by `put`

    @classmethod
    def create(
        cls, ring_bytes: int, slot_bytes: int = DEFAULT_SLOT_BYTES, *, memory: int = -1
    ) -> Ring:
        """A new ring of ``max(1, ring_bytes // slot_bytes)`` slots; no memory is touched yet.

        `memory` is a `memory_file` to use, which is taken over in any case.
        Raises `InvalidInputError` for sizes that cannot be used and `StorageError` when the
        system gives no shared memory.
        """
        fd = memory
        try:
            slots = _slots(ring_bytes, slot_bytes)
            fd = memory_file() if fd < 0 else fd
            set_size(fd, slots * slot_bytes)
            return cls(fd, slots, slot_bytes)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            system = isinstance(error, (OSError, ValueError, OverflowError))
            if isinstance(error, DeltackptError) or not system:
                raise
            raise _no_ring(f"cannot make a staging ring of {ring_bytes} bytes", error) from error

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int) -> Ring:
        """Map a ring that the other side created; takes over `fd`.

        Raises `CorruptionError` when the file is not of the promised size, `StorageError` when it
        cannot be mapped.
        """
        size = os.fstat(fd).st_size
        if slots < 1 or slot_bytes < 1 or size != slots * slot_bytes:
            raise CorruptionError(
                f"staging ring has {size} bytes, expected {slots} slots of {slot_bytes}",
                kind="ring",
            )
        try:
            return cls(fd, slots, slot_bytes)
        except OSError as error:
            raise _no_ring(
                f"the writer cannot map the staging ring of {size} bytes", error
            ) from error

    def view(self, slot: int) -> memoryview:
        """The writable bytes of one slot. The caller must hold its lease."""
        if self._view is None:
            raise StateError("the staging ring is closed")
        if not 0 <= slot < self.slots:
            raise InvalidInputError(f"slot {slot} is outside the ring of {self.slots} slots")
        start = slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def put(self, slot: int, at: int, data: memoryview) -> None:
        """Copy `data` to byte `at` of a slot whose lease the caller holds.

        May be called by several threads, each with its own slots. `StorageError` when the system
        has no memory left.
        """
        room = self.view(slot)[at : at + len(data)]
        if len(data) < GIL_FREE_BYTES:
            copy_bytes(room, data)
            return
        if at >= self._used.get(slot, 0):
            self._used[slot] = at + len(data)
            if self._write(slot * self.slot_bytes + at, data):
                return
        room[::_FAULT_AROUND].tobytes()  # of pages that were written to the file and not mapped
        copy_bytes(room, data)

    def _write(self, at: int, data: memoryview) -> bool:
        """Write to the file; False when it has been closed."""
        with self._writing:  # the system lets one thread at a time write to a file, too
            if self.fd < 0:
                return False
            try:
                while len(data):
                    done = os.pwrite(self.fd, data, at)
                    at, data = at + done, data[done:]
            except OSError as error:
                raise StorageError(
                    f"the staging ring gets no more memory: {error}", errno=error.errno,
                    hint="choose a smaller ring_bytes",
                ) from error  # fmt: skip
        return True

    def close(self) -> None:
        """Unmap and close. Memory that the caller's views still name goes with the last of them."""
        with self._writing:
            self.close_fd()
        if self._view is not None:
            self._view.release()
            self._view = None
            with contextlib.suppress(BufferError):  # unmapped when the last view dies
                self._map.close()

    def close_fd(self) -> None:
        """Close the descriptor alone: what a forked child does, whose mapping must stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class SlotPool:
    """Lease book of a ring, trainer side. Not locked: the owner serialises calls."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))  # a sorted list is a heap
        self._acquired: set[int] = set()
        self._sent: set[int] = set()
        self.high_water = 0

    def acquire(self) -> int | None:
        """The lowest free slot, now leased to the trainer; None when there is none."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._acquired.add(slot)
        self.high_water = max(self.high_water, slot + 1)
        return slot

    def send(self, slot: int) -> None:
        """The trainer filled `slot`; from now on it belongs to the writer."""
        if slot not in self._acquired:
            raise StateError(f"slot {slot} is not leased to the trainer", slot=slot)
        self._acquired.remove(slot)
        self._sent.add(slot)

    def give_back(self, slot: int) -> None:
        """The trainer does not need `slot` after all."""
        if slot not in self._acquired:
            raise StateError(f"slot {slot} is not leased to the trainer", slot=slot)
        self._acquired.remove(slot)
        heapq.heappush(self._free, slot)

    def release(self, slot: int) -> None:
        """The writer is done with `slot`."""
        if slot not in self._sent:
            raise StateError(f"the writer released slot {slot}, which it does not hold", slot=slot)
        self._sent.remove(slot)
        heapq.heappush(self._free, slot)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def acquired(self) -> int:
        return len(self._acquired)

    @property
    def sent(self) -> int:
        return len(self._sent)


def _slots(ring_bytes: int, slot_bytes: int) -> int:
    if slot_bytes < mmap.PAGESIZE or slot_bytes % mmap.PAGESIZE:
        raise InvalidInputError(
            f"slot_bytes must be a positive multiple of {mmap.PAGESIZE}, got {slot_bytes}",
            option="slot_bytes",
        )
    if ring_bytes <= 0:
        raise InvalidInputError(
            f"ring_bytes must be positive, got {ring_bytes}", option="ring_bytes"
        )
    return min(MAX_SLOTS, max(1, ring_bytes // slot_bytes))


def _no_ring(what: str, error: BaseException) -> StorageError:
    number = error.errno if isinstance(error, OSError) else None
    ways = {
        errno.EMFILE: "raise `ulimit -n`",
        errno.EFBIG: "raise `ulimit -f`",
        errno.ENOENT: "set TMPDIR to a folder that can be written to",
    }
    hint = ways.get(number or 0, "choose a smaller ring_bytes")
    return StorageError(f"{what}: {error}", errno=number, hint=hint)


def memory_file() -> int:
    """Anonymous shared memory of no size yet, as a close-on-exec descriptor. OSError.

    An unlinked temporary file where the system has no memory files, or a sandbox refuses them.
    """
    if hasattr(os, "memfd_create"):
        plain = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        for flags in (plain | _NOEXEC_SEAL, plain):
            try:
                return above_standard(os.memfd_create("deltackpt-ring", flags))
            except OSError as error:
                if error.errno not in _NO_MEMORY_FILES:
                    raise
    with tempfile.TemporaryFile(prefix="deltackpt-ring-") as file:
        return above_standard(os.dup(file.fileno()))


def set_size(memory: int, size: int) -> None:
    """Give a memory file its size, for good. OSError."""
    os.ftruncate(memory, size)
    try:
        # A sealed size: neither side can make the other die of SIGBUS by truncating the file.
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (OSError, AttributeError):
        # A file on a disk: writing through a mapping would be a SIGBUS when the disk is full.
        os.posix_fallocate(memory, 0, size)
