"""Saves of a state on a GPU: streams, the caching allocator, graphs, compiled steps, contexts.

``DELTACKPT_TEST_DEVICE=cpu`` runs what can run without a GPU, to check the tests themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import DeltackptError, StateError
from saving import saved
from torch import nn

import deltackpt

DEVICE = os.environ.get("DELTACKPT_TEST_DEVICE", "cuda")
HAVE = DEVICE == "cpu" or torch.cuda.is_available()
GPU = torch.cuda.is_available()

pytestmark = pytest.mark.skipif(not HAVE, reason="needs a CUDA device")
gpu_only = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(
    not GPU or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


def checkpointer(path: Path, state: dict[str, Any], **options: Any) -> deltackpt.Checkpointer:
    return deltackpt.Checkpointer(path, state, writer="thread", rng=False, final=False, **options)


def same(path: Path, step: int, name: str, expected: torch.Tensor) -> None:
    found = saved(path, step)[name].cpu()
    assert torch.equal(found.view(torch.uint8), expected.cpu().view(torch.uint8))


class Training:
    """A model with an AdamW of the given kind."""

    def __init__(self, **adam: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.GELU(),
                                   nn.Linear(1024, 512)).to(DEVICE)  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **adam)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model(torch.randn(32, 512, device=DEVICE)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def copy(self) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}/{name}": value.clone() for name, value in entry.items()}
        return found

    def check(self, path: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
        state = saved(path, step)
        for name, value in expected.items():
            number, _, part = name.partition("/")
            found = state["optimizer"]["state"][int(number)][part] if part else state["model"][name]
            assert torch.equal(found.cpu(), value.cpu()), name


@pytest.mark.parametrize("adam", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_every_step_is_the_instant_of_its_call(tmp_path: Path, adam: dict[str, Any]) -> None:
    """Prevents a save of two steps mixed: training runs on while it is staged."""
    training = Training(**adam)
    expected = {}
    with checkpointer(tmp_path, training.state, every=1, chunk_bytes=65536) as ckpt:
        for step in range(6):
            training.step()
            expected[step] = training.copy()
            ckpt.step(step)
        ckpt.wait()
    for step, values in expected.items():
        training.check(tmp_path, step, values)


def test_restored_and_continued(tmp_path: Path) -> None:
    training = Training()
    with checkpointer(tmp_path, training.state) as ckpt:
        training.step()
        ckpt.save(1).result(120)
    again = Training()
    again.step()
    with checkpointer(tmp_path, again.state) as ckpt:
        ckpt.restore()
        for name, value in training.copy().items():
            assert torch.equal(again.copy()[name], value), name
        report = ckpt.save(2).result(120)
    assert report.changed_chunks == 0


# case 69
@gpu_only
def test_a_tensor_freed_right_after_save(tmp_path: Path) -> None:
    """Prevents bytes of whatever reused the block: the copy still runs when its source is freed."""
    state: dict[str, Any] = {"t": None}
    with checkpointer(tmp_path, state, overlap=False) as ckpt:
        for step in range(500):
            tensor = torch.full((1 << 20,), float(step), device=DEVICE)
            state["t"] = tensor
            save = ckpt.save(step)
            state["t"] = None
            del tensor
            torch.full((1 << 20,), 7.0, device=DEVICE)
            if step % 50 == 49:
                save.result(120)
                same(tmp_path, step, "t", torch.full((1 << 20,), float(step)))


# case 70
def test_changing_blocks_through_a_small_ring(tmp_path: Path) -> None:
    state = {"t": torch.zeros(4 << 20, device=DEVICE)}
    with checkpointer(tmp_path, state, ring_bytes=8 << 20, overlap=False) as ckpt:
        for step in range(8):
            state["t"].add_(torch.randn_like(state["t"]))
            expected = state["t"].clone()
            ckpt.save(step)
            state["t"].mul_(1.5)
            if step % 3 == 2:
                ckpt.wait()
                same(tmp_path, step, "t", expected)


@pytest.mark.parametrize("stays", [0, 5 << 20])
def test_copies_at_the_call_are_of_its_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: int
) -> None:
    """Prevents later values in an EMA or a strided slice that left while training ran on."""
    monkeypatch.setattr("deltackpt.landing.COPY_BYTES", stays)
    monkeypatch.setattr("deltackpt.landing.PIECE_BYTES", 1 << 20)
    training = Training()
    training.step()
    ema = torch.randn(1 << 20, device=DEVICE)
    slices = torch.randn(1500, 1501, device=DEVICE)
    training.state |= {"ema": ema, "slices": slices[:, :1000]}
    with checkpointer(tmp_path, training.state) as ckpt:
        for step in range(4):
            training.step()
            ema.add_(1)
            slices.mul_(1.5)
            expected = ema.clone(), slices[:, :1000].clone()
            save = ckpt.save(step)
            ema.zero_()
            slices.zero_()
            save.result(120)
            same(tmp_path, step, "ema", expected[0])
            same(tmp_path, step, "slices", expected[1])
            ema.copy_(expected[0])
            slices[:, :1000].copy_(expected[1])


# case 72
def test_nothing_grows(tmp_path: Path) -> None:
    training = Training()
    with checkpointer(tmp_path, training.state) as ckpt:
        training.step()
        for step in range(3):
            held = ckpt.save(step).result(120).devices
        before = torch.cuda.memory_allocated() if GPU else 0
        for step in range(3, 60):
            training.step()
            report = ckpt.save(step).result(120)
        assert {n: (f.device_bytes, f.pinned_bytes) for n, f in report.devices.items()} == {
            n: (f.device_bytes, f.pinned_bytes) for n, f in held.items()
        }
        after = torch.cuda.memory_allocated() if GPU else 0
    assert after <= before + (1 << 20)


# case 74
def test_a_first_save_larger_than_ring_and_gather_buffer(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(2 << 20, device=DEVICE) for i in range(16)}
    with checkpointer(tmp_path, state, ring_bytes=16 << 20) as ckpt:
        report = ckpt.save(0).result(300)
    assert report.ring_bytes <= 32 << 20
    for name, value in state.items():
        same(tmp_path, 0, name, value)


# case 76
@pytest.mark.parametrize("how", ["data", "view", "foreach"])
def test_changes_that_no_version_counter_sees(tmp_path: Path, how: str) -> None:
    weight = nn.Parameter(torch.randn(1 << 20, device=DEVICE))
    with checkpointer(tmp_path, {"w": weight}) as ckpt:
        ckpt.save(0).result(120)
        if how == "data":
            weight.data[77] += 1
        elif how == "view":
            with torch.no_grad():
                weight.view(-1)[77] += 1
        else:
            torch._foreach_add_([weight.data[77:78]], 1.0)
        assert ckpt.save(1).result(120).changed_chunks == 1
    same(tmp_path, 1, "w", weight.detach())


# case 78
def test_a_storage_of_no_bytes_is_refused_by_key(tmp_path: Path) -> None:
    state = {"fine": torch.ones(10, device=DEVICE), "gone": torch.ones(5000, device=DEVICE)}
    state["gone"].untyped_storage().resize_(0)
    with checkpointer(tmp_path, state) as ckpt, pytest.raises(DeltackptError, match="gone"):
        ckpt.save(0)


def test_modes_that_change_new_tensors(tmp_path: Path) -> None:
    """Prevents page-locked memory asked for on a device, and buffers that only that mode writes."""
    state = {"t": torch.randn(2 << 20, device=DEVICE), "small": torch.ones(5, device=DEVICE)}
    with checkpointer(tmp_path, state) as ckpt:
        with torch.device(DEVICE), torch.inference_mode():
            ckpt.save(0).result(120)
        for tensor in state.values():
            tensor.add_(1)
        ckpt.save(1).result(120)
    for name, tensor in state.items():
        same(tmp_path, 1, name, tensor)


@gpu_only
@pytest.mark.parametrize("spare", [0, 4 << 20, 100 << 20])
def test_a_device_that_is_nearly_full(tmp_path: Path, spare: int) -> None:
    """Prevents a save, or a training, that ends because the device has no memory left for it."""
    training = Training()
    training.step()
    training.state |= {"ema": torch.randn(16 << 20, device=DEVICE),
                       "slices": torch.randn(1500, 1501, device=DEVICE)[:, :1000]}  # fmt: skip
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        with checkpointer(tmp_path, training.state) as ckpt:
            for step in range(3):
                ckpt.lock()
                with torch.no_grad():
                    for parameter in training.model.parameters():
                        parameter.add_(1)
                ckpt.save(step).result(120)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    training.check(tmp_path, 2, training.copy())
    same(tmp_path, 2, "ema", training.state["ema"])


@gpu_only
def test_training_on_another_stream(tmp_path: Path) -> None:
    """Prevents a save that is ordered after the default stream only."""
    stream = torch.cuda.Stream()
    state = {"t": torch.zeros(8 << 20, device=DEVICE)}
    torch.cuda.synchronize()
    with checkpointer(tmp_path, state, overlap=False) as ckpt, torch.cuda.stream(stream):
        for step in range(5):
            torch.cuda._sleep(50_000_000)
            state["t"].add_(1)
            ckpt.save(step)
        ckpt.wait()
    for step in range(5):
        same(tmp_path, step, "t", torch.full((8 << 20,), step + 1.0))


@gpu_only
def test_the_training_stream_is_not_waited_for(tmp_path: Path) -> None:
    """Prevents a stall as long as all work in the GPU's queue: `save` returns before it is done."""
    training = Training(fused=True)
    with checkpointer(tmp_path, training.state) as ckpt:
        for step in range(3):
            training.step()
            ckpt.save(step)
        ckpt.wait()
        training.step()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        save = ckpt.save(3)
        assert not busy.query(), "save waited for the GPU"
        save.result(120)


@gpu_only
def test_steps_replayed_from_a_graph(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 20, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1)
    weight.zero_()
    with checkpointer(tmp_path, {"w": weight}, overlap=False) as ckpt:
        for step in range(4):
            graph.replay()
            ckpt.save(step)
        ckpt.wait()
    for step in range(4):
        same(tmp_path, step, "w", torch.full((1 << 20,), step + 1.0))


@gpu_only
def test_replays_of_a_whole_step(tmp_path: Path) -> None:
    """Prevents two steps mixed in one save: a replay runs no optimizer's hook."""
    training = Training(capturable=True)
    data = torch.randn(32, 512, device=DEVICE)

    def step() -> None:
        training.optimizer.zero_grad(set_to_none=True)
        training.model(data).square().mean().backward()
        training.optimizer.step()

    expected = {}
    with checkpointer(tmp_path, training.state, chunk_bytes=65536) as ckpt:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for number in range(5):
            graph.replay()
            expected[number] = training.copy()
            ckpt.save(number)
        ckpt.wait()
    for number, values in expected.items():
        training.check(tmp_path, number, values)


@gpu_only
def test_a_save_inside_a_capture_is_refused(tmp_path: Path) -> None:
    """Prevents a capture that a save has ended: the graph replays what was captured around it."""
    weight, state = torch.zeros(1 << 20, device=DEVICE), dict[str, Any]()
    state["w"] = weight
    with deltackpt.Checkpointer(tmp_path, state, writer="thread", final=False) as ckpt:
        ckpt.save(0).result(120)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            weight.add_(1)
            with pytest.raises(StateError, match="graph"):
                ckpt.save(1)
            weight.add_(2)
        graph.replay()
        ckpt.save(1).result(120)
    same(tmp_path, 1, "w", torch.full((1 << 20,), 3.0))


@gpu_only
def test_compiled_steps(tmp_path: Path) -> None:
    training = Training()
    compiled = torch.compile(training.model)
    with checkpointer(tmp_path, training.state, every=1) as ckpt:
        for step in range(3):
            compiled(torch.randn(32, 512, device=DEVICE)).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            expected = training.copy()
            ckpt.step(step)
        ckpt.wait()
    training.check(tmp_path, 2, expected)


@gpu_only
def test_a_step_that_the_scaler_skips(tmp_path: Path) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cuda")
    with checkpointer(tmp_path, {**training.state, "scaler": scaler}, every=1) as ckpt:
        for step, factor in enumerate([1.0, float("inf"), 1.0]):
            loss = training.model(torch.randn(32, 512, device=DEVICE)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
            expected = training.copy()
            ckpt.step(step)
        ckpt.wait()
    training.check(tmp_path, 2, expected)


@two_gpus
def test_two_devices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {f"t{i}": torch.randn(1 << 20, device=f"cuda:{i}") for i in range(2)}
    with checkpointer(tmp_path, state) as ckpt:
        ckpt.save(0).result(120)
        state["t1"][3] += 1
        report = ckpt.save(1).result(120)
    assert report.changed_chunks == 1
    assert set(report.devices) == {"cuda:0", "cuda:1"}
    assert "page-locked" not in caplog.text  # both devices use the first slot
    for name, value in state.items():
        same(tmp_path, 1, name, value)


@two_gpus
def test_no_context_on_a_device_that_is_not_used(tmp_path: Path) -> None:
    """Prevents half a gigabyte lost on device 0 for every process that trains elsewhere."""
    code = (
        "import sys, torch, deltackpt\n"
        "state = {'t': torch.randn(1 << 20, device='cuda:1')}\n"
        "with deltackpt.Checkpointer(sys.argv[1], state, final=False) as ckpt:\n"
        "    ckpt.save(0).result(120)\n"
        "assert not torch._C._cuda_hasPrimaryContext(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True)
