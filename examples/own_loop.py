# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch script with three lines changed, and the line that clips.

python examples/own_loop.py                                      alone: plain PyTorch
torchrun --standalone --nproc-per-node 4 examples/own_loop.py    four workers
orchestra run examples/own_loop.py -n 4 -s ps                    four workers and a server
orchestra compare examples/own_loop.py -s allreduce,slowmo       which strategy is the fastest here
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra  # 1
from orchestra.data import digits

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="slowmo(tau=8)")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(*digits("train")), batch_size=32, shuffle=True)
model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy=args.strategy)  # 2
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

for _ in range(args.epochs):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(5.0)  # not torch.nn.utils.clip_grad_norm_, which knows this worker's gradient alone
        optimizer.step()
        scheduler.step()
optimizer.finish()  # 3

model.eval()
x, y = digits("test")
with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean().item()
optimizer.orchestra.score(accuracy=accuracy)  # what orchestra compare goes by
if optimizer.orchestra.is_coordinator:
    print(f"accuracy {accuracy:.3f}, workers: {optimizer.orchestra.workers}")
