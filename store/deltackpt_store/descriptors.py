"""Descriptors kept off 0, 1 and 2, which are free in a process that was started without them.

A program started there takes them for its standard streams, and C code writes messages to 2.
"""

from __future__ import annotations

import fcntl
import os
import socket

_FIRST_FREE = 3


def above_standard(fd: int) -> int:
    """`fd`, or a descriptor above 2 in its place (it is closed then). OSError: `fd` stays open."""
    if fd >= _FIRST_FREE:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(fd)
    return moved


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets, neither of them a standard stream. OSError.

    Neither has a time limit, whatever the program has given to ``socket.setdefaulttimeout``.
    """
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one, other = _above(one), _above(other)
        one.settimeout(None)
        other.settimeout(None)
        return one, other
    except BaseException:
        one.close()
        other.close()
        raise


def _above(end: socket.socket) -> socket.socket:
    if end.fileno() >= _FIRST_FREE:
        return end
    return socket.socket(fileno=above_standard(end.detach()))
