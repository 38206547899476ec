"""Prevents: a guard is removed, or its test, and nobody notices that nothing demands it any more.

The guards are removed for real by `make mutate`; here it is only checked that their list still fits
the sources.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
try:
    from mutate import INVARIANTS, Guard, read_guards
finally:
    sys.path.pop(0)

GUARDS = read_guards()


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_is_where_the_list_says(guard: Guard) -> None:
    source = (ROOT / guard.file).read_text()
    assert guard.removed_from(source) != source
    assert guard.find.endswith("\n"), "whole lines are replaced"
    assert guard.tests
    for test in guard.tests:
        path, _, name = test.partition("::")
        assert not name or name in names_in(path), test
        assert names_in(path), test
    assert set(guard.invariants) <= set(INVARIANTS)


def test_every_invariant_has_a_guard() -> None:
    assert {i for guard in GUARDS for i in guard.invariants} == set(INVARIANTS)
    names = [guard.name for guard in GUARDS]
    assert sorted(set(names)) == sorted(names)


def test_the_guards_of_the_durability_page_are_removed_too() -> None:
    page = (ROOT / "docs" / "durability.md").read_text()
    table = page.partition("### Guards")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", table))
    assert len(named) > 30
    demanded = {test.rpartition("::")[2] for guard in GUARDS for test in guard.tests}
    assert named <= demanded, f"no guard is removed for {sorted(named - demanded)}"
