"""The trainer's connection to a started writer: its threads, its end, fork and interpreter exit.

One thread sends, so that no interrupt of a caller can tear a message and no caller waits for the
writer to read; one receives. Both are daemons: they never keep an interpreter alive.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Literal

from deltackpt_store import protocol
from deltackpt_store.descriptors import socket_pair
from deltackpt_store.errors import DeltackptError, WriterError, no_thread
from deltackpt_store.fileio import FileIO
from deltackpt_store.launch import Running, WriterProcess, WriterThread
from deltackpt_store.protocol import Channel, ToTrainer, ToWriter
from deltackpt_store.ring import Ring
from deltackpt_store.standby import Standby

_log = logging.getLogger("deltackpt.writer")

_EXIT_SECONDS = 30.0
_REAP_SECONDS = 5.0


class Connection:
    """Starts a writer over `ring`; carries messages both ways from `start` until either side ends.

    `on_message` and `on_end` are called in the receiving thread, `on_end` exactly once and last,
    with None after an orderly end of the stream or the error that broke it. In a forked child all
    descriptors are closed at once, silently, so that the child cannot disturb the writer.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        mode: Literal["process", "thread"],
        nice: int,
        io: FileIO | None,
        standby: Standby | None = None,
        on_message: Callable[[ToTrainer], None],
        on_end: Callable[[WriterError | None], None],
    ) -> None:
        """`standby`, over the memory of `ring`, is taken into service instead of a new process.

        Raises `WriterError` when the writer cannot be started; `ring` is then the caller's.
        """
        self._ring = ring
        self._on_message, self._on_end = on_message, on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._ended = False
        self.obituary = ""
        """How the writer ended, set before `on_end` is called."""
        self._running: Running | None = None
        self._theirs: socket.socket | None = None
        self._watch = -1
        """Tells of the death of a writer process, also where a child, forked while it was started,
        holds its end of the channel open."""
        if standby is None:
            self._start(mode, nice, io)
        else:
            self._channel = Channel(standby.socket)
            _connections.add(self)
            self._running = standby.take_process()
        assert self._running is not None
        if mode == "process":
            with contextlib.suppress(AttributeError, OSError):
                self._watch = os.pidfd_open(self._running.pid)
                self._channel.watch(self._watch)
        self.writer_pid = self._running.pid
        self._sender = threading.Thread(target=self._send_loop, name="deltackpt-send", daemon=True)
        self._receiver = threading.Thread(
            target=self._receive_loop, name="deltackpt-receive", daemon=True
        )

    def start(self) -> None:
        """Begin to carry messages: from here on `on_end` may come, of a dead writer at once.

        Raises `WriterError` when there are no threads for it; the writer has then been ended.
        """
        try:
            self._sender.start()
            self._receiver.start()
        except BaseException as error:
            self._close()
            if not isinstance(error, RuntimeError):
                raise
            raise no_thread(error) from error

    def _start(self, mode: Literal["process", "thread"], nice: int, io: FileIO | None) -> None:
        ours, theirs = socket_pair()
        self._channel = Channel(ours)
        self._theirs = theirs
        _connections.add(self)
        try:
            if mode == "process":
                self._running = WriterProcess(theirs, self._ring.fd, nice=nice)
                theirs.close()
            else:
                self._running = WriterThread(theirs, self._ring, io=io)
        except BaseException as error:
            self._ended = True
            theirs.close()
            self._channel.close()
            if isinstance(error, WriterError) or not isinstance(error, RuntimeError):
                raise
            raise no_thread(error) from error
        self._theirs = None

    def post(self, message: ToWriter) -> None:
        """Queue a message, in the order of calls; it is encoded (copied) before this returns.

        Raises `InvalidInputError` when it is too large, and nothing else: a dead writer shows in
        `on_end`.
        """
        self._outbox.put(protocol.encode(message))

    def post_last(self, message: ToWriter) -> None:
        """Queue the last message; the sending thread ends when it is sent."""
        self.post(message)
        self._outbox.put(None)

    def join(self, timeout: float | None) -> bool:
        """Wait until `on_end` has returned; False after `timeout` seconds.

        True at once in the receiving thread itself.
        """
        if threading.current_thread() is not self._receiver:
            self._receiver.join(timeout)
            return not self._receiver.is_alive()
        return True

    def _send_loop(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._channel.send(frame)
            except OSError:
                return  # the writer is gone: the receiver learns it from the end of its stream

    def _receive_loop(self) -> None:
        broken: WriterError | None = None
        try:
            while (message := self._channel.receive_as_trainer()) is not None:
                self._on_message(message)
        except DeltackptError as error:
            broken = error if isinstance(error, WriterError) else WriterError(str(error))
        except OSError as error:
            broken = WriterError(f"the control channel failed: {error}")
        except Exception as error:
            _log.exception("a message of the writer could not be handled")
            broken = WriterError(f"a message of the writer could not be handled: {error!r}")
        try:
            self._close()
        finally:
            self._on_end(broken)

    def _close(self) -> None:
        """End the channel, and with it the writer; see how it ended."""
        self._channel.shutdown()
        assert self._running is not None
        self._running.wait(_REAP_SECONDS)
        self.obituary = self._running.bury()
        self._outbox.put(None)
        if self._sender.ident is not None:
            self._sender.join()
        self._ended = True
        self._channel.close()
        self._close_watch()

    def _close_watch(self) -> None:
        watch, self._watch = self._watch, -1
        if watch >= 0:
            os.close(watch)

    def leave(self) -> None:
        """At interpreter exit without close: hand over what is queued, in bounded time.

        A writer process finishes by itself; a writer thread gets the time to do so.
        """
        if os.getpid() != self._pid or self._ended:
            return
        self.post_last(protocol.Close())
        self._sender.join(_EXIT_SECONDS)
        if isinstance(self._running, WriterThread):
            self._receiver.join(_EXIT_SECONDS)

    def after_fork_in_child(self) -> None:
        """Close all descriptors without a word on the channel."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(OSError):
            self._channel.close_in_child()
        with contextlib.suppress(OSError):
            self._close_watch()
        if self._theirs is not None:
            with contextlib.suppress(OSError):
                os.close(self._theirs.detach())
        with contextlib.suppress(OSError):
            self._ring.close_fd()
        if self._running is not None:
            with contextlib.suppress(OSError):
                self._running.forget()


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forked() -> None:
    for connection in list(_connections):
        connection.after_fork_in_child()


def _exiting() -> None:
    for connection in list(_connections):
        connection.leave()


os.register_at_fork(after_in_child=_forked)
atexit.register(_exiting)
