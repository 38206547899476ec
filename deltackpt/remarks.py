"""What is noted beside a state: the environment it was made in, and what it seems to lack."""

from __future__ import annotations

import logging
import platform
import sys
from typing import Any, cast

import msgspec
import torch

from ._version import __version__
from .capture import PARAMS_KEY, RNG_KEY, Capture
from .values import decode

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
    """Log when all that is saved of a training is its optimizers; returns whether it was so.

    Certain, if not complete: no optimizer knows the name of any of its parameters, and no tensor of
    the state belongs to anything else.
    """
    layout = captured.layout
    optimizers: list[str] = []
    for slot in layout.objects:
        top, _, path = layout.paths[slot].partition("/")
        if top == PARAMS_KEY and path:
            names = decode(captured.objects[slot], layout.paths[slot])
            if not isinstance(names, list) or not names or any(cast("list[Any]", names)):
                return False
            optimizers.append(path)
    own = tuple(f"{path}/" for path in (*optimizers, RNG_KEY))
    if not optimizers or any(not layout.paths[t.slot].startswith(own) for t in layout.tensors):
        return False
    _log.warning(
        "the parameters of optimizer %s are not part of the state and will not be saved: add the"
        " model to it",
        ", ".join(map(repr, optimizers)),
    )
    return True
