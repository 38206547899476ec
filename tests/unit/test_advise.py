"""`advise`: the interval is checked against a search for the least waste, and against figures
computed by hand from the published formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import run
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.history import ancestors_after
from deltackpt_store.manifest import Commit
from deltackpt_tools.advice import Advice, advise, daly, from_commits, waste, young
from deltackpt_tools.base_interval import base_interval
from deltackpt_tools.output import small_percent
from deltackpt_tools.quantities import parse_duration, parse_share
from small_store import SmallStore, pattern


def commits(count: int, *, every: int, seconds: float, **stats: float) -> list[Commit]:
    """Commits as a run leaves them that saves every `every` steps of `seconds` each."""
    made: list[Commit] = []
    for i in range(count):
        parent = made[-1] if made else None
        made.append(
            Commit(
                run="main", number=i + 1, step=i * every, manifest=b"m", base=None, root=b"r",
                parent=None if parent is None else ("main", parent.number, b"d"), closure=b"c",
                writer="w", nonce=b"n", generation=0, created=1000.0 + i * every * seconds,
                versions={}, ancestors=ancestors_after(parent, "main"),
                stats={"stall_seconds": 2.0, "staged_seconds": 3.0, "writer_seconds": 10.0,
                       "encode_seconds": 3.0, "flush_seconds": 4.0, "written_bytes": 8e6,
                       "skipped": 0.0, **stats},
            )
        )  # fmt: skip
    return made


def advice(made: list[Commit], **options: Any) -> Advice:
    chosen = {"mtbf": 3600.0, "overhead": None, "restore": 20.0, "measured": False, **options}
    return from_commits(made, store="s", **chosen)


def test_young_and_daly_are_the_published_formulas() -> None:
    # By hand: sqrt(2 * 2 * 3600) = 120; C / 2M = 2 / 7200.
    assert young(2, 3600) == pytest.approx(120.0)
    assert daly(2, 3600) == pytest.approx(120 * (1 + 0.0166666667 / 3 + 0.000277778 / 9) - 2)
    assert daly(10, 4) == 4  # a stall longer than twice the time between failures


@pytest.mark.parametrize("stall", [0.01, 0.5, 5.0])
@pytest.mark.parametrize("mtbf", [600.0, 21600.0, 1e6])
def test_the_interval_wastes_least(stall: float, mtbf: float) -> None:
    """Found again by trying ten thousand intervals."""
    tried = [math.exp(x / 500) * 1e-2 for x in range(10000)]
    best = min(tried, key=lambda t: waste(t, stall, 3.0, 20.0, mtbf))
    assert young(stall, mtbf) == pytest.approx(best, rel=0.01)
    at_advice = waste(daly(stall, mtbf), stall, 3.0, 20.0, mtbf)
    assert at_advice <= waste(best, stall, 3.0, 20.0, mtbf) * 1.05


def test_the_present_interval_is_told_apart_from_the_best() -> None:
    found = advice(commits(30, every=10, seconds=3.0))
    assert (found.interval, found.every, found.step_seconds) == (30.0, 10, 3.0)
    assert found.lost == 30 / 2 + 10 + 20
    assert found.waste == pytest.approx(2 / 30 + (15 + 10 + 20) / 3600)
    assert found.bound == "failures"
    assert found.best_every == math.ceil(daly(2, 3600) / 3)
    assert found.best_interval == found.best_every * 3.0
    assert found.best_waste < found.waste


def test_overhead_and_durability_bound_the_interval() -> None:
    bounded = advice(commits(30, every=1, seconds=1.0), overhead=0.01)
    assert (bounded.bound, bounded.best_interval) == ("overhead", 200.0)
    slow = advice(commits(30, every=1, seconds=1.0, writer_seconds=500.0))
    assert (slow.bound, slow.best_interval) == ("durability", 500.0)


def test_pauses_between_sessions_do_not_count() -> None:
    """A night between two sessions must not look like a save every ten hours."""
    first, second = commits(10, every=5, seconds=2.0), commits(10, every=5, seconds=2.0)
    later = [
        msgspec.structs.replace(
            c, created=c.created + 40000, step=c.step + 50, number=c.number + 10
        )
        for c in second
    ]
    assert advice(first + later).interval == 10.0


def test_storage_and_ring_are_judged() -> None:
    good = advice(commits(10, every=10, seconds=3.0))
    assert (good.storage_keeps_up, good.ring_keeps_up) == (True, True)
    assert good.writer_busy == pytest.approx(7 / 30)
    assert good.write_speed == 2e6
    assert advice(commits(10, every=1, seconds=7.5)).storage_keeps_up is False
    skipping = advice(commits(10, every=10, seconds=3.0, skipped=1.0))
    assert (skipping.storage_keeps_up, skipping.skipped) == (False, 10)
    assert advice(commits(10, every=10, seconds=3.0, staged_seconds=9.5)).ring_keeps_up is False


def store_with(path: Path, saves: int) -> SmallStore:
    small = SmallStore(path)
    parent = None
    for step in range(saves):
        parent = small.save(
            "main", step, {"w": pattern(50_000, step)}, parent=parent,
            stats={"stall_seconds": 0.01, "staged_seconds": 0.02, "encode_seconds": 0.1,
                   "flush_seconds": 0.2, "writer_seconds": 0.5},
        )  # fmt: skip
    small.close()
    return small


def test_a_restore_is_measured_by_reading(tmp_path: Path) -> None:
    small = store_with(tmp_path / "store", 3)
    seen: list[tuple[int, int | None]] = []
    found = advise(small.path, mtbf=3600, progress=lambda *a: seen.append(a))
    assert found.restore_measured
    assert found.restore > 0
    assert seen[-1] == (200_000, 200_000)
    given = advise(small.path, mtbf=3600, restore=7)
    assert (given.restore, given.restore_measured) == (7, False)


def test_text(tmp_path: Path) -> None:
    small = store_with(tmp_path / "store", 3)
    output = run("advise", small.path, "--mtbf", "1h", "--restore", "20s")
    lines = output.output.splitlines()
    assert lines[:5] == [
        "run main: medians of 3 saves",
        "  stall     10 ms for each save",
        "  durable   500 ms after a save begins",
        "  restore   20.00 s (given)",
        "  failures  one in 60.0 min (given)",
    ]
    assert "Young 1974 says 8.49 s, Daly 2006 8.48 s" in output.output


def test_too_few_saves_and_bad_options_are_refused(tmp_path: Path) -> None:
    small = store_with(tmp_path / "store", 1)
    with pytest.raises(InvalidInputError, match="2 are needed"):
        advise(small.path, mtbf=3600)
    for arguments in (["--mtbf", "soon"], ["--mtbf", "6h", "--overhead", "200%"], []):
        assert run("advise", small.path, *arguments).exit_code == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45m", 2700), ("6h", 21600), ("1d12h", 129600), ("1h 30min", 5400),
     ("250ms", 0.25), ("1.5h", 5400)],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "6 hours ago", "-3s", "1h,2m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)


def test_shares() -> None:
    assert parse_share("2%") == pytest.approx(0.02)
    assert parse_share("0.02") == pytest.approx(0.02)
    for text in ("0", "1", "150%", "x%"):
        with pytest.raises(ValueError, match="no share"):
            parse_share(text)


def test_the_base_interval_is_the_one_that_costs_least() -> None:
    """Found again by adding up every interval to a hundred."""
    base, growth = 1000, 20
    manifests = [(i % 5 == 0, base if i % 5 == 0 else growth * (i % 5)) for i in range(50)]
    found = base_interval(manifests)

    def mean(n: int) -> float:
        return (base + sum(growth * k for k in range(1, n))) / n

    assert found.best == min(range(1, 100), key=mean)
    assert found.best_bytes == pytest.approx(mean(found.best or 0))
    assert (found.saves, found.bases, found.present) == (50, 10, 5.0)
    assert base_interval([(True, 100)] * 4).best is None


def test_shares_are_printed_without_powers_of_ten() -> None:
    shares = (None, 0.000042, 0.123, 0.9951, 1.124, 20.0)
    printed = ["-", "0.0042 %", "12 %", "100 %", "112 %", "2000 %"]
    assert [small_percent(share) for share in shares] == printed
