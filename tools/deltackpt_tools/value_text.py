"""Plain values of a step, for people and for JSON, straight from their value documents.

Works on the documents themselves (see `deltackpt_store.values`), so that an enum or namedtuple of
a training script, whose class is not loaded here, can be shown.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec
from deltackpt_store.values import MAX_DEPTH, MAX_DOCUMENT_BYTES

MALFORMED = (ValueError, TypeError, IndexError, AttributeError, KeyError, struct.error)

Node = Any  # a decoded msgpack value: native, or [tag, payload...]

LINE = 60  # characters

_DECIMAL_BITS = 2048
"""Of integers that are written with decimal digits; less than any limit of Python allows."""

_OPEN = {"l": ("[", "]"), "t": ("(", ")"), "set": ("{", "}"), "fset": ("frozenset({", "})")}
_MAPS = {"d": "", "od": "OrderedDict", "ctr": "Counter", "dd": "defaultdict"}


def parse(document: bytes) -> Node:
    """The msgpack tree of a value document; ValueError when it is none."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{len(document)} bytes exceed the limit")
    try:
        return msgspec.msgpack.decode(document)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def render(document: bytes) -> str:
    """One line of at most about `LINE` characters that reads like Python."""
    try:
        return cut(text_of(parse(document), 0, LINE))
    except MALFORMED as error:
        return f"<unreadable: {error}>"


def cut(text: str) -> str:
    """`text`, or its beginning where it is longer than `LINE`."""
    return text if len(text) <= LINE else text[: LINE - 3] + "..."


def text_of(node: Node, depth: int, budget: int) -> str:
    """A node as text that reads like Python; what lies beyond some `budget` characters is cut or
    counted. Raises one of `MALFORMED`."""
    if not isinstance(node, list):
        if isinstance(node, (str, bytes)) and len(node) > budget:
            return f"{node[:budget]!r}..."
        return repr(node)
    if depth > MAX_DEPTH:
        raise ValueError("nests too deeply")
    tag, *payload = cast("list[Any]", node)
    if tag in _OPEN:
        left, right = _OPEN[tag]
        items = _joined(payload[0], depth, budget)
        comma = "," if tag == "t" and len(payload[0]) == 1 else ""
        return f"{left}{items}{comma}{right}"
    if tag in _MAPS:
        pairs = _pairs(payload[-1], depth, budget)
        return f"{_MAPS[tag]}({{{pairs}}})" if _MAPS[tag] else f"{{{pairs}}}"
    return _TEXTS.get(tag, _other)(tag, payload, depth, budget)


def _joined(items: list[Any], depth: int, budget: int) -> str:
    parts: list[str] = []
    used = 0
    for item in items:
        if used > budget:
            parts.append(f"... {len(items) - len(parts)} more")
            break
        parts.append(text_of(item, depth + 1, budget - used))
        used += len(parts[-1]) + 2
    return ", ".join(parts)


def _pairs(items: list[Any], depth: int, budget: int) -> str:
    parts: list[str] = []
    used = 0
    for key, value in items:
        if used > budget:
            parts.append(f"... {len(items) - len(parts)} more")
            break
        text = f"{text_of(key, depth + 1, budget)}: {text_of(value, depth + 1, budget - used)}"
        parts.append(text)
        used += len(text) + 2
    return ", ".join(parts)


def _array(tag: str, payload: list[Any], depth: int, budget: int) -> str:
    dtype, shape, _ = payload
    return f"array(shape={tuple(shape)}, dtype={dtype!r})"


def _named(tag: str, payload: list[Any], depth: int, budget: int) -> str:
    _, qualname, fields, items = payload
    inner = ", ".join(
        f"{f}={text_of(i, depth + 1, budget)}" for f, i in zip(fields, items, strict=True)
    )
    return f"{qualname}({inner})"


def _other(tag: str, payload: list[Any], depth: int, budget: int) -> str:
    return f"{tag}({', '.join(map(str, payload))})"


def _integer(payload: list[Any]) -> int | str:
    """The number; in hexadecimal, as text, where Python writes it in no other way (by default, from
    4300 decimal digits on), nor reads it out of JSON."""
    value = int.from_bytes(payload[0], "little", signed=True)
    return value if value.bit_length() <= _DECIMAL_BITS else hex(value)


_Text = Callable[[str, list[Any], int, int], str]  # (tag, payload, depth, budget)

_TEXTS: dict[str, _Text] = {
    "int": lambda t, p, d, b: str(_integer(p)),
    "str": lambda t, p, d, b: repr(p[0].decode("utf-8", "surrogatepass")),
    "cplx": lambda t, p, d, b: repr(complex(*struct.unpack("<dd", p[0]))),
    "ba": lambda t, p, d, b: f"bytearray({p[0][:b]!r})",
    "np": _array,
    "nps": lambda t, p, d, b: f"scalar(dtype={p[0]!r}, 0x{p[1].hex()})",
    "npd": lambda t, p, d, b: f"dtype({p[0]!r})",
    "nt": _named,
    "enum": lambda t, p, d, b: f"{p[1]}.{p[2]}",
    "dq": lambda t, p, d, b: f"deque([{_joined(p[1], d, b)}])",
    "path": lambda t, p, d, b: f"Path({text_of(p[2], d, b)})",
    "dt": lambda t, p, d, b: str(p[0]),
    "time": lambda t, p, d, b: str(p[0]),
    "date": lambda t, p, d, b: str(p[0]),
    "torch.size": lambda t, p, d, b: f"torch.Size({p[0]})",
    "torch.dtype": lambda t, p, d, b: f"torch.{p[0]}",
    "torch.device": lambda t, p, d, b: f"device({p[0]!r})",
}


def as_json(document: bytes) -> Any:
    """The value as JSON: lists and tuples as arrays, dicts with str keys as objects, what JSON
    has no word for as ``{"type": tag, "value": [...]}``; non-finite floats, and integers of more
    than 2048 bits (in hexadecimal), as strings."""
    try:
        return _json(parse(document), 0)
    except MALFORMED as error:
        return {"type": "unreadable", "value": [str(error)]}


def _json(node: Node, depth: int) -> Any:
    if isinstance(node, float):
        return node if math.isfinite(node) else str(node)
    if isinstance(node, bytes):
        return {"type": "bytes", "value": [node.hex()]}
    if not isinstance(node, list):
        return node
    if depth > MAX_DEPTH:
        raise ValueError("nests too deeply")
    tag, *payload = cast("list[Any]", node)
    if tag in ("l", "t", "set", "fset"):
        return [_json(item, depth + 1) for item in payload[0]]
    if tag in _MAPS and all(isinstance(key, str) for key, _ in payload[-1]):
        return {key: _json(value, depth + 1) for key, value in payload[-1]}
    if tag == "int":
        return _integer(payload)
    return {"type": tag, "value": [_raw(item) for item in payload]}


def _raw(item: Any) -> Any:
    if isinstance(item, bytes):
        return item.hex()
    if isinstance(item, list):
        return [_raw(part) for part in cast("list[Any]", item)]
    return item
