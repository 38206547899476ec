"""What a save may be compared with: never something that failed or that the writer cannot know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store.client import WriterClient
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, TensorView
from deltackpt_store.store import Store

from deltackpt.baseline import NOTHING, Baselines, proven_table

KEY = ("x", 2048, "uint8", 1024, "cpu")
ONE, TWO = cast("tuple[WriterClient, WriterClient]", (object(), object()))


def commit(number: int, run: str = "main") -> Commit:
    return Commit(
        run=run, number=number, step=number, parent=None, manifest=b"m", base=None, root=b"r",
        closure=b"c", writer="w", nonce=b"n", generation=0, created=0.0, versions={},
        digest=bytes([number]) * 32,
    )  # fmt: skip


def table(byte: int) -> dict[Any, bytes]:
    return {KEY: bytes([byte]) * 32}


def test_the_newest_staged_save_is_best_for_its_own_writer_only() -> None:
    """Prevents: a save relative to one that only a dead writer has heard of."""
    baselines = Baselines()
    assert baselines.best_for(ONE) is NOTHING
    baselines.staged(table(1), ONE, 1)
    assert baselines.best_for(ONE).save == 1
    assert baselines.best_for(TWO) is NOTHING
    baselines.committed(table(1), ONE, 1, ("main", 1))
    baselines.staged(table(2), ONE, 2)
    best = baselines.best_for(TWO)
    assert (best.commit, best.table) == (("main", 1), table(1))
    assert baselines.best_for(ONE).table == table(2)


def test_a_durable_save_is_best_for_any_writer() -> None:
    baselines = Baselines()
    baselines.staged(table(1), ONE, 1)
    baselines.committed(table(1), ONE, 1, ("main", 1))
    assert baselines.best_for(TWO).commit == ("main", 1)
    assert baselines.best_for(ONE).commit == ("main", 1)  # by commit: it is never forgotten


def test_a_commit_does_not_take_the_place_of_a_newer_staged_save() -> None:
    baselines = Baselines()
    baselines.staged(table(1), ONE, 1)
    baselines.staged(table(2), ONE, 2)
    baselines.committed(table(1), ONE, 1, ("main", 1))
    assert baselines.best_for(ONE).save == 2
    baselines.failed()
    assert baselines.best_for(ONE).commit == ("main", 1)


def test_without_a_durable_step_a_failure_leaves_nothing() -> None:
    baselines = Baselines()
    baselines.staged(table(1), ONE, 1)
    baselines.failed()
    assert baselines.best_for(ONE) is NOTHING


def test_nothing_is_built_upon_when_the_store_may_have_lost_it() -> None:
    baselines = Baselines()
    baselines.staged(table(1), ONE, 1)
    baselines.committed(table(1), ONE, 1, ("main", 1))
    baselines.failed(lost=True)
    assert baselines.best_for(ONE) is NOTHING


def test_a_restore_starts_anew_until_its_table_is_proven() -> None:
    baselines = Baselines()
    baselines.staged(table(1), ONE, 1)
    baselines.committed(table(1), ONE, 1, ("main", 1))
    assert baselines.parent is None
    baselines.restored(commit(7))
    assert baselines.parent == commit(7)
    assert baselines.best_for(ONE) is NOTHING
    baselines.proven(table(7), commit(7))
    assert baselines.best_for(TWO).commit == ("main", 7)
    baselines.staged(table(8), ONE, 2)
    baselines.committed(table(8), ONE, 2, ("main", 8))
    assert baselines.parent is None


@pytest.mark.parametrize("meanwhile", ["another restore", "a save"])
def test_a_proof_that_comes_too_late_does_not_count(meanwhile: str) -> None:
    baselines = Baselines()
    baselines.restored(commit(7))
    if meanwhile == "a save":
        baselines.staged(table(8), ONE, 1)
        baselines.proven(table(7), commit(7))
        assert baselines.best_for(ONE).save == 1
    else:
        baselines.restored(commit(5))
        baselines.proven(table(7), commit(7))
        assert baselines.best_for(ONE) is NOTHING


def test_only_chunks_with_the_recorded_ids_enter_the_table() -> None:
    """Prevents: live bytes that are not the commit's passing for it, and changes being lost."""
    layout = Layout(
        b"", ("x", "y"), (TensorView(0, 0, "uint8", (2048,), (1,), 0),),
        (ExtentSpec(2048, 1024, "uint8"),), (),
    )  # fmt: skip
    good, bad = b"g" * 1024, b"b" * 1024
    ids = np.frombuffer(blake3(good).digest() * 2, np.uint8).reshape(2, 32)
    store = cast(Store, SimpleNamespace(
        snapshot=lambda _: SimpleNamespace(layout=layout, chunks={0: ids})))  # fmt: skip
    found = proven_table(
        store,
        commit(1),
        [
            (KEY, 0, b"h" * 16, memoryview(good)),
            (KEY, 1, b"i" * 16, memoryview(bad)),
            (("y", 2048, "uint8", 1024, "cpu"), 0, b"j" * 16, memoryview(good)),
        ],
    )
    assert found == {KEY: b"h" * 16 + bytes(16)}
