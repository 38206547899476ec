"""`deltackpt_tools` from Python: what cannot be used is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deltackpt_tools as tools
import pytest
from deltackpt_store.errors import InvalidInputError, NotFoundError
from small_store import SmallStore, pattern


@pytest.fixture
def path(small: SmallStore) -> str:
    stats = {"stall_seconds": 0.01, "staged_seconds": 0.02, "writer_seconds": 0.05}
    parent = small.save("main", 1, {"model/w": pattern(100)}, {"lr": 0.1}, stats=stats)
    small.save("main", 2, {"model/w": pattern(100, 1)}, {"lr": 0.2}, parent=parent, stats=stats)
    return small.path


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *[("mtbf", lambda path, bad=bad: tools.advise(path, mtbf=bad))
          for bad in ("6h", 0, -1, True, float("nan"), float("inf"))],
        *[("overhead", lambda path, bad=bad: tools.advise(path, mtbf=60, overhead=bad))
          for bad in ("2%", 0, 2)],
        ("restore", lambda path: tools.advise(path, mtbf=60, restore=-1)),
        ("mtbf", lambda path: tools.report(path, mtbf=-5)),
        *[("limit", lambda path, bad=bad: tools.log(path, limit=bad)) for bad in (0, -1, "3", 1.0)],
        *[("depth", lambda path, bad=bad: tools.du(path, depth=bad)) for bad in (0, "x", True)],
        ("depth", lambda path: tools.diff(path).modules(0)),
        ("poll", lambda path: next(tools.watch(path, poll=-1))),
        ("only", lambda path: tools.diff(path, only=5)),
        ("only", lambda path: tools.show(path, only=[5])),
        ("tensor", lambda path: tools.blame(path, 5)),
        ("prefix", lambda path: tools.show_chunk(path, 5)),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(
    path: str, name: str, call: Callable[..., Any]
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} must be ") as caught:
        call(path)
    assert caught.value.context["option"] == name


def test_one_glob_need_not_be_in_a_list(path: str) -> None:
    """Prevents: `only="model/*"` taken for the globs "m", "o", "d", ..."""
    assert [change.path for change in tools.diff(path, only="model/*").tensors] == ["model/w"]
    assert tools.diff(path, only="model/*").values == ()
    assert [row["path"] for row in tools.show(path, only="lr").values] == ["lr"]
    assert tools.show(path, only="lr") == tools.show(path, only=["lr"])


def test_a_run_that_a_report_has_not(path: str) -> None:
    made = tools.report(path, verify=None)
    assert made.heatmap_png("main") == made.heatmap_png()
    with pytest.raises(NotFoundError, match="no run 'other'") as caught:
        made.heatmap_png("other")
    assert caught.value.hint == "it has main"
