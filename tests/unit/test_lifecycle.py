"""Signals set a flag and nothing else; exit is bounded; a forked child touches nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from deltackpt_store.errors import InvalidInputError, StateError, StorageError
from saving import saved, steps

from deltackpt import lifecycle
from deltackpt.checkpointer import Checkpointer
from deltackpt.lifecycle import SaveSignals
from deltackpt.report import Save, SaveProgress


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


def test_handlers_taken_away_in_the_order_they_came_are_gone() -> None:
    """The first one came back, and nothing ended the process any more."""
    # case 62
    before = signal.getsignal(signal.SIGTERM)
    first, second, third = (SaveSignals((signal.SIGTERM,)) for _ in range(3))
    first.uninstall()
    second.uninstall()
    signal.raise_signal(signal.SIGTERM)
    assert [s.pending for s in (first, second, third)] == [False, False, True]
    third.uninstall()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_cannot_be_taken_away_passes_signals_on() -> None:
    # case 62
    seen: list[str] = []

    def earlier(number: int, frame: FrameType | None) -> None:
        seen.append("earlier")

    before = signal.signal(signal.SIGUSR1, earlier)
    signals = SaveSignals((signal.SIGUSR1,))
    ours: Any = signal.getsignal(signal.SIGUSR1)

    def above(number: int, frame: FrameType | None) -> None:
        seen.append("above")
        ours(number, frame)

    signal.signal(signal.SIGUSR1, above)
    signals.uninstall()
    signal.raise_signal(signal.SIGUSR1)
    assert (seen, signals.pending) == (["above", "earlier"], False)
    signal.signal(signal.SIGUSR1, ours)  # who lay on top puts back what was there
    signal.raise_signal(signal.SIGUSR1)
    assert (seen, signals.pending) == (["above", "earlier", "earlier"], False)
    assert signal.getsignal(signal.SIGUSR1) is earlier
    other = SaveSignals((signal.SIGUSR1,))
    thread = threading.Thread(target=other.uninstall)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert (len(seen), other.pending) == (4, False)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("bad", [15, "SIGTERM", [-1], [100_000], [signal.SIGKILL], ["x"], [True]])
def test_signals_that_cannot_be_caught_are_refused(bad: object) -> None:
    with pytest.raises(InvalidInputError, match="save_on"):
        SaveSignals(bad)  # users' mistake
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


# whole processes ---------------------------------------------------------------------------------

PRELUDE = """
import os, signal, sys, threading
import torch
from torch import nn
from deltackpt.checkpointer import Checkpointer
from deltackpt_store.errors import StateError

path, writer = sys.argv[1], sys.argv[2]
torch.manual_seed(0)
model = nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())

def train():
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def digest():
    return [float(p.double().sum()) for p in model.parameters()]
"""


def run_script(body: str, path: Path, writer: str, *, code: int = 0) -> str:
    """Run `body` after the prelude in a process of its own, to its end; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(path), writer],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("writer", "ending"),
    [("thread", ""), ("process", ""), ("process", "sys.exit(3)"), ("process", "train(); 1 / 0")],
)
def test_a_script_that_just_ends_keeps_its_last_save(
    tmp_path: Path, writer: str, ending: str
) -> None:
    """Prevents: the last save being cut off without a word when the interpreter ends."""
    # case 61
    body = f"""
    ckpt = Checkpointer(path, {{"model": model, "optimizer": optimizer}}, writer=writer)
    train()
    ckpt.save(1)
    train()
    ckpt.save(2)
    {ending}
    """
    code = {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    run_script(body, tmp_path / "store", writer, code=code)
    assert steps(tmp_path / "store") == [1, 2]
    saved(tmp_path / "store", 2)


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_save_that_is_not_even_staged_when_the_script_ends_is_finished(
    tmp_path: Path, writer: str
) -> None:
    # case 61
    body = """
    import atexit, time
    from deltackpt.stage import Packer
    gate, real = threading.Event(), Packer.copy

    def late(self, slot, at, data):
        gate.wait(60)
        time.sleep(0.2)  # much slower than an exit that does not wait
        real(self, slot, at, data)

    ckpt = Checkpointer(path, {"model": model, "optimizer": optimizer}, writer=writer)
    train()
    ckpt.save(1).result(60)
    train()
    Packer.copy = late
    save = ckpt.save(2)
    atexit.register(gate.set)  # runs before the exit hooks of what was imported earlier
    """
    run_script(body, tmp_path / "store", writer)
    assert steps(tmp_path / "store") == [1, 2]
    saved(tmp_path / "store", 2)


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_signals_at_any_moment_save_at_the_next_step(tmp_path: Path, writer: str) -> None:
    """Prevents: a handler that re-enters a save, deadlocks, or leaves it half made."""
    # case 62
    body = """
    import random
    from deltackpt import events

    class Watch:
        preempted, committed = [], []
        def on_event(self, event):
            if isinstance(event, events.Preempted):
                self.preempted.append(event.step)
            elif isinstance(event, events.Committed):
                self.committed.append(event.step)

    watch = Watch()
    state = {"model": model, "optimizer": optimizer}
    sent = 0
    stop = threading.Event()

    def shoot():
        global sent
        rng = random.Random(7)
        while sent < 200 or len(watch.preempted) < 8:
            if stop.wait(rng.random() * 0.004):
                return
            os.kill(os.getpid(), rng.choice([signal.SIGTERM, signal.SIGUSR1]))
            sent += 1

    with Checkpointer(path, state, writer=writer, every=7, observers=[watch],
                      save_on=(signal.SIGTERM, signal.SIGUSR1)) as ckpt:
        shooter = threading.Thread(target=shoot, daemon=True)
        shooter.start()
        step = 0
        while shooter.is_alive():
            train()
            pending = ckpt.should_save()
            save = ckpt.step(step)
            assert not pending or save is not None
            step += 1
        shooter.join()
        train()
        last = ckpt.step(step)
        assert ckpt.preempted
    assert len(watch.preempted) > 5
    assert set(watch.preempted) <= set(watch.committed)
    assert watch.committed == sorted(watch.committed)
    print(watch.committed[-1])
    """
    last = int(run_script(body, tmp_path / "store", writer))
    assert steps(tmp_path / "store")[-1] == last
    saved(tmp_path / "store", last)


def test_the_flag_can_be_polled_anywhere(tmp_path: Path) -> None:
    """Prevents: preemption during a long evaluation, where nobody looks at the flag."""
    # case 68
    ckpt = Checkpointer(
        tmp_path / "store", {"x": torch.zeros(1000)}, writer="thread", every=100, final=False,
        save_on=(signal.SIGUSR1,),
    )  # fmt: skip
    with ckpt:
        ckpt.step(1)
        for batch in range(10):  # an evaluation
            if batch == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if ckpt.should_save():
                assert ckpt.preempted
                ckpt.save(1)
                break
        assert batch == 3
        assert not ckpt.should_save()  # taken
        assert ckpt.step(2) is None
        assert ckpt.preempted  # for good: leave the loop
    assert steps(tmp_path / "store") == [1]
    told = " ".join((Checkpointer.should_save.__doc__ or "").split())
    assert "how often you save" in told


def test_a_fork_uses_nothing_of_its_parent_and_ends_normally(tmp_path: Path) -> None:
    """Prevents: a child that writes into its parent's channel, or hangs at its exit."""
    # case 64
    body = """
    import gc
    ckpt = Checkpointer(path, {"model": model, "optimizer": optimizer}, writer=writer,
                        save_on=(signal.SIGTERM,))
    train()
    ckpt.save(0)          # in flight while forking
    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            calls = [lambda: ckpt.save(9), lambda: ckpt.step(9), ckpt.wait, ckpt.lock, ckpt.close,
                     ckpt.__enter__, lambda: ckpt.should_save(1), lambda: ckpt.preempted,
                     lambda: ckpt.last]
            for call in calls:
                try:
                    call()
                except StateError as error:
                    assert error.kind == "forked" and "fork" in str(error), error
                else:
                    sys.exit(90)
            train()        # the inherited pre-hook does nothing
            if number % 2:
                del ckpt, calls, call
                gc.collect()
            sys.exit(5)    # a whole interpreter shutdown, exit hooks included
        children.append(pid)
    for pid in children:
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5, status
    train()
    ckpt.save(1).result(60)
    ckpt.close()
    """
    for writer in ("process", "thread"):
        run_script(body, tmp_path / writer, writer)
        assert steps(tmp_path / writer) == [0, 1]


def test_a_forked_child_does_not_wait_for_a_save_of_its_parent(tmp_path: Path) -> None:
    """Prevents: `Save.result()` in a child waits for ever for threads that only the parent has."""
    progress = SaveProgress("main", 1, lambda _: os._exit(91), 0.0)
    ended = SaveProgress("main", 0, lambda _: os._exit(92), 0.0)
    ended.fail(StorageError("gone", kind="io"))
    save, failed = Save(progress), Save(ended)

    def child() -> None:
        calls = (save.result, save.staged, save.done, lambda: save.result(0.0),
                 lambda: save.staged(60))  # fmt: skip
        for call in calls:
            with pytest.raises(StateError) as caught:
                call()
            assert caught.value.kind == "forked"
            assert "step 1" in str(caught.value)
        assert "main@1" in repr(save)
        assert save.skipped is None
        assert failed.done()
        with pytest.raises(StorageError, match="gone"):  # told here, and still to be told there
            failed.result()

    with progress._lock:  # pyright: ignore -- held by a thread that the child does not have
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            try:
                child()
            except BaseException:
                os._exit(1)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not save.done()


def test_forked_loader_workers_and_saves_get_along(tmp_path: Path) -> None:
    # case 64
    body = """
    from torch.utils.data import DataLoader
    loader = DataLoader(torch.arange(64.0).view(64, 1).expand(64, 256), batch_size=4,
                        num_workers=4, multiprocessing_context="fork")
    step = 0
    with Checkpointer(path, {"model": model, "optimizer": optimizer}, writer=writer, every=1,
                      save_on=(signal.SIGTERM,)) as ckpt:
        for epoch in range(2):
            for batch in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                ckpt.step(step)
                step += 1
    """
    run_script(body, tmp_path / "store", "process")
    assert steps(tmp_path / "store") == list(range(32))
