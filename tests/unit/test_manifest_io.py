"""Manifests and commits: exact round trips, and nothing believed that was not checked."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store import (
    Commit,
    CorruptionError,
    ExtentSpec,
    InvalidInputError,
    Layout,
    Manifest,
    Snapshot,
    TensorView,
    UnsupportedFormatError,
)
from deltackpt_store import manifest_io as mi
from deltackpt_store.history import ancestors_after
from deltackpt_store.manifest import MAX_CHUNK_BYTES, element_bytes
from deltackpt_store.merkle import root

PACKS = ("0011223344556677-00000001", "8899aabbccddeeff-00000012")
OTHER = "8899aabbccddeeff-00000013"
CHUNK = 1024


def ids(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def snapshot(tensors: int = 3, chunks: int = 40, **change: Any) -> Snapshot:
    """`tensors` tensors of `chunks` chunks each (the last one short), an inline one, an object."""
    nbytes = chunks * CHUNK - 4
    views = [TensorView(i, i, "float32", (nbytes // 4,), (1,), 0) for i in range(tensors)]
    views.append(TensorView(tensors, tensors, "bool", (7,), (1,), 0))
    layout = Layout(
        structure=msgspec.msgpack.encode(["l", *range(tensors + 2)]),
        paths=(*(f"w/{i}" for i in range(tensors)), "mask", "lr"),
        tensors=tuple(views),
        extents=(
            *(ExtentSpec(nbytes, CHUNK, "float32") for _ in range(tensors)),
            ExtentSpec(7, CHUNK, "bool"),
        ),
        objects=(tensors + 1,),
    )
    return Snapshot(
        layout,
        change.get("objects", {tensors + 1: b"\x01"}),
        change.get("inline", {tensors: b"\1\0\1\0\1\0\1"}),
        change.get("chunks", {i: ids(chunks, i) for i in range(tensors)}),
        change.get("environment", b"\x81\xa5torch\xa32.0"),
        packs=PACKS,
    )


def same(a: Snapshot, b: Snapshot) -> bool:
    return (
        a.layout == b.layout
        and a.objects == b.objects
        and a.inline == b.inline
        and a.environment == b.environment
        and a.chunks.keys() == b.chunks.keys()
        and all(np.array_equal(a.chunks[k], b.chunks[k]) for k in a.chunks)
    )


def stored(manifest: Manifest, base: Snapshot | None = None) -> Snapshot:
    data = mi.encode(manifest)
    return mi.resolve(mi.decode(data), base, digest=mi.digest_of(data))


def base_of(content: Snapshot) -> Snapshot:
    return stored(mi.to_base(content, PACKS))


def changed(content: Snapshot, *places: tuple[int, int], **more: Any) -> Snapshot:
    chunks = dict(content.chunks)
    for extent, row in places:
        chunks[extent] = chunks[extent].copy()
        chunks[extent][row, 3] ^= 255
    parts = {"objects": content.objects, "inline": content.inline} | more
    environment = parts.pop("environment", content.environment)
    return Snapshot(content.layout, parts["objects"], parts["inline"], chunks, environment)


# round trips ------------------------------------------------------------------------------------


def test_base_round_trip() -> None:
    """What a step consists of comes back exactly, from the bytes of its file alone."""
    content = snapshot()
    back = base_of(content)
    assert same(back, content)
    assert back.packs == PACKS
    assert back.base is None
    assert back.root == root(content)
    assert not back.chunks[0].flags.writeable


def test_manifest_is_called_by_blake3_of_its_bytes() -> None:
    """Another implementation must find the file by the same name."""
    data = mi.encode(mi.to_base(snapshot(), PACKS))
    assert mi.digest_of(data) == blake3(data).digest()
    assert data[:8] == b"DCKPTMF\x01"
    fields = msgspec.msgpack.decode(data[8:])
    assert fields["chunks"][1] == snapshot().chunks[1].tobytes()
    assert fields["packs"] == list(PACKS)


def test_delta_lists_only_what_differs_from_its_base() -> None:
    """Delta manifests of an unchanged state stay a few hundred bytes however large the state is."""
    base = base_of(snapshot(chunks=4000))
    nothing = mi.to_delta(base.digest or b"", base, changed(base), PACKS)
    assert nothing is not None
    assert len(mi.encode(nothing)) < 200
    assert same(stored(nothing, base), base)
    few = changed(base, (0, 3), (2, 3999), (2, 0))
    delta = mi.to_delta(base.digest or b"", base, few, (*PACKS, OTHER))
    assert delta is not None
    assert delta.packs == (OTHER,)
    assert {k: np.frombuffer(p, "<u4").tolist() for k, (p, _) in delta.patches.items()} == {
        0: [3],
        2: [0, 3999],
    }
    assert len(mi.encode(delta)) < 500
    back = stored(delta, base)
    assert same(back, few)
    assert back.packs == tuple(sorted((*PACKS, OTHER)))
    assert back.base == base.digest
    assert back.chunks[1] is base.chunks[1]


def test_delta_carries_objects_inline_and_environment_that_changed() -> None:
    """A learning rate or a counter that the delta forgot would come back from the base."""
    base = base_of(snapshot())
    new = changed(base, objects={4: b"\x05"}, inline={3: b"\0\0\0\0\0\0\1"}, environment=b"\x80")
    delta = mi.to_delta(base.digest or b"", base, new, PACKS)
    assert delta is not None
    assert (delta.objects, delta.inline, delta.chunks, delta.patches) == (
        {4: b"\x05"}, {3: b"\0\0\0\0\0\0\1"}, {}, {},
    )  # fmt: skip
    assert same(stored(delta, base), new)


def test_an_extent_that_changed_throughout_is_listed_whole() -> None:
    """Positions next to every id would make the delta larger than what it replaces."""
    base = base_of(snapshot(tensors=4))
    new = changed(base, *((1, row) for row in range(40)))
    delta = mi.to_delta(base.digest or b"", base, new, PACKS)
    assert delta is not None
    assert delta.chunks.keys() == {1}
    assert not delta.patches
    assert same(stored(delta, base), new)


def test_no_delta_when_a_base_is_the_better_choice() -> None:
    """A delta of everything, or against another layout, costs more than it saves."""
    base = base_of(snapshot())
    everything = changed(base, *((e, row) for e in range(3) for row in range(40)))
    assert mi.to_delta(base.digest or b"", base, everything, PACKS) is None
    assert mi.to_delta(base.digest or b"", base, snapshot(tensors=2), PACKS) is None
    other = msgspec.structs.replace(base.layout, paths=("a", "b", "c", "d", "e"))
    moved = Snapshot(other, base.objects, base.inline, base.chunks)
    assert mi.to_delta(base.digest or b"", base, moved, PACKS) is None
    equal = msgspec.structs.replace(base.layout)
    assert equal is not base.layout
    copied = Snapshot(equal, base.objects, base.inline, dict(base.chunks), base.environment)
    assert mi.to_delta(base.digest or b"", base, copied, PACKS) is not None


def test_deltas_do_not_build_on_each_other() -> None:
    """Losing a step in between must not lose the steps after it."""
    base = base_of(snapshot())
    current = base
    for step in range(20):
        current = changed(current, (step % 3, step))
        delta = mi.to_delta(base.digest or b"", base, current, PACKS)
        assert delta is not None
        assert same(stored(delta, base), current)
    assert sum(len(p) for p, _ in delta.patches.values()) == 20 * 4


def test_empty_state() -> None:
    """A state without a single leaf is still a state."""
    empty = Snapshot(Layout(b"\x90", (), (), (), ()), {}, {}, {})
    assert same(base_of(empty), empty)


# refusals ---------------------------------------------------------------------------------------


def reject(manifest: Manifest, base: Snapshot | None = None, match: str = "damaged") -> None:
    """Decoding or resolving must fail, and not only because the root no longer fits."""
    data = msgspec.msgpack.encode(manifest if match == "root" else rooted(manifest))
    with pytest.raises(CorruptionError, match=match) as caught:
        mi.resolve(mi.decode(mi.MANIFEST_MAGIC + b"\1" + data, name="manifests/abc"), base,
                   name="manifests/abc")  # fmt: skip
    assert caught.value.context["path"] == "manifests/abc"
    assert match == "root" or "recorded root" not in caught.value.message


def rooted(manifest: Manifest) -> Manifest:
    """The base manifest with the root that its content has, where it has any."""
    if manifest.layout is None or len(manifest.root) != 32 or manifest.base is not None:
        return manifest
    try:
        ids = {k: np.frombuffer(v, np.uint8).reshape(-1, 32) for k, v in manifest.chunks.items()}
        content = Snapshot(manifest.layout, manifest.objects, manifest.inline, ids)
        return replaced(manifest, root=root(content))
    except (KeyError, IndexError, ValueError):
        return manifest


def replaced(manifest: Manifest, **fields: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def with_layout(manifest: Manifest, **fields: Any) -> Manifest:
    assert manifest.layout is not None
    return replaced(manifest, layout=msgspec.structs.replace(manifest.layout, **fields))


def with_view(manifest: Manifest, **fields: Any) -> Manifest:
    assert manifest.layout is not None
    first, *rest = manifest.layout.tensors
    return with_layout(manifest, tensors=(msgspec.structs.replace(first, **fields), *rest))


def with_extent(manifest: Manifest, **fields: Any) -> Manifest:
    assert manifest.layout is not None
    first, *rest = manifest.layout.extents
    return with_layout(manifest, extents=(msgspec.structs.replace(first, **fields), *rest))


SIZE = (40 * CHUNK - 4) // 4


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": (SIZE + 1,)},
        {"offset": 4},
        {"offset": -4},
        {"offset": 2, "shape": (4,)},
        {"stride": (2,)},
        {"stride": (-1,)},
        {"shape": (-1,)},
        {"shape": (SIZE, 2), "stride": (1, 1)},
        {"shape": (2,), "stride": (SIZE,)},
        {"shape": (1 << 62, 1 << 62), "stride": (0, 0)},
        {"shape": (1,) * 65, "stride": (1,) * 65},
        {"shape": (0,), "offset": 40 * CHUNK},
        {"dtype": "float64"},
        {"extent": 4},
        {"extent": -1},
        {"slot": 1},
        {"slot": 99},
        {"global_shape": (SIZE,)},
        {"shard_offsets": (0,)},
        {"global_shape": (SIZE,), "shard_offsets": (1,)},
        {"global_shape": (SIZE,), "shard_offsets": (-1,)},
        {"global_shape": (SIZE, 1), "shard_offsets": (0, 0)},
    ],
    ids=str,
)
def test_views_that_reach_outside_their_bytes(fields: dict[str, Any]) -> None:
    """A crafted stride or offset must not expose memory of the training process."""
    reject(with_view(mi.to_base(snapshot(), PACKS), **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"nbytes": 1 << 62},
        {"nbytes": -1},
        {"nbytes": 40 * CHUNK + 1},
        {"nbytes": 39 * CHUNK},
        {"nbytes": 100},
        {"chunk_bytes": 0},
        {"chunk_bytes": -5},
        {"chunk_bytes": CHUNK * 2},
        {"chunk_bytes": MAX_CHUNK_BYTES + 1},
    ],
    ids=str,
)
def test_extents_that_do_not_fit_their_chunks(fields: dict[str, Any]) -> None:
    """A declared size that nothing backs must not lead to an allocation."""
    reject(with_extent(mi.to_base(snapshot(), PACKS), **fields))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"root": bytes(32)}, "root"),
        ({"root": bytes(31)}, "digest"),
        ({"base": bytes(5)}, "digest"),
        ({"base": bytes(32)}, "layout"),
        ({"layout": None}, "layout"),
        ({"environment": None}, "itself"),
        ({"patches": {0: (b"\0\0\0\0", bytes(32))}}, "itself"),
        ({"packs": ("../../etc/passwd",)}, "pack"),
        ({"packs": (PACKS[0] + "\n",)}, "pack"),
        ({"objects": {}}, "objects"),
        ({"objects": {4: b"\1", 5: b"\1"}}, "objects"),
        ({"objects": {3: b"\1"}}, "objects"),
        ({"inline": {}}, "inline"),
        ({"inline": {3: b"12345678"}}, "inline"),
        ({"inline": {3: b"1234567", 0: b""}}, "extents"),
        ({"chunks": {}}, "chunks"),
        ({"chunks": {0: bytes(32 * 40), 1: bytes(32 * 40), 2: bytes(32 * 39)}}, "chunks"),
        ({"chunks": {0: bytes(32 * 40), 1: bytes(32 * 40), 2: bytes(32 * 40 - 1)}}, "cut short"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40],
)  # fmt: skip
def test_bases_that_do_not_hold_together(fields: dict[str, Any], match: str) -> None:
    """Whatever a step needs must be named exactly once, and nothing else."""
    reject(replaced(mi.to_base(snapshot(), PACKS), **fields), match=match)


@pytest.mark.parametrize(
    "fields",
    [
        {"paths": ("a", "a", "b", "c", "d")},
        {"paths": ("a", "b", "c", "d")},
        {"paths": ("a", "b", "c", "d", "e", "f")},
        {"objects": ()},
        {"objects": (4, 4)},
        {"objects": (0,)},
        {"structure": b""},
        {"structure": b"\x91" * 300 + b"\x90"},
        {"structure": b"\x91" * 100_000},
        {"structure": b"\xdd\xff\xff\xff\xff"},
        {"structure": b"\x90\x90"},
        {"structure": b"\x81\x90\x90"},
    ],
    ids=lambda value: str(value)[:60],
)
def test_layouts_that_do_not_hold_together(fields: dict[str, Any]) -> None:
    """Slots, paths and tree are one-to-one, and no nesting exhausts the stack."""
    reject(with_layout(mi.to_base(snapshot(), PACKS), **fields))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"patches": {0: (b"", b"")}}, "cut short"),
        ({"patches": {0: (b"\0\0\0", bytes(32))}}, "cut short"),
        ({"patches": {0: (b"\0\0\0\0", bytes(31))}}, "cut short"),
        ({"patches": {0: (b"\0\0\0\0", bytes(64))}}, "fit"),
        ({"patches": {0: (b"\x28\0\0\0", bytes(32))}}, "fit"),
        ({"patches": {0: (b"\1\0\0\0\1\0\0\0", bytes(64))}}, "fit"),
        ({"patches": {0: (b"\2\0\0\0\1\0\0\0", bytes(64))}}, "fit"),
        ({"patches": {3: (b"\0\0\0\0", bytes(32))}}, "patched"),
        ({"patches": {9: (b"\0\0\0\0", bytes(32))}}, "patched"),
        ({"patches": {0: (b"\0\0\0\0", bytes(32))}, "chunks": {0: bytes(1280)}}, "patched"),
        ({"chunks": {0: bytes(32)}}, "chunks"),
        ({"chunks": {3: bytes(32)}}, "extents"),
        ({"inline": {0: b""}}, "extents"),
        ({"objects": {0: b""}}, "objects"),
        ({"layout": snapshot().layout}, "layout"),
        ({"root": bytes(32)}, "root"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40],
)  # fmt: skip
def test_deltas_that_do_not_fit_their_base(fields: dict[str, Any], match: str) -> None:
    """A crafted patch must not write outside its extent."""
    base = base_of(snapshot())
    delta = mi.to_delta(base.digest or b"", base, changed(base, (0, 1)), PACKS)
    assert delta is not None
    reject(replaced(delta, patches={}, **fields) if "patches" not in fields
           else replaced(delta, **fields), base, match)  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"chunks": {0: bytes(33)}},
        {"patches": {0: (b"", b"")}},
        {"patches": {0: (bytes(5), bytes(32))}},
        {"patches": {0: (bytes(4), bytes(31))}},
        {"patches": {0: (bytes(4), bytes(64))}},
        {"patches": {0: (bytes(6), bytes(32)), 1: (bytes(2), bytes(32))}},
    ],
    ids=range(6),
)
def test_lists_that_are_cut_short_are_told_when_a_manifest_is_decoded(
    fields: dict[str, Any],
) -> None:
    """Collection, compaction and `du` read these lists without resolving a snapshot."""
    base = base_of(snapshot())
    delta = mi.to_delta(base.digest or b"", base, changed(base, (0, 1)), PACKS)
    assert delta is not None
    with pytest.raises(CorruptionError, match=r"cut short|do not fit"):
        mi.decode(mi.encode(replaced(delta, **fields)))


def test_delta_on_another_base() -> None:
    """A delta applied to the base of another run would mix two models."""  # case 105
    base, other = base_of(snapshot()), base_of(snapshot(chunks=40, objects={4: b"\x09"}))
    delta = mi.to_delta(base.digest or b"", base, changed(base, (0, 1)), PACKS)
    assert delta is not None
    with pytest.raises(CorruptionError, match="base"):
        mi.resolve(delta, other)
    with pytest.raises(CorruptionError, match="base"):
        mi.resolve(delta, None)
    with pytest.raises(CorruptionError, match="base"):
        mi.resolve(delta, stored(delta, base))
    # Even when the digest is not known, the root tells.
    with pytest.raises(CorruptionError, match="root"):
        mi.resolve(delta, Snapshot(other.layout, other.objects, other.inline, other.chunks))


@pytest.mark.parametrize("what", ["manifest", "commit"])
def test_a_newer_format_is_refused_and_not_called_damage(what: str) -> None:
    """An older tool that guessed at a newer format would damage it."""
    if what == "manifest":
        data = mi.encode(mi.to_base(snapshot(), PACKS))
        with pytest.raises(UnsupportedFormatError, match="version 2"):
            mi.decode(data[:7] + b"\2" + data[8:])
    else:
        data = mi.encode_commit(commit())
        newer = data[:7] + b"\2" + data[8:-32]
        with pytest.raises(UnsupportedFormatError, match="version 2"):
            mi.decode_commit(newer + blake3(newer).digest())


def test_unknown_dtype_is_unsupported_not_corrupt() -> None:
    """A store written with a newer torch asks for an upgrade."""
    manifest = with_view(mi.to_base(snapshot(), PACKS), dtype="tensorfloat")
    with pytest.raises(UnsupportedFormatError, match="tensorfloat"):
        mi.resolve(manifest)


@pytest.mark.parametrize("field", ["objects", "inline", "chunks", "patches", "packs", "layout"])
@pytest.mark.parametrize("count", [b"\xff\xff\xff\xff", b"\x00\x20\x00\x01"])
def test_declared_counts_are_checked_before_anything_is_allocated(field: str, count: bytes) -> None:
    """A few bytes that declare billions of entries must not exhaust memory."""
    array = field == "packs"
    huge = (b"\xdd" if array else b"\xdf") + count
    fields = {"root": msgspec.Raw(msgspec.msgpack.encode(bytes(32))), "packs": msgspec.Raw(b"\x90")}
    body = bytearray(b"\x83" if field != "packs" else b"\x82")
    for name, value in fields.items():
        if name != field:
            body += msgspec.msgpack.encode(name) + bytes(value)
    body += msgspec.msgpack.encode(field) + huge
    tracemalloc.start()
    with pytest.raises(CorruptionError):
        mi.decode(mi.MANIFEST_MAGIC + b"\1" + bytes(body))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_real_but_excessive_counts_are_refused_early() -> None:
    """Millions of tiny entries that are really there cost 40 times their size once decoded."""
    entries = b"".join(b"\xce" + i.to_bytes(4, "big") + b"\xc4\0" for i in range((1 << 20) + 1))
    body = b"\x83" + msgspec.msgpack.encode("root") + msgspec.msgpack.encode(bytes(32))
    body += msgspec.msgpack.encode("packs") + b"\x90" + msgspec.msgpack.encode("objects")
    body += b"\xdf" + ((1 << 20) + 1).to_bytes(4, "big") + entries
    with pytest.raises(CorruptionError, match="more than"):
        mi.decode(mi.MANIFEST_MAGIC + b"\1" + body)


@pytest.mark.parametrize(
    "data",
    [b"", b"DCKPTMF", b"DCKPTMF\1", b"DCKPTCM\1\x80", b"DCKPTMF\1\x80", b"DCKPTMF\1\xc0",
     b"DCKPTMF\1\x91\x01", b"\x80\x04\x95cposix\nsystem\n", b"DCKPTMF\1" + b"\x81" * 100_000],
    ids=repr,
)  # fmt: skip
def test_other_bytes_are_not_a_manifest(data: bytes) -> None:
    """Any file under a manifest's name gives the same clear error, a pickle too."""  # case 162
    with pytest.raises(CorruptionError):
        mi.decode(data[:200_000], name="x")


def test_a_manifest_too_large_to_be_read_back_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that no reader accepts must fail at save, with the way out."""
    monkeypatch.setattr(mi, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(InvalidInputError, match="chunk_bytes"):
        mi.encode(mi.to_base(snapshot(), PACKS))
    with pytest.raises(CorruptionError, match="more than"):
        mi.decode(mi.MANIFEST_MAGIC + bytes(2000))


@pytest.mark.parametrize("part", ["inline", "chunks", "objects", "view", "nesting", "count"])
def test_a_step_that_no_reader_would_accept_is_not_written(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inconsistent state must fail at save, not when it is needed."""
    content = snapshot()
    if part == "view":
        far = msgspec.structs.replace(content.layout.tensors[0], offset=8)
        tensors = (far, *content.layout.tensors[1:])
        content.layout = msgspec.structs.replace(content.layout, tensors=tensors)
    elif part == "nesting":
        deep = b"\x91" * 300 + b"\x90"
        content.layout = msgspec.structs.replace(content.layout, structure=deep)
    elif part == "count":
        monkeypatch.setattr("deltackpt_store.layout_check.MAX_LEAVES", 4)
    else:
        getattr(content, part).popitem()
    with pytest.raises(InvalidInputError) as caught:
        mi.to_base(content, PACKS)
    assert caught.value.kind == "inconsistent-state"


def test_extents_that_no_tensor_views_are_refused() -> None:
    """Bytes outside of every root could be changed without anybody noticing."""
    manifest = mi.to_base(snapshot(), PACKS)
    assert manifest.layout is not None
    extents = (*manifest.layout.extents, ExtentSpec(3, CHUNK, "uint8"))
    inline = {**manifest.inline, len(extents) - 1: b"abc"}
    reject(replaced(with_layout(manifest, extents=extents), inline=inline), match="view")


# commits ----------------------------------------------------------------------------------------


def commit(**fields: Any) -> Commit:
    values: dict[str, Any] = {
        "run": "main",
        "number": 7,
        "step": 700,
        "parent": ("main", 6, bytes(range(32))),
        "manifest": b"m" * 32,
        "base": b"b" * 32,
        "root": b"r" * 32,
        "closure": mi.closure_digest(PACKS),
        "writer": "0" * 16,
        "nonce": b"n" * 16,
        "generation": 0,
        "created": 1e9,
        "versions": {"deltackpt": "1"},
        "metrics": {"loss": float("nan")},
        "stats": {"x": 1.0},
        "ancestors": ((1, 6),),
    }
    return Commit(**(values | fields))


def test_commit_round_trip() -> None:
    """The record of a step comes back field by field, with the digest of its own bytes."""
    data = mi.encode_commit(commit(digest=b"junk"))
    back = mi.decode_commit(data)
    assert back.digest == blake3(data[:-32]).digest() == data[-32:]
    expected = commit(digest=back.digest, metrics={})
    assert np.isnan(back.metrics["loss"])
    assert msgspec.structs.replace(back, metrics={}) == expected
    assert len(data) < 600


def test_every_flipped_bit_of_a_commit_is_noticed() -> None:
    """A commit that names another manifest restores another model."""  # case 112
    data = mi.encode_commit(commit())
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            mi.decode_commit(bytes(broken))
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            mi.decode_commit(data[:length])


@pytest.mark.parametrize(
    "fields",
    [
        {"manifest": b"short"},
        {"root": b""},
        {"closure": bytes(33)},
        {"base": b"x"},
        {"parent": ("main", 6, b"x")},
        {"parent": ("../x", 6, bytes(32))},
        {"parent": ("main", -1, bytes(32))},
        {"run": "../../x"},
        {"run": ""},
        {"number": -1},
        {"number": 10**18},
        {"step": -1},
        {"step": 1 << 63},
        {"ancestors": ((5, 4),)},
        {"ancestors": ((1, 3), (3, 6))},
        {"ancestors": ((1, 7),)},
        {"ancestors": ((-1, 2),)},
    ],
    ids=str,
)
def test_commits_with_impossible_fields(fields: dict[str, Any]) -> None:
    """Names and numbers from a record become paths, its step a name; only well-formed ones may."""
    with pytest.raises(CorruptionError):
        mi.decode_commit(mi.encode_commit(commit(**fields)))


def test_commit_too_large() -> None:
    """Metrics without end are refused at save."""
    with pytest.raises(InvalidInputError, match="metrics"):
        mi.encode_commit(commit(metrics={str(i): 0.0 for i in range(200_000)}))


def test_closure_digest() -> None:
    """The closure can be checked with nothing but a list of names."""
    names = "\n".join(sorted(PACKS)).encode()
    assert mi.closure_digest(reversed(PACKS)) == blake3(names).digest()
    assert mi.closure_digest([*PACKS, *PACKS]) == blake3(names).digest()
    assert mi.closure_digest([]) == blake3(b"").digest()
    assert mi.closure_digest(PACKS) != hashlib.sha256(names).digest()


def test_ancestors_after() -> None:
    """Which steps a run continues is known even when those in between are gone."""
    assert ancestors_after(None, "main") == ()
    first = commit(number=1, ancestors=())
    assert ancestors_after(first, "main") == ((1, 1),)
    assert ancestors_after(first, "fork") == ()
    assert ancestors_after(commit(number=2, ancestors=((1, 1),)), "main") == ((1, 2),)
    back = commit(number=51, ancestors=((1, 4),))
    assert ancestors_after(back, "main") == ((1, 4), (51, 51))


# dtypes -----------------------------------------------------------------------------------------


def test_element_bytes_agrees_with_torch_for_every_dtype() -> None:
    """A dtype whose size is taken wrong would be refused, or read beyond its bytes."""  # case 13
    torch = pytest.importorskip("torch")
    dtypes = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    assert len(dtypes) > 30
    for dtype in dtypes:
        assert element_bytes(str(dtype).removeprefix("torch.")) == dtype.itemsize, dtype


@pytest.mark.parametrize("name", ["", "float", "32", "float0", "float9999", "a b32", "float32\n"])
def test_names_that_are_no_dtype(name: str) -> None:
    """A name that tells no width is refused instead of guessed."""
    with pytest.raises(UnsupportedFormatError):
        element_bytes(name)
