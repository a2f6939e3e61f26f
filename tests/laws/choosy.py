# SPDX-License-Identifier: Apache-2.0
"""Models that do not use all of their parameters in every step: apart, since every process of a run reads this file."""

from __future__ import annotations

import torch
from tests.zoo import INPUTS, make_data
from torch import Tensor, nn


class Choosy(nn.Module):
    """Layers that are never used, and two of which a mini-batch uses one, the other, or neither."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.never = nn.Linear(3, 5)
        self.first = nn.Linear(INPUTS, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.plus = nn.Linear(width, width)
        self.idle = nn.Parameter(torch.ones(()))
        self.minus = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        self.rest = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        total = float(x[:, 1].sum())
        if total > 1:
            y = y + self.plus(y)
        if total < -2:
            y = y + self.minus(y) * self.gain
        z: Tensor = self.last(y)
        return z


NEVER = ("never", "idle", "rest")


class Lacking(nn.Module):
    """As many parameters as there are inputs, half of them never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(INPUTS - 3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] @ self.used[:, None]


def choosy() -> nn.Module:
    return Choosy().double()


def wide() -> nn.Module:
    """80,941 parameters: fused kernels, ranges at whole cache lines, layers at none."""
    return Choosy(197)


def doubles() -> tuple[Tensor, Tensor]:
    x, y = make_data()
    return x.double(), y.double()
