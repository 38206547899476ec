"""A table of covered cases that nobody checks is soon a list of wishes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "case_table.py"
_spec = importlib.util.spec_from_file_location("case_table", TOOL)
assert _spec is not None
assert _spec.loader is not None
case_table: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case_table)


def test_the_table_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert case_table.main(["--check"]) == 0, capsys.readouterr().err


def test_marks_belong_to_the_test_around_or_below_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_table, "ROOT", tmp_path)
    file = tmp_path / "tests" / "unit" / "test_x.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# case 7\nimport os\ndef helper():\n    pass  # case 6\n"
        "# case 1, case 2: why\n@os.x\ndef test_a():\n    'case 9'\n    # case 3\n"
        "    def inner():\n        pass  # case 4\n\n"
        "async def test_b():  # case 5\n    x = '# case 8'\n"
    )
    found = [(mark.case, mark.test) for mark in case_table.marks(file)]
    assert found[:2] == [(7, ""), (6, "test_a")]
    assert found[2:] == [(n, "test_a") for n in (1, 2, 3, 4)] + [(5, "test_b")]


def test_a_mark_above_the_imports_is_about_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_table, "ROOT", tmp_path)
    file = tmp_path / "tests" / "unit" / "test_x.py"
    file.parent.mkdir(parents=True)
    file.write_text("# case 7\nimport os\ndef test_a():\n    pass  # case 7, case 8\n")
    assert case_table.tests_by_case() == {7: "`unit/test_x.py`", 8: "`unit/test_x.py`: test_a"}


def test_rows_without_tests_keep_their_reason_and_need_one() -> None:
    table = "| 1 | a | b | C | old |\n| 2 | a | b | C | *none:* because |\n| 3 | a | b | C | x |\n"
    after, problems = case_table.rewrite(table, {1: "`t.py`: test_x", 7: "`t.py`: test_y"})
    assert after == (
        "| 1 | a | b | C | `t.py`: test_x |\n| 2 | a | b | C | *none:* because |\n"
        "| 3 | a | b | C | *none:* |\n"
    )
    assert [problem.split(";")[0] for problem in problems] == [
        "case 3 is named by no test", "a test names case 7, which has no row",
    ]  # fmt: skip
