# SPDX-License-Identifier: Apache-2.0
"""Random skip: every entry of a push is left out with some probability.

Li, Andersen, Park, Smola, et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, §3.6.

    push:   send g_k / (1 − p) with probability 1 − p, else nothing, for every k

Divided so, what is sent is g on average, with a variance of p/(1 − p) g_k² more; undivided (`unbiased=False`) it is
(1 − p) g on average, as with a smaller learning rate. What is left out is lost.

Cost: none but the draws. Keys differ from push to push, so there is nothing to cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.core.gradient_mask import ABSENT
from orchestra.core.node import Node
from orchestra.core.strategy import option
from orchestra.strategies.parameter_server.consistency.base import ServerState
from orchestra.strategies.parameter_server.filters.base import Filter, Sieved


@dataclass(frozen=True, kw_only=True)
class RandomSkip(Filter):
    """Every entry of a push is left out with some probability."""

    probability: float = option(0.5, "p: of leaving an entry out", least=0, most=0.999)
    unbiased: bool = option(True, "divide what is sent by 1 − p")

    def push(self, node: Node, s: ServerState, server: int, g: Tensor) -> Sieved:
        """Pass entries at random."""
        drawn = torch.empty(g.numel()).bernoulli_(1 - self.probability, generator=node.rng).to(g.device) > 0
        scale = 1 / (1 - self.probability) if self.unbiased else 1.0
        return torch.where(drawn, g * scale, ABSENT), drawn
