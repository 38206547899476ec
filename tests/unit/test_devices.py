"""What is asked of CUDA, on a stand-in for it that knows each thread's current device.

Prevents: contexts on devices that are not in use, saves that end a graph capture, and page-locked
memory asked for on a device because that is torch's default.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from deltackpt_store.errors import StateError

from deltackpt import devices
from deltackpt.capture import capture
from deltackpt.cuda.runtime import CudaRuntime, address_of

GPU = torch.device("cuda", 3)


class Cuda(threading.local):
    """The current device of each thread, and on which of them CUDA was asked for what."""

    def __init__(self) -> None:
        self.current = 0

    @contextmanager
    def device(self, device: torch.device | None) -> Iterator[None]:
        before, self.current = self.current, 0 if device is None else device.index
        yield
        self.current = before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    cuda, calls = Cuda(), list[tuple[str, int]]()

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking  # waiting threads sleep

        def record(self, stream: Any) -> None:
            calls.append(("record", cuda.current))

        def query(self) -> bool:
            calls.append(("query", cuda.current))
            return True

        def synchronize(self) -> None:
            calls.append(("synchronize", cuda.current))

    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.current == 3)
    return calls


def test_events_are_asked_with_their_device_current(asked: list[tuple[str, int]]) -> None:
    event = devices.DeviceEvent(GPU)
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join()
    event.query()
    assert asked == [("record", 3), ("synchronize", 3), ("query", 3)]


def test_page_locked_memory_is_the_hosts(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda *_, **options: made.append(options))
    devices.page_locked(100, GPU)
    assert made == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]


def test_without_page_locked_memory_copies_go_to_plain_memory(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents a training that ends in `save` with CUDA's error, where a slower copy would do."""
    empty = torch.empty

    def refuse(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand what to do about it")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    for size in (100, 200):
        memory = devices.page_locked(size, GPU)
        assert (memory.numel(), memory.dtype, memory.device.type) == (size, torch.uint8, "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "no page-locked memory is left (CUDA error: out of memory):"
        " saves wait for copies to the host"
    ]


def test_memory_of_several_devices_is_locked_once(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a detour for every device but the first: CUDA refuses to lock what is locked."""
    registered: set[int] = set()

    class Cudart:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
            again = address in registered
            registered.add(address)
            return 712 if again else 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
            registered.remove(address)
            return 0

        def cudaGetErrorString(self, code: int) -> str:  # noqa: N802 - CUDA's name
            return f"error {code}"

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **options: None)
    first, second = (CudaRuntime(torch.device("cuda", index)) for index in (0, 1))
    slot = memoryview(bytearray(4096))
    assert first.lock(slot) is None
    assert second.lock(slot) is None
    first.unlock(slot)
    assert len(registered) == 1
    second.unlock(slot)
    assert registered == set()
    registered.add(address_of(slot))  # by somebody else
    assert first.lock(slot) == "error 712"


def test_a_capture_is_refused_before_anything_is_asked(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a CUDA graph that a save has ended, or that copies of a save became part of."""

    class Untouched:
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("asked for its state")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StateError, match="graph") as caught:
        capture({"model": Untouched()}, chunk_bytes=4096)
    assert caught.value.kind == "capturing"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    devices.refuse_graph_capture(GPU)


def test_a_capture_on_another_device_is_named(asked: list[tuple[str, int]]) -> None:
    devices.refuse_graph_capture()
    with pytest.raises(StateError, match="cuda:3"):
        devices.refuse_graph_capture(GPU)
