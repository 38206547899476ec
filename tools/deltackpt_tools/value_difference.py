"""Two plain values that differ, each as a line in which the difference can be seen."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, cast

import numpy as np

from deltackpt_tools.value_text import MALFORMED, Node, cut, parse, render, text_of

_BEFORE = 12
"""Characters that are shown before the first one that differs."""


def render_both(old: bytes, new: bytes) -> tuple[str, str]:
    """Both documents as of `render`. Where that reads alike (long values, arrays), the first part
    in which they differ, after its place as Python writes it: ``[41]: 2.5``."""
    whole = render(old), render(new)
    if whole[0] != whole[1]:
        return whole
    try:
        place, left, right = _first_difference(parse(old), parse(new))
    except MALFORMED:
        return whole
    before = f"{place}: " if place else ""
    return cut(before + left), cut(before + right)


def _first_difference(old: Node, new: Node) -> tuple[str, str, str]:
    """Its place, and what is there in either."""
    place = ""
    while _same_tag(old, new) and (parts := [_parts(old), _parts(new)]) != [None, None]:
        left, right = cast("list[list[tuple[Node, Node]]]", parts)
        if len(left) != len(right):
            return place, f"{len(left)} items", f"{len(right)} items"
        number = next((i for i, part in enumerate(left) if part != right[i]), None)
        if number is None:
            break
        (key, old), (other, new) = left[number], right[number]
        if key != other:
            return f"{place} key {number}".lstrip(), _text(key), _text(other)
        place += f"[{_text(key)}]"
    if _same_tag(old, new) and old[0] == "np" and old[1:3] == new[1:3]:
        return _elements(place, old, new)
    left, right = _text(old), _text(new)
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    start = max(0, sum(1 for _ in equal) - _BEFORE)
    head = "..." if start else ""
    return place, head + left[start:], head + right[start:]


def _text(node: Node) -> str:
    return text_of(node, 0, 1 << 20)


def _same_tag(old: Node, new: Node) -> bool:
    if not (isinstance(old, list) and isinstance(new, list)):
        return False
    return cast("list[Node]", old)[0] == cast("list[Node]", new)[0]


def _parts(node: list[Any]) -> list[tuple[Node, Node]] | None:
    """What a container holds, by index or key; None for all else."""
    if node[0] in ("l", "t", "set", "fset", "dq", "nt"):
        return list(enumerate(cast("list[Node]", node[-1])))
    if node[0] in ("d", "od", "ctr", "dd"):
        return [(key, value) for key, value in node[-1]]
    return None


def _elements(place: str, old: list[Any], new: list[Any]) -> tuple[str, str, str]:
    """The first element in which two arrays of one shape and dtype differ."""
    dtype, shape = np.dtype(old[1]), tuple(old[2])
    rows = [np.frombuffer(node[3], np.uint8).reshape(-1, dtype.itemsize) for node in (old, new)]
    number = int((rows[0] != rows[1]).any(axis=1).argmax())
    index = ", ".join(str(int(i)) for i in np.unravel_index(number, shape))
    left, right = (str(np.frombuffer(row[number].tobytes(), dtype)[0].item()) for row in rows)
    return f"{place}[{index}]", left, right
