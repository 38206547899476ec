"""Prevents: writes out of order, or after one that has failed."""

from __future__ import annotations

import pytest
from deltackpt_store.io_thread import IoThread


def test_jobs_run_in_order_and_stop_at_the_first_failure() -> None:
    done: list[int] = []
    thread = IoThread("t", depth=3)

    def job(n: int) -> None:
        if n == 5:
            raise ValueError("five")
        done.append(n)

    for n in range(100):
        thread.submit(lambda n=n: job(n))
    with pytest.raises(ValueError, match="five"):
        thread.drain()
    assert done == [0, 1, 2, 3, 4]
    thread.reset()
    thread.submit(lambda: job(6))
    thread.drain()
    assert done[-1] == 6
    thread.stop()
    thread.submit(lambda: job(7))  # starts again
    thread.drain()
    assert done[-1] == 7
    thread.stop()


def test_without_a_thread_jobs_run_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """At interpreter exit no thread can start; the last save still has to happen."""

    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    thread = IoThread("t")
    done: list[int] = []
    thread.submit(lambda: done.append(1))
    assert done == [1]
    thread.drain()
    thread.stop()
