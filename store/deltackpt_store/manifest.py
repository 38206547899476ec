"""What one step consists of: the typed manifest, its encoding and its Merkle root.

Vocabulary. A *leaf* is one slot of the state tree: either a tensor or a plain Python value.
An *extent* is a run of raw bytes that one or more tensors view (tied weights and overlapping
views share one extent); it is cut into fixed-size *chunks* (the last may be shorter), or, when it
has at most `INLINE_BYTES` bytes, travels inside the manifest. A *base* manifest names every chunk
itself; a *delta* manifest names its base by digest and lists, cumulatively, only what differs.

The `structure` is a msgpack document of nodes: an integer is a leaf slot, a list is
``[tag, ...]`` as described in docs/format.md. Object leaves are msgpack value documents
(see `values`). Nothing here is pickle, and every size is checked before memory is allocated.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltackpt_store.errors import UnsupportedFormatError

ID_BYTES = 32
INLINE_BYTES = 512
MAX_CHUNK_BYTES = 64 * 1024 * 1024

Ids = NDArray[np.uint8]  # shape (chunks, 32)

_BITS = re.compile(r"[a-z]+?([0-9]{1,3})(?![0-9])[a-z0-9_]*\Z")


def element_bytes(dtype: str) -> int:
    """Bytes of one element of the dtype called `dtype` (``float32``, ``float8_e4m3fn``, ...).

    Read from the name (its first number is the width in bits, less than a byte counts as one), so
    that a dtype newer than this package needs no table entry. UnsupportedFormatError for a name
    without a width.
    """
    if dtype == "bool":
        return 1
    match = _BITS.match(dtype)
    bits = int(match[1]) if match else 0
    if not 1 <= bits <= 256:
        raise UnsupportedFormatError(
            f"dtype {dtype[:80]!r} is unknown", kind="dtype", hint="upgrade deltackpt"
        )
    return -(-bits // 8)


class TensorView(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one tensor leaf looks at its extent. Strides are in elements, the offset in bytes."""

    slot: int
    extent: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False
    parameter: bool = False
    requires_grad: bool = False
    device: str = "cpu"
    global_shape: tuple[int, ...] | None = None
    shard_offsets: tuple[int, ...] | None = None


class ExtentSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Size and cutting of one extent. `dtype` (of its first viewer) guides codecs only."""

    nbytes: int
    chunk_bytes: int
    dtype: str

    @property
    def inline(self) -> bool:
        """Whether its bytes are in the manifest itself: at most `INLINE_BYTES`."""
        return self.nbytes <= INLINE_BYTES

    @property
    def chunk_count(self) -> int:
        """Number of its chunks; 0 when inline."""
        return 0 if self.inline else -(-self.nbytes // self.chunk_bytes)

    def chunk_length(self, index: int) -> int:
        """Bytes of chunk `index`."""
        return min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)


class Layout(msgspec.Struct, frozen=True):
    """Everything about a state but its values: equal for all steps of an ordinary run.

    `structure` is the msgpack tree; `paths[slot]` the display path of each leaf
    (``model/layers.0.weight``, see docs/format.md for escaping); `objects` the slots that are
    plain values.
    """

    structure: bytes
    paths: tuple[str, ...]
    tensors: tuple[TensorView, ...]
    extents: tuple[ExtentSpec, ...]
    objects: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One manifest file. Fields that a delta leaves out are as in its base.

    `salt` is there when the same manifest without it was about to be deleted: it means nothing.
    """

    root: bytes
    packs: tuple[str, ...]
    base: bytes | None = None
    layout: Layout | None = None
    environment: bytes | None = None
    objects: dict[int, bytes] = {}
    inline: dict[int, bytes] = {}
    chunks: dict[int, bytes] = {}
    patches: dict[int, tuple[bytes, bytes]] = {}
    salt: bytes = b""


class Snapshot:
    """The whole content of one step, resolved: layout plus the value of every leaf and extent.

    `objects`: slot -> value document. `inline`: extent -> raw bytes. `chunks`: extent -> ids, an
    array of shape (chunk_count, 32). Arrays are never written in place once a snapshot holds them,
    so an array that two snapshots share is known to be equal.

    Of a snapshot read from a store, `packs` are all packs that restoring it may need (its
    closure), `root` is its identity (see `merkle`), `digest` that of its manifest and `base` that
    of its base manifest (None for a base); a snapshot made by hand has none of them.
    """

    def __init__(
        self,
        layout: Layout,
        objects: dict[int, bytes],
        inline: dict[int, bytes],
        chunks: dict[int, Ids],
        environment: bytes = b"\x80",
        *,
        packs: tuple[str, ...] = (),
        root: bytes | None = None,
        digest: bytes | None = None,
        base: bytes | None = None,
    ) -> None:
        self.layout = layout
        self.objects = objects
        self.inline = inline
        self.chunks = chunks
        self.environment = environment
        self.packs = packs
        self.root = root
        self.digest = digest
        self.base = base


class Commit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The numbered record that makes a step exist.

    `parent` is (run, number, commit digest) of the step this one continues from, which may lie in
    another run. Order within a run is `number`, never `created` (Unix seconds, information only).
    `closure` is the BLAKE3-256 of the newline-joined sorted pack names the manifest depends on.
    `ancestors` are the numbers of this run that this commit continues, as inclusive ranges in
    ascending order: they tell the lineage even when retention has removed commits in between.
    """

    run: str
    number: int
    step: int
    parent: tuple[str, int, bytes] | None
    manifest: bytes
    base: bytes | None
    root: bytes
    closure: bytes
    writer: str
    nonce: bytes
    generation: int
    created: float
    versions: dict[str, str]
    metrics: dict[str, float] = {}
    stats: dict[str, float] = {}
    ancestors: tuple[tuple[int, int], ...] = ()
    digest: bytes = b""
