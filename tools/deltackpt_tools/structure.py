"""The state tree of a step: how to walk its nodes (docs/format.md describes them).

A node is a leaf slot (an int) or a list that starts with a tag.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
from deltackpt_store.errors import CorruptionError

Node = Any

MAPPINGS = ("d", "od", "ctr", "dd")
SEQUENCES = ("l", "t", "dq", "nt")
SPARSE = ("coo", "csr", "csc", "bsr", "bsc")

_PARTS = {"d": 1, "ctr": 1, "dd": 2, "l": 1, "t": 1, "dq": 2, "nt": 4, "np": 3,
          **dict.fromkeys(SPARSE, 6)}  # fmt: skip


def parse_structure(structure: bytes) -> Node:
    """The root node; CorruptionError when the document is malformed."""
    try:
        return msgspec.msgpack.decode(structure)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptionError(f"malformed state structure: {error}", kind="structure") from error


def entries(node: list[Any]) -> list[tuple[Any, Node]]:
    """(key node, child) of a mapping."""
    return cast("list[tuple[Any, Node]]", node[2 if node[0] == "dd" else 1])


def slots_below(node: Node) -> Iterator[int]:
    """Slots of all leaves of `node`, in order. ValueError for what is no node."""
    for inner in walk(node):
        if isinstance(inner, int):
            yield inner
        elif inner[0] in SPARSE:
            yield from inner[3:-2] if inner[0] == "coo" else inner[2:-2]
        elif inner[0] == "np":
            yield inner[1]


def walk(node: Node) -> Iterator[Node]:
    """`node` and all nodes below it, parents first. ValueError for what is no node."""
    yield node
    if isinstance(node, int):
        return
    tag, parts = node[0], len(node) - 1
    if parts != _PARTS.get(tag) and not (tag == "od" and parts in (1, 2)):
        raise ValueError(f"{parts} parts in a node {tag!r:.40}")
    if tag in MAPPINGS:
        for _, child in entries(node):
            yield from walk(child)
    elif tag in SEQUENCES:
        for child in node[-1]:
            yield from walk(child)


def check_tree(root: Node) -> None:
    """ValueError (or TypeError, IndexError) unless every node is well-formed."""
    for _ in walk(root):
        pass


def array_slots(structure: bytes) -> frozenset[int]:
    """Slots that hold the bytes of large NumPy arrays, and so are tensors in form only."""
    try:
        nodes = list(walk(parse_structure(structure)))
        lists = [cast("list[Any]", node) for node in nodes if isinstance(node, list)]
        return frozenset(node[1] for node in lists if node[0] == "np")
    except (ValueError, TypeError, IndexError, KeyError, RecursionError) as error:
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"malformed state structure: {error}", kind="structure") from error
