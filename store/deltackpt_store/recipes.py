"""Encodings of a chunk that follow from what it is, instead of from trying what suits its bytes.

A recipe is offered to the writer together with the chunk and is used when it holds, or when it wins
over what the policy expects of the chunk otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltackpt_store.codecs import Encoded
from deltackpt_store.coding.planes import encode_delta
from deltackpt_store.coding.streams import Entropy
from deltackpt_store.fileio import Buffer


class Same(NamedTuple):
    """A chunk of this id is exactly what `encoded` says."""

    id: bytes
    encoded: Encoded


class Near(NamedTuple):
    """The chunk differs little from `prediction`, which follows from the chunks `refs`.

    The differences of `width`-byte integers are stored after `front`, with `codec`; with a `role`
    that stands first among the parameters, instead of the width. The record's depth of references
    must not be more than `depth`. Planes with a bit in `noise` are stored as they are.
    """

    codec: int
    refs: tuple[bytes, ...]
    prediction: memoryview
    depth: int
    role: int | None = None
    front: bytes = b""
    width: int = 4
    noise: int = 0


Recipe = Same | Near

REF_BYTES = 64
"""What a reference takes: 32 bytes in the record, 32 in the footer."""


class Attempt(NamedTuple):
    """A prediction to be coded; the result is dropped unless it takes at most `limit` bytes."""

    raw: memoryview
    near: Near
    entropy: Entropy
    limit: float


class Coded(NamedTuple):
    """What an attempt gave, None when nothing is won; `noise` as in `coding.planes.Coded`."""

    encoded: Encoded | None
    noise: int


def attempt(work: Attempt) -> Coded:
    """Code the difference to a prediction; refers to `raw` itself."""
    raw, near, entropy, limit = work
    coded = encode_delta(raw, near.prediction, near.width, entropy, near.noise)
    if coded.stored + len(near.front) + REF_BYTES * len(near.refs) > limit:
        return Coded(None, coded.noise)
    params = coded.params if near.role is None else bytes((near.role,)) + coded.params[1:]
    front: Sequence[Buffer] = (near.front,) if near.front else ()
    payload = [*front, *coded.payload]
    return Coded(Encoded(near.codec, params, near.refs, payload), coded.noise)
