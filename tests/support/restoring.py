"""A saver for tests of restore: captures live objects and commits them in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captured import same
from deltackpt_store.manifest import Commit, Snapshot
from deltackpt_store.manifest_io import to_base, to_delta
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from torch import nn

from deltackpt.capture import capture
from deltackpt.restore import Restored, restore_into


class Keeper:
    """Saves steps into the store at `path`; each continues the one before it in its run."""

    def __init__(
        self, path: Path | str, *, chunk: int = 4096, codec: str = "auto", pack_bytes: int = 1 << 26
    ) -> None:
        self.store = Store.create(path)
        self.path = Path(self.store.path)
        self._chunk = chunk
        self._codec = codec
        self._pack_bytes = pack_bytes
        self._base: Snapshot | None = None
        self._heads: dict[str, Commit] = {}

    def save(
        self,
        state: Mapping[Any, Any],
        step: int,
        *,
        run: str = "main",
        rng: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> Commit:
        """Durable when it returns; a delta manifest when the layout is that of the step before."""
        taken = capture(state, chunk_bytes=self._chunk, rng=rng)
        chunks: dict[int, Any] = {}
        packs: set[str] = set()
        store = Store.open(self.path)
        writer = StoreWriter(
            store, index=store.index(), codec=self._codec, pack_bytes=self._pack_bytes
        )
        with writer:
            for extent, source in taken.sources.items():
                data = memoryview(source.data.cpu().numpy().tobytes())
                spec = taken.layout.extents[extent]
                puts = [
                    writer.put(data[i : i + spec.chunk_bytes], dtype=spec.dtype)
                    for i in range(0, len(data), spec.chunk_bytes)
                ]
                packs |= {put.pack for put in puts}
                ids = b"".join(put.id for put in puts)
                chunks[extent] = np.frombuffer(ids, np.uint8).reshape(-1, 32)
            writer.flush()
            snapshot = Snapshot(taken.layout, taken.objects, taken.inline, chunks,
                                packs=tuple(sorted(packs)))  # fmt: skip
            base, manifest = self._base, None
            if base is not None and base.digest is not None:
                manifest = to_delta(base.digest, base, snapshot, packs)
            if manifest is None:
                base, manifest = None, to_base(snapshot, packs)
            digest = writer.write_manifest(manifest)
            commit = writer.commit(
                run=run, step=step, parent=self._heads.get(run), manifest=digest,
                base=None if base is None else base.digest, root=manifest.root,
                packs={*manifest.packs, *(() if base is None else base.packs)},
                metrics=metrics,
            )  # fmt: skip
        if base is None:
            snapshot.digest = digest
            self._base = snapshot
        self._heads[run] = commit
        taken.release()
        return commit


def save_state(path: Path, state: Mapping[str, Any], *, step: int = 1, chunk: int = 4096) -> Commit:
    """Commit `state` as it is now, as a step that continues none."""
    return Keeper(path, chunk=chunk).save(state, step)


def back(keeper: Keeper, state: Any, **options: Any) -> Restored:
    done = restore_into(keeper.store, state, **options)
    assert done is not None
    return done


def content(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def assert_equal(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = module.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert same(state[key], value), key


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(
            parameter.dtype
        )
    optimizer.step()
    optimizer.zero_grad()


def pair(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
