"""Which 16-bit tensors of a state are the rounding of float32 ones, found out and proved per save.

Mixed-precision training keeps each weight twice: in 16 bits for the forward pass and in float32 for
the optimizer. Pairs are guessed from names, shapes and order, then by comparing a few elements;
what counts in the end is that the id of the rounded chunk is the id of the 16-bit chunk. A wrong
guess costs some time, nothing else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltackpt_store import codecs
from deltackpt_store.codecs import Encoded
from deltackpt_store.coding.cast import KINDS, MAX_PARTS, RULES, cast_params, round_to
from deltackpt_store.manifest import ExtentSpec, Layout
from deltackpt_store.protocol import ExtentKey, extent_keys
from deltackpt_store.recipes import Recipe, Same

_SAMPLE = 256  # elements compared to find a pair
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")

Words = NDArray[np.uint32]
Place = tuple[int, int]
"""Extent and chunk."""


class _Part(NamedTuple):
    """Rounded elements of one float32 chunk that belong to a 16-bit chunk, by each rule."""

    id: bytes
    rounded: tuple[bytes, ...]


class _Target:
    """A 16-bit extent: its candidates, the one it is paired with, and what a save found so far."""

    __slots__ = (
        "candidates", "held", "kind", "missed", "pair", "parts", "ready", "spec", "used",
    )  # fmt: skip

    def __init__(self, kind: int, spec: ExtentSpec, candidates: list[int]) -> None:
        self.kind = kind
        self.spec = spec
        self.candidates = candidates
        self.pair: int | None = candidates[0] if candidates else None
        self.parts: dict[int, dict[int, _Part]] = {}  # chunk -> source chunk -> part
        self.ready: dict[int, tuple[Same, ...]] = {}  # chunks of which all parts have come
        self.used: int | None = None  # the pair as this save began
        self.held = self.missed = 0

    def span(self, chunk: int) -> tuple[int, int]:
        """The float32 bytes that a chunk of 16-bit elements is made from."""
        start = 2 * chunk * self.spec.chunk_bytes
        return start, start + 2 * self.spec.chunk_length(chunk)


class Derived:
    """Recipes for 16-bit chunks. Used by one thread.

    Within one save, float32 chunks are fed before the 16-bit chunks that follow from them are asked
    about. Rounded elements are held in memory until those of one 16-bit chunk are together.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._targets: dict[int, _Target] = {}
        self._by_source: dict[int, list[int]] = {}
        self._specs: tuple[ExtentSpec, ...] = ()
        self._samples: dict[int, Words] = {}
        self._wanted: set[int] = set()

    def begin(self, layout: Layout) -> None:
        """A save with this layout starts."""
        if layout is not self._layout:
            known = {} if self._layout is None else self._pairs_by_key(self._layout)
            self._layout, self._specs = layout, layout.extents
            keys = extent_keys(layout)
            self._targets = {
                extent: _Target(KINDS[layout.extents[extent].dtype], layout.extents[extent], found)
                for extent, found in candidates(layout).items()
            }
            numbers = {key: extent for extent, key in enumerate(keys)}
            for extent, target in self._targets.items():
                before = known.get(keys[extent])
                if before is not None and numbers.get(before) in target.candidates:
                    target.pair = numbers[before]
        for target in self._targets.values():
            self._judge(target)
            target.parts.clear()
            target.ready.clear()
            target.held = target.missed = 0
            target.used = target.pair
        self._samples.clear()
        self._by_source = {}
        for extent, target in self._targets.items():
            if target.pair is not None:
                self._by_source.setdefault(target.pair, []).append(extent)
        self._wanted = {c for t in self._targets.values() for c in t.candidates}

    def _pairs_by_key(self, layout: Layout) -> dict[ExtentKey, ExtentKey]:
        keys = extent_keys(layout)
        return {
            keys[extent]: keys[target.pair]
            for extent, target in self._targets.items()
            if target.pair is not None
        }

    def _judge(self, target: _Target) -> None:
        if target.missed and not target.held and target.pair == target.used:
            target.pair = None  # until a sample says otherwise

    # the float32 side --------------------------------------------------------------------------

    def feeds(self, extent: int) -> bool:
        """Whether 16-bit chunks may follow from chunks of this extent."""
        return extent in self._by_source

    def sample(self, extent: int, chunk: int, raw: memoryview) -> None:
        """See the beginning of an extent, to find pairs by."""
        if chunk == 0 and extent in self._wanted:
            self._samples[extent] = np.frombuffer(raw[: 4 * _SAMPLE], "<u4").copy()

    def round(self, extent: int, chunk: int, raw: memoryview) -> list[tuple[Place, list[bytes]]]:
        """The rounded pieces of a float32 chunk, by 16-bit chunk."""
        pieces: list[tuple[Place, list[bytes]]] = []
        first = chunk * self._specs[extent].chunk_bytes
        for number in self._by_source.get(extent, ()):
            target = self._targets[number]
            size = 2 * target.spec.chunk_bytes
            for at in range(first // size, -(-(first + len(raw)) // size)):
                start, end = target.span(at)
                cut = raw[max(0, start - first) : end - first]
                pieces.append(((number, at), _rounded(target.kind, cut)))
        return pieces

    def feed(self, chunk: int, chunk_id: bytes, pieces: list[tuple[Place, list[bytes]]]) -> None:
        """Take what :meth:`round` made of a chunk, which is stored under `chunk_id`."""
        for (number, at), rounded in pieces:
            target = self._targets[number]
            parts = target.parts.setdefault(at, {})
            parts[chunk] = _Part(chunk_id, tuple(rounded))
            sources = self._sources(target, at)
            if parts.keys() >= set(sources):
                target.ready[at] = self._joined(target, at, sources, target.parts.pop(at))

    def _joined(
        self, target: _Target, chunk: int, sources: range, parts: dict[int, _Part]
    ) -> tuple[Same, ...]:
        """What a 16-bit chunk is, by each rule."""
        if len(sources) > MAX_PARTS or target.pair is None:
            return ()
        start = target.span(chunk)[0] - sources[0] * self._specs[target.pair].chunk_bytes
        refs = tuple(parts[c].id for c in sources)
        rules = RULES[target.kind]
        usual = all(len(parts[c].rounded) == 1 for c in sources)
        made: dict[bytes, Same] = {}
        for number, rule in enumerate(rules[:1] if usual else rules):
            whole = [parts[c].rounded[min(number, len(parts[c].rounded) - 1)] for c in sources]
            chunk_id = blake3(b"".join(whole)).digest()
            encoded = Encoded(codecs.CAST, cast_params(target.kind, rule, start), refs, [])
            made.setdefault(chunk_id, Same(chunk_id, encoded))
        return tuple(made.values())

    # the 16-bit side ---------------------------------------------------------------------------

    def missing(self, extent: int, chunk: int) -> list[Place]:
        """float32 chunks that have not been fed and that this chunk would follow from."""
        target = self._targets.get(extent)
        if target is None or target.pair is None or chunk in target.ready:
            return []
        have = target.parts.get(chunk, {})
        return [(target.pair, c) for c in self._sources(target, chunk) if c not in have]

    def _sources(self, target: _Target, chunk: int) -> range:
        assert target.pair is not None
        size = self._specs[target.pair].chunk_bytes
        start, end = target.span(chunk)
        return range(start // size, -(-end // size))

    def recipes(self, extent: int, chunk: int, raw: memoryview) -> tuple[Same, ...]:
        """What the chunk is if it follows from the float32 chunks fed; call once per chunk."""
        target = self._targets.get(extent)
        if target is None:
            return ()
        if chunk == 0 and not target.held:
            self._look_for_pair(target, raw)
        if target.pair is None:
            return ()
        made = target.ready.pop(chunk, ())
        target.missed += not made
        return made

    def learned(self, extent: int, chunk_id: bytes, recipes: Sequence[Recipe]) -> None:
        """Which chunk it was that had these recipes."""
        target = self._targets[extent]
        if any(isinstance(one, Same) and one.id == chunk_id for one in recipes):
            target.held += 1
        else:
            target.missed += 1

    def _look_for_pair(self, target: _Target, raw: memoryview) -> None:
        """Pair with the extent that begins with the same elements, from the next save on."""
        halves = np.frombuffer(raw[: 2 * _SAMPLE], "<u2")
        if not halves.any():
            return
        for candidate in target.candidates:
            words = self._samples.get(candidate)
            if words is not None and len(words) >= len(halves):
                rounded, _ = round_to(target.kind, words[: len(halves)], RULES[target.kind][0])
                if (rounded == halves).all():
                    if candidate != target.pair:
                        target.pair, target.missed = candidate, 0
                        target.parts.clear()
                        target.ready.clear()
                    return


def _rounded(kind: int, raw: memoryview) -> list[bytes]:
    """By each rule; one for all when there is no NaN."""
    words = np.frombuffer(raw, "<u4")
    first, met = round_to(kind, words, RULES[kind][0])
    more = RULES[kind][1:] if met else ()
    return [first.tobytes(), *(round_to(kind, words, rule)[0].tobytes() for rule in more)]


# pairs by name, shape and order ----------------------------------------------------------------


def candidates(layout: Layout) -> dict[int, list[int]]:
    """16-bit extent -> float32 extents of as many elements, the likeliest first.

    Likelier is the one whose path below the top is that of the 16-bit tensor, then those at the
    same place in the order of the tensors of that size; moments of an optimizer come last.
    """
    series: dict[tuple[str, str], defaultdict[int, list[int]]] = {}
    named: dict[tuple[str, int], list[int]] = {}
    halves: defaultdict[int, list[int]] = defaultdict(list)
    names = [key[0] for key in extent_keys(layout)]
    for extent, spec in enumerate(layout.extents):
        if spec.inline or spec.chunk_bytes % 4:
            continue
        if spec.dtype in KINDS and spec.nbytes % 2 == 0:
            halves[spec.nbytes].append(extent)
        elif spec.dtype == "float32":
            by_size = series.setdefault(_series(names[extent]), defaultdict(list))
            by_size[spec.nbytes].append(extent)
            named.setdefault((_below(names[extent]), spec.nbytes), []).append(extent)
    found: dict[int, list[int]] = {}
    for size, extents in halves.items():
        same_size = [by_size[2 * size] for by_size in series.values() if by_size[2 * size]]
        for place, extent in enumerate(extents):
            near = [one[place] for one in same_size if place < len(one)]
            alike = named.get((_below(names[extent]), 2 * size), [])
            near = sorted({*near, *alike}, key=_rank(names, extent))
            if near:
                found[extent] = near[:8]
    return found


def _rank(names: list[str], extent: int) -> Callable[[int], tuple[bool, int, int]]:
    def rank(candidate: int) -> tuple[bool, int, int]:
        name = names[candidate]
        moment = name.rpartition("/")[2] in _MOMENTS
        return moment, -_common(name, names[extent]), candidate

    return rank


def _series(path: str) -> tuple[str, str]:
    """Tensors of one kind in order: weights of a model, all exp_avg, a list of masters."""
    names = path.split("/")
    return names[0], names[-1] if "state" in names else ""


def _below(path: str) -> str:
    return path.partition("/")[2] or path


def _common(one: str, other: str) -> int:
    """Number of names at the end of both paths that are equal."""
    count = 0
    for a, b in zip(reversed(re.split("[/.]", one)), reversed(re.split("[/.]", other)),
                    strict=False):  # fmt: skip
        if a != b:
            break
        count += 1
    return count
