# SPDX-License-Identifier: Apache-2.0
"""A filter and a model for tests: apart, since every process of a run reads this file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.zoo import INPUTS
from torch import Tensor, nn

from orchestra.core.node import Node
from orchestra.strategies.parameter_server.consistency import ServerState
from orchestra.strategies.parameter_server.filters import Filter
from orchestra.strategies.parameter_server.filters.base import Sieved


def make_even() -> nn.Module:
    """576 parameters, of which any two halves divide by four."""
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 1, bias=False))


@dataclass(frozen=True, kw_only=True)
class Every(Filter):
    """Some entries, the same ones for several steps."""

    repeat: int

    def push(self, node: Node, s: ServerState, server: int, g: Tensor) -> Sieved:
        keep = torch.arange(g.numel()) % 4 == (node.steps - 1) // self.repeat % 4
        return torch.where(keep, g, 0), keep
