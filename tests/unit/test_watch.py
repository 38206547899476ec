"""`watch`: what is seen of a training that saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run
from deltackpt_tools import watching
from deltackpt_tools.watching import look, watch
from small_store import SmallStore, pattern

STATS = {"stall_seconds": 0.01, "staged_seconds": 0.02, "writer_seconds": 0.5,
         "staged_bytes": 4096.0, "skipped": 2.0}  # fmt: skip


def test_the_newest_save_of_every_run(small: SmallStore) -> None:
    small.save("old", 1, {"w": pattern(2000)})
    first = small.save("main", 5, {"w": pattern(2000)}, stats=STATS)
    second = small.save("main", 6, {"w": pattern(2000)}, stats=STATS, metrics={"loss": 0.5})
    state = look(small.path, now=second.created + 30)
    newest, older = state.runs
    assert (newest.run, newest.step, newest.saves, older.run) == ("main", 6, 2, "old")
    assert newest.age == pytest.approx(30)
    assert newest.interval == pytest.approx(second.created - first.created)
    assert (newest.stall, newest.staged, newest.durable) == (0.01, 0.02, 0.5)
    assert (newest.staged_bytes, newest.skipped, newest.metrics) == (4096, 2, {"loss": 0.5})
    assert older.stall is None
    assert state.in_flight_bytes == 0


def test_bytes_in_flight_and_the_writer_are_seen(small: SmallStore) -> None:
    small.save("main", 1, {"w": pattern(2000)})
    folder = next(path for path in (Path(small.path) / "packs").iterdir())
    (folder / ".tmp-0123456789ab-x.pack").write_bytes(b"x" * 5000)
    lock = Path(small.path) / "runs" / "main" / ".lock"
    lock.write_text(json.dumps({"pid": 17, "host": "node3"}))
    state = look(small.path)
    assert state.in_flight_bytes == 5000
    assert state.runs[0].writer == "17@node3"
    lock.write_text("not json")
    assert look(small.path).runs[0].writer is None


def test_watching_tells_of_every_new_step(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look that finds nothing new is followed by a save, instead of by time going by."""
    small.save("main", 1, {"w": pattern(2000)})
    steps = iter(range(2, 5))

    class Clock:
        @staticmethod
        def time() -> float:
            return 0.0

        @staticmethod
        def sleep(seconds: float) -> None:
            assert seconds == 0.25
            small.save("main", next(steps), {"w": pattern(2000)})

    monkeypatch.setattr(watching, "time", Clock)
    seen = []
    for state in watch(small.path, poll=0.25):
        seen.append(state.runs[0].step)
        if len(seen) == 4:
            break
    assert seen == [1, 2, 3, 4]


def test_text(small: SmallStore) -> None:
    small.save("main", 6, {"w": pattern(2000)}, stats=STATS, metrics={"loss": 0.5})
    result = run("watch", small.path, "--once")
    head, titles, row = result.output.splitlines()
    assert head.endswith("1 run, nothing in flight")
    assert titles.split()[:3] == ["run", "step", "saved"]
    assert row.startswith(" ".join(["main"]))
    for word in ("10 ms", "20 ms", "500 ms", "4.1 kB", "loss=0.5"):
        assert word in row


def test_an_empty_store_and_a_run_that_is_not_there(small: SmallStore) -> None:
    assert look(small.path).runs == ()
    assert run("watch", small.path, "nobody", "--once").exit_code == 2
