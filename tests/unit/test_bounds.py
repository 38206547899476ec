"""Prevents: memory that grows with the number of saves, or with what a file claims to be."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from deltackpt_store.errors import CorruptionError
from deltackpt_store.io_thread import IoThread
from deltackpt_store.names import number_name
from deltackpt_store.store import Store
from small_store import SmallStore, pattern


def test_few_jobs_wait_for_the_writing_thread() -> None:
    """Each job holds buffers of a batch."""
    thread = IoThread("test", depth=2)
    gate = threading.Event()
    thread.submit(lambda: gate.wait() and None)

    def produce() -> None:
        for _ in range(10):
            thread.submit(lambda: None)

    producer = threading.Thread(target=produce)
    producer.start()
    producer.join(0.5)
    assert producer.is_alive(), "ten jobs were taken while the first one was still running"
    gate.set()
    producer.join()
    thread.drain()
    thread.stop()


def test_few_bases_are_remembered(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "s")
    parent = None
    for step in range(6):
        parent = small.save("main", step, {"w": pattern(3000, step)}, parent=parent)
    small.close()
    store = Store.open(tmp_path / "s")
    for commit in store.commits("main"):
        store.snapshot(commit)
    assert 0 < len(store._bases) <= 2  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("what", ["commit", "manifest", "FORMAT"])
def test_a_record_file_of_gigabytes_is_not_read(tmp_path: Path, what: str) -> None:
    """Sparse files cost their maker nothing."""
    small = SmallStore(tmp_path / "s")
    commit = small.save("main", 1, {"w": pattern(3000)})
    small.close()
    store = Store.open(tmp_path / "s")
    name, read = {
        "commit": (
            f"runs/main/{number_name(commit.number)}",
            lambda: store.read_commit("main", commit.number),
        ),
        "manifest": (
            f"manifests/{commit.manifest.hex()}",
            lambda: store.manifest(commit.manifest),
        ),
        "FORMAT": ("FORMAT", lambda: Store.open(tmp_path / "s")),
    }[what]
    os.truncate(tmp_path / "s" / name, 3 << 30)
    tracemalloc.start()
    with pytest.raises(CorruptionError):
        read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
