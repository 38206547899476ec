"""`log --stat` and `log --graph`, as text and as values."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command_line import run
from deltackpt_tools.history_graph import graph
from deltackpt_tools.history_stat import changed_bytes as history_changed
from deltackpt_tools.history_stat import codec_shares, durable_seconds
from deltackpt_tools.logbook import LoggedStep, Parent, log
from deltackpt_tools.output import seconds
from small_store import SmallStore, pattern


def entry(name: str, parent: str | None, made: float) -> LoggedStep:
    """A commit called `name`, which continues `parent`."""
    of, number = name[0], int(name[1:])
    above = None if parent is None else Parent(parent[0], int(parent[1:]), None, parent)
    return LoggedStep(
        of, number, number, made, name, "", "", None, above, True, (), None, None, {}, {}, {}
    )


def drawn(*entries: LoggedStep) -> list[str]:
    return graph(entries, lambda one: one.digest)


def test_one_run_is_one_line() -> None:
    assert drawn(entry("a1", None, 1), entry("a2", "a1", 2)) == ["*  a2", "*  a1"]


def test_a_fork_leaves_the_line_it_continues() -> None:
    assert drawn(
        entry("a1", None, 1), entry("a2", "a1", 2), entry("b3", "a1", 3), entry("a4", "a2", 4)
    ) == [
        "*  a4",
        "| *  b3",
        "* |  a2",
        "|/",
        "*  a1",
    ]  # fmt: skip


def test_two_forks_from_one_step() -> None:
    assert drawn(
        entry("a1", None, 1), entry("b2", "a1", 2), entry("c3", "a1", 3), entry("a4", "a1", 4)
    ) == [
        "*  a4",
        "| *  c3",
        "| | *  b2",
        "| |/",
        "|/",
        "*  a1",
    ]  # fmt: skip


def test_wrong_clocks_do_not_put_a_step_before_its_parent() -> None:
    lines = drawn(entry("a1", None, 900), entry("a2", "a1", 5), entry("a3", "a2", 7))
    assert lines == ["*  a3", "*  a2", "*  a1"]


def test_wrong_clocks_do_not_reorder_a_run_with_gaps() -> None:
    gap = ":  (continues a step that was removed)"
    entries = entry("a1", None, 900), entry("a3", "a2", 5), entry("a5", "a4", 7)
    assert drawn(*entries) == ["*  a5", gap, "*  a3", gap, "*  a1"]


def test_what_retention_removed_is_shown_as_a_gap() -> None:
    assert drawn(entry("a5", "a4", 5)) == ["*  a5"]  # nothing older is left
    assert drawn(entry("a5", "a4", 5), entry("a1", None, 1)) == [
        "*  a5", ":  (continues a step that was removed)", "*  a1"
    ]  # fmt: skip


def test_graph_of_a_store(small: SmallStore) -> None:
    first = small.save("main", 1, {"w": pattern(2000)}, metrics={"loss": 2.0})
    small.save("main", 2, {"w": pattern(2000, 1)}, parent=first)
    small.save("fork", 3, {"w": pattern(2000, 2)}, parent=first)
    small.store.pin("best", first)
    text = re.sub(r"\d{4}-\S+ \S+Z", "TIME", run("log", small.path, "--graph").output)
    assert text.splitlines() == [
        "*  fork@3  TIME    8.1 kB  -  fork of main@1",
        "| *  main@2  TIME    8.1 kB  -",
        "|/",
        "*  main@1  TIME    8.1 kB  loss=2  pin best",
    ]
    assert run("log", small.path, "--graph", "--stat").exit_code == 2


STATS = {
    "changed_bytes": 3000.0, "staged_bytes": 4000.0, "dedup_bytes": 1000.0, "stall_seconds": 0.012,
    "staged_seconds": 0.25, "writer_seconds": 1.5, "codec.raw.raw_bytes": 1000.0,
    "codec.planes.raw_bytes": 3000.0, "codec.raw.written_bytes": 1000.0, "written_bytes": 1800.0,
}  # fmt: skip


def test_stat_shows_what_the_commit_recorded(small: SmallStore) -> None:
    small.save("main", 7, {"w": pattern(2000)}, stats=STATS, metrics={"loss": 2.0})
    lines = run("log", small.path, "--stat").output.splitlines()
    assert lines == [
        "run main: 1 step, newest 7",
        "  step   state  changed  staged     new  dedup  codecs              stall  staged in"
        "  durable in  metrics  note",
        "     7  8.0 kB   3.0 kB  4.0 kB  1.8 kB    25%  planes 75% raw 25%  12 ms     250 ms"
        "      1.50 s  loss=2",
    ]


def test_what_was_not_recorded_is_a_dash(small: SmallStore) -> None:
    small.save("main", 7, {"w": pattern(2000)})
    assert run("log", small.path, "--stat").output.splitlines()[2].split() == [
        "7", "8.0", "kB", "-", "-", "8.1", "kB", "-", "-", "-", "-", "-", "-"
    ]  # fmt: skip


def test_figures_from_stats() -> None:
    assert codec_shares(STATS) == {"planes": 0.75, "raw": 0.25}
    assert durable_seconds(STATS) == 1.5
    assert durable_seconds({"encode_seconds": 1.0, "flush_seconds": 2.0}) == 3.0
    assert durable_seconds({"writer_seconds": 0.1, "staged_seconds": 0.3}) == 0.3
    assert durable_seconds({}) is None
    assert [seconds(v) for v in (None, 0.0123, 2.5, 300, 7200)] == [
        "-", "12 ms", "2.50 s", "5.0 min", "2.0 h"
    ]  # fmt: skip


def test_python_tells_the_same(small: SmallStore) -> None:
    small.save("main", 7, {"w": pattern(2000)}, metrics={"loss": 2.0})
    document = json.loads(run("log", small.path, "--json").stdout)
    del document["format"]
    assert document == json.loads(json.dumps(log(small.path).to_dict()))
    assert log(small.path).to_dataframe()["metrics.loss"].tolist() == [2.0]


def test_small_tensors_and_values_that_changed_are_counted(tmp_path: Path) -> None:
    """Prevents: "0 B changed" of a step that is another one."""
    import torch

    import deltackpt

    def changed(at: int) -> list[float]:
        run_ = log(tmp_path / "store").runs[0]
        return [history_changed(entry.stats) or 0.0 for entry in run_.commits[::-1]][at:]

    state = {"bias": torch.zeros(5), "big": torch.zeros(100_000), "note": {"epoch": 0}}
    with deltackpt.Checkpointer(tmp_path / "store", state, rng=False, writer="thread") as ckpt:
        ckpt.save(0).result()
        ckpt.save(1).result()
        state["bias"] += 1
        ckpt.save(2).result()
        state["note"] = {"epoch": 1}
        ckpt.save(3).result()
    first, same, small, value = changed(0)
    assert first > 400_020
    assert same == 0
    assert small == 20
    assert 0 < value < 100
    with deltackpt.Checkpointer(tmp_path / "store", state, rng=False, writer="thread") as ckpt:
        ckpt.restore()
        ckpt.save(4).result()
    assert changed(4) == [0]
    row = run("log", tmp_path / "store", "--stat", "-n", "3").output.splitlines()[4].split()
    assert row[3:5] == ["20", "B"]


def test_a_view_is_not_spoilt_by_its_metrics(small: SmallStore) -> None:
    """Prevents: one metric with a name of 5,000 characters that makes the table unreadable."""
    odd = {"n" * 5000: 1e308, "x\x1b[1m" * 40: -1e-300, "nan": float("nan")}
    many = {f"m{i}": float(i) for i in range(300)}
    small.save("main", 1, {"w": pattern(2000)}, metrics=odd)
    small.save("main", 2, {"w": pattern(2000)}, metrics=many)
    for words in (["log"], ["log", "--stat"], ["log", "--graph"], ["watch", "--once"], ["show"],
                  ["retain", "--best", "nope"]):  # fmt: skip
        places = ["main"] if words[0] == "retain" else []
        result = run(words[0], small.path, *places, *words[1:])
        said = result.stdout + result.stderr
        assert max(map(len, said.splitlines())) < 400, words
        assert "\x1b" not in said
    text = run("log", small.path).output
    assert "n" * 37 + "...=1e+308" in text
    assert "m0=0 m1=1" in text
    assert "... (300 in all)" in text
    commits = json.loads(run("log", small.path, "--json").output)["runs"][0]["commits"]
    assert [set(one["metrics"]) for one in commits] == [set(many), set(odd)]
