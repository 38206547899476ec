"""Who may call a checkpointer, and when: one at a time, in its process, until it is closed, and
from none of the threads that its own saves need.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator

from deltackpt_store.errors import StateError


class Calls:
    """The checks that open every public method. Any thread may ask."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._calling: dict[str, object] = {}  # at most one entry: who is in a call
        self.closed = False

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the object."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise `StateError` (kind "forked") in a forked child."""
        if self.forked:
            raise StateError(
                f"this checkpointer was opened by process {self._pid}, and this is its forked "
                f"child {os.getpid()}",
                kind="forked",
                hint="save in the process that trains, or open a checkpointer of its own run here",
            )

    def check_open(self) -> None:
        """As :meth:`check_process`, and `StateError` (kind "closed") after close."""
        self.check_process()
        if self.closed:
            raise StateError(
                "the checkpointer is closed",
                kind="closed",
                hint="make a new one, and restore() there to go on",
            )

    @contextlib.contextmanager
    def exclusive(self) -> Generator[None]:
        """One caller at a time; a second one is refused rather than made to wait.

        Waiting could be for ever: a signal handler runs on top of the call it would wait for.
        """
        self.check_open()
        mine = object()
        try:  # an interrupt at any place leaves nobody's entry behind
            if self._calling.setdefault("call", mine) is not mine:
                raise StateError(
                    "save, step, restore or close was called while another of them is running",
                    kind="reentrant",
                    hint="call them from one thread, and never from a signal handler: use save_on=",
                )
            yield
        finally:
            if self._calling.get("call") is mine:
                del self._calling["call"]


_background = threading.local()


def in_background(owner: object) -> None:
    """This thread works for the saves of `owner`, for good: it must not wait for them."""
    _background.owner = owner


def refuse_waiting(owner: object) -> None:
    """Raise `StateError` (kind "in-observer") in a thread that the saves of `owner` need."""
    if owner is not None and getattr(_background, "owner", None) is owner:
        raise StateError(
            "an observer cannot save, wait or close: the saves wait for it to return",
            kind="in-observer",
            hint="do it in the training thread; result() of a save that is done() is fine",
        )
