"""Helper processes of the encoder: what is stored does not depend on them, nor on what becomes of
them, and nothing of them outlives the writer.

They take part here also where cores are few: see `crewed_writer`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crewed_writer import HELPERS
from deltackpt_store import child
from deltackpt_store import writer as writer_module
from deltackpt_store.client import WriterClient
from deltackpt_store.coding_policy import RAW_PLAN
from deltackpt_store.encode_helper import Digests, Encode, Message
from deltackpt_store.pack import pack_path, read_footer
from deltackpt_store.protocol import WriterOptions
from deltackpt_store.store import Store
from dense_trainer import DenseState
from processes import ended
from toy_trainer import CHUNK, SEED, ToyTrainer, inline_at, layout_of, read_arrays

SUPPORT = Path(__file__).parents[1] / "support"
CREWED = SUPPORT / "crewed_writer.py"
ELEMENTS = 40 * CHUNK // 4 + 100
Start = Callable[..., WriterClient]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes clients with a crewed writer, closed afterwards."""
    monkeypatch.setattr(child, "WRITER", str(CREWED))
    clients: list[WriterClient] = []

    def make(store: str = "store", **options: Any) -> WriterClient:
        mode, slot_bytes = options.pop("mode", "process"), options.pop("slot_bytes", 64 * CHUNK)
        clients.append(
            WriterClient(
                tmp_path / store, "main", seed=SEED, ring_bytes=256 * CHUNK, slot_bytes=slot_bytes,
                mode=mode, options=WriterOptions(**{"lock_timeout": 60.0, **options}),
            )
        )  # fmt: skip
        clients[-1].ready(60)
        return clients[-1]

    yield make
    for client in clients:
        client.close(60)


def helpers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def used_seconds(pid: int) -> float:
    """Processor time."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


class Training:
    """A dense state saved step by step, each step restored and compared in the end."""

    def __init__(self, client: WriterClient, seed: int = 0) -> None:
        self.client = client
        self.state = DenseState(ELEMENTS, seed)
        self.trainer = ToyTrainer(client, self.state.layout())
        self.saved: dict[int, list[bytes]] = {}
        self.stats: list[dict[str, float]] = []

    def save(self) -> None:
        step = len(self.saved)
        self.saved[step] = self.state.advance()
        self.stats.append(self.trainer.save_now(step, self.saved[step]).stats)

    def check(self, path: Path) -> None:
        store = Store.open(path)
        commits = store.lineage("main")
        assert [commit.step for commit in commits] == list(self.saved)
        for commit in commits:
            assert read_arrays(store, commit)[:-1] == self.saved[commit.step][:-1]


def records(path: Path) -> list[bytes]:
    """All packs in the order in which they were written, without what names their writer."""
    store = Store.open(path)
    found: list[bytes] = []
    for name in sorted(store.packs.names(), key=lambda name: name.rpartition("-")[2]):
        file = pack_path(store.path, name)
        footer = read_footer(store.io, file)
        found += [Path(file).read_bytes()[64:-64], footer.entries.to_bytes()]
    return found


FIGURES = ("codec.", "tensors.", "written_bytes", "dedup_", "staged_", "changed_")


def figures(stats: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in stats.items() if name.startswith(FIGURES)}


@pytest.mark.parametrize("options", [{}, {"codec": "small"}, {"codec": "fast"}, {"shadow": True}])
def test_what_is_stored_does_not_depend_on_helpers(
    tmp_path: Path, start: Start, options: dict[str, Any]
) -> None:
    alone, crewed = Training(start("alone", mode="thread", **options)), Training(start(**options))
    helpers = helpers_of(crewed.client.writer_pid)
    assert len(helpers) == HELPERS
    idle = [used_seconds(pid) for pid in helpers]
    for _ in range(5):
        alone.save()
        crewed.save()
    assert all(used_seconds(pid) > before for pid, before in zip(helpers, idle, strict=True))
    assert [*map(figures, alone.stats)] == [*map(figures, crewed.stats)]
    assert "codec.delta.chunks" in crewed.stats[-1]
    assert records(tmp_path / "alone") == records(tmp_path / "store")
    crewed.check(tmp_path / "store")


def test_thousands_of_small_chunks_in_a_deep_store_are_shared(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents: helpers lost for messages too long for them, where tensors are small and many."""
    arrays = [random.Random(i).randbytes(520) for i in range(7500)]
    layout = layout_of(sizes=(520,) * len(arrays))
    names = ("store", "/".join(["deep" * 50] * 8))
    for name in names:
        client = start(name, slot_bytes=256 * CHUNK)
        trainer = ToyTrainer(client, layout)
        for step in range(2):
            saved = [*(bytes((step,)) + array[1:] for array in arrays), inline_at(step)]
            trainer.save_now(step, saved)
        assert len(helpers_of(client.writer_pid)) == HELPERS
        client.close(60)
        store = Store.open(tmp_path / name)
        assert read_arrays(store, store.head("main"))[:-1] == saved[:-1]
    assert not caplog.records


def test_what_a_message_asks_for_fits_into_one_area() -> None:
    def encode(size: int) -> Encode:
        return Encode((0, size), RAW_PLAN, b"/store", 0, None)

    message = Message(1000)
    assert message.add(encode(600))
    assert message.add(encode(400))
    assert not message.add(encode(1))
    assert message.add(Digests(((0, 600),), SEED))  # what it gives is in the reply
    assert len(message) == 3


def test_a_damaged_reference_is_as_good_as_none(tmp_path: Path, start: Start) -> None:
    """Helpers find the damage too, and what is coded against it is stored by itself instead."""
    stored: list[list[bytes]] = []
    for name, mode in (("alone", "thread"), ("store", "process")):
        training = Training(start(name, mode=mode))
        training.save()
        store = Store.open(tmp_path / name)
        for pack in store.packs.names():
            file = pack_path(store.path, pack)
            data = bytearray(Path(file).read_bytes())
            for row in read_footer(store.io, file).entries.table[::3]:
                data[int(row["offset"] + row["header"])] ^= 1
            Path(file).write_bytes(data)
        training.save()
        training.client.close(60)
        stored.append(records(tmp_path / name))
        head = Store.open(tmp_path / name).head("main")
        assert head.step == 1
    assert stored[0] == stored[1]


def test_a_killed_helper_costs_nothing_but_its_help(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(31)
    for number in range(4):
        caplog.clear()
        training = Training(start(f"store{number}"), number)
        training.save()
        helpers = helpers_of(training.client.writer_pid)
        for pid in helpers:
            killer = threading.Timer(chance.uniform(0, 0.05), os.kill, (pid, signal.SIGKILL))
            killer.start()
            training.save()
            killer.join()
            training.save()
        training.save()
        training.client.close(60)
        said = [record for record in caplog.records if "helps the writer" in record.getMessage()]
        assert len(said) == len(helpers)
        assert all(record.levelno == logging.WARNING for record in said)
        training.check(tmp_path / f"store{number}")


def test_a_helper_that_hangs_is_given_up(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PATIENCE", "0.5")
    training = Training(start())
    training.save()
    hung = helpers_of(training.client.writer_pid)[0]
    os.kill(hung, signal.SIGSTOP)
    training.save()
    assert ended(hung)
    training.save()
    training.client.close(60)
    training.check(tmp_path / "store")


@pytest.mark.parametrize("hanging", [False, True])
def test_helpers_end_with_a_killed_writer_and_hold_nothing_of_it(
    tmp_path: Path, start: Start, hanging: bool
) -> None:
    client = start()
    training = Training(client)
    training.save()
    helpers = helpers_of(client.writer_pid)
    assert len(helpers) == HELPERS
    for pid in helpers if hanging else ():
        os.kill(pid, signal.SIGSTOP)
    os.kill(client.writer_pid, signal.SIGKILL)
    assert ended(client.writer_pid)
    again = start(lock_timeout=0.0)  # the lock of the run is free at once
    again.ready(60)
    assert Store.open(tmp_path / "store").steps("main") == [0]
    assert all(ended(pid) for pid in helpers)


def test_helpers_end_with_a_closed_writer(start: Start) -> None:
    client = start()
    helpers = helpers_of(client.writer_pid)
    client.close(60)
    assert all(ended(pid) for pid in helpers)


def test_helpers_hold_no_descriptor_but_their_own(tmp_path: Path, start: Start) -> None:
    training = Training(start())
    training.save()
    training.save()
    for pid in helpers_of(training.client.writer_pid):
        names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        names = [name for name in names if not name.startswith(str(tmp_path / "store" / "packs"))]
        assert sorted(name.partition(":")[0] for name in names) == [*["/dev/null"] * 3, "socket"]
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = int(status.split("SigIgn:")[1].split()[0], 16)
        for number in writer_module.IGNORED_SIGNALS:
            assert ignored >> (number - 1) & 1


@pytest.mark.parametrize("options", [{"mode": "thread"}, {"codec": "none"}])
def test_no_helpers_where_they_could_not_help(start: Start, options: dict[str, Any]) -> None:
    mine = set(helpers_of(os.getpid()))
    client = start(**options)
    if "mode" not in options:
        assert helpers_of(client.writer_pid) == []
    else:
        assert set(helpers_of(os.getpid())) == mine


def test_helpers_end_after_a_killed_trainer(tmp_path: Path) -> None:
    config = {
        "store": str(tmp_path / "store"), "first": 0, "last": 10_000, "ring_bytes": 60 * CHUNK,
        "writer": str(CREWED),
    }  # fmt: skip
    command = [sys.executable, str(SUPPORT / "toy_trainer.py"), json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        helpers = helpers_of(pid)
        assert len(helpers) == HELPERS
        process.stdout.readline()
        process.kill()
        assert ended(pid)
    assert all(ended(helper) for helper in helpers)
