"""What one step consists of, as rows: tensors, plain values, environment, codecs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
from deltackpt_store import codecs
from deltackpt_store.manifest import (
    Commit,
    ExtentSpec,
    Ids,
    Snapshot,
    TensorView,
)
from deltackpt_store.pack import Location
from deltackpt_store.pack_set import is_gone
from deltackpt_store.store import Store

from deltackpt_tools.nearness import matches, require_matches
from deltackpt_tools.output import counted
from deltackpt_tools.parameters import ParameterNames
from deltackpt_tools.stores import label
from deltackpt_tools.tensor_bytes import is_contiguous, tensor_nbytes
from deltackpt_tools.value_text import as_json, render


@dataclass(slots=True)
class Stored:
    """How the chunks of a step, or of one extent, lie in the packs. Each chunk counts once."""

    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    codecs: Counter[str] = field(default_factory=Counter[str])
    raw_by_codec: Counter[str] = field(default_factory=Counter[str])
    stored_by_codec: Counter[str] = field(default_factory=Counter[str])
    missing: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "chunks": self.chunks,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "codecs": dict(sorted(self.codecs.items())),
            "codec_bytes": {
                name: {"raw": raw, "stored": self.stored_by_codec[name]}
                for name, raw in sorted(self.raw_by_codec.items())
            },
            "missing_chunks": self.missing,
        }


@dataclass(frozen=True, slots=True)
class TensorRow:
    path: str
    view: TensorView
    nbytes: int
    stored: Stored
    spec: ExtentSpec
    tied: tuple[str, ...]
    """Other paths that look at the same bytes."""
    parameter_name: str | None = None
    """The parameter that this is optimizer state of, where the save recorded it."""

    @property
    def inline(self) -> bool:
        """Whether the bytes lie in the manifest."""
        return self.spec.inline

    def notes(self) -> list[str]:
        view = self.view
        notes = ["parameter"] if view.parameter else []
        if self.parameter_name is not None:
            notes.append(f"of {self.parameter_name}")
        if view.requires_grad and not view.parameter:
            notes.append("requires grad")
        if self.inline:
            notes.append("in the manifest")
        if not is_contiguous(view):
            notes.append(f"strides {list(view.stride)}")
        notes += [name for name, on in (("conj", view.conj), ("neg", view.neg)) if on]
        if view.global_shape is not None:
            offsets: tuple[int, ...] = view.shard_offsets or ()
            notes.append(f"part of {list(view.global_shape)} at {list(offsets)}")
        for first in self.tied[:1]:
            more = f" and {len(self.tied) - 1} more" if len(self.tied) > 1 else ""
            notes.append(f"shares bytes with {first}{more}")
        if self.stored.missing:
            notes.append(f"{counted(self.stored.missing, 'chunk')} missing")
        return notes

    def as_json(self) -> dict[str, Any]:
        view = self.view
        return {
            "path": self.path,
            "dtype": view.dtype,
            "shape": list(view.shape),
            "stride": list(view.stride),
            "offset": view.offset,
            "bytes": self.nbytes,
            "device": view.device,
            "parameter": view.parameter,
            "parameter_name": self.parameter_name,
            "requires_grad": view.requires_grad,
            "conj": view.conj,
            "neg": view.neg,
            "global_shape": None if view.global_shape is None else list(view.global_shape),
            "shard_offsets": None if view.shard_offsets is None else list(view.shard_offsets),
            "extent": view.extent,
            "inline": self.inline,
            "tied": list(self.tied),
            "stored": self.stored.as_json(),
        }


@dataclass(frozen=True, slots=True)
class ValueRow:
    path: str
    document: bytes

    def text(self) -> str:
        return render(self.document)

    def as_json(self) -> dict[str, Any]:
        return {"path": self.path, "value": as_json(self.document)}


@dataclass(frozen=True, slots=True)
class Description:
    commit: Commit
    snapshot: Snapshot
    tensors: list[TensorRow]
    values: list[ValueRow]
    stored: Stored
    state_bytes: int
    environment: dict[str, Any]
    damaged_packs: dict[str, str]


def describe(store: Store, commit: Commit, globs: Sequence[str] = ()) -> Description:
    """Read the manifest of `commit` and the footers of its packs, no chunk.

    Damaged packs are listed, and searched for their records, as a restore does; chunks that no
    pack holds count as missing. Raises CorruptionError when the manifest itself is damaged,
    NotFoundError for a glob that matches nothing.
    """
    snapshot = store.snapshot(commit)
    layout = snapshot.layout
    require_matches(globs, layout.paths, label(commit))
    store.packs.load(snapshot.packs)
    bad = {n: store.packs.damaged[n] for n in snapshot.packs if n in store.packs.damaged}
    whole, per_extent = _stored(store, snapshot)
    by_extent: dict[int, list[int]] = {}
    for view in layout.tensors:
        by_extent.setdefault(view.extent, []).append(view.slot)
    names = ParameterNames(snapshot)
    tensors: list[TensorRow] = []
    for view in layout.tensors:
        path = layout.paths[view.slot]
        if matches(path, globs):
            others = tuple(layout.paths[s] for s in by_extent[view.extent] if s != view.slot)
            tensors.append(
                TensorRow(
                    path,
                    view,
                    tensor_nbytes(view),
                    per_extent.get(view.extent, Stored()),
                    layout.extents[view.extent],
                    others,
                    names.of(path),
                )
            )
    values = [
        ValueRow(layout.paths[slot], snapshot.objects[slot])
        for slot in layout.objects
        if matches(layout.paths[slot], globs)
    ]
    if not whole.missing:  # a pack that is gone was collected, and what was in it lies elsewhere
        bad = {name: error for name, error in bad.items() if not is_gone(error)}
    return Description(
        commit=commit,
        snapshot=snapshot,
        tensors=tensors,
        values=values,
        stored=whole,
        state_bytes=sum(extent.nbytes for extent in layout.extents),
        environment=read_environment(snapshot.environment),
        damaged_packs={name: error.message for name, error in bad.items()},
    )


def find_places(store: Store, ids: Ids) -> list[Location | None]:
    """Where chunks lie: in the packs known so far, else in any, else found by searching damaged
    ones for their records. None where a restore would find nothing either."""
    places = store.packs.index.get_many(ids)
    if None in places:
        store.packs.load_all()
        places = store.packs.index.get_many(ids)
    for row, place in enumerate(places):
        if place is None:
            places[row] = next(iter(store.packs.salvage(ids[row].tobytes())), None)
    return places


def _stored(store: Store, snapshot: Snapshot) -> tuple[Stored, dict[int, Stored]]:
    whole = Stored()
    seen: set[bytes] = set()
    per_extent: dict[int, Stored] = {}
    for extent, ids in snapshot.chunks.items():
        spec = snapshot.layout.extents[extent]
        mine = per_extent[extent] = Stored()
        unique, first = np.unique(ids, axis=0, return_index=True)
        places = find_places(store, unique)
        for row, index, place in zip(unique, first.tolist(), places, strict=True):
            chunk = row.tobytes()
            counted = [mine] if chunk in seen else [mine, whole]
            seen.add(chunk)
            for total in counted:
                total.chunks += 1
                total.raw_bytes += spec.chunk_length(index)
                if place is None:
                    total.missing += 1
                else:
                    total.stored_bytes += place.stored
                    name = codecs.name_of(place.codec)
                    total.codecs[name] += 1
                    total.raw_by_codec[name] += spec.chunk_length(index)
                    total.stored_by_codec[name] += place.stored
    return whole, per_extent


def read_environment(record: bytes) -> dict[str, Any]:
    """The environment record: a msgpack map; what is malformed comes back as one entry."""
    try:
        value: Any = msgspec.msgpack.decode(record)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return {"unreadable": record[:64].hex()}
    return {str(key): item for key, item in cast("dict[Any, Any]", value).items()}
