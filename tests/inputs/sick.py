# SPDX-License-Identifier: Apache-2.0
"""A model whose answers are not finite at given steps, and empty shards: apart, since all processes read it."""

from __future__ import annotations

import dataclasses

import torch
from tests.zoo import Trap, make_model
from torch import Tensor, nn

from orchestra import Dirichlet


def sickness(rank: int, step: int, *, size: int) -> Trap:
    """A trap that does nothing but spring; also in this process, where simulated workers are."""
    return dataclasses.replace(Trap.at(rank, step, lambda: None, size=size), parent=0)


class Sick(nn.Module):
    """Gives `value` instead of an answer when a trap springs."""

    def __init__(self, value: float, *traps: Trap) -> None:
        super().__init__()
        self.inner = make_model()
        self.value = value
        self.traps = traps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * self.value if any([trap.meet(x) for trap in self.traps]) else y  # each must see every batch


class Lopsided(Dirichlet):
    """The last worker holds nothing."""

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        order = torch.arange(len(labels))
        holders = max(1, size - 1)
        return [*order.tensor_split(holders), *([order[:0]] * (size - holders))]
