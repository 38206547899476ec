"""An in-memory file layer that knows what a power cut could leave behind.

Model (after ALICE, Pillai et al., OSDI 2014, on a file system that promises only POSIX fsync):

- Bytes written to a file are durable once that file was synced; until then each write may be
  lost, kept, torn at a 512-byte sector, or leave zeros where the file had already been extended.
- A name created in, or removed from, a directory is durable once that directory was synced;
  until then each such change may be lost or kept, independently of all others and of file syncs.

`SimulatedDisk` runs a workload and journals it; `crash_states` then enumerates, for every prefix
of the journal, states that the disk could be in after a power cut at that point.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltackpt_store.fileio import Buffer, FileIO

SECTOR = 512


@dataclass(slots=True)
class _Directory:
    entries: dict[str, int] = field(default_factory=dict[str, int])


class _Tree:
    """Files and directories by inode number; 0 is the root directory."""

    def __init__(self) -> None:
        self.files: dict[int, bytes | bytearray] = {}
        self.directories: dict[int, dict[str, int]] = {0: {}}

    def find(self, path: str) -> int | None:
        inode = 0
        for part in _parts(path):
            entries = self.directories.get(inode)
            if entries is None or part not in entries:
                return None
            inode = entries[part]
        return inode

    def copy(self) -> _Tree:
        tree = _Tree()
        tree.files = dict(self.files)
        tree.directories = {inode: dict(names) for inode, names in self.directories.items()}
        return tree


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


class _Change(NamedTuple):
    """One journalled operation. `kind` decides which fields mean something."""

    kind: str  # write | sync | name | unname | syncdir | file | directory | mark
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    name: str = ""
    target: int = 0
    mark: Any = None


class SimulatedDisk(FileIO):
    """A file layer in memory. Paths are absolute POSIX paths; one operation at a time per file."""

    def __init__(self) -> None:
        self._tree = _Tree()
        self._journal: list[_Change] = []
        self._handles: dict[int, int] = {}
        self._locks: dict[int, int] = {}  # inode -> the handle that holds it
        self._numbers = itertools.count(1)

    def mark(self, value: object) -> None:
        """Put `value` (an acknowledgement, say) into the journal at this point."""
        self._journal.append(_Change("mark", mark=value))

    @property
    def operations(self) -> int:
        """Operations journalled so far."""
        return len(self._journal)

    def copy(self) -> SimulatedDisk:
        """Another disk with the same content, all of it durable; nobody has a file open there."""
        return CrashState(len(self._journal), 0, (), self._tree).disk()

    # FileIO --------------------------------------------------------------------------------

    def create(self, path: str, mode: int = 0o666) -> int:
        directory, name = self._parent(path)
        if name in self._tree.directories[directory]:
            raise _os_error(errno.EEXIST, path)
        inode = self._new()
        self._tree.files[inode] = bytearray()
        self._tree.directories[directory][name] = inode
        self._journal.append(_Change("file", inode))
        self._journal.append(_Change("name", directory, name=name, target=inode))
        return self._handle(inode)

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        inode = self._handles[handle]
        data = b"".join(memoryview(b).cast("B") for b in buffers)
        content = self._tree.files[inode]
        assert isinstance(content, bytearray)
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data
        self._journal.append(_Change("write", inode, offset, data))
        return len(data)

    def sync(self, handle: int) -> None:
        self._journal.append(_Change("sync", self._handles[handle]))

    def close(self, handle: int) -> None:
        inode = self._handles.pop(handle)
        if self._locks.get(inode) == handle:
            del self._locks[inode]

    def link(self, source: str, target: str) -> None:
        inode = self._existing(source)
        directory, name = self._parent(target)
        if name in self._tree.directories[directory]:
            raise _os_error(errno.EEXIST, target)
        self._tree.directories[directory][name] = inode
        self._journal.append(_Change("name", directory, name=name, target=inode))

    def replace(self, source: str, target: str) -> None:
        inode = self._existing(source)
        directory, name = self._parent(target)
        self._tree.directories[directory][name] = inode
        self._journal.append(_Change("name", directory, name=name, target=inode))
        self.unlink(source)

    def unlink(self, path: str) -> None:
        inode = self._existing(path)
        if inode in self._tree.directories:
            raise _os_error(errno.EISDIR, path)
        directory, name = self._parent(path)
        del self._tree.directories[directory][name]
        self._journal.append(_Change("unname", directory, name=name))

    def sync_directory(self, path: str) -> None:
        inode = self._existing(path)
        if inode not in self._tree.directories:
            raise _os_error(errno.ENOTDIR, path)
        self._journal.append(_Change("syncdir", inode))

    def mkdir(self, path: str) -> None:
        directory, name = self._parent(path)
        if name in self._tree.directories[directory]:
            raise _os_error(errno.EEXIST, path)
        inode = self._new()
        self._tree.directories[inode] = {}
        self._tree.directories[directory][name] = inode
        self._journal.append(_Change("directory", inode))
        self._journal.append(_Change("name", directory, name=name, target=inode))

    def rmdir(self, path: str) -> None:
        inode = self._existing(path)
        if self._tree.directories[inode]:
            raise _os_error(errno.ENOTEMPTY, path)
        directory, name = self._parent(path)
        del self._tree.directories[directory][name]
        self._journal.append(_Change("unname", directory, name=name))

    def chmod(self, path: str, mode: int) -> None:
        self._existing(path)

    def lock(self, path: str, *, create: bool = False) -> int:
        fresh = create and self._tree.find(path) is None
        handle = self.create(path) if fresh else self.open(path)
        inode = self._handles[handle]
        if inode in self._locks:
            self.close(handle)
            raise _os_error(errno.EAGAIN, path)
        self._locks[inode] = handle
        return handle

    def open(self, path: str) -> int:
        inode = self._existing(path)
        if inode in self._tree.directories:
            raise _os_error(errno.EISDIR, path)
        return self._handle(inode)

    def size(self, handle: int) -> int:
        return len(self._tree.files[self._handles[handle]])

    def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        content = memoryview(self._tree.files[self._handles[handle]])
        total = 0
        for view in (memoryview(b).cast("B") for b in buffers):
            piece = content[offset + total : offset + total + len(view)]
            view[: len(piece)] = piece
            total += len(piece)
            if len(piece) < len(view):
                break
        content.release()
        return total

    def list(self, path: str) -> list[str]:
        inode = self._existing(path)
        if inode not in self._tree.directories:
            raise _os_error(errno.ENOTDIR, path)
        return list(self._tree.directories[inode])

    def exists(self, path: str) -> bool:
        return self._tree.find(path) is not None

    def free_bytes(self, path: str) -> int:
        return 1 << 40

    # helpers -------------------------------------------------------------------------------

    def _new(self) -> int:
        return next(self._numbers)  # atomic: a writer may use a thread of its own for files

    def _handle(self, inode: int) -> int:
        handle = 1_000_000 + self._new()
        self._handles[handle] = inode
        return handle

    def _existing(self, path: str) -> int:
        inode = self._tree.find(path)
        if inode is None:
            raise _os_error(errno.ENOENT, path)
        return inode

    def _parent(self, path: str) -> tuple[int, str]:
        directory = self._existing(os.path.dirname(path))
        if directory not in self._tree.directories:
            raise _os_error(errno.ENOTDIR, path)
        return directory, os.path.basename(path)

    # crash states --------------------------------------------------------------------------

    def crash_states(
        self, *, start: int = 0, random_states: int = 4, seed: int = 0
    ) -> Iterator[CrashState]:
        """States after a power cut at every point of the journal from `start` on.

        For each point: nothing of what was unsynced kept; everything kept; each unsynced change
        alone lost; each alone kept; and `random_states` random mixtures with torn writes. States
        that are equal to the one before are not repeated. `seed` makes the mixtures repeatable.
        """
        replay = _Replay()
        marks: list[Any] = []
        for point in range(len(self._journal) + 1):
            if point >= start:
                yield from self._states_at(point, replay, tuple(marks), random_states, seed)
            if point < len(self._journal):
                change = self._journal[point]
                if change.kind == "mark":
                    marks.append(change.mark)
                else:
                    replay.take(change)

    def _states_at(
        self, point: int, replay: _Replay, marks: tuple[Any, ...], random_states: int, seed: int
    ) -> Iterator[CrashState]:
        count = len(replay.pending)
        everything, nothing = [_KEEP] * count, [_LOSE] * count
        plans = [nothing]
        if count:
            plans.append(everything)
        if count > 1:
            for index in range(count):
                plans.append([_LOSE if i == index else _KEEP for i in range(count)])
                plans.append([_KEEP if i == index else _LOSE for i in range(count)])
        mixture = random.Random(f"{seed}:{point}")
        if count:
            for _ in range(random_states):
                plans.append([mixture.choice(_FATES) for _ in range(count)])
        for number, plan in enumerate(plans):
            tree = replay.crash(plan, mixture)
            yield CrashState(point, number, marks, tree)


_KEEP, _LOSE, _TEAR, _ZERO = "keep", "lose", "tear", "zero"
_FATES = (_KEEP, _LOSE, _TEAR, _ZERO)


class _Replay:
    """Durable tree plus the changes that a power cut may still take back, in order."""

    def __init__(self) -> None:
        self.durable = _Tree()
        self.pending: list[_Change] = []

    def take(self, change: _Change) -> None:
        if change.kind == "file":
            self.durable.files[change.inode] = b""
        elif change.kind == "directory":
            self.durable.directories[change.inode] = {}
        elif change.kind in ("sync", "syncdir"):
            kinds = ("write",) if change.kind == "sync" else ("name", "unname")
            mine = [c for c in self.pending if c.inode == change.inode and c.kind in kinds]
            for settled in mine:
                _apply(self.durable, settled)
            self.pending = [c for c in self.pending if not (c.inode == change.inode
                            and c.kind in kinds)]  # fmt: skip
        else:
            self.pending.append(change)

    def crash(self, plan: Sequence[str], mixture: random.Random) -> _Tree:
        tree = self.durable.copy()
        for change, fate in zip(self.pending, plan, strict=True):
            if fate == _LOSE:
                continue
            if change.kind == "write" and fate == _TEAR:
                sectors = len(change.data) // SECTOR
                kept = mixture.randint(0, sectors) * SECTOR
                _apply(tree, change._replace(data=change.data[:kept]))
            elif change.kind == "write" and fate == _ZERO:
                _apply(tree, change._replace(data=bytes(len(change.data))))
            else:
                _apply(tree, change)
        return tree


def _apply(tree: _Tree, change: _Change) -> None:
    if change.kind == "write":
        content = bytearray(tree.files[change.inode])
        if len(content) < change.offset:
            content.extend(bytes(change.offset - len(content)))
        content[change.offset : change.offset + len(change.data)] = change.data
        tree.files[change.inode] = bytes(content)
    elif change.kind == "name":
        tree.directories[change.inode][change.name] = change.target
    else:
        tree.directories[change.inode].pop(change.name, None)


class CrashState:
    """One state a power cut could leave. `disk()` gives a fresh file layer over it."""

    def __init__(self, point: int, number: int, marks: tuple[Any, ...], tree: _Tree) -> None:
        self.point = point
        self.number = number
        self.marks = marks
        self._tree = tree

    def disk(self) -> SimulatedDisk:
        """A disk that starts in this state, everything in it durable, with an empty journal."""
        disk = SimulatedDisk()
        disk._tree = self._tree.copy()  # pyright: ignore[reportPrivateUsage] # same module
        for inode, content in disk._tree.files.items():  # pyright: ignore[reportPrivateUsage]
            disk._tree.files[inode] = bytearray(content)  # pyright: ignore[reportPrivateUsage]
        taken = {*self._tree.files, *self._tree.directories}
        disk._numbers = itertools.count(max(taken) + 1)  # pyright: ignore[reportPrivateUsage]
        return disk

    def __repr__(self) -> str:
        return f"crash state {self.number} at operation {self.point}"


def _os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
