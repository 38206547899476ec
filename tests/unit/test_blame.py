"""`blame`: who changed what last is worked out again by comparing the saved arrays."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from command_line import run
from deltackpt_store.errors import NotFoundError
from deltackpt_tools.blaming import NotFinite, blame
from small_store import CHUNK, SmallStore, pattern

PER = CHUNK // 4


def last_changed(history: list[np.ndarray[Any, Any]], chunk: int) -> int:
    """Number of the array that changed `chunk` last, by looking at the arrays."""
    part = slice(chunk * PER, (chunk + 1) * PER)
    for i in range(len(history) - 1, 0, -1):
        if history[i][part].tobytes() != history[i - 1][part].tobytes():
            return i
    return 0


def test_every_chunk_is_blamed_on_the_step_that_changed_it(small: SmallStore) -> None:
    rng = np.random.default_rng(3)
    w = pattern(20 * PER + 100)
    history = [w]
    parent = small.save("main", 0, {"w": w})
    for step in range(1, 9):
        w = w.copy()
        for chunk in rng.choice(21, 4, replace=False):
            w[chunk * PER] += 1
        history.append(w)
        parent = small.save("main", step, {"w": w}, parent=parent)
    (tensor,) = blame(small.store, "w").tensors
    found: dict[int, int] = {}
    for part in tensor.parts:
        assert part.start % CHUNK == 0
        for chunk in range(part.start // CHUNK, -(-part.stop // CHUNK)):
            found[chunk] = part.step
    assert found == {chunk: last_changed(history, chunk) for chunk in range(21)}
    assert tensor.parts[-1].stop == w.nbytes
    assert sum(tensor.by_step().values()) == w.nbytes
    newest = tensor.newest
    assert newest is not None
    assert newest.step == max(found.values())


def test_blame_crosses_forks_and_leaves_out_abandoned_steps(small: SmallStore) -> None:
    old = pattern(2 * PER)
    first = small.save("main", 1, {"w": old})
    small.save("main", 2, {"w": pattern(2 * PER, 9)}, parent=first)  # abandoned by the fork
    new = old.copy()
    new[0] = 5
    small.save("fork", 3, {"w": new}, parent=first)
    (tensor,) = blame(small.store, "w", "fork").tensors
    assert [(p.start, p.stop, p.run, p.step) for p in tensor.parts] == [
        (0, CHUNK, "fork", 3), (CHUNK, 2 * CHUNK, "main", 1)
    ]  # fmt: skip


def test_a_tensor_that_appeared_or_changed_form_is_blamed_on_that_step(small: SmallStore) -> None:
    first = small.save("main", 1, {"a": pattern(2000), "b": pattern(2000, 1)})
    second = small.save(
        "main", 2, {"a": pattern(2000).reshape(50, 40), "b": pattern(2000, 1),
                    "c": pattern(2000, 2)}, parent=first,
    )  # fmt: skip
    small.save("main", 3, {"a": pattern(2000).reshape(50, 40), "b": pattern(2000, 1),
                           "c": pattern(2000, 2)}, parent=second)  # fmt: skip
    steps = {t.path: [p.step for p in t.parts] for t in blame(small.store, "*").tensors}
    assert steps == {"a": [2], "b": [1], "c": [2]}


def test_small_tensors_in_the_manifest_are_one_part(small: SmallStore) -> None:
    first = small.save("main", 1, {"b": pattern(4), "e": np.zeros(0, np.float32)})
    second = small.save("main", 2, {"b": pattern(4, 1), "e": np.zeros(0, np.float32)}, parent=first)
    small.save("main", 3, {"b": pattern(4, 1), "e": np.zeros(0, np.float32)}, parent=second)
    b, e = blame(small.store, "*").tensors
    assert [(p.start, p.stop, p.step) for p in b.parts] == [(0, 16, 2)]
    assert (e.parts, e.newest) == ((), None)


def test_the_first_step_with_nan_is_found_for_each_tensor(small: SmallStore) -> None:
    a, b, c = pattern(3 * PER, 1), pattern(3 * PER, 2), pattern(3 * PER, 3)
    parent = None
    for step in range(1, 7):
        a, b, c = a + np.float32(1), b.copy(), c.copy()
        if step >= 3:
            b[PER + 5] = np.inf
        if step >= 5:
            a[:10] = np.nan
        if step == 2:
            c[0] = np.nan  # and back again: it was there all the same
        if step == 3:
            c[0] = 1
        parent = small.save("main", step, {"a": a, "b": b, "c": c}, parent=parent)
    found = {t.path: t.not_finite for t in blame(small.store, "*", nan=True).tensors}
    assert found == {
        "a": NotFinite("main", 5, 5, 10, 0),
        "b": NotFinite("main", 3, 3, 0, 1),
        "c": NotFinite("main", 2, 2, 1, 0),
    }
    result = run("blame", small.path, "*", "--nan")
    assert result.exit_code == 1
    assert "NaN or Inf appeared first in main@2, in 1 tensor; 3 tensors in all" in result.output
    for name, looked in (("a", 6), ("c", 6)):  # 'a' changed in the newest step already
        head = run("blame", small.path, name, "--nan").output.splitlines()[0]
        assert head == f"main@6: 1 tensor, {looked} steps searched, back to step 1"
    assert run("blame", small.path, "b", "@2", "--nan").exit_code == 0


def test_text(small: SmallStore) -> None:
    w = pattern(4 * PER)
    first = small.save("main", 1, {"model/w": w, "model/b": pattern(4)})
    w = w.copy()
    w[PER] = 3
    small.save("main", 2, {"model/w": w, "model/b": pattern(4)}, parent=first)
    assert run("blame", small.path, "model/w").output.splitlines() == [
        "main@2: 1 tensor, 2 steps searched, back to step 1",
        "",
        "model/w  float32 [4096]  16.4 kB",
        "  last changed by    bytes   share",
        "  main@2            4.1 kB  25.0 %",
        "  main@1           12.3 kB  75.0 %",
        "",
        "  from byte  to byte  last changed by",
        "          0     4096  main@1",
        "       4096     8192  main@2",
        "       8192    16384  main@1",
    ]
    assert run("blame", small.path, "model/*").output.splitlines()[2:] == [
        "tensor   last changed by   share    bytes",
        "model/b  main@1            100 %     16 B",
        "model/w  main@2           25.0 %  16.4 kB",
    ]


def test_unknown_tensors_are_named_and_python_tells_the_same(small: SmallStore) -> None:
    small.save("main", 1, {"w": pattern(2000)})
    with pytest.raises(NotFoundError, match="no tensor 'x'"):
        blame(small.path, "x")
    assert run("blame", small.path, "x").exit_code == 2
    document = json.loads(run("blame", small.path, "w", "--json").stdout)
    del document["format"]
    assert document == json.loads(json.dumps(blame(small.path, "w").to_dict()))
    assert list(blame(small.path, "w").to_dataframe()["step"]) == [1]
