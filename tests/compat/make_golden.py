"""Makes the golden store of a format version, and beside it what its steps must hold.

    python tests/compat/make_golden.py tests/compat/golden/v1

Run once per format version, when it is released; the result is committed and never made again.
What is expected is written down from the live objects while they are saved, never read back:
``expected.json`` describes each state (see `golden_state.Describer`), ``values.bin`` holds bytes.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from coded import Blob, replayed_blobs, rounded_blobs, write_pack
from deltackpt_store import codecs
from deltackpt_store.manifest import Commit
from deltackpt_store.retention import retire
from deltackpt_store.store import Store
from golden_state import (
    DTYPES,
    Describer,
    Training,
    layouts,
    of_dtype,
    plain_values,
    rows,
    sparse,
)
from small_store import SmallStore

from deltackpt import Checkpointer


class Golden:
    """The store at `top`/store, and what has been saved into it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.path = top / "store"
        self.describer = Describer()
        self.steps: list[dict[str, Any]] = []

    def save(
        self, ckpt: Checkpointer, state: dict[str, Any], step: int, run: str, **options: Any
    ) -> None:
        """Save `state` as it is now, and note what it is and which random numbers come next."""
        metrics = {"loss": 1 / step, "nan": float("inf")}
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)
        random.random()
        handle = ckpt.save(step, metrics, **options)
        described = self.describer.state(state)
        handle.result(60)
        commit = Store.open(self.path).head(run)
        self.steps.append({
            "run": run, "number": commit.number, "step": step, "root": commit.root.hex(),
            "metrics": {name: value.hex() for name, value in metrics.items()},
            "state": described,
            "random": [random.random().hex(), float(np.random.rand()).hex(),
                       float(torch.rand(1, dtype=torch.float64)).hex()],
        })  # fmt: skip


def training_runs(golden: Golden) -> None:
    """Base and delta manifests, a fork, steps abandoned by going back, a retired one, a pin."""
    training = Training()
    table = rows(50, 7, 256)
    state: dict[str, Any] = {
        **training.objects, "table": table, "buffer": rows(51, 300), "meta": {"epoch": 0},
    }  # fmt: skip
    options: dict[str, Any] = {
        "writer": "thread", "chunk_bytes": 1024, "final": False, "threads": 1, "rng": False,
    }  # fmt: skip
    with Checkpointer(golden.path, state, **options) as ckpt:
        for step in (1, 2, 3, 9):
            training.step(step)
            table[step % 5] += 1  # one chunk of many
            if step == 9:
                state["buffer"].mul_(2)  # all chunks of one
            state["meta"]["epoch"] = step
            golden.save(ckpt, state, step, "main")
        ckpt.restore(3)
        training.step(4)
        golden.save(ckpt, state, 4, "main")
        state["meta"]["new"] = [torch.ones(3)]  # another layout
        golden.save(ckpt, state, 1000, "main")
    fork: dict[str, Any] = {**Training().objects, "table": rows(1, 7, 256), "buffer": rows(1, 300),
                            "meta": {}}  # fmt: skip
    with Checkpointer(golden.path, fork, run="fork-1", **options) as ckpt:
        ckpt.restore(2, run="main")
        fork["table"][6] = 0
        golden.save(ckpt, fork, 3, "fork-1")
    store = Store.open(golden.path)
    store.pin("best", store.find("main", 2))
    retire(store, [store.find("main", 1)])
    golden.steps = [s for s in golden.steps if (s["run"], s["step"]) != ("main", 1)]


def kinds_run(golden: Golden) -> None:
    """Every dtype, layout, sparse form and kind of value, inline and in chunks."""
    state: dict[str, Any] = {
        "dtypes": {name: [of_dtype(name, 5), of_dtype(name, 0)] for name in DTYPES},
        "layouts": layouts(), "sparse": sparse(), "values": plain_values(),
    }  # fmt: skip
    with Checkpointer(
        golden.path, state, run="kinds", writer="thread", chunk_bytes=1024, final=False, threads=1
    ) as ckpt:
        golden.save(ckpt, state, 1, "kinds")


def codecs_run(golden: Golden) -> None:
    """Every codec, element width and stream method, references of other lengths."""
    rng = np.random.default_rng(7)
    state: dict[str, Any] = {}
    blobs: list[Blob] = []
    for width in (1, 2, 4, 8):
        values = np.cumsum(rng.integers(-3, 4, 604)).astype(f"<i{width}")
        base, shorter = values.tobytes()[:601], values.tobytes()[:400]
        near = bytearray(base)
        near[5] ^= 7
        near[-1] ^= 255
        blobs += [
            Blob(codecs.RAW, base),
            Blob(codecs.RAW, shorter),
            Blob(codecs.PLANES, base[::-1], width, "zstd"),
            Blob(codecs.PLANES, bytes([width]) * 603, width),
            Blob(codecs.SPARSE, bytes(near), width, "lz4", base),
            Blob(codecs.DELTA, values[::-1].tobytes()[:601], width, "zstd", shorter),
            Blob(codecs.DELTA, (values + 1).tobytes()[:601], width, "lz4", base),
        ]
    for width in (2, 4, 8):
        floats = rng.standard_normal(150).astype(f"<f{width}")
        moved = (floats * 1.001).tobytes() + b"end"
        blobs += [
            Blob(codecs.RAW, floats.tobytes()),
            Blob(codecs.SORTED, moved, width, "zstd", floats.tobytes()),
        ]
    for values, few in ((3, 40), (15, 40)):
        skewed = rng.integers(60, 60 + values, 1500, np.uint8)
        skewed[::few] = rng.integers(0, 256, len(skewed[::few]), np.uint8)
        blobs.append(Blob(codecs.PLANES, skewed.tobytes()))
    blobs.append(Blob(codecs.PLANES, (rng.bytes(90) * 9)[:602], 1, "lz4"))
    blobs += [*rounded_blobs(257), *replayed_blobs(129, 1)]
    assert {blob.codec for blob in blobs} == {codec.id for codec in codecs.registered()}
    write_pack(Store.open(golden.path), blobs, "c0dec0dec0dec0de")
    for i, blob in enumerate(blobs):
        state[f"c{i}"] = torch.frombuffer(bytearray(blob.raw), dtype=torch.uint8)
    page = bytes(range(256)) * 257  # raw, and large enough for a payload on a page boundary
    state["page"] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    with Checkpointer(
        golden.path, state, run="codecs", writer="thread", chunk_bytes=1 << 20, final=False,
        threads=1, codec="none", rng=False,
    ) as ckpt:  # fmt: skip
        golden.save(ckpt, state, 1, "codecs")


def shards_run(golden: Golden) -> Commit:
    """Shard fields, which version 1 has and the present saver does not fill."""
    small = SmallStore(golden.path)
    commit = small.save(
        "shards", 1, {"w": np.arange(600, dtype=np.float32)},
        views={"w": {"global_shape": (1200,), "shard_offsets": (600,)}},
    )  # fmt: skip
    small.close()
    return commit


def main(top: Path) -> None:
    if top.exists():
        shutil.rmtree(top)
    top.mkdir(parents=True)
    golden = Golden(top)
    training_runs(golden)
    kinds_run(golden)
    codecs_run(golden)
    shards = shards_run(golden)
    lineages = {
        "main": [2, 3, 4, 1000],
        "fork-1": [3],
        "kinds": [1],
        "codecs": [1],
        "shards": [1],
    }
    whole = golden.describer.raw(np.arange(600, dtype="<f4").tobytes())
    expected = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "lineages": lineages,
        "abandoned": {"main": [9]},
        "retired": {"main": [1]},
        "pins": {"best": ["main", 2]},
        "parents": {"main@4": "main@3", "fork-1@3": "main@2", "main@1000": "main@4"},
        "shards": {"root": shards.root.hex(), "w": whole, "whole": [1200], "offsets": [600]},
        "steps": golden.steps,
    }
    for folder in ("cache", "gc"):  # what reading leaves, and no part of a store that is copied
        shutil.rmtree(golden.path / folder, ignore_errors=True)
    for leftover in [*golden.path.rglob(".lock"), *golden.path.glob("gc/*")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    text = json.dumps(expected, indent=None, separators=(",", ":"))
    (top / "expected.json").write_text(text.replace('{"run"', '\n{"run"') + "\n")
    (top / "values.bin").write_bytes(golden.describer.values)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
