"""Manifests of arbitrary states: exact round trips, cumulative deltas, and hostile bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from deltackpt_store import (
    Commit,
    CorruptionError,
    ExtentSpec,
    Layout,
    Snapshot,
    TensorView,
    UnsupportedFormatError,
)
from deltackpt_store import manifest_io as mi
from deltackpt_store.history import ancestors_after
from deltackpt_store.manifest import INLINE_BYTES, element_bytes
from deltackpt_store.merkle import root
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
PACK = st.integers(0, 99).map(lambda n: f"{n:016x}-{n:08d}")
DTYPES = ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex128")


@st.composite
def views(draw: st.DrawFn, slot: int, extent: int, nbytes: int) -> TensorView:
    """Any view that lies inside its extent: strided, expanded, offset, empty or 0-dim."""
    dtype = draw(st.sampled_from(DTYPES))
    width = element_bytes(dtype)
    room = nbytes // width
    offset = draw(st.integers(0, room)) * width
    left = room - offset // width
    shape: list[int] = []
    stride: list[int] = []
    last = 0
    for _ in range(draw(st.integers(0, 4))):
        if left < 1:
            shape.append(0)
            stride.append(draw(st.integers(0, 5)))
            continue
        step = draw(st.integers(0, max(0, left - 1 - last)))
        most = 6 if step == 0 else min(6, 1 + (left - 1 - last) // step)
        size = draw(st.integers(0, most))
        shape.append(size)
        stride.append(step)
        last += max(0, size - 1) * step
    if left < 1 and 0 not in shape:
        shape.append(0)
        stride.append(1)
    sharded = draw(st.booleans())
    return TensorView(
        slot, extent, dtype, tuple(shape), tuple(stride), offset,
        *(draw(st.booleans()) for _ in range(4)),
        device=draw(st.sampled_from(["cpu", "cuda:1"])),
        global_shape=tuple(n + 3 for n in shape) if sharded else None,
        shard_offsets=tuple(draw(st.integers(0, 3)) for _ in shape) if sharded else None,
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    chunk = draw(st.sampled_from([1, 64, 1000, 4096]))
    most = INLINE_BYTES + 1 + 40 * chunk
    extents = tuple(
        ExtentSpec(draw(st.integers(0, most)), chunk, "float32")
        for _ in range(draw(st.integers(0, 4)))
    )
    numbers = [*range(len(extents))]
    more = draw(st.lists(st.sampled_from([-1, *numbers]), max_size=5))
    kinds = draw(st.permutations(numbers + more))
    tensors: list[TensorView] = []
    objects: list[int] = []
    for slot, extent in enumerate(kinds):
        if extent >= 0:
            tensors.append(draw(views(slot, extent, extents[extent].nbytes)))
        else:
            objects.append(slot)
    names = draw(
        st.lists(st.text(st.characters(codec="utf-8"), max_size=12), unique=True,
                 min_size=len(kinds), max_size=len(kinds))
    )  # fmt: skip
    structure = msgspec.msgpack.encode(["l", *range(len(kinds))])
    return Layout(structure, tuple(names), tuple(tensors), extents, tuple(objects))


@st.composite
def contents(draw: st.DrawFn, layout: Layout) -> Snapshot:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    inline: dict[int, bytes] = {}
    chunks: dict[int, Any] = {}
    for number, extent in enumerate(layout.extents):
        if extent.inline:
            inline[number] = rng.bytes(extent.nbytes)
        else:
            chunks[number] = rng.integers(0, 256, (extent.chunk_count, 32), np.uint8)
    objects = {slot: draw(st.binary(max_size=40)) for slot in layout.objects}
    return Snapshot(layout, objects, inline, chunks, draw(st.sampled_from([b"\x80", b"\x81\0\1"])))


@st.composite
def successors(draw: st.DrawFn, old: Snapshot) -> Snapshot:
    """The same state with some chunks, inline bytes and objects changed, others left alone."""
    chunks = dict(old.chunks)
    for extent, ids in old.chunks.items():
        rows = draw(st.lists(st.integers(0, len(ids) - 1), max_size=12))
        if rows or draw(st.booleans()):
            chunks[extent] = ids.copy()
            chunks[extent][rows, draw(st.integers(0, 31))] ^= draw(st.integers(0, 255))
    inline = {k: v if draw(st.booleans()) else bytes(len(v)) for k, v in old.inline.items()}
    objects = {k: v if draw(st.booleans()) else b"\xc0" for k, v in old.objects.items()}
    return Snapshot(old.layout, objects, inline, chunks, old.environment)


def same(a: Snapshot, b: Snapshot) -> bool:
    return (
        (a.layout, a.objects, a.inline, a.environment)
        == (b.layout, b.objects, b.inline, b.environment)
        and a.chunks.keys() == b.chunks.keys()
        and all(np.array_equal(a.chunks[k], b.chunks[k]) for k in a.chunks)
    )  # fmt: skip


def stored(manifest: Any, base: Snapshot | None = None) -> Snapshot:
    data = mi.encode(manifest)
    return mi.resolve(mi.decode(data), base, digest=mi.digest_of(data))


@SETTINGS
@given(st.data(), layouts(), st.sets(PACK))
def test_bases_and_deltas_give_back_what_they_were_made_of(
    data: st.DataObject, layout: Layout, packs: set[str]
) -> None:
    """Whatever the state, a step resolves to exactly itself, however many steps after its base."""
    base = stored(mi.to_base(content := data.draw(contents(layout)), packs))
    assert same(base, content)
    assert base.packs == tuple(sorted(packs))
    assert base.root == root(content)
    current = base
    for _ in range(data.draw(st.integers(1, 4))):
        current = data.draw(successors(current))
        more = packs | data.draw(st.sets(PACK))
        delta = mi.to_delta(base.digest or b"", base, current, more)
        if delta is None:
            continue
        back = stored(delta, base)
        assert same(back, current)
        assert back.root == root(current) == root(stored(mi.to_base(current, more)))
        assert back.packs == tuple(sorted(more))
        assert (root(current) == base.root) == same(current, base)
        listed = sum(len(p) // 4 for p, _ in delta.patches.values())
        listed += sum(len(ids) // 32 for ids in delta.chunks.values() if ids)
        differing = sum(
            int((current.chunks[e] != base.chunks[e]).any(axis=1).sum()) for e in base.chunks
        )
        assert differing <= listed <= 2 * differing


@SETTINGS
@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_a_typed_error(junk: bytes) -> None:
    """No sequence of bytes may crash or surprise a reader."""
    for data in (junk, mi.MANIFEST_MAGIC + b"\1" + junk, mi.COMMIT_MAGIC + b"\1" + junk):
        with contextlib.suppress(CorruptionError, UnsupportedFormatError):
            mi.resolve(mi.decode(data))
        with contextlib.suppress(CorruptionError, UnsupportedFormatError):
            mi.decode_commit(data + blake3(data).digest())


@SETTINGS
@given(st.data(), layouts())
def test_a_tampered_manifest_is_refused_or_means_the_same(
    data: st.DataObject, layout: Layout
) -> None:
    """Even when the file's own digest were forged, the root proves what a restore depends on."""
    content = data.draw(contents(layout))
    good = mi.encode(mi.to_base(content, ["0" * 16 + "-00000001"]))
    for _ in range(20):
        broken = bytearray(good)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(8, len(broken) - 1))
            broken[at] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del broken[data.draw(st.integers(8, len(broken) - 1)) :]
        try:
            found = mi.resolve(mi.decode(bytes(broken)))
        except (CorruptionError, UnsupportedFormatError):
            continue
        if found.root == root(content):
            assert found.layout.paths == layout.paths
            assert found.layout.structure == layout.structure
            assert found.objects == content.objects
            for view, other in zip(found.layout.tensors, layout.tensors, strict=True):
                assert msgspec.structs.replace(view, device="", extent=0) == (
                    msgspec.structs.replace(other, device="", extent=0)
                )
                ids, expected = (
                    s.chunks.get(v.extent) for s, v in ((found, view), (content, other))
                )
                assert (ids is None) == (expected is None)
                assert ids is None or np.array_equal(ids, expected)


@SETTINGS
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=40))
def test_ancestors_are_the_ancestors(moves: list[tuple[bool, int]]) -> None:
    """The recorded ranges name exactly the commits on the way back, through any going back."""
    commits: list[Commit] = []
    for back, choice in moves:
        parent = commits[choice % len(commits) if back else -1] if commits else None
        commits.append(
            Commit(
                run="main", number=len(commits) + 1, step=0, parent=None, manifest=bytes(32),
                base=None, root=bytes(32), closure=bytes(32), writer="", nonce=b"", generation=0,
                created=0.0, versions={}, ancestors=ancestors_after(parent, "main"),
            )
        )  # fmt: skip
        chain = set() if parent is None else {parent.number, *_numbers(parent)}
        assert _numbers(commits[-1]) == chain
        assert mi.decode_commit(mi.encode_commit(commits[-1])).ancestors == commits[-1].ancestors


def _numbers(commit: Commit) -> set[int]:
    return {n for first, last in commit.ancestors for n in range(first, last + 1)}
