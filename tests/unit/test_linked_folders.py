"""Prevents: a link in a store takes commands out of it, to count and delete what is there."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from deltackpt_store.errors import CorruptionError
from deltackpt_store.gc import collect
from deltackpt_store.store import Store
from deltackpt_tools.cli import cli
from small_store import SmallStore, pattern


@pytest.fixture
def store(tmp_path: Path) -> Path:
    small = SmallStore(tmp_path / "store")
    small.save("main", 1, {"w": pattern(5000)})
    small.close()
    (tmp_path / "mine").mkdir()
    for name in (".tmp-0123456789ab-mine", "notes"):
        (tmp_path / "mine" / name).write_bytes(bytes(100_000))
    return tmp_path / "store"


def _bytes(path: Path) -> int:
    done = CliRunner().invoke(cli, ["du", str(path), "--json"])
    assert done.exit_code == 0, done.output
    return sum(part["bytes"] for part in json.loads(done.stdout)["files"].values())


@pytest.mark.parametrize("place", ["packs/zz", "runs/linked", "cache/linked", "linked"])
def test_links_are_not_walked(store: Path, tmp_path: Path, place: str) -> None:
    collect(Store.open(store))
    before, there = _bytes(store), sorted((tmp_path / "mine").iterdir())
    link = store / place
    link.symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "up").symlink_to("/")
    assert _bytes(store) == before
    collect(Store.open(store))
    (tmp_path / "mine" / "up").unlink()
    assert sorted((tmp_path / "mine").iterdir()) == there
    assert link.is_symlink()


def test_packs_behind_a_link_are_not_deleted(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "other")
    small.save("main", 1, {"w": pattern(5000)})
    small.close()
    folders = list((tmp_path / "other" / "packs").iterdir())
    there = sorted((tmp_path / "other").rglob("*.pack"))
    Store.create(tmp_path / "store")
    for folder in folders:
        (tmp_path / "store" / "packs" / folder.name).symlink_to(folder)
    with pytest.raises(CorruptionError, match="another store"):
        collect(Store.open(tmp_path / "store"))
    assert sorted((tmp_path / "other").rglob("*.pack")) == there
