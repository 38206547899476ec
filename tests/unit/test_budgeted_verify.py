"""Prevents: a nightly verification that never comes round to some packs, whatever clocks say."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import pytest
from authors import Author
from command_line import run
from deltackpt_store import budgeted
from deltackpt_store.budgeted import Budget, Coverage
from deltackpt_store.check_log import _MAGIC, Check, CheckLog, _File  # pyright: ignore[reportPrivateUsage]
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.fileio import FileIO
from deltackpt_store.manifest_io import digest_of
from deltackpt_store.pack import pack_path
from deltackpt_store.store import Store
from deltackpt_store.testing import FailingIO
from deltackpt_store.verify import verify

PACKS = 9


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    store = Store.create(tmp_path / "store")
    author = Author(store, "main")
    for step in range(PACKS):
        author.save(step, [f"{step}"])
    author.close()
    return store


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock; the last one is now."""
    times = [1e9]
    real = budgeted.scrub_within.__kwdefaults__
    monkeypatch.setattr(
        budgeted.scrub_within, "__kwdefaults__", {**real, "clock": lambda: times[-1]}
    )
    return times


def some(store: Store, size: int = 1, **options: float) -> Coverage:
    report = verify(Store.open(store.path, io=store.io), budget=Budget(bytes=size), **options)
    assert report.coverage is not None
    return report.coverage


def numbers(store: Store) -> dict[str, int]:
    log = CheckLog(FileIO(), store.path, store.uuid)
    sizes = dict.fromkeys(store.packs.names(), 1024)
    return {n: c.number for n in sizes if (c := log.get(n, 1024)) is not None}


def test_every_pack_has_its_turn_before_any_has_its_second(store: Store) -> None:
    for turn in range(1, 2 * PACKS + 1):
        coverage = some(store)
        assert coverage.checked_packs == 1
        assert coverage.never_packs == max(0, PACKS - turn)
        assert coverage.ever_bytes == min(turn, PACKS) * 1024
        assert coverage.total_bytes == PACKS * 1024
    assert sorted(numbers(store).values()) == list(range(PACKS + 1, 2 * PACKS + 1))


def test_budgets_of_bytes_and_time(store: Store) -> None:
    assert some(store, 3 * 1024).checked_packs == 3
    report = verify(store, budget=Budget(seconds=0.0))
    assert report.coverage is not None
    assert report.coverage.checked_packs >= 1  # however little time
    report = verify(store, budget=Budget(seconds=1000.0))
    assert report.coverage is not None
    assert report.coverage.checked_packs == PACKS
    with pytest.raises(InvalidInputError):
        verify(store, budget=Budget(bytes=1), level="structure")


def test_wrong_clocks_skip_nothing(store: Store, times: list[float]) -> None:
    """A check dated in the year 2286 would else never be repeated."""
    mixture = random.Random(3)
    for turn in range(3 * PACKS):
        times.append(mixture.choice([0.0, -5e9, 1e9, 1e10, 1e10 + turn]))
        some(store)
    assert sorted(numbers(store).values()) == list(range(2 * PACKS + 1, 3 * PACKS + 1))


def test_coverage_tells_of_times_as_far_as_they_are_known(store: Store, times: list[float]) -> None:
    some(store, 4 * 1024)
    times.append(times[-1] + 3600)
    coverage = some(store, 1024, window=1800.0)
    assert (coverage.window_bytes, coverage.ever_bytes) == (1024, 5 * 1024)
    assert coverage.oldest == times[0]
    times.append(0.0)  # the clock has gone back: nothing is known to be recent
    coverage = some(store, 1024, window=1800.0)
    assert (coverage.window_bytes, coverage.oldest) == (1024, None)


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped", "of another store", "a directory"])
def test_a_lost_or_damaged_log_starts_over(store: Store, harm: str) -> None:
    some(store, 5 * 1024)
    path = Path(store.path, "cache/verified")
    data = path.read_bytes()
    path.unlink()
    if harm == "cut":
        path.write_bytes(data[:-7])
    elif harm == "flipped":
        path.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:])
    elif harm == "of another store":
        other = CheckLog(FileIO(), store.path, b"x" * 16)
        other.checked({store.packs.names()[0]: 1024}, 1.0, ())
        other.keep()
    elif harm == "a directory":
        path.mkdir()
    coverage = some(store)
    assert coverage.never_packs == PACKS - 1
    if harm != "a directory":
        assert coverage.remembered == str(path)


def test_a_store_that_cannot_be_written_is_remembered_elsewhere(
    store: Store, tmp_path: Path
) -> None:
    class ReadOnly(FileIO):
        def create(self, path: str, mode: int = 0o666) -> int:
            if path.startswith(store.path):
                raise OSError(30, os.strerror(30), path)
            return super().create(path, mode)

    locked = Store.open(store.path, io=ReadOnly())
    first = some(locked)
    if first.remembered is None:  # root may write everywhere: no other place was looked for
        assert "Read-only" in first.problem
    else:
        assert first.remembered.startswith(str(tmp_path / "user"))
        assert some(locked).never_packs == PACKS - 2
    nowhere = Store.open(
        store.path, io=FailingIO(number=30, persistent=True, fail_at=1, calls=("create",))
    )
    coverage = some(nowhere)
    assert coverage.remembered is None
    assert "Read-only" in coverage.problem


def test_known_damage_is_read_again_and_does_not_stop_the_round(store: Store) -> None:
    bad = store.packs.names()[4]
    entries = store.index().entries(bad)
    assert entries is not None
    path = pack_path(store.path, bad)
    data = bytearray(Path(path).read_bytes())
    data[entries.location(bad, 0).payload] ^= 1
    Path(path).write_bytes(data)
    for turn in range(2 * PACKS):
        report = verify(store, budget=Budget(bytes=1))
        seen = turn >= 4
        assert report.ok is not seen
        if seen:
            assert [hit.step for finding in report.findings for hit in finding.hits] == [4]
    known = sorted(numbers(store).values())
    assert known[-1] - known[0] < 2 * PACKS, "each turn read the bad one, and another one"


def test_packs_that_are_gone_are_forgotten_and_new_ones_come_first(store: Store) -> None:
    some(store, 1 << 30)
    author = Author(store, "later")
    author.save(1, ["fresh"])
    author.close()
    coverage = some(store)
    assert (coverage.checked_packs, coverage.never_packs) == (1, 0)
    log = CheckLog(FileIO(), store.path, store.uuid)
    log.keep(store.packs.names()[:2])
    assert len(numbers(store)) == 2


def test_two_at_once_lose_nothing(store: Store) -> None:
    names = store.packs.names()
    one, other = (CheckLog(FileIO(), store.path, store.uuid) for _ in range(2))
    one.checked({names[0]: 1024}, 1.0, ())
    other.checked({names[1]: 1024}, 1.0, ())
    one.keep(names)
    other.keep(names)
    assert set(numbers(store)) == {names[0], names[1]}


ODD = [
    {"number": 2**64 - 1}, {"number": 2**63}, {"number": 0}, {"number": -7},
    {"at": -1e300}, {"at": 1e300}, {"at": float("nan")}, {"at": float("inf")}, {"bytes": -1},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_an_impossible_check_counts_as_none(store: Store, odd: dict[str, float]) -> None:
    """Prevents: a well-sealed file with numbers that no check has ends every verification."""
    some(store, 1 << 30)
    checks = {
        name: Check(**{"number": 1, "at": 1e9, "bytes": size, **odd})  # pyright: ignore[reportArgumentType]
        for name, size in ((n, os.path.getsize(store.packs.path(n))) for n in store.packs.names())
    }
    body = _MAGIC + msgspec.msgpack.encode(_File(store.uuid, checks))
    Path(f"{store.path}/cache/verified").write_bytes(body + digest_of(body))
    for bare in ("10", "1h30", "0.5"):
        refused = run("verify", store.path, "--budget", bare)
        assert refused.exit_code == 2, "seconds, or bytes?"
        assert "say the unit" in refused.stderr
    done = run("verify", store.path, "--budget", "1GB")
    assert done.exit_code == 0, done.output
    assert sorted(numbers(store).values()) == [1] * PACKS
