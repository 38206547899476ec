"""One tensor or one chunk looked at closely: ids, codecs, places, references, who needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from deltackpt_store import codecs
from deltackpt_store.errors import DeltackptError, InvalidInputError, NotFoundError
from deltackpt_store.merkle import tensor_digest
from deltackpt_store.pack import Location
from deltackpt_store.store import Store

from deltackpt_tools.arguments import check_text
from deltackpt_tools.describe import TensorRow, describe, find_places
from deltackpt_tools.frames import Record, frame
from deltackpt_tools.named import StepLike, StoreLike, as_commit, as_store
from deltackpt_tools.nearness import near
from deltackpt_tools.tensor_bytes import span
from deltackpt_tools.usage import all_commits

MIN_PREFIX = 4  # hex digits of a chunk id that may stand for it


@dataclass(frozen=True, slots=True)
class Place(Record):
    """Where a copy of a chunk lies. Sizes and offsets in bytes; `references` are chunk ids (hex)
    that are needed to decode it."""

    pack: str
    offset: int
    stored_bytes: int
    codec: str
    references: tuple[str, ...]

    @classmethod
    def of(cls, location: Location) -> Place:
        return cls(
            location.pack,
            location.offset,
            location.stored,
            codecs.name_of(location.codec),
            tuple(ref.hex() for ref in location.refs),
        )


@dataclass(frozen=True, slots=True)
class ChunkOfTensor(Record):
    """Chunk number `index` of the extent; `place` is None when no intact pack holds it."""

    index: int
    id: str
    bytes: int
    place: Place | None


@dataclass(frozen=True, slots=True)
class TensorDetails(Record):
    """One tensor of one step, chunk by chunk."""

    store: str
    run: str
    step: int
    number: int
    digest: str
    """Of the tensor in the Merkle tree of the step."""
    tensor: dict[str, Any]
    """As `deltackpt show` lists it."""
    notes: tuple[str, ...]
    chunks: tuple[ChunkOfTensor, ...]
    """Empty when the bytes lie in the manifest."""

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per chunk."""
        return frame([chunk.to_dict() for chunk in self.chunks])


@dataclass(frozen=True, slots=True)
class Use(Record):
    """A tensor of a step that a chunk is part of."""

    run: str
    step: int
    number: int
    tensor: str
    index: int


@dataclass(frozen=True, slots=True)
class ChunkDetails(Record):
    """One chunk of `bytes` raw bytes: where it lies, and which tensors of which steps hold it."""

    store: str
    id: str
    bytes: int
    places: tuple[Place, ...]
    referenced_by: int
    """Chunks that are coded against this one."""
    uses: tuple[Use, ...]

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per use."""
        return frame([use.to_dict() for use in self.uses])


def show_tensor(store: StoreLike, path: str, step: StepLike = "latest") -> TensorDetails:
    """One tensor of a step, chunk by chunk. Reads the manifest and tables of packs, no payload."""
    where = as_store(store)
    commit = as_commit(where, step)
    description = describe(where, commit)
    row = next((one for one in description.tensors if one.path == path), None)
    if row is None:
        raise NotFoundError(
            f"{commit.run}@{commit.step} has no tensor {path!r}",
            kind="unknown-tensor",
            hint=near(
                path,
                [one.path for one in description.tensors],
                [one.path for one in description.values],
            ),
            path=path,
        )
    return TensorDetails(
        store=where.path,
        run=commit.run,
        step=commit.step,
        number=commit.number,
        digest=tensor_digest(description.snapshot, row.view.slot).hex(),
        tensor=row.as_json(),
        notes=tuple(row.notes()),
        chunks=_chunks(where, description.snapshot.chunks.get(row.view.extent), row),
    )


def _chunks(store: Store, ids: Any, row: TensorRow) -> tuple[ChunkOfTensor, ...]:
    start, stop = span(row.view)
    if ids is None or start == stop:
        return ()
    spec = row.spec
    first, end = start // spec.chunk_bytes, -(-stop // spec.chunk_bytes)
    places = find_places(store, ids[first:end])
    return tuple(
        ChunkOfTensor(
            index,
            ids[index].tobytes().hex(),
            spec.chunk_length(index),
            None if place is None else Place.of(place),
        )
        for index, place in zip(range(first, end), places, strict=True)
    )


def show_chunk(
    store: StoreLike, prefix: str, progress: Callable[[int, int], None] | None = None
) -> ChunkDetails:
    """The chunk whose id begins with `prefix` (hex), and every tensor of every step that holds it.

    NotFoundError when no pack holds such a chunk, InvalidInputError when several do.
    """
    where = as_store(store)
    text = check_text("prefix", prefix).lower()
    if len(text) < MIN_PREFIX or len(text) > 64 or set(text) - set("0123456789abcdef"):
        raise InvalidInputError(
            f"{prefix!r} does not begin a chunk id",
            kind="bad-chunk-id",
            hint=f"give {MIN_PREFIX} to 64 hexadecimal digits",
        )
    chunk = _resolve(where, text)
    index = where.index()
    locations = index.locations(chunk) + where.packs.salvage(chunk)
    referenced_by = 0
    for name in index.packs():
        entries = index.entries(name)
        if entries is not None and len(entries.refs):
            wanted = np.frombuffer(chunk, np.uint8)
            referenced_by += int((entries.refs == wanted).all(axis=1).sum())
    return ChunkDetails(
        store=where.path,
        id=chunk.hex(),
        bytes=locations[0].raw,
        places=tuple(Place.of(location) for location in locations),
        referenced_by=referenced_by,
        uses=tuple(_uses(where, chunk, progress)),
    )


def _resolve(store: Store, text: str) -> bytes:
    """The one chunk id that begins with the hex digits `text`."""
    index = store.index()
    whole = bytes.fromhex(text[: len(text) // 2 * 2])
    found: set[bytes] = set()
    for name in index.packs():
        entries = index.entries(name)
        if entries is None or not len(entries):
            continue
        ids = entries.ids
        same = (ids[:, : len(whole)] == np.frombuffer(whole, np.uint8)).all(axis=1)
        if len(text) % 2:
            same &= ids[:, len(whole)] >> 4 == int(text[-1], 16)
        found |= {row.tobytes() for row in ids[same]}
    for name in sorted(store.packs.damaged):  # their records are found by searching
        found |= {one for one in store.packs.salvaged(name) if one.hex().startswith(text)}
    if not found:
        raise NotFoundError(
            f"no pack of {store.path} holds a chunk {text}", kind="unknown-chunk", id=text
        )
    if len(found) > 1:
        some = ", ".join(sorted(chunk.hex()[:16] for chunk in found)[:5])
        raise InvalidInputError(
            f"{text} begins the ids of {len(found)} chunks: {some}", kind="ambiguous", id=text
        )
    return found.pop()


def _uses(store: Store, chunk: bytes, progress: Callable[[int, int], None] | None) -> list[Use]:
    wanted = np.frombuffer(chunk, np.uint8)
    commits = [commit for _, of_run in all_commits(store, []) for commit in of_run]
    uses: list[Use] = []
    for done, commit in enumerate(commits):
        if progress is not None:
            progress(done + 1, len(commits))
        try:
            snapshot = store.snapshot(commit)
        except DeltackptError:
            continue
        hits = {
            extent: np.flatnonzero((ids == wanted).all(axis=1)).tolist()
            for extent, ids in snapshot.chunks.items()
        }
        for view in snapshot.layout.tensors:
            start, stop = span(view)
            size = snapshot.layout.extents[view.extent].chunk_bytes
            for row in hits.get(view.extent, ()):
                if row * size < stop and (row + 1) * size > start:
                    path = snapshot.layout.paths[view.slot]
                    uses.append(Use(commit.run, commit.step, commit.number, path, row))
    return uses
