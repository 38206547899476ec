"""Signals, interpreter exit and fork: what happens to saves when the process has other plans.

- A signal of `save_on` only sets a flag. The save happens in the training thread, at the next
  `step`, where no lock is held and no tensor is half updated.
- At interpreter exit open pipelines get a bounded time to finish what was started; a save that
  does not make it is cleanly absent, because a step exists only once its commit record does.
- In a forked child nothing of the parent's is touched: signals do what they did before, exit hooks
  do nothing, and every call of a checkpointer is refused by process id.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

from deltackpt_store.errors import InvalidInputError, StateError, told

_log = logging.getLogger("deltackpt.lifecycle")

Handler = Callable[[int, FrameType | None], Any] | int | None


class Finishable(Protocol):
    """What is asked to finish at interpreter exit; must not raise and must not hang."""

    def finish_at_exit(self) -> None: ...


_UNCATCHABLE = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
_open: set[Finishable] = set()


def register(pipeline: Finishable) -> None:
    """Have `pipeline` finished at interpreter exit, unless unregistered before."""
    _open.add(pipeline)


def unregister(pipeline: Finishable) -> None:
    _open.discard(pipeline)


class SaveSignals:
    """The flag that the signals of `save_on` set, and the handlers that set it.

    Installed in the main thread only (Python delivers signals there). A handler that was there
    before is called right after the flag is set, if it is a Python function; for Ctrl-C Python's
    own handler (KeyboardInterrupt) is called from the second time on. A default action, which for
    SIGTERM is to end the process, does not happen while the handlers are installed. One that could
    not be taken away, as another lies on top of it, only passes signals on.
    """

    def __init__(self, signals: Iterable[Any]) -> None:
        self.received: int | None = None
        """Number of the last signal that arrived, for good."""
        self._pending = False
        self._pid = os.getpid()
        self._gone = False
        self._previous: dict[int, Handler] = {}
        self._install(check_signals(signals))

    @property
    def pending(self) -> bool:
        """A signal arrived and no save has been started because of it."""
        return self._pending

    def take(self) -> int | None:
        """The pending signal's number, once: the caller saves because of it."""
        if not self._pending:
            return None
        self._pending = False
        return self.received

    def uninstall(self) -> None:
        """Put the earlier handlers back, where nobody has put another one since."""
        self._gone = True
        for number in self._previous:
            if signal.getsignal(number) == self._handle:
                with contextlib.suppress(ValueError):  # not in the main thread: it passes on
                    signal.signal(number, self._earlier(number))

    def _earlier(self, number: int) -> Handler:
        """The handler that was there before, less those that were to be taken away since."""
        handler = self._previous.get(number)
        owner: object = getattr(handler, "__self__", None)
        if isinstance(owner, SaveSignals) and owner._gone:
            return owner._earlier(number)
        return signal.SIG_DFL if handler is None else handler

    def _install(self, numbers: tuple[int, ...]) -> None:
        if not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            raise StateError(
                "signal handlers can only be installed in the main thread",
                kind="not-main-thread",
                hint="make the checkpointer there, or use save_on=() and call save() yourself",
                option="save_on",
            )
        for number in numbers:
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except (OSError, ValueError) as error:
                self.uninstall()
                raise InvalidInputError(
                    f"save_on: no handler can be installed for signal {number}: {error}",
                    hint="for example save_on=(signal.SIGTERM,)",
                    option="save_on",
                ) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._earlier(number)
        left = self._gone and signal.getsignal(number) == self._handle
        if left or os.getpid() != self._pid:  # as if there had never been a handler
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        if self._gone:  # called by the handler on top
            if callable(previous):
                previous(number, frame)
            return
        repeated = self.received == number
        self.received = number
        self._pending = True
        if callable(previous) and (previous is not signal.default_int_handler or repeated):
            previous(number, frame)


def check_signals(signals: Any) -> tuple[int, ...]:
    """The option `save_on` as signal numbers; `InvalidInputError` for what is not one."""
    try:
        numbers = tuple(_signal_number(number) for number in signals)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"save_on must be a sequence of signal numbers, got {told(signals)}",
            hint="for example save_on=(signal.SIGTERM,)",
            option="save_on",
        ) from error
    known = signal.valid_signals()
    for number in numbers:
        if number not in known or number in _UNCATCHABLE:
            reason = "no signal" if number not in known else "a signal that cannot be caught"
            raise InvalidInputError(
                f"save_on: {number} is {reason}",
                hint="for example save_on=(signal.SIGTERM,)",
                option="save_on",
            )
    return numbers


def _signal_number(value: Any) -> int:
    if isinstance(value, bool):  # True would be SIGHUP
        raise TypeError
    return int(value)


def _at_exit() -> None:
    for pipeline in list(_open):
        try:
            pipeline.finish_at_exit()
        except Exception:
            _log.exception("a checkpointer could not be finished at exit")


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_open.clear)
