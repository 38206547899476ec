"""What live tensors held at the call of `save`, as far as a few microseconds of looking can show.

A live tensor is hashed a little after `save` has returned. What is written to it in between, where
no version counter sees it, would be saved under the earlier moment. So the call itself takes a
note: the change hashes of small tensors, and one word in every 32 KiB of large ones, at places that
differ from save to save. Bytes that do not agree with the note are not committed.

That is proof for small tensors. Of a large one it finds a write that changes a share p of its
n x 32 KiB with a probability of 1 - (1 - p)^n: averages, clamps and loads, not a single row.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
from deltackpt_store.manifest import Layout
from numpy.typing import NDArray

from .detect import change_hash, memory_at
from .sources import Source

EXACT_BYTES = 64 * 1024
"""Tensors of up to this size are noted whole."""
STRIDE_BYTES = 32 * 1024
_WORD = 8
_VARIANTS = 4  # sets of places, used in turn

_Words = NDArray[np.uint64]
_Places = NDArray[np.int64]


class Witness:
    """The note of one save. Made in the training thread, asked by the staging threads."""

    def __init__(self, digests: dict[int, bytes], words: dict[int, tuple[_Places, _Words]]) -> None:
        self.digests = digests
        """Extent -> the change hashes of all its chunks, joined, for those noted whole."""
        self._words = words

    def agrees(self, extent: int, source: Source, start: int, end: int) -> bool:
        """Whether bytes ``start <= at < end`` of the live extent are as noted, now."""
        noted = self._words.get(extent)
        if noted is None:
            return True
        places, words = noted
        first, last = np.searchsorted(places, (-(-start // _WORD), end // _WORD))
        return bool((_words_of(source)[places[first:last]] == words[first:last]).all())


class Notary:
    """Takes the notes of one checkpointer's saves; used by the training thread."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = np.random.default_rng(secrets.randbits(64))
        self._turn = 0
        self._places: dict[tuple[int, int], _Places] = {}

    def note(self, layout: Layout, sources: Mapping[int, Source]) -> Witness:
        """What the live tensors in host memory hold now, but those that ought to rest anyway."""
        self._turn = (self._turn + 1) % _VARIANTS
        digests: dict[int, bytes] = {}
        words: dict[int, tuple[_Places, _Words]] = {}
        for extent, source in sources.items():
            if not source.live or source.still or source.device.type != "cpu":
                continue
            spec = layout.extents[extent]
            if spec.nbytes > EXACT_BYTES:
                places = self._places_in(spec.nbytes // _WORD)
                words[extent] = places, _words_of(source)[places]
            elif spec.chunk_count == 1:
                digests[extent] = change_hash(_memory_of(source), self._seed)
            else:
                view, size = _memory_of(source), spec.chunk_bytes
                digests[extent] = b"".join(
                    change_hash(view[at : at + size], self._seed)
                    for at in range(0, spec.nbytes, size)
                )
        return Witness(digests, words)

    def _places_in(self, count: int) -> _Places:
        """Ascending places among `count` words, for this turn: the first word, which an allocator
        overwrites in memory that is freed, and one in every stride."""
        key = (count, self._turn)
        places = self._places.get(key)
        if places is None:
            stride = STRIDE_BYTES // _WORD
            starts = np.arange(0, count, stride, dtype=np.int64)
            widths = np.minimum(stride, count - starts)
            inner = starts + (self._random.random(len(starts)) * widths).astype(np.int64)
            places = self._places[key] = np.concatenate((starts[:1], inner))
        return places


def _memory_of(source: Source) -> memoryview:
    return memory_at(source.address, source.nbytes)


def _words_of(source: Source) -> _Words:
    view = _memory_of(source)
    return np.frombuffer(view, np.uint64, count=len(view) // _WORD)
