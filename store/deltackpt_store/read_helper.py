"""A process that helps a large read: it reads and decodes chunks into shared memory, proved.

It writes nothing but that memory and its answers, and may be killed at any moment.
"""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import closing

import msgspec

from deltackpt_store.errors import DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.frames import FrameChannel, frame
from deltackpt_store.pack_set import PackSet
from deltackpt_store.read_crew import AREA_BYTES, AREAS, DONE, FAILED, READY, Job, Start
from deltackpt_store.reader import ChunkReader

_IDLE_SECONDS = 60.0
"""Whoever asks for nothing for so long has forgotten it."""


def serve(control_fd: int, memory_fd: int) -> None:
    """Do jobs until the other side is gone."""
    memory = memoryview(mmap.mmap(memory_fd, AREAS * AREA_BYTES))
    areas = [memory[i * AREA_BYTES : (i + 1) * AREA_BYTES] for i in range(AREAS)]
    with closing(FrameChannel(socket.socket(fileno=control_fd))) as channel:
        try:
            start = msgspec.msgpack.decode(channel.receive() or b"", type=Start)
            packs = PackSet(FileIO(), os.fsdecode(start.root), start.uuid)
            packs.load(start.hints)
            channel.send(frame(READY))
            reader = ChunkReader(packs, start.hints)
            while channel.ready(_IDLE_SECONDS) and (data := channel.receive()) is not None:
                job = msgspec.msgpack.decode(data, type=Job)
                channel.send(frame(_do(reader, job, areas[0])))
                areas.append(areas.pop(0))
        except (OSError, DeltackptError, msgspec.DecodeError):
            return  # the other side sees it, and does without


def _do(reader: ChunkReader, job: Job, area: memoryview) -> bytes:
    requests: list[tuple[bytes, memoryview]] = []
    at = 0
    for chunk_id, length in job:
        requests.append((chunk_id, area[at : at + length]))
        at += length
    try:
        reader.read(requests, threads=1)
    except (DeltackptError, OSError, MemoryError):
        return FAILED
    return DONE
