# SPDX-License-Identifier: Apache-2.0
"""A loop in the style of Hugging Face Accelerate, under any strategy.

    torchrun --standalone --nproc-per-node 4 examples/accelerate_style.py --strategy "localsgd(tau=8)"

Under torchrun the real Accelerator opens a process group of its own and wraps the model in DistributedDataParallel, so
every gradient is averaged, whatever the strategy. Here the loop stays, and one class of a few lines has the
methods that it calls. The real Accelerator works as well if it does not see the launcher's variables: see
docs/loop.md, "Accelerate and the Trainer".
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra
from orchestra.data import digits


class Accelerator:
    """What such loops ask for. In place of `from accelerate import Accelerator`."""

    def __init__(self, strategy: str = "allreduce", gradient_accumulation_steps: int = 1) -> None:
        self.strategy, self.every = strategy, gradient_accumulation_steps
        self.batches, self.sync_gradients = 0, False

    def prepare(self, model, optimizer, loader, scheduler=None):
        self.model, self.optimizer, self.loader = orchestra.prepare(model, optimizer, loader, strategy=self.strategy)
        plain_step, plain_zero_grad = self.optimizer.step, self.optimizer.zero_grad
        self.optimizer.step = lambda: plain_step() if self.sync_gradients else None
        self.optimizer.zero_grad = lambda: plain_zero_grad() if self.sync_gradients else None
        found = self.model, self.optimizer, self.loader
        return found if scheduler is None else (*found, scheduler)

    @contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        self.batches += 1
        self.sync_gradients = self.batches % self.every == 0 or self.batches % len(self.loader) == 0
        yield

    def backward(self, loss: Tensor) -> None:
        (loss / self.every).backward()

    def clip_grad_norm_(self, parameters, most: float) -> None:
        if self.sync_gradients:
            self.optimizer.clip_grad_norm_(most)  # of the mean over the workers, as after DistributedDataParallel

    def reduce(self, value: Tensor) -> float:
        return self.optimizer.orchestra.mean(value)

    @property
    def is_main_process(self) -> bool:
        return self.optimizer.orchestra.is_coordinator

    def print(self, *words: object) -> None:
        if self.is_main_process:
            print(*words)

    def end_training(self) -> None:
        self.optimizer.finish()


parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="localsgd(tau=8)")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

accelerator = Accelerator(strategy=args.strategy, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(*digits("train")), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(args.epochs):
    total = 0.0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
    accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(torch.tensor(total / len(loader))):.4f}")
accelerator.end_training()
