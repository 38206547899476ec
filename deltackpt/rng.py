"""Random number generators as plain values: Python, NumPy, torch CPU and every CUDA device."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from deltackpt_store.errors import MismatchError
from torch import Tensor

_log = logging.getLogger("deltackpt.rng")

RNG_KEY = "#rng"


def collect() -> dict[str, Any]:
    """The "#rng" entry: copies of the generators' states as they are now.

    "python": ``random.getstate()``; "numpy": the legacy global state as a dict; "torch": the CPU
    generator's state tensor; "cuda": one state tensor per device, only when CUDA is initialised in
    this process (nothing here initialises it). Generators made by the program are its own state.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        states["cuda"] = [torch.cuda.get_rng_state(i) for i in devices]
    return states


def check(states: Mapping[str, Any]) -> None:
    """Raise `MismatchError` when :func:`restore` would refuse `states`; changes nothing.

    Each recorded state is tried on a fresh generator of the same kind.
    """
    if not isinstance(states, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- of a store
        raise MismatchError("the checkpoint names no random generator for its states", key=RNG_KEY)
    trials: dict[str, Any] = {
        "python": random.Random().setstate,
        "numpy": _check_numpy,
        "torch": torch.Generator().set_state,
        "cuda": _check_cuda,
    }
    for name, value in states.items():
        trial = trials.get(name)
        if trial is None:
            raise MismatchError(f"unknown random generator {name!r} in the checkpoint", key=RNG_KEY)
        try:
            trial(value)
        except Exception as error:
            raise MismatchError(
                f"the state of the random generator {name!r} does not fit this process: {error}",
                hint="restore with rng=False to leave the generators as they are",
                key=f"{RNG_KEY}/{name}",
            ) from error


def restore(states: Mapping[str, Any]) -> None:
    """Put every generator into the state recorded by :func:`collect`, after :func:`check`.

    Generators that `states` does not hold stay as they are. States of CUDA devices that this
    process does not have are skipped with a logged warning; CUDA that is not initialised yet takes
    its states when it is.
    """
    check(states)
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    cuda = cast("list[Tensor]", states.get("cuda", []))
    present = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
    if len(cuda) > present:
        _log.warning(
            "the checkpoint holds the random state of %d CUDA devices, this process has %d",
            len(cuda),
            present,
        )
    for device, value in enumerate(cuda[:present]):
        torch.cuda.set_rng_state(value, device)


def _check_numpy(state: Any) -> None:
    current: Any = np.random.get_state(legacy=False)
    kind = state["bit_generator"]
    if kind != current["bit_generator"]:
        raise ValueError(f"it is of {kind}, the global generator is {current['bit_generator']}")
    trial = np.random.RandomState(getattr(np.random, kind)())
    trial.set_state(state)


def _check_cuda(states: Any) -> None:
    for value in states:
        if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
            raise TypeError("a state is no uint8 vector")
