"""What saves ask of CUDA from any thread, without a context on a device that is not in use.

A new thread's current device is 0, and the CUDA runtime makes a context there (hundreds of MB) as
soon as that thread waits for an event of another device. So every call here is made with its own
device current.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from deltackpt_store.errors import StateError

_log = logging.getLogger("deltackpt")


class DeviceEvent:
    """All that a stream of `device` has been given so far (None: its current stream). For any
    thread; an `Arrival`."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(stream)

    def query(self) -> bool:
        """Whether it is done."""
        with torch.cuda.device(self._device):
            return self._event.query()

    def synchronize(self) -> None:
        """Wait until it is done. `RuntimeError` when the device has failed."""
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what `stream` is given from now on wait for it; the host does not wait."""
        stream.wait_event(self._event)


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised host memory (uint8), whatever `torch.set_default_device` says: page-locked, or
    where the system gives none, plain, which copies wait for."""
    with torch.cuda.device(device):
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _warn_of_plain_memory(str(error).partition("\n")[0])
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@functools.cache  # once for each reason
def _warn_of_plain_memory(reason: str) -> None:
    _log.warning("no page-locked memory is left (%s): saves wait for copies to the host", reason)


def refuse_graph_capture(device: torch.device | None = None) -> None:
    """`StateError` (kind "capturing") while the current stream of `device` (None: of the current
    one) records a CUDA graph. Initialises nothing."""
    if is_capturing(device):
        place = "" if device is None else f" on {device}"
        raise StateError(
            f"a save was called while a CUDA graph is being captured{place}",
            kind="capturing",
            hint="save between replays, outside of the capture",
        )


def is_capturing(device: torch.device | None = None) -> bool:
    """Whether that stream records a CUDA graph."""
    if not torch.cuda.is_initialized():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
