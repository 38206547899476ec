"""Messages between trainer and writer, and the channel that carries them."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import xxhash
from deltackpt_store import descriptors, protocol
from deltackpt_store.errors import InvalidInputError, StorageError, WriterError, from_wire, to_wire
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, TensorView
from deltackpt_store.protocol import Channel, WriterOptions

PARENT = Commit(
    run="main", number=4, step=10, parent=("main", 3, bytes(32)), manifest=bytes(32), base=None,
    root=bytes(32), closure=bytes(32), writer="w", nonce=bytes(16), generation=0, created=1.5,
    versions={"torch": "2"}, ancestors=((1, 3),), digest=bytes(range(32)),
)  # fmt: skip

TO_WRITER = [
    protocol.Hello(
        1, b"/st\xff\xfere", "main", 2**64 - 1, 7, 4096, WriterOptions(codec="none", nice=3)
    ),
    protocol.Begin(1, 10),
    protocol.Begin(2, 11, 1, None, b"layout", PARENT, True),
    protocol.Begin(3, 12, None, ("other", 9)),
    protocol.Slot(1, 6, bytes(range(64))),
    protocol.NeedSlots(),
    protocol.Finish(1, {0: b"x"}, {3: b"", 4: b"y"}, b"\x80", {"loss": 0.5}, {"stall": 1.0}),
    protocol.Abort(2),
    protocol.Close(),
]
TO_TRAINER = [
    protocol.Ready("uuid", 77),
    protocol.Ready("uuid", 77, "writer"),
    protocol.Refused(to_wire(StorageError("full", errno=28))),
    protocol.Released([0, 5]),
    protocol.Committed(1, "main", 3, 40, bytes(32), bytes(32), bytes(32), True, {"chunks": 3.0}),
    protocol.Failed(2, to_wire(ValueError("bad"))),
    protocol.Notice(30, "careful"),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    with ours:
        yield ours, channel
    channel.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[socket.socket, Channel]) -> None:
    raw, channel = pair
    trainer = Channel(raw)
    for message in TO_WRITER:
        trainer.send(protocol.encode(message))
    raw.shutdown(socket.SHUT_WR)
    for message in TO_WRITER:
        assert channel.receive_as_writer() == message
    assert channel.receive_as_writer() is None
    for message in TO_TRAINER:
        channel.send(protocol.encode(message))
        assert trainer.receive_as_trainer() == message


def test_a_stream_in_single_bytes_is_put_together(pair: tuple[socket.socket, Channel]) -> None:
    raw, channel = pair
    data = b"".join(protocol.encode(message) for message in TO_WRITER)

    def dribble() -> None:
        for i in range(len(data)):
            raw.send(data[i : i + 1])

    thread = threading.Thread(target=dribble)
    thread.start()
    assert [channel.receive_as_writer() for _ in TO_WRITER] == TO_WRITER
    thread.join()


@pytest.mark.parametrize("cut", [1, 3, 4, 5, -1])
def test_an_incomplete_message_counts_as_never_sent(
    pair: tuple[socket.socket, Channel], cut: int
) -> None:
    # A trainer killed while it sends Finish must not have half of it believed.
    raw, channel = pair
    raw.send(protocol.encode(TO_WRITER[6])[:cut])
    raw.close()
    assert channel.receive_as_writer() is None


def test_undecodable_frames_are_typed_errors(pair: tuple[socket.socket, Channel]) -> None:
    raw, channel = pair
    for body in (b"\xc1", msgspec.msgpack.encode({"type": "unknown"}), b""):
        raw.send(struct.pack("<I", len(body)) + body)
        with pytest.raises(WriterError, match="undecodable"):
            channel.receive_as_writer()
    raw.send(b"\xff\xff\xff\xff")
    with pytest.raises(WriterError, match="4294967295 bytes"):  # and nothing was allocated for it
        channel.receive_as_writer()


def test_a_message_over_the_limit_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME", 1000)
    with pytest.raises(InvalidInputError, match="Finish message"):
        protocol.encode(protocol.Finish(1, {0: bytes(2000)}, {}, b"", {}, {}))


def test_the_stream_of_a_dead_peer_ends_although_its_child_holds_the_socket(
    pair: tuple[socket.socket, Channel],
) -> None:
    # A data-loader worker that outlives its trainer must not keep the writer waiting for ever.
    raw, plain = pair
    end, other = os.pipe()
    channel = Channel(socket.socket(fileno=os.dup(plain.fileno())), watch=end)
    raw.send(protocol.encode(TO_WRITER[1]) + protocol.encode(TO_WRITER[2])[:7])
    os.close(other)  # what a pidfd does when the process ends
    assert channel.receive_as_writer() == TO_WRITER[1]
    assert channel.receive_as_writer() is None
    channel.close()
    os.close(end)


def test_a_peer_that_is_gone_is_an_error_where_sigpipe_is_heeded() -> None:
    """Prevents: a training that ends without a word because its writer, or a process that helps
    with reading, was killed, where a program has SIGPIPE do what it does by default."""
    code = """
import signal
from deltackpt_store.descriptors import socket_pair
from deltackpt_store.frames import FrameChannel, frame

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
ours, theirs = socket_pair()
theirs.close()
try:
    FrameChannel(ours).send(frame(b"anybody there?"))
except BrokenPipeError:
    print("nobody")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "nobody\n"


@pytest.mark.parametrize("low", [False, True])
def test_default_time_limits_of_sockets_are_those_of_others(
    monkeypatch: pytest.MonkeyPatch, low: bool
) -> None:
    """Prevents: a message that is given up when the writer is busy for as long as a program lets
    its downloads wait, and the save that hangs without it."""
    if low:  # where descriptors must be moved away from the standard streams
        monkeypatch.setattr(descriptors, "_FIRST_FREE", 1000)
        monkeypatch.setattr(descriptors, "above_standard", lambda fd: fd)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        pair = descriptors.socket_pair()
    finally:
        socket.setdefaulttimeout(before)
    for end in pair:
        assert end.gettimeout() is None
        assert os.get_blocking(end.fileno())  # for the process that inherits it
        end.close()


def test_records_are_the_documented_32_bytes() -> None:
    digest = xxhash.xxh3_128_digest(b"data", seed=5)
    array = np.zeros(2, protocol.RECORD)
    array[1] = (1, 2, 3, 4, np.frombuffer(digest, np.uint8))
    data = array.tobytes()
    assert data == bytes(32) + struct.pack("<IIII", 1, 2, 3, 4) + digest
    assert list(protocol.unpack_records(data)) == [(0, 0, 0, 0, bytes(16)), (1, 2, 3, 4, digest)]
    with pytest.raises(WriterError, match="63 bytes"):
        protocol.unpack_records(data[:63])


def test_change_hashes_are_big_endian_xxh3_128() -> None:
    # Independent reference: the integer form of the same hash.
    number = xxhash.xxh3_128_intdigest(b"abc", seed=9)
    assert xxhash.xxh3_128_digest(b"abc", seed=9) == number.to_bytes(16, "big")


def test_errors_keep_their_type_over_the_wire() -> None:
    error = from_wire(to_wire(StorageError("no space", errno=28, path="/x", hint="free some")))
    assert isinstance(error, StorageError)
    assert (error.errno, error.hint, str(error)) == (28, "free some", "no space (free some)")
    error = from_wire(to_wire(MemoryError("no room for 5 bytes")))
    assert isinstance(error, WriterError)
    assert error.kind == "memory"
    assert "no room for 5 bytes (saving needs some more memory" in str(error)


def test_extent_keys_name_the_first_tensor_that_views_the_extent() -> None:
    layout = Layout(
        structure=b"",
        paths=("model/b", "model/a", "tied"),
        tensors=(
            TensorView(0, 1, "float32", (4,), (1,), 0, device="cuda:0"),
            TensorView(1, 0, "bfloat16", (9,), (1,), 0),
            TensorView(2, 1, "float32", (4,), (1,), 0),
        ),
        extents=(ExtentSpec(18, 4096, "bfloat16"), ExtentSpec(16, 8192, "float32")),
        objects=(),
    )
    assert protocol.extent_keys(layout) == [
        ("model/a", 18, "bfloat16", 4096, "cpu"),
        ("model/b", 16, "float32", 8192, "cuda:0"),
    ]


def test_paths_that_are_not_utf8_travel_in_errors() -> None:
    # The message about a failed save must arrive whatever the store's directory is called.
    path = os.fsdecode(b"/st\xffre")
    data = protocol.wire_error(StorageError(f"cannot write {path}", path=path, errno=28))
    frame = protocol.encode(protocol.Failed(1, data))
    assert b"/st\\udcffre" in frame
    assert data["context"]["errno"] == 28


@pytest.mark.parametrize("metrics", [{"\udcff": 1.0}, {"loss": object()}])
def test_what_cannot_be_encoded_is_refused_at_the_sender(metrics: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match="Finish"):
        protocol.encode(protocol.Finish(1, {}, {}, b"", metrics, {}))
    with pytest.raises(InvalidInputError, match="Begin"):
        protocol.encode(protocol.Begin(1, 1 << 70))
