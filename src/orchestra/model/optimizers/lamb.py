# SPDX-License-Identifier: Apache-2.0
"""LAMB: Adam's direction, with a step length in proportion to the norm of each layer's weights.

You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer, Hsieh. "Large Batch Optimization for Deep Learning:
Training BERT in 76 minutes", ICLR 2020. https://arxiv.org/abs/1904.00962  (Algorithm 2)

    repeat, for each layer x
        g ← ∇f(x);   t ← t + 1
        m ← β₁ m + (1 − β₁) g;   v ← β₂ v + (1 − β₂) g²
        r ← m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)
        u ← r + λ x                              λ: weight decay
        x ← x − γ φ(‖x‖) / ‖u‖ · u               γ: learning rate (η in the paper); 1 for the ratio where a norm is zero

φ(z) = min(max(z, low), high) if `phi` gives both, else z itself: the paper names this φ without values for its ends.
Biases and the gains of normalisation take Adam's step x ← x − γ r, without ratio and decay.

Without ratio (`least_ndim` above all dimensions) it is Adam. Bytes: none. Memory: two vectors of the model's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT

from orchestra.model.optimizers.layers import by_kind, evaluated, norms, require


class LAMB(optim.Optimizer):
    """Adam with a learning rate for each layer.

    Args:
        params: parameters, or groups of them with hyper-parameters of their own.
        lr: γ.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        phi: the range to which φ cuts a layer's norm; None leaves it as it is.
        least_ndim: parameters with fewer dimensions are not adapted nor decayed; 0 adapts all.

    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        phi: tuple[float, float] | None = None,
        least_ndim: int = 2,
    ) -> None:
        require("lr", lr, 0)
        for beta in betas:
            require("betas", beta, 0, 1)
        require("eps", eps, 0)
        require("weight_decay", weight_decay, 0)
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "phi": phi, "least_ndim": least_ndim}
        super().__init__(params, {"lr": lr} | given)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one update of every layer."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for x, whole in by_kind(group):
                u = self._direction(x, group)
                if whole:
                    torch._foreach_add_(u, x, alpha=group["weight_decay"])
                    torch._foreach_mul_(u, _ratios(norms(x), norms(u), group["phi"]).unbind())
                torch._foreach_sub_(x, u, alpha=group["lr"])
        return loss

    def _direction(self, x: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return Adam's r of every layer."""
        g = [p.grad for p in x if p.grad is not None]
        states = [self._moments(p) for p in x]
        for state in states:
            state["step"] += 1
        m, v, t = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(m, g, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)
        r = torch._foreach_div(m, [1 - beta1**k for k in t])
        root = torch._foreach_sqrt(torch._foreach_div(v, [1 - beta2**k for k in t]))
        torch._foreach_add_(root, group["eps"])
        torch._foreach_div_(r, root)
        return list(r)

    def _moments(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return state


def _ratios(x: Tensor, u: Tensor, phi: tuple[float, float] | None) -> Tensor:
    """Return φ(‖x‖) / ‖u‖ of every layer, from the norms."""
    scaled = x if phi is None else x.clamp(*phi)
    return torch.where((x > 0) & (u > 0), scaled / u, 1.0)
