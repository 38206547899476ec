"""Byte strings over a stream socket between this process and one that it has started."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct

from deltackpt_store.errors import WriterError

MAX_FRAME = 1 << 30

_length = struct.Struct("<I")
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)


def frame(content: bytes) -> bytes:
    """`content` as a channel sends it: its length as a little-endian u32 comes first."""
    return _length.pack(len(content)) + content


class FrameChannel:
    """Frames over one connected stream socket; owns the socket.

    `send` may be called from one thread and the receiving calls from another; the owner
    serialises callers of each. A broken peer shows as None from `receive` and as `OSError`
    from `send`.
    """

    def __init__(self, sock: socket.socket, *, watch: int | None = None) -> None:
        """`watch` is a descriptor that becomes readable when the peer's process has ended.

        The stream of a dead peer ends there, after what it sent, even while a child that it
        forked still holds the other end of the socket open.
        """
        self._socket = sock
        self._poll: select.poll | None = None
        if watch is not None:
            self.watch(watch)

    def watch(self, watch: int) -> None:
        """Do as a channel that was made with `watch`; to be called before anything is received."""
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._poll.register(watch, select.POLLIN)

    def send(self, frame: bytes) -> None:
        """Send one :func:`frame` whole; blocks while the other side does not read.

        Where it is gone this is an error, also in a program whose SIGPIPE is not ignored.
        """
        self._socket.sendall(frame, _NO_SIGNAL)

    def receive(self) -> bytearray | None:
        """The content of the next frame; None at the end of the stream."""
        header = self._exactly(_length.size)
        if header is None:
            return None
        (size,) = _length.unpack(header)
        if size > MAX_FRAME:
            raise WriterError(f"frame of {size} bytes on the control channel", kind="protocol")
        return self._exactly(size)

    def ready(self, seconds: float) -> bool:
        """Whether bytes or the end of the stream arrive within that many seconds."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self) -> None:
        """End both directions: blocked callers of either side return."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def close_in_child(self) -> None:
        """Forget the connection in a forked child, without a word to the peer of the parent."""
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while len(view):
            if self._poll is not None and self._only_death():
                return None
            try:
                got = self._socket.recv_into(view)
            except ConnectionError:
                return None
            if got == 0:
                return None  # an incomplete frame at the end counts as never sent
            view = view[got:]
        return data

    def _only_death(self) -> bool:
        """Wait for bytes or for the peer's end; True when it ended and no bytes are left."""
        assert self._poll is not None
        ready = {fd for fd, _ in self._poll.poll()}
        return self._socket.fileno() not in ready
