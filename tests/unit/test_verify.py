"""Verification: all damage, and exactly which steps and tensors it hits."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from command_line import run
from deltackpt_store import (
    Commit,
    CorruptionError,
    ExtentSpec,
    FileIO,
    InvalidInputError,
    Layout,
    NotFoundError,
    Snapshot,
    StorageError,
    Store,
    TensorView,
    codecs,
)
from deltackpt_store.codecs import Codec, Encoded
from deltackpt_store.compact import compact
from deltackpt_store.gc import collect
from deltackpt_store.impact import DamageMap, NeededChunks
from deltackpt_store.manifest_io import digest_of, encode, encode_commit, to_base
from deltackpt_store.names import number_name
from deltackpt_store.pack import pack_name, pack_path
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.retention import retire
from deltackpt_store.verify import Finding, VerifyReport, verify
from small_store import CHUNK, SmallStore, pattern

LEVELS = ("structure", "records", "chunks", "restore")


def three_steps(small: SmallStore) -> list[Commit]:
    """a is common to all steps, b changes partly at each, c is new at each."""
    a, b = pattern(3 * CHUNK // 4, 1), pattern(3 * CHUNK // 4, 2)
    commits: list[Commit] = []
    for step in (1, 2, 3):
        b = b.copy()
        b[step] += step
        tensors = {"m/a": a, "m/b": b, "m/c": pattern(2 * CHUNK // 4, 10 + step)}
        parent, base = (commits[-1], commits[0]) if commits else (None, None)
        commits.append(small.save("main", step, tensors, {"lr": 1.0}, parent=parent, base=base))
    return commits


def blobs(store: Store) -> dict[bytes, tuple[Path, int, int]]:
    """Chunk id -> (pack file, offset and length of the payload), of every record."""
    found: dict[bytes, tuple[Path, int, int]] = {}
    index = store.index()
    for name in index.packs():
        entries = index.entries(name)
        assert entries is not None
        for chunk_id, place in entries.items(name):
            path = Path(pack_path(store.path, name))
            found[chunk_id] = (path, place.payload, place.stored)
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def users(store: Store, commits: Sequence[Commit], chunk_id: bytes) -> set[tuple[int, str]]:
    """(step, tensor path) of all that need the chunk, looked up in the slow and plain way."""
    found: set[tuple[int, str]] = set()
    for commit in commits:
        snapshot = store.snapshot(commit)
        for view in snapshot.layout.tensors:
            for row in snapshot.chunks.get(view.extent, ()):
                if bytes(row) == chunk_id:
                    found.add((commit.step, snapshot.layout.paths[view.slot]))
    return found


def hits(finding: Finding) -> set[tuple[int, str]]:
    return {(hit.step, tensor) for hit in finding.hits for tensor in hit.tensors}


def only(report: VerifyReport) -> Finding:
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def restores(store: Store, commit: Commit) -> bool:
    try:
        snapshot = store.snapshot(commit)
        for extent, ids in snapshot.chunks.items():
            spec = snapshot.layout.extents[extent]
            store.reader(snapshot.packs).read(
                [(row.tobytes(), memoryview(bytearray(spec.chunk_length(i))))
                 for i, row in enumerate(ids)]
            )  # fmt: skip
    except CorruptionError:
        return False
    return True


# health -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_healthy_store(small: SmallStore, level: Any) -> None:
    """No false alarm, and the report says what was looked at."""
    three_steps(small)
    small.save("fork", 5, {"x": pattern(5000, 3)}, parent=small.store.head("main"))
    small.store.pin("best", small.store.head("main"))
    report = verify(small.store, level=level)
    assert report.ok
    assert report.damaged_steps == []
    assert (report.level, report.runs, report.commits, report.manifests) == (level, 2, 4, 4)
    assert report.chunks == len(blobs(small.store))
    assert report.bytes == sum(size for _, _, size in blobs(small.store).values())
    assert msgspec.json.decode(msgspec.json.encode(report))["findings"] == []


def test_an_empty_store(tmp_path: Path) -> None:
    """A store before its first save is whole."""
    store = Store.create(tmp_path / "s")
    for level in LEVELS:
        assert verify(store, level=level).ok
    assert not hasattr(store, "closed")


def test_progress_reaches_the_end(small: SmallStore) -> None:
    """A progress bar counts bytes up to the total and no further."""
    small.save("main", 1, {f"t{i}": pattern(200_000, i) for i in range(8)})
    seen: list[tuple[int, int]] = []
    report = verify(small.store, progress=lambda done, total: seen.append((done, total)), threads=3)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {report.bytes}
    assert seen[-1][0] == report.bytes
    with pytest.raises(ZeroDivisionError):
        verify(small.store, progress=lambda done, total: print(1 // 0), threads=3)


def test_bad_arguments(small: SmallStore) -> None:
    """A level or run that does not exist is not silently taken as 'nothing to check'."""
    three_steps(small)
    with pytest.raises(InvalidInputError, match="structure"):
        verify(small.store, level="all")
    with pytest.raises(NotFoundError, match="main"):
        verify(small.store, run="mian")


# chunks -----------------------------------------------------------------------------------------


def test_every_blob_in_turn(small: SmallStore) -> None:
    """A flipped bit is found, named with its tensors, and costs no step that does not need it."""
    commits = three_steps(small)  # case 112
    for chunk_id, (path, offset, length) in blobs(small.store).items():
        flip(path, offset + length // 2)
        expected = users(small.store, commits, chunk_id)
        finding = only(verify(small.store, threads=2))
        assert (finding.kind, finding.name) == ("chunk", chunk_id.hex())
        assert finding.pack == str(path.relative_to(small.path))
        assert hits(finding) == expected
        report = verify(small.store, level="restore")
        assert hits(only(report)) == expected
        assert report.damaged_steps == sorted({("main", step) for step, _ in expected})
        for commit in commits:
            hurt = ("main", commit.step) in report.damaged_steps
            assert restores(Store.open(small.path), commit) is not hurt
        flip(path, offset + length // 2)
    assert verify(small.store).ok


def test_five_damaged_blobs_across_three_steps(small: SmallStore) -> None:
    """A verifier that stops at the first, or leaves one out, gives false comfort."""  # case 114
    commits = three_steps(small)
    every = blobs(small.store)
    # One only step 1 needs, one only step 2, one only step 3, and two that all of them need.
    chosen: list[bytes] = []
    for steps, count in (({1}, 1), ({2}, 1), ({3}, 1), ({1, 2, 3}, 2)):
        matching = [i for i in every if {s for s, _ in users(small.store, commits, i)} == steps]
        chosen += matching[:count]
    assert len(set(chosen)) == 5
    for chunk_id in chosen:
        path, offset, _ = every[chunk_id]
        flip(path, offset)
    for threads in (1, 4):
        report = verify(small.store, threads=threads)
        assert {f.name: hits(f) for f in report.findings} == {
            i.hex(): users(small.store, commits, i) for i in chosen
        }
        assert report.damaged_steps == [("main", 1), ("main", 2), ("main", 3)]
        assert not report.ok


def test_manifests_that_no_step_names_are_told_and_are_no_damage(small: SmallStore) -> None:
    """Of saves that were killed before their commit, and of steps that retention let go of."""
    commits = three_steps(small)
    assert verify(small.store).notes == ()
    retire(small.store, commits[2:])
    path = small.store.path
    broken_off = encode(
        msgspec.structs.replace(small.store.manifest(commits[0].manifest), salt=b"x")
    )
    with open(f"{path}/manifests/{digest_of(broken_off).hex()}", "xb") as file:
        file.write(broken_off)
    orphans = {commits[2].manifest.hex(), digest_of(broken_off).hex()}
    for level in LEVELS:
        report = verify(Store.open(path), level=level)
        assert report.ok
        assert {(n.kind, n.name.rpartition("/")[2]) for n in report.notes} == {
            ("manifest", name) for name in orphans
        }
    done = run("verify", path)
    assert done.exit_code == 0
    assert "note: 2 manifests that no step names" in done.output
    assert "deltackpt gc" in done.output
    shown = json.loads(run("verify", path, "--json").stdout)
    assert shown["ok"]
    assert [note["kind"] for note in shown["notes"]] == ["manifest", "manifest"]
    assert verify(Store.open(path), run="main").notes == ()  # of one run only
    small.close()
    assert len(collect(Store.open(path)).manifests) == 2
    assert verify(Store.open(path)).notes == ()
    assert "note:" not in run("verify", path).output


def test_a_chunk_with_another_copy_hits_nobody(small: SmallStore) -> None:
    """Damage that a restore gets around is reported as such, not as a lost step."""
    commit = three_steps(small)[0]
    chunk_id = small.store.snapshot(commit).chunks[0][0].tobytes()
    path, offset, length = blobs(small.store)[chunk_id]
    raw = path.read_bytes()[offset : offset + length]
    name = pack_name("aa" * 8, 1)
    copy = PackWriter(FileIO(), pack_path(small.path, name), small.store.uuid, "aa" * 8, 1)
    copy.append(chunk_id, length, Encoded(codecs.RAW, b"", (), [raw]))
    copy.finish()
    flip(path, offset)
    for level in ("chunks", "restore"):
        report = verify(small.store, level=level)
        assert hits(only(report)) == set()
        assert report.damaged_steps == []
        assert not report.ok
    assert restores(Store.open(small.path), commit)


def test_a_record_front_alone(small: SmallStore) -> None:
    """A damaged record head costs no restore, and yet is damage."""
    commits = three_steps(small)
    path, offset, _ = next(iter(blobs(small.store).values()))
    flip(path, offset - 40)
    report = verify(small.store)
    assert hits(only(report)) == set()
    assert all(restores(Store.open(small.path), commit) for commit in commits)


def test_fronts_of_two_records_exchanged(small: SmallStore) -> None:
    """Record heads that are whole but not where they belong would mislead a salvage."""
    small.save("main", 1, {"a": pattern(2 * CHUNK // 4, 1)})
    (one, (path, first, _)), (two, (_, second, _)) = blobs(small.store).items()
    data = bytearray(path.read_bytes())
    a, b = slice(first - 64, first), slice(second - 64, second)
    data[a], data[b] = data[b], data[a]
    path.write_bytes(data)
    report = verify(small.store)
    assert {(f.kind, f.name, f.hits) for f in report.findings} == {
        ("chunk", one.hex(), ()),
        ("chunk", two.hex(), ()),
    }


def test_encoded_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded records are decoded and proven, at any damaged byte."""
    monkeypatch.setattr("small_store.CHUNK", 8192)
    small = SmallStore(tmp_path / "s", codec="auto")
    smooth = np.linspace(0, 1, 6144, dtype=np.float32)
    commit = small.save("main", 1, {"w": smooth})
    small.close()
    assert all(p and p.codec for p in map(small.store.index().get, blobs(small.store)))
    for chunk_id, (path, offset, length) in blobs(small.store).items():
        for at in (offset - 1, offset - 33, offset, offset + length - 1):
            flip(path, at)
            finding = only(verify(small.store))
            assert finding.name == chunk_id.hex()
            assert hits(finding) == {(1, "w")}
            flip(path, at)
    assert restores(small.store, commit)


def test_a_missing_pack(small: SmallStore) -> None:
    """The loss of a pack is one finding that names every step and tensor it held."""
    commits = three_steps(small)
    packs = sorted({path for path, _, _ in blobs(small.store).values()})
    by_pack = {p: [i for i, (q, _, _) in blobs(small.store).items() if q == p] for p in packs}
    for path, ids in by_pack.items():
        expected = {u for i in ids for u in users(small.store, commits, i)}
        data = path.read_bytes()
        path.unlink()
        for level in LEVELS:
            finding = only(verify(small.store, level=level))
            assert (finding.kind, finding.name) == ("pack", str(path.relative_to(small.path)))
            assert hits(finding) == expected
        path.write_bytes(data)


def test_a_pack_whose_table_is_damaged(small: SmallStore) -> None:
    """While the chunks themselves are intact they can be restored: no step is lost."""
    commits = three_steps(small)
    path = next(iter(blobs(small.store).values()))[0]
    flip(path, path.stat().st_size - 100)
    for level in LEVELS:
        finding = only(verify(small.store, level=level))
        assert finding.kind == "pack"
        assert hits(finding) == set()
    assert all(restores(Store.open(small.path), commit) for commit in commits)


def test_a_truncated_pack(small: SmallStore) -> None:
    """What was cut off is lost, what lies before it is not."""
    commit = small.save("main", 1, {"a": pattern(100_000, 1), "b": pattern(100_000, 2)})
    ends = {i: offset + length for i, (_, offset, length) in blobs(small.store).items()}
    path = next(iter(blobs(small.store).values()))[0]
    cut = path.stat().st_size // 2
    os.truncate(path, cut)
    finding = only(verify(small.store))
    lost = {i for i, end in ends.items() if end > cut}
    expected = {u for i in lost for u in users(small.store, [commit], i)}
    assert hits(finding) == expected != set()


def test_unreadable_sector(small: SmallStore) -> None:
    """An I/O error in the middle of a pack neither ends the scan nor hits its neighbours."""
    commits = [small.save("main", 1, {"a": pattern(50_000, 1), "b": pattern(50_000, 2)})]
    victim, (path, offset, _) = sorted(blobs(small.store).items(), key=lambda item: item[1])[20]

    class BadSector(FileIO):
        def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], at: int) -> int:
            size = sum(map(len, buffers))
            if os.readlink(f"/proc/self/fd/{handle}") == str(path) and at <= offset < at + size:
                raise OSError(errno.EIO, "Input/output error")
            return super().read_into(handle, buffers, at)

    finding = only(verify(Store.open(small.path, io=BadSector())))
    assert finding.name == victim.hex()
    assert hits(finding) == users(small.store, commits, victim)


def refuse(monkeypatch: pytest.MonkeyPatch, code: int, place: str, *, after: int = 0) -> None:
    """Let files whose path has `place` in it be opened `after` times, then not any more."""
    real, opened = FileIO.open, [0]

    def refusing(io: FileIO, path: str) -> int:
        if place in path:
            opened[0] += 1
            if opened[0] > after:
                raise OSError(code, os.strerror(code), path)
        return real(io, path)

    monkeypatch.setattr(FileIO, "open", refusing)


@pytest.mark.parametrize("place", ["/packs/", "/manifests/", "/pins/"])
def test_what_may_not_be_read_is_not_called_damaged(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    commits = three_steps(small)
    small.store.pin("kept", commits[0])
    refuse(monkeypatch, errno.EACCES, place)
    report = verify(small.store, threads=1)
    assert report.findings
    assert report.unread
    result = run("verify", small.path, "--json")
    assert result.exit_code == 14
    assert all(found["unreadable"] for found in json.loads(result.stdout)["findings"])
    assert "\nunreadable " in "\n" + run("verify", small.path).stdout


@pytest.mark.parametrize("level", LEVELS)
def test_the_rest_is_checked_beside_a_pack_folder_that_cannot_be_listed(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    first = small.save("main", 1, {"a": pattern(CHUNK // 2, 1)})
    second = SmallStore(Path(small.path))  # another writer: its packs lie in a folder of their own
    later = second.save("main", 2, {"b": pattern(CHUNK // 2, 2)}, parent=first)
    second.close()
    mine, other = (pack_path(small.path, small.store.snapshot(c).packs[0]) for c in (first, later))
    closed = os.path.dirname(other)
    real = FileIO.list

    def refusing(io: FileIO, path: str) -> list[str]:
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(io, path)

    monkeypatch.setattr(FileIO, "list", refusing)
    refuse(monkeypatch, errno.EACCES, closed)
    report = verify(small.store, level=level, threads=1)
    assert report.unread
    assert report.damaged_steps == [("main", 2)]
    names = {os.path.relpath(path, small.path) for path in (closed, other)}
    assert {finding.name for finding in report.findings} == names
    flip(Path(mine), 200)  # damage elsewhere is found all the same
    report = verify(small.store, level=level, threads=1)
    assert report.unread == (level == "structure")


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOTCONN])
def test_chunks_that_cannot_be_read_for_now_are_not_called_damaged(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch, code: int, level: Any
) -> None:
    three_steps(small)
    packs = len(small.store.packs.names())
    refuse(monkeypatch, code, "/packs/", after=packs)  # the tables can be read, the chunks not
    with pytest.raises(StorageError) as caught:
        verify(small.store, threads=1, level=level)
    assert caught.value.errno == code


@pytest.mark.parametrize("name", ["EUCLEAN", "EBADMSG", "EILSEQ", "ENODATA", "EREMOTEIO"])
def test_what_the_file_system_knows_to_be_bad_is_damage(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    three_steps(small)
    refuse(monkeypatch, getattr(errno, name), "/packs/")
    report = verify(small.store, threads=1)
    assert report.findings
    assert not any(finding.unreadable for finding in report.findings)


def test_lost_references(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk coded against a lost chunk is lost with it."""

    def xor(params: bytes, payload: memoryview, out: memoryview, refs: Any) -> None:
        out[:] = (np.frombuffer(payload, np.uint8) ^ np.frombuffer(refs[0], np.uint8)).data

    codecs.register(Codec(201, "xor-test", xor))
    try:
        base = small.save("main", 1, {"w": pattern(CHUNK // 4, 1)})
        base_id = small.store.snapshot(base).chunks[0][0].tobytes()
        path, offset, length = blobs(small.store)[base_id]
        base_raw = np.frombuffer(path.read_bytes()[offset : offset + length], np.uint8)
        new = pattern(CHUNK // 4, 2).tobytes()
        new_id = blake3(new).digest()
        name = pack_name("bb" * 8, 1)
        writer = PackWriter(FileIO(), pack_path(small.path, name), small.store.uuid, "bb" * 8, 1)
        coded = (np.frombuffer(new, np.uint8) ^ base_raw).tobytes()
        writer.append(new_id, CHUNK, Encoded(201, b"", (base_id,), [coded]))
        writer.finish()
        snapshot = small.store.snapshot(base)
        ids = {0: np.frombuffer(new_id, np.uint8).reshape(1, 32)}
        changed = Snapshot(snapshot.layout, snapshot.objects, snapshot.inline, ids)
        manifest = to_base(changed, [*snapshot.packs, name])
        second = small.writer.commit(
            run="main", step=2, parent=base, manifest=small.writer.write_manifest(manifest),
            base=None, root=manifest.root, packs=manifest.packs,
        )  # fmt: skip
        assert verify(small.store, level="restore").ok
        assert restores(small.store, second)
        whole = path.read_bytes()
        os.truncate(path, len(whole) - 20)  # the table: records are found by searching
        finding = only(verify(small.store))
        assert hits(finding) == set()
        assert [hit.step for hit in finding.needed_by] == [1, 2]
        path.write_bytes(whole)
        flip(path, offset)
        report = verify(small.store)
        assert report.damaged_steps == [("main", 1), ("main", 2)]
        flip(path, offset)
        path.unlink()
        for level in LEVELS:
            report = verify(small.store, level=level)
            assert report.damaged_steps == [("main", 1), ("main", 2)]
            assert not report.unread
        path.write_bytes(whole)
        refuse(monkeypatch, errno.EACCES, path.name)
        for level in LEVELS:  # nobody knows whether anything is damaged
            report = verify(small.store, level=level, threads=1)
            assert report.damaged_steps == [("main", 1), ("main", 2)]
            assert report.unread
    finally:
        codecs._codecs.pop(201)


# what collection leaves -------------------------------------------------------------------------


@pytest.fixture
def collected(tmp_path: Path) -> Iterator[SmallStore]:
    """Retired and collected: the base of step 3 names packs that are gone, and there is a record
    that is coded against a chunk of them."""
    small = SmallStore(tmp_path / "store")
    small.writer._output.pack_bytes = 1  # a pack for each chunk
    commits = three_steps(small)
    dead = small.store.snapshot(commits[0]).chunks[2][0].tobytes()
    alive = small.store.snapshot(commits[2]).chunks[0][0].tobytes()
    path, offset, length = blobs(small.store)[alive]
    name = pack_name("bb" * 8, 1)
    pack = PackWriter(FileIO(), pack_path(small.path, name), small.store.uuid, "bb" * 8, 1)
    pack.append(blake3(b"unneeded").digest(), 8, Encoded(2, b"", (dead,), [b"whatever"]))
    kept = small.store.snapshot(commits[1]).chunks[2][0].tobytes()
    place, at, size = blobs(small.store)[kept]
    pack.append(kept, size, Encoded(0, b"", (), [place.read_bytes()[at : at + size]]))
    # Another, useless record of a chunk that step 3 needs.
    pack.append(alive, length, Encoded(2, b"", (dead,), [path.read_bytes()[offset:][:9]]))
    pack.finish()
    place.unlink()
    small.writer.close()
    retire(small.store, [commits[0], commits[1]])
    small.store.pin("second", commits[2])
    Path(small.path, "runs", "main", number_name(2) + ".retired").unlink()
    small.store.pin("kept", commits[1])
    retire(small.store, [commits[1]])
    report = collect(small.store)
    assert [n for _, n in report.commits] == [1]
    assert report.packs
    yield small
    small.close()


@pytest.mark.parametrize("level", LEVELS)
def test_what_collection_leaves_is_no_damage(collected: SmallStore, level: Any) -> None:
    """Prevents: a healthy store is called damaged once its garbage has been collected."""
    report = verify(collected.store, level=level)
    assert report.findings == ()
    gone = {n.name for n in report.notes if n.kind == "pack"}
    assert gone
    assert not any(Path(collected.path, name).exists() for name in gone)
    assert all(restores(Store.open(collected.path), c) for c in collected.store.commits("main"))
    records = [n for n in report.notes if n.kind == "chunk"]
    assert len(records) == (0 if level in ("structure", "records") else 2)
    assert verify(collected.store, level=level, run="main").ok


class Meanwhile(FileIO):
    """Does something before the n-th file is opened."""

    def __init__(self, at: int, action: Callable[[], object]) -> None:
        self._left, self._action = at, action

    @property
    def done(self) -> bool:
        return not self._left

    def open(self, path: str) -> int:
        if self._left:
            self._left -= 1
            if not self._left:
                self._action()
        return super().open(path)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compacts", [False, True])
def test_what_goes_meanwhile_is_no_damage(tmp_path: Path, level: Any, compacts: bool) -> None:
    """Prevents: a verification beside retention, collection or compaction calls steps damaged that
    were taken off the list, or whose chunks have moved; and one that hides true damage by that."""
    small = SmallStore(tmp_path / "store")
    small.writer._output.pack_bytes = 1  # a pack for each chunk
    commits = three_steps(small)
    small.close()
    chunk = small.store.snapshot(commits[2]).chunks[2][0].tobytes()
    found: list[tuple[bool, VerifyReport]] = []
    for at in range(1, 1000, 11):
        for damaged in (False, True):
            path = shutil.copytree(small.path, tmp_path / f"{at}-{damaged}")
            store = Store.open(path)
            if damaged:
                flip(*blobs(store)[chunk][:2])

            def take(store: Store = store, damaged: bool = damaged) -> None:
                retire(store, commits[:2])
                if compacts and not damaged:
                    compact(store, min_live_share=1.0)
                collect(store)

            io = Meanwhile(at, take)
            found.append((damaged, verify(Store.open(path, io=io), level=level)))
        if not io.done:
            break
    assert len(found) > 4
    for damaged, report in found:
        assert report.damaged_steps == ([("main", 3)] if damaged and level != "structure" else [])
        assert bool(report.findings) == bool(report.damaged_steps)


@pytest.mark.parametrize("level", ["records", "chunks", "restore"])
def test_damage_elsewhere_blames_no_collected_pack(collected: SmallStore, level: Any) -> None:
    """Prevents: beside one damaged chunk, all packs that collection took count as damaged."""
    newest = collected.store.head("main")
    needed = collected.store.snapshot(newest).chunks[0][1].tobytes()
    flip(*blobs(collected.store)[needed][:2])
    report = verify(collected.store, level=level)
    assert {(f.kind, f.name) for f in report.findings} == {("chunk", needed.hex())}
    assert ("main", newest.step) in report.damaged_steps
    assert [n for n in report.notes if n.kind == "pack"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_lost_pack_is_blamed_beside_damage_elsewhere(tmp_path: Path, level: Any) -> None:
    """Prevents: a damaged chunk hides that a whole pack is gone, also one that holds but what
    others are coded against."""
    small = SmallStore(tmp_path / "store")
    small.writer._output.pack_bytes = 1  # a pack for each chunk
    commit = small.save("main", 1, {"a": pattern(3 * CHUNK // 4), "b": pattern(CHUNK // 4, 1)})
    first, second, third = (row.tobytes() for row in small.store.snapshot(commit).chunks[0])
    places = blobs(small.store)
    flip(*places[first][:2])
    base = pack_name("bb" * 8, 1)
    pack = PackWriter(FileIO(), pack_path(small.path, base), small.store.uuid, "bb" * 8, 1)
    gone = blake3(b"gone").digest()
    pack.append(second, CHUNK, Encoded(2, b"", (gone,), [b"whatever"]))
    pack.finish()
    lost = {str(places[one][0].relative_to(small.path)) for one in (second, third)}
    for one in lost:
        Path(small.path, one).unlink()
    report = verify(small.store, level=level)
    assert {f.name for f in report.findings if f.kind == "pack"} == lost
    assert report.damaged_steps == [("main", 1)]
    small.close()


@pytest.mark.parametrize("level", LEVELS)
def test_a_pinned_step_is_checked_though_it_is_retired(collected: SmallStore, level: Any) -> None:
    """Prevents: damage of a step that only a pin keeps goes unnoticed."""
    pinned = collected.store.pinned("kept")
    only_there = collected.store.snapshot(pinned).chunks[2][1].tobytes()
    blobs(collected.store)[only_there][0].unlink()
    report = verify(collected.store, level=level)
    assert report.damaged_steps == [("main", 2)]
    assert all("m/c" in hit.tensors for f in report.findings for hit in f.hits)


# records ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_damaged_manifests(small: SmallStore, level: Any) -> None:
    """A base takes its deltas with it; a delta only itself."""  # case 112
    commits = three_steps(small)
    for commit, lost in ((commits[0], {1, 2, 3}), (commits[2], {3})):
        path = Path(small.path, "manifests", commit.manifest.hex())
        good = path.read_bytes()
        for broken in (good[:-1], good + b"x", b"", good[:20] + bytes([good[20] ^ 1]) + good[21:]):
            path.write_bytes(broken)
            finding = only(verify(small.store, level=level))
            assert (finding.kind, finding.name) == ("manifest", f"manifests/{path.name}")
            assert {hit.step for hit in finding.hits} == lost
            assert all(hit.tensors == () for hit in finding.hits)
        path.unlink()
        assert {hit.step for hit in only(verify(small.store, level=level)).hits} == lost
        path.write_bytes(good)
    assert verify(small.store, level=level).ok


def test_damaged_commits_and_pins(small: SmallStore) -> None:
    """Every damaged record is listed, beside the damage of chunks."""
    commits = three_steps(small)
    small.store.pin("best", commits[1])
    small.store.pin("first", commits[0])
    Path(small.path, "runs", "main", number_name(2)).write_bytes(b"junk")
    flip(Path(small.path, "pins", "first"), 9)
    chunk_id, (path, offset, _) = next(iter(blobs(small.store).items()))
    flip(path, offset)
    report = verify(small.store)
    assert [(f.kind, f.name) for f in report.findings] == [
        ("commit", f"runs/main/{number_name(2)}"),
        ("pin", "pins/first"),
        ("pin", "pins/best"),
        ("chunk", chunk_id.hex()),
    ]
    assert report.findings[0].hits[0].number == 2
    assert report.findings[0].hits[0].step == -1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_listed_commit_that_cannot_be_found_is_damage(small: SmallStore, number: int) -> None:
    """Prevents: a link that leads nowhere in the place of a commit (a backup that is not mounted)
    hides a step from verify and log, while gc refuses because of it."""
    three_steps(small)
    path = f"runs/main/{number_name(number)}"
    os.rename(Path(small.path, path), Path(small.path, "away"))
    Path(small.path, path).symlink_to("nowhere")
    finding = only(verify(small.store))
    assert (finding.kind, finding.name) == ("commit", path)
    assert finding.reason == f"commit {path} is listed and cannot be found"
    assert [hit.number for hit in finding.hits] == [number]
    assert [damaged.path for damaged in small.store.commits("main").damaged] == [path]


def test_a_commit_with_a_foreign_manifest(small: SmallStore) -> None:
    """A commit that names the manifest of another step is damage, although both are well-formed."""
    commits = three_steps(small)
    wrong = msgspec.structs.replace(commits[2], manifest=commits[0].manifest, base=None)
    Path(small.path, "runs", "main", number_name(3)).write_bytes(encode_commit(wrong))
    report = verify(small.store)
    assert report.damaged_steps == [("main", 3)]


def test_manifests_that_no_commit_names(small: SmallStore) -> None:
    """The next save may find a left-over manifest under its name and rely on it."""
    commits = three_steps(small)
    Path(small.path, "runs", "main", number_name(3) + ".retired").touch()
    path = Path(small.path, "manifests", commits[2].manifest.hex())
    assert verify(small.store).ok
    flip(path, 30)
    finding = only(verify(small.store))
    assert (finding.kind, finding.hits) == ("manifest", ())
    assert verify(small.store, run="main").ok


def test_format_and_directories(small: SmallStore) -> None:
    """A lost FORMAT or directory is reported, and the rest is checked nevertheless."""
    three_steps(small)
    chunk_id, (path, offset, _) = next(iter(blobs(small.store).items()))
    flip(path, offset)
    os.unlink(f"{small.path}/FORMAT")
    report = verify(small.store)
    assert [f.kind for f in report.findings] == ["format", "chunk"]
    assert report.findings[1].name == chunk_id.hex()
    shutil.rmtree(f"{small.path}/manifests")
    shutil.rmtree(f"{small.path}/runs")
    kinds = [(f.kind, f.name) for f in verify(small.store).findings]
    assert ("store", "runs") in kinds
    assert ("store", "manifests") in kinds


def test_one_run_only(small: SmallStore) -> None:
    """Checking one run does not read, or complain about, what only others need."""
    main = three_steps(small)
    small.save("other", 1, {"w": pattern(50_000, 77)})
    other_packs = set(small.store.snapshot(small.store.head("other")).packs)
    main_packs = {p for c in main for p in small.store.snapshot(c).packs}
    assert not other_packs & main_packs
    flip(Path(pack_path(small.path, other_packs.pop())), 5000)
    report = verify(small.store, run="main")
    assert report.ok
    assert report.packs == len(main_packs)
    assert verify(small.store, run="other").damaged_steps == [("other", 1)]


def test_values_are_decoded_at_level_restore(small: SmallStore) -> None:
    """A plain value that cannot be decoded fails a restore as much as a lost chunk."""
    good = small.save("main", 1, {"w": pattern(10)}, {"opt/lr": 0.1, "name": "x"})
    snapshot = small.store.snapshot(good)
    slot = snapshot.layout.paths.index("opt/lr")
    objects = {**snapshot.objects, slot: b"\xc1"}
    broken = Snapshot(snapshot.layout, objects, snapshot.inline, snapshot.chunks)
    manifest = to_base(broken, snapshot.packs)
    small.writer.commit(
        run="main", step=2, parent=good, manifest=small.writer.write_manifest(manifest),
        base=None, root=manifest.root, packs=manifest.packs,
    )  # fmt: skip
    assert verify(small.store, level="chunks").ok
    report = verify(small.store, level="restore")
    assert hits(only(report)) == {(2, "opt/lr")}


def test_nothing_remembered_is_trusted(small: SmallStore) -> None:
    """Damage that came after the store was opened and read must be seen."""
    commits = three_steps(small)
    store = Store.open(small.path)
    assert all(restores(store, commit) for commit in commits)
    flip(Path(small.path, "manifests", commits[0].manifest.hex()), 40)
    assert verify(store).damaged_steps == [("main", 1), ("main", 2), ("main", 3)]


# mapping ----------------------------------------------------------------------------------------


def test_only_the_tensors_in_a_damaged_chunk_are_named() -> None:
    """Views of one buffer are hit where they lie in it, not wholesale."""
    views = (
        TensorView(0, 0, "uint8", (1000,), (1,), 0),
        TensorView(1, 0, "float32", (256,), (1,), 1024),
        TensorView(2, 0, "uint8", (4, 1024), (1024, 1), 0),
        TensorView(3, 0, "uint8", (0,), (1,), 1024),
        TensorView(4, 0, "int16", (2,), (512,), 2047),
        TensorView(5, 1, "uint8", (2048,), (1,), 0),
    )
    layout = Layout(
        b"\x90", tuple("abcdef"), views,
        (ExtentSpec(4096, 1024, "uint8"), ExtentSpec(2048, 1024, "uint8")), (),
    )  # fmt: skip
    ids = np.arange(6 * 32, dtype=np.uint8).reshape(6, 32)
    snapshot = Snapshot(layout, {}, {}, {0: ids[:4], 1: ids[4:]})
    found = DamageMap({ids[i].tobytes() for i in (0, 1, 3)}).hits(snapshot)
    assert found == {
        ids[0].tobytes(): ["a", "c"],
        ids[1].tobytes(): ["b", "c", "e"],
        ids[3].tobytes(): ["c", "e"],
    }
    assert DamageMap({b"x" * 32}).hits(snapshot) == {}


def test_needed_chunks() -> None:
    """Every distinct chunk is looked for once, with its length, across steps and layouts."""
    rng = np.random.default_rng(3)

    def build(nbytes: int, chunk: int, seed: int) -> Snapshot:
        spec = ExtentSpec(nbytes, chunk, "uint8")
        layout = Layout(
            b"\0", ("w",), (TensorView(0, 0, "uint8", (nbytes,), (1,), 0),), (spec,), ()
        )
        rows = np.random.default_rng(seed).integers(0, 256, (spec.chunk_count, 32), np.uint8)
        return Snapshot(layout, {}, {}, {0: rows})

    one = build(100_000, 1000, 0)
    needed = NeededChunks()
    expected: set[tuple[bytes, int]] = set()
    snapshots = [one]
    for _ in range(5):
        rows = snapshots[-1].chunks[0].copy()
        rows[rng.integers(0, 100, 7)] ^= 1
        snapshots.append(Snapshot(one.layout, {}, {}, {0: rows}))
    snapshots += [
        one,
        build(100_100, 1001, 0),
        build(5001, 1000, 1),
        build(99_999, 1000, 2),
        build(64_064, 1001, 0),
    ]
    for snapshot in snapshots:
        needed.add(snapshot)
        spec = snapshot.layout.extents[0]
        for i, row in enumerate(snapshot.chunks[0]):
            expected.add((row.tobytes(), spec.chunk_length(i)))
    ids, lengths = needed.get()
    got = [(row.tobytes(), n) for row, n in zip(ids, lengths.tolist(), strict=True)]
    assert len(got) == len(set(got))
    assert set(got) == expected
