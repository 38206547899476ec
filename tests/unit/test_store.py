"""The store directory: creating, opening, any path, read-only use, snapshots."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from deltackpt_store import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    FileIO,
    InvalidInputError,
    NotFoundError,
    StorageError,
    Store,
    UnsupportedFormatError,
    manifest_io,
)
from deltackpt_store.budgeted import Budget
from deltackpt_store.client import WriterClient
from deltackpt_store.location import PROBE_PREFIX
from deltackpt_store.manifest import Manifest
from deltackpt_store.repair import repair
from deltackpt_store.store import DIRECTORIES
from deltackpt_store.store_writer import StoreWriter
from deltackpt_store.verify import verify
from small_store import SmallStore, pattern
from step_content import TENSORS, content, steps_of
from toy_trainer import SEED, ToyTrainer


def listing(path: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and directory below `path` with what any touch would change."""
    found: dict[str, tuple[int, int, int]] = {}
    for directory, names, files in os.walk(path):
        for name in [".", *names, *files]:
            info = os.lstat(os.path.join(directory, name))
            found[os.path.join(directory, name)] = (info.st_size, info.st_mtime_ns, info.st_mode)
    return found


# creating and opening ---------------------------------------------------------------------------


def test_create_then_open(tmp_path: Path) -> None:
    """A store is recognised by its FORMAT and nothing else."""
    made = Store.create(tmp_path / "a" / "b" / "store")
    assert os.path.isabs(made.path)
    assert len(made.uuid) == 16
    assert {*os.listdir(made.path)} == {"FORMAT", "cache", *DIRECTORIES}
    opened = Store.open(made.path)
    assert (opened.path, opened.uuid) == (made.path, made.uuid)
    assert Store.create(made.path).uuid == made.uuid
    assert opened.runs() == []
    assert opened.pins() == {}
    assert Store.create(tmp_path / "other").uuid != made.uuid
    with pytest.raises(ConflictError, match="already") as caught:
        Store.create(made.path, exist_ok=False)
    assert caught.value.kind == "exists"


def test_format_file_can_be_checked_by_hand(tmp_path: Path) -> None:
    """Whoever finds the directory in ten years can tell what it is, and whether it is whole."""
    store = Store.create(tmp_path / "s")
    first, second, rest = (tmp_path / "s" / "FORMAT").read_bytes().split(b"\n")
    assert rest == b""
    assert blake3(first + b"\n").hexdigest().encode() == second
    assert msgspec.json.decode(first)["store"] == store.uuid.hex()
    assert msgspec.json.decode(first)["digest"] == "blake3-256"


@pytest.mark.parametrize("what", ["missing", "empty", "other", "file", "below-a-file"])
def test_not_a_store(tmp_path: Path, what: str) -> None:
    """A wrong path is named, and is not turned into an empty store."""
    path = tmp_path / "x"
    if what in ("empty", "other"):
        path.mkdir()
    if what == "other":
        (path / "model.pt").write_bytes(b"x")
    if what in ("file", "below-a-file"):
        path.write_bytes(b"x")
    if what == "below-a-file":
        path = path / "y"
    before = listing(tmp_path)
    with pytest.raises(NotFoundError, match="not a deltackpt store") as caught:
        Store.open(path)
    assert caught.value.kind == "not-a-store"
    assert str(path) in str(caught.value)
    assert caught.value.context["path"] == str(path)
    assert listing(tmp_path) == before
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_path_that_leads_in_a_circle_is_not_a_damaged_store(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for call in (Store.open, Store.create):
        with pytest.raises(StorageError, match="symbolic link") as caught:
            call(tmp_path / "loop")
        assert str(caught.value).count("in place of the symbolic link") == 1


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_paths_that_name_nothing(path: str) -> None:
    """An empty path must not mean the working directory."""
    for call in (Store.open, Store.create):
        with pytest.raises(InvalidInputError):
            call(path)


def test_create_refuses_a_directory_with_something_else_in_it(tmp_path: Path) -> None:
    """A mistyped path must not mix a store into somebody's home directory."""
    (tmp_path / "notes.txt").write_bytes(b"x")
    before = listing(tmp_path)
    with pytest.raises(InvalidInputError, match=r"notes\.txt") as caught:
        Store.create(tmp_path)
    assert caught.value.kind == "not-empty"
    with pytest.raises(InvalidInputError, match="is a file"):
        Store.create(tmp_path / "notes.txt")
    with pytest.raises(StorageError):
        Store.create(tmp_path / "notes.txt" / "below")
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["lost+found", ".DS_Store", ".nfs00000000deadbeef", ".snapshot", "Thumbs.db"]
)
def test_what_file_systems_put_into_an_empty_directory_is_no_obstacle(
    tmp_path: Path, name: str
) -> None:
    """Such as the top of a disk that was mounted for the store."""
    (tmp_path / name).mkdir()
    assert Store.create(tmp_path).uuid == Store.open(tmp_path).uuid
    assert (tmp_path / name).is_dir()


def test_create_continues_an_unfinished_create(tmp_path: Path) -> None:
    """A crash while a store is made must not leave a directory that nothing can use."""
    for name in ("packs", "runs", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-0123-FORMAT").write_bytes(b"{")
    store = Store.create(tmp_path)
    assert Store.open(tmp_path).uuid == store.uuid
    (tmp_path / "pins").rmdir()  # as copying tools do with empty directories
    assert Store.create(tmp_path).uuid == store.uuid
    assert (tmp_path / "pins").is_dir()


def test_create_makes_no_lost_folder_that_says_what_is_needed(
    small: SmallStore, tmp_path: Path
) -> None:
    """Prevents: a training is started on a store that has lost its runs or pins, and the empty
    folders made for it let collection delete everything."""
    steps_of(small, "main", [1])
    os.rmdir(f"{small.path}/pins")
    Store.create(small.path)
    assert not os.path.exists(f"{small.path}/pins")
    shutil.rmtree(f"{small.path}/runs")
    with pytest.raises(CorruptionError, match="lost its directory runs"):
        Store.create(small.path)
    with pytest.raises(CorruptionError, match="lost its directory runs"):
        StoreWriter(Store.open(small.path)).heed()
    assert not os.path.exists(f"{small.path}/runs")


def test_create_does_not_replace_a_lost_format(small: SmallStore, tmp_path: Path) -> None:
    """A new FORMAT (with a new uuid) over existing packs would disown them all."""
    steps_of(small, "main", [1])
    os.unlink(f"{small.path}/FORMAT")
    with pytest.raises(InvalidInputError, match="FORMAT is lost"):
        Store.create(small.path)
    with pytest.raises(NotFoundError, match="FORMAT was lost"):
        Store.open(small.path)
    assert not os.path.exists(f"{small.path}/FORMAT")


def create_in_process(path: str, start: Any, out: Any) -> None:
    start.wait()
    out.put(Store.create(path).uuid)


def test_racing_creates_end_with_one_store(tmp_path: Path) -> None:
    """Two ranks that start at once must not write to two stores under one name."""
    context = multiprocessing.get_context("spawn")
    for attempt in range(2):
        start, out = context.Barrier(4), context.SimpleQueue()
        path = str(tmp_path / f"deep{attempt}" / "store")
        racers = [
            context.Process(target=create_in_process, args=(path, start, out)) for _ in range(4)
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
            assert racer.exitcode == 0
        uuids = {out.get() for _ in racers}
        assert uuids == {Store.open(path).uuid}


class MeanwhileIO(FileIO):
    """Lets another process make the store just before this one publishes its FORMAT."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.synced: list[str] = []

    def link(self, source: str, target: str) -> None:
        if target.endswith("FORMAT") and not os.path.exists(target):
            self.other = Store.create(self.path)
            self.synced.clear()
        super().link(source, target)

    def sync_directory(self, path: str) -> None:
        self.synced.append(path)
        super().sync_directory(path)


def test_the_loser_of_a_race_uses_the_winners_store(tmp_path: Path) -> None:
    """The loser's store must be as durable as if it had made it itself."""
    path = str(tmp_path / "s")
    io = MeanwhileIO(path)
    store = Store.create(path, io=io)
    assert store.uuid == io.other.uuid
    assert io.synced == [path, str(tmp_path)]
    with pytest.raises(ConflictError):
        Store.create(str(tmp_path / "t"), io=MeanwhileIO(str(tmp_path / "t")), exist_ok=False)


def test_create_mode(tmp_path: Path) -> None:
    """A group that shares a store can write to all of it."""
    store = Store.create(tmp_path / "s", mode=0o2770)
    for name in (".", *DIRECTORIES):
        assert stat.S_IMODE(os.stat(f"{store.path}/{name}").st_mode) == 0o2770


def test_what_a_group_may_do_holds_for_all_folders(tmp_path: Path) -> None:
    """Prevents: a store that a group shares, to which only the one who began can save."""
    before = os.umask(0o022)
    try:
        store = Store.create(tmp_path / "s", mode=0o2770)
        writer = ToyTrainer(WriterClient(store.path, "main", seed=SEED, ring_bytes=1 << 20,
                                         slot_bytes=1 << 18, mode="thread"))  # fmt: skip
        writer.save_now(1)
        writer.client.close(60)
    finally:
        os.umask(before)
    folders = [f for f in (tmp_path / "s").rglob("*") if f.is_dir() and f.name != "index"]
    assert {f.name for f in folders} >= {"main", "leases"}
    assert {stat.S_IMODE(f.stat().st_mode) for f in folders} == {0o2770}
    lock = tmp_path / "s" / "runs" / "main" / ".lock"
    assert lock.stat().st_mode & 0o022 == 0o020


def test_what_is_made_anew_is_for_the_group_too(tmp_path: Path) -> None:
    """Prevents: a store that a group shares, to which only the one who repaired it can save."""
    before = os.umask(0o022)
    try:
        path = tmp_path / "s"
        made = Store.create(path, mode=0o2770).path
        writer = ToyTrainer(WriterClient(made, "main", seed=SEED, ring_bytes=1 << 20,
                                         slot_bytes=1 << 18, mode="thread"))  # fmt: skip
        writer.save_now(1)
        writer.client.close(60)
        shutil.copytree(path, tmp_path / "copy")
        for name in ("runs", "gc", "quarantine", "cache"):
            shutil.rmtree(path / name)
        pack = next(path.glob("packs/*/*.pack"))
        os.truncate(pack, pack.stat().st_size - 1)
        assert repair(path, sources=[tmp_path / "copy"]).ok
        assert verify(Store.open(path), budget=Budget(seconds=60.0)).ok
        folders = [f for f in path.rglob("*") if f.is_dir()]
        needed = [
            path / "runs" / "main",
            path / "gc",
            path / "quarantine" / "packs",
            path / "cache",
        ]
        assert {*needed} <= {*folders}
        bits = {f: stat.S_IMODE(f.stat().st_mode) for f in folders}
        shutil.rmtree(path / "cache")
        shutil.rmtree(path / "gc")
        Store.create(path)
        bits |= {path / f: stat.S_IMODE((path / f).stat().st_mode) for f in ("cache", "gc")}
    finally:
        os.umask(before)
    assert {f: mode for f, mode in bits.items() if mode != 0o2770} == {}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_create_reports_what_the_disk_said(tmp_path: Path, code: int) -> None:
    """A full or read-only disk is named with the way out, and leaves nothing that blocks."""

    class Failing(FileIO):
        def mkdir(self, path: str) -> None:
            raise OSError(code, os.strerror(code))

    with pytest.raises(StorageError, match=os.strerror(code)) as caught:
        Store.create(tmp_path / "s", io=Failing())
    assert caught.value.errno == code
    assert caught.value.hint
    Store.create(tmp_path / "s")


# FORMAT versions --------------------------------------------------------------------------------


def write_format(store: Store, **fields: Any) -> None:
    line = msgspec.json.encode({**msgspec.to_builtins(store.format), **fields}) + b"\n"
    Path(store.path, "FORMAT").write_bytes(line + blake3(line).hexdigest().encode() + b"\n")


@pytest.mark.parametrize(
    "fields",
    [{"deltackpt": 2}, {"digest": "blake4"}, {"read": ["holes"]}, {"deltackpt": 2, "read": 7}],
    ids=str,
)
def test_a_newer_store_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """An older tool must ask for an upgrade instead of damaging a newer store."""  # case 164
    store = Store.create(tmp_path / "s")
    write_format(store, **fields)
    for call in (Store.open, Store.create):
        with pytest.raises(UnsupportedFormatError, match="upgrade"):
            call(store.path)


def test_features_needed_for_writing_do_not_prevent_reading(tmp_path: Path) -> None:
    """A feature that only changes how to write must leave old stores readable by all."""
    store = Store.create(tmp_path / "s")
    write_format(store, write=["fences"], gc=["leases"])
    opened = Store.open(store.path)
    opened.format.require("read", opened.path)
    for purpose, missing in (("write", "fences"), ("gc", "leases")):
        with pytest.raises(UnsupportedFormatError, match=missing):
            opened.format.require(purpose, opened.path)
    with pytest.raises(UnsupportedFormatError, match="fences"):
        Store.create(store.path)


def test_every_damaged_byte_of_format_is_noticed(tmp_path: Path) -> None:
    """A flipped uuid or version must not open as another store or a newer one."""
    store = Store.create(tmp_path / "s")
    path = Path(store.path, "FORMAT")
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        broken = bytearray(good)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        with pytest.raises(CorruptionError) as caught:
            Store.open(store.path)
        assert caught.value.context["path"] == str(path)
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptionError):
            Store.open(store.path)
    path.write_bytes(b"x" * 100_000)
    with pytest.raises(DeltackptError):
        Store.open(store.path)


# paths ------------------------------------------------------------------------------------------

AWKWARD = [
    "with space",
    "Ärger-ß",
    "检查点",
    "💾🔥",
    "-rf",
    "a" * 200,
    "%s{0}$HOME",
    "new\nline",
    "'q\"",
]


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_paths(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path form that some code misreads would lose the store."""  # case 171
    monkeypatch.chdir(tmp_path)
    small = SmallStore(Path(name, name))
    head = steps_of(small, "main", [1, 2])
    small.close()
    store = Store.open(os.path.join(name, name))
    assert store.steps("main") == [1, 2]
    assert content(store, head)["w/a"] == TENSORS["w/a"].tobytes()
    store.pin("best", head)
    assert store.resolve_name("best").step == 2
    assert verify(store, level="restore").ok
    assert Store.open(os.fsencode(tmp_path / name / name)).uuid == store.uuid


def test_relative_path_and_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training script that changes directory must not save or read elsewhere."""  # case 174
    monkeypatch.chdir(tmp_path)
    small = SmallStore(Path("store"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    head = steps_of(small, "main", [1])
    assert content(small.store, head)["w/b"] == TENSORS["w/b"].tobytes()
    assert small.store.path == str(tmp_path / "store")
    assert os.listdir(tmp_path / "elsewhere") == []
    small.close()


@pytest.mark.parametrize("how", ["moved", "copied", "symlink", "link-to-parent"])
def test_moved_copied_and_linked_stores(small: SmallStore, tmp_path: Path, how: str) -> None:
    """Absolute paths inside would break a store that is moved to an archive."""  # case 95
    steps_of(small, "main", [1, 2])
    small.store.pin("keep", small.store.head("main"))
    target = tmp_path / "somewhere else"
    if how == "moved":
        os.rename(small.path, target)
    elif how == "copied":
        shutil.copytree(small.path, target)
    elif how == "symlink":
        target.symlink_to(small.path)
    else:
        (tmp_path / "up").symlink_to(tmp_path)
        target = tmp_path / "up" / "store"
    store = Store.open(target)
    assert store.uuid == small.store.uuid
    assert content(store, store.resolve_name("keep"))["w/a"] == TENSORS["w/a"].tobytes()
    assert verify(store).ok


def test_a_symlink_that_is_turned_elsewhere_does_not_move_an_open_store(tmp_path: Path) -> None:
    """Half of a save in each of two stores would be in neither."""
    one, two = Store.create(tmp_path / "one"), Store.create(tmp_path / "two")
    link = tmp_path / "link"
    link.symlink_to(one.path)
    store = Store.open(link)
    link.unlink()
    link.symlink_to(two.path)
    assert store.path == one.path


# read-only use ----------------------------------------------------------------------------------

READ_ALL = """
    import json, os, sys
    from deltackpt_store import Store
    from deltackpt_store.verify import verify
    os.setgid(65534); os.setuid(65534)
    store = Store.open(sys.argv[1])
    commit = store.resolve_name("latest")
    snapshot = store.snapshot(commit)
    buffer = memoryview(bytearray(4096))
    store.get_into(snapshot.chunks[0][0].tobytes(), buffer)
    print(json.dumps([store.steps("main"), list(store.pins()), len(store.index()),
                      verify(store, level="restore").ok, len(store.commits("main"))]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_read_only_directory_of_another_user(small: SmallStore, tmp_path: Path) -> None:
    """Reading somebody's checkpoint must not need write permission, nor leave a trace."""
    # case 85
    head = steps_of(small, "main", [1, 2])
    small.store.pin("best", head)
    small.close()
    for directory, _, files in os.walk(small.path):
        for name in files:
            os.chmod(os.path.join(directory, name), 0o444)
        os.chmod(directory, 0o555)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.owner() == "root" and str(parent) != "/" and not parent.stat().st_mode & 1:
            os.chmod(parent, parent.stat().st_mode | 0o011)
    before = listing(Path(small.path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READ_ALL), small.path],
        capture_output=True, text=True, check=False, cwd="/",
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout) == [[1, 2], ["best"], len(small.store.index()), True, 2]
    assert listing(Path(small.path)) == before


class ReadingIO(FileIO):
    """Fails every call that could change anything."""

    def create(self, path: str, mode: int = 0o666) -> int:
        raise AssertionError(f"create {path}")

    def link(self, source: str, target: str) -> None:
        raise AssertionError(f"link {target}")

    unlink = mkdir = rmdir = sync_directory = create


def test_reading_performs_no_writing_call(small: SmallStore) -> None:
    """What reads must not even try to write: it could succeed."""  # case 85
    head = steps_of(small, "main", [1, 2])
    small.store.pin("best", head)
    store = Store.open(small.path, io=ReadingIO())
    assert content(store, store.resolve_name("best")) == content(small.store, head)
    assert store.steps("main") == [1, 2]
    assert verify(store, level="restore").ok
    assert Store.create(small.path, io=ReadingIO()).uuid == store.uuid


# snapshots --------------------------------------------------------------------------------------


def test_snapshot_of_base_and_delta(small: SmallStore) -> None:
    """A delta resolves against its base to exactly what was saved."""
    first = small.save("main", 1, TENSORS, {"lr": 0.1})
    changed = {**TENSORS, "w/a": TENSORS["w/a"].copy()}
    changed["w/a"][7] += 1
    second = small.save("main", 2, changed, {"lr": 0.2}, parent=first, base=first)
    store = Store.open(small.path)
    assert second.base == first.manifest
    assert content(store, second)["w/a"] == changed["w/a"].tobytes()
    assert content(store, first)["w/a"] == TENSORS["w/a"].tobytes()
    snapshot = store.snapshot(second)
    assert snapshot.root == second.root
    assert snapshot.base == first.manifest
    assert set(store.snapshot(first).packs) < set(snapshot.packs)
    assert store.snapshot(second.manifest).root == second.root


def test_unchanged_step_costs_little(small: SmallStore) -> None:
    """Saving every step of a state that hardly changes must not fill the disk."""  # case 111
    big = {f"layer{i}/w": pattern(40_000, i) for i in range(20)}
    first = small.save("main", 1, big, {"lr": 0.1})

    def size() -> int:
        files = (Path(d, f) for d, _, names in os.walk(small.path) for f in names)
        return sum(f.stat().st_size for f in files)

    before = size()
    small.save("main", 2, big, {"lr": 0.1}, parent=first, base=first)
    assert size() - before < 2048


@pytest.mark.parametrize("how", ["other-run", "missing", "flipped", "truncated"])
def test_base_substituted(small: SmallStore, how: str) -> None:
    """A delta restored on top of another base would be a mixture of two models."""  # case 105
    first = small.save("main", 1, TENSORS)
    delta = small.save("main", 2, {**TENSORS, "w/b": TENSORS["w/b"] + 1}, parent=first, base=first)
    other = small.save("other", 1, {"w/a": pattern(5000, 7), "w/b": pattern(3000, 8)})
    path = Path(small.path, "manifests", first.manifest.hex())
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "other-run":
        shutil.copy(Path(small.path, "manifests", other.manifest.hex()), path)
    elif how == "flipped":
        path.write_bytes(data[:99] + bytes([data[99] ^ 4]) + data[100:])
    else:
        path.write_bytes(data[:-1])
    store = Store.open(small.path)
    for commit in (delta, first):
        with pytest.raises(CorruptionError) as caught:
            store.snapshot(commit)
        assert caught.value.context["path"] == f"manifests/{first.manifest.hex()}"
        assert (caught.value.context["run"], caught.value.context["step"]) == ("main", commit.step)
    assert content(store, other)["w/a"] == pattern(5000, 7).tobytes()


def test_chain_of_deltas_is_refused(small: SmallStore) -> None:
    """A delta upon a delta would make every step depend on all before it."""
    first = small.save("main", 1, TENSORS)
    second = small.save("main", 2, TENSORS, parent=first, base=first)
    manifest = small.store.manifest(second.manifest)
    chained = small.writer.write_manifest(msgspec.structs.replace(manifest, base=second.manifest))
    with pytest.raises(CorruptionError, match="base"):
        small.store.snapshot(chained)


def test_a_long_chain_of_deltas_is_refused_at_its_first_link(small: SmallStore) -> None:
    """A foreign store would have the reader go down manifest by manifest until Python gives up."""
    digest = small.save("main", 1, TENSORS).manifest
    for _ in range(sys.getrecursionlimit()):
        data = manifest_io.encode(Manifest(root=bytes(32), packs=(), base=digest))
        digest = manifest_io.digest_of(data)
        Path(small.store.path, "manifests", digest.hex()).write_bytes(data)
    with pytest.raises(CorruptionError, match="is named as a base and is none") as caught:
        small.store.snapshot(digest)
    assert caught.value.kind == "damaged-manifest"


@pytest.mark.parametrize("field", ["root", "base", "closure"])
def test_commit_that_disagrees_with_its_manifest(small: SmallStore, field: str) -> None:
    """A commit and a manifest that do not belong together are not a step."""
    commit = small.save("main", 1, TENSORS)
    wrong = msgspec.structs.replace(commit, **{field: bytes(32)})
    with pytest.raises(CorruptionError, match=field):
        small.store.snapshot(wrong)


@pytest.mark.parametrize("kind", ["FORMAT", "packs", "manifests", "runs"])
def test_newest_save_incomplete(small: SmallStore, kind: str) -> None:
    """With any one file of the newest save missing, the step before must still restore."""
    # case 87
    first = steps_of(small, "main", [1])

    def files() -> set[Path]:
        return {Path(d, f) for d, _, names in os.walk(small.path) for f in names}

    before = files()
    small.save("main", 2, {**TENSORS, "w/a": pattern(5000, 9)}, parent=first)
    lost = [f for f in files() - before if f.relative_to(small.path).parts[0] == kind]
    if kind == "FORMAT":
        lost = [Path(small.path, "FORMAT")]
    assert len(lost) == 1
    lost[0].unlink()
    if kind == "FORMAT":
        with pytest.raises(NotFoundError, match="FORMAT"):
            Store.open(small.path)
        return
    store = Store.open(small.path)
    if kind == "runs":
        assert store.head("main").step == 1
    else:
        with pytest.raises(CorruptionError):
            content(store, store.head("main"))
        report = verify(store)
        assert report.damaged_steps == [("main", 2)]
    assert content(store, store.find("main", 1))["w/a"] == TENSORS["w/a"].tobytes()


# one process, many uses -------------------------------------------------------------------------


def test_used_after_fork(small: SmallStore) -> None:
    """Data-loader workers inherit the open store; they may read through it."""  # case 64
    head = steps_of(small, "main", [1])
    expected = content(small.store, head)
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            ok = content(small.store, small.store.head("main")) == expected
            os._exit(0 if ok else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert content(small.store, head) == expected


def test_what_an_unfinished_create_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """A training that was killed while it made its store must be able to start again."""
    for name in ("packs", f"cache/{PROBE_PREFIX}0/dir"):
        (tmp_path / "store" / name).mkdir(parents=True)
    (tmp_path / "store/cache/.tmp-5eada49a1609-location").touch()
    store = Store.create(tmp_path / "store")
    assert store.runs() == []
    (tmp_path / "other/cache").mkdir(parents=True)
    (tmp_path / "other/cache/mine").touch()
    with pytest.raises(InvalidInputError):
        Store.create(tmp_path / "other")


def test_a_relative_path_without_a_directory_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 174
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StorageError, match=r"store: .*\(.*name a path from the root"):
        Store.create("store")


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT])
def test_a_file_server_that_is_gone_is_told_as_that(tmp_path: Path, code: int) -> None:
    Store.create(tmp_path / "store")

    class Gone(FileIO):
        def open(self, path: str) -> int:
            raise OSError(code, os.strerror(code), path)

    with pytest.raises(StorageError, match="look at the mount"):
        Store.open(tmp_path / "store", io=Gone())
