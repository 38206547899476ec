"""Prevents: a pipe, socket, device, link or directory where a store's file should be hangs a reader
or a training, or is written to."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from deltackpt_store import leases
from deltackpt_store.client import WriterClient
from deltackpt_store.compact import compact
from deltackpt_store.errors import CorruptionError, DeltackptError, StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.generation import newest_number, read_generation
from deltackpt_store.repair import repair
from deltackpt_store.retention import retire
from deltackpt_store.store import Store
from deltackpt_store.verify import verify
from toy_trainer import CHUNK, SEED, ToyTrainer

pytestmark = pytest.mark.timeout(120)

IO = FileIO()
STEPS = [1, 2, 3]


def plant_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def plant_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLANTS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": plant_socket,
    "directory": Path.mkdir,
    "link to a device": plant_link,
    "link to nothing": lambda path: path.symlink_to(path.with_name("elsewhere")),
    "link to itself": lambda path: path.symlink_to(path.name),
}
FILES = {
    "format": "FORMAT",
    "commit": "runs/main/*4",
    "manifest": "manifests/*",
    "pack": "packs/*/*.pack",
    "pin": "pins/best",
    "generation": "gc/0*",
    "collector's lock": "gc/lock",
    "lease": "gc/leases/" + "ab" * 8,
    "hold": "gc/holds/" + "ab" * 8 + "-00000000000000000004-main",
    "reserve": "gc/reserve",
    "run lock": "runs/main/.lock",
    "seal of the index": "cache/index/seal",
    "index": "cache/index/data.mdb",
    "lock of the index": "cache/index/users.lock",
}


def client(path: Path) -> WriterClient:
    return WriterClient(path, "main", seed=SEED, ring_bytes=8 * CHUNK, slot_bytes=4 * CHUNK,
                        mode="thread")  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one file of every kind: steps 0 (retired and collected), 1, 2 and 3."""
    path = tmp_path_factory.mktemp("made") / "store"
    writer = client(path)
    trainer = ToyTrainer(writer)
    for step in (0, *STEPS):
        trainer.save_now(step)
    writer.close(60)
    store = Store.open(path)
    retire(store, [store.find("main", 0)])
    store.pin("best", store.find("main", 2))
    collect(store)
    assert newest_number(IO, store.path) > 0
    return path


@pytest.fixture
def store_path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def victims(path: Path, kind: str) -> list[Path]:
    found = sorted(path.glob(FILES[kind])) or [path / FILES[kind]]
    assert all("*" not in str(one) for one in found)
    return found


def attempt(action: Callable[[], object]) -> DeltackptError | None:
    try:
        action()
    except DeltackptError as error:
        return error
    return None


def read_all(path: Path) -> None:
    store = Store.open(path)
    for commit in store.commits("main"):
        snapshot = store.snapshot(commit)
        for extent, ids in snapshot.chunks.items():
            spec = snapshot.layout.extents[extent]
            rooms = [memoryview(bytearray(spec.chunk_length(i))) for i in range(len(ids))]
            pairs = zip((row.tobytes() for row in ids), rooms, strict=True)
            store.reader(snapshot.packs).read(list(pairs))


def save_once(path: Path) -> None:
    writer = client(path)
    try:
        ToyTrainer(writer).save_now(4)
    finally:
        writer.close(60)


@pytest.mark.parametrize("plant", ["pipe", "link to nothing"])
@pytest.mark.parametrize("kind", FILES)
def test_nothing_waits_or_writes_there(store_path: Path, kind: str, plant: str) -> None:
    for victim in victims(store_path, kind):
        victim.parent.mkdir(parents=True, exist_ok=True)
        victim.unlink(missing_ok=True)
        PLANTS[plant](victim)
    errors = [
        attempt(lambda: read_all(store_path)),
        attempt(lambda: verify(Store.open(store_path))),
        attempt(lambda: collect(Store.open(store_path), timeout=0)),
        attempt(lambda: save_once(store_path)),
        attempt(lambda: collect(Store.open(store_path), timeout=0)),
    ]
    assert not (store_path / "elsewhere").exists()
    assert not victims(store_path, kind)[0].with_name("elsewhere").exists()
    for error in filter(None, errors):
        assert isinstance(error, (CorruptionError, StorageError, DeltackptError))
        told = str(error) + str(error.context)
        assert "Traceback" not in told
    if kind in ("seal of the index", "index", "lock of the index", "reserve"):
        assert errors[0] is errors[1] is errors[3] is None  # disposable


@pytest.mark.parametrize("plant", ["pipe", "socket", "directory", "link to a device"])
def test_errors_name_the_path_and_the_way_out(store_path: Path, plant: str) -> None:
    store = Store.open(store_path)
    reads: dict[str, Callable[[Store], object]] = {
        "format": lambda store: Store.open(store.path),
        "commit": lambda store: store.read_commit("main", store.numbers("main")[-1]),
        "manifest": lambda store: store.snapshot(store.find("main", 2)),
        "pack": lambda store: read_all(Path(store.path)),
        "pin": lambda store: store.pinned("best"),
        "generation": lambda store: read_generation(IO, store.path, newest_number(IO, store.path)),
        "collector's lock": collect,
        "lease": collect,
        "hold": collect,
    }
    for kind, read in reads.items():
        moved: list[Path] = []
        for victim in victims(store_path, kind):
            victim.parent.mkdir(parents=True, exist_ok=True)
            moved.append(victim)
            if victim.exists():
                victim.rename(store_path.parent / victim.name)
            PLANTS[plant](victim)
        with pytest.raises((CorruptionError, StorageError)) as caught:
            read(store)
        assert any(str(m.relative_to(store_path)) in str(caught.value) for m in moved), kind
        word = plant.rsplit(" ", 1)[-1]
        linked = kind in ("collector's lock", "lease", "hold") and word == "device"
        assert word in str(caught.value) or linked, str(caught.value)
        for victim in moved:
            victim.rmdir() if plant == "directory" else victim.unlink()
            if (store_path.parent / victim.name).exists():
                (store_path.parent / victim.name).rename(victim)
    assert verify(Store.open(store_path)).ok


@pytest.mark.parametrize("kind", ["pin", "pinned commit", "run"])
def test_what_is_listed_and_is_not_there_stops_collection(store_path: Path, kind: str) -> None:
    """A link to a disk that is not mounted, a file where a run was: it may come back."""
    store = Store.open(store_path)
    pinned = store.pinned("best")
    retire(store, [pinned])  # only the pin keeps it
    victim = store_path / {"pin": "pins/best", "run": "runs/main",
                           "pinned commit": f"runs/main/{pinned.number:020d}"}[kind]  # fmt: skip
    aside = store_path.parent / "aside"
    copy = shutil.copytree(store_path, store_path.parent / "copy")
    victim.rename(aside)
    if kind == "pin":
        victim.symlink_to("not/mounted")
    elif kind == "run":
        victim.write_bytes(b"")
    for refused in (collect, partial(collect, dry_run=True)):
        with pytest.raises((CorruptionError, StorageError)) as caught:
            refused(store)
        assert str(victim.relative_to(store_path)) in str(caught.value)
        assert caught.value.hint
    assert not verify(store).ok
    if kind != "run":
        assert repair(store, sources=[copy]).ok
        assert verify(store).ok
    else:
        victim.unlink()
        aside.rename(victim)
    assert store.pinned("best") == pinned
    read_all(store_path)
    collect(store)


def test_a_writer_does_not_wait_where_its_lease_should_be(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs(store_path / "gc/leases", exist_ok=True)
    os.mkfifo(store_path / "gc/leases" / ("ef" * 8))
    with pytest.raises(StorageError, match="pipe"):
        leases.Lease.take(IO, str(store_path), "ef" * 8)


@pytest.mark.parametrize("name", ["zz", "A0", ".x", "0"])
def test_what_has_not_the_name_of_a_folder_of_packs_is_passed_by(tmp_path: Path, name: str) -> None:
    writer = client(tmp_path / "store")
    trainer = ToyTrainer(writer)
    trainer.save_now(1)
    (tmp_path / "store/packs" / name).write_text("a file manager's")
    trainer.save_now(2)
    writer.close(60)
    store = Store.open(tmp_path / "store")
    assert verify(store).ok
    assert not collect(store).packs
    assert store.steps("main") == [1, 2]


@pytest.mark.parametrize(
    ("kind", "plant"),
    [("format", "link to itself"), ("commit", "link to itself"), ("manifest", "link to itself"),
     ("pack", "link to itself"), ("pin", "link to itself"), ("format", "link to nothing"),
     ("commit", "link to nothing"), ("pin", "link to nothing"), ("pack", "link to nothing"),
     ("manifest", "link to nothing")],
)  # fmt: skip
def test_a_file_that_became_a_link_is_mended_for_good(
    store_path: Path, kind: str, plant: str
) -> None:
    """Prevents: damage that repair reports and cannot mend, or that stops every later repair."""
    copy = shutil.copytree(store_path, store_path.parent / "copy")
    victim = victims(store_path, kind)[0]
    victim.unlink()
    PLANTS[plant](victim)
    assert repair(store_path, sources=[copy]).ok
    report = verify(Store.open(store_path))
    assert (report.ok, [note for note in report.notes if note.kind == "store"]) == (True, [])
    compact(Store.open(store_path))
    assert repair(store_path).found == 0
    read_all(store_path)


def test_a_pack_that_leads_nowhere_is_damage_to_all_or_none(store_path: Path) -> None:
    """Prevents: a store that nothing is wrong with, for `verify`, and that `compact` refuses."""
    store = Store.open(store_path)
    victim = store_path / "packs/ab" / f"{'ab' * 8}-00000009.pack"  # no step needs it
    victim.parent.mkdir(exist_ok=True)
    victim.symlink_to(store_path.parent / "unmounted")
    for refused in (compact, collect):
        with pytest.raises(StorageError, match="leads nowhere"):
            refused(Store.open(store_path))
    finding, = verify(store).findings  # fmt: skip
    assert (finding.kind, finding.hits) == ("pack", ())
    assert "leads nowhere" in finding.reason
    assert repair(store_path, dry_run=True).ok
    assert victim.is_symlink()
    assert repair(store_path).ok
    assert (store_path / "quarantine" / victim.relative_to(store_path)).is_symlink()
    assert verify(Store.open(store_path)).ok
    compact(Store.open(store_path))
    collect(Store.open(store_path))
    assert repair(store_path).found == 0
    read_all(store_path)


def test_a_link_that_something_lost_may_lie_behind_stays(store_path: Path) -> None:
    """Prevents: a repair that takes away what is only not mounted."""
    victim = max((store_path / "packs").glob("*/*.pack"), key=lambda path: path.stat().st_size)
    there = store_path.parent / "there"
    victim.rename(there)
    victim.symlink_to(store_path.parent / "unmounted")
    report = repair(store_path)
    assert not report.ok
    assert [left.name for left in report.left] == [str(victim.relative_to(store_path))]
    assert victim.is_symlink()
    victim.unlink()
    victim.symlink_to(there)
    assert repair(store_path).ok
    assert verify(Store.open(store_path)).ok
    read_all(store_path)


@pytest.mark.parametrize("plant", ["pipe", "link to itself"])
def test_a_lease_that_cannot_be_read_is_called_one(store_path: Path, plant: str) -> None:
    victim = store_path / FILES["lease"]
    victim.parent.mkdir(parents=True, exist_ok=True)
    PLANTS[plant](victim)
    for dry_run in (True, False):
        with pytest.raises(StorageError, match="leases of") as caught:
            collect(Store.open(store_path), dry_run=dry_run)
        assert victim.name in str(caught.value)
