"""Which encoding a chunk gets: learned per tensor from the tensor's own chunks.

Every now and then a chunk of a tensor is encoded with all candidates (a *probe*); the others use
what did best. Probes come more rarely the longer nothing changes. A tensor of which nothing is
known yet takes over what was found for others of its kind (same dtype, same last part of the name:
all ``exp_avg`` behave alike), so that a state of many small tensors is not all probes. The
candidate without a reference always competes, and wins ties: it cuts the dependency.

A chunk stored without a reference becomes the base that later saves of its position are coded
against (a star: what is coded against a base is never a base itself). The further training moves
away from the base the larger the differences grow, so a tensor is stored without reference again
as soon as its last save was dearer than the average of all saves since (and including) the base:
from there on going on can only raise that average.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from deltackpt_store import codecs
from deltackpt_store.codecs import DELTA, PLANES, RAW, SORTED, SPARSE, WORTH, Encoded
from deltackpt_store.coding.by_exponent import encode_by_exponent
from deltackpt_store.coding.elements import element_width
from deltackpt_store.coding.planes import Coded, encode_delta, encode_planes
from deltackpt_store.coding.sparse import encode_sparse
from deltackpt_store.coding.streams import Entropy

_FIRST_PROBES = 4
_MOST_PROBES = 64
_TIE = 1.02  # a reference must save this factor against none
_SMALL = 4096  # chunks up to this size are not tried without a reference
_MEMORY = 0.75  # weight of what was known before, when a probe or a chunk is measured
_MAX_STREAMS = 1 << 16
_MAX_KINDS = 1024
_KIND_TENSORS = 4  # probed with a reference, before others of their kind rely on them

MAX_HURRY = 2


class Plan(NamedTuple):
    """What to try for one chunk; `noise` are the planes of each candidate known not to compress."""

    tries: tuple[int, ...]
    width: int
    entropy: Entropy
    noise: tuple[int, ...]
    worth: float
    probe: bool = False


class Outcome(NamedTuple):
    """The smallest encoding found, and (codec, stored bytes, noise) of each that was tried."""

    best: Encoded
    tried: tuple[tuple[int, int, int], ...]
    seconds: float


RAW_PLAN = Plan((), 1, "lz4", (), 0.0)


class _Worth(NamedTuple):
    """The most an encoding may take of the raw size: of a base, and of what is saved again."""

    base: float
    again: float


_WORTH = {
    "auto": _Worth(0.8, 0.9), "fast": _Worth(0.8, 0.8), "small": _Worth(WORTH, WORTH),
    "none": _Worth(0.0, 0.0),
}  # fmt: skip
"""By mode. Decoding is slower than reading, and what later saves are coded against is read most:
``auto`` wants a fifth for it, so that float32 without a reference, which gives a sixth, stays raw
in a first save. What changes at every save wants to be small more than to be read quickly."""


def tries(mode: str, width: int, *, reference: bool) -> tuple[int, ...]:
    """All that may be tried for a chunk of elements of `width` bytes, by itself or beside a
    reference."""
    if not reference:
        return (PLANES,)
    # Doubles never repeat sparsely enough to pay for a try.
    found = (PLANES, DELTA) if width == 8 else (PLANES, DELTA, SPARSE)
    return (*found, SORTED) if mode == "small" else found  # SORTED is a third as quick as DELTA


def encode(plan: Plan, raw: memoryview, reference: memoryview | None, ref: bytes) -> Outcome:
    """Try what the plan says (any thread). Never larger than raw; may refer to `raw` itself."""
    began = time.perf_counter()
    best: Coded | None = None
    codec = RAW
    tried: list[tuple[int, int, int]] = []
    for candidate, noise in zip(plan.tries, plan.noise, strict=True):
        coded = _try(candidate, plan, noise, raw, reference)
        if coded is None and candidate == SPARSE and not plan.probe:
            candidate = DELTA  # more has changed than when this was chosen
            coded = _try(candidate, plan, 0, raw, reference)
        if coded is None:
            tried.append((candidate, len(raw), 0))
            continue
        # A reference costs 32 bytes in the record and as much in the footer.
        stored = coded.stored + (0 if candidate == PLANES else 64)
        tried.append((candidate, stored, coded.noise))
        if stored <= len(raw) * plan.worth and (best is None or stored < best.stored):
            best, codec = coded._replace(stored=stored), candidate
    seconds = time.perf_counter() - began
    if best is None:
        return Outcome(Encoded(RAW, b"", (), [raw]), tuple(tried), seconds)
    refs = () if codec == PLANES else (ref,)
    return Outcome(Encoded(codec, best.params, refs, best.payload), tuple(tried), seconds)


def _try(
    candidate: int, plan: Plan, noise: int, raw: memoryview, reference: memoryview | None
) -> Coded | None:
    if candidate == PLANES:
        return encode_planes(raw, plan.width, plan.entropy, noise)
    if reference is None:
        return None
    if candidate == DELTA:
        return encode_delta(raw, reference, plan.width, plan.entropy, noise)
    if candidate == SORTED:
        return encode_by_exponent(raw, reference, plan.width, plan.entropy)
    return encode_sparse(raw, reference, plan.width, plan.entropy)


class _Stream:
    """What is known of one tensor."""

    __slots__ = (
        "cycle", "cycle_saves", "every", "noise", "own", "rebase", "referenced", "save", "saves",
        "share", "since", "stored", "taken",
    )  # fmt: skip

    def __init__(self) -> None:
        self.share: dict[int, float] = {}  # stored bytes per raw byte, by codec
        self.noise: dict[int, int] = {}
        self.since = 0  # chunks since the last probe
        self.every = _FIRST_PROBES
        self.save = -1
        self.saves = 0  # in which there were chunks of it
        self.rebase = False
        # the save being made: raw and stored bytes, and raw bytes coded with a reference
        self.taken = self.stored = self.referenced = 0
        self.own = 0.0  # share of the last save without references
        self.cycle = 0.0  # sum of shares since the base was stored
        self.cycle_saves = 0

    def turn(self, save: int) -> None:
        """A new save begins: close the books on the last one, decide whether to store a base."""
        if save == self.save:
            return
        self.save = save
        self.saves += 1
        if self.taken:
            share = self.stored / self.taken
            if self.referenced * 2 > self.taken:
                self.cycle += share
                self.cycle_saves += 1
                self.rebase = share * self.cycle_saves >= self.cycle
            else:
                self.cycle, self.cycle_saves, self.rebase = share, 1, False
        self.taken = self.stored = self.referenced = 0


class _Kind:
    """What is known of all tensors of a kind."""

    __slots__ = ("last", "most", "noise", "share", "tensors")

    def __init__(self) -> None:
        self.share: dict[int, float] = {}
        self.noise: dict[int, int] = {}
        self.most: dict[int, tuple[float, float]] = {}  # smallest and largest share seen
        self.tensors = 0  # probed with a reference
        self.last = ""

    def alike(self) -> bool:
        """Whether what was found for one of the kind says something about the others."""
        return all(high <= 1.15 * low + 0.03 for low, high in self.most.values())


def _kind(stream: str, dtype: str) -> str:
    return f"{dtype} {stream.rpartition('/')[2].rpartition('.')[2]}"


class CodingPolicy:
    """Plans encodings and learns from their outcomes. Used by one thread; bounded memory."""

    def __init__(self, mode: str = "auto") -> None:
        codecs.check_mode(mode)
        self.mode = mode
        self._worth = _WORTH[mode]
        self._streams: dict[str, _Stream] = {}
        self._kinds: dict[str, _Kind] = {}
        self._save = 0
        self.hurry = 0
        """0: at leisure; 1: no zstd and no probes; 2: nothing is encoded."""

    def next_save(self) -> None:
        """Chunks planned from here on belong to another save."""
        self._save += 1

    def plan(self, stream: str, size: int, dtype: str, *, reference: bool) -> Plan:
        """What to try for a chunk of the tensor `stream` (its name, or anything that repeats).

        Nothing is known or learned of the stream without a name: each chunk is a probe.
        """
        if self.mode == "none" or self.hurry >= 2 or (size <= _SMALL and not reference):
            return RAW_PLAN
        width = element_width(dtype)
        entropy = self.entropy
        known = self._stream(stream)
        if known.rebase:
            reference = False
        again = reference or (known.saves > 1 and not known.rebase)
        worth = self._worth.again if again else self._worth.base
        candidates = tries(self.mode, width, reference=reference)
        self._adopt(known, stream, dtype, candidates)
        unknown = any(candidate not in known.share for candidate in candidates)
        known.since += 1
        if not self.hurry and (unknown or self.mode == "small" or known.since >= known.every):
            known.since = 0
            noise = (0,) * len(candidates)
            return Plan(candidates, width, entropy, noise, worth, probe=True)
        best = self._best(known, candidates, worth)
        if best == RAW:
            return RAW_PLAN
        return Plan((best,), width, entropy, (known.noise.get(best, 0),), worth)

    def _adopt(self, known: _Stream, stream: str, dtype: str, candidates: tuple[int, ...]) -> None:
        kind = self._kinds.get(_kind(stream, dtype))
        if kind is None or kind.tensors < _KIND_TENSORS or not stream or not kind.alike():
            return
        for candidate in candidates:
            if candidate not in known.share and candidate in kind.share:
                known.share[candidate] = kind.share[candidate]
                known.noise[candidate] = kind.noise.get(candidate, 0)

    @property
    def entropy(self) -> Entropy:
        """What to compress differences with."""
        return "lz4" if self.mode == "fast" or self.hurry else "zstd"

    def expected(self, stream: str) -> float:
        """The most that a chunk of the tensor may take, per raw byte, to be better than its plan.

        0 when nothing is to be encoded.
        """
        if self.mode == "none" or self.hurry >= 2:
            return 0.0
        share = min(self._stream(stream).share.values(), default=1.0)
        return share if share <= self._worth.again else WORTH

    def wants_reference(self, stream: str) -> bool:
        """Whether the next chunk of the tensor may be coded against a reference."""
        if self.mode == "none" or self.hurry >= 2:
            return False
        known = self._stream(stream)
        if known.rebase:
            return False
        probing = self.mode == "small" or known.since + 1 >= known.every
        probing |= DELTA not in known.share  # also of the stream without a name
        return probing or self._best(known, (PLANES, DELTA, SPARSE)) not in (RAW, PLANES)

    def _best(self, known: _Stream, candidates: tuple[int, ...], worth: float | None = None) -> int:
        """The candidate that leaves least, or RAW; `worth` as for what is saved again."""
        shares = known.share
        own = shares.get(PLANES, 1.0)
        best = min(candidates, key=lambda c: shares.get(c, 0.5))
        if best != PLANES and own <= shares.get(best, 0.5) * _TIE:
            best = PLANES
        worth = self._worth.again if worth is None else worth
        return best if shares.get(best, 0.5) <= worth else RAW

    def learn(
        self, stream: str, dtype: str, plan: Plan, outcome: Outcome, size: int, written: int
    ) -> None:
        """Take the outcome of a plan into account; `written` are the bytes that were stored."""
        if not stream:
            return
        if plan.probe and size > _SMALL:
            self._learn_kind(stream, dtype, outcome, size)
        known = self._stream(stream)
        known.taken += size
        known.stored += written
        if outcome.best.refs:
            known.referenced += size
        before = self._best(known, tuple(known.share) or (PLANES,)) if plan.probe else None
        for codec, stored, noise in outcome.tried:
            share = stored / size
            old = known.share.get(codec, share)
            weight = _MEMORY if abs(share - old) < 0.2 * old else 0.25
            known.share[codec] = weight * old + (1 - weight) * share
            if plan.probe:
                known.noise[codec] = noise
        if plan.probe:
            same = before == self._best(known, tuple(known.share))
            known.every = min(known.every * 2, _MOST_PROBES) if same else _FIRST_PROBES

    def _learn_kind(self, stream: str, dtype: str, outcome: Outcome, size: int) -> None:
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault(_kind(stream, dtype), _Kind())
        if len(outcome.tried) > 1 and kind.last != stream:
            kind.tensors += 1
            kind.last = stream
        for codec, stored, noise in outcome.tried:
            share = stored / size
            low, high = kind.most.get(codec, (share, share))
            kind.most[codec] = min(low, share), max(high, share)
            kind.share[codec] = 0.5 * (kind.share.get(codec, share) + share)
            kind.noise[codec] = noise & kind.noise.get(codec, noise)

    def _stream(self, name: str) -> _Stream:
        if not name:
            return _Stream()
        stream = self._streams.get(name)
        if stream is None:
            if len(self._streams) >= _MAX_STREAMS:
                self._streams.clear()
            stream = self._streams[name] = _Stream()
        stream.turn(self._save)
        return stream
