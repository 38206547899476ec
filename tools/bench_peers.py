"""The checkpointers that the benchmark runs side by side, each behind the same five calls.

All of them end durable: where a peer does not fsync what it wrote, the benchmark does, and counts
the time as that peer's durable time.
"""

# pyright: basic, reportPrivateImportUsage=false, reportMissingImports=false

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from bench_states import State


def fsync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def tree_bytes(folder: Path) -> int:
    """Bytes of all files but deltackpt's local index, which is no part of what is stored."""
    files = (p for p in folder.rglob("*") if "cache" not in p.relative_to(folder).parts)
    return sum(p.stat().st_size for p in files if p.is_file())


class Peer:
    """`save` returns when the peer lets training go on; `before_update` is called right before the
    optimizer changes the state; `wait` returns when the step is durable."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder, self.state = folder, state

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(self, step: int) -> None:
        """Start saving; every peer has its own way."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Wait for what must not change any more while the peer still reads it."""

    def wait(self) -> None:
        """Block until the last save is durable."""

    def restore(self, target: State, step: int) -> None:
        """Put a step into the target; every peer has its own way."""
        raise NotImplementedError

    def forget(self, step: int) -> None:
        """Free the disk space of a step that is no longer needed (peers that write it all)."""
        shutil.rmtree(self.path(step), ignore_errors=True)

    def close(self) -> None:
        """Release threads and processes."""


class TorchSave(Peer):
    def save(self, step: int) -> None:
        self.path(step).mkdir()
        torch.save(self.state.state_dict(), self.path(step) / "state.pt")
        fsync_tree(self.path(step))

    def restore(self, target: State, step: int) -> None:
        target.load_state_dict(torch.load(self.path(step) / "state.pt", weights_only=True))


class DcpSave(Peer):
    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state.state_dict(), checkpoint_id=self.path(step), no_dist=True)
        fsync_tree(self.path(step))

    def restore(self, target: State, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        state = target.state_dict()
        dcp.load(state, checkpoint_id=self.path(step), no_dist=True)
        target.load_state_dict(state)


class DcpAsync(DcpSave):
    """`async_save` as it comes: a fresh copy of the whole state before it returns."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1,
                                    store=dist.HashStore())  # fmt: skip
        self.future: Any = None
        self.step = 0

    def options(self) -> dict[str, Any]:
        return {}

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.wait()
        self.step = step
        self.future = dcp.async_save(self.state.state_dict(), checkpoint_id=self.path(step),
                                     **self.options())  # fmt: skip

    def wait(self) -> None:
        if self.future is not None:
            future = self.future
            self.future = None
            getattr(future, "upload_completion", future).result()
            fsync_tree(self.path(self.step))


class DcpCached(DcpAsync):
    """`async_save` with a kept stager: its host buffers are reused from save to save."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(StagingOptions(use_pinned_memory=False,
                                    use_shared_memory=False, use_async_staging=False,
                                    use_non_blocking_copy=False))  # fmt: skip

    def options(self) -> dict[str, Any]:
        return {"async_stager": self.stager}

    def close(self) -> None:
        self.stager.close()


class Safetensors(Peer):
    """Tensors only; names are made from the tree's keys."""

    def _named(self, state: State) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}

        def walk(prefix: str, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                named[prefix] = value
            elif isinstance(value, dict):
                for key, item in value.items():
                    walk(f"{prefix}/{key}", item)

        walk("", state.state_dict())
        return named

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        self.path(step).mkdir()
        save_file(self._named(self.state), self.path(step) / "state.safetensors")
        fsync_tree(self.path(step))

    def restore(self, target: State, step: int) -> None:
        from safetensors.torch import load_file

        loaded = load_file(self.path(step) / "state.safetensors")
        with torch.no_grad():
            for name, tensor in self._named(target).items():
                tensor.copy_(loaded[name])


class PlainWrite(Safetensors):
    """The floor: write every byte of every tensor into one file, fsync it."""

    def save(self, step: int) -> None:
        self.path(step).mkdir()
        with open(self.path(step) / "raw", "wb", buffering=0) as file:
            for tensor in self._named(self.state).values():
                data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
                while len(data):
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
        fsync_tree(self.path(step))

    def restore(self, target: State, step: int) -> None:
        with open(self.path(step) / "raw", "rb", buffering=0) as file, torch.no_grad():
            for tensor in self._named(target).values():
                data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
                while len(data):
                    data = data[file.readinto(data) :]


class Moonclip(Peer):
    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        import moonclip

        self.manager = moonclip.CheckpointManager(str(folder / "store"))

    def save(self, step: int) -> None:
        objects = self.state.objects
        model = torch.nn.ModuleDict({k: v for k, v in objects.items() if k != "optimizer"})
        self.manager.save(step, model=model, optimizer=objects["optimizer"])

    def wait(self) -> None:
        self.manager.flush()

    def restore(self, target: State, step: int) -> None:
        objects = target.objects
        model = torch.nn.ModuleDict({k: v for k, v in objects.items() if k != "optimizer"})
        self.manager.load_latest(model=model, optimizer=objects["optimizer"])

    def forget(self, step: int) -> None:
        pass


class Deltackpt(Peer):
    """`overlap=True` as it comes; the optimizer's pre-hook is the lock."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        import deltackpt

        self.ckpt = deltackpt.Checkpointer(folder / "store", state.objects, **self.options)
        self.last: Any = None

    def save(self, step: int) -> None:
        self.last = self.ckpt.save(step)

    def before_update(self) -> None:
        self.ckpt.lock()

    def wait(self) -> None:
        self.last.result(600)

    def restore(self, target: State, step: int) -> None:
        import deltackpt

        self.ckpt.close()
        with deltackpt.Checkpointer(self.folder / "store", target.objects) as other:
            started = time.perf_counter()
            other.restore()
            self.restore_seconds = time.perf_counter() - started

    def forget(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.ckpt.close()


class DeltackptEager(Deltackpt):
    options: ClassVar[dict[str, Any]] = {"overlap": False}


class DeltackptFast(Deltackpt):
    options: ClassVar[dict[str, Any]] = {"codec": "fast"}


class DeltackptSmallerChunks(Deltackpt):
    options: ClassVar[dict[str, Any]] = {"chunk_bytes": 256 * 1024}


class DeltackptLargerChunks(Deltackpt):
    options: ClassVar[dict[str, Any]] = {"chunk_bytes": 1024 * 1024}


PEERS: dict[str, Callable[[Path, State], Peer]] = {
    "deltackpt": Deltackpt,
    "deltackpt-eager": DeltackptEager,
    "deltackpt-fast": DeltackptFast,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsync,
    "dcp.async_save-cached": DcpCached,
    "safetensors": Safetensors,
    "plain-write": PlainWrite,
    "moonclip": Moonclip,
    "deltackpt-256KiB": DeltackptSmallerChunks,
    "deltackpt-1024KiB": DeltackptLargerChunks,
}
"""By name; chunk sizes other than the default are measured only when asked for."""
