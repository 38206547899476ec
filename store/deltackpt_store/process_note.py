"""What a process leaves in a file that it holds locked, so that others can say who holds it."""

from __future__ import annotations

import json
import os
import socket
from typing import Any, cast

NOTE_BYTES = 1000
"""More is not read."""


_trainer: int | None = None


def writes_for(trainer: int) -> None:
    """This process is the writer of another one: that is who notes and messages name from now on.

    To be called once, before there are threads.
    """
    global _trainer
    _trainer = trainer


def own_note() -> bytes:
    """The note of this process."""
    note = {"pid": os.getpid(), "host": socket.gethostname()}
    return json.dumps(note if _trainer is None else {**note, "trainer": _trainer}).encode()


def read_note(data: bytes) -> str | None:
    """Words for the process that left this note; None when it is not a note. Takes any bytes."""
    found = _parsed(data)
    if found is None:
        return None
    pid, host = str(found["pid"])[:20], str(found["host"])[:100]
    if "trainer" not in found:
        return f"process {pid} on {host!r}"
    return f"process {str(found['trainer'])[:20]} on {host!r} (its writer: process {pid})"


def is_own(data: bytes) -> bool:
    """Whether this process, or the trainer that it writes for, left this note. Takes any bytes."""
    found, own = _parsed(data), _parsed(own_note())
    return found is not None and own is not None and _whose(found) == _whose(own)


def _whose(note: dict[str, Any]) -> tuple[Any, Any]:
    return note.get("trainer", note["pid"]), note["host"]


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or "pid" not in found or "host" not in found:
        return None
    return cast("dict[str, Any]", found)
