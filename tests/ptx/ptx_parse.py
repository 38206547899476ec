"""Reading PTX text: statements, labels, declared sizes. Only what Triton's kernels consist of."""

import re
from dataclasses import dataclass, field

_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_LABEL = re.compile(r"(\$?\w+):")
_PARAMETER = re.compile(r"\.param\s+\.u(32|64)[^,)]*?(\w+_param_\d+)")


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction: ``@!guard op args``. Vector arguments keep their braces, memory brackets."""

    line: int
    guard: str | None
    negated: bool
    op: str
    args: tuple[str, ...]


@dataclass(slots=True)
class Program:
    """One entry point. ``labels`` name positions in ``statements``; ``parameters`` are in order."""

    name: str
    threads: int
    parameters: dict[str, int] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def split_arguments(text: str) -> tuple[str, ...]:
    """Split at commas outside braces and brackets."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return tuple(p for p in [*parts, part.strip()] if p)


def parse(text: str) -> Program:
    """The single entry of a PTX module."""
    name = re.search(r"\.visible \.entry (\w+)\(", text)
    threads = re.search(r"\.reqntid (\d+)", text)
    assert name, "no entry point"
    assert threads, "no .reqntid"
    program = Program(name[1], int(threads[1]))
    head, _, body = text[name.end() :].partition("\n{")
    program.parameters = {found[2]: int(found[1]) for found in _PARAMETER.finditer(head)}
    pending = ""
    for number, raw in enumerate(body.splitlines(), text[: text.index("\n{")].count("\n") + 2):
        line = raw.split("//")[0].strip()
        if line == ".section" or line.startswith(".file"):
            break  # debug information follows the code
        if not line or line in "{}" or line.startswith((".", "pragma")):
            continue
        label = _LABEL.fullmatch(line)
        if label:
            program.labels[label[1]] = len(program.statements)
            continue
        pending += " " + line
        if not line.endswith(";"):
            continue
        for statement in pending.split(";")[:-1]:
            found = _STATEMENT.fullmatch(statement.strip())
            assert found, f"line {number}: {statement!r}"
            program.statements.append(
                Statement(number, found[2], found[1] == "!", found[3], split_arguments(found[4]))
            )
        pending = ""
    return program
