"""Merkle roots: equal exactly when two steps are bit-identical."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store import ExtentSpec, Layout, Snapshot, TensorView, merkle
from deltackpt_store.merkle import root, tensor_digest

CHUNK = 1024


def make(**change: object) -> Snapshot:
    """Two tensors in one chunked extent, one inline tensor, one object; `change` replaces parts."""
    views = [
        TensorView(0, 0, "float32", (32, 16), (16, 1), 0, parameter=True, requires_grad=True),
        TensorView(1, 0, "float32", (16,), (1,), 64),
        TensorView(2, 1, "int64", (), (), 0),
    ]
    for name, value in change.items():
        if name.startswith("view_"):
            views[0] = msgspec.structs.replace(views[0], **{name[5:]: value})
    layout = Layout(
        structure=change.get("structure", msgspec.msgpack.encode(["l", 0, 1, 2, 3])),
        paths=change.get("paths", ("m/a", "m/b", "step", "m/lr")),
        tensors=tuple(views),
        extents=(
            ExtentSpec(2048, change.get("chunk", CHUNK), "float32"),
            ExtentSpec(8, CHUNK, "int64"),
        ),
        objects=(3,),
    )
    count = layout.extents[0].chunk_count
    ids = np.arange(count * 32, dtype=np.uint8).reshape(count, 32)
    ids[0, 0] = change.get("id", 0)
    return Snapshot(
        layout,
        {3: change.get("object", b"\x07")},
        {1: change.get("inline", b"\x01" + bytes(7))},
        {0: ids},
        change.get("environment", b"\x80"),
        packs=change.get("packs", ()),
    )


def independent_root(snapshot: Snapshot) -> bytes:
    """The root as docs/format.md describes it, written down a second time."""
    layout, leaves, numbers = snapshot.layout, b"", {}
    for slot, path in enumerate(layout.paths):
        name = path.encode()
        leaves += len(name).to_bytes(4, "little") + name
        view = next((v for v in layout.tensors if v.slot == slot), None)
        if view is None:
            document = b"deltackpt object 1\n" + snapshot.objects[slot]
            leaves += b"\0" + bytes(4) + blake3(document).digest()
            continue
        extent = layout.extents[view.extent]
        number = numbers.setdefault(view.extent, len(numbers))

        def text(values: tuple[int, ...] | None) -> str:
            return "-" if values is None else ",".join(str(v) for v in values)

        flags = 0
        for bit, flag in enumerate((view.conj, view.neg, view.parameter, view.requires_grad)):
            flags += 2**bit if flag else 0
        header = (
            f"deltackpt tensor 1\n{view.dtype} shape={text(view.shape)} stride={text(view.stride)}"
            f" offset={view.offset} flags={flags} global={text(view.global_shape)}"
            f" shard={text(view.shard_offsets)} bytes={extent.nbytes} chunk={extent.chunk_bytes}\n"
        )
        content = (
            snapshot.inline[view.extent]
            if extent.nbytes <= 512
            else snapshot.chunks[view.extent].tobytes()
        )
        leaves += b"\1" + number.to_bytes(4, "little")
        leaves += blake3(header.encode() + content).digest()
    whole = b"deltackpt root 1\n" + struct.pack("<Q", len(layout.structure)) + layout.structure
    return blake3(whole + struct.pack("<Q", len(layout.paths)) + leaves).digest()


def test_root_is_what_the_format_says() -> None:
    """A root that only this code can compute could not prove a store to anybody else."""
    assert root(make()) == independent_root(make())
    tied = make()
    assert root(tied) == root(make())


@pytest.mark.parametrize(
    "change",
    [
        {"id": 1},
        {"inline": bytes(8)},
        {"object": b"\x08"},
        {"structure": msgspec.msgpack.encode(["t", 0, 1, 2, 3])},
        {"paths": ("m/a", "m/c", "step", "m/lr")},
        {"chunk": 512},
        {"view_dtype": "int32"},
        {"view_shape": (16, 32), "view_stride": (32, 1)},
        {"view_stride": (1, 32)},
        {"view_offset": 4, "view_shape": (31, 16)},
        {"view_conj": True},
        {"view_neg": True},
        {"view_parameter": False},
        {"view_requires_grad": False},
        {"view_global_shape": (64, 16), "view_shard_offsets": (32, 0)},
        {"view_global_shape": (64, 16), "view_shard_offsets": (0, 0)},
    ],
    ids=str,
)
def test_whatever_makes_a_state_another_changes_the_root(change: dict[str, object]) -> None:
    """Two states that differ must never be taken for each other."""
    changed = make(**change)
    assert root(changed) != root(make())
    assert root(changed) == independent_root(changed)


@pytest.mark.parametrize(
    "change",
    [
        {"view_device": "cuda:1"},
        {"environment": b"\x81\x01\x02"},
        {"packs": ("0" * 16 + "-00000001",)},
    ],
    ids=str,
)
def test_circumstances_do_not_change_the_root(change: dict[str, object]) -> None:
    """The same state saved on another device or machine is the same state."""
    assert root(make(**change)) == root(make())


def test_sharing_is_part_of_identity() -> None:
    """Tied weights that come back as two copies would train apart without anybody noticing."""
    ids = np.arange(64, dtype=np.uint8).reshape(2, 32)

    def build(extents: tuple[int, int], numbers: int) -> Snapshot:
        views = tuple(TensorView(i, e, "uint8", (2048,), (1,), 0) for i, e in enumerate(extents))
        specs = tuple(ExtentSpec(2048, CHUNK, "uint8") for _ in range(numbers))
        layout = Layout(b"\x90", ("a", "b"), views, specs, ())
        return Snapshot(layout, {}, {}, dict.fromkeys(range(numbers), ids))

    tied, apart = build((0, 0), 1), build((0, 1), 2)
    assert tensor_digest(tied, 0) == tensor_digest(apart, 1)
    assert root(tied) != root(apart)
    # Which numbers the extents have is nobody's business.
    assert root(build((1, 0), 2)) == root(apart)


def test_subtree_root_does_not_depend_on_its_place() -> None:
    """A replica under another key is recognised as the same."""
    here, there = make(), make(paths=("x/y/a", "x/y/b", "step", "x/y/lr"))
    assert root(here, "m") == root(there, "x/y")
    assert root(here, "m") != root(here, "m/a")
    assert root(here, "m") != root(make(id=9), "m")
    assert root(here, "step") == root(make(id=9), "step")
    with pytest.raises(KeyError):
        root(here, "nothing")
    with pytest.raises(KeyError):
        root(here, "ste")


def test_arrays_that_may_be_written_are_hashed_again() -> None:
    """A digest remembered for an array that changed commits a step that never verifies."""
    snapshot = make()
    before = root(snapshot)
    snapshot.chunks[0][1, 5] ^= 1
    assert root(snapshot) == independent_root(snapshot) != before
    snapshot.chunks[0].flags.writeable = False
    assert root(snapshot) == root(snapshot) == independent_root(snapshot)
    snapshot.chunks[0] = snapshot.chunks[0].copy()
    snapshot.chunks[0][0, 0] ^= 1
    assert root(snapshot) == independent_root(snapshot)


def test_small_parts_that_are_as_before_are_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each save the trainer sends all small tensors and plain values, as new objects."""
    hashed: list[bytes] = []

    def counting(data: bytes) -> blake3:
        hashed.append(data)
        return blake3(data)

    before = make(object=b"\xa5hello")
    before.chunks[0].flags.writeable = False
    again = make(inline=b"\x02" + bytes(7))
    again.layout, again.chunks[0] = before.layout, before.chunks[0]
    root(before)
    monkeypatch.setattr(merkle, "blake3", counting)
    again.objects[3] = bytes(bytearray(before.objects[3]))
    assert root(again) == independent_root(again)
    assert [data.split(b"\n")[0] for data in hashed] == [
        b"deltackpt root 1",
        b"deltackpt tensor 1",
    ]


def test_a_tensor_has_a_digest_of_its_own_and_a_plain_value_has_none() -> None:
    snapshot = make()
    assert len({tensor_digest(snapshot, slot) for slot in range(3)}) == 3
    with pytest.raises(IndexError):
        tensor_digest(snapshot, 3)
