"""Prevents: a link in a store takes commands out of it, to count and delete what is there."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from authors import Author, check_everything
from command_line import run
from deltackpt_store.client import WriterClient
from deltackpt_store.codecs import RAW, Encoded
from deltackpt_store.compact import compact
from deltackpt_store.errors import CorruptionError, StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.manifest import Commit
from deltackpt_store.names import relative_pack_path
from deltackpt_store.pack import read_footer
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.repair import repair
from deltackpt_store.retention import retire
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
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
    done = run("du", path, "--json")
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


# folders of a store behind links ------------------------------------------------------------


class Linked:
    """A store of two runs, and a copy of it. Every save is a pack of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.copy = path / "store", path / "backup"
        store = Store.create(self.path)
        self.kept = self._save("main", [1, 2])
        self.retired = self._save("side", [1, 2, 3])[:2]
        shutil.copytree(self.path, self.copy)
        retire(store, self.retired)

    def _save(self, run: str, steps: list[int]) -> list[Commit]:
        author = Author(Store.open(self.path), run)
        commits = [author.save(step, [f"{run}.{step}.{i}" for i in range(3)]) for step in steps]
        author.close()
        return commits

    def link(self, *folders: str) -> None:
        """Put links to the copy in place of these folders."""
        for folder in folders:
            shutil.rmtree(self.path / folder)
            (self.path / folder).symlink_to(self.copy / folder)

    def packs(self) -> list[str]:
        return sorted(f"packs/{folder.name}" for folder in (self.path / "packs").iterdir())

    def there(self) -> dict[str, bytes]:
        """All files of the copy."""
        files = (file for file in self.copy.rglob("*") if file.is_file())
        return {str(file.relative_to(self.copy)): file.read_bytes() for file in files}


@pytest.fixture
def linked(tmp_path: Path) -> Linked:
    return Linked(tmp_path)


def test_collection_deletes_nothing_behind_a_link(linked: Linked) -> None:
    """The links lead to a backup: it has the same packs, which the store may well be tired of."""
    assert len(collect(Store.open(linked.path), dry_run=True).packs) > 0
    linked.link(*linked.packs())
    retire(Store.open(linked.path), linked.retired)
    before = linked.there()
    assert collect(Store.open(linked.path)).packs == []
    assert linked.there() == before
    check_everything(Store.open(linked.path), linked.kept)


def test_records_of_a_run_behind_a_link_stay(linked: Linked) -> None:
    """Those of the copy are marked as retired, as they might be at another place of the same."""
    retire(Store.open(linked.copy), linked.retired)
    linked.link("runs/side")
    before = linked.there()
    report = collect(Store.open(linked.path))
    assert report.commits == []
    assert report.packs  # their chunks, which lie in the store
    assert linked.there() == before
    check_everything(Store.open(linked.path), linked.kept)


def test_a_copy_behind_a_link_is_not_relied_on(linked: Linked) -> None:
    """Whoever takes the link away must not take the only copy with it."""
    (linked.path / "packs" / "zz").mkdir()  # foreign
    assert "packs/00" not in linked.packs()  # what sorts first is preferred
    for name in Store.open(linked.path).packs.names():
        other = f"00{name[2:]}"
        _rewritten(
            linked.path / relative_pack_path(name), linked.copy / relative_pack_path(other), other
        )
    (linked.path / "packs" / "00").symlink_to(linked.copy / "packs" / "00")
    store = Store.open(linked.path)
    assert any(name.startswith("00") for name in store.packs.names())
    collect(store)
    (linked.path / "packs" / "00").unlink()
    check_everything(Store.open(linked.path), linked.kept)


def _rewritten(source: Path, target: Path, name: str) -> None:
    """The records of a raw pack in a pack of another name."""
    uuid = Store.open(source.parents[2]).uuid
    entries = read_footer(FileIO(), str(source), store_uuid=uuid).entries
    data = source.read_bytes()
    target.parent.mkdir(exist_ok=True)
    pack = PackWriter(FileIO(), str(target), uuid, name[:16], int(name[17:]))
    for chunk_id, place in entries.items(name):
        assert place.codec == RAW
        payload = data[place.payload : place.payload + place.stored]
        pack.append(chunk_id, place.raw, Encoded(RAW, b"", (), [payload]))
    pack.finish()


@pytest.mark.parametrize("act", [repair, compact], ids=["repair", "compact"])
@pytest.mark.parametrize("place", ["packs/{pack}", "runs/main", "quarantine/packs"])
def test_who_writes_everywhere_refuses_links(
    linked: Linked, act: Callable[..., object], place: str
) -> None:
    folder = place.format(pack=linked.packs()[0].rpartition("/")[2])
    (linked.path / folder).mkdir(exist_ok=True)
    (linked.copy / folder).mkdir(exist_ok=True)
    linked.link(folder)
    before = linked.there()
    with pytest.raises(StorageError, match="symbolic link") as raised:
        act(Store.open(linked.path))
    assert raised.value.kind == "linked-folder"
    assert raised.value.context["path"] == str(linked.path / folder)
    act(Store.open(linked.path), dry_run=True)
    assert linked.there() == before


def test_saves_and_retirement_are_not_written_behind_links(linked: Linked) -> None:
    linked.link("runs/side", "runs/main")
    before = linked.there()
    with pytest.raises(StorageError, match="symbolic link"):
        retire(Store.open(linked.path), linked.kept[:1])
    client = WriterClient(linked.path, "main", seed=1, ring_bytes=1 << 20)
    with pytest.raises(StorageError, match="symbolic link"):
        client.ready(60)
    assert not client.alive
    (linked.copy / "packs" / "empty").mkdir()
    for number in range(256):
        folder = linked.path / "packs" / f"{number:02x}"
        if not folder.exists():
            folder.symlink_to(linked.copy / "packs" / "empty")
    author = Author(Store.open(linked.path), "another")
    with pytest.raises(StorageError, match="symbolic link"):
        author.save(1, ["new"])
    author.close()
    (linked.copy / "packs" / "empty").rmdir()  # nothing was put there
    assert linked.there() == before


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "damaged"])
def test_a_link_in_place_of_a_file_goes_alone(linked: Linked, whole: bool) -> None:
    """Packs and manifests kept elsewhere by such means are read; what is deleted or set aside is
    the link."""
    files = [*(linked.path / "packs").rglob("*.pack"), *(linked.path / "manifests").iterdir()]
    for file in files:
        there = linked.copy / file.relative_to(linked.path)
        if not whole and file.suffix:
            data = bytearray(there.read_bytes())
            data[len(data) // 3] ^= 1
            there.write_bytes(data)
        file.unlink()
        file.symlink_to(there)
    before = linked.there()
    if whole:
        report = collect(Store.open(linked.path))
        assert report.packs
        assert report.manifests
        check_everything(Store.open(linked.path), linked.kept)
    else:
        assert repair(Store.open(linked.path)).quarantined
        assert any(file.is_symlink() for file in (linked.path / "quarantine").rglob("*.pack"))
    assert linked.there() == before


def test_a_quarantine_on_another_disk_than_the_packs_is_told_with_a_way_out(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: "Invalid cross-device link", where `packs` has been put on another disk."""
    (file, *_) = (linked.path / "packs").rglob("*.pack")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)

    def crossing(io: FileIO, source: str, target: str) -> None:
        if "/quarantine/" in target:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        os.link(source, target)

    monkeypatch.setattr(FileIO, "link", crossing)
    report = repair(Store.open(linked.path))
    assert not report.quarantined
    assert any("quarantine lies on another file system than packs" in str(x) for x in report.left)


def test_verification_tells_of_links(linked: Linked) -> None:
    linked.link("runs/side", linked.packs()[0])
    report = verify(Store.open(linked.path))
    assert report.ok
    assert {note.name for note in report.notes if note.kind == "store"} == {
        "runs/side", linked.packs()[0],
    }  # fmt: skip
    done = run("verify", linked.path)
    assert done.exit_code == 0
    assert "note: runs/side: it is a symbolic link" in done.output
