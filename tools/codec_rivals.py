"""Whole saves of the laboratory's states through deltackpt and moonclip, one after the other.

Both get the same live objects (a module, an AdamW with its moments), moved to the states at
distance 0, 1, 10 and 100, and save each: bytes on disk, time the call blocks, time until durable.
"""

# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import codec_states
import torch
from torch import nn

import deltackpt

Saver = Callable[[int], tuple[float, float]]


class Objects:
    """A module and an optimizer that hold the tensors of a state."""

    def __init__(self, state: codec_states.State) -> None:
        self.model = nn.Module()
        self.tensors: dict[str, torch.Tensor] = {}
        masters: list[nn.Parameter] = []
        names = [n for n in state if n.split("|")[0] in ("weight", "master")]
        moments: dict[str, dict[str, str]] = {}
        for name in state:
            kind, dtype, key = name.split("|")
            flat = torch.zeros(len(state[name]) // _size(dtype), dtype=getattr(torch, dtype))
            self.tensors[name] = flat
            if name in names:
                parameter = nn.Parameter(flat)
                self.model.register_parameter(_safe(name), parameter)
                self.tensors[name] = parameter.data
                masters.append(parameter)
            elif kind == "bf16":
                self.model.register_buffer(_safe(name), flat)
            else:
                moments.setdefault(key, {})[kind] = name
        self.optimizer = torch.optim.AdamW(masters, lr=1e-5)
        for parameter, name in zip(masters, names, strict=True):
            kinds = moments.get(name.split("|")[2])
            if kinds:
                values = {kind: self.tensors[full] for kind, full in kinds.items()}
                self.optimizer.state[parameter] = {"step": torch.tensor(100.0), **values}
        self.move(state)

    def move(self, state: codec_states.State) -> None:
        for name, array in state.items():
            self.tensors[name].view(torch.uint8).copy_(torch.from_numpy(array))


def _safe(name: str) -> str:
    return name.replace("|", "__").replace(".", "_")


def _size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def compare(name: str, cache: Path) -> dict[str, Any]:
    """Figures of both, by checkpointer and distance; prints them as a table."""
    states = codec_states.load(name, cache)
    total = sum(array.nbytes for array in states[0].values())
    print(f"\n{name}: {total / 1e6:.0f} MB")
    print("| checkpointer | save | MB | ratio | blocks, s | durable, s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    figures: dict[str, Any] = {}
    for who in ("deltackpt auto", "deltackpt fast", "moonclip"):
        folder = Path(tempfile.mkdtemp(dir=cache.parent))
        objects = Objects(states[0])
        save, close = (
            _moonclip(folder, objects)
            if who == "moonclip"
            else _ours(folder, objects, who.split()[1])
        )
        rows: dict[int, Any] = {}
        before = 0
        for distance, state in states.items():
            objects.move(state)
            stall, durable = save(distance)
            size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            row = {"bytes": size - before, "stall": stall, "durable": durable}
            before, rows[distance] = size, row
            print(
                f"| {who} | {distance} | {row['bytes'] / 1e6:.1f} | {total / row['bytes']:.2f} |"
                f" {stall:.3f} | {durable:.2f} |", flush=True,
            )  # fmt: skip
        close()
        shutil.rmtree(folder)
        figures[who] = rows
    return figures


def _ours(folder: Path, objects: Objects, codec: Any) -> tuple[Saver, Callable[[], None]]:
    ckpt = deltackpt.Checkpointer(
        folder / "store", {"model": objects.model, "optimizer": objects.optimizer}, codec=codec,
        rng=False, final=False,
    )  # fmt: skip

    def save(step: int) -> tuple[float, float]:
        handle = ckpt.save(step)
        handle.staged()
        report = handle.result(600)
        return report.stall_seconds, report.durable_seconds

    return save, ckpt.close


def _moonclip(folder: Path, objects: Objects) -> tuple[Saver, Callable[[], None]]:
    import moonclip

    manager = moonclip.CheckpointManager(str(folder / "store"))

    def save(step: int) -> tuple[float, float]:
        began = time.perf_counter()
        manager.save(step, model=objects.model, optimizer=objects.optimizer)
        stall = time.perf_counter() - began
        manager.flush()
        return stall, time.perf_counter() - began

    return save, lambda: None
