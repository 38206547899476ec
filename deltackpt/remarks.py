"""What is noted beside a state: the environment it was made in, and what it seems to lack."""

from __future__ import annotations

import logging
import platform
import sys

import msgspec
import torch

from ._version import __version__
from .capture import Capture

_log = logging.getLogger("deltackpt")


def environment() -> bytes:
    """Where a step was made, as a msgpack map; information only."""
    return msgspec.msgpack.encode(
        {
            "deltackpt": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "platform": sys.platform,
            "machine": platform.machine(),
            "world": 1,
        }
    )


def warn_of_missing_parameters(captured: Capture) -> bool:
    """Log which optimizers train what is not saved with them; returns whether there is one."""
    for path, (count, total) in captured.unsaved.items():
        _log.warning(
            "%s parameters of optimizer %r are not part of the state and will not be saved: add"
            " every module that it trains, or the parameters themselves",
            f"the {total}" if count == total else f"{count} of {total}",
            path,
        )
    return bool(captured.unsaved)
