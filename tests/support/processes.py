"""Processes that tests start, and wait for."""

from __future__ import annotations

import os
import select


def ended(pid: int, timeout: float = 60) -> bool:
    """Wait until the process has ended, whoever's child it is."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout)[0])
    finally:
        os.close(fd)
