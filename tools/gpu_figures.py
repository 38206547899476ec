"""What the sections of `gpu_check` measure with: sizes, clocks, and the file of their figures.

Import it before anything that imports triton: ``--dry`` chooses Triton's interpreter here.
"""

# pyright: basic

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deltackpt.cuda import specs
from deltackpt.cuda.runtime import CudaRuntime, HostRuntime

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

MIB, GIB = 1 << 20, 1 << 30
SEED = 0x9E3779B97F4A7C15


class WrongError(Exception):
    """Something is not as it must be."""


class Check:
    """The device under test, the clock, and the figures so far."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.deadline = out, time.monotonic() + seconds
        self.device = torch.device("cpu") if DRY else torch.device("cuda", 0)
        self.result: dict[str, Any] = {"sections": {}}
        self.section: dict[str, Any] = {}
        self.wrong: list[str] = []
        """What has gone wrong in this section."""
        self.load()

    def load(self) -> None:
        """Take up what the result file holds, if there is one."""
        if self.out.exists():
            self.result = json.loads(self.out.read_text())

    def begin(self, name: str) -> None:
        self.section = {"ok": False, "error": "not finished"}
        self.result["sections"][name] = self.section
        self.save()

    def runtime(self, kernels: dict[str, specs.KernelSpec] | None = None) -> Any:
        return HostRuntime() if DRY else CudaRuntime(self.device, kernels)

    def size(self, real: int, dry: int) -> int:
        return dry if DRY else real

    def room(self, real: int, dry: int) -> int:
        """Bytes of device memory to work on: `real`, or a quarter of what is free."""
        if DRY:
            return dry
        return min(real, torch.cuda.mem_get_info(self.device)[0] // 4) & -MIB

    def part(self, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Do a part of a section; when it fails, that is told and noted, and None is the result."""
        try:
            return action(*arguments)
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            print(f"  FAILED: {self.wrong[-1]}", flush=True)
            if not isinstance(error, WrongError):
                traceback.print_exc()
            return None

    def put(self, name: str, value: Any) -> None:
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"  {name:<48} {shown}", flush=True)
        self.section[name] = value
        self.save()

    def late(self, what: str, reserve: float = 20.0) -> bool:
        """Whether to leave `what` out because the time is up."""
        if time.monotonic() < self.deadline - reserve:
            return False
        self.put(f"left out, no time: {what}", True)
        return True

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_name(self.out.name + ".partial")
        partial.write_text(json.dumps(self.result, indent=1, sort_keys=True) + "\n")
        partial.replace(self.out)

    def sync(self) -> None:
        if not DRY:
            torch.cuda.synchronize(self.device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Random bytes on the device, ready for any stream."""
        words = torch.randint(-(2**62), 2**62, (nbytes // 8 + 2,), device=self.device)
        self.sync()
        return words.view(torch.uint8)[:nbytes]

    def seconds(self, stream: Any, action: Any, rounds: int = 5) -> float:
        """Median time of `action`, which queues work on `stream`, by the device's own clock."""
        times: list[float] = []
        for _ in range(1 if DRY else rounds + 1):
            if DRY:
                began = time.perf_counter()
                action()
                times.append(time.perf_counter() - began)
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            action()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times[1:] or times)

    def clock(self, action: Any, rounds: int = 3) -> float:
        """Median wall time of `action` until the device is idle."""
        times: list[float] = []
        for _ in range(1 if DRY else rounds):
            self.sync()
            began = time.perf_counter()
            action()
            self.sync()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
