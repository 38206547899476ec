"""Sections of `gpu_check` in which a `Checkpointer` saves: trainings, peers, several devices."""

# pyright: basic

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_figures import DRY, GIB, Check, WrongError
from torch import nn

import deltackpt

ROOT = Path(__file__).resolve().parents[1]
FILES_BYTES = 24 * GIB
"""Room that the files of a section may take."""


class Training:
    """A transformer in bf16 autocast with fp32 AdamW; `frozen` leaves one layer to train."""

    def __init__(self, check: Check, *, frozen: bool) -> None:
        torch.manual_seed(1)
        width, layers = check.size(1536, 32), 2
        if not DRY:  # the whole takes 12 layers, 24 GiB of device memory and of files
            free = min(torch.cuda.mem_get_info(check.device)[0], room_for_files()[1])
            layers = max(2, min(12, 12 * free // FILES_BYTES))
        self.device, self.width, self.batch = check.device, width, check.size(16, 2)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.model.to(check.device)
        if frozen:
            self.model.requires_grad_(False)
            self.model.layers[-1].requires_grad_(True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not DRY)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.nbytes += sum(8 * p.numel() for p in trained)

    def step(self) -> None:
        data = torch.randn(
            self.batch, 256 if self.width > 100 else 8, self.width, device=self.device
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(data).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def loop(check: Check, training: Training, steps: int, after: Any) -> float:
    """Seconds per step, `after(number)` being called after each."""
    check.sync()
    began = time.perf_counter()
    for number in range(steps):
        training.step()
        after(number)
    check.sync()
    return (time.perf_counter() - began) / steps


def section_train(check: Check) -> None:
    for frozen, every in ((True, 1), (False, 10)):
        if check.late("training", 90):
            return
        kind = "one layer trained, save every step" if frozen else "dense, save every 10 steps"
        check.part(kind, train, check, kind, frozen, every)


def train(check: Check, kind: str, frozen: bool, every: int) -> None:
    steps = check.size(30, 2)
    training = Training(check, frozen=frozen)
    loop(check, training, 3, lambda number: None)
    alone = loop(check, training, steps, lambda number: None)
    with tempfile.TemporaryDirectory(dir=room_for_files()[0]) as folder:
        ckpt = deltackpt.Checkpointer(folder, training.state, every=every, final=False)
        handles: list[Any] = []
        with ckpt:
            ckpt.save(0).result(300)

            def after(number: int) -> None:
                save = ckpt.step(number + 1)
                if save is not None:
                    handles.append(save)

            saving = loop(check, training, max(steps, every), after)
            reports = [handle.result(300) for handle in handles]
            last = ckpt.save(10_000).result(300)
        stalls = [report.stall_seconds for report in reports]
        check.put(f"{kind}: state, MB", training.nbytes / 1e6)
        check.put(f"{kind}: step alone, ms", alone * 1e3)
        check.put(f"{kind}: slowdown", saving / alone)
        check.put(f"{kind}: stall per save, median ms", statistics.median(stalls) * 1e3)
        check.put(f"{kind}: stall per save, largest ms", max(stalls) * 1e3)
        staged = statistics.median(r.staged_seconds for r in reports)
        check.put(f"{kind}: staged, median ms", staged * 1e3)
        changed = statistics.median(r.changed_bytes for r in reports) / training.nbytes
        check.put(f"{kind}: part of the state that changed", changed)
        figures = {name: dataclasses.asdict(f) for name, f in last.devices.items()}
        check.put(f"{kind}: device figures", figures)
        compare(training, folder)
    check.put(f"{kind}: restored bit for bit", True)


def compare(training: Training, folder: str) -> None:
    """Raise unless what the store holds equals the live state, bit for bit."""
    loaded = deltackpt.load(folder)
    for name, tensor in training.model.state_dict().items():
        same(tensor, loaded["model"][name], name)
    for number, entry in training.optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            same(value, loaded["optimizer"]["state"][number][name], f"{number}/{name}")


def same(live: torch.Tensor, loaded: torch.Tensor, name: str) -> None:
    a, b = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (live, loaded))
    if not torch.equal(a, b):
        raise WrongError(f"{name} was restored with other bytes")


def room_for_files() -> tuple[str, int]:
    """Where files cost least, so that the disk does not decide, and the bytes that are free there:
    /dev/shm, where that is large enough (in a container it often is not)."""
    places = [tempfile.gettempdir()] if DRY else ["/dev/shm", tempfile.gettempdir()]
    found: list[tuple[str, int]] = []
    for place in places:
        with contextlib.suppress(OSError):
            found.append((place, shutil.disk_usage(place).free))
    if not found:
        raise OSError(f"none of {', '.join(places)} can be used for files (see TMPDIR)")
    enough = [one for one in found if one[1] >= FILES_BYTES]
    return enough[0] if enough else max(found, key=lambda one: one[1])


def full_copy(check: Check, tensors: list[torch.Tensor]) -> None:
    runtime = check.runtime()
    landing = [runtime.pinned(t.nbytes).view(t.dtype).view(t.shape) for t in tensors]

    def copy() -> None:
        for target, tensor in zip(landing, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)

    copy()
    check.put("full copy to pinned memory, ms", check.clock(copy) * 1e3)


def torch_save(check: Check, states: Any, path: Path) -> None:
    check.put("torch.save, ms", check.clock(lambda: torch.save(states, path)) * 1e3)


def dcp_stall(check: Check, states: Any, folder: str) -> float:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    stalls: list[float] = []
    for number in range(3):
        path = os.path.join(folder, str(number))
        check.sync()
        began = time.perf_counter()
        future: Any = async_save(states, checkpoint_id=path)
        stalls.append(time.perf_counter() - began)
        future.result()
        shutil.rmtree(path)
    return statistics.median(stalls)


def section_peers(check: Check) -> None:
    training = Training(check, frozen=False)
    training.step()
    tensors = [p.detach() for p in training.model.parameters()]
    for entry in training.optimizer.state.values():
        tensors += [v for v in entry.values() if v.device == check.device and v.numel() > 1]
    check.put("state, MB", training.nbytes / 1e6)
    check.part("full copy", full_copy, check, tensors)
    with tempfile.TemporaryDirectory(dir=room_for_files()[0]) as folder:
        if not check.late("deltackpt", 30):
            check.part("deltackpt", dense_saves, check, training, folder)
        states = {name: thing.state_dict() for name, thing in training.state.items()}
        path = Path(folder) / "state.pt"
        if not check.late("torch.save", 40):
            check.part("torch.save", torch_save, check, states, path)
            path.unlink(missing_ok=True)
        if check.late("DCP", 40):
            return
        try:
            check.put("DCP async_save, stall, ms", dcp_stall(check, states, folder) * 1e3)
        except Exception as error:  # no fault of what is checked here
            check.put("DCP async_save", f"{type(error).__name__}: {error}")


def dense_saves(check: Check, training: Training, folder: str) -> None:
    stalls: list[float] = []
    staged: list[float] = []
    store = os.path.join(folder, "store")
    with deltackpt.Checkpointer(store, training.state, final=False, codec="none") as ckpt:
        ckpt.save(0).result(300)
        for number in range(1, 4):
            training.step()  # the lock is waited for in the optimizer's step
            save = ckpt.save(number)
            training.step()
            report = save.result(300)
            stalls.append(report.stall_seconds)
            staged.append(report.staged_seconds)
    shutil.rmtree(store)
    check.put("deltackpt, all changed, stall, ms", statistics.median(stalls) * 1e3)
    check.put("deltackpt, all changed, staged, ms", statistics.median(staged) * 1e3)


# multi -------------------------------------------------------------------------------------------


UNUSED = """
import sys, tempfile, torch
sys.path[:0] = sys.argv[1:3]
import deltackpt
state = {"w": torch.randn(1 << 22, device="cuda:1")}
with tempfile.TemporaryDirectory() as folder:
    with deltackpt.Checkpointer(folder, state, final=False) as ckpt:
        ckpt.save(0).result(300)
    got = deltackpt.load(folder)["w"]
assert torch.equal(got.cpu(), state["w"].cpu())
assert not torch._C._cuda_hasPrimaryContext(0), "a context on device 0"
"""


def section_multi(check: Check) -> None:
    devices = 0 if DRY else torch.cuda.device_count()
    check.put("devices", devices)
    if devices < 2:
        check.put("not run: needs two devices", True)
        return
    check.part("a state on cuda:1 alone", unused, check)
    check.part("states on several devices", several, check, devices)


def unused(check: Check) -> None:
    """In a process that has asked nothing of device 0."""
    paths = [str(ROOT), str(ROOT / "store")]
    done = subprocess.run([sys.executable, "-c", UNUSED, *paths], capture_output=True, text=True)
    if done.returncode:
        raise WrongError(done.stderr[-500:])
    check.put("no context on an unused device", True)


def several(check: Check, devices: int) -> None:
    state = {f"w{i}": torch.randn(1 << 24, device=f"cuda:{i}") for i in range(devices)}
    with tempfile.TemporaryDirectory() as folder:
        with deltackpt.Checkpointer(folder, state, final=False) as ckpt:
            ckpt.save(0).result(300)
            for tensor in state.values():
                tensor[5] += 1
            report = ckpt.save(1).result(300)
        if report.changed_chunks != devices or len(report.devices) != devices:
            raise WrongError(f"one chunk per device changed, found {report.changed_chunks}")
        for name, tensor in state.items():
            same(tensor, deltackpt.load(folder)[name], name)
    check.put("states on several devices", "restored bit for bit")
