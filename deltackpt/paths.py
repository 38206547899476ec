"""Display paths of leaves: ``model/layers.0.weight``, ``optimizer/state/0/exp_avg``.

Keys are joined with "/". An int key is its digits. A str key stands for itself, "~" written "~0",
"/" written "~1" and a lone surrogate "~uXXXX"; it is put in double quotes when it would otherwise
read as another kind of key (``"0"``, ``"None"``, ``"(1, 2)"``, the empty string). Any other key is
its repr, escaped alike. Paths of one state are all distinct.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_WORDS = frozenset(("", "None", "True", "False", "nan", "inf", "-inf"))
_LITERAL = re.compile(r"""["'(\[{<]|[bB]["']|frozenset\(""")
_NUMBER = re.compile(r"[-+]?\.?[0-9]")


def segments(keys: Iterable[Any]) -> list[str]:
    """One segment per key of one mapping, all distinct."""
    listed = list(keys)
    out = [segment(key) for key in listed]
    if len(set(out)) == len(out):
        return out
    taken = {s for s, key in zip(out, listed, strict=True) if type(key) is not str}
    for i, key in enumerate(listed):
        if type(key) is str and out[i] in taken:
            out[i] = f'"{escape(key)}"'
    seen: dict[str, int] = {}
    for i, text in enumerate(out):  # only keys with equal reprs are left: number them
        seen[text] = seen.get(text, 0) + 1
        if seen[text] > 1:
            out[i] = f"{text}~#{seen[text]}"
    return out


def segment(key: Any) -> str:
    """The segment of one key."""
    if type(key) is int:
        return str(key)
    if type(key) is not str:
        return escape(repr(key))
    if key in _WORDS or _LITERAL.match(key) or (_NUMBER.match(key) and _reads_as_number(key)):
        return f'"{escape(key)}"'
    return escape(key)


def key_of(part: str) -> str:
    """The str key whose segment `part` is (surrogates stay written out)."""
    if len(part) > 1 and part[0] == part[-1] == '"':
        part = part[1:-1]
    return part.replace("~1", "/").replace("~0", "~")


def escape(text: str) -> str:
    if "~" in text or "/" in text:
        text = text.replace("~", "~0").replace("/", "~1")
    if not text.isascii():
        text = re.sub("[\ud800-\udfff]", lambda m: f"~u{ord(m[0]):04x}", text)
    return text


def _reads_as_number(text: str) -> bool:
    for kind in (int, float, complex):
        try:
            kind(text)
        except ValueError:
            continue
        return True
    return False
