"""A training that saves every step and resumes by itself, for an outside judge of crash safety.

    python tools/chaos_train.py OUT [--layer sound|late-data|no-sync]

The judge (ckpt-chaos, see tools/chaos.py) sees only what goes through Python's own `open`,
`os.fsync` and `os.rename` in this very process. So the writer is a thread, and its file layer is
`PlainFiles`, which does everything by these calls, or one of the two broken ones made of it.
Prints the number of the commit it resumed from; writes OUT/result, equal for equal trainings.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import torch
from deltackpt_store.fileio import Buffer, FileIO

import deltackpt

STEPS = 6
_WRITE, _CLOSE = FileIO.write, FileIO.close


class PlainFiles(FileIO):
    """Files by `open`, `write`, `os.fsync` and `os.rename` only; one process, one writer."""

    def __init__(self) -> None:
        self.files: dict[int, BinaryIO] = {}

    def create(self, path: str, mode: int = 0o666) -> int:
        file: Any = open(path, "xb", buffering=0)  # noqa: SIM115 - closed in `close`
        self.files[file.fileno()] = file
        return file.fileno()

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        if handle not in self.files:  # a lock's file
            return _WRITE(self, handle, buffers, offset)
        self.files[handle].seek(offset)
        return sum(self.files[handle].write(buffer) for buffer in buffers)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        if handle in self.files:
            self.files.pop(handle).close()
        else:
            _CLOSE(self, handle)

    def link(self, source: str, target: str) -> None:
        if os.path.exists(target):
            raise FileExistsError(17, "File exists", target)
        os.rename(source, target)


class LateData(PlainFiles):
    """Broken: manifests and commits get their names before their bytes, which come when two more
    of them have been begun."""

    def __init__(self) -> None:
        super().__init__()
        self.late: dict[int, list[tuple[int, bytes]]] = {}  # what was written, by handle
        self.owed: dict[str, list[tuple[int, bytes]]] = {}  # the same, by path

    def create(self, path: str, mode: int = 0o666) -> int:
        handle = super().create(path, mode)
        if os.path.basename(os.path.dirname(path)) in ("manifests", "main"):
            for named in list(self.owed)[:-1]:
                self.pay(named)
            self.late[handle] = self.owed[path] = []
        return handle

    def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        if handle not in self.late:
            return super().write(handle, buffers, offset)
        data = b"".join(buffers)
        self.late[handle].append((offset, data))
        return len(data)

    def close(self, handle: int) -> None:
        super().close(handle)
        self.late.pop(handle, None)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        if source in self.owed:
            self.owed[target] = self.owed.pop(source)

    def pay(self, path: str) -> None:
        with open(path, "r+b") as file:
            for offset, data in self.owed.pop(path):
                file.seek(offset)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


class NoSync(PlainFiles):
    """Broken: nothing is synced."""

    def sync(self, handle: int) -> None:
        pass


LAYERS: dict[str, type[PlainFiles]] = {
    "sound": PlainFiles, "late-data": LateData, "no-sync": NoSync,
}  # fmt: skip


def use_everywhere(layer: PlainFiles) -> None:
    """Every `FileIO` of this process works by `layer`."""
    for name in ("create", "write", "sync", "close", "link"):
        setattr(FileIO, name, _method(getattr(layer, name)))


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: FileIO, *args: Any, **named: Any) -> Any:
        return call(*args, **named)

    return method


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--layer", choices=LAYERS, default="sound")
    options = parser.parse_args()
    use_everywhere(LAYERS[options.layer]())
    os.makedirs(options.out, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ckpt = deltackpt.Checkpointer(
        os.path.join(options.out, "store"),
        {"model": model, "optimizer": optimizer},
        every=1,
        writer="thread",
    )
    with ckpt:
        last = ckpt.restore()
        print(f"resumed from commit {last.number if last else 0}", flush=True)
        for step in range(last.step + 1 if last else 0, STEPS):
            x = torch.randn(16, 32)
            loss = (model(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            ckpt.step(step, metrics={"loss": loss.item()})
            ckpt.wait()  # commits come in order, and so do the events that the judge counts
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    with open(os.path.join(options.out, "result"), "w") as file:
        file.write(digest.hexdigest())


if __name__ == "__main__":
    main()
