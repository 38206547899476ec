"""How many cores are used: no more than a container may, however many the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deltackpt_store import cores
from deltackpt_store.cores import usable_cores


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of a machine with eight cores, and no quota yet."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "_MOUNT", tmp_path / "mount")
    return tmp_path


def say(groups: Path, membership: str, **files: str) -> None:
    (groups / "groups").write_text(membership)
    for name, text in files.items():
        path = groups / "mount" / name.replace("__", "/").replace("--", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_a_quota_the_affinity_counts(groups: Path) -> None:
    assert usable_cores() == 8  # no control groups at all
    say(groups, "0::/job\n", **{"job__cpu--max": "max 100000\n"})
    assert usable_cores() == 8


@pytest.mark.parametrize(
    ("quota", "count"), [("50000 100000", 1), ("150000 100000", 2), ("400000 100000", 4),
                         ("6400000 100000", 8), ("0 0", 8), ("nonsense", 8)],
)  # fmt: skip
def test_the_quota_of_a_container_counts(groups: Path, quota: str, count: int) -> None:
    say(groups, "0::/\n", **{"cpu--max": quota})
    assert usable_cores() == count


def test_the_least_of_the_groups_around_it_counts(groups: Path) -> None:
    say(groups, "1:name=systemd:/other\n0::/pod/box\n",
        **{"pod__box__cpu--max": "max 100000", "pod__cpu--max": "200000 100000"})  # fmt: skip
    assert usable_cores() == 2


def test_groups_of_the_first_version_count(groups: Path) -> None:
    say(groups, "4:memory:/box\n3:cpu,cpuacct:/box\n",
        **{"cpu__box__cpu--cfs_quota_us": "300000", "cpu__box__cpu--cfs_period_us": "100000",
           "cpu__cpu--cfs_quota_us": "-1", "cpu__cpu--cfs_period_us": "100000"})  # fmt: skip
    assert usable_cores() == 3
