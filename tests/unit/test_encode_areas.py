"""What helpers have encoded is lent by them, not copied: until when it stays as it is, and that the
memory comes back to them whatever becomes of a batch."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import mmap
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from deltackpt_store import encode_crew
from deltackpt_store.coding_policy import RAW_PLAN, Plan
from deltackpt_store.confirm import Confirmer
from deltackpt_store.encode_crew import Crew
from deltackpt_store.encode_helper import Helper
from deltackpt_store.encode_tasks import Coding, EncodeTask
from deltackpt_store.fileio import Buffer, FileIO
from deltackpt_store.index import MemoryIndex
from deltackpt_store.references import References
from deltackpt_store.ring import Ring

CHUNK, CHUNKS = 8192, 32
PLAN = Plan((1,), 4, "zstd", (0,), 0.9)  # planes


@pytest.fixture
def ring() -> Iterator[Ring]:
    draw = random.Random(3)
    with Ring.create(CHUNKS * CHUNK, CHUNKS * CHUNK) as ring:
        for at in range(0, CHUNKS * CHUNK, CHUNK):
            values = [draw.uniform(1.0, 1.5) for _ in range(CHUNK // 4)]
            ring.put(0, at, memoryview(struct.pack(f"<{len(values)}f", *values)))
        yield ring


@pytest.fixture
def crew(ring: Ring) -> Iterator[Crew]:
    """Two helpers, as threads of this process."""
    crew = Crew()
    crew._ring_at = encode_crew._address(ring.view(0))
    crew._ring_bytes = ring.slots * ring.slot_bytes
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []
    for _ in range(2):
        arena = memoryview(mmap.mmap(-1, encode_crew._AREAS * ring.slot_bytes))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets += ours, theirs
        helper = Helper(theirs, ring, arena, ring.slot_bytes)
        threads.append(threading.Thread(target=helper.serve))
        threads[-1].start()
        crew._helpers.append(encode_crew._Helper(0, ours, arena, ring.slot_bytes))
    yield crew
    for helper in crew._helpers:
        helper.sock.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for one in sockets:
        one.close()


def tasks_of(ring: Ring) -> list[EncodeTask]:
    references = References(Confirmer(FileIO(), "/nowhere", MemoryIndex()))
    view = ring.view(0)
    return [
        EncodeTask(view[at : at + CHUNK], PLAN, None, references, partial(lambda: RAW_PLAN))
        for at in range(0, CHUNKS * CHUNK, CHUNK)
    ]


def payload(coding: Coding) -> bytes:
    return b"".join(coding.outcome.best.payload)


def within(lent: Buffer, area: memoryview) -> bool:
    at = encode_crew._address(memoryview(lent)) - encode_crew._address(area)
    return 0 <= at < len(area)


def test_what_is_lent_stays_until_the_next_is_asked_for(ring: Ring, crew: Crew) -> None:
    tasks = tasks_of(ring)
    expected = [payload(task.here()) for task in tasks]
    assert all(len(found) < CHUNK for found in expected)
    helped = 0
    arenas = [area.memory for helper in crew._helpers for area in helper.areas]
    for _ in range(10):
        results = crew.results(crew.start(tasks, alone=False))
        for coding, right in zip(results, expected, strict=True):
            lent = coding.outcome.best.payload[0]
            helped += any(within(lent, arena) for arena in arenas)
            for helper in crew._helpers:
                assert not any(within(lent, area.memory) for area in helper.areas)
            assert payload(coding) == right
    assert helped


def test_helpers_stay_when_all_processes_were_stopped_meanwhile(
    ring: Ring, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a suspended job that encodes on one core for the rest of its life. Of the time for
    which it was to wait, all is over when the process that waits goes on."""

    class Stopped:
        def __init__(self) -> None:
            self._poll = real()
            self._late = False
            self.register = self._poll.register

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            late, self._late = self._late, True
            return self._poll.poll(timeout) if late else []

    real = select.poll
    monkeypatch.setattr(encode_crew.select, "poll", Stopped)
    waited: list[object] = []
    wait = Crew._wait
    monkeypatch.setattr(Crew, "_wait", lambda crew, run: (waited.append(run), wait(crew, run)))
    lost: list[str] = []
    monkeypatch.setattr(Crew, "_lose", lambda crew, helper, why: lost.append(why))
    tasks = tasks_of(ring)
    while not waited:
        assert len([*crew.results(crew.start(tasks, alone=False))]) == len(tasks)
    assert not lost


def test_areas_come_back_when_a_batch_is_given_up(ring: Ring, crew: Crew) -> None:
    """Prevents: helpers without memory, that is without work, after a few failed saves."""
    tasks = tasks_of(ring)
    for taken in range(20):
        results = crew.results(crew.start(tasks, alone=False))
        for _ in range(taken):
            next(results)
        results.close()
    assert len([*crew.results(crew.start(tasks, alone=False))]) == len(tasks)
    for helper in crew._helpers:
        assert not helper.given
        assert {area.number for area in helper.areas} == set(range(encode_crew._AREAS))
        assert len(helper.areas) == encode_crew._AREAS
