"""The writer's loop: read messages, feed the run's session, end with the trainer.

One thread receives, so that the trainer never waits for a busy writer to read; the caller's
thread does the work, with helper processes where the writer is a process itself. The end of the
channel (the trainer closed it, or died) ends the loop after all messages that arrived whole have
been handled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from deltackpt_store import protocol
from deltackpt_store.encode_crew import Crew
from deltackpt_store.errors import DeltackptError, WriterError, no_thread
from deltackpt_store.fileio import FileIO
from deltackpt_store.open_run import open_session
from deltackpt_store.process_note import writes_for
from deltackpt_store.protocol import Channel, Hello, ToTrainer, ToWriter
from deltackpt_store.ring import Ring
from deltackpt_store.session import RunWriter

_log = logging.getLogger("deltackpt.writer")

ATTEND_SECONDS = 1.0
"""How often a session looks whether a garbage collection waits for it, idle or busy."""


_Received = ToWriter | DeltackptError | None


class Mailbox:
    """Both directions of the channel as the session sees them.

    A thread of its own receives, from `start` on.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[_Received] = queue.SimpleQueue()
        self._ahead: list[_Received] = []  # taken from there too early, one at most
        self._sending = threading.Lock()
        self.gone = threading.Event()
        """Set when the trainer is gone: nothing that is sent will be read any more."""
        self.begun = 0
        """Saves whose beginning has arrived."""
        self._thread: threading.Thread | None = None

    def first(self) -> ToWriter | None:
        """The first message, received here; None at the end. Raises `WriterError`."""
        try:
            return self._channel.receive_as_writer()
        except OSError as error:
            _log.warning("the control channel failed: %s", error)
            return None

    def start(self) -> None:
        """Receive all further messages, so that the trainer never waits for that."""
        thread = threading.Thread(target=self._receive, name="deltackpt-inbox", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise no_thread(error) from error
        self._thread = thread

    def get(self, idle: Callable[[], None] | None = None) -> ToWriter | None:
        """The next message; None at the end. Raises `WriterError` for one that is not valid.

        While there is none, `idle` is called every `ATTEND_SECONDS`.
        """
        while True:
            if self._ahead:
                message = self._ahead.pop()
                break
            try:
                message = self._inbox.get(timeout=None if idle is None else ATTEND_SECONDS)
                break
            except queue.Empty:
                if idle is not None:
                    idle()
        if isinstance(message, DeltackptError):
            raise message
        return message

    def slots(self, first: protocol.Slot, most: int) -> list[protocol.Slot]:
        """`first` and the slots of the same save that arrived right after it, at most `most`."""
        slots = [first]
        while len(slots) < most and not self.idle():
            message = self._inbox.get()
            if not isinstance(message, protocol.Slot) or message.save != first.save:
                self._ahead.append(message)
                break
            slots.append(message)
        return slots

    def idle(self) -> bool:
        """Whether no message is waiting."""
        return not self._ahead and self._inbox.empty()

    def send(self, message: ToTrainer) -> None:
        """Tell the trainer; silently nothing once it is gone."""
        frame = protocol.encode(message)
        with self._sending:
            if not self.gone.is_set():
                with contextlib.suppress(OSError):
                    self._channel.send(frame)

    def close(self) -> None:
        """End the connection and the receiving thread."""
        self.gone.set()
        self._channel.shutdown()
        if self._thread is not None:
            self._thread.join()
        self._channel.close()

    def _receive(self) -> None:
        try:
            while (message := self._channel.receive_as_writer()) is not None:
                self.begun += isinstance(message, protocol.Begin)
                self._inbox.put(message)
        except DeltackptError as error:
            self._inbox.put(error)
        except OSError as error:
            _log.warning("the control channel failed: %s", error)
        finally:
            self.gone.set()
            self._channel.shutdown()  # wakes a sender that nobody will read from
            self._inbox.put(None)


class _NoticeHandler(logging.Handler):
    """Sends log records of the writer process to the trainer's log."""

    def __init__(self, send: Callable[[ToTrainer], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = protocol.printable(record.getMessage())
            self._send(protocol.Notice(record.levelno, text))
        except Exception:
            self.handleError(record)


def serve(
    channel: Channel,
    attach: Callable[[int, int], Ring],
    *,
    io: FileIO | None = None,
    own_process: bool = False,
) -> None:
    """Serve one trainer until its channel ends; owns `channel`.

    `attach(slots, slot_bytes)` gives the ring, which stays the caller's. `io` is the file layer of
    the store. A process that does nothing else (`own_process`, without another thread) sends
    warnings to the trainer's log and gets helpers for encoding. Raises only for broken protocol and
    programming errors: what the store refuses is told to the trainer.
    """
    mailbox = Mailbox(channel)
    crew = Crew()
    if own_process:
        logging.getLogger("deltackpt").addHandler(_NoticeHandler(mailbox.send))
    try:
        hello = mailbox.first()
        if hello is None:
            return
        if not isinstance(hello, Hello) or hello.protocol != protocol.PROTOCOL:
            raise WriterError(
                "trainer and writer do not speak the same protocol", kind="protocol",
                hint="the package was upgraded while the trainer ran: start it again",
            )  # fmt: skip
        try:
            ring = attach(hello.slots, hello.slot_bytes)
            if own_process and hello.options.codec != "none":
                crew = Crew.hire(ring)  # a fork: only as long as there is one thread
            mailbox.start()
            session = open_session(
                hello, ring, send=mailbox.send, gone=mailbox.gone, io=io, crew=crew
            )
        except (DeltackptError, OSError) as error:
            mailbox.send(protocol.Refused(protocol.wire_error(error)))
            return
        try:
            _loop(mailbox, session)
        finally:
            session.close()
    finally:
        crew.close()
        mailbox.close()


def _loop(mailbox: Mailbox, session: RunWriter) -> None:
    handled = 0
    attended = time.monotonic()
    while True:
        message = mailbox.get(session.attend)
        if message is None or isinstance(message, protocol.Close):
            return
        handled += isinstance(message, protocol.Begin)
        if isinstance(message, protocol.Slot):
            if mailbox.begun > handled:
                session.hurry()
            session.stage(mailbox.slots(message, session.most_together))
        else:
            session.handle(message)
        if mailbox.idle():
            session.relieve()
        if time.monotonic() - attended >= ATTEND_SECONDS:
            session.attend()
            attended = time.monotonic()


def serve_process(*, control_fd: int, ring_fd: int, parent: int) -> None:
    """Serve the process `parent`, whose death counts as the end of the channel."""
    writes_for(parent)
    sock = socket.socket(fileno=control_fd)
    channel = Channel(sock, watch=_death_of(parent))
    serve(channel, lambda slots, size: Ring.attach(ring_fd, slots, size), own_process=True)


def _death_of(parent: int) -> int | None:
    """A descriptor that is readable once the parent has ended; None where there is none."""
    try:
        fd = os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None
    if os.getppid() != parent:  # it ended before we looked, and its number may be reused
        os.close(fd)
        fd, other = os.pipe()
        os.close(other)
    return fd
