"""The ready-made jobs: each file parses, and calls the command with options that it has."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from deltackpt_tools.command_compact import command

JOBS = Path(__file__).parents[2] / "tools" / "jobs"
_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def check_command(words: list[str]) -> None:
    """The words after ``deltackpt compact`` are a store and options that the command takes."""
    place = next(i for i, word in enumerate(words) if word.endswith("deltackpt")
                 and words[i + 1 : i + 2] == ["compact"])  # fmt: skip
    arguments = [word for word in words[place + 2 :] if not word.startswith((">", "|"))]
    with click.Context(command) as context:
        command.parse_args(context, list(arguments))
        assert context.params["store_path"]
        assert context.params["as_json"]


def check_schedule(text: str) -> None:
    fields = text.split()
    assert len(fields) == 5, text
    for field, (low, high) in zip(fields, _RANGES, strict=True):
        for part in field.split(","):
            match = re.fullmatch(r"(\*|\d+(?:-\d+)?)(?:/(\d+))?", part)
            assert match, field
            assert all(low <= int(n) <= high for n in re.findall(r"\d+", match[1])), field
            assert match[2] is None or int(match[2]) > 0, field


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # names keep their case
    parser.read_string((JOBS / name).read_text())
    return parser


def test_the_systemd_units() -> None:
    service, timer = unit("deltackpt-compact@.service"), unit("deltackpt-compact@.timer")
    assert service["Service"]["Type"] == "oneshot"
    assert service["Service"]["ReadWritePaths"] == "%f"
    check_command(shlex.split(service["Service"]["ExecStart"]))
    assert timer["Timer"]["OnCalendar"] == "hourly"
    assert timer["Install"]["WantedBy"] == "timers.target"


def test_the_systemd_units_as_systemd_sees_them(tmp_path: Path) -> None:
    """Where systemd is installed; elsewhere the test above is what there is."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        return
    for name in ("deltackpt-compact@.service", "deltackpt-compact@.timer"):
        text = (JOBS / name).read_text().replace("/opt/deltackpt/bin/deltackpt", "/bin/true")
        (tmp_path / name).write_text(text.replace("User=deltackpt", "User=root"))
    done = subprocess.run(
        [tool, "verify", "--man=no", str(tmp_path / "deltackpt-compact@tmp.timer")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    mine = [line for line in done.stderr.splitlines() if "deltackpt" in line]
    assert not [line for line in mine if "Unknown" in line or "Failed to parse" in line], mine


def test_the_cron_line() -> None:
    text = (JOBS / "deltackpt.cron").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    settings = [line for line in lines if re.match(r"[A-Z]+=", line)]
    assert settings == ["SHELL=/bin/sh", "PATH=/opt/deltackpt/bin:/usr/bin:/bin"]
    jobs = [line for line in lines if line not in settings]
    assert len(jobs) == 1
    words = jobs[0].split(None, 6)
    check_schedule(" ".join(words[:5]))
    assert words[5] == "deltackpt"  # the user
    assert "%" not in words[6]  # cron would make a line end of it
    check_command(shlex.split(words[6]))


def test_the_slurm_script() -> None:
    path = JOBS / "compact.slurm"
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n")
    lines = text.splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(i for i, line in enumerate(lines) if line in options) < first
    call = re.search(r"^ +(deltackpt compact .*?) \|\|$", text, re.M)
    assert call
    check_command(shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", call[1])))


@pytest.mark.parametrize(("code", "ends_with"), [(0, 0), (11, 0), (12, 12)])
def test_the_slurm_script_takes_busy_for_done(tmp_path: Path, code: int, ends_with: int) -> None:
    for name, line in (("srun", 'shift; exec "$@"'), ("nice", 'shift 2; exec "$@"'),
                       ("deltackpt", f'echo "$@"; exit {code}')):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(JOBS / "compact.slurm"), "/some where/store"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == ends_with, done.stderr
    assert done.stdout.startswith("compact /some where/store --when-ratio 0.5")


def test_the_kubernetes_job() -> None:
    [job] = list(yaml.safe_load_all((JOBS / "compact-cronjob.yaml").read_text()))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    spec: dict[str, Any] = job["spec"]
    check_schedule(spec["schedule"])
    assert spec["concurrencyPolicy"] == "Forbid"
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    [container] = pod["containers"]
    check_command(container["command"] + container["args"])
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert container["command"][2].startswith(container["volumeMounts"][0]["mountPath"])
