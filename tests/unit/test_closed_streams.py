"""Prevents: a command started without stdin, stdout or stderr (``2>&-``) dies before its work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deltackpt_tools.cli import COMMANDS
from small_store import SmallStore, pattern

ARGUMENTS = {
    "advise": ["STORE", "--mtbf", "1h", "--restore", "20s"],
    "show": ["STORE", "main@2"], "diff": ["STORE", "main@1", "main@2"],
    "blame": ["STORE", "w", "main@2"],
    "verify": ["STORE", "--budget", "1GB"], "probe": ["PLACE"], "watch": ["STORE", "--once"],
    "report": ["STORE", "main", "-o", "PLACE/report.html"],
    "export": ["STORE", "main@2", "PLACE/out.safetensors"],
    "pin": ["STORE", "again", "main@1"], "unpin": ["STORE", "best"],
    "retain": ["STORE", "main", "--last", "1"], "compact": ["STORE"],
    "delete": ["STORE", "other"],
}  # fmt: skip

# One interpreter for all: each command in a child that has lost one stream, as Python sees it
# when it starts without. The result of each goes to a file.
DRIVER = """
import importlib, json, os, sys, traceback
from deltackpt_tools import cli
for module, _ in cli.COMMANDS.values():
    importlib.import_module(module)
results = {}
for name, number, arguments in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        sys.argv = ["deltackpt", name, *arguments]
        try:
            cli.main()
        except SystemExit as ended:
            os._exit(ended.code or 0)
        except BaseException:
            open(sys.orig_argv[-1] + ".trace", "a").write(traceback.format_exc())
        os._exit(99)
    key = f"{name} without {number}"
    results[key] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
open(sys.argv[2], "w").write(json.dumps(results))
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    store = SmallStore(tmp_path / "store")
    stats = {"stall_seconds": 0.02, "staged_seconds": 0.05, "writer_seconds": 0.2,
             "encode_seconds": 0.1, "flush_seconds": 0.1}  # fmt: skip
    store.save("other", 1, {"w": pattern(50)})
    first = store.save("main", 1, {"w": pattern(5000)}, stats=stats)
    second = store.save("main", 2, {"w": pattern(5000, 1)}, parent=first, stats=stats)
    store.save("main", 3, {"w": pattern(5000, 2)}, parent=second, stats=stats)
    store.store.pin("best", first)
    store.close()
    return tmp_path / "store"


def test_every_command_does_its_work_without_a_stream(small: Path, tmp_path: Path) -> None:
    jobs: list[tuple[str, int, list[str]]] = []
    for number in range(3):
        for name in COMMANDS:
            place = tmp_path / f"{name}-{number}"
            shutil.copytree(small, place / "store")
            jobs.append((name, number, [
                word.replace("PLACE", str(place)).replace("STORE", str(place / "store"))
                for word in ARGUMENTS.get(name, ["STORE"])
            ]))  # fmt: skip
    out = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(jobs), str(out)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    traces = Path(f"{out}.trace")
    assert not traces.exists(), traces.read_text()
    codes = json.loads(out.read_text())
    fine = {key for key, code in codes.items() if code == 0 or (code == 1 and "diff" in key)}
    assert fine == set(codes), {key: codes[key] for key in set(codes) - fine}
    for number in range(3):
        assert (tmp_path / f"report-{number}" / "report.html").exists()
        assert (tmp_path / f"export-{number}" / "out.safetensors").exists()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_started_without(small: Path, closed: str) -> None:
    command = f'exec "$0" -m deltackpt_tools verify "$1" --budget 1GB {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, str(small)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (small / "cache" / "verified").exists()
