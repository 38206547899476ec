"""Processes that help with a large read: the same bytes, whatever becomes of them.

They do here all that they can before this process begins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store import CorruptionError, Store, child, codecs, read_crew, read_run
from deltackpt_store.pack import Location, pack_name, pack_path, read_footer
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.read_crew import AREA_BYTES, Helper

WRITER = "00112233445566aa"
RNG = np.random.default_rng(3)
SMALL = [RNG.standard_normal(size, np.float32).tobytes() for size in (1, 300, 2000, 65536, 70001)]
CHUNKS = SMALL + [RNG.standard_normal(65536, np.float32).tobytes() for _ in range(80)]
LARGE = np.arange(AREA_BYTES // 4 + 1000, dtype=np.float32).tobytes()


def id_of(chunk: bytes) -> bytes:
    return blake3(chunk).digest()


class Crew:
    """What was seen of the helpers."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.copied: list[bytes] = []
        self.led = threading.Event()

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """One helper, whatever there is to read, which is led to its end before anything else."""
    seen = Crew()
    start, lead, loop, copy = read_crew._start, Helper.lead, read_run.Run._loop, read_crew._copy

    def noted_start(*arguments: Any) -> Any:
        seen.processes.append(start(*arguments))
        return seen.processes[-1]

    def noted_lead(helper: Helper, *arguments: Any) -> None:
        try:
            lead(helper, *arguments)
        finally:
            seen.led.set()

    def late_loop(run: Any) -> None:
        if seen.processes:
            assert seen.led.wait(60)
        loop(run)

    def noted_copy(area: memoryview, requests: Any) -> None:
        seen.copied += [chunk_id for chunk_id, _ in requests]
        copy(area, requests)

    monkeypatch.setattr(read_crew, "CREW_BYTES", 1)
    monkeypatch.setattr(read_crew, "usable_cores", lambda: 2)
    monkeypatch.setattr(read_crew, "_start", noted_start)
    monkeypatch.setattr(read_crew, "_copy", noted_copy)
    monkeypatch.setattr(Helper, "lead", noted_lead)
    monkeypatch.setattr(read_run.Run, "_loop", late_loop)
    yield seen
    assert seen.ended()
    assert not [t for t in threading.enumerate() if t.name == "deltackpt-read"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """All chunks, most of them coded, in two packs."""
    store = Store.create(tmp_path / "s")
    for number, chunks in enumerate((CHUNKS[::2], [*CHUNKS[1::2], LARGE])):
        path = pack_path(store.path, pack_name(WRITER, number))
        writer = PackWriter(store.io, path, store.uuid, WRITER, number)
        for chunk in chunks:
            encoded = codecs.choose(memoryview(chunk), "float32")
            writer.append(id_of(chunk), len(chunk), encoded)
        writer.finish()
    return Store.open(tmp_path / "s")


def read(store: Store, chunks: list[bytes], **options: Any) -> list[memoryview]:
    dests = [memoryview(bytearray(len(chunk))) for chunk in chunks]
    store.reader().read([*zip(map(id_of, chunks), dests, strict=True)], **options)
    return dests


def test_helpers_read_all_that_goes_into_their_memory(store: Store, crew: Crew) -> None:
    assert read(store, [*CHUNKS, LARGE]) == [*CHUNKS, LARGE]
    assert sorted(crew.copied) == sorted(map(id_of, CHUNKS))
    assert len(crew.processes) == 1


def test_none_where_threads_are_asked_for(store: Store, crew: Crew) -> None:
    assert read(store, CHUNKS, threads=2) == CHUNKS
    assert not crew.processes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("answers", [0, 1, 2])
def test_one_that_dies_or_hangs(
    store: Store, crew: Crew, monkeypatch: pytest.MonkeyPatch, number: int, answers: int
) -> None:
    """Before it has started, in its first job, and after that."""
    answer = Helper._answer
    left = [answers]

    def without(helper: Helper) -> bytes:
        if not left[0]:
            os.kill(crew.processes[0].pid, number)
            if number == signal.SIGSTOP:
                os.waitid(os.P_PID, crew.processes[0].pid, os.WSTOPPED | os.WNOWAIT)
                helper._channel.ready(0.1)  # what it said before
                monkeypatch.setattr(read_crew, "PATIENCE_SECONDS", 0.0)
        left[0] -= 1
        return answer(helper)

    monkeypatch.setattr(Helper, "_answer", without)
    assert read(store, CHUNKS) == CHUNKS
    if answers < 2:  # after its second answer it may have done everything on a busy machine
        assert len(crew.copied) < len(CHUNKS)


@pytest.mark.parametrize(
    "command", [["/nowhere/python"], [sys.executable, "-c", "raise SystemExit(1)"]]
)
def test_one_that_does_not_start(
    store: Store, crew: Crew, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(child, "command", lambda *options: command)
    assert read(store, CHUNKS) == CHUNKS
    assert not crew.copied


@pytest.mark.parametrize("threads", [None, 3])
def test_threads_that_cannot_be_had_are_done_without(
    store: Store, crew: Crew, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    def start(thread: threading.Thread) -> None:
        crew.led.set()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert read(store, CHUNKS, threads=threads) == CHUNKS
    assert not crew.copied


def test_damage_is_found_as_without_them(store: Store, crew: Crew) -> None:
    hit = CHUNKS[20]
    for number in range(2):
        path = Path(pack_path(store.path, pack_name(WRITER, number)))
        places = dict(read_footer(store.io, str(path)).entries.items(path.stem))
        place = places.get(id_of(hit))
        if isinstance(place, Location):
            data = bytearray(path.read_bytes())
            data[place.payload + 5] ^= 1
            path.write_bytes(data)
    with pytest.raises(CorruptionError) as found:
        read(store, CHUNKS)
    assert found.value.context["ids"] == (id_of(hit),)
    assert len(crew.processes) == 1


def test_none_is_left_after_an_interrupt(
    store: Store, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(read_run.Run, "_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(store, CHUNKS)
    assert len(crew.processes) == 1
