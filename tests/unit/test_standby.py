"""A writer process started ahead: it is there for the first save, and harmless without one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltackpt_store import client, launch
from deltackpt_store.client import WriterClient
from deltackpt_store.connection import Connection
from deltackpt_store.errors import InvalidInputError, WriterError
from deltackpt_store.standby import Standby
from processes import ended
from saving import Opener, Training, opener, saved, steps

from deltackpt.checkpointer import Checkpointer


@pytest.fixture
def opened(path: Path) -> Iterator[Opener]:
    with opener(path) as open_one:
        yield lambda state, **options: open_one(state, **{"writer": "process", **options})


def started_ahead(ckpt: Checkpointer) -> int:
    """The process that the checkpointer has started ahead; waits for it."""
    link = ckpt._pipeline._link
    deadline = time.monotonic() + 60
    while link._standby is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process = link._standby._process
    assert process is not None
    return process.pid


def test_the_first_optimizer_step_starts_the_writer_of_the_first_save(
    path: Path, opened: Opener
) -> None:
    training = Training()
    ckpt = opened(training.objects)
    assert not ckpt._pipeline._threads  # nothing is started for who only looks
    training.step()
    pid = started_ahead(ckpt)
    training.step()
    ckpt.save(0).result(60)
    client = ckpt._pipeline._link._client
    assert client is not None
    assert client.writer_pid == pid
    assert ckpt._pipeline._link._standby is None
    training.step()
    assert ckpt._pipeline._link._standby is None  # one is enough
    assert saved(path, 0)["model"].keys() == training.model.state_dict().keys()


def test_until_the_first_save_it_holds_nothing_of_the_run(path: Path, opened: Opener) -> None:
    """Prevents: a process that only trains, beside the one that saves, locking it out."""
    training = Training()
    waiting = opened(training.objects, lock_timeout=0.0)
    training.step()
    pid = started_ahead(waiting)
    held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    assert not [name for name in held if name.startswith(str(path))]
    saving = opened(training.objects, lock_timeout=0.0)
    saving.save(0).result(60)
    saving.close()
    assert steps(path) == [0]


def test_closing_without_a_save_ends_it(opened: Opener) -> None:
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    pid = started_ahead(ckpt)
    ckpt.close()
    with pytest.raises(ChildProcessError):  # it has ended and is no zombie
        os.waitpid(pid, os.WNOHANG)


def test_steps_after_close_start_nothing(opened: Opener) -> None:
    training = Training()
    ckpt = opened(training.objects)
    ckpt.close()
    training.step()
    ckpt._guard.lock()
    assert not ckpt._pipeline._threads


def test_one_that_died_is_not_used(path: Path, opened: Opener) -> None:
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    pid = started_ahead(ckpt)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    ckpt.save(0).result(60)
    assert steps(path) == [0]


def test_one_that_dies_while_it_is_taken_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: saves of a dead writer that wait until their time is over."""

    class Late(Connection):
        """All that a started thread does is done before its caller goes on."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if self._receiver.ident is not None:
                self._receiver.join(60)

    monkeypatch.setattr(client, "Connection", Late)
    standby = Standby()
    assert standby._process is not None
    os.kill(standby._process.pid, signal.SIGKILL)
    with WriterClient(
        path, "main", seed=1, ring_bytes=1 << 20, mode="process", standby=standby
    ) as writer:
        with pytest.raises(WriterError, match="SIGKILL"):
            writer.ready(60)
        assert not writer.alive
        with pytest.raises(WriterError):
            writer.begin(step=0, layout=b"")
    standby.end()


def test_where_none_can_be_started_the_save_tells(
    path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    training = Training()
    ckpt = opened(training.objects)
    with monkeypatch.context() as patch:
        patch.setattr(launch.subprocess, "Popen", refuse)
        training.step()
        with pytest.raises(WriterError, match="cannot start"):
            ckpt.save(0).result(60)
    ckpt.save(0).result(60)
    assert steps(path) == [0]


def test_a_thread_is_not_started_ahead(path: Path, opened: Opener) -> None:
    training = Training()
    ckpt = opened(training.objects, writer="thread")
    training.step()
    ckpt.save(0).result(60)
    assert ckpt._pipeline._link._standby is None
    standby = Standby()
    with pytest.raises(InvalidInputError, match="ahead"):
        WriterClient(path, "other", seed=1, ring_bytes=1 << 20, mode="thread", standby=standby)
    standby.end()


def test_a_forked_child_lets_go_of_it() -> None:
    standby = Standby()
    process = standby._process
    assert process is not None

    def identity(fd: int) -> tuple[int, int]:
        status = os.fstat(fd)  # names do not tell memory files apart
        return status.st_dev, status.st_ino

    before = {identity(standby.socket.fileno()), identity(standby._memory)}
    child = os.fork()
    if child == 0:
        there: set[tuple[int, int]] = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # of the listing itself
                there.add(identity(int(name)))
        standby.end()  # not a child of this one: left alone
        os._exit(7 if before & there else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert standby.alive
    standby.end()
    standby.end()
    assert not standby.alive


@pytest.mark.parametrize("how", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(0)"])
def test_it_ends_with_its_trainer(path: Path, how: str) -> None:
    """Prevents: idle writers that pile up on a node as jobs come and go."""
    script = f"""
import os, sys, time, torch
from deltackpt import Checkpointer
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer({str(path)!r}, {{"model": model, "optimizer": optimizer}})
model(torch.ones(3)).sum().backward()
optimizer.step()
while ckpt._pipeline._link._standby is None:
    time.sleep(0.005)
print(ckpt._pipeline._link._standby._process.pid, flush=True)
{how}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout, done.stderr
    assert ended(int(done.stdout))
