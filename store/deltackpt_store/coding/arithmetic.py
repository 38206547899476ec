"""Floating-point arithmetic that gives the same bits on every machine and in every thread.

Single additions, multiplications, divisions and square roots do so by IEEE 754, as NumPy makes
them, unless the thread has been told to flush denormal numbers to zero (``torch`` can do that to
the training thread) or to round otherwise; :func:`exact` sets that right while it lasts. NaNs, of
which the bits are not settled, are the caller's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from deltackpt_store.errors import StateError

_ENVIRONMENT_BYTES = 512  # more than any C library needs
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of the C libraries of Linux


Call = Callable[[Any], int]


def _calls() -> tuple[Call, Call] | None:
    """fegetenv and fesetenv of the C library."""
    for name in (None, "libm.so.6"):
        try:
            library: Any = ctypes.CDLL(name)
            return library.fegetenv, library.fesetenv
        except (OSError, AttributeError):
            continue
    return None


_environment = _calls()


@contextlib.contextmanager
def exact() -> Generator[None]:
    """Round to nearest and keep denormal numbers, in this thread; NumPy's warnings are off.

    StateError when that cannot be had.
    """
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    change: Call | None = None
    if _environment is not None and _environment[0](before) == 0:
        change = _environment[1]
        change(_DEFAULT)
    try:
        with np.errstate(all="ignore"):
            if not _keeps_denormals():
                raise StateError(
                    "this thread flushes denormal numbers to zero, and that cannot be turned off",
                    kind="arithmetic", hint="do not call torch.set_flush_denormal(True)",
                )  # fmt: skip
            yield
    finally:
        if change is not None:
            change(before)


def _keeps_denormals() -> bool:
    tiny = np.full(4, 1e-30, np.float32) * np.float32(1e-10)
    return bool(tiny[0] != 0 and (tiny * np.float32(1))[0] != 0)
