"""The command line as scripts and people use it: output, JSON documents, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from deltackpt_store import Commit, FileIO, Store
from deltackpt_store.errors import WriterError
from deltackpt_tools.cli import COMMANDS
from small_store import SmallStore, pattern

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
ENVIRONMENT = {"torch": "2.13.0", "world": 1}
STATS = {"stall_seconds": 0.02, "staged_seconds": 0.05, "writer_seconds": 0.2,
         "encode_seconds": 0.1, "flush_seconds": 0.1}  # fmt: skip
VALUES = {"optimizer/lr": 0.001, "meta/names": ("a", "b"), "meta/none": None}


def run_json(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    return document


class Fixture:
    """main@10 -> main@20 (one chunk changed, pinned), and fork@11 from main@10."""

    def __init__(self, path: Path) -> None:
        self.small = SmallStore(path)
        self.path = path
        weight, bias = pattern(5000, 1), pattern(10, 2)
        changed = weight.copy()
        changed[4000] = 3
        self.first = self._save("main", 10, weight, bias, metrics={"loss": 2.5})
        self.second = self._save(
            "main", 20, changed, bias, parent=self.first, base=self.first, metrics={"loss": 1.25}
        )
        self.fork = self._save("fork", 11, weight, bias, parent=self.first)
        self.small.store.pin("best", self.second)

    def _save(self, run: str, step: int, weight: Any, bias: Any, **more: Any) -> Commit:
        tensors = {"model/w": weight, "model/b": bias}
        return self.small.save(
            run, step, tensors, VALUES, tied={"model/head": "model/w"}, environment=ENVIRONMENT,
            stats=STATS, **more,
        )  # fmt: skip

    def file(self, pattern: str) -> Path:
        return sorted(self.path.glob(pattern))[0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Fixture]:
    fixture = Fixture(tmp_path / "store")
    yield fixture
    fixture.small.close()


def damage(path: Path, offset: int = -40) -> None:
    """Flip one bit of a file of the store, which stays as long as it was."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def normal(text: str, fixture: Fixture) -> str:
    """Output with what differs from store to store replaced by words as long; roots are kept."""
    text = text.replace(str(fixture.path.resolve()), "STORE")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "2026-01-01 00:00:00Z", text)
    for commit in (fixture.first, fixture.second, fixture.fork):
        name = f"-of-{commit.run}"[:7].ljust(7, "-")
        text = text.replace(commit.digest.hex()[:12], f"C{name}-{commit.step:03d}"[:12])
        text = text.replace(commit.manifest.hex()[:12], f"M{name}-{commit.step:03d}"[:12])
        text = text.replace(commit.writer, "WRITER-ID-16-HEX")
    return text


# text -------------------------------------------------------------------------------------------

LOG = """\
run fork: 1 step, newest 11
  step  number  saved                   state  new  root          metrics  note
    11       1  2026-01-01 00:00:00Z  20.0 kB  0 B  88f125890ab6  -        fork of main@10

run main: 2 steps, newest 20
  step  number  saved                   state      new  root          metrics    note
    20       2  2026-01-01 00:00:00Z  20.0 kB   4.2 kB  fa175498a5e1  loss=1.25  pin best
    10       1  2026-01-01 00:00:00Z  20.0 kB  20.3 kB  88f125890ab6  loss=2.5
"""

SHOW = """\
main@20
  saved     2026-01-01 00:00:00Z as commit 2, writer WRITER-ID-16-HEX
  root      fa175498a5e126baf55d90c7c3f5e6b80e506e75cce17a4fdaf3f017722881c3
  manifest  M-of-mai-020, a delta against M-of-mai-010
  parent    commit 1 of main, C-of-mai-010
  state     20.0 kB: 3 tensors, 3 values, 5 chunks
  stored    20.0 kB in 2 packs for 20.0 kB of distinct chunks, raw 5
  metrics   loss=1.25

environment
  torch  2.13.0
  world  1

tensors
  path        dtype    shape     bytes  chunks
  model/w     float32  [5000]  20.0 kB       5  shares bytes with model/head
  model/b     float32  [10]       40 B       -  in the manifest
  model/head  float32  [5000]  20.0 kB       5  shares bytes with model/w

values
  optimizer/lr  0.001
  meta/names    ('a', 'b')
  meta/none     None
"""

DU_RUNS = """\
run main: 2 steps, 24.1 kB, of which 4.1 kB in no other run
  step    total  only here    added
    10  20.0 kB        0 B  20.0 kB
    20  20.0 kB     4.1 kB   4.1 kB

run fork: 1 step, 20.0 kB, of which 0 B in no other run
  step    total  only here  added
    11  20.0 kB        0 B    0 B
"""


def test_log_lists_runs_newest_first(store: Fixture) -> None:
    assert normal(run("log", store.path).output, store) == LOG


def test_log_of_one_run_can_be_limited(store: Fixture) -> None:
    lines = run("log", store.path, "main", "-n", "1").output.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "step", "20", "..."]
    assert lines[-1] == "  ... 1 older"


def test_log_of_a_new_store_says_so(tmp_path: Path) -> None:
    SmallStore(tmp_path / "empty").close()
    assert run("log", tmp_path / "empty").output == "no run yet\n"


def test_log_marks_steps_left_behind(store: Fixture) -> None:
    store._save("main", 15, pattern(5000, 4), pattern(10, 2), parent=store.first)
    output = run("log", store.path, "main").output
    notes = {line.split()[0]: line for line in output.splitlines()[2:]}
    assert "continues 10" in notes["15"]
    assert "abandoned" in notes["20"]
    assert output.startswith("run main: 3 steps, newest 15\n")


@pytest.mark.parametrize("name", ["main@20", "@20", "best", "main", "main@latest"])
def test_show_describes_the_step_by_any_of_its_names(store: Fixture, name: str) -> None:
    assert normal(run("show", store.path, name).output, store) == SHOW


def test_show_can_be_narrowed_by_globs(store: Fixture) -> None:
    document = run_json("show", store.path, "main@20", "--only", "model/w", "--only", "*/names")
    assert [tensor["path"] for tensor in document["tensors"]] == ["model/w"]
    assert [value["path"] for value in document["values"]] == ["meta/names"]


def test_du_tells_shared_from_unique(store: Fixture) -> None:
    output = normal(run("du", store.path).output, store)
    head, _, runs = output.partition("\n\n")
    assert runs == DU_RUNS
    assert head.splitlines()[0].startswith("STORE: ")
    assert "    referenced    24.1 kB  chunks that a step or pin reaches" in head


def test_du_sees_what_nothing_reaches(store: Fixture) -> None:
    before = run_json("du", store.path)
    assert before["unreferenced_bytes"] == before["duplicate_bytes"] == 0
    with_garbage = store.small.writer
    with_garbage.put(pattern(1024, 9).tobytes())
    with_garbage.flush()
    again = SmallStore(store.path)  # knows the packs, but is told to write them once more
    again.writer.close()
    from deltackpt_store.store_writer import StoreWriter

    with StoreWriter(again.store, codec="none") as blind:
        blind.put(pattern(1024, 9).tobytes())
        blind.flush()
    after = run_json("du", store.path)
    assert after["unreferenced_bytes"] == 4096
    assert after["duplicate_bytes"] == 4096
    assert after["referenced_bytes"] == before["referenced_bytes"]
    packs = after["files"]["packs"]["bytes"]
    parts = ("referenced_bytes", "unreferenced_bytes", "duplicate_bytes", "overhead_bytes")
    assert packs == sum(after[part] for part in parts)
    on_disk = sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file())
    assert after["total_bytes"] == on_disk


def test_du_agrees_with_sets_of_chunk_ids(store: Fixture) -> None:
    """The figures are counted again with plain sets."""
    sets: dict[tuple[str, int], set[bytes]] = {}
    for commit in (store.first, store.second, store.fork):
        snapshot = store.small.store.snapshot(commit)
        ids = {row.tobytes() for array in snapshot.chunks.values() for row in array}
        sets[commit.run, commit.step] = ids
    index = store.small.store.index()

    def stored(ids: set[bytes]) -> int:
        places = [index.get(chunk) for chunk in ids]
        return sum(place.stored for place in places if place is not None)

    for of_run in run_json("du", store.path)["runs"]:
        mine = {key: ids for key, ids in sets.items() if key[0] == of_run["run"]}
        others = {key: ids for key, ids in sets.items() if key[0] != of_run["run"]}
        whole = set().union(*mine.values())
        assert of_run["total_bytes"] == stored(whole)
        assert of_run["unique_bytes"] == stored(whole - set().union(*others.values()))
        for step in of_run["steps"]:
            ids = sets[of_run["run"], step["step"]]
            rest = [v for k, v in sets.items() if k != (of_run["run"], step["step"])]
            assert step["total_bytes"] == stored(ids)
            assert step["unique_bytes"] == stored(ids - set().union(*rest))


def test_names_from_a_store_cannot_steer_the_terminal(store: Fixture) -> None:
    """A key with escape sequences would rewrite what the user sees on the terminal."""
    store.small.save(
        "odd", 1, {"a\x1b[2Jb": pattern(4)}, {"v\r": "x\x1b]0;t\x07"}, metrics={"m\x1b[1m": 1.0}
    )
    for command in ("log", "show", "verify", "du"):
        arguments = [command, store.path, *(["odd@1"] if command == "show" else [])]
        text = run(*arguments).output
        assert all(c.isprintable() or c == "\n" for c in text), command
    assert "a\\x1b[2Jb" in run("show", store.path, "odd@1").output


# JSON -------------------------------------------------------------------------------------------

NUMBER = (int, float)
OPTIONAL_INT = (int, type(None))
OPTIONAL_STR = (str, type(None))
OPTIONAL_NUMBER = (*NUMBER, type(None))
SIDE = {"store": str, "run": str, "step": int, "number": int, "root": str}
PARENT = {"run": str, "number": int, "step": OPTIONAL_INT, "digest": str}
STORED = {"chunks": int, "raw_bytes": int, "stored_bytes": int, "codecs": dict,
          "codec_bytes": dict,
          "missing_chunks": int}  # fmt: skip
ADVICE = {
    "store": str, "run": str, "saves": int, "mtbf": NUMBER, "overhead_limit": OPTIONAL_NUMBER,
    "stall": NUMBER, "durable": NUMBER, "restore": NUMBER, "restore_measured": bool,
    "step_seconds": OPTIONAL_NUMBER, "interval": OPTIONAL_NUMBER, "every": OPTIONAL_INT,
    "young": NUMBER, "daly": NUMBER, "best_interval": NUMBER, "best_every": OPTIONAL_INT,
    "bound": str, "lost": OPTIONAL_NUMBER, "best_lost": NUMBER, "waste": OPTIONAL_NUMBER,
    "best_waste": NUMBER, "writer_busy": OPTIONAL_NUMBER,
    "storage_keeps_up": (bool, type(None)), "ring_keeps_up": (bool, type(None)),
    "skipped": int, "write_speed": OPTIONAL_NUMBER,
}  # fmt: skip
HIT = {"run": str, "step": OPTIONAL_INT, "number": int, "whole_step": bool, "tensors": [str]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "log": {
        "format": str, "store": str,
        "runs": [{"run": str, "steps": int, "commits": [{
            "run": str, "step": int, "number": int, "created": float, "digest": str, "root": str,
            "manifest": str, "base": OPTIONAL_STR, "parent": (PARENT, None), "in_lineage": bool,
            "pins": [str], "state_bytes": OPTIONAL_INT, "written_bytes": OPTIONAL_INT,
            "metrics": dict, "stats": dict, "versions": dict}]}],
        "damaged": [{"path": str, "reason": str}],
    },
    "show": {
        "format": str, "store": str, "run": str, "step": int, "number": int, "created": float,
        "digest": str, "root": str, "manifest": str, "base": OPTIONAL_STR, "writer": str,
        "parent": ({"run": str, "number": int, "digest": str}, None), "versions": dict,
        "metrics": dict, "stats": dict, "environment": dict, "packs": [str], "state_bytes": int,
        "stored": STORED, "values": [{"path": str, "value": object}], "damaged_packs": dict,
        "tensors": [{
            "path": str, "dtype": str, "shape": [int], "stride": [int], "offset": int,
            "bytes": int, "device": str, "parameter": bool, "parameter_name": OPTIONAL_STR,
            "requires_grad": bool, "conj": bool,
            "neg": bool, "global_shape": ([int], None), "shard_offsets": ([int], None),
            "extent": int, "inline": bool, "tied": [str], "stored": STORED}],
    },
    "diff": {
        "format": str, "store": str, "old": SIDE, "new": SIDE, "identical": bool,
        "structure_changed": bool, "with_values": bool, "compared": int, "bytes": int,
        "changed_bytes": int, "chunks": int, "changed_chunks": int,
        "tensors": [{
            "path": str, "change": str, "old_path": OPTIONAL_STR, "old_dtype": OPTIONAL_STR,
            "dtype": OPTIONAL_STR, "old_shape": ([int], None), "shape": ([int], None),
            "attributes": [str], "bytes": int, "changed_bytes": int, "chunks": int,
            "changed_chunks": int, "share": NUMBER, "old_value": OPTIONAL_STR,
            "new_value": OPTIONAL_STR, "parameter_name": OPTIONAL_STR, "values": ({
                "elements": int, "changed_elements": int, "share": NUMBER,
                "max_difference": OPTIONAL_NUMBER, "rms": OPTIONAL_NUMBER,
                "relative_update": OPTIONAL_NUMBER, "new_nan": OPTIONAL_INT,
                "new_inf": OPTIONAL_INT}, None)}],
        "values": [{"path": str, "old": OPTIONAL_STR, "new": OPTIONAL_STR}],
        "modules": [{"module": str, "tensors": int, "differing": int, "bytes": int,
                     "changed_bytes": int, "share": NUMBER, "new_nan": OPTIONAL_INT,
                     "update": OPTIONAL_NUMBER, "parameter_name": OPTIONAL_STR}],
    },
    "blame": {
        "format": str, "store": str, "run": str, "step": int, "number": int, "searched": int,
        "since": int, "tensors": [{
            "path": str, "dtype": str, "shape": [int], "bytes": int,
            "parts": [{"start": int, "stop": int, "run": str, "step": int, "number": int}],
            "parameter_name": OPTIONAL_STR,
            "not_finite": ({"run": str, "step": int, "number": int, "nan": int, "inf": int},
                           None)}],
    },
    "verify": {
        "format": str, "store": str, "level": str, "ok": bool, "runs": int, "commits": int,
        "manifests": int, "packs": int, "chunks": int, "bytes": int,
        "findings": [{"kind": str, "name": str, "pack": OPTIONAL_STR, "reason": str,
                      "unreadable": bool, "hits": [HIT], "needed_by": [HIT]}],
        "notes": [{"kind": str, "name": str, "pack": OPTIONAL_STR, "reason": str}],
        "coverage": ({
            "packs": int, "total_bytes": int, "checked_packs": int, "checked_bytes": int,
            "ever_bytes": int, "window": NUMBER, "window_bytes": int, "oldest": OPTIONAL_NUMBER,
            "never_packs": int, "remembered": OPTIONAL_STR, "problem": str}, None),
    },
    "du": {
        "format": str, "store": str, "total_bytes": int, "files": dict, "referenced_bytes": int,
        "unreferenced_bytes": int, "duplicate_bytes": int, "overhead_bytes": int,
        "runs": [{"run": str, "total_bytes": int, "unique_bytes": int, "steps": [{
            "step": int, "number": int, "total_bytes": int, "unique_bytes": int,
            "added_bytes": int, "missing_chunks": int}]}],
        "modules": [{"module": str, "total_bytes": int, "unique_bytes": int, "shared_bytes": int,
                     "newest_bytes": int, "chunks": int}],
        "unreadable": [{"what": str, "reason": str}],
    },
    "advise": {"format": str, **ADVICE},
    "watch": {
        "format": str, "store": str, "time": float, "in_flight_bytes": int,
        "runs": [{"run": str, "step": int, "number": int, "saves": int, "age": NUMBER,
                  "interval": OPTIONAL_NUMBER, "stall": OPTIONAL_NUMBER,
                  "staged": OPTIONAL_NUMBER, "durable": OPTIONAL_NUMBER,
                  "state_bytes": OPTIONAL_INT, "staged_bytes": OPTIONAL_INT,
                  "written_bytes": OPTIONAL_INT, "skipped": int, "metrics": dict,
                  "writer": OPTIONAL_STR}],
    },
    "report": {
        "format": str, "store": str, "output": str, "made": float,
        "runs": [{
            "run": str, "modules": [str], "module_bytes": [int],
            "module_parameters": [OPTIONAL_STR], "share": [[OPTIONAL_NUMBER]],
            "update": ([[OPTIONAL_NUMBER]], None), "advice": (ADVICE, None),
            "saves": [{
                "step": int, "number": int, "created": float, "is_base": bool,
                "manifest_bytes": int, "state_bytes": OPTIONAL_NUMBER,
                "changed_bytes": OPTIONAL_NUMBER, "staged_bytes": OPTIONAL_NUMBER,
                "written_bytes": OPTIONAL_NUMBER, "dedup_bytes": OPTIONAL_NUMBER,
                "stall": OPTIONAL_NUMBER, "staged": OPTIONAL_NUMBER, "durable": OPTIONAL_NUMBER,
                "skipped": OPTIONAL_NUMBER, "metrics": dict}],
            "not_finite": [{"step": int, "tensor": str, "elements": int}],
            "tensors": [{"path": str, "dtype": str, "bytes": int, "compared": int,
                         "mean_share": NUMBER, "last_changed": OPTIONAL_INT,
                         "stored_ratio": OPTIONAL_NUMBER, "never_wins": bool,
                         "parameter_name": OPTIONAL_STR}],
            "bases": {"saves": int, "bases": int, "manifest_bytes": int,
                      "present": OPTIONAL_NUMBER, "best": OPTIONAL_INT,
                      "best_bytes": OPTIONAL_NUMBER},
            "unreadable": [{"what": str, "reason": str}]}],
        "health": {"total_bytes": int, "packs": int, "pack_bytes": int, "manifest_bytes": int,
                   "referenced_bytes": int, "unreferenced_bytes": int, "duplicate_bytes": int,
                   "overhead_bytes": int, "commits": int, "retired": int, "pins": [str],
                   "verified": OPTIONAL_STR, "findings": [[str]], "unreadable": [[str]]},
    },
    "export": {
        "format": str, "store": str, "run": str, "step": int, "number": int, "root": str,
        "output": str, "output_format": str, "tensors": int, "values": int, "bytes": int,
        "tied": [[str]], "weights_only": (bool, type(None)), "needs_trust": [str],
        "left_out": [{"path": str, "reason": str}], "changed": [{"path": str, "change": str}],
        "refused": [{"path": str, "reason": str}],
    },
    "pin": {"format": str, "store": str, "name": str, "run": str, "step": int, "number": int,
            "digest": str},
    "unpin": {"format": str, "store": str, "name": str},
    "retain": {
        "format": str, "store": str, "run": str, "dry_run": bool,
        "kept": [{"step": int, "number": int, "reasons": list}],
        "retired": [{"step": int, "number": int}],
    },
    "delete": {"format": str, "store": str, "run": str, "dry_run": bool,
               "retired": [{"step": OPTIONAL_INT, "number": int}]},
    "gc": {
        "format": str, "store": str, "dry_run": bool, "generation": int, "packs": list,
        "manifests": list, "commits": [{"run": str, "number": int}], "leftovers": list,
        "accepted_lost": [{"run": str, "number": int}],
        "pack_bytes": int, "pardoned": list, "kept_packs": int, "kept_bytes": int, "writers": int,
    },
    "compact": {
        "format": str, "store": str, "dry_run": bool, "nothing": bool,
        "bases": [{"run": str, "step": int, "number": int, "packs_before": int,
                   "bytes_before": int, "packs_after": OPTIONAL_INT, "bytes_after": OPTIONAL_INT}],
        "not_due": list, "chunks_own": int, "chunks_recoded": int, "chunks_copied": int,
        "read_bytes": int, "written_bytes": int, "packs_before": int, "bytes_before": int,
        "packs_after": OPTIONAL_INT, "bytes_after": OPTIONAL_INT, "removed": list,
        "lighter_steps": int, "seconds": float,
    },
    "probe": {
        "format": str, "store": str, "ok": bool, "usable": bool,
        "primitives": [{
            "name": str, "works": bool, "detail": str, "vital": bool, "without": str}],
    },
    "repair": {
        "format": str, "store": str, "dry_run": bool, "ok": bool, "found": int, "copied": int,
        "mended": [{"kind": str, "name": str, "source": str}], "packs": list, "quarantined": list,
        "left": [{"kind": str, "name": str, "reason": str}],
        "lost": [{"run": str, "step": OPTIONAL_INT, "number": int, "whole_step": bool,
                  "tensors": [{"path": str, "ranges": list}]}],
    },
    "error": {
        "format": str, "exit_code": int,
        "error": {"type": str, "kind": str, "message": str, "hint": OPTIONAL_STR, "context": dict},
    },
}  # fmt: skip


def check_schema(value: Any, schema: Any, where: str) -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        assert set(value) == set(schema), where
        for key, inner in schema.items():
            check_schema(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for item in value:
            check_schema(item, schema[0], f"{where}[]")
    elif isinstance(schema, tuple) and not all(isinstance(part, type) for part in schema):
        if value is not None:
            check_schema(value, schema[0], where)
    else:
        assert isinstance(value, schema), f"{where}: {value!r}"


def fields(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return set(schema).union(*(fields(inner) for inner in schema.values()))
    if isinstance(schema, (list, tuple)):
        return set().union(*(fields(inner) for inner in schema))
    return set()


def arguments(command: str, store: Fixture, tmp_path: Path) -> list[str | Path]:
    if command == "export":
        return ["export", store.path, "main@20", tmp_path / "out.safetensors", "--force"]
    if command in ("gc", "compact"):
        store.small.close()  # else it would wait for this writer
    more: dict[str, list[str]] = {
        "show": ["main@20"], "diff": ["main@10", "fork@11"], "blame": ["model/w", "main@20"],
        "advise": ["main", "--mtbf", "6h"], "watch": ["--once"], "du": ["--depth", "1"],
        "report": ["-o", str(tmp_path / "report.html")],
        "pin": ["first", "main@10"], "unpin": ["best"], "retain": ["main", "--last", "1"],
        "delete": ["fork"],
    }  # fmt: skip
    return [command, store.path, *more.get(command, [])]


@pytest.mark.parametrize("command", COMMANDS)
def test_json_documents_have_exactly_the_promised_fields(
    store: Fixture, tmp_path: Path, command: str
) -> None:
    wanted = arguments(command, store, tmp_path)
    document = run_json(*wanted)
    check_schema(document, SCHEMAS[command], command)
    assert document["format"] == f"deltackpt.{command}/1"


def test_verify_within_a_budget(store: Fixture) -> None:
    text = run("verify", store.path, "--budget", "1B").output
    assert "read 1 pack (" in text
    assert "% of bytes checked in the last 7 days; oldest check 20" in text
    document = run_json("verify", store.path, "--budget", "1h", "--within", "2h")
    check_schema(document, SCHEMAS["verify"], "verify")
    assert document["coverage"]["window"] == 7200
    assert document["coverage"]["window_bytes"] == document["coverage"]["total_bytes"]
    for wrong in ("soon", "10 apples", "-3s", "", "9" * 400 + "TB"):
        assert run("verify", store.path, "--budget", wrong).exit_code == 2
    assert run("verify", store.path, "--budget", "1s", "--level", "restore").exit_code == 2


def test_repair_tells_what_it_did_and_what_stays_hit(store: Fixture, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "copy")
    store.small.close()
    damage(store.file("packs/*/*-00000001.pack"), 200)
    plan = run("repair", store.path, "--from", tmp_path / "copy", "--dry-run")
    assert plan.exit_code == 1
    assert "can be repaired: chunk" in plan.output
    document = run_json("repair", store.path, code=12)
    check_schema(document, SCHEMAS["repair"], "repair")
    assert document["lost"]
    assert document["lost"][0]["tensors"][0]["ranges"]
    lost = {(one["run"], one["step"]) for one in document["lost"]}
    assert run_json("verify", store.path, code=12)["ok"] is False
    text = run("repair", store.path).output
    assert all(f"{name}@{step} has" in text for name, step in lost)
    document = run_json("repair", store.path, "--from", tmp_path / "copy")
    check_schema(document, SCHEMAS["repair"], "repair")
    assert document["mended"]
    assert run_json("verify", store.path)["ok"]
    assert "no damage found" in run("repair", store.path).output


def test_damage_in_json_documents_follows_the_schema_too(store: Fixture, tmp_path: Path) -> None:
    damage(store.file("packs/*/*-00000001.pack"), 200)
    document = run_json("verify", store.path, code=12)
    assert document["findings"]
    check_schema(document, SCHEMAS["verify"], "verify")
    document = run_json("export", store.path, "main@10", tmp_path / "out.safetensors", code=12)
    check_schema(document, SCHEMAS["error"], "error")
    assert document["exit_code"] == 12


@pytest.mark.parametrize("command", [*COMMANDS, "error"])
def test_every_json_field_is_documented(command: str) -> None:
    text = DOCS.read_text()
    section = re.search(rf"^### {command}\n(.*?)(^##|\Z)", text, re.M | re.S)
    assert section, f"docs/cli.md has no section {command}"
    documented = set(re.findall(r"`([a-z_]+)`", section[1]))
    elsewhere = {"format", "store"}  # of every document
    if command == "report":
        elsewhere |= fields(ADVICE)  # documented under advise
    assert fields(SCHEMAS[command]) - documented <= elsewhere


# commands that change the store ------------------------------------------------------------------


def test_steps_are_retained_pinned_and_collected(store: Fixture) -> None:
    store.small.close()
    assert run("pin", store.path, "first", "main@10").output == "first is main@10\n"
    assert run("unpin", store.path, "best").output == "best is no longer pinned\n"
    plan = run("retain", store.path, "main", "--last", "1", "--dry-run").output
    assert plan.splitlines() == [
        "step  number         why",
        "  10       1  stays  pinned",
        "  20       2  stays  last, newest",
        "0 steps would be taken off the list of run main",
    ]  # fmt: skip
    assert run("unpin", store.path, "first").exit_code == 0
    document = run_json("retain", store.path, "main", "--last", "1")
    assert document["retired"] == [{"step": 10, "number": 1}]
    plan_of_gc = run("gc", store.path, "--dry-run").output
    assert "would delete 0 packs (0 B), 1 retired commit" in plan_of_gc
    assert "commit main/1" in plan_of_gc
    done = run_json("gc", store.path)
    assert done["commits"] == [{"run": "main", "number": 1}]
    assert "there is nothing to delete" in run("gc", store.path).output
    assert run("verify", store.path, "--level", "restore").exit_code == 0


def test_gc_beside_a_stalled_writer_gives_code_11(store: Fixture) -> None:
    store.small.store.unpin("best")
    assert run("retain", store.path, "main", "--last", "1").exit_code == 0
    result = run("gc", store.path, "--timeout", "0")
    assert result.exit_code == 11
    assert "nothing was deleted" in result.stderr


# exit codes -------------------------------------------------------------------------------------


def test_commands_succeed_with_code_0(store: Fixture, tmp_path: Path) -> None:
    for command in COMMANDS:
        wanted = arguments(command, store, tmp_path)
        result = run(*wanted)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "arguments",
    [["log"], ["log", "S", "--nonsense"], ["show", "S", "main@99"], ["show", "S", "nobody"],
     ["show", "S", "a b"], ["show", "S", "latest"], ["log", "S", "nobody"],
     ["verify", "S", "--run", "nobody"], ["verify", "S", "--level", "some"], ["frobnicate"],
     ["retain", "S", "main"], ["retain", "S", "main", "--last", "0"],
     ["retain", "S", "nobody", "--last", "1"], ["retain", "S", "--last", "1"],
     ["retain", "S", "main", "--best", "loss:low"],
     ["pin", "S", "a/b", "main@20"], ["pin", "S", "new", "main@99"], ["unpin", "S", "nothing"],
     ["export", "S", "main@20", "OUT", "--prefix", "nothing/"]],
)  # fmt: skip
def test_usage_errors_give_code_2(store: Fixture, tmp_path: Path, arguments: list[str]) -> None:
    places = {"S": str(store.path), "OUT": str(tmp_path / "out")}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "out").exists()


def test_a_missing_step_names_its_neighbours(store: Fixture) -> None:
    result = run("show", store.path, "main@19")
    assert result.exit_code == 2
    assert "10, 20" in result.stderr


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_what_is_not_a_store_gives_code_10(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_text("no store")
    for command in ("log", "show", "verify", "du"):
        result = run(command, path)
        assert result.exit_code == 10, result.output
        assert str(path.resolve()) in result.stderr
    document = run_json("log", path, code=10)
    check_schema(document, SCHEMAS["error"], "error")
    assert document["error"]["kind"] == "not-a-store"


def test_a_damaged_commit_hides_only_itself(store: Fixture) -> None:
    """One damaged record must not make the other steps look gone."""
    damage(store.path / "runs" / "main" / f"{1:020d}")
    document = run_json("log", store.path, code=3)
    assert [len(one["commits"]) for one in document["runs"]] == [1, 1]
    assert [bad["path"] for bad in document["damaged"]] == [f"runs/main/{1:020d}"]
    assert "damaged: runs/main/" in run("log", store.path).output
    assert run_json("du", store.path, code=3)["unreadable"]


def test_damage_gives_code_12_and_names_what_is_hit(store: Fixture) -> None:
    pack = store.file("packs/*/*-00000002.pack")  # holds the one chunk of main@20 that is new
    damage(pack, 200)
    result = run("verify", store.path)
    assert result.exit_code == 12
    assert pack.name in result.output
    assert "hits main@20: model/head, model/w" in result.output.replace(
        "model/w, model/head", "model/head, model/w"
    )
    assert "main@10" not in result.output
    damage(store.path / "manifests" / store.second.manifest.hex())
    assert run("show", store.path, "main@20").exit_code == 12
    assert run("show", store.path, "main@10").exit_code == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_that_goes_while_it_is_read_is_no_damage(
    store: Fixture, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """Retired and collected after it was found; one that is pinned cannot go like that."""
    commit, snapshot = store.second, Store.snapshot

    def late(self: Store, which: Any) -> Any:
        if not pinned:
            self.unpin("best")
        (store.path / "runs" / "main" / f"{commit.number:020d}.retired").touch()
        (store.path / "manifests" / commit.manifest.hex()).unlink()
        return snapshot(self, which)

    monkeypatch.setattr(Store, "snapshot", late)
    document = run_json("show", store.path, "main@20", code=12 if pinned else 2)
    assert document["error"]["kind"] == ("missing-manifest" if pinned else "retired")
    assert ("repair" in document["error"]["hint"]) == pinned


def test_show_says_when_a_pack_is_gone(store: Fixture) -> None:
    store.file("packs/*/*-00000002.pack").unlink()
    result = run("show", store.path, "main@20")
    assert result.exit_code == 3
    assert "damaged packs" in result.output
    assert "1 chunk missing" in result.output


def test_a_newer_format_gives_code_13(store: Fixture) -> None:
    from blake3 import blake3

    line = b'{"deltackpt":999,"store":"' + b"0" * 32 + b'"}\n'
    (store.path / "FORMAT").write_bytes(line + blake3(line).hexdigest().encode() + b"\n")
    result = run("log", store.path)
    assert result.exit_code == 13
    assert "upgrade" in result.stderr


def test_a_refusing_file_system_gives_code_14(
    store: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(io: FileIO, path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(FileIO, "list", refuse)
    result = run("log", store.path)
    assert result.exit_code == 14
    assert "Permission denied" in result.stderr


def test_ctrl_c_gives_code_130(store: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(io: FileIO, path: str) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileIO, "list", interrupt)
    result = run("log", store.path)
    assert result.exit_code == 130
    assert "Traceback" not in result.output
    result = run("log", store.path, "--json")
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert (document["format"], document["exit_code"]) == ("deltackpt.error/1", 130)
    assert document["error"]["kind"] == "interrupted"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(MemoryError(), "memory"), (WriterError("no thread"), "writer"), (KeyError("x"), "internal")],
)
def test_what_fails_does_not_look_like_a_finding(
    store: Fixture, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str
) -> None:
    """Prevents: `deltackpt diff` that runs out of memory and exits as if the steps differed."""

    def fail(io: FileIO, path: str) -> list[str]:
        raise error

    monkeypatch.setattr(FileIO, "list", fail)
    result = run("diff", store.path, "main@10", "main@20")
    assert result.exit_code == 70
    assert ("Traceback" in result.stderr) == (kind == "internal")
    assert "deltackpt: " in result.stderr
    result = run("diff", store.path, "main@10", "main@20", "--json")
    assert result.exit_code == 70
    document = json.loads(result.stdout)
    assert (document["format"], document["exit_code"]) == ("deltackpt.error/1", 70)
    assert document["error"]["kind"] == kind
    assert document["error"]["message"]


# processes --------------------------------------------------------------------------------------


def deltackpt(*arguments: str | Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    script = code or "from deltackpt_tools.cli import main; main()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


MODULES = """
import sys, json
from deltackpt_tools.cli import cli
try:
    cli.main(prog_name="deltackpt")
except SystemExit:
    pass
print(json.dumps(sorted(m for m in sys.modules if "." not in m)), file=sys.stderr)
"""


def test_help_and_version_import_nothing_heavy() -> None:
    """A command line that imports torch takes seconds to print its help."""
    for argument in ("--help", "--version"):
        done = deltackpt(argument, code=MODULES)
        assert done.stdout
        loaded = set(json.loads(done.stderr))
        assert loaded.isdisjoint({"torch", "numpy", "msgspec", "blake3", "lmdb", "lz4"})


def test_no_command_imports_torch(store: Fixture, tmp_path: Path) -> None:
    for command in COMMANDS:
        wanted = arguments(command, store, tmp_path)
        done = deltackpt(*wanted, code=MODULES)
        assert done.stdout, done.stderr
        assert {"torch", "safetensors", "deltackpt"}.isdisjoint(json.loads(done.stderr)), command
    done = deltackpt("export", store.path, "main", tmp_path / "out.pt", code=MODULES)
    assert {"torch", "deltackpt"}.isdisjoint(json.loads(done.stderr))


def test_the_module_is_the_command(store: Fixture) -> None:
    command = [sys.executable, "-m", "deltackpt_tools", "log", str(store.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert normal(done.stdout, store) == LOG
    assert done.stderr == ""  # no progress, no log lines: it is no terminal


def test_a_reader_that_leaves_early_is_no_error(store: Fixture) -> None:
    for step in range(200):
        store.small.save("many", step, {"w": np.zeros(4, np.float32)})
    script = "from deltackpt_tools.cli import main; main()"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, "log", str(store.path)],
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_characters_that_the_terminal_lacks_are_escaped(store: Fixture, encoding: str) -> None:
    """Prevents: the traceback of an encoding, also of a command that has done its work."""
    store.small.save("odd", 1, {"größe漢": pattern(4)}, metrics={"📈": 1.0})
    script = "from deltackpt_tools.cli import main; main()"
    for arguments in (["log", store.path, "odd"], ["show", store.path, "odd@1"], ["show", "漢"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, check=False,
        )  # fmt: skip
        assert done.returncode == (10 if arguments[1] == "漢" else 0)
        assert b"Traceback" not in done.stderr


def on_a_terminal(code: str, *wanted: object) -> tuple[bytes, bytes]:
    """stdout, and what a terminal at stderr shows; the command must succeed."""
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, wanted)], stdout=subprocess.PIPE, stderr=other
    )
    os.close(other)
    seen = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other side has closed
            break
        if not piece:
            break
        seen += piece
    os.close(terminal)
    output, _ = process.communicate()
    assert process.returncode == 0
    return output, seen


@pytest.mark.parametrize(
    ("command", "bar"), [("export", b"export: [####"), ("gc", b"gc: marking: [####")]
)
def test_progress_is_for_terminals_only(
    store: Fixture, tmp_path: Path, command: str, bar: bytes
) -> None:
    """Progress lines in a log file make it unreadable, and in a pipe they break parsers."""
    script = (
        "import deltackpt_tools.progress as p; p._INTERVAL = 0.0\n"
        "from deltackpt_tools.cli import main; main()"
    )
    wanted = arguments(command, store, tmp_path)
    quiet = deltackpt(*wanted, code=script)
    assert quiet.returncode == 0
    assert quiet.stderr == ""
    output, seen = on_a_terminal(script, *wanted)
    assert bar in seen
    assert b"[####" not in output
    assert on_a_terminal(script, *wanted, "--json")[1] == b""


def listing(path: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(p.relative_to(path)): (p.stat().st_size, p.stat().st_mtime_ns, p.stat().st_ino)
        for p in [path, *path.rglob("*")]
    }


def test_read_commands_touch_nothing(store: Fixture, tmp_path: Path) -> None:
    """A tool that locks or indexes on read cannot be used on a store one may only read."""
    # case 85
    shutil.copytree(store.path, tmp_path / "copy")
    before = listing(tmp_path / "copy")
    for command in COMMANDS.keys() - {"pin", "unpin", "probe"}:
        for extra in ([], ["--json"]):
            wanted = arguments(command, store, tmp_path)
            wanted[1] = tmp_path / "copy"
            plans = ("retain", "delete", "gc", "repair", "compact")
            wanted += ["--dry-run"] if command in plans else []
            assert run(*wanted, *extra).exit_code == 0
    assert run("verify", tmp_path / "copy", "--level", "restore").exit_code == 0
    assert listing(tmp_path / "copy") == before
