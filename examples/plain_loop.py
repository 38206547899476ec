"""The whole hook in a plain training loop. Run it, kill it at any time, run it again.

python examples/plain_loop.py          # 1000 steps, into runs/store
python examples/plain_loop.py STORE STEPS
"""

import sys

import torch

import deltackpt

store = sys.argv[1] if len(sys.argv) > 1 else "runs/store"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1000

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

ckpt = deltackpt.Checkpointer(
    store, {"model": model, "optimizer": optimizer, "scheduler": scheduler}, every=50
)
with ckpt:
    last = ckpt.restore()  # the newest step that verifies, or None on a fresh run
    first = last.step + 1 if last else 0
    print(f"continues after step {last.step}" if last else "a fresh run", flush=True)
    for step in range(first, steps):
        x = torch.randn(32, 64)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ckpt.step(step, metrics={"loss": loss.item()})  # saves when due, returns at once
print(f"trained steps {first} to {steps - 1}" if first < steps else "nothing left to train")
