"""A helper process of the encoder: jobs in, encodings out, for as long as its writer lives.

It does what depends on nothing but the bytes: digests of chunks in the ring, encodings by a plan.
It reads references from the store itself and writes nothing but its replies, so that it may be
killed at any moment, and what it was asked for be done by the writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
from typing import Any, NamedTuple, NoReturn

import msgspec
from blake3 import blake3
from xxhash import xxh3_128_digest

from deltackpt_store import codecs, coding_policy
from deltackpt_store.coding_policy import Plan
from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.open_packs import OpenPacks
from deltackpt_store.references import Reference, read_reference
from deltackpt_store.ring import Ring

MESSAGE_BYTES = 64 * 1024
"""No message is longer: the system would cut it off, or refuse it."""

MOST_JOBS = 64
"""No message has more: a reply to one takes less than 1 KiB."""

_HEAD_BYTES = 8  # of a message, before its jobs
_MOST_REASON = 200  # characters
_IDLE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1

Piece = tuple[int, int]
"""Byte of the ring at which a chunk begins, and its length; it lies in one slot."""


class Digest(NamedTuple):
    """What identifies a chunk: its id, and its change hash."""

    id: bytes
    change: bytes


def digest(raw: memoryview, seed: int) -> Digest:
    return Digest(blake3(raw).digest(), xxh3_128_digest(raw, seed))


class Digests(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Asks for the ids of chunks and for their change hashes of this seed."""

    pieces: tuple[Piece, ...]
    seed: int


class Encode(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Asks for a chunk's encoding by `plan`. `root` is the store, `era` that of the `Confirmer`."""

    piece: Piece
    plan: Plan
    root: bytes
    era: int
    reference: Reference | None


class Digested(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The ids and change hashes of the chunks."""

    digests: tuple[Digest, ...]


class Encoding(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """An `Outcome`, its payload of `size` bytes being in the arena.

    `payload_hash` is that of what the reference was decoded from.
    """

    codec: int
    params: bytes
    refs: tuple[bytes, ...]
    size: int
    tried: tuple[tuple[int, int, int], ...]
    seconds: float
    payload_hash: int | None


class Failed(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The job could not be done here."""

    why: str


Job = Digests | Encode
Reply = Digested | Encoding | Failed

_encode = msgspec.msgpack.Encoder().encode
decode_replies = msgspec.msgpack.Decoder(list[Reply]).decode
_decode_message = msgspec.msgpack.Decoder(tuple[int, list[Job]]).decode


class Message:
    """Jobs on their way to a helper, whose payloads take no more than `area` bytes."""

    def __init__(self, area: int) -> None:
        self._jobs: list[msgspec.Raw] = []
        self._size = _HEAD_BYTES
        self._area = area

    def add(self, job: Job) -> bool:
        """Put a job in; False when there is no room for it."""
        data = _encode(job)
        payload = job.piece[1] if isinstance(job, Encode) else 0  # no encoding is larger
        full = self._size + len(data) > MESSAGE_BYTES or payload > self._area
        if full or len(self._jobs) == MOST_JOBS:
            return False
        self._jobs.append(msgspec.Raw(data))
        self._size += len(data)
        self._area -= payload
        return True

    def __len__(self) -> int:
        return len(self._jobs)

    def encoded(self, area: int) -> bytes:
        """The message, which says in which area of the arena the payloads are to be put."""
        return _encode((area, self._jobs))


def payload_bytes(reply: Reply) -> int:
    """What the reply takes of the area."""
    return reply.size if isinstance(reply, Encoding) else 0


class Helper:
    """Does the jobs that arrive at `sock`, in order, and replies to each message with one.

    The payloads of a message go to the area of `arena` that it names, one after the other. It sees
    the ring of the writer, whose chunks stay as they are until it has replied.
    """

    def __init__(self, sock: socket.socket, ring: Ring, arena: memoryview, area: int) -> None:
        self._sock = sock
        self._ring = ring
        self._areas = [arena[at : at + area] for at in range(0, len(arena), area)]
        self._packs: OpenPacks | None = None
        self._era = 0

    def serve(self) -> None:
        """Until the writer is gone."""
        while True:
            try:
                message = self._sock.recv(MESSAGE_BYTES)
            except TimeoutError:
                self._close_packs()  # deleted packs would keep their space
                continue
            if not message:
                return
            area, jobs = _decode_message(message)
            room = self._areas[area]
            replies: list[Reply] = []
            for job in jobs:
                replies.append(self._reply(job, room))
                room = room[payload_bytes(replies[-1]) :]
            self._sock.send(_encode(replies))

    def _reply(self, job: Job, room: memoryview) -> Reply:
        try:
            return self._digest(job) if isinstance(job, Digests) else self._encode(job, room)
        except (DeltackptError, OSError, ValueError, MemoryError) as error:
            why = f"{type(error).__name__}: {error}"[:_MOST_REASON]
            return Failed(why)

    def _chunk(self, piece: Piece) -> memoryview:
        slot, at = divmod(piece[0], self._ring.slot_bytes)
        return self._ring.view(slot)[at : at + piece[1]]

    def _digest(self, job: Digests) -> Digested:
        digests = tuple(digest(self._chunk(piece), job.seed) for piece in job.pieces)
        return Digested(digests)

    def _encode(self, job: Encode, room: memoryview) -> Encoding:
        raw = self._chunk(job.piece)
        chunk = payload_hash = None
        ref = b""
        if job.reference is not None:
            ref = job.reference.id
            chunk, payload_hash = read_reference(self._open_packs(job), job.reference)
        best, tried, seconds = coding_policy.encode(job.plan, raw, chunk, ref)
        size = 0
        if best.codec != codecs.RAW:
            for part in best.payload:
                room[size : size + len(part)] = part
                size += len(part)
        return Encoding(best.codec, best.params, best.refs, size, tried, seconds, payload_hash)

    def _open_packs(self, job: Encode) -> OpenPacks:
        root = os.fsdecode(job.root)
        if self._packs is None or (self._era, self._packs.root) != (job.era, root):
            self._close_packs()
            self._packs, self._era = OpenPacks(FileIO(), root), job.era
            self._sock.settimeout(_IDLE_SECONDS)
        return self._packs

    def _close_packs(self) -> None:
        if self._packs is not None:
            self._packs.close()
            self._packs = None
        self._sock.settimeout(None)


def run(sock: socket.socket, ring: Ring, arena: memoryview, area: int, writer: int) -> NoReturn:
    """Be a helper of the process `writer`, in the child of a fork; does not return."""
    try:
        _set_up(sock.fileno())
        if os.getppid() == writer:
            Helper(sock, ring, arena, area).serve()
    except BaseException:
        os._exit(1)  # the writer sees it, and nobody else is to
    os._exit(0)


def _set_up(keep: int) -> None:
    """Keep nothing of what the process has inherited but memory and the descriptor `keep`."""
    logging.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("deltackpt-help")
    with contextlib.suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also while it is stopped
