"""Parts of the lab that need no kernel: what a log of writes says, which states it allows."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from lab import needs
from lab.block_replay import choose_states
from lab.log_writes import DISCARD, FLUSH, FUA, MARK, Entry, apply, read_log
from lab.workload import Trainer, Unsynced, state_at, violations

BLOCK = 4096


def log_of(path: Path, entries: list[tuple[int, int, bytes]]) -> Path:
    """A log as the kernel writes it: (flags, sector, data of whole blocks or a mark)."""
    blocks = [struct.pack("<QQQI", 0x6A736677736872, 1, len(entries), BLOCK)]
    for flags, sector, data in entries:
        text = data if flags & MARK else b""
        sectors = 0 if flags & MARK else len(data) // 512
        blocks.append(struct.pack("<QQQQ", sector, sectors, flags, len(text)) + text)
        if data and not flags & (MARK | DISCARD):
            blocks.append(data)
    path.write_bytes(b"".join(block.ljust(-(-len(block) // BLOCK) * BLOCK, b"\0")
                              for block in blocks))  # fmt: skip
    return path


def test_a_log_is_replayed_as_it_was_written(tmp_path: Path) -> None:
    log = log_of(
        tmp_path / "log",
        [(0, 8, b"a" * BLOCK), (MARK, 0, b"ack-1"), (FLUSH, 0, b""), (DISCARD, 16, b"x" * BLOCK),
         (FUA, 0, b"b" * 2 * BLOCK)],
    )  # fmt: skip
    entries = read_log(log)
    assert [entry.mark for entry in entries] == ["", "ack-1", "", "", ""]
    assert [entry.durable for entry in entries] == [False, False, True, False, False]
    disk = tmp_path / "disk"
    disk.write_bytes(b"." * 4 * BLOCK)
    with open(log, "rb") as source, open(disk, "r+b") as target:
        for entry in entries:
            apply(entry, source, target)
    want = [b"b" * BLOCK, b"b" * BLOCK, bytes(BLOCK), b"." * BLOCK]
    assert disk.read_bytes() == b"".join(want)


def test_other_files_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(BLOCK))
    with pytest.raises(ValueError, match="no log of writes"):
        read_log(tmp_path / "log")


def test_a_disk_loses_only_what_no_flush_has_made_durable() -> None:
    chance = random.Random(1)
    kinds = [0, 0, 0, FLUSH, FUA, FLUSH | FUA, MARK]
    entries = [Entry(chance.choice(kinds), 0, 512, 0) for _ in range(200)]
    states = choose_states(entries, 300, chance)
    assert len(states) == 300
    assert any(state.lost for state in states)
    for state in states:
        for lost in state.lost:
            assert lost < state.until
            assert not entries[lost].flags & FUA
            assert not any(entry.durable for entry in entries[lost + 1 : state.until])


def test_what_is_missing_is_told_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needs.COMMANDS, "no-such-command", "no-such-package")
    assert any("no-such-package" in text for text in needs.missing())


def test_the_checks_of_a_trial_notice_loss(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    trainer = Trainer(path, mode="thread", io=Unsynced("all"))
    first = trainer.next_step()
    for step in (first, first + 1):
        trainer.client.result(trainer.save(step), 120)
    trainer.client.close(120)
    assert violations(path, [first, first + 1], keep=None, deep=True) == []
    assert "acknowledged steps [3]" in violations(path, [first, 3], keep=None)[0]
    newest = sorted((tmp_path / "store" / "packs").glob("*/*.pack"))[-1]
    newest.unlink()
    assert violations(path, [first, first + 1], keep=None)
    assert state_at(1) != state_at(2)
