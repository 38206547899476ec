"""Saves that come faster than they are encoded: ratio is given up before durability is delayed."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deltackpt_store import protocol, serve
from deltackpt_store.client import WriterClient
from deltackpt_store.coding_policy import Outcome
from deltackpt_store.encoder import Encoder, Job
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from toy_trainer import CHUNK, SEED, ToyTrainer, check_run


def begin(save: int) -> protocol.Begin:
    return protocol.Begin(save=save, step=save)


def slot(save: int) -> protocol.Slot:
    return protocol.Slot(save=save, slot=0, records=b"")


class Inbox:
    """A mailbox in which `arrived` messages came before the first one was looked at."""

    def __init__(self, messages: list[Any], arrived: int) -> None:
        self.waiting = deque(messages)
        self.begun = sum(isinstance(message, protocol.Begin) for message in messages[:arrived])

    def get(self, *args: Any) -> Any:
        return self.waiting.popleft() if self.waiting else None

    def slots(self, first: Any, most: int) -> list[Any]:
        return [first]

    def idle(self) -> bool:
        return not self.waiting


class Session:
    """Notes what the loop asks for."""

    most_together = 1

    def __init__(self) -> None:
        self.calls: list[str] = []

    def stage(self, messages: list[Any]) -> None:
        self.calls += [type(message).__name__ for message in messages]

    def handle(self, message: Any) -> None:
        self.calls.append(type(message).__name__)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name)


@pytest.mark.parametrize(("arrived", "hurried"), [(2, 0), (5, 2)])
def test_a_save_that_waits_makes_the_writer_hurry(arrived: int, hurried: int) -> None:
    messages = [begin(1), slot(1), slot(1), begin(2), slot(2)]
    session = Session()
    serve._loop(Inbox(messages, arrived), session)  # stand-ins
    assert session.calls.count("hurry") == hurried
    assert [c for c in session.calls if c in ("Begin", "Slot")] == [
        type(message).__name__ for message in messages
    ]


def left_by_a_dead_trainer(messages: list[Any]) -> serve.Mailbox:
    ours, theirs = socket.socketpair()
    with theirs:
        for message in messages:
            theirs.sendall(protocol.encode(message))
    mailbox = serve.Mailbox(protocol.Channel(ours))
    mailbox.start()
    assert mailbox.gone.wait(60)  # all but the end is there
    return mailbox


def test_what_has_arrived_is_handled_when_the_trainer_is_gone() -> None:
    finish = protocol.Finish(1, {}, {}, b"", {}, {})
    mailbox, session = left_by_a_dead_trainer([begin(1), slot(1), finish]), Session()
    serve._loop(mailbox, session)  # a stand-in
    mailbox.close()
    assert [call for call in session.calls if call.istitle()] == ["Begin", "Slot", "Finish"]


def test_slots_of_one_save_are_taken_together_and_in_order() -> None:
    sent = [slot(1), slot(1), slot(1), slot(2), protocol.NeedSlots(), slot(2)]
    mailbox = left_by_a_dead_trainer(sent)
    taken: list[list[Any]] = []
    while (message := mailbox.get()) is not None:
        slots = isinstance(message, protocol.Slot)
        taken.append(mailbox.slots(message, 2) if slots else [message])
    mailbox.close()
    assert taken == [sent[:2], sent[2:3], sent[3:4], sent[4:5], sent[5:]]


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with StoreWriter(Store.create(tmp_path / "store")) as writer:
        yield writer


def test_slow_encoding_is_given_up_step_by_step(writer: StoreWriter) -> None:
    levels: list[int] = []
    for _ in range(4):
        writer.encoder.seconds += 1.0  # 1 MB a second, and the disk takes no time
        writer.encoder.raw_bytes += 1_000_000
        writer.hurry()
        levels.append(writer.encoder.policy.hurry)
    assert levels == [1, 2, 2, 2]
    for expected in (1, 0, 0):
        writer.ease()
        assert writer.encoder.policy.hurry == expected


def test_a_slow_disk_is_no_reason_to_write_more(writer: StoreWriter) -> None:
    """Giving up ratio when the disk is the bottleneck would make everything later."""
    writer.encoder.seconds += 1.0
    writer.encoder.raw_bytes += 1_000_000
    writer._output._thread.busy_seconds += 3.0
    writer._output.handed_out += 500_000
    writer.hurry()
    assert writer.encoder.policy.hurry == 0


def test_haste_without_anything_encoded_changes_nothing(writer: StoreWriter) -> None:
    writer.hurry()
    assert writer.encoder.policy.hurry == 0


def test_saves_that_come_too_fast_are_hurried_counted_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second save begins while the first is being encoded, very slowly."""
    encode = Encoder.encode
    mailboxes: list[serve.Mailbox] = []
    slow = True

    class Noted(serve.Mailbox):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            mailboxes.append(self)

    def slowly(encoder: Encoder, jobs: Sequence[Job]) -> list[Outcome]:
        deadline = time.monotonic() + 120
        while slow and mailboxes[-1].begun < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        outcomes = encode(encoder, jobs)
        if slow:
            encoder.seconds += 1000.0
        return outcomes

    monkeypatch.setattr(serve, "Mailbox", Noted)
    monkeypatch.setattr(Encoder, "encode", slowly)
    client = WriterClient(
        tmp_path / "store", "main", seed=SEED, ring_bytes=80 * CHUNK, slot_bytes=4 * CHUNK,
        mode="thread",
    )  # fmt: skip
    trainer = ToyTrainer(client)
    first = trainer.save(0)
    second = trainer.save(1)
    hurried = client.result(first, 120).stats
    assert 0 < hurried["hurried_chunks"] < hurried["staged_chunks"]  # all but the first slot
    assert hurried["hurried_bytes"] > 0
    client.result(second, 120)
    slow = False
    later = [trainer.save_now(step).stats["hurried_chunks"] for step in (2, 3, 4)]
    assert later[1:] == [0, 0]  # at leisure again
    client.close(60)
    assert check_run(str(tmp_path / "store")) == [0, 1, 2, 3, 4]
