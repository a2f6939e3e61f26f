# SPDX-License-Identifier: Apache-2.0
"""DC-ASGD: a stale gradient, moved to the present x by a Taylor expansion.

Zheng, Meng, Wang, et al. "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017.
https://arxiv.org/abs/1609.08326

    w_bak(m)    what worker m last read
    server: a push of worker m
        w ← w − η (g + λ g ⊙ g ⊙ (w − w_bak(m)))
    adaptive:   MS ← ρ MS + (1 − ρ) g ⊙ g;   λ ← λ₀ / √(MS + ε),  ε = 1e-7

g ⊙ g stands for the Hessian's diagonal. λ = 0 is ASGD. The paper takes λ₀ ≈ 0.04, or 2 where it adapts.

Bytes per worker and step: those of the consistency. A server keeps a copy of its range for each worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.core.node import Node
from orchestra.core.strategy import option
from orchestra.strategies.parameter_server.consistency.base import Correction, Push, ServerState

_EPSILON = 1e-7


@dataclass(frozen=True, kw_only=True)
class DelayCompensated(Correction):
    """A stale gradient, moved to the present x by a Taylor expansion."""

    lam: float = option(0.04, "λ₀: how much; the paper has 0.04, or 2 if adaptive", least=0)
    adaptive: bool = option(False, "divide λ₀ by the root of a running mean of g²")
    rho: float = option(0.95, "ρ: of that mean", least=0, most=1)

    def init(self, node: Node, s: ServerState) -> None:
        """Begin as if every worker had read the initial x."""
        s.sent = [node.x.clone() for _ in node.comm.workers.members]
        s.squares = [torch.zeros_like(node.x)] if self.adaptive else []

    @torch.no_grad()
    def correct(self, node: Node, s: ServerState, push: Push) -> Tensor:
        """Return g ⊙ (1 + λ g ⊙ (w − w_bak)), which is −0 where g is −0 (see gradient_mask)."""
        g = push.x
        drift = g * (node.x - s.sent[push.source])
        if not self.adaptive:
            return g * (1 + self.lam * drift)
        (ms,) = s.squares
        ms.mul_(self.rho).addcmul_(g, g, value=1 - self.rho)
        return g * (1 + self.lam * drift / (ms + _EPSILON).sqrt())

    def answered(self, node: Node, s: ServerState, worker: int) -> None:
        """Store the x that the worker reads."""
        s.sent[worker].copy_(node.x)
