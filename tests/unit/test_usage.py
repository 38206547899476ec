"""Prevents: `du` counts what changed from step to step, and not what each step needs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from deltackpt_store.pack import pack_path
from deltackpt_store.store import Store
from deltackpt_tools.chunk_lives import Lives
from deltackpt_tools.chunk_states import ChunkStates
from deltackpt_tools.stored_chunks import StoredChunks
from deltackpt_tools.usage import measure
from hypothesis import given, settings
from hypothesis import strategies as st
from report_store import make_report_store

SIZE = 12
EDGES = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)), max_size=12)
STEPS = st.lists(st.lists(st.integers(0, SIZE - 1), max_size=8), max_size=8)


def needed(uses: list[int], edges: list[tuple[int, int]]) -> set[int]:
    """In the slow and plain way: what is used, and what that is coded against."""
    found = set(uses)
    while more := {b for a, b in edges if a in found} - found:
        found |= more
    return found


@settings(max_examples=200, deadline=None)
@given(EDGES, STEPS)
def test_lives_are_what_is_needed(edges: list[tuple[int, int]], steps: list[list[int]]) -> None:
    edges = [(a, b) for a, b in edges if a < b]  # references lead to chunks without circles
    lives = Lives(SIZE, *(np.array([e[i] for e in edges], np.intp) for i in (0, 1)))
    before: list[int] = []
    for uses in [*steps, []]:
        change = lives.move(np.array(before, np.intp), np.array(uses, np.intp))
        old, new = needed(before, edges), needed(uses, edges)
        assert change.born.tolist() == sorted(new - old)
        assert change.gone.tolist() == sorted(old - new)
        before = uses


def test_references_in_a_circle_keep_nothing_alive() -> None:
    edges = [(0, 1), (1, 2), (2, 1), (3, 4), (5, 5)]
    lives = Lives(6, *(np.array([e[i] for e in edges], np.intp) for i in (0, 1)))
    every = np.array([0, 3, 5], np.intp)
    none = np.empty(0, np.intp)
    assert {0, 3, 4, 5} <= set(lives.move(none, every).born.tolist())
    assert {0, 3, 4, 5} <= set(lives.move(every, none).gone.tolist())
    assert not len(lives.move(none, none).born)


@pytest.mark.parametrize("lose_a_pack", [False, True])
def test_figures_are_those_of_whole_snapshots(tmp_path: Path, lose_a_pack: bool) -> None:
    make_report_store(tmp_path / "store").close()
    store = Store.open(tmp_path / "store")
    if lose_a_pack:
        Path(pack_path(store.path, store.packs.names()[3])).unlink()
    store = Store.open(store.path)
    states = ChunkStates(store)
    commits = [commit for run in ("train", "fork") for commit in store.commits(run)]
    contents: list[set[bytes]] = []
    for commit in commits:
        ids = [row.tobytes() for array in store.snapshot(commit).chunks.values() for row in array]
        assert Counter(i[:8] for i in ids) == Counter(key.tobytes() for key in states.keys(commit))
        contents.append(set(ids))
    sizes = {i: place.stored for n in store.index().packs()
             for i, place in store.index().entries(n).items(n)}  # fmt: skip
    usage = measure(store)
    steps = [step for run in ("train", "fork") for r in usage.runs if r.run == run
             for step in r.steps]  # fmt: skip
    assert [step.commit for step in steps] == commits
    reached = Counter(i for ids in contents for i in ids)
    seen: set[bytes] = set()
    for step, ids in zip(steps, contents, strict=True):
        assert step.total == sum(sizes.get(i, 0) for i in ids)
        assert step.unique == sum(sizes.get(i, 0) for i in ids if reached[i] == 1)
        assert step.added == sum(sizes.get(i, 0) for i in ids - seen)
        assert step.missing == sum(i not in sizes for i in ids)
        seen |= ids
    assert bool(sum(step.missing for step in steps)) == lose_a_pack
    assert usage.referenced == sum(sizes.get(i, 0) for i in seen)
    assert len(StoredChunks(store).keys) == len(sizes)
