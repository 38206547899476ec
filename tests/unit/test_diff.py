"""`diff`: every figure is counted again from the arrays that were saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from deltackpt_store.errors import InvalidInputError, NotFoundError
from deltackpt_tools.changes import TensorChange
from deltackpt_tools.diffing import diff
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import CHUNK, SmallStore, pattern

PER = CHUNK // 4  # float32 elements of one chunk


def by_path(changes: tuple[TensorChange, ...]) -> dict[str, TensorChange]:
    return {change.path: change for change in changes}


def test_identical_steps_give_code_0_and_an_empty_diff(small: SmallStore) -> None:
    first = small.save("main", 1, {"w": pattern(5000)}, {"lr": 0.1})
    small.save("main", 2, {"w": pattern(5000)}, {"lr": 0.1}, parent=first)
    result = diff(small.store, "@1", "@2")
    assert result.identical
    assert (result.tensors, result.values, result.changed_bytes) == ((), (), 0)
    assert run("diff", small.path, "@1", "@2").exit_code == 0


def test_chunks_and_bytes_are_those_that_differ(small: SmallStore) -> None:
    old = pattern(10 * PER + 100)
    new = old.copy()
    new[[0, 3 * PER, 3 * PER + 1, 10 * PER + 50]] += 1  # chunks 0, 3 and the short last one
    first = small.save("main", 1, {"w": old, "same": pattern(PER)})
    small.save("main", 2, {"w": new, "same": pattern(PER)}, parent=first, base=first)
    result = diff(small.path, "@1", "@2")
    (change,) = result.tensors
    assert (change.path, change.change) == ("w", "changed")
    assert (change.chunks, change.changed_chunks) == (11, 3)
    assert change.changed_bytes == 2 * CHUNK + 400
    assert change.share == (2 * CHUNK + 400) / new.nbytes
    assert (result.chunks, result.changed_chunks) == (12, 3)
    assert (result.bytes, result.changed_bytes) == (new.nbytes + CHUNK, 2 * CHUNK + 400)


def test_tied_and_overlapping_tensors_count_their_bytes_once(small: SmallStore) -> None:
    old = pattern(4 * PER)
    new = old.copy()
    new[0] = 9
    window = {"part": {"shape": (PER,), "stride": (1,), "offset": 2 * CHUNK}}
    tied = {"head": "w", "part": "w"}
    small.save("main", 1, {"w": old}, tied=tied, views=window)
    small.save("main", 2, {"w": new}, tied=tied, views=window)
    result = diff(small.store, "@1", "@2")
    assert set(by_path(result.tensors)) == {"w", "head"}  # the window looks at an equal chunk
    assert (result.bytes, result.changed_bytes, result.changed_chunks) == (4 * CHUNK, CHUNK, 1)


def test_leaves_that_come_go_move_and_change_form(small: SmallStore) -> None:
    moved, kept = pattern(3000, 1), pattern(2000, 2)
    small.save("main", 1, {"old/moved": moved, "kept": kept, "gone": pattern(700, 3)}, {"a": 1})
    small.save(
        "main", 2,
        {"new/moved": moved, "kept": kept.reshape(40, 50).astype(np.float64),
         "come": pattern(700, 4)},
        {"b": (1, 2)},
    )  # fmt: skip
    result = diff(small.store, "@1", "@2")
    changes = by_path(result.tensors)
    assert {path: c.change for path, c in changes.items()} == {
        "new/moved": "renamed", "kept": "reshaped", "gone": "removed", "come": "added"
    }  # fmt: skip
    assert changes["new/moved"].old_path == "old/moved"
    assert changes["new/moved"].changed_bytes == 0
    kept_change = changes["kept"]
    assert (kept_change.old_dtype, kept_change.dtype) == ("float32", "float64")
    assert (kept_change.old_shape, kept_change.shape) == ((2000,), (40, 50))
    assert [(v.path, v.old, v.new) for v in result.values] == [
        ("a", "1", None), ("b", None, "(1, 2)")
    ]  # fmt: skip
    assert run("diff", small.path, "@1", "@2").exit_code == 1


def test_grown_tensors_differ_where_they_grew(small: SmallStore) -> None:
    """A vocabulary that grew by some rows must not look rewritten."""
    old = pattern(4 * PER)
    new = np.concatenate([old, pattern(PER, 5)])
    small.save("main", 1, {"w": old})
    small.save("main", 2, {"w": new})
    (change,) = diff(small.store, "@1", "@2").tensors
    assert change.change == "reshaped"
    assert (change.chunks, change.changed_chunks, change.changed_bytes) == (5, 1, CHUNK)


def test_attributes_are_named(small: SmallStore) -> None:
    w = pattern(2000)
    small.save("main", 1, {"w": w}, views={"w": {"requires_grad": True, "parameter": True}})
    small.save("main", 2, {"w": w}, views={"w": {"requires_grad": False, "parameter": True}})
    result = diff(small.store, "@1", "@2")
    (change,) = result.tensors
    assert (change.change, change.attributes) == ("reshaped", ("requires_grad",))
    assert not result.identical
    assert result.changed_bytes == 0


def test_untied_weights_are_seen(small: SmallStore) -> None:
    w = pattern(2000)
    small.save("main", 1, {"a": w}, tied={"b": "a"})
    small.save("main", 2, {"a": w, "b": w})
    result = diff(small.store, "@1", "@2")
    assert {c.path: c.attributes for c in result.tensors} == {"a": ("tied",), "b": ("tied",)}


def test_scalars_in_the_manifest_show_their_values(small: SmallStore) -> None:
    small.save("main", 1, {"step": np.array(5.0, np.float32)}, {"lr": 0.001})
    small.save("main", 2, {"step": np.array(6.0, np.float32)}, {"lr": 0.0005})
    output = run("diff", small.path, "@1", "@2").output
    assert "5.0 -> 6.0" in output
    assert "lr  0.001 -> 0.0005" in output


def test_globs_narrow_everything(small: SmallStore) -> None:
    small.save("main", 1, {"a/w": pattern(2000, 1), "b/w": pattern(2000, 2)}, {"a/x": 1, "b/x": 1})
    small.save("main", 2, {"a/w": pattern(2000, 3), "b/w": pattern(2000, 4)}, {"a/x": 2, "b/x": 2})
    result = diff(small.store, "@1", "@2", only=["a/*"])
    assert [c.path for c in result.tensors] == ["a/w"]
    assert [v.path for v in result.values] == ["a/x"]
    assert result.bytes == 8000
    with pytest.raises(NotFoundError, match="nothing in main@1 and main@2 matches 'b/z'"):
        diff(small.store, "@1", "@2", only=["a/*", "b/z"])


def test_one_name_means_the_step_that_it_continues(small: SmallStore) -> None:
    first = small.save("main", 1, {"w": pattern(2000, 1)})
    second = small.save("main", 2, {"w": pattern(2000, 2)}, parent=first)
    small.save("fork", 3, {"w": pattern(2000, 3)}, parent=second)
    result = diff(small.store, "fork")
    assert (result.old.run, result.old.step) == ("main", 2)
    assert (result.new.run, result.new.step) == ("fork", 3)
    with pytest.raises(NotFoundError, match="continues no step"):
        diff(small.store, "main@1")


def test_two_stores(small: SmallStore, tmp_path: Path) -> None:
    other = SmallStore(tmp_path / "other")
    small.save("main", 1, {"w": pattern(2000, 1)})
    other.save("copy", 7, {"w": pattern(2000, 1)})
    other.save("copy", 8, {"w": pattern(2000, 2)})
    assert diff(small.store, "latest", "@7", other=other.path).identical
    result = diff(small.store, "latest", other=other.store)
    assert (result.new.store, result.new.step) == (other.path, 8)
    assert not result.identical
    other.close()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_identical_is_equality_of_roots(tmp_path_factory: Any, data: st.DataObject) -> None:
    """A diff that says "identical" of steps that are not would hide what one is looking for."""
    small = SmallStore(tmp_path_factory.mktemp("store") / "s")
    names = st.sampled_from(["a/x", "a/y", "b"])
    arrays = st.builds(pattern, st.sampled_from([3, 300, 1500]), st.integers(0, 1))
    tensors = st.dictionaries(names, arrays, min_size=1)
    values = st.dictionaries(st.sampled_from(["p", "q"]), st.integers(0, 1))
    flags = st.fixed_dictionaries({"requires_grad": st.booleans()})
    for step in (1, 2):
        drawn = data.draw(tensors)
        views = {name: data.draw(flags) for name in drawn}
        small.save("main", step, drawn, data.draw(values), views=views)
    roots = {small.store.find("main", step).root for step in (1, 2)}
    result = diff(small.store, "@1", "@2")
    assert result.identical == (len(roots) == 1)
    small.close()


def test_modules_add_up(small: SmallStore) -> None:
    tensors = {f"model/layers.{i}.{n}": pattern(2000, i) for i in range(12) for n in ("q", "k")}
    changed = {**tensors, "model/layers.10.q": pattern(2000, 99)}
    small.save("main", 1, tensors)
    small.save("main", 2, changed)
    result = diff(small.store, "@1", "@2")
    first, *others = result.modules(3)
    assert (first.module, first.tensors, first.differing) == ("model/layers.10", 2, 1)
    assert (first.bytes, first.changed_bytes, first.share) == (16000, 8000, 0.5)
    assert [m.module for m in others] == [f"model/layers.{i}" for i in range(12) if i != 10]
    (whole,) = result.modules(1)
    assert (whole.module, whole.tensors, whole.changed_bytes) == ("model", 24, 8000)
    assert len(result.modules(9)) == 12  # a leaf is never a module of its own


def test_text(small: SmallStore) -> None:
    old = pattern(4000, 1)
    new = old.copy()
    new[[0, 1500]] = 7
    first = small.save(
        "main", 1, {"model/a.w": old, "model/a.b": pattern(1000, 2), "gone": pattern(700, 3)},
        {"lr": 0.1},
    )  # fmt: skip
    small.save(
        "main", 2,
        {"model/a.w": new, "model/a.b": pattern(1000, 2).astype(np.float64),
         "come": pattern(800, 4)},
        {"lr": 0.2}, parent=first,
    )  # fmt: skip
    result = run("diff", small.path)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "main@1 -> main@2: 4 of 4 tensors and 1 value differ; 19.4 kB of 27.2 kB (71.3 %), "
        "5 of 7 chunks",
        "",
        "tensors",
        "  path       what                dtype    shape   differs       of   share  chunks",
        "  gone       removed             float32  [700]    2.8 kB   2.8 kB   100 %     0/1",
        "  come       added               float32  [800]    3.2 kB   3.2 kB   100 %     1/1",
        "  model/a.b  float32 -> float64  float64  [1000]   8.0 kB   8.0 kB   100 %     2/2",
        "  model/a.w  changed             float32  [4000]   8.2 kB  16.0 kB  51.2 %     2/4",
        "",
        "values",
        "  lr  0.1 -> 0.2",
    ]
    folded = run("diff", small.path, "--depth", "2").output.splitlines()
    assert folded[2:] == [
        "modules",
        "  module   tensors  differs       of   share",
        "  come         1/1   3.2 kB   3.2 kB   100 %",
        "  gone         1/1   2.8 kB   2.8 kB   100 %",
        "  model/a      2/2  16.2 kB  24.0 kB  67.5 %",
        "",
        "values",
        "  lr  0.1 -> 0.2",
    ]


def test_json_and_python_tell_the_same(small: SmallStore) -> None:
    small.save("main", 1, {"w": pattern(2000, 1)}, {"lr": 1})
    small.save("main", 2, {"w": pattern(2000, 2)}, {"lr": 2})
    document = json.loads(run("diff", small.path, "@1", "@2", "--values", "--json").stdout)
    expected = diff(small.path, "@1", "@2", values=True).to_dict()
    del document["format"], document["store"], document["modules"]
    assert document == json.loads(json.dumps(expected))


def test_dataframe(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    small.save("main", 1, {"w": pattern(2000, 1), "v": pattern(2000, 3)})
    small.save("main", 2, {"w": pattern(2000, 2), "v": pattern(2000, 4)})
    result = diff(small.path, "@1", "@2", values=True)
    frame = result.to_dataframe()
    assert list(frame["path"]) == [change.path for change in result.tensors]
    assert frame["values.elements"].sum() == 4000
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(InvalidInputError, match="pip install pandas"):
        result.to_dataframe()


@pytest.mark.parametrize("step", [5, None, 1.5, []])
def test_a_step_that_is_no_name_is_told_how_one_is_written(small: SmallStore, step: Any) -> None:
    """As `deltackpt.load` takes a number, one may try it here: `AttributeError: rpartition`."""
    small.save("main", 1, {"w": pattern(4)})
    with pytest.raises(InvalidInputError, match="named by a str") as caught:
        diff(small.path, step, "main@1")
    assert "@" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (np.arange(624), np.where(np.arange(624) == 7, 5, np.arange(624)), ("[7]: 7", "[7]: 5")),
        (np.zeros((3, 40)), np.eye(3, 40) - np.eye(3, 40, 2), ("[0, 0]: 0.0", "[0, 0]: 1.0")),
        ([*range(99), 1], [*range(99), 2], ("[99]: 1", "[99]: 2")),
        (list(range(99)), list(range(100)), ("99 items", "100 items")),
        (
            {"best": {"history": [0.5] * 50}},
            {"best": {"history": [0.5] * 49 + [0.25]}},
            ("['best']['history'][49]: 0.5", "['best']['history'][49]: 0.25"),
        ),
        (
            {**dict.fromkeys("abcdefghijklmnop", 1), "q": 1},
            {**dict.fromkeys("abcdefghijklmnop", 1), "r": 1},
            ("key 16: 'q'", "key 16: 'r'"),
        ),
        ("x" * 99 + "old", "x" * 99 + "new", ("...xxxxxxxxxxxxold'", "...xxxxxxxxxxxxnew'")),
        ([np.zeros(2)], [np.zeros(3)], ("[array(shape=(2,), dtype='<f8')]",
                                        "[array(shape=(3,), dtype='<f8')]")),
    ],
    ids=["array", "matrix", "late", "longer", "nested", "key", "text", "shape"],
)  # fmt: skip
def test_values_that_read_alike_are_shown_where_they_differ(
    small: SmallStore, old: Any, new: Any, told: tuple[str, str]
) -> None:
    """A line `array(...) -> array(...)` of two equal words tells nobody what changed."""
    small.save("main", 1, {}, {"state": old})
    small.save("main", 2, {}, {"state": new})
    (change,) = diff(small.store, "@1", "@2").values
    assert (change.old, change.new) == told
