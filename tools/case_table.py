"""Keeps docs/cases.md true: which test covers which case.

    python tools/case_table.py            rewrite the last column of the table
    python tools/case_table.py --check    exit with 1 when that would change anything

The rows are the document's own. A test under tests/ covers a case by a comment ``# case 52`` (or
``# case 52, case 53``) in its body or above it; a file does as a whole by one above its imports. In
the row of a case that no test names, the last column says why; that is kept as it is, and an empty
one is an error.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "cases.md"
NO_TEST = "*none:*"
_ROW = re.compile(r"\| (\d+) \|")
_COMMENT = re.compile(r"#\s*case \d")
_NUMBER = re.compile(r"\bcase (\d+)")


class Mark(NamedTuple):
    """A comment in `file` (relative to tests/): `test`, or all of it for "", covers `case`."""

    case: int
    file: str
    test: str


def marks(file: Path) -> list[Mark]:
    """All marks of one test file, in its order."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    ]
    functions.sort(key=lambda node: _start(node))
    imports = (n.lineno for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom))
    top = next(imports, 0)
    found: list[Mark] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _COMMENT.match(token.string):
            line, column = token.start
            name = "" if line < top else _owner(functions, line, column=column)
            place = file.relative_to(ROOT / "tests").as_posix()
            found += [Mark(int(n), place, name) for n in _NUMBER.findall(token.string)]
    return found


def _start(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _owner(
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef], line: int, *, column: int
) -> str:
    """The outermost test around the line, or the next one that begins after it."""
    for node in functions:
        if column and _start(node) <= line <= (node.end_lineno or node.lineno):
            return node.name
    following = [node.name for node in functions if node.lineno > line]
    return following[0] if following else ""


def tests_by_case() -> dict[int, str]:
    """Case -> the last column of its row."""
    by_case: defaultdict[int, dict[str, list[str]]] = defaultdict(dict)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for mark in marks(file):
            names = by_case[mark.case].setdefault(mark.file, [])
            if mark.test not in names:
                names.append(mark.test)
    return {
        case: "<br>".join(_told(file, names) for file, names in files.items())
        for case, files in by_case.items()
    }


def _told(file: str, names: list[str]) -> str:
    return f"`{file}`" if "" in names else f"`{file}`: {', '.join(names)}"


def rewrite(document: str, covered: dict[int, str]) -> tuple[str, list[str]]:
    """The document with its last column brought up to date, and what is wrong with it."""
    problems: list[str] = []
    lines: list[str] = []
    known: set[int] = set()
    for line in document.splitlines():
        row = _ROW.match(line)
        if row:
            case = int(row[1])
            known.add(case)
            *front, last, _ = line.split(" |")
            if case in covered:
                last = f" {covered[case]}"
            elif not last.strip().startswith(NO_TEST) or not last.strip().removeprefix(NO_TEST):
                problems.append(f"case {case} is named by no test; say why after {NO_TEST}")
                last = f" {NO_TEST}"
            line = " |".join([*front, last, ""])
        lines.append(line)
    problems += [f"a test names case {c}, which has no row" for c in sorted(covered.keys() - known)]
    return "\n".join(lines) + "\n", problems


def main(arguments: list[str]) -> int:
    before = DOCUMENT.read_text(encoding="utf-8")
    after, problems = rewrite(before, tests_by_case())
    if arguments == ["--check"]:
        if after != before:
            problems.append("docs/cases.md is out of date: run python tools/case_table.py")
    elif arguments:
        problems.append("usage: case_table.py [--check]")
    else:
        DOCUMENT.write_text(after, encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
