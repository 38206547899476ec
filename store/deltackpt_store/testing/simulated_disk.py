"""An in-memory file layer that knows what a power cut could leave behind.

`SimulatedDisk` runs a workload and journals it; `crash_states` then enumerates, for every prefix
of the journal, states that the disk could be in after a power cut at that point (see `power_cut`),
and `check_crash_states` checks each of them.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deltackpt_store.fileio import Buffer, FileIO, make_directories, read_file
from deltackpt_store.testing.power_cut import Change, Cut, Tree, cuts

_T = TypeVar("_T")
EXHAUSTIVE = 32
"""States at one point up to which all are tried."""


class SimulatedDisk(FileIO):
    """A file layer in memory. Paths are absolute POSIX paths; one operation at a time per file."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._base = Tree()  # durable when the journal began
        self._journal: list[Change] = []
        self._handles: dict[int, int] = {}
        self._locks: dict[int, int] = {}  # inode -> the handle that holds it
        self._numbers = itertools.count(1)
        self._naming = threading.Lock()

    def mark(self, value: object) -> None:
        """Put `value` (an acknowledgement, say) into the journal at this point."""
        self._journal.append(Change("mark", mark=value))

    @property
    def operations(self) -> int:
        """Operations journalled so far."""
        return len(self._journal)

    def copy(self) -> SimulatedDisk:
        """Another disk with the same content, all of it durable; nobody has a file open there."""
        tree = self._tree.copy()
        tree.files = {inode: bytes(content) for inode, content in tree.files.items()}
        return _disk_of(tree)

    # looking and changing from outside; nothing of it is journalled -------------------------

    @classmethod
    def of_directory(cls, path: str) -> SimulatedDisk:
        """A disk that holds a copy of the real directory `path` at the same place."""
        disk = cls()
        io = FileIO()
        make_directories(disk, path)
        for directory, _, names in os.walk(path):
            make_directories(disk, directory)
            for name in names:
                file = os.path.join(directory, name)
                disk.close(disk.create(file))
                disk.put(file, read_file(io, file, 1 << 40))
        return disk.copy()

    def end_processes(self) -> None:
        """Everybody who had a file open or locked here is gone."""
        self._handles.clear()
        self._locks.clear()

    def files(self, directory: str) -> Iterator[str]:
        """Paths of all files in the directory and those below it."""
        for name in self.list(directory):
            path = f"{directory.rstrip('/')}/{name}"
            if self._tree.find(path) in self._tree.directories:
                yield from self.files(path)
            else:
                yield path

    def content(self, path: str) -> bytes:
        """What the file holds."""
        return bytes(self._tree.files[self._existing(path)])

    def put(self, path: str, content: bytes) -> None:
        """Let the existing file hold `content`."""
        inode = self._existing(path)
        self._tree.files[inode] = content
        if inode in self._base.files:
            self._base.files[inode] = content

    # FileIO --------------------------------------------------------------------------------

    def create(self, path: str, mode: int = 0o666) -> int:
        directory, name = self._parent(path)
        inode = self._new()
        self._tree.files[inode] = bytearray()
        self._take(directory, name, inode, path, Change("file", inode))
        return self._handle(inode)

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        inode = self._handles[handle]
        data = b"".join(memoryview(b).cast("B") for b in buffers)
        content = self._tree.files[inode]
        if isinstance(content, bytes):  # shared with the disk that this one was made of
            content = self._tree.files[inode] = bytearray(content)
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data
        self._journal.append(Change("write", inode, offset, data))
        return len(data)

    def sync(self, handle: int) -> None:
        self._journal.append(Change("sync", self._handles[handle]))

    def close(self, handle: int) -> None:
        inode = self._handles.pop(handle)
        if self._locks.get(inode) == handle:
            del self._locks[inode]

    def link(self, source: str, target: str) -> None:
        inode = self._existing(source)
        directory, name = self._parent(target)
        self._take(directory, name, inode, target)

    def replace(self, source: str, target: str) -> None:
        inode = self._existing(source)
        directory, name = self._parent(target)
        self._tree.directories[directory][name] = inode
        self._journal.append(Change("name", directory, name=name, target=inode))
        self._unname(source)

    def unlink(self, path: str) -> None:
        inode = self._existing(path)
        if inode in self._tree.directories:
            raise _os_error(errno.EISDIR, path)
        self._unname(path)

    def sync_directory(self, path: str) -> None:
        inode = self._existing(path)
        if inode not in self._tree.directories:
            raise _os_error(errno.ENOTDIR, path)
        self._journal.append(Change("syncdir", inode))

    def mkdir(self, path: str) -> None:
        directory, name = self._parent(path)
        inode = self._new()
        self._tree.directories[inode] = {}
        self._take(directory, name, inode, path, Change("directory", inode))

    def rmdir(self, path: str) -> None:
        inode = self._existing(path)
        if self._tree.directories[inode]:
            raise _os_error(errno.ENOTEMPTY, path)
        self._unname(path)

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

    def _take(self, directory: int, name: str, inode: int, path: str, *before: Change) -> None:
        """Give `inode` a name that nobody has."""
        with self._naming:
            if name in self._tree.directories[directory]:
                raise _os_error(errno.EEXIST, path)
            self._tree.directories[directory][name] = inode
            self._journal.extend(before)
            self._journal.append(Change("name", directory, name=name, target=inode))

    def _unname(self, path: str) -> None:
        directory, name = self._parent(path)
        del self._tree.directories[directory][name]
        self._journal.append(Change("unname", directory, name=name))

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
        self,
        *,
        start: int = 0,
        exhaustive: int = EXHAUSTIVE,
        random_states: int = 4,
        seed: int = 0,
    ) -> Iterator[CrashState]:
        """States after a power cut at every point of the journal from `start` on (see `cuts`).

        Equal states are repeated: :attr:`CrashState.content` tells.
        """
        for cut in cuts(
            self._base,
            self._journal,
            start=start,
            exhaustive=exhaustive,
            random_states=random_states,
            seed=seed,
        ):
            yield CrashState(cut)


class CrashState:
    """One state a power cut could leave. `disk()` gives a fresh file layer over it."""

    def __init__(self, cut: Cut) -> None:
        self.point = cut.point
        self.number = cut.number
        self.marks = cut.marks
        self.content = cut.content
        """Equal for states with the same files."""
        self._tree = cut.tree

    def disk(self) -> SimulatedDisk:
        """A disk that starts in this state, everything in it durable, with an empty journal."""
        return _disk_of(self._tree.copy())

    def __repr__(self) -> str:
        return f"crash state {self.number} at operation {self.point}"


@dataclass(frozen=True, slots=True)
class CrashStates:
    """How many states were checked, and how many of them differed in their files."""

    states: int
    distinct: int


def check_crash_states(
    disk: SimulatedDisk,
    recover: Callable[[CrashState], _T],
    accept: Callable[[_T, CrashState], None],
    *,
    start: int = 0,
    exhaustive: int = EXHAUSTIVE,
    random_states: int = 4,
    seed: int = 0,
) -> CrashStates:
    """Recover from every crash state of `disk`'s workload, and accept what was recovered.

    `recover` looks at the state's files alone, and so is called once for equal ones; `accept` is
    called for every state, with what was recovered, and looks at the state's marks. Both raise
    when a promise is broken.
    """
    known: dict[bytes, _T] = {}
    states = 0
    for state in disk.crash_states(
        start=start, exhaustive=exhaustive, random_states=random_states, seed=seed
    ):
        if state.content not in known:
            known[state.content] = recover(state)
        accept(known[state.content], state)
        states += 1
    return CrashStates(states, len(known))


def _disk_of(tree: Tree) -> SimulatedDisk:
    """A disk over `tree`, whose files are immutable."""
    disk = SimulatedDisk()
    disk._tree, disk._base = tree, tree.copy()  # pyright: ignore[reportPrivateUsage] # same module
    taken = {*tree.files, *tree.directories}
    disk._numbers = itertools.count(max(taken) + 1)  # pyright: ignore[reportPrivateUsage]
    return disk


def _os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
