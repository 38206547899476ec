"""What a crew of helpers can do for the encoder: see `encode_crew.Task`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from deltackpt_store import codecs, coding_policy
from deltackpt_store.codecs import Encoded
from deltackpt_store.coding_policy import Outcome, Plan
from deltackpt_store.encode_crew import Crew
from deltackpt_store.encode_helper import Digest, Digested, Digests, Encode, Encoding, Piece, digest
from deltackpt_store.fileio import Buffer
from deltackpt_store.references import Reference, References


class Coding(NamedTuple):
    """What a chunk became, by which plan; the reference, if it was read here, and the hash of the
    payload that it was decoded from, if it was decoded."""

    plan: Plan
    outcome: Outcome
    reference: memoryview | None = None
    payload_hash: int | None = None


class EncodeTask:
    """Encode `raw` by `plan`, against `reference`; by what `alone` plans where that is damaged."""

    def __init__(
        self,
        raw: memoryview,
        plan: Plan,
        reference: Reference | None,
        references: References,
        alone: Callable[[], Plan],
    ) -> None:
        self._raw, self._plan = raw, plan
        self.reference = reference
        self._references = references
        self._alone = alone

    def job(self, crew: Crew) -> Encode | None:
        piece = crew.piece(self._raw) if self._plan.tries else None
        if piece is None:
            return None
        reference = self.reference
        if reference is not None and reference.kept is not None:
            reference = reference._replace(kept=None)
        return Encode(piece, self._plan, self._references.root, self._references.era, reference)

    def here(self) -> Coding:
        plan, chunk, ref, payload_hash = self._plan, None, b"", None
        if self.reference is not None:
            read = self._references.read(self.reference)
            if read is None:  # found by verify; what is written now does not depend on it
                plan = self._alone()
            else:
                ref, (chunk, payload_hash) = self.reference.id, read
        outcome = coding_policy.encode(plan, self._raw, chunk, ref)
        return Coding(plan, outcome, chunk, payload_hash)

    def done(self, reply: Encoding, payload: memoryview) -> Coding:
        stored: Buffer = self._raw if reply.codec == codecs.RAW else payload
        best = Encoded(reply.codec, reply.params, reply.refs, [stored])
        outcome = Outcome(best, reply.tried, reply.seconds)
        return Coding(self._plan, outcome, None, reply.payload_hash)


class DigestTask:
    """The ids of some chunks, and their change hashes of a seed."""

    def __init__(self, views: Sequence[memoryview], seed: int) -> None:
        self._views = views
        self._seed = seed

    def job(self, crew: Crew) -> Digests | None:
        pieces: list[Piece] = []
        for view in self._views:
            piece = crew.piece(view)
            if piece is None:
                return None
            pieces.append(piece)
        return Digests(tuple(pieces), self._seed)

    def here(self) -> Sequence[Digest]:
        return [digest(view, self._seed) for view in self._views]

    def done(self, reply: Digested, payload: memoryview) -> Sequence[Digest]:
        return reply.digests
