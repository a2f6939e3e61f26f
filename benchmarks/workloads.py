# SPDX-License-Identifier: Apache-2.0
"""What every contestant trains: the same modules, the same synthetic data, the same optimizer."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestra.recipes.models import LeNet5, mlp

BATCH = 64
SAMPLES = 4096
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A module and the shape of its samples."""

    widths: tuple[int, ...] | None  # None: LeNet-5
    shape: tuple[int, ...]
    batch: int = BATCH

    def module(self) -> nn.Module:
        """A new module."""
        return LeNet5() if self.widths is None else mlp(*self.widths)

    def data(self) -> tuple[Tensor, Tensor]:
        """Noise with random labels: what is learned does not matter here."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, *self.shape, generator=generator)
        return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


MLP10M = Workload((784, 2048, 2048, 2048, CLASSES), (784,))
LENET = Workload(None, (1, 28, 28))
TINY = Workload((784, 8, CLASSES), (784,))
MLP50M = Workload((784, 4800, 4800, 4800, CLASSES), (784,))

MLP10M_4 = replace(MLP10M, batch=4)

WORKLOADS = {"mlp10m": MLP10M, "mlp10m, batch 4": MLP10M_4, "lenet": LENET, "tiny": TINY, "mlp50m": MLP50M}

sgd = functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9)
loss = F.cross_entropy
