# SPDX-License-Identifier: Apache-2.0
"""KKT: for a penalty λ‖x‖₁, entries that the penalty holds at zero are not pushed.

Li, Andersen, Park, Smola, et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, §5.1.

    x_k = 0 is optimal as long as |∂f/∂x_k| ≤ λ
    push:   leave out k if x_k = 0 and |g_k| < λ − δ
    server: x ← soft(x − γ ḡ, γ λ),  soft(z, t)_k = sign(z_k) max(0, |z_k| − t)

The server's part is the optimizer `ProximalSGD(lr=γ, l1=λ)`. If every worker leaves out k, then |ḡ_k| < λ, and x_k
would have stayed at zero anyway; if some do, their part of ḡ_k is missing. A margin δ makes that rarer. The paper
leaves out more than 93 % of the entries.

Cost: none.
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
class KKT(Filter):
    """For a penalty λ‖x‖₁: entries that the penalty holds at zero are not pushed."""

    l1: float = option(0.0, "λ: the penalty, the optimizer's", least=0)
    margin: float = option(0.0, "δ: how far below λ a gradient must be", least=0)

    @torch.no_grad()
    def push(self, node: Node, s: ServerState, server: int, g: Tensor) -> Sieved:
        """Pass the entries that may leave zero, and those whose parameter is not zero."""
        active = (node.parts(node.x)[server] != 0) | (g.abs() >= self.l1 - self.margin)
        return torch.where(active, g, ABSENT), active
