"""Saves of a state on a GPU: streams, the caching allocator, graphs, compiled steps, contexts.

``DELTACKPT_TEST_DEVICE=cpu`` runs what can run without a GPU, to check the tests themselves.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import deltackpt_store as store_package
import pytest
import torch
from deltackpt_store.errors import DeltackptError, StateError
from saving import saved
from torch import nn

import deltackpt
from deltackpt.capture import BufferPool, capture

DEVICE = os.environ.get("DELTACKPT_TEST_DEVICE", "cuda")
HAVE = DEVICE == "cpu" or torch.cuda.is_available()
GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.skipif(not HAVE, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's and the compiler's, about the device
]
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


def run_alone(code: str, *arguments: object, **environment: str) -> str:
    """What a process of its own prints, which must end well."""
    paths = [str(Path(deltackpt.__file__).parents[1]), str(Path(store_package.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths), **environment),
        check=False, timeout=140,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def side_stream() -> Any:
    """A stream of its own to work on, where the device has such."""
    return torch.cuda.stream(torch.cuda.Stream()) if GPU else contextlib.nullcontext()


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(
    "adam",
    [{}, {"foreach": True}, {"fused": True}, pytest.param({"capturable": True}, marks=gpu_only)],
    ids=str,
)
def test_restored_and_continued(tmp_path: Path, adam: dict[str, Any], low_memory: bool) -> None:
    """Prevents values that are still on their way when a restore returns, and steps that an
    optimizer keeps on the device restored elsewhere."""
    training = Training(**adam)
    with checkpointer(tmp_path, training.state) as ckpt:
        training.step()
        ckpt.save(1).result(120)
    again = Training(**adam)
    again.step()
    if GPU:
        torch.cuda.synchronize()
    with checkpointer(tmp_path, again.state) as ckpt:
        with side_stream():
            ckpt.restore(low_memory=low_memory)
        for name, value in training.copy().items():
            found = again.copy()[name]
            assert torch.equal(found, value), name
            assert found.device == value.device, name
        report = ckpt.save(2).result(120)
    assert report.changed_chunks == 0
    again.step()  # the optimizer takes what it was given


@gpu_only
def test_saves_use_the_kernels_and_the_locked_ring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents tests that pass because everything is copied instead, and a writer that takes
    memory on the device."""
    training = Training()
    training.step()
    with deltackpt.Checkpointer(tmp_path, training.state, final=False) as ckpt:
        first = ckpt.save(0).result(120)
        training.step()
        second = ckpt.save(1).result(120)
        children = [
            pid for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]  # fmt: skip
        writers = [
            pid for pid in children if "deltackpt" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        assert writers
        for pid in writers:
            assert "libcuda" not in Path(f"/proc/{pid}/maps").read_text()
    for report in (first, second):
        (figures,) = report.devices.values()
        assert figures.launches > 0
    assert [r.getMessage() for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []
    training.check(tmp_path, 1, training.copy())


def test_tensors_of_all_kinds_of_bits(tmp_path: Path) -> None:
    """Prevents kernels and views that read a dtype, a lazy bit or an odd address otherwise."""
    raw = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=DEVICE)
    pairs = raw.view(torch.float32).clone().nan_to_num_().view(torch.complex64)
    state = {
        str(dtype): raw.view(dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
                      torch.uint64, torch.int16, torch.bfloat16, torch.float64, torch.complex128)
    }  # fmt: skip
    state = {name: tensor.clone() for name, tensor in state.items()}
    state |= {
        "bool": raw > 100, "conj": pairs.conj(), "neg": pairs.conj().imag,
        "at 1": raw[1:-2].clone()[1:], "at 2": raw.clone().view(torch.int16)[1:],
        "every other": raw.clone()[::2], "columns": raw.clone().view(1024, 1024)[:, 3:1000],
        "expanded": raw.clone()[:5000].view(5000, 1).expand(5000, 7),
        "turned": raw.clone().view(1024, 1024).t(), "scalar": raw[7].clone(),
        "nothing": raw[:0].clone(), "wide": pairs.to(torch.complex128)[1::3],
    }  # fmt: skip
    with checkpointer(tmp_path, state) as ckpt:
        ckpt.save(0).result(120)
    found = saved(tmp_path, 0)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        live = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        own = found[name].resolve_conj().resolve_neg().contiguous()
        assert torch.equal(live.view(-1).view(torch.uint8), own.view(-1).view(torch.uint8)), name


def test_deterministic_algorithms(tmp_path: Path) -> None:
    """Prevents copies that this mode refuses, or fills after they were made."""
    training = Training()
    training.state["ema"] = torch.randn(1 << 20, device=DEVICE)
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        with checkpointer(tmp_path, training.state) as ckpt:
            ckpt.save(0).result(120)
            training.state["ema"].add_(1)
            ckpt.save(1).result(120)
    finally:
        torch.use_deterministic_algorithms(False)
    training.check(tmp_path, 1, training.copy())
    same(tmp_path, 1, "ema", training.state["ema"])


@gpu_only
def test_a_tensor_of_more_than_two_gigabytes_lands(tmp_path: Path) -> None:
    """Prevents 32-bit offsets in copies at the call, dense and with gaps."""
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GiB of free device memory")
    big = torch.zeros((2 << 30) + 12345, dtype=torch.uint8, device=DEVICE)
    wide = torch.zeros((1 << 20) + 5, 2100, dtype=torch.uint8, device=DEVICE)
    state = {"big": big, "gaps": wide[:, 7:2080]}
    with checkpointer(tmp_path, state, chunk_bytes=4 << 20) as ckpt:
        ckpt.save(0).result(140)
        big[-1] = 3
        wide[-1, 2079] = 5
        assert ckpt.save(1).result(140).changed_chunks == 2
    same(tmp_path, 1, "big", big)
    same(tmp_path, 1, "gaps", state["gaps"].contiguous())


@gpu_only
def test_without_page_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents copies to plain memory that are read before they are complete."""
    empty = torch.empty

    def refuse(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr("deltackpt.landing.COPY_BYTES", 0)
    training = Training()
    training.step()
    training.state["ema"] = torch.randn(4 << 20, device=DEVICE)
    with checkpointer(tmp_path, training.state) as ckpt:
        for step in range(3):
            training.step()
            training.state["ema"].add_(1)
            expected, ema = training.copy(), training.state["ema"].clone()
            ckpt.save(step)
            training.state["ema"].zero_()
            training.state["ema"].copy_(ema)
        ckpt.wait()
    training.check(tmp_path, 2, expected)
    same(tmp_path, 2, "ema", ema)


@gpu_only
def test_copies_of_a_save_that_was_given_up(tmp_path: Path) -> None:
    """Prevents training's memory written to by copies that nobody waits for any more: they are on
    another stream than the one for which their buffer was taken."""
    pool, ema = BufferPool(), torch.ones(4 << 20, device=DEVICE)

    def take() -> Any:
        return capture({"ema": ema}, chunk_bytes=1 << 18, rng=False, pool=pool)

    first = take()
    torch.cuda.synchronize()
    first.release()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        given_up = take()
    given_up.release()
    del first, given_up
    ema.fill_(5)
    later = take()
    other = torch.full((4 << 20,), 7.0, device=DEVICE)
    torch.cuda.synchronize()
    assert (other == 7).all()
    (source,) = later.sources.values()
    assert (source.data.view(torch.float32) == 5).all()
    later.release()


ALONE = """
import sys, torch, deltackpt
torch.manual_seed(0)
model = torch.nn.Linear(1500, 1500).cuda()
optimizer = torch.optim.AdamW(model.parameters())
ema = torch.zeros(3_000_000, device="cuda")
state = {"model": model, "optimizer": optimizer, "ema": ema}
def step():
    model(torch.randn(8, 1500, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad(); ema.add_(1)
"""


@gpu_only
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(tmp_path: Path, allocator: str) -> None:
    """Prevents memory that an allocator hands out again, or maps anew, while it is read."""
    code = ALONE + (
        "junk = []\n"
        "with deltackpt.Checkpointer(sys.argv[1], state, every=1, final=False) as ckpt:\n"
        "    for number in range(8):\n"
        "        step(); ckpt.step(number)\n"
        "        junk = [torch.full((1 << 20,), -1.0, device='cuda') for _ in range(number)]\n"
        "found = deltackpt.load(sys.argv[1])\n"
        "assert torch.equal(found['model']['weight'], model.weight.detach().cpu())\n"
        "assert torch.equal(found['ema'], ema.cpu())\n"
    )
    run_alone(
        code, tmp_path / "store", PYTORCH_CUDA_ALLOC_CONF=allocator, PYTORCH_ALLOC_CONF=allocator
    )


@gpu_only
def test_a_kernel_that_failed_ends_saves_with_an_error(tmp_path: Path) -> None:
    """Prevents a process that hangs, or aborts at its exit, when training has broken the device;
    and a step of what was there by then."""
    code = ALONE + (
        "ckpt = deltackpt.Checkpointer(sys.argv[1], state, final=False)\n"
        "step(); ckpt.save(0).result(120)\n"
        "torch.ones(3, device='cuda')[torch.tensor([7], device='cuda')]\n"
        "for end in (lambda: ckpt.save(1).result(120), ckpt.close):\n"
        "    try: end()\n"
        "    except Exception as error: print(type(error).__name__, str(error).splitlines()[0])\n"
    )
    told = run_alone(code, tmp_path / "store")
    assert "CUDA" in told, told
    assert deltackpt.steps(tmp_path / "store") == [0]


@gpu_only
def test_an_exit_with_a_save_in_flight(tmp_path: Path) -> None:
    """Prevents a crash of the interpreter's exit, and the last save lost."""
    run_alone(
        ALONE + "step(); deltackpt.Checkpointer(sys.argv[1], state, final=False).save(3)\n",
        tmp_path / "store",
    )
    assert deltackpt.steps(tmp_path / "store") == [3]


@gpu_only
def test_workers_forked_beside_saves(tmp_path: Path) -> None:
    """Prevents children of a data loader that touch the device, or the ring's locked memory."""
    training = Training()
    data = torch.utils.data.TensorDataset(torch.randn(64, 512))
    with deltackpt.Checkpointer(tmp_path, training.state, every=1, final=False) as ckpt:
        number = 0
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                data, batch_size=32, num_workers=2, multiprocessing_context="fork"
            )
            for _batch in loader:
                training.step()
                ckpt.step(number)
                number += 1
        ckpt.wait()
        expected = training.copy()
    training.check(tmp_path, number - 1, expected)


class Window:
    """An object that holds tensors in containers of several kinds."""

    def __init__(self, value: float) -> None:
        t = torch.full((4,), value, device=DEVICE)
        self.held = {"pair": (t, [t + 1]), "last": deque([t + 2], 3), "named": OrderedDict(t=t + 3)}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def test_objects_get_their_tensors_on_the_device(tmp_path: Path) -> None:
    """Those in tuples, queues and ordered dicts came back on the host."""
    with checkpointer(tmp_path, {"window": Window(1.0)}) as ckpt:
        ckpt.save(1).result(120)
    window = Window(5.0)
    with checkpointer(tmp_path, {"window": window}) as ckpt:
        ckpt.restore()
    pair, last, named = window.held.values()
    found = [pair[0], *pair[1], *last, *named.values()]
    assert [t.tolist() for t in found] == [[float(n)] * 4 for n in (1, 2, 3, 4)]
    assert {t.device for t in found} == {pair[0].device}
    assert pair[0].device.type == torch.device(DEVICE).type


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
    run_alone(code, tmp_path / "store")
