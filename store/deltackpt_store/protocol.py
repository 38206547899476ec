"""Messages between the trainer and its writer, and how they travel.

A message is a msgpack map tagged with its type (msgspec tagged union), preceded by its length as
a little-endian u32, over a Unix stream socket. Both sides run the same version of this package,
so the protocol has one number and no negotiation: a mismatch (the package was upgraded under a
running trainer) is refused at `Hello`.

Change hashes are exactly ``xxhash.xxh3_128_digest(bytes, seed=hello.seed)`` (16 bytes, big-endian
canonical form). The records of a slot are a packed array of :data:`RECORD`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from deltackpt_store.errors import InvalidInputError, WriterError, to_wire
from deltackpt_store.frames import MAX_FRAME, FrameChannel, frame
from deltackpt_store.manifest import Commit, Layout
from deltackpt_store.retention import Keep

PROTOCOL = 1

RECORD = np.dtype(
    [
        ("extent", "<u4"),
        ("chunk", "<u4"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("hash", "u1", (16,)),
    ]
)
"""One staged chunk of a slot, 32 bytes. `offset` and `length` are bytes within the slot."""


class WriterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the writer works; all fields have defaults that suit an ordinary run.

    `lock_timeout` (seconds) bounds the wait for an earlier writer of the same run that is still
    finishing; `nice` is added to the writer process's niceness; `shadow` keeps the chunks that
    later ones are coded against in memory, up to the size of the state, instead of reading them
    from the store, and as much again to predict Adam states (`Begin.adam`) from step to step;
    `create` makes the store when the path does not exist; `expect` is the uuid
    (hex) of the store that must lie there, "" for any; `versions` (of packages)
    are recorded in every commit; `keep` is applied to the run after each commit.
    """

    codec: str = "auto"
    pack_bytes: int = 64 * 1024 * 1024
    lock_timeout: float = 60.0
    nice: int = 0
    shadow: bool = False
    create: bool = True
    expect: str = ""
    versions: dict[str, str] = {}
    keep: Keep | None = None


# trainer -> writer -----------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message. `store` is the absolute path as ``os.fsencode`` gives it; `seed` is that of
    the change hashes and never stored."""

    protocol: int
    store: bytes
    run: str
    seed: int
    slots: int
    slot_bytes: int
    options: WriterOptions


class AdamTensors(msgspec.Struct, frozen=True, array_like=True):
    """Extents of one parameter under Adam or AdamW, and the numbers of its last step.

    `first` (exp_avg), `second` (exp_avg_sq), `weight` (the float32 weight that the step changes)
    and `largest` (max_exp_avg_sq) have the same length and order of elements; -1: there is none.
    `decoupled`: weight decay as AdamW has it. A hint: whatever is wrong costs bytes, not rightness.
    """

    first: int
    second: int
    weight: int
    largest: int
    step: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A save starts. Chunks it does not stage are as in the save or commit it is relative to.

    `layout` None means that of the last `Begin` which carried one. At most one of `relative` (a
    save of this session) and `relative_commit` (run, number) is given. `parent` is the commit
    that training was restored from, as it was read then, in the first save after a restore. `adam`
    tells of optimizer states, to predict them by.
    """

    save: int
    step: int
    relative: int | None = None
    relative_commit: tuple[str, int] | None = None
    layout: bytes | None = None
    parent: Commit | None = None
    overwrite: bool = False
    adam: list[AdamTensors] = []


class Slot(msgspec.Struct, frozen=True, tag="slot"):
    """A filled slot, leased to the writer until `Released` names it."""

    save: int
    slot: int
    records: bytes


class NeedSlots(msgspec.Struct, frozen=True, tag="need-slots"):
    """The trainer waits for a slot: make what is held durable and release it, now."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Everything of a save has been handed over; from here on it survives the trainer's death."""

    save: int
    objects: dict[int, bytes]
    inline: dict[int, bytes]
    environment: bytes
    metrics: dict[str, float]
    counters: dict[str, float]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The trainer gives a begun save up."""

    save: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """No more saves: finish what was handed over, then end."""


# writer -> trainer -----------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The store is open and the run is held by process `pid`. `writer`: what its commits call the
    one who made them."""

    store_uuid: str
    pid: int
    writer: str = ""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The store or run cannot be used; the writer ends. `error` is ``errors.to_wire``."""

    error: dict[str, Any]


class Released(msgspec.Struct, frozen=True, tag="released"):
    """These slots belong to the trainer again: every blob in them is durable or given up."""

    slots: list[int]


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A save became a durable commit.

    `stats` holds what the commit records: bytes (state, changed, staged, written), chunk counts,
    seconds per phase and the trainer's own counters.
    """

    save: int
    run: str
    number: int
    step: int
    digest: bytes
    manifest: bytes
    root: bytes
    base: bool
    stats: dict[str, float]


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """After the commit of `step`, retention took the `removed` steps of the run off the list."""

    step: int
    removed: list[int]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A save failed and left no commit. `error` is ``errors.to_wire``."""

    save: int
    error: dict[str, Any]


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """A log record of the writer process, to appear in the trainer's log."""

    level: int
    text: str


ToWriter = Hello | Begin | Slot | NeedSlots | Finish | Abort | Close
ToTrainer = Ready | Refused | Released | Committed | Retired | Failed | Notice

_to_writer = msgspec.msgpack.Decoder(ToWriter)
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)
_record = struct.Struct("<IIII16s")


class Channel(FrameChannel):
    """Messages over one connected stream socket; owns the socket."""

    def receive_as_writer(self) -> ToWriter | None:
        """The next message of the trainer; None at the end of the stream."""
        frame = self.receive()
        return None if frame is None else _decode(_to_writer, frame)

    def receive_as_trainer(self) -> ToTrainer | None:
        """The next message of the writer; None at the end of the stream."""
        frame = self.receive()
        return None if frame is None else _decode(_to_trainer, frame)


def encode(message: ToWriter | ToTrainer) -> bytes:
    """The frame of a message. Raises `InvalidInputError` for what cannot travel."""
    try:
        data = msgspec.msgpack.encode(message)
    except (UnicodeError, OverflowError, TypeError) as error:
        raise InvalidInputError(
            f"a {type(message).__name__} message holds what cannot be encoded: {error}"
        ) from error
    if len(data) > MAX_FRAME:
        raise InvalidInputError(
            f"a {type(message).__name__} message of {len(data)} bytes is larger than the limit of"
            f" {MAX_FRAME}",
            hint="keep large data in tensors, not in plain Python values",
        )
    return frame(data)


def wire_error(error: BaseException) -> dict[str, Any]:
    """``errors.to_wire``, for a message: paths that are not UTF-8 are shown with escapes."""

    def shown(value: Any) -> Any:
        return printable(value) if isinstance(value, str) else value

    data = {key: shown(value) for key, value in to_wire(error).items()}
    data["context"] = {key: shown(value) for key, value in data["context"].items()}
    return data


def printable(text: str) -> str:
    """`text` with surrogates (bytes of a path that are not UTF-8) replaced by escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def unpack_records(data: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    """(extent, chunk, offset, length, hash) of each record; `WriterError` for a ragged length."""
    if len(data) % _record.size:
        raise WriterError(f"slot records of {len(data)} bytes", kind="protocol")
    return _record.iter_unpack(data)


ExtentKey = tuple[str, int, str, int, str]


def extent_keys(layout: Layout) -> list[ExtentKey]:
    """What makes an extent of two layouts the same one, for saves relative to an earlier save.

    (path of the first tensor that views it, bytes, dtype, chunk bytes, device). The trainer's
    change tables and the writer's chunk tables are both keyed by this.
    """
    first = {tensor.extent: tensor for tensor in reversed(layout.tensors)}
    keys: list[ExtentKey] = []
    for index, spec in enumerate(layout.extents):
        tensor = first.get(index)
        path = f"#{index}" if tensor is None else layout.paths[tensor.slot]
        device = "" if tensor is None else tensor.device
        keys.append((path, spec.nbytes, spec.dtype, spec.chunk_bytes, device))
    return keys


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytearray) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WriterError(
            f"undecodable message on the control channel: {error}", kind="protocol"
        ) from error
