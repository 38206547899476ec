"""Saves of every optimizer step through the checkpointer, for `codec_bench.py --every-step`.

Each save is counted with its manifest and its share of footers, by what it adds to the store's
folder; `cpu` is processor time of all threads, so that other work on the machine does not count.
"""

# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import codec_states
import torch
from codec_rivals import Objects
from deltackpt_store.store import Store

import deltackpt


class Stepped(Objects):
    """Objects whose optimizer also has the numbers of a state."""

    def step_to(self, state: codec_states.State, numbers: dict[str, Any]) -> None:
        self.move(state)
        by_key = {name.split("|")[2]: name for name in state if name.split("|")[0] in WEIGHTS}
        for key, (step, lr, beta1, beta2, eps, decay) in numbers.items():
            owner = next(p for p in self.optimizer.state if self._is(p, by_key[key]))
            self.optimizer.state[owner]["step"].fill_(step)
            self.optimizer.param_groups[0].update(
                lr=float(lr), betas=(float(beta1), float(beta2)), eps=float(eps),
                weight_decay=float(decay),
            )  # fmt: skip

    def _is(self, parameter: torch.Tensor, name: str) -> bool:
        return parameter.data_ptr() == self.tensors[name].data_ptr()


WEIGHTS = ("weight", "master")


def every_step(name: str, cache: Path) -> dict[str, Any]:
    """Figures of both ways of saving, with and without prediction; prints them as tables."""
    figures: dict[str, Any] = {}
    first = codec_states.load(name, cache, (0,))[0]
    total = sum(array.nbytes for array in first.values())
    print(f"\n{name}: {total / 1e6:.0f} MB\n\n| save | shadow | ratio | codecs | cpu, s |")
    print("| ---: | --- | ---: | --- | ---: |")
    for shadow in (False, True):
        folder = Path(tempfile.mkdtemp(dir=cache.parent))
        objects = Stepped(first)
        state = {"model": objects.model, "optimizer": objects.optimizer}
        rows: dict[int, Any] = {}
        with deltackpt.Checkpointer(
            folder / "store", state, shadow=shadow, rng=False, final=False, writer="thread"
        ) as ckpt:
            before = 0
            for step in codec_states.NEAR:
                now = codec_states.load(name, cache, (step,))[step]
                objects.step_to(now, codec_states.numbers(name, cache, step))
                began = time.process_time()
                report = ckpt.save(step).result(3600)
                spent = time.process_time() - began
                size = sum(f.stat().st_size for f in folder.rglob("*.pack"))
                size += sum(f.stat().st_size for f in (folder / "store/manifests").iterdir())
                row = {"bytes": size - before, "cpu": spent, "codecs": report.codecs}
                before, rows[step] = size, row
                mix = ", ".join(f"{codec} {count}" for codec, count in report.codecs.items())
                ratio = total / row["bytes"]
                print(f"| {step} | {shadow} | {ratio:.2f} | {mix} | {spent:.2f} |", flush=True)
        later = [row["bytes"] for step, row in rows.items() if step >= 2]
        best, mean = total / min(later), total * len(later) / sum(later)
        print(f"\nsaves from the third on: {mean:.2f}x on average, {best:.2f}x the best\n")
        restore = _restores(folder / "store")
        way = "shadow" if shadow else "plain"
        figures[way] = {"saves": rows, "mean": mean, "best": best, "restore": restore}
        shutil.rmtree(folder)
    return figures


def _restores(path: Path) -> dict[int, float]:
    """Processor seconds of reading and proving every chunk of a step, by step."""
    seconds: dict[int, float] = {}
    for step in Store.open(path).steps("main"):
        store = Store.open(path)
        snapshot = store.snapshot(store.find("main", step))
        requests: list[tuple[bytes, memoryview]] = []
        for extent, ids in snapshot.chunks.items():
            spec = snapshot.layout.extents[extent]
            room = memoryview(bytearray(spec.nbytes))
            for index, chunk_id in enumerate(ids):
                start = index * spec.chunk_bytes
                requests.append(
                    (chunk_id.tobytes(), room[start : start + spec.chunk_length(index)])
                )
        began = time.process_time()
        store.reader(snapshot.packs).read(requests)
        seconds[step] = time.process_time() - began
    print("processor seconds to read a step, beside the first one:", end=" ")
    print(", ".join(f"{step}: {s / seconds[0]:.1f}" for step, s in seconds.items()), flush=True)
    return seconds
