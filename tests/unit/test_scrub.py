"""Prevents: a scrub that passes over a record, or hides damage, because of who checks it when."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store import scrub as scrub_module
from deltackpt_store.codecs import DELTA, RAW, Encoded, choose
from deltackpt_store.coding.planes import encode_delta
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.pack import pack_name, pack_path, read_footer
from deltackpt_store.pack_set import PackSet
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.scrub import scrub
from deltackpt_store.scrub_check import BadRecord, Checked, Checker
from deltackpt_store.scrub_order import Kin, Stretch, Table, families, odd, pieces, units, work_of
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter

CHUNK = 64 * 1024
COLUMNS, STEPS = 6, 5


class Star:
    """A store of `STEPS` packs: bases of `COLUMNS` chunks in the first, deltas to them in the
    others, and in each a chunk that has to do with nothing, raw or coded."""

    def __init__(self, path: Path) -> None:
        self.store = Store.create(path)
        self.names: list[str] = []
        mixture = np.random.default_rng(3)
        bases = [mixture.standard_normal(CHUNK // 4).astype(np.float32) for _ in range(COLUMNS)]
        self.bases = [blake3(base.tobytes()).digest() for base in bases]
        for step in range(STEPS):
            records: list[tuple[bytes, Encoded]] = []
            for column, base in enumerate(bases):
                raw = base.tobytes()
                if step == 0:
                    records.append((raw, Encoded(RAW, b"", (), [raw])))
                    continue
                now = (base + np.float32(1e-6 * step)).tobytes()
                coded = encode_delta(memoryview(now), memoryview(raw), 4, "zstd")
                refs = (self.bases[column],)
                records.append((now, Encoded(DELTA, coded.params, refs, coded.payload)))
            alone = bytes([step]) * CHUNK
            records.insert(step, (alone, choose(memoryview(alone), "uint8")))
            alone = mixture.bytes(CHUNK)
            records.append((alone, Encoded(RAW, b"", (), [alone])))
            self.write(records)

    def write(self, records: Sequence[tuple[bytes, Encoded]]) -> str:
        writer = f"{len(self.names):016x}"
        path = pack_path(self.store.path, pack_name(writer, 1))
        make_directories(FileIO(), os.path.dirname(path))
        pack = PackWriter(FileIO(), path, self.store.uuid, writer, 1)
        for raw, encoded in records:
            pack.append(blake3(raw).digest(), len(raw), encoded)
        pack.finish()
        self.names.append(pack_name(writer, 1))
        return self.names[-1]

    def packs(self, io: FileIO | None = None) -> PackSet:
        packs = PackSet(io or FileIO(), self.store.path, self.store.uuid)
        packs.load(self.names)
        return packs

    def tables(self) -> list[Table]:
        packs = self.packs()
        return [Table(n, e) for n in self.names if (e := packs.index.entries(n)) is not None]

    def flip(self, pack: str, chunk_id: bytes, *, front: bool = False) -> None:
        entries = dict(self.tables())[pack]
        place = next(p for i, p in entries.items(pack) if i == chunk_id)
        with open(pack_path(self.store.path, pack), "r+b") as file:
            file.seek(place.offset + 30 if front else place.payload + place.stored // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))


@pytest.fixture
def star(tmp_path: Path) -> Star:
    return Star(tmp_path / "store")


def told(bad: Sequence[BadRecord]) -> set[tuple[str, bytes, bool, bool]]:
    assert len({(b.pack, b.offset) for b in bad}) == len(bad)
    return {(b.pack, b.id, b.readable, b.dangling) for b in bad}


class Counting(FileIO):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.read = 0

    def read_into(self, handle: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        count = super().read_into(handle, buffers, offset)
        self.read += count
        return count


# order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2_000, 30_000, 300_000, 1 << 30])
def test_every_record_belongs_to_one_unit(star: Star, size: int) -> None:
    tables = star.tables()
    kin = families(tables)
    seen: Counter[tuple[int, int]] = Counter()
    for unit in units(tables, kin, size):
        if isinstance(unit, Kin):
            part = kin.part(unit.first, unit.end)
            seen.update(zip(part.table.tolist(), part.row.tolist(), strict=True))
        else:
            assert isinstance(unit, Stretch)
            found = pieces(tables[unit.table].entries, kin.row[kin.table == unit.table])
            for row, start, payload in zip(found.rows, found.starts, found.payloads, strict=True):
                if unit.first <= start < unit.end and payload:
                    seen[unit.table, row] += 1
    every = {(n, row) for n, table in enumerate(tables) for row in range(len(table.entries))}
    assert seen == Counter(dict.fromkeys(every, 1))


@pytest.mark.parametrize("prove", [True, False])
def test_units_are_alike_in_work_however_well_their_bytes_compress(
    tmp_path: Path, prove: bool
) -> None:
    store = Store.create(tmp_path / "store")
    rng = np.random.default_rng(5)
    with StoreWriter(store) as writer:  # records of 30 KB and of 200 bytes, by turns
        for number in range(40):
            noise = rng.integers(0, 256, 30_000, np.uint8)
            writer.put(noise.tobytes() if number // 10 % 2 else bytes([number]) * 30_000)
        (name,) = writer.flush()
    entries = read_footer(store.io, pack_path(store.path, name)).entries
    cost = work_of(entries.table, prove)
    assert (cost < 1000).any() != prove
    size = int(cost.max()) * 2
    found = list(units([Table(name, entries)], families(()), size, prove=prove))
    shares = [
        int(cost[(entries.table["offset"] >= u.first) & (entries.table["offset"] < u.end)].sum())
        for u in found
        if isinstance(u, Stretch)
    ]
    assert sum(shares) == int(cost.sum())
    assert len(shares) >= 5
    assert all(share < size + int(cost.max()) for share in shares)


def test_a_base_stands_before_its_deltas_and_they_together(star: Star) -> None:
    tables = star.tables()
    kin = families(tables)
    assert len(kin) == COLUMNS * STEPS
    members = [
        (tables[table].entries.id(row), family, needed)
        for table, row, family, needed in zip(
            kin.table.tolist(), kin.row.tolist(), kin.family.tolist(), kin.needed.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    for column in range(COLUMNS):
        mine = members[column * STEPS : (column + 1) * STEPS]
        assert {family for _, family, _ in mine} == {mine[0][1]}
        assert [chunk_id in star.bases for chunk_id, _, _ in mine] == [True] + [False] * (STEPS - 1)
        assert [needed for _, _, needed in mine] == [True] + [False] * (STEPS - 1)


def test_circles_of_references_have_an_order(star: Star) -> None:
    """A table may claim anything; the scrub ends, and says that they cannot be decoded."""
    ids = [bytes([i]) * 32 for i in range(1, 5)]
    writer = f"{len(star.names):016x}"
    path = pack_path(star.store.path, pack_name(writer, 1))
    make_directories(FileIO(), os.path.dirname(path))
    pack = PackWriter(FileIO(), path, star.store.uuid, writer, 1)
    for i, chunk_id in enumerate(ids):
        refs = (ids[(i + 1) % 4], ids[(i + 2) % 4])
        pack.append(chunk_id, 100, Encoded(DELTA, b"\x01", refs, [b"0123"]))
    pack.finish()
    star.names.append(pack_name(writer, 1))
    assert {b.id for b in scrub(star.packs(), star.names)} == set(ids)


def test_each_byte_is_read_once_though_bases_are_needed_often(star: Star) -> None:
    io = Counting()
    packs = star.packs(io)
    before = io.read
    assert scrub(packs, star.names, threads=1) == []
    held = sum(os.path.getsize(pack_path(star.store.path, name)) for name in star.names)
    assert io.read - before < 1.05 * held


def test_what_one_pack_lacks_is_read_where_it_lies(star: Star) -> None:
    """The base is in none of the packs to check."""
    assert scrub(star.packs(), star.names[2:4]) == []
    star.flip(star.names[0], star.bases[1])
    bad = scrub(star.packs(), star.names[2:4])
    assert {(b.pack, b.dangling) for b in bad} == {(name, True) for name in star.names[2:4]}


# damage -------------------------------------------------------------------------------------


@pytest.fixture(params=["alone", "threads", "processes"])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    kind: str = request.param
    monkeypatch.setattr(scrub_module, "FORK_WORK", 0 if kind == "processes" else 1 << 60)
    return 1 if kind == "alone" else 3


def test_the_same_damage_is_found_by_anybody(star: Star, workers: int) -> None:
    tables = star.tables()
    kin = families(tables)
    others = [
        (name, entries.id(row))
        for number, (name, entries) in enumerate(tables)
        for row in range(len(entries))
        if (number, row) not in set(zip(kin.table.tolist(), kin.row.tolist(), strict=True))
    ]
    (raw_pack, raw_id), (coded_pack, coded_id) = others[-1], others[0]
    star.flip(raw_pack, raw_id)
    star.flip(coded_pack, coded_id)
    star.flip(star.names[0], star.bases[0], front=True)
    star.flip(star.names[0], star.bases[2])
    seen: list[tuple[int, int]] = []
    bad = scrub(star.packs(), star.names, threads=workers, progress=lambda *now: seen.append(now))
    dangling = {(b.pack, b.dangling) for b in bad if b.id not in (raw_id, coded_id, *star.bases)}
    assert dangling == {(name, True) for name in star.names[1:]}
    assert told([b for b in bad if not b.dangling]) == {
        (raw_pack, raw_id, False, False),
        (coded_pack, coded_id, False, False),
        (star.names[0], star.bases[0], True, False),
        (star.names[0], star.bases[2], False, False),
    }
    total = sum(int(t.entries.table["stored"].sum()) for t in tables)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_deltas_to_a_damaged_base_are_read_from_its_other_copy(star: Star, workers: int) -> None:
    base = np.random.default_rng(3).standard_normal(CHUNK // 4).astype(np.float32).tobytes()
    assert blake3(base).digest() == star.bases[0]
    copy = star.write([(base, Encoded(RAW, b"", (), [base]))])
    star.flip(star.names[0], star.bases[0])
    bad = scrub(star.packs(), star.names, threads=workers)
    assert told(bad) == {(star.names[0], star.bases[0], False, False)}
    star.flip(copy, star.bases[0])
    bad = scrub(star.packs(), star.names, threads=workers)
    assert Counter(b.dangling for b in bad) == {False: 2, True: STEPS - 1}


def test_a_file_cut_off_hits_only_what_was_in_its_end(star: Star, workers: int) -> None:
    packs = star.packs()
    path = pack_path(star.store.path, star.names[0])
    entries = dict(star.tables())[star.names[0]]
    last = max(entries.items(""), key=lambda item: item[1].payload)
    os.truncate(path, last[1].payload + 5)
    bad = scrub(packs, star.names, threads=workers)
    assert {b.id for b in bad if not b.dangling} == {last[0]}


def test_checksums_alone_find_what_has_changed(star: Star, workers: int) -> None:
    """Nothing is decoded, so only the damaged records themselves are told."""
    assert scrub(star.packs(), star.names, threads=workers, prove=False) == []
    tables = star.tables()
    chosen: list[tuple[str, bytes, bool]] = []
    for number, (name, entries) in enumerate(tables):
        for row in (number, len(entries) - 1):
            chosen.append((name, entries.id(row), False))
    chosen.append((star.names[0], star.bases[3], True))
    for name, chunk_id, front in chosen:
        star.flip(name, chunk_id, front=front)
    bad = scrub(star.packs(), star.names, threads=workers, prove=False)
    assert told(bad) == {(name, chunk_id, front, False) for name, chunk_id, front in chosen}


def test_a_payload_whose_front_is_damaged_is_proved_by_its_id(star: Star) -> None:
    chunk_id = star.bases[0]
    star.flip(star.names[0], chunk_id, front=True)
    assert told(scrub(star.packs(), star.names, prove=False)) == {
        (star.names[0], chunk_id, True, False)
    }
    star.flip(star.names[0], chunk_id)
    assert told(scrub(star.packs(), star.names, prove=False)) == {
        (star.names[0], chunk_id, False, False)
    }


@pytest.mark.parametrize("size", [1_000, 70_000])
def test_checksums_are_found_in_whatever_unit_the_front_lies(star: Star, size: int) -> None:
    star.flip(star.names[0], star.bases[2])
    tables = star.tables()
    with Checker(star.packs(), tables, families(()), prove=False) as checker:
        bad = [b for unit in units(tables, families(()), size) for b in checker.check(unit).bad]
    assert told(bad) == {(star.names[0], star.bases[2], False, False)}


def test_no_row_is_odd_here(star: Star) -> None:
    assert not any(odd(table.entries.table).any() for table in star.tables())


# processes ----------------------------------------------------------------------------------


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes take part, also where other tests have left idle threads in this process."""
    monkeypatch.setattr(scrub_module, "FORK_WORK", 0)
    count, left = threading.active_count, threading.active_count() - 1
    monkeypatch.setattr(threading, "active_count", lambda: count() - left)


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))


@pytest.mark.usefixtures("forking")
def test_what_a_dead_process_leaves_is_checked_all_the_same(
    star: Star, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    star.flip(star.names[0], star.bases[2])
    expected = told(scrub(star.packs(), star.names, threads=1))
    here, check = os.getpid(), Checker.check

    def killed(self: Checker, unit: Kin | Stretch) -> Checked:
        if os.getpid() != here and isinstance(unit, Stretch) and unit.table == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return check(self, unit)

    monkeypatch.setattr(Checker, "check", killed)
    before = children()
    seen: list[int] = []
    bad = scrub(star.packs(), star.names, threads=2, progress=lambda done, _: seen.append(done))
    assert told(bad) == expected
    assert seen[-1] == sum(int(t.entries.table["stored"].sum()) for t in star.tables())
    assert "a process that verifies has died" in caplog.text
    assert children() == before


def test_what_a_dead_crew_does_not_take_is_checked_all_the_same(
    star: Star, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(ThreadPoolExecutor):
        taken = 0

        def submit(self, *call: Any, **named: Any) -> Future[Any]:
            self.taken += 1
            if self.taken > 2:
                raise BrokenProcessPool("a process has died")
            return super().submit(*call, **named)

    monkeypatch.setattr(scrub_module, "ThreadPoolExecutor", Dying)
    seen: list[int] = []
    assert not scrub(star.packs(), star.names, threads=2, progress=lambda n, _: seen.append(n))
    assert seen[-1] == sum(int(t.entries.table["stored"].sum()) for t in star.tables())


@pytest.mark.usefixtures("forking")
def test_an_error_ends_all_processes(star: Star, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    with pytest.raises(ZeroDivisionError):
        scrub(star.packs(), star.names, threads=2, progress=lambda done, _: print(1 // 0))
    assert children() == before

    def broken(self: Checker, unit: Kin | Stretch) -> Checked:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Checker, "check", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        scrub(star.packs(), star.names, threads=2)
    assert children() == before


@pytest.mark.usefixtures("forking")
def test_an_interrupt_ends_all_processes(star: Star) -> None:
    """Ctrl-C reaches every process of the terminal; only the one that was called tells of it."""
    before = children()

    def interrupted(done: int, total: int) -> None:
        for child in children() - before:
            os.kill(child, signal.SIGINT)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scrub(star.packs(), star.names, threads=2, progress=interrupted)
    assert children() == before


@pytest.mark.usefixtures("forking")
def test_an_interrupt_while_they_start_is_not_lost(
    star: Star, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It reaches a child before that can say that it does not want it."""
    before, fork = children(), os.fork

    def interrupted() -> int:
        child = fork()
        # Both of them, and the thread that forks: others, as a test runner has, do not block it.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return child

    monkeypatch.setattr(os, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scrub(star.packs(), star.names, threads=2)
    assert children() == before
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("forking")
def test_without_processes_threads_do_it(star: Star, monkeypatch: pytest.MonkeyPatch) -> None:
    """No semaphores, no memory for another process, or threads that may hold locks."""

    def refused() -> int:
        raise BlockingIOError(11, "no more processes")

    star.flip(star.names[0], star.bases[2])
    expected = told(scrub(star.packs(), star.names, threads=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refused)
        assert told(scrub(star.packs(), star.names, threads=2)) == expected
    forked: list[int] = []
    monkeypatch.setattr(os, "fork", lambda: forked.append(1) or refused())
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert told(scrub(star.packs(), star.names, threads=2)) == expected
        assert told(scrub(star.packs(Counting()), star.names, threads=2)) == expected
    finally:
        done.set()
        other.join()
    assert not forked
