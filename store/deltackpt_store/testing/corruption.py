"""Damage to the files of a store, as media, file systems and people do it.

`mutants` makes stores with one damaged file each; `check_mutants` reads all that can be read from
each and demands the right content or an error, never wrong content.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deltackpt_store.testing.simulated_disk import SimulatedDisk

Damage = Callable[[bytearray, random.Random], None]
Content = Mapping[Hashable, object]
"""What a store gives: anything that tells the pieces apart, and what each holds."""


def bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def sector(data: bytearray, rng: random.Random) -> None:
    _zero(data, rng.randrange(len(data)), 512)


def page(data: bytearray, rng: random.Random) -> None:
    _zero(data, rng.randrange(len(data)), 4096)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def garbage(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start : start + 64] = rng.randbytes(len(data[start : start + 64]))


def grown(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, 600))


def shifted(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :][:1]
    data.insert(rng.randrange(len(data) + 1), rng.randrange(256))


def exchanged(data: bytearray, rng: random.Random) -> None:
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    length = min(32, b - a, len(data) - b)
    data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]


def _zero(data: bytearray, at: int, size: int) -> None:
    start = at // size * size
    data[start : start + size] = bytes(len(data[start : start + size]))


DAMAGES: tuple[Damage, ...] = (
    bit, bit, bit, sector, page, cut, garbage, grown, shifted, exchanged,
)  # fmt: skip
"""Damage to one file's bytes; bits count thrice."""


def damaged(content: bytes, rng: random.Random) -> bytes:
    """`content` with one of `DAMAGES` done to it; never `content` itself, if it has a byte."""
    data = bytearray(content)
    if data:
        rng.choice(DAMAGES)(data, rng)
        if bytes(data) == content:
            bit(data, rng)
    return bytes(data)


class Mutant(NamedTuple):
    """A store in which the file at `path` was damaged in the manner `what`."""

    disk: SimulatedDisk
    path: str
    what: str


def mutants(disk: SimulatedDisk, root: str, count: int, seed: int) -> Iterator[Mutant]:
    """`count` damaged copies of the store at `root`, as many of each kind of file.

    Kinds are the first parts of paths within the store. One in eight has a file exchanged with
    another one, replaced by a copy of it, or lost.
    """
    rng = random.Random(seed)
    kinds: dict[str, list[str]] = {}
    for path in sorted(disk.files(root)):
        kinds.setdefault(path[len(root) + 1 :].partition("/")[0], []).append(path)
    paths = [path for kind in kinds.values() for path in kind]
    for number in range(count):
        path = rng.choice(list(kinds.values())[number % len(kinds)])
        mutant = disk.copy()
        content = disk.content(path)
        if number % 8:
            mutant.put(path, damaged(content, rng))
            yield Mutant(mutant, path, "bytes")
            continue
        other = rng.choice(paths)
        what = rng.choice(("exchanged", "replaced", "lost"))
        if what == "lost":
            mutant.unlink(path)
        else:
            mutant.put(path, disk.content(other))
            if what == "exchanged":
                mutant.put(other, content)
        yield Mutant(mutant, path, f"{what} {other}")


@dataclass(slots=True)
class Verdict:
    """Mutants that made something unreadable, by kind of file, and those that did no harm."""

    detected: dict[str, int] = field(default_factory=dict[str, int])
    harmless: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def mutations(self) -> int:
        return sum(self.detected.values()) + sum(self.harmless.values())


def check_mutants(
    disk: SimulatedDisk,
    root: str,
    read: Callable[[SimulatedDisk], Content],
    count: int,
    *,
    seed: int = 0,
    also: Callable[[Mutant, Content], None] | None = None,
) -> Verdict:
    """Damage the store `count` times and read it each time.

    `read` gives all that the store at `root` holds, leaving out what cannot be read; errors that
    are no documented ones it lets through. AssertionError when it gives anything that the sound
    store does not. `also` looks closer at some mutants.
    """
    good, verdict = dict(read(disk)), Verdict()
    for mutant in mutants(disk, root, count, seed):
        found = read(mutant.disk)
        for piece, content in found.items():
            assert piece in good, f"{mutant.what} of {mutant.path}: {piece} came into being"
            assert content == good[piece], f"{mutant.what} of {mutant.path}: {piece} is wrong"
        kind = mutant.path[len(root) + 1 :].partition("/")[0]
        counts = verdict.harmless if len(found) == len(good) else verdict.detected
        counts[kind] = counts.get(kind, 0) + 1
        if also is not None:
            also(mutant, found)
    return verdict
