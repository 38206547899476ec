"""A writer process that has been started ahead: the first save need not wait for its start.

It has been told nothing yet, neither a store nor a size: it holds no lock and has no file open, and
ends when its channel does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

from deltackpt_store.descriptors import socket_pair
from deltackpt_store.launch import WriterProcess
from deltackpt_store.ring import memory_file


class Standby:
    """A started writer process, this side's end of its channel, and the memory file of its ring.

    Whoever takes these into service owns them; what is not taken goes with :meth:`end`. Not locked:
    one thread at a time. In a forked child the descriptors are closed at once.
    """

    def __init__(self, *, nice: int = 0) -> None:
        """Raises `WriterError` when the process cannot be started, `OSError` for lack of
        descriptors."""
        self._pid = os.getpid()
        self._memory = memory_file()
        self._sockets: list[socket.socket] = []
        self._process: WriterProcess | None = None
        _all.add(self)
        try:
            self._sockets += socket_pair()
            self._process = WriterProcess(self._sockets[1], self._memory, nice=nice)
        except BaseException:
            self._close()
            raise
        self._sockets.pop().close()

    @property
    def alive(self) -> bool:
        """Whether it can still be taken into service."""
        return self._process is not None and not self._process.wait(0)

    def take_memory(self) -> int:
        """The memory file, of no size yet, for good."""
        memory, self._memory = self._memory, -1
        return memory

    @property
    def socket(self) -> socket.socket:
        return self._sockets[0]

    def take_process(self) -> WriterProcess:
        """The process, and with it the socket, for good."""
        process, self._process = self._process, None
        assert process is not None
        self._sockets.clear()
        return process

    def end(self) -> None:
        """End it, if it is not in service. It has nothing to lose. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.end()
        self._close()

    def _close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()
        memory, self._memory = self._memory, -1
        if memory >= 0:
            os.close(memory)

    def after_fork_in_child(self) -> None:
        process, self._process = self._process, None
        with contextlib.suppress(OSError):
            self._close()
        if process is not None:
            process.forget()


_all: weakref.WeakSet[Standby] = weakref.WeakSet()


def _forked() -> None:
    for standby in list(_all):
        standby.after_fork_in_child()


os.register_at_fork(after_in_child=_forked)
