# SPDX-License-Identifier: Apache-2.0
"""A model of one number, on which the paths of strategies are known in closed form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.zoo import make_data, train
from torch import Tensor, nn

from orchestra import Result, Simulated, Steps, Strategy

START = 1.5


class Point(nn.Module):
    """x itself, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([START], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x.expand(len(inputs), 1)


def quadratic(y: Tensor, target: Tensor, h: float = 1.0) -> Tensor:
    """h x²/2, whose gradient is h x."""
    return 0.5 * h * (y * y).mean()


def slope(y: Tensor, target: Tensor) -> Tensor:
    """Whose gradient is 1 everywhere: x then counts the gradients that reached it."""
    return y.mean()


def walk(
    strategy: Strategy[Any], out: Path, loss: Callable[[Tensor, Tensor], Tensor], *, lr: float, steps: int, **more: Any
) -> Result:
    """Let workers walk: simulated with equal step times, unless a cluster is given."""
    asked: dict[str, Any] = {
        "cluster": Simulated(workers=more.pop("workers", 3), network="1000gbit,0s", compute_time="constant:1"),
        "model": Point,
        "data": partial(make_data, 144),  # enough samples for every worker in every step
        "batch": 4,
        "loss": loss,
        "optimizer": partial(torch.optim.SGD, lr=lr),
        "budget": Steps(steps),
    }
    return train(strategy, out, **asked | more)


def end_of(result: Result) -> float:
    """Where the model is."""
    return float(next(result.model.parameters()).detach())
