# SPDX-License-Identifier: Apache-2.0
"""Proximal SGD: a gradient step, then the proximal step of an l1 penalty, which sets entries to zero.

    repeat
        g ← ∇f(x)
        x ← soft(x − γ g, γ λ)          soft(z, t)_k = sign(z_k) max(0, |z_k| − t)

It minimises f(x) + λ‖x‖₁, and entries that the penalty holds at zero are exactly zero. λ = 0 is SGD.

Parikh, Boyd. "Proximal Algorithms", Foundations and Trends in Optimization 2014, §4.2.
https://web.stanford.edu/~boyd/papers/prox_algs.html

Bytes: none. Memory: none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import optim
from torch.optim.optimizer import ParamsT

from orchestra.model.optimizers.layers import evaluated, require


class ProximalSGD(optim.Optimizer):
    """SGD on f(x) + λ‖x‖₁, the penalty by its proximal step.

    Args:
        params: parameters, or groups of them with hyper-parameters of their own.
        lr: γ.
        l1: λ.

    """

    def __init__(self, params: ParamsT, lr: float, *, l1: float = 0.0) -> None:
        require("lr", lr, 0)
        require("l1", l1, 0)
        super().__init__(params, {"lr": lr, "l1": l1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update."""
        loss = evaluated(closure)
        for group in self.param_groups:
            gamma, lam = group["lr"], group["l1"]
            for x in group["params"]:
                if x.grad is not None:
                    z = torch.add(x, x.grad, alpha=-gamma)
                    x.copy_(z.sign() * (z.abs() - gamma * lam).clamp_(min=0))
        return loss
