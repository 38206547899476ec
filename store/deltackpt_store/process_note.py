"""What a process leaves in a file that it holds locked, so that others can say who holds it."""

from __future__ import annotations

import json
import os
import socket

NOTE_BYTES = 1000
"""More is not read."""


def own_note() -> bytes:
    """The note of this process."""
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()


def read_note(data: bytes) -> str | None:
    """Words for the process that left this note; None for what is none. Takes any bytes."""
    try:
        found: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or "pid" not in found or "host" not in found:
        return None
    pid, host = str(found["pid"])[:20], str(found["host"])[:100]  # pyright: ignore[reportUnknownArgumentType] - any JSON
    return f"process {pid} on {host!r}"
