"""What a power cut may leave of a journal of file operations.

Model (after ALICE, Pillai et al., OSDI 2014, on a file system that promises only POSIX fsync):

- Bytes written to a file are durable once that file was synced; until then each write may be
  lost, kept, torn at a 512-byte sector, or leave zeros where the file had already been extended.
- A name created in, or removed from, a directory is durable once that directory was synced;
  until then each such change may be lost or kept, independently of all others and of file syncs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

SECTOR = 512
KEEP, LOSE, TEAR, ZERO = "keep", "lose", "tear", "zero"


class Change(NamedTuple):
    """One journalled operation. `kind` decides which fields mean something."""

    kind: str  # write | sync | name | unname | syncdir | file | directory | mark
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    name: str = ""
    target: int = 0
    mark: Any = None

    @property
    def fates(self) -> tuple[str, ...]:
        """What may become of it as long as it is not durable."""
        return (KEEP, LOSE, TEAR, ZERO) if self.kind == "write" else (KEEP, LOSE)


class Tree:
    """Files and directories by inode number; 0 is the root directory."""

    def __init__(self) -> None:
        self.files: dict[int, bytes | bytearray] = {}
        self.directories: dict[int, dict[str, int]] = {0: {}}

    def find(self, path: str) -> int | None:
        inode = 0
        for part in path.split("/"):
            if part:
                entries = self.directories.get(inode)
                if entries is None or part not in entries:
                    return None
                inode = entries[part]
        return inode

    def copy(self) -> Tree:
        """Another tree; contents of files are shared, as nobody changes them in place."""
        tree = Tree()
        tree.files = dict(self.files)
        tree.directories = {inode: dict(names) for inode, names in self.directories.items()}
        return tree

    def apply(self, change: Change) -> None:
        if change.kind == "write":
            content = bytearray(self.files[change.inode])
            if len(content) < change.offset:
                content.extend(bytes(change.offset - len(content)))
            content[change.offset : change.offset + len(change.data)] = change.data
            self.files[change.inode] = bytes(content)
        elif change.kind == "name":
            self.directories[change.inode][change.name] = change.target
        else:
            self.directories[change.inode].pop(change.name, None)


class Cut(NamedTuple):
    """One possible outcome: the `number`-th of a power cut after `point` operations.

    `marks` were put into the journal before it. Cuts of equal `content` leave the same files.
    """

    point: int
    number: int
    marks: tuple[Any, ...]
    tree: Tree
    content: bytes


def cuts(
    base: Tree,
    journal: Sequence[Change],
    *,
    start: int,
    exhaustive: int,
    random_states: int,
    seed: int,
) -> Iterator[Cut]:
    """Outcomes of a power cut at every point of the journal from `start` on.

    `base` is what was durable before the journal began.

    Where what is unsynced at a point allows at most `exhaustive` outcomes, all of them. Otherwise:
    nothing kept; everything kept; each unsynced change alone lost; each alone kept; and
    `random_states` random mixtures. `seed` makes torn writes and mixtures repeatable.
    """
    replay, contents = _Replay(base), _Contents()
    marks: list[Any] = []
    for point in range(len(journal) + 1):
        if point >= start:
            mixture = random.Random(f"{seed}:{point}")
            plans = _plans(replay.pending, exhaustive, random_states, mixture)
            for number, plan in enumerate(plans):
                tree = replay.crash(plan, mixture)
                yield Cut(point, number, tuple(marks), tree, contents.digest(tree))
        if point < len(journal):
            change = journal[point]
            if change.kind == "mark":
                marks.append(change.mark)
            else:
                replay.take(change)


def _plans(
    pending: Sequence[Change], exhaustive: int, random_states: int, mixture: random.Random
) -> Iterable[Sequence[str]]:
    count = len(pending)
    fates = [change.fates for change in pending]
    if math.prod(map(len, fates)) <= exhaustive:
        return itertools.product(*fates)
    plans = [[LOSE] * count, [KEEP] * count]
    for index in range(count):
        plans.append([LOSE if i == index else KEEP for i in range(count)])
        plans.append([KEEP if i == index else LOSE for i in range(count)])
    plans += [[mixture.choice(of) for of in fates] for _ in range(random_states)]
    return plans


class _Replay:
    """Durable tree plus the changes that a power cut may still take back, in order."""

    def __init__(self, base: Tree) -> None:
        self.durable = base.copy()
        self.pending: list[Change] = []

    def take(self, change: Change) -> None:
        if change.kind == "file":
            self.durable.files[change.inode] = b""
        elif change.kind == "directory":
            self.durable.directories[change.inode] = {}
        elif change.kind in ("sync", "syncdir"):
            kinds = ("write",) if change.kind == "sync" else ("name", "unname")
            left: list[Change] = []
            for one in self.pending:
                if one.inode == change.inode and one.kind in kinds:
                    self.durable.apply(one)
                else:
                    left.append(one)
            self.pending = left
        else:
            self.pending.append(change)

    def crash(self, plan: Sequence[str], mixture: random.Random) -> Tree:
        tree = self.durable.copy()
        for change, fate in zip(self.pending, plan, strict=True):
            if fate == KEEP:
                tree.apply(change)
            elif fate == TEAR:
                kept = mixture.randint(0, len(change.data) // SECTOR) * SECTOR
                tree.apply(change._replace(data=change.data[:kept]))
            elif fate == ZERO:
                tree.apply(change._replace(data=bytes(len(change.data))))
        return tree


class _Contents:
    """Digests of trees. What no name leads to does not count."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}  # content of a file -> its digest

    def digest(self, tree: Tree) -> bytes:
        hasher = blake3()
        todo: list[tuple[str, int]] = [("", 0)]
        while todo:
            path, directory = todo.pop()
            hasher.update(f"{path}/\0".encode())
            names = tree.directories[directory]
            for name in sorted(names):
                inode = names[name]
                if inode in tree.directories:
                    todo.append((f"{path}/{name}", inode))
                else:
                    hasher.update(f"{name}\0".encode() + self._file(bytes(tree.files[inode])))
        return hasher.digest()

    def _file(self, content: bytes) -> bytes:
        known = self._known.get(content)
        if known is None:
            known = self._known[content] = blake3(content).digest()
        return known
