"""Encoding chunks in batches, by recipe or as the policy sees fit, on several cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from deltackpt_store.codecs import Encoded
from deltackpt_store.coding_policy import MAX_HURRY, CodingPolicy, Outcome
from deltackpt_store.confirm import Confirmer
from deltackpt_store.encode_crew import Crew
from deltackpt_store.encode_helper import Digest
from deltackpt_store.encode_tasks import DigestTask, EncodeTask
from deltackpt_store.fetch import MAX_DEPTH
from deltackpt_store.fileio import Buffer
from deltackpt_store.recipes import Attempt, Coded, Recipe, Same, attempt
from deltackpt_store.references import References

_TOGETHER_BYTES = 512 * 1024  # less is not worth waking other processes for
_TOGETHER = 4  # chunks whose digests are asked for in one go


class Chunk(NamedTuple):
    """One chunk to be put: contiguous memory of 1 byte to 64 MiB.

    `dtype` guides the encoding. `stream` names the tensor that the chunk is of: what pays is
    learned per name, and tried for each chunk without one. `reference` is the id of a chunk that
    it resembles. The first of `recipes` that holds and pays is used instead of all that; `learned`
    is told what became of a prediction. `id` is the chunk's id where it is known already.
    """

    raw: Buffer
    dtype: str = "uint8"
    stream: str = ""
    reference: bytes | None = None
    recipes: tuple[Recipe, ...] = ()
    learned: Callable[[Coded], None] | None = None
    id: bytes | None = None


Fresh = tuple[Chunk, memoryview]
"""A chunk that the store does not hold, and its bytes."""

Depth = Callable[[tuple[bytes, ...]], int]
"""How deep the references of a record would go that refers to these chunks."""


class Job(NamedTuple):
    """One chunk to encode. `reference` is the id of a chunk that it may be coded against."""

    raw: memoryview
    dtype: str
    stream: str
    reference: bytes | None


class Encoder:
    """Policy and references of one store writer. Used by one thread.

    Chunks that lie in the ring of `crew` are shared with it. Memory: for the batch at hand its
    encoded form and its references. `seconds` is the wall time spent, `raw_bytes` what was encoded
    in it.
    """

    def __init__(
        self,
        mode: str,
        confirmer: Confirmer,
        *,
        shadow: int | None = None,
        crew: Crew | None = None,
    ) -> None:
        self.policy = CodingPolicy(mode)
        self.references = References(confirmer)
        self._shadow = shadow is not None
        if shadow is not None:
            self.references.budget = max(shadow, self.references.budget)
        self._crew = Crew() if crew is None else crew
        self.seconds = 0.0
        self.raw_bytes = 0
        self.hurried_bytes = self.hurried_chunks = 0
        self._pace = (0.0, 0, 0.0, 0)  # of encoding and writing when `hurry` looked last

    def next_save(self, state_bytes: int) -> None:
        """Chunks encoded from here on belong to another save of a state of that size."""
        self.policy.next_save()
        if self._shadow:
            self.references.budget = max(self.references.budget, state_bytes)

    def encodings(self, chunks: Mapping[bytes, Fresh], depth: Depth) -> Iterator[Encoded]:
        """How to store each of these chunks, in order: as a recipe says, or as the policy sees fit.

        To be asked for the next when the one before has been dealt with: that is done beside.
        """
        made = self._by_recipe(chunks, depth)
        outcomes = self.encode([
            Job(raw, chunk.dtype, chunk.stream, chunk.reference)
            for chunk_id, (chunk, raw) in chunks.items()
            if chunk_id not in made
        ])  # fmt: skip
        for chunk_id in chunks:
            encoded = made.get(chunk_id)
            yield next(outcomes).best if encoded is None else encoded

    def digests(
        self, views: Sequence[memoryview], seed: int, *, ahead: bool = False
    ) -> Iterator[Digest]:
        """Ids and change hashes of chunks, in order. When it is `ahead` of other work that is to
        be done first, helpers begin when nothing of that is left for them."""
        tasks = [
            DigestTask(views[i : i + _TOGETHER], seed) for i in range(0, len(views), _TOGETHER)
        ]
        run = self._crew.start(tasks, alone=_few(views), ahead=ahead)
        return (digest for digests in self._crew.results(run) for digest in digests)

    def encode(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Encode each chunk as the policy sees fit; in order, may refer to `raw`."""
        began = time.perf_counter()
        tasks = [self._task(job) for job in jobs]
        run = self._crew.start(tasks, alone=_few([job.raw for job in jobs]))
        results = self._crew.results(run)
        for job, task, (plan, outcome, chunk, payload_hash) in zip(
            jobs, tasks, results, strict=True
        ):
            size = len(job.raw)
            self.policy.learn(job.stream, job.dtype, plan, outcome, size, outcome.best.stored)
            if task.reference is not None and payload_hash is not None:
                self.references.learn(task.reference, payload_hash, chunk)
            if self.policy.hurry:
                self.hurried_chunks += 1
                self.hurried_bytes += size
            self.raw_bytes += size
            self.seconds += time.perf_counter() - began
            yield outcome
            began = time.perf_counter()

    def _by_recipe(self, chunks: Mapping[bytes, Fresh], depth: Depth) -> dict[bytes, Encoded]:
        """Encodings of those chunks of which a recipe holds."""
        made: dict[bytes, Encoded] = {}
        work: dict[bytes, Attempt] = {}
        for chunk_id, (chunk, raw) in chunks.items():
            for recipe in chunk.recipes:
                if isinstance(recipe, Same):
                    same = recipe.id == chunk_id
                    if same and depth(recipe.encoded.refs) <= MAX_DEPTH:
                        made[chunk_id] = recipe.encoded
                elif depth(recipe.refs) <= recipe.depth:
                    limit = self.policy.expected(chunk.stream) * len(raw)
                    if limit:
                        work[chunk_id] = Attempt(raw, recipe, self.policy.entropy, limit)
                if chunk_id in made or chunk_id in work:
                    break
        for chunk_id, one in work.items():
            result = attempt(one)
            if result.encoded is not None:
                made[chunk_id] = result.encoded
            learned = chunks[chunk_id][0].learned
            if learned is not None:
                learned(result)
        return made

    def _task(self, job: Job) -> EncodeTask:
        raw, dtype, stream, chunk_id = job
        reference = None
        if chunk_id is not None and self.policy.wants_reference(stream):
            reference = self.references.find(chunk_id)
        plan = partial(self.policy.plan, stream, len(raw), dtype)
        return EncodeTask(
            raw, plan(reference=reference is not None), reference, self.references,
            alone=partial(plan, reference=False),
        )  # fmt: skip

    def stored_by_itself(self, chunk_id: bytes, raw: memoryview) -> None:
        """A chunk that later ones may be coded against: with a shadow, keep a copy of it."""
        if self._shadow:
            self.references.keep(chunk_id, raw, copy=True)

    def hurry(self, busy_seconds: float, written: int) -> None:
        """The caller falls behind: encode less, if that is what takes the time and not the disk.

        Goes down one step at a time (no zstd, then no encoding), and no further than where writing
        the larger blobs would take longer than encoding does now. `ease` goes back a step.
        The disk has been busy for `busy_seconds` so far, with `written` bytes.
        """
        seconds, raw, busy, before = self._pace
        self._pace = self.seconds, self.raw_bytes, busy_seconds, written
        taken, stored = self.raw_bytes - raw, written - before
        if not taken or self.policy.hurry >= MAX_HURRY:
            return
        encoding = (self.seconds - seconds) / taken
        writing = (busy_seconds - busy) / max(stored, 1)
        share = stored / taken if self.policy.hurry == 0 else 1.0
        if encoding > writing * share:
            self.policy.hurry += 1

    def ease(self) -> None:
        """The caller keeps up: take a step back from what `hurry` gave up."""
        self.policy.hurry = max(0, self.policy.hurry - 1)


def _few(views: Sequence[memoryview]) -> bool:
    """Whether work on these chunks is not worth sharing."""
    return len(views) < 2 or sum(map(len, views)) < _TOGETHER_BYTES
