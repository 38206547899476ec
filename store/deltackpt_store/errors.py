"""Every error this project raises, grouped by what the caller would do about it.

Each class is also the builtin exception that people already catch, survives pickling (errors cross
process borders), and carries three things besides its message: ``kind``, a stable machine-readable
word; ``context``, the facts (step, tensor key, digest, path, ...); and ``hint``, the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MENDING = (
    "`deltackpt verify` tells which steps are hit, `deltackpt repair` mends what has another copy"
)
"""The way out of damage."""


def _rebuild(
    cls: type[DeltackptError], message: str, kind: str, hint: str | None, context: dict[str, Any]
) -> DeltackptError:
    return cls(message, kind=kind, hint=hint, **context)


class DeltackptError(Exception):
    """Base of all errors of the project.

    ``str(error)`` is the message, followed by the hint when there is one.
    """

    default_kind = "error"

    def __init__(
        self, message: str, *, kind: str | None = None, hint: str | None = None, **context: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint
        self.context = context

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        lines = "\n" in self.message  # a list: what belongs to all of it stands below
        return f"{self.message}\n  ({self.hint})" if lines else f"{self.message} ({self.hint})"

    def __reduce__(
        self,
    ) -> tuple[Callable[..., DeltackptError], tuple[object, ...]]:
        return _rebuild, (type(self), self.message, self.kind, self.hint, self.context)


class NotFoundError(DeltackptError, KeyError):
    """A store, run, step, pin or tensor that was named does not exist: name another."""

    default_kind = "not-found"


class CorruptionError(DeltackptError, ValueError):
    """Stored bytes are not the bytes that were written: restore another step, or repair."""

    default_kind = "corruption"


class UnsupportedFormatError(DeltackptError, ValueError):
    """The store needs a newer (or another) version of this package: upgrade."""

    default_kind = "unsupported-format"


class StorageError(DeltackptError, OSError):
    """The file system refused (full, read-only, I/O error): fix the cause and save again.

    ``errno`` is that of the operating system where there was one.
    """

    default_kind = "storage"

    def __init__(
        self, message: str, *, kind: str | None = None, hint: str | None = None, **context: Any
    ) -> None:
        super().__init__(message, kind=kind, hint=hint, **context)
        self.errno = context.get("errno")


class ConflictError(DeltackptError, RuntimeError):
    """The run, step or commit number is held by somebody else, or exists already: use another."""

    default_kind = "conflict"


class InvalidInputError(DeltackptError, ValueError):
    """An argument, option or value in the state cannot be used: change it."""

    default_kind = "invalid-input"


class MismatchError(InvalidInputError):
    """The checkpoint and the restore target differ in keys, shapes or dtypes; target untouched."""

    default_kind = "mismatch"


class StateError(DeltackptError, RuntimeError):
    """The object is closed, forked or otherwise unable to do this now."""

    default_kind = "state"


class WriterError(DeltackptError, RuntimeError):
    """The background writer died or broke its protocol; the next save starts a new one."""

    default_kind = "writer"


def no_thread(error: RuntimeError) -> WriterError:
    """The error of a writer that gets no thread; `error` is what starting one said."""
    return WriterError(
        f"no thread can be started for the writer: {error}",
        kind="no-thread", hint="raise the limit on threads, processes or memory (ulimit -u, -v)",
    )  # fmt: skip


NO_MEMORY = "saving needs some more memory: raise the limit on it, or choose a smaller ring_bytes"
"""The way out where the system gives none."""

_BY_NAME: dict[str, type[DeltackptError]] = {
    c.__name__: c
    for c in (
        DeltackptError, NotFoundError, CorruptionError, UnsupportedFormatError, StorageError,
        ConflictError, InvalidInputError, MismatchError, StateError, WriterError,
    )
}  # fmt: skip


def to_wire(error: BaseException) -> dict[str, Any]:
    """Turn any exception into plain msgpack values, to cross the control channel."""
    if isinstance(error, DeltackptError):
        context = {k: v if isinstance(v, (int, str, bytes)) else repr(v)
                   for k, v in error.context.items()}  # fmt: skip
        return {"type": type(error).__name__, "message": error.message, "kind": error.kind,
                "hint": error.hint, "context": context}  # fmt: skip
    if isinstance(error, OSError):
        return {"type": "StorageError", "message": f"{type(error).__name__}: {error}",
                "kind": "storage", "hint": None, "context": {"errno": error.errno}}  # fmt: skip
    memory = isinstance(error, MemoryError)
    return {"type": "WriterError", "message": f"{type(error).__name__}: {error}",
            "kind": "memory" if memory else "writer", "hint": NO_MEMORY if memory else None,
            "context": {}}  # fmt: skip


def from_wire(data: dict[str, Any]) -> DeltackptError:
    """Inverse of :func:`to_wire`; an unknown type becomes :class:`DeltackptError`."""
    cls = _BY_NAME.get(str(data.get("type")), DeltackptError)
    return cls(str(data.get("message")), kind=data.get("kind"), hint=data.get("hint"),
               **dict(data.get("context") or {}))  # fmt: skip


def told(value: object) -> str:
    """`value` as a message shows it: as Python writes it, not too long, and in any case.

    Python does not write integers of more than 4300 digits, and an object may refuse.
    """
    try:
        text = repr(value)
    except Exception:
        return f"something of type {type(value).__name__}"
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."


_MOST_TOLD = 500
