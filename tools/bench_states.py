"""Training states for the benchmark: what one save finds changed since the last one.

Each state is real: a module and its optimizer, moved by real optimizer steps with given gradients
(`unchanged` and `one-percent` are moved by hand). Sizes are in bytes of model plus optimizer.
"""

# pyright: basic

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CHUNK = 256 * 1024


@dataclass(frozen=True)
class State:
    """`objects` is what a checkpointer gets, `advance` one training step's change of it.

    `advance` ends with ``optimizer.step()`` (of a possibly empty change), so that checkpointers
    which lock around the optimizer are timed as in a training loop.
    """

    objects: dict[str, Any]
    advance: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.objects.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.objects.items():
            value.load_state_dict(state[name])


def _block(width: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(depth)))


def _random_gradients(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    for p in parameters:
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.normal_(generator=generator)


def _adamw(parameters: list[nn.Parameter], generator: torch.Generator) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    _random_gradients(parameters, generator)
    optimizer.step()
    return optimizer


def unchanged(size: int) -> State:
    """Nothing changes between saves: an idle or frozen model with its AdamW state."""
    generator = torch.Generator().manual_seed(0)
    model = _block(1024, max(1, size // (12 * 1024 * 1025)))
    optimizer = _adamw(list(model.parameters()), generator)
    optimizer.zero_grad(set_to_none=True)
    return State({"model": model, "optimizer": optimizer}, lambda: optimizer.step() and None)


def one_percent(size: int) -> State:
    """One chunk in a hundred changes, scattered over weights and moments."""
    generator = torch.Generator().manual_seed(0)
    model = _block(1024, max(1, size // (12 * 1024 * 1025)))
    optimizer = _adamw(list(model.parameters()), generator)
    optimizer.zero_grad(set_to_none=True)
    tensors = [p.data for p in model.parameters()]
    tensors += [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    flat = [t.view(-1) for t in tensors if t.numel() * 4 >= CHUNK]
    places = [(t, i) for t in flat for i in range(0, t.numel(), CHUNK // 4)]

    def advance() -> None:
        optimizer.step()
        chosen = torch.randperm(len(places), generator=generator)[: max(1, len(places) // 100)]
        for index in chosen.tolist():
            tensor, start = places[index]
            tensor[start : start + CHUNK // 4].normal_(generator=generator)

    return State({"model": model, "optimizer": optimizer}, advance)


class _Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter (LoRA, Hu et al. 2021)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) * 0.01)
        self.up = nn.Parameter(torch.zeros(width, rank))


def lora(size: int) -> State:
    """The whole model is saved, only rank-8 adapters and their moments train."""
    generator = torch.Generator().manual_seed(0)
    width = 1024
    per_layer = 4 * width * (width + 1) + 3 * 4 * 2 * 8 * width
    model = nn.Sequential(*(_Adapted(width, 8) for _ in range(max(1, size // per_layer))))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _adamw(trained, generator)

    def advance() -> None:
        _random_gradients(trained, generator)
        optimizer.step()

    return State({"model": model, "optimizer": optimizer}, advance)


def sparse_embedding(size: int) -> State:
    """An embedding table of 64-wide rows under SparseAdam; 512 ids a step, Zipf-distributed."""
    generator = torch.Generator().manual_seed(0)
    rows = size // (3 * 4 * 64)
    model = nn.Embedding(rows, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    shuffle = torch.randperm(rows, generator=generator)

    def advance() -> None:
        uniform = torch.rand(512, generator=generator)
        ids = shuffle[((rows**uniform) - 1).long().clamp(0, rows - 1)]
        values = torch.randn(512, 64, generator=generator)
        model.weight.grad = torch.sparse_coo_tensor(ids[None], values, model.weight.shape,
                                                    check_invariants=False)  # fmt: skip
        optimizer.step()

    advance()
    return State({"model": model, "optimizer": optimizer}, advance)


class _MixedAdamW(torch.optim.AdamW):
    """AdamW over fp32 masters that casts them back into bf16 weights (14 bytes a parameter)."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.masters = [nn.Parameter(w.detach().float()) for w in weights]
        super().__init__(self.masters, lr=1e-4, fused=True)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data.copy_(master.data)


class _Masters(nn.Module):
    def __init__(self, masters: list[nn.Parameter]) -> None:
        super().__init__()
        self.masters = nn.ParameterList(masters)


def dense_adamw(size: int) -> State:
    """Mixed-precision AdamW: bf16 weights, fp32 masters and moments; every element moves."""
    generator = torch.Generator().manual_seed(0)
    model = _block(1024, max(1, size // (14 * 1024 * 1025)), torch.bfloat16)
    optimizer = _MixedAdamW(list(model.parameters()))
    _random_gradients(optimizer.masters, generator)
    optimizer.step()
    masters = _Masters(optimizer.masters)

    def advance() -> None:
        _random_gradients(optimizer.masters, generator)
        optimizer.step()

    return State({"model": model, "masters": masters, "optimizer": optimizer}, advance)


STATES: dict[str, Callable[[int], State]] = {
    "unchanged": unchanged,
    "one-percent": one_percent,
    "lora": lora,
    "sparse-embedding": sparse_embedding,
    "dense-adamw": dense_adamw,
}
