"""`show --tensor`, `show --chunk` and `du --depth`: counted again from the snapshots."""

from __future__ import annotations

import json
from pathlib import Path

import deltackpt_tools as tools
import pytest
from blake3 import blake3
from command_line import run
from deltackpt_store.errors import InvalidInputError, NotFoundError
from small_store import CHUNK, SmallStore, pattern

PER = CHUNK // 4


def test_a_tensor_chunk_by_chunk(small: SmallStore) -> None:
    w = pattern(3 * PER + 10)
    small.save("main", 1, {"w": w, "b": pattern(4)})
    details = tools.show_tensor(small.path, "w")
    data = w.tobytes()
    pieces = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    assert [chunk.id for chunk in details.chunks] == [blake3(p).hexdigest() for p in pieces]
    assert [chunk.bytes for chunk in details.chunks] == [CHUNK, CHUNK, CHUNK, 40]
    places = [chunk.place for chunk in details.chunks]
    assert all(place is not None and place.codec == "raw" for place in places)
    output = run("show", small.path, "--tensor", "w").output
    assert all(chunk.id[:16] in output for chunk in details.chunks)
    assert "in the manifest" in run("show", small.path, "--tensor", "b").output
    assert run("show", small.path, "--tensor", "x").exit_code == 2
    document = json.loads(run("show", small.path, "--tensor", "w", "--json").stdout)
    assert document["format"] == "deltackpt.show-tensor/1"
    assert document["chunks"] == json.loads(json.dumps(details.to_dict()))["chunks"]


def test_a_lost_pack_gives_code_3(small: SmallStore) -> None:
    small.save("main", 1, {"w": pattern(2 * PER)})
    next(Path(small.path).glob("packs/*/*.pack")).unlink()
    result = run("show", small.path, "--tensor", "w")
    assert result.exit_code == 3
    assert "missing" in result.output


def test_a_chunk_and_all_who_need_it(small: SmallStore) -> None:
    shared = pattern(PER, 1)
    first = small.save("main", 1, {"a": shared, "b": pattern(PER, 2)})
    small.save("main", 2, {"a": pattern(PER, 3), "b": shared}, parent=first)
    name = blake3(shared.tobytes()).hexdigest()
    for prefix in (name, name[:10], name[:11].upper()):
        details = tools.show_chunk(small.path, prefix)
        assert details.id == name
        assert [(use.step, use.tensor, use.index) for use in details.uses] == [
            (1, "a", 0), (2, "b", 0)
        ]  # fmt: skip
        assert len(details.places) == 1
    output = run("show", small.path, "--chunk", name[:12]).output
    assert "in 1 place, 0 chunks coded against it" in output
    assert "main@1" in output
    assert run("show", small.path, "--chunk", name[:12], "--tensor", "a").exit_code == 2


def test_chunk_names_that_mean_nothing_or_too_much(small: SmallStore) -> None:
    small.save("main", 1, {"w": pattern(PER)})
    with pytest.raises(NotFoundError, match="no pack"):
        tools.show_chunk(small.path, "0" * 64)
    for bad in ("xyz1", "12", "0" * 65):
        with pytest.raises(InvalidInputError):
            tools.show_chunk(small.path, bad)


def test_du_by_module(small: SmallStore) -> None:
    shared = pattern(2 * PER, 7)
    first = small.save(
        "main", 1, {"m/a.x": pattern(3 * PER, 1), "m/a.y": shared, "m/b.x": shared,
                    "m/c": pattern(PER, 4)},
    )  # fmt: skip
    small.save(
        "main", 2, {"m/a.x": pattern(3 * PER, 2), "m/a.y": shared, "m/b.x": shared,
                    "m/c": pattern(PER, 4)}, parent=first,
    )  # fmt: skip
    found = {one.module: one for one in tools.du(small.path, depth=2).modules}
    assert list(found) == ["m/a", "m/b", "m"]
    a, b, c = found["m/a"], found["m/b"], found["m"]
    assert (a.total_bytes, a.unique_bytes, a.newest_bytes) == (8 * CHUNK, 6 * CHUNK, 5 * CHUNK)
    assert (b.total_bytes, b.unique_bytes, b.shared_bytes) == (2 * CHUNK, 0, 2 * CHUNK)
    assert (c.total_bytes, c.chunks) == (CHUNK, 1)
    output = run("du", small.path, "--depth", 2).output
    assert "modules, over all steps" in output
    assert "m/a" in output


def test_every_name_of_the_api_is_there_and_typed(small: SmallStore) -> None:
    for name in tools.__all__:
        assert getattr(tools, name).__name__ == name
    assert set(tools.__all__) <= set(dir(tools))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tools.nothing  # that is the point
    small.save("main", 1, {"w": pattern(PER)}, {"lr": 0.5}, metrics={"loss": 1.0})
    step = tools.show(small.path)
    assert (step.step, step.metrics, step.values[0]["value"]) == (1, {"loss": 1.0}, 0.5)
    assert list(step.to_dataframe()["path"]) == ["w"]
    assert list(tools.du(small.path).to_dataframe()["step"]) == [1]
    assert json.dumps(step.to_dict())
