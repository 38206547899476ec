"""The one command for GPU machines runs from end to end, here at toy sizes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extras import needs_triton

TOOL = Path(__file__).parents[2] / "tools" / "gpu_check.py"


def gpu_check(*args: str) -> Any:
    return subprocess.run(
        [sys.executable, str(TOOL), *args],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("sections", ["hash", "copy", "train,peers,multi"])
@needs_triton
def test_a_dry_run_reports_every_figure(tmp_path: Path, sections: str) -> None:
    out = tmp_path / "result.json"
    out.write_text(json.dumps({"sections": {"earlier": {"ok": True}}}))
    done = gpu_check("--dry", "--only", sections, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert set(result["sections"]) == {"earlier", *sections.split(",")}
    for name in sections.split(","):
        assert result["sections"][name]["ok"] is True
        assert result["sections"][name]["seconds"] > 0
    assert result["environment"]["dry"] is True
    assert result["environment"]["torch"]


def test_a_wrong_hash_fails_loudly(tmp_path: Path) -> None:
    """Prevents a benchmark that reports the speed of a hash that is wrong."""
    code = (
        "import runpy, sys, xxhash\n"
        f"sys.argv = [{str(TOOL)!r}, '--dry', '--only', 'hash', '--out', {str(tmp_path / 'r')!r}]\n"
        "xxhash.xxh3_128_digest = lambda data, seed=0: bytes(16)\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stdout
    assert json.loads((tmp_path / "r").read_text())["sections"]["hash"]["ok"] is False


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
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sections = json.loads(out.read_text())["sections"]
    assert sections["hash"]["ok"] is False
    assert sections["hash"]["error"].startswith(error)
    assert sections["hash"].get("figure") == (None if reserve == 58 else 7)
    assert sections["multi"]["ok"] is True


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu_check("--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert "no GPU is in reach" in done.stderr


def test_unknown_sections_are_refused(tmp_path: Path) -> None:
    done = gpu_check("--dry", "--only", "hash,cpoy", "--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert "cpoy" in done.stderr
