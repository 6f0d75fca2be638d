"""Train a PyTorch model within a byte budget: `python examples/torch_training.py 60%`."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import remat.torch

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
model = nn.Sequential(*layers, nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(1024, 256), torch.randint(10, (1024,))


def loss_fn(x, y):
    return F.cross_entropy(model(x), y)


plan = remat.torch.plan(loss_fn, x, y, budget=sys.argv[1] if len(sys.argv) > 1 else "60%", optimizer=optimizer)
print(plan)
within_budget = remat.torch.apply(plan)

for step in range(5):
    optimizer.zero_grad()
    with within_budget:
        loss = loss_fn(x, y)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
