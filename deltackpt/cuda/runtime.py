"""What detection and staging ask of a device: memory, streams, copies, kernels, events.

Everything asynchronous goes through :class:`Runtime`, so the same code runs on a GPU
(:class:`CudaRuntime`), on the CPU under Triton's interpreter (:class:`HostRuntime`), and in tests
on a simulated device that runs each stream as late as its events allow.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch

from ..devices import DeviceEvent, page_locked, refuse_graph_capture
from .specs import KernelSpec, kernel_specs

_log = logging.getLogger("deltackpt.cuda")

_cuda = cast("Any", torch.cuda)  # parts of it carry no types

Argument = torch.Tensor | int

_locking = threading.Lock()
_locked: dict[int, int] = {}
"""Address -> for how many devices it is page-locked. CUDA locks for the whole process, and only
once; slots of the ring serve one device after the other."""


class Runtime(Protocol):
    """One device. Work given to one stream runs in order; between streams only events order it.

    Tensors handed to `launch` and `copy` must be kept alive, and host memory unchanged, until an
    event recorded afterwards has been waited for with `synchronize`.
    """

    device: torch.device
    wave: int
    """Lanes of a warp: 32, or 64 on some AMD GPUs."""

    def stream(self) -> Any:
        """A new stream, apart from the training stream."""
        ...

    def mark(self) -> Any:
        """An event on the caller's current stream: everything it has queued so far."""
        ...

    def record(self, stream: Any) -> Any: ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let what `stream` is given from now on wait for `event`; the host does not wait."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block the calling thread until `event` has happened."""
        ...

    def launch(self, stream: Any, kernel: str, programs: int, *args: Argument) -> None: ...

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between device and page-locked host memory (equally long uint8 tensors)."""
        ...

    def empty(self, stream: Any, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory (uint8, aligned to 256 bytes) for use on `stream`."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory (uint8)."""
        ...

    def lock(self, view: memoryview) -> str | None:
        """Page-lock memory that exists already; the reason when that cannot be done."""
        ...

    def unlock(self, view: memoryview) -> None: ...


def find_kernel(spec: KernelSpec) -> Any:
    """The Triton function of a spec; the first call imports triton."""
    return getattr(importlib.import_module(f"deltackpt.cuda.{spec.module}"), spec.name)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class CudaRuntime:
    """A CUDA or ROCm device. Usable from any thread; sets the current device only while it acts,
    so that no helper thread ever makes a context on device 0 by accident."""

    def __init__(self, device: torch.device, specs: Mapping[str, KernelSpec] | None = None) -> None:
        """`specs` replaces how kernels are compiled (to measure others)."""
        self.device = device
        self.wave = int(getattr(_cuda.get_device_properties(device), "warp_size", 32))
        self._specs = {**kernel_specs(self.wave), **(specs or {})}
        self._options: dict[str, dict[str, int]] = {}
        for name, spec in self._specs.items():
            options = dict(spec.constants, num_warps=spec.warps)
            if spec.registers is not None and torch.version.hip is None:
                options["maxnreg"] = spec.registers
            self._options[name] = options

    def stream(self) -> torch.cuda.Stream:
        with torch.cuda.device(self.device):
            return torch.cuda.Stream(device=self.device)

    def mark(self) -> DeviceEvent:
        """Raises `StateError` while the current stream records a CUDA graph."""
        refuse_graph_capture(self.device)
        return DeviceEvent(self.device)

    def record(self, stream: torch.cuda.Stream) -> DeviceEvent:
        return DeviceEvent(self.device, stream)

    def wait(self, stream: torch.cuda.Stream, event: DeviceEvent) -> None:
        event.hold(stream)

    def synchronize(self, event: DeviceEvent) -> None:
        event.synchronize()

    def launch(
        self, stream: torch.cuda.Stream, kernel: str, programs: int, *args: Argument
    ) -> None:
        function = find_kernel(self._specs[kernel])
        if type(function).__name__ == "InterpretedFunction":  # would read device addresses itself
            raise RuntimeError("TRITON_INTERPRET is set, and interpreted kernels read no device")
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            function[(programs,)](*args, **self._options[kernel])

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def empty(self, stream: torch.cuda.Stream, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return page_locked(nbytes, self.device)

    def lock(self, view: memoryview) -> str | None:
        address, default = address_of(view), 0  # with unified addressing: for every device, kernels
        with _locking, torch.cuda.device(self.device):
            if address not in _locked:
                cudart = _cuda.cudart()
                code = cudart.cudaHostRegister(address, len(view), default)
                if int(code) != 0:
                    self._forget_error()
                    return str(cudart.cudaGetErrorString(code))
            _locked[address] = _locked.get(address, 0) + 1
            return None

    def unlock(self, view: memoryview) -> None:
        address = address_of(view)
        with _locking, torch.cuda.device(self.device):
            _locked[address] -= 1
            if _locked[address]:
                return
            del _locked[address]
            cudart = _cuda.cudart()
            code = cudart.cudaHostUnregister(address)
            if int(code) != 0:
                self._forget_error()
                _log.warning("unlocking staging memory failed: %s", cudart.cudaGetErrorString(code))

    def _forget_error(self) -> None:
        """A failed call leaves its code behind, for the thread's next launch to trip over."""
        try:
            torch.ones(1, device=self.device)  # a kernel: zeros may be a memset, which looks away
        except RuntimeError:
            _log.debug("cleared a left-over CUDA error", exc_info=True)


class HostRuntime:
    """The CPU as a device, doing everything at once: kernels run under ``TRITON_INTERPRET=1``.

    Shows that the kernels and the code around them are right where there is no GPU; nothing about
    speed or ordering.
    """

    def __init__(self, wave: int = 32) -> None:
        self.device = torch.device("cpu")
        self.wave = wave
        self._specs = kernel_specs(wave)

    def stream(self) -> None:
        return None

    def mark(self) -> None:
        return None

    def record(self, stream: None) -> None:
        return None

    def wait(self, stream: None, event: None) -> None:
        pass

    def synchronize(self, event: None) -> None:
        pass

    def launch(self, stream: None, kernel: str, programs: int, *args: Argument) -> None:
        spec = self._specs[kernel]
        find_kernel(spec)[(programs,)](*args, **spec.constants)

    def copy(self, stream: None, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def empty(self, stream: None, nbytes: int) -> torch.Tensor:
        return _aligned(nbytes)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return _aligned(nbytes)

    def lock(self, view: memoryview) -> str | None:
        return None

    def unlock(self, view: memoryview) -> None:
        pass


def _aligned(nbytes: int) -> torch.Tensor:
    """Host memory aligned as a device allocator would, full of a pattern that is never right."""
    memory = torch.full((nbytes + 256,), 0xA5, dtype=torch.uint8)
    skip = -memory.data_ptr() % 256
    return memory[skip : skip + nbytes]
