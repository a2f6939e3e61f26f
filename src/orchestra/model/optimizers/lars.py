# SPDX-License-Identifier: Apache-2.0
"""LARS: every layer moves by a share of its own norm.

You, Gitman, Ginsburg. "Large Batch Training of Convolutional Networks", 2017. https://arxiv.org/abs/1708.03888
(Algorithm 1)

    repeat, for each layer l
        g ← ∇f(w)
        λ ← η ‖w‖ / (‖g‖ + β ‖w‖)             local rate; 1 where either norm is zero
        v ← m v + γ λ (g + β w)               γ: global learning rate, m: momentum, β: weight decay, η: trust
        w ← w − v

A layer whose weights are zero moves as in SGD, or it would never leave zero. So do biases and the gains of
normalisation, without decay.

γ is inside the momentum, as in the paper: when γ grows, v follows within a few steps. torch's SGD has it outside.
A layer's step depends on γ η alone, not on the size of its gradient; a bias moves by γ as in SGD. So keep γ at a value
that suits SGD if there are biases without normalisation after them, and increase η. The paper's 1e-3 is for γ = 10.

Bytes: none. Memory: one vector of the model's size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT

from orchestra.model.optimizers.layers import by_kind, evaluated, norms, require


class LARS(optim.Optimizer):
    """SGD with momentum and a learning rate for each layer.

    Args:
        params: parameters, or groups of them with hyper-parameters of their own.
        lr: γ.
        momentum: m.
        weight_decay: β.
        eta: η, the largest share of its norm by which a layer moves when γ is 1 and there is no momentum.
        least_ndim: parameters with fewer dimensions are not adapted nor decayed; 0 adapts all.

    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
        least_ndim: int = 2,
    ) -> None:
        require("lr", lr, 0)
        require("momentum", momentum, 0, 1)
        require("weight_decay", weight_decay, 0)
        require("eta", eta, 0)
        given = {"momentum": momentum, "weight_decay": weight_decay, "eta": eta, "least_ndim": least_ndim}
        super().__init__(params, {"lr": lr} | given)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one update of every layer."""
        loss = evaluated(closure)
        for group in self.param_groups:
            gamma, m, beta, eta = group["lr"], group["momentum"], group["weight_decay"], group["eta"]
            for w, whole in by_kind(group):
                g = [p.grad for p in w if p.grad is not None]
                v = [self._momentum(p) for p in w]
                if whole:
                    lam = _local_rates(norms(w), norms(g), beta, eta)
                    step = torch._foreach_mul(torch._foreach_add(g, w, alpha=beta), (gamma * lam).unbind())
                else:
                    step = torch._foreach_mul(g, gamma)
                torch._foreach_mul_(v, m)
                torch._foreach_add_(v, step)
                torch._foreach_sub_(w, v)
        return loss

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        v: Tensor = state["momentum_buffer"]
        return v


def _local_rates(w: Tensor, g: Tensor, beta: float, eta: float) -> Tensor:
    """Return λ of every layer, from the norms of its weights and of its gradient."""
    return torch.where((w > 0) & (g > 0), eta * w / (g + beta * w), 1.0)
