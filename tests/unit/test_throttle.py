"""Prevents: a bound on reading and writing that does not bound, or loses calls on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.fileio import FileIO
from deltackpt_store.testing import CALLS, FailingIO
from deltackpt_store.throttle import BURST_SECONDS, ThrottledIO, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def bucket(rate: float) -> tuple[TokenBucket, Clock]:
    clock = Clock()
    return TokenBucket(rate, clock=clock, sleep=clock.sleep), clock


def test_what_is_taken_at_once_takes_its_time() -> None:
    tokens, clock = bucket(1000)
    for _ in range(10):
        tokens.take(500)
    assert clock.now == pytest.approx(105.0)


def test_pauses_give_no_more_than_a_burst() -> None:
    tokens, clock = bucket(1000)
    clock.now += 1000
    tokens.take(int(1000 * BURST_SECONDS))
    assert not clock.slept
    tokens.take(1000)
    assert clock.slept == [pytest.approx(1.0)]


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_is_a_positive_number(rate: float) -> None:
    with pytest.raises(InvalidInputError):
        TokenBucket(rate)


def test_bytes_are_counted_both_ways(tmp_path: Path) -> None:
    tokens, clock = bucket(100)
    io = ThrottledIO(FileIO(), tokens)
    handle = io.create(str(tmp_path / "file"))
    assert io.write(handle, [b"x" * 100, memoryview(b"y" * 50)], 0) == 150
    io.close(handle)
    handle = io.open(str(tmp_path / "file"))
    data = bytearray(200)
    assert io.read_into(handle, [data], 0) == 150  # only what was there counts
    io.close(handle)
    assert tokens.taken == 300
    assert clock.now == pytest.approx(103.0)


def test_every_call_goes_to_the_layer_below(tmp_path: Path) -> None:
    """A method that a file layer gains must not go around the one that is wrapped."""
    handle = FileIO().create(str(tmp_path / "open"))  # closed whatever close reports
    for call in CALLS:
        inner = FailingIO(number=5, fail_at=1, calls=[call])
        io = ThrottledIO(inner, bucket(1e9)[0])
        arguments = {
            "write": (1, [b""], 0), "read_into": (1, [bytearray(1)], 0),
            "link": ("a", "b"), "replace": ("a", "b"), "chmod": ("a", 0), "sync": (-1,),
            "close": (handle,), "size": (-1,),
        }  # fmt: skip
        with pytest.raises(OSError, match="Input/output error") as caught:
            getattr(io, call)(*arguments.get(call, (str(tmp_path / "x"),)))
        assert inner.failed == 1, (call, caught.value)
