"""Plain Python values as bytes, without pickle: the *value documents* of a manifest."""

from __future__ import annotations

from collections.abc import Callable


def encode(value: object, path: str = "") -> bytes:
    """Encode `value` as one value document; `InvalidInputError` names `path` when it cannot be."""
    raise NotImplementedError


def decode(document: bytes | memoryview, path: str = "") -> object:
    """Inverse of :func:`encode`. Imports nothing and runs no code named by the document.

    Raises `CorruptionError` (kind "value") for a malformed document and `InvalidInputError` for
    an enum whose class is not loaded. Torch values come back as themselves when the trainer
    package is imported, else as :class:`Placeholder`.
    """
    raise NotImplementedError


def register(
    tag: str, kind: type, encode: Callable[..., list[object]], decode: Callable[..., object]
) -> None:
    """Teach both directions the exact type `kind` (see deltackpt.values)."""
    raise NotImplementedError
