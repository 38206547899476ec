"""The compact command: what it tells, its options, its exit codes, and watching."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from authors import Author
from click.testing import Result
from command_line import run
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.retention import Keep, apply
from deltackpt_store.store import Store
from deltackpt_tools import command_compact
from deltackpt_tools.quantities import parse_rate

WORDS = ["a", "b", "c"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    store = Store.create(tmp_path / "store")
    author = Author(store, "main", codec="small")
    for step in range(6):
        author.save(step, [f"{word}~{step}" if step else word for word in WORDS])
    author.close()
    apply(store, "main", Keep(last=2))
    collect(store)
    return store.path


def compacted(*arguments: str) -> Result:
    return run("compact", *arguments)


def test_it_tells_what_it_does(path: str) -> None:
    plan = compacted(path, "--dry-run")
    assert plan.exit_code == 0
    packs = len(Store.open(path).packs.names())
    assert plan.output.splitlines()[0].startswith("main@5 would become a base: it took 2 packs (")
    assert plan.output.splitlines()[1:] == [
        "would rewrite 6 chunks: 3 by themselves, 3 against a new base, 0 as they were",
        f"would remove {packs} packs",
    ]
    assert "main: no new base is due" in compacted(path, "--when-ratio", "9", "--dry-run").output
    done = compacted(path, "--max-rate", "100MB/s")
    assert done.exit_code == 0
    first, second, third, last = done.output.splitlines()
    assert first.startswith("main@5 is a base now: it took 2 packs (")
    assert "now 1 pack (" in first
    assert second == "rewrote 6 chunks: 3 by themselves, 3 against a new base, 0 as they were"
    assert third == f"removed {packs} packs"
    assert last.startswith(f"packs {packs} -> 1, ")
    assert "2 steps need fewer packs" in last
    assert compacted(path).output == "nothing to do\n"


def test_json(path: str) -> None:
    document = json.loads(compacted(path, "--json").stdout)
    assert (document["chunks_own"], document["chunks_recoded"]) == (3, 3)
    assert document["packs_after"] == 1
    assert document["bases"][0]["packs_after"] == 1
    assert json.loads(compacted(path, "--json").stdout)["nothing"] is True


def test_exit_codes(path: str, tmp_path: Path) -> None:
    assert compacted(path, "--run", "nobody").exit_code == 2
    assert compacted(path, "--max-rate", "fast").exit_code == 2
    assert compacted(path, "--min-live-share", "2").exit_code == 2
    assert compacted(str(tmp_path)).exit_code == 10
    io = FileIO()
    handle = io.lock(f"{path}/gc/compact.lock", create=True)
    busy = compacted(path, "--json")
    assert busy.exit_code == 11
    assert json.loads(busy.stdout)["error"]["kind"] == "compaction-running"
    io.close(handle)
    for pack in Path(path).glob("packs/*/*"):
        data = bytearray(pack.read_bytes())
        data[200] ^= 1
        pack.write_bytes(data)
    assert compacted(path).exit_code == 12


def test_watch_goes_on_after_a_round_that_found_somebody_else(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FileIO()
    locks = [io.lock(f"{path}/gc/compact.lock", create=True)]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if locks:
            io.close(locks.pop())
        if len(slept) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(command_compact.time, "sleep", sleep)
    result = compacted(path, "--watch", "--interval", "90s")
    assert result.exit_code == 130
    assert slept == [90.0] * 4
    assert "another compaction runs" in result.stderr
    assert result.stdout.count("is a base now") == 1
    assert "nothing to do" not in result.stdout


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50MB/s", 5e7), ("200 MiB/s", 200 << 20), ("1500000B", 1.5e6), ("0.5g", 5e8), ("2kb/s", 2e3)],
)  # fmt: skip
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0MB/s", "-5MB", "5 furlongs", "5MB/h"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0", "50", "50/s"])
def test_a_rate_says_its_unit(text: str) -> None:
    """Prevents: ``--max-rate 50`` compacts at 50 bytes a second, for days."""
    with pytest.raises(ValueError, match="lacks the unit"):
        parse_rate(text)


def test_progress_is_counted_to_its_end(path: str) -> None:
    from deltackpt_store.compact import compact

    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> Any:
        seen.append((done, total))

    compact(Store.open(path), progress=progress)
    assert seen[-1][0] == seen[-1][1] > 0
