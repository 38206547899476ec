"""Signals set a flag and nothing else; exit is bounded; a forked child touches nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
from deltackpt import lifecycle
from deltackpt.lifecycle import SaveSignals
from deltackpt_store.errors import InvalidInputError, StateError


@pytest.fixture(autouse=True)
def same_handlers_afterwards() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def test_a_signal_sets_a_flag_that_is_taken_once() -> None:
    # case 62
    signals = SaveSignals((signal.SIGUSR1, signal.SIGTERM))
    assert (signals.received, signals.pending, signals.take()) == (None, False, None)
    os.kill(os.getpid(), signal.SIGTERM)  # whose default action would end the process
    assert (signals.received, signals.pending) == (signal.SIGTERM, True)
    assert signals.take() == signal.SIGTERM
    assert (signals.take(), signals.pending) == (None, False)
    assert signals.received == signal.SIGTERM
    signals.uninstall()


def test_an_earlier_handler_is_called_after_the_flag_is_set() -> None:
    seen: list[tuple[int, bool]] = []
    signals: SaveSignals | None = None

    def earlier(number: int, frame: FrameType | None) -> None:
        assert signals is not None
        seen.append((number, signals.pending))

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        signals = SaveSignals([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [(signal.SIGUSR1, True)]
        signals.uninstall()
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_second_interrupt_interrupts() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signals = SaveSignals([signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.pending
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        signals.uninstall()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_somebody_put_on_top_stays() -> None:
    signals = SaveSignals([signal.SIGUSR2])

    def mine(number: int, frame: FrameType | None) -> None: ...

    before_ours = signal.SIG_DFL
    signal.signal(signal.SIGUSR2, mine)
    signals.uninstall()
    assert signal.getsignal(signal.SIGUSR2) is mine
    signal.signal(signal.SIGUSR2, before_ours)


@pytest.mark.parametrize("bad", [15, "SIGTERM", [-1], [100_000], [signal.SIGKILL], ["x"]])
def test_signals_that_cannot_be_caught_are_refused(bad: object) -> None:
    with pytest.raises(InvalidInputError, match="save_on"):
        SaveSignals(bad)  # type: ignore[arg-type] -- users' mistake
    with pytest.raises(InvalidInputError, match="save_on"):
        SaveSignals([signal.SIGUSR1, signal.SIGSTOP])  # and the first is put back


def test_handlers_are_for_the_main_thread() -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        SaveSignals(())  # nothing to install: fine anywhere
        try:
            SaveSignals([signal.SIGUSR1])
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_forked_child_has_the_earlier_handlers() -> None:
    """Prevents: data-loader workers that survive the SIGTERM meant to end them."""
    # case 64
    signals = SaveSignals([signal.SIGTERM])
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not signals.pending
    signals.uninstall()


def test_exit_finishes_what_is_registered_and_survives_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Pipeline:
        def __init__(self, error: Exception | None = None) -> None:
            self.error, self.finished = error, 0

        def finish_at_exit(self) -> None:
            self.finished += 1
            if self.error is not None:
                raise self.error

    good, bad, gone = Pipeline(), Pipeline(OSError(5, "I/O error")), Pipeline()
    for pipeline in (bad, good, gone):
        lifecycle.register(pipeline)
    lifecycle.unregister(gone)
    lifecycle._at_exit()
    assert (good.finished, bad.finished, gone.finished) == (1, 1, 0)
    assert "I/O error" in caplog.text
    for pipeline in (bad, good):
        lifecycle.unregister(pipeline)
