"""The one command for GPU machines runs from end to end, here at toy sizes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from extras import needs_triton

TOOL = Path(__file__).parents[2] / "tools" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip


@pytest.mark.parametrize("sections", ["hash", "stage,copy", "tests,train,peers,multi,variants"])
@needs_triton
def test_a_dry_run_reports_every_figure(tmp_path: Path, sections: str) -> None:
    out = tmp_path / "result.json"
    out.write_text(json.dumps({"sections": {"earlier": {"ok": True}}}))
    done = run(str(TOOL), "--dry", "--only", sections, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert set(result["sections"]) == {"earlier", *sections.split(",")}
    for name in sections.split(","):
        assert result["sections"][name]["ok"] is True
        assert result["sections"][name]["seconds"] > 0
    assert result["environment"]["dry"] is True
    assert result["environment"]["torch"]


def test_a_wrong_hash_fails_loudly(tmp_path: Path) -> None:
    """Prevents a benchmark that reports the speed of a hash that is wrong, and one failure that
    hides what else there is to learn from the only hour with a device."""
    code = (
        "import runpy, sys, xxhash\n"
        f"sys.argv = [{str(TOOL)!r}, '--dry', '--only', 'hash', '--out', {str(tmp_path / 'r')!r}]\n"
        "xxhash.xxh3_128_digest = lambda data, seed=0: bytes(16)\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    done = run("-c", code)
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stdout
    section = json.loads((tmp_path / "r").read_text())["sections"]["hash"]
    assert section["ok"] is False
    for what in ("self-test", "random pieces", "64 KiB chunks", "256 KiB chunks"):
        assert f"{what}: WrongError" in section["error"]
    assert section["hash, 4096 KiB chunks, GB/s"] > 0
    assert section["6 tensors of 8 KiB, us"] > 0


@pytest.mark.parametrize(
    ("code", "seconds", "reserve", "error"),
    [
        ("os.abort()", 60, 0, "its process ended with code -6"),
        ("import time; time.sleep(60)", 35, 20, "not done in "),
        ("", 60, 58, "not run: no time is left, run it with --only"),
    ],
)
def test_a_section_that_dies_or_hangs_is_reported_with_what_it_had(
    tmp_path: Path, code: str, seconds: int, reserve: int, error: str
) -> None:
    """Prevents a report that is lost because one section broke the device or never ended."""
    out = tmp_path / "r.json"
    section = (
        "import json, os, pathlib; p = pathlib.Path(sys.argv[1]); r = json.loads(p.read_text())\n"
        "r['sections']['hash']['figure'] = 7; p.write_text(json.dumps(r))\n"
    )
    script = (
        "import pathlib, runpy, sys\n"
        f"sys.argv = [{str(TOOL)!r}, '--dry']\n"
        f"tool = runpy.run_path({str(TOOL)!r}, run_name='tool')\n"
        f"check = tool['Check'](pathlib.Path({str(out)!r}), {seconds})\n"
        f"command = [sys.executable, '-c', 'import sys\\n' + {section + code!r}, {str(out)!r}]\n"
        f"assert not tool['run_apart'](check, 'hash', command, {reserve})\n"
        "assert tool['run_here'](check, 'multi')\n"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    sections = json.loads(out.read_text())["sections"]
    assert sections["hash"]["ok"] is False
    assert sections["hash"]["error"].startswith(error)
    assert sections["hash"].get("figure") == (None if reserve == 58 else 7)
    assert sections["multi"]["ok"] is True


def test_a_test_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """Prevents a broken device, or one warning, that hides all tests after it; and a figure of the
    kernels that was measured without them."""
    script = (
        "import logging, pathlib, runpy, sys, types\n"
        f"sys.argv = [{str(TOOL)!r}, '--dry']\n"
        f"tool = runpy.run_path({str(TOOL)!r}, run_name='tool')\n"
        "own = tool['section_tests'].__globals__\n"
        "def pytest(*arguments):\n"
        "    if '--collect-only' in arguments:\n"
        "        return types.SimpleNamespace(stdout='t.py::restored_a\\nt.py::restored_b\\n')\n"
        "    logging.getLogger('deltackpt.cuda').warning('all is copied')\n"
        "    code = int(arguments[-1].endswith('a'))\n"
        "    return types.SimpleNamespace(returncode=code, stdout='1 thing', stderr='why')\n"
        "own['pytest'] = pytest\n"
        f"check = tool['Check'](pathlib.Path({str(tmp_path / 'r')!r}), 60)\n"
        "assert not tool['run_here'](check, 'tests')\n"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    section = json.loads((tmp_path / "r").read_text())["sections"]["tests"]
    assert (section["ok"], section["error"]) == (False, "t.py::restored_a")
    assert section["t.py::restored_a"] == "code 1: 1 thingwhy"
    assert section["t.py::restored_b"] == "passed"
    assert section["warnings"] == ["all is copied"]


def test_what_is_not_installed_is_named_at_once(tmp_path: Path) -> None:
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name in ('lz4', 'lmdb') else find(name)\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "not installed: lz4 lmdb"


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(str(TOOL), "--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert "no GPU is in reach" in done.stderr


def test_unknown_sections_are_refused(tmp_path: Path) -> None:
    done = run(str(TOOL), "--dry", "--only", "hash,cpoy", "--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert "cpoy" in done.stderr
