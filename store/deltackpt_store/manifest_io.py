"""Manifests and commits as bytes, and as the snapshot they stand for.

A manifest file is ``DCKPTMF`` + version byte + msgpack map; it is called by the BLAKE3-256 of all
its bytes. A commit file is ``DCKPTCM`` + version byte + msgpack map + BLAKE3-256 of all before.

Both are untrusted input. Sizes and counts are checked before anything is allocated for them,
and a snapshot leaves :func:`resolve` only when every index, length, shape, stride and offset has
been proven to lie inside what it refers to. Damage raises CorruptionError naming the file, a
format that is newer than this package UnsupportedFormatError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from deltackpt_store.fileio import Buffer
from deltackpt_store.layout_check import MAX_LEAVES, check_counts, check_layout, check_structure
from deltackpt_store.manifest import ID_BYTES, Commit, Ids, Layout, Manifest, Snapshot
from deltackpt_store.merkle import root
from deltackpt_store.names import MAX_NUMBER, is_name, is_pack_name

VERSION = 1
MANIFEST_MAGIC = b"DCKPTMF"
COMMIT_MAGIC = b"DCKPTCM"
MAX_MANIFEST_BYTES = 512 * 1024 * 1024
MAX_COMMIT_BYTES = 1024 * 1024
MAX_PACKS = 1 << 20

_POSITION = np.dtype("<u4")
_DIGEST = 32
_T = TypeVar("_T")


class _Wire(msgspec.Struct, omit_defaults=True):
    """A manifest with its containers left undecoded, so that their sizes can be checked first."""

    root: bytes
    packs: msgspec.Raw
    base: bytes | None = None
    layout: msgspec.Raw = msgspec.Raw(b"\xc0")
    environment: bytes | None = None
    objects: msgspec.Raw = msgspec.Raw(b"\x80")
    inline: msgspec.Raw = msgspec.Raw(b"\x80")
    chunks: msgspec.Raw = msgspec.Raw(b"\x80")
    patches: msgspec.Raw = msgspec.Raw(b"\x80")


class _WireLayout(msgspec.Struct):
    structure: bytes
    paths: msgspec.Raw
    tensors: msgspec.Raw
    extents: msgspec.Raw
    objects: msgspec.Raw


class _Lists(NamedTuple):
    """The types of the lists of chunk ids."""

    chunks: type[dict[int, bytes]]
    patches: type[dict[int, tuple[bytes, bytes]]]


_COPIES = _Lists(dict[int, bytes], dict[int, tuple[bytes, bytes]])
_VIEWS = _Lists(
    cast("Any", dict[int, memoryview]), cast("Any", dict[int, tuple[memoryview, memoryview]])
)


# encoding ---------------------------------------------------------------------------------------


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256, the digest by which manifests and commits are called."""
    return blake3(data).digest()


def closure_digest(packs: Iterable[str]) -> bytes:
    """Digest of a set of packs, as a commit records it."""
    return digest_of("\n".join(sorted(set(packs))).encode())


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest file; InvalidInputError when larger than a reader would accept."""
    data = MANIFEST_MAGIC + bytes([VERSION]) + msgspec.msgpack.encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidInputError(
            f"the manifest would have {len(data)} bytes, more than {MAX_MANIFEST_BYTES}",
            kind="manifest-size",
            hint="use larger chunks (chunk_bytes), or hold large plain values in tensors",
        )
    return data


def to_base(snapshot: Snapshot, packs: Iterable[str]) -> Manifest:
    """The base manifest of `snapshot`: it names every chunk itself.

    `packs` are all packs that hold its chunks and what those are coded against. InvalidInputError
    when a reader would refuse it, so that no step is saved that cannot be restored.
    """
    try:
        check_counts(snapshot.layout, "of this step")
        check_structure(snapshot.layout.structure, "of this step")
        check_layout(snapshot.layout, "of this step")
        _check_whole(
            snapshot.layout, snapshot.objects, snapshot.inline, snapshot.chunks, "of this step"
        )
    except CorruptionError as error:
        raise InvalidInputError(error.message, kind="inconsistent-state") from error
    return Manifest(
        root=root(snapshot),
        packs=tuple(sorted(set(packs))),
        layout=snapshot.layout,
        environment=snapshot.environment,
        objects=snapshot.objects,
        inline=snapshot.inline,
        chunks={extent: ids.tobytes() for extent, ids in snapshot.chunks.items()},
    )


def to_delta(
    base_digest: bytes, base_snapshot: Snapshot, snapshot: Snapshot, packs: Iterable[str]
) -> Manifest | None:
    """The manifest that lists what differs from the base, however many saves lie between.

    `base_digest` names the manifest of `base_snapshot`, which must be a base. None when the
    layouts differ or the delta would be larger than half of a base: write a base then.
    """
    if base_snapshot.layout is not snapshot.layout and base_snapshot.layout != snapshot.layout:
        return None
    objects = _changed(base_snapshot.objects, snapshot.objects)
    inline = _changed(base_snapshot.inline, snapshot.inline)
    chunks: dict[int, bytes] = {}
    patches: dict[int, tuple[bytes, bytes]] = {}
    size = sum(map(len, objects.values())) + sum(map(len, inline.values()))
    for extent, rows in _changed_rows(base_snapshot.chunks, snapshot.chunks):
        ids = snapshot.chunks[extent]
        if len(rows) * (ID_BYTES + _POSITION.itemsize) >= len(ids) * ID_BYTES:
            chunks[extent] = ids.tobytes()
            size += len(ids) * ID_BYTES
        else:
            patches[extent] = (rows.astype(_POSITION).tobytes(), ids[rows].tobytes())
            size += len(rows) * (ID_BYTES + _POSITION.itemsize)
    environment = snapshot.environment
    if 2 * size > _base_size(snapshot):
        return None
    return Manifest(
        root=root(snapshot),
        packs=tuple(sorted(set(packs).difference(base_snapshot.packs))),
        base=base_digest,
        environment=None if environment == base_snapshot.environment else environment,
        objects=objects,
        inline=inline,
        chunks=chunks,
        patches=patches,
    )


def _changed(old: Mapping[int, bytes], new: Mapping[int, bytes]) -> dict[int, bytes]:
    return {key: value for key, value in new.items() if old.get(key) != value}


def _changed_rows(
    old: Mapping[int, Ids], new: Mapping[int, Ids]
) -> list[tuple[int, NDArray[np.int64]]]:
    """(extent, positions of the ids that differ), for every extent where any does.

    Extents that share one array are equal without looking; all others are compared in one go.
    """
    extents = [extent for extent, ids in new.items() if old[extent] is not ids]
    if not extents:
        return []
    before = _words([old[extent] for extent in extents])
    after = _words([new[extent] for extent in extents])
    rows = np.flatnonzero((before != after).any(axis=1))
    if not len(rows):
        return []
    starts = np.cumsum([0, *(len(new[extent]) for extent in extents)])
    owner = np.searchsorted(starts, rows, side="right") - 1
    cuts = np.flatnonzero(np.diff(owner)) + 1
    return [
        (extents[int(owner[start])], rows[start:end] - starts[owner[start]])
        for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True)
    ]


def _words(arrays: list[Ids]) -> NDArray[np.uint64]:
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return np.ascontiguousarray(joined).view(np.uint64)


def _base_size(snapshot: Snapshot) -> int:
    """Roughly the bytes of a base manifest of `snapshot`."""
    layout = snapshot.layout
    return (
        sum(map(len, snapshot.objects.values()))
        + sum(map(len, snapshot.inline.values()))
        + sum(map(len, snapshot.chunks.values())) * ID_BYTES
        + len(layout.structure)
        + sum(map(len, layout.paths))
        + 40 * len(layout.tensors)
        + 20 * len(layout.extents)
        + len(snapshot.environment)
    )


# decoding ---------------------------------------------------------------------------------------


def decode(data: Buffer, *, name: str = "manifest", views: bool = False) -> Manifest:
    """Parse the bytes of a manifest file called `name` (for errors); sizes are checked first.

    With `views` the lists of `chunks` and `patches` are memoryviews of `data` instead of copies.
    """
    lists = _VIEWS if views else _COPIES
    body = _body(data, MANIFEST_MAGIC, MAX_MANIFEST_BYTES, "manifest", name)
    wire = _parse(body, _Wire, "manifest", name)
    layout = None if bytes(wire.layout) == b"\xc0" else _decode_layout(wire.layout, name)
    manifest = Manifest(
        root=wire.root,
        packs=_counted(wire.packs, tuple[str, ...], MAX_PACKS, "packs", name),
        base=wire.base,
        layout=layout,
        environment=wire.environment,
        objects=_counted(wire.objects, dict[int, bytes], MAX_LEAVES, "objects", name),
        inline=_counted(wire.inline, dict[int, bytes], MAX_LEAVES, "inline", name),
        chunks=_counted(wire.chunks, lists.chunks, MAX_LEAVES, "chunks", name),
        patches=_counted(wire.patches, lists.patches, MAX_LEAVES, "patches", name),
    )
    _check_lists(manifest, name)
    if len(manifest.root) != _DIGEST or (manifest.base and len(manifest.base) != _DIGEST):
        raise _bad("a digest has the wrong length", "manifest", name)
    for pack in manifest.packs:
        if not is_pack_name(pack):
            raise _bad(f"{pack[:100]!r} is not the name of a pack", "manifest", name)
    if manifest.base is None and layout is None:
        raise _bad("a base must have a layout", "manifest", name)
    if manifest.base is not None and layout is not None:
        raise _bad("a delta must not have a layout", "manifest", name)
    if manifest.base is None and (manifest.patches or manifest.environment is None):
        raise _bad("a base must hold everything itself", "manifest", name)
    return manifest


def _check_lists(manifest: Manifest, name: str) -> None:
    """Lists hold whole ids, and patches one for each position."""
    for ids in manifest.chunks.values():
        if len(ids) % ID_BYTES:
            raise _bad("a list of chunk ids is cut short", "manifest", name)
    for positions, ids in manifest.patches.values():
        if not positions or len(positions) % _POSITION.itemsize or len(ids) % ID_BYTES:
            raise _bad("a patch is cut short", "manifest", name)
        if len(positions) // _POSITION.itemsize != len(ids) // ID_BYTES:
            raise _bad("the positions of a patch do not fit its chunks", "manifest", name)


def _decode_layout(raw: msgspec.Raw, name: str) -> Layout:
    wire = _parse(raw, _WireLayout, "manifest", name)
    for field, what in ((wire.paths, "paths"), (wire.tensors, "tensors"),
                        (wire.extents, "extents"), (wire.objects, "objects")):  # fmt: skip
        _check_count(field, MAX_LEAVES, what, name)
    layout = _parse(raw, Layout, "manifest", name)
    check_structure(layout.structure, name)
    return layout


def resolve(manifest: Manifest, base: Snapshot | None = None, *, digest: bytes | None = None,
            name: str = "manifest") -> Snapshot:  # fmt: skip
    """The snapshot that a manifest stands for, fully validated; its root is recomputed.

    `base` is the snapshot of the base manifest of a delta (ignored for a base manifest); when it
    knows its digest, that must be the one the delta names. `digest` is the manifest's own, kept in
    the result. Extents equal to the base's share its arrays. CorruptionError otherwise.
    """
    if manifest.base is None:
        assert manifest.layout is not None
        layout = manifest.layout
        check_layout(layout, name)
        objects, inline = manifest.objects, manifest.inline
        chunks = {extent: _ids(data) for extent, data in manifest.chunks.items()}
        packs = manifest.packs
        environment = manifest.environment or b"\x80"
        _check_whole(layout, objects, inline, chunks, name)
    else:
        if base is None or base.base is not None or base.digest not in (None, manifest.base):
            raise _bad(f"its base {manifest.base.hex()} is not what was given", "manifest", name)
        layout = base.layout
        objects = {**base.objects, **manifest.objects}
        inline = {**base.inline, **manifest.inline}
        chunks = {**base.chunks}
        for extent, data in manifest.chunks.items():
            chunks[extent] = _ids(data)
        for extent, (positions, ids) in manifest.patches.items():
            if extent not in base.chunks or extent in manifest.chunks:
                raise _bad(f"extent {extent} cannot be patched", "manifest", name)
            chunks[extent] = _patched(base.chunks[extent], positions, ids, name)
        packs = tuple(sorted({*base.packs, *manifest.packs}))
        environment = base.environment if manifest.environment is None else manifest.environment
        _check_whole(layout, objects, inline, chunks, name)
    snapshot = Snapshot(
        layout, objects, inline, chunks, environment,
        packs=packs, root=manifest.root, digest=digest, base=manifest.base,
    )  # fmt: skip
    if root(snapshot) != manifest.root:
        raise _bad("its content does not have the recorded root", "manifest", name)
    return snapshot


def _check_whole(
    layout: Layout,
    objects: Mapping[int, bytes],
    inline: Mapping[int, bytes],
    chunks: Mapping[int, Ids],
    name: str,
) -> None:
    """Every object, inline extent and chunk list is there, of the declared size, and no other."""
    if len(objects) != len(layout.objects) or any(slot not in objects for slot in layout.objects):
        raise _bad("its objects are not those of the layout", "manifest", name)
    inlined = 0
    for index, extent in enumerate(layout.extents):
        if extent.inline:
            inlined += 1
            if len(inline.get(index, b"")) != extent.nbytes or index not in inline:
                raise _bad(f"inline extent {index} is incomplete", "manifest", name)
        elif index not in chunks or len(chunks[index]) != extent.chunk_count:
            raise _bad(f"extent {index} does not name its chunks", "manifest", name)
    if len(inline) != inlined or len(chunks) != len(layout.extents) - inlined:
        raise _bad("it holds extents that the layout does not know", "manifest", name)


def _ids(data: bytes) -> Ids:
    return np.frombuffer(data, np.uint8).reshape(-1, ID_BYTES)


def _patched(old: Ids, positions: bytes, ids: bytes, name: str) -> Ids:
    rows = np.frombuffer(positions, _POSITION)
    ascending = bool((rows[1:] > rows[:-1]).all())
    if not ascending or int(rows[-1]) >= len(old):
        raise _bad("a patch does not fit its extent", "manifest", name)
    new = old.copy()
    new[rows] = _ids(ids)
    new.flags.writeable = False
    return new


# commits ----------------------------------------------------------------------------------------


def encode_commit(commit: Commit) -> bytes:
    """The bytes of a commit file; the commit's `digest` is left out and recomputed by readers."""
    head = COMMIT_MAGIC + bytes([VERSION])
    head += msgspec.msgpack.encode(msgspec.structs.replace(commit, digest=b""))
    data = head + digest_of(head)
    if len(data) > MAX_COMMIT_BYTES:
        raise InvalidInputError(
            f"the commit record would have {len(data)} bytes, more than {MAX_COMMIT_BYTES}",
            kind="commit-size",
            hint="record fewer metrics",
        )
    return data


def decode_commit(data: bytes, *, name: str = "commit") -> Commit:
    """Parse a commit file called `name`, digest filled in; CorruptionError when damaged."""
    if len(data) < _DIGEST or digest_of(memoryview(data)[:-_DIGEST]) != data[-_DIGEST:]:
        raise _bad("its digest does not match its content", "commit", name)
    body = _body(data[:-_DIGEST], COMMIT_MAGIC, MAX_COMMIT_BYTES, "commit", name)
    commit = _parse(body, Commit, "commit", name)
    digests = [commit.manifest, commit.root, commit.closure]
    if commit.base is not None:
        digests.append(commit.base)
    if commit.parent is not None:
        digests.append(commit.parent[2])
    if any(len(digest) != _DIGEST for digest in digests):
        raise _bad("a digest has the wrong length", "commit", name)
    if not is_name(commit.run) or (commit.parent is not None and not is_name(commit.parent[0])):
        raise _bad("a run has an impossible name", "commit", name)
    if not 0 <= commit.number < MAX_NUMBER or (commit.parent and commit.parent[1] < 0):
        raise _bad("a commit number is out of range", "commit", name)
    if not 0 <= commit.step < 1 << 63:
        raise _bad("its step is out of range", "commit", name)
    if commit.parent and commit.parent[0] == commit.run and commit.parent[1] >= commit.number:
        raise _bad("it continues itself or a later commit", "commit", name)
    edges = [-1, *chain.from_iterable((first, last + 1) for first, last in commit.ancestors)]
    if any(a >= b for a, b in pairwise(edges)) or edges[-1] > commit.number:
        raise _bad("its ancestors are not ascending earlier numbers", "commit", name)
    # Readers of these figures count and round them: infinities and NaN count as not recorded.
    stats = {key: value for key, value in commit.stats.items() if math.isfinite(value)}
    return msgspec.structs.replace(commit, digest=data[-_DIGEST:], stats=stats)


# shared -----------------------------------------------------------------------------------------


def damaged_manifest(digest: bytes, what: str) -> CorruptionError:
    """The error for the manifest of that digest, which `what` says is wrong."""
    name = f"manifests/{digest.hex()}"
    return CorruptionError(f"manifest {name} {what}", kind="damaged-manifest", path=name)


def _bad(reason: str, what: str, name: str) -> CorruptionError:
    return CorruptionError(f"{what} {name} is damaged: {reason}", kind=f"damaged-{what}", path=name)


def _body(data: Buffer, magic: bytes, limit: int, what: str, name: str) -> memoryview:
    if len(data) > limit:
        raise _bad(f"{len(data)} bytes are more than {limit}", what, name)
    if len(data) <= len(magic) or data[: len(magic)] != magic:
        raise _bad("it does not begin as one", what, name)
    version = data[len(magic)]
    if version != VERSION:
        raise UnsupportedFormatError(
            f"{what} {name} has format version {version}, this package reads {VERSION}",
            hint="upgrade deltackpt",
            path=name,
        )
    return memoryview(data)[len(magic) + 1 :]


def _parse(data: memoryview | msgspec.Raw, kind: type[_T], what: str, name: str) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise _bad(str(error), what, name) from error


def _counted(raw: msgspec.Raw, kind: type[_T], limit: int, what: str, name: str) -> _T:
    _check_count(raw, limit, what, name)
    return _parse(raw, kind, "manifest", name)


def _check_count(raw: msgspec.Raw, limit: int, what: str, name: str) -> None:
    """Refuse a container that declares more than `limit` entries, by its msgpack header."""
    data = memoryview(raw)
    tag = data[0] if len(data) else 0
    if tag in (0xDC, 0xDE):
        count = int.from_bytes(data[1:3], "big")
    elif tag in (0xDD, 0xDF):
        count = int.from_bytes(data[1:5], "big")
    else:
        count = 0  # at most 15 entries, or no container: the typed decoder will say so
    if count > limit:
        raise _bad(f"{count} {what} are more than {limit}", "manifest", name)
