"""Random number generators as plain values: Python, NumPy, torch CPU and every CUDA device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def collect() -> dict[str, Any]:
    """The "#rng" entry: "python", "numpy", "torch", and "cuda" when CUDA is initialised.

    Never initialises CUDA."""
    raise NotImplementedError


def check(states: Mapping[str, Any]) -> None:
    """Raise `MismatchError` when :func:`restore` would refuse `states`; changes nothing."""
    raise NotImplementedError


def restore(states: Mapping[str, Any]) -> None:
    """Put every generator into the state recorded by :func:`collect`.

    States of CUDA devices that this process does not have are skipped with a warning; CUDA that is
    not initialised yet takes its states when it is.
    """
    raise NotImplementedError
