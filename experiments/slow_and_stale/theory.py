# SPDX-License-Identifier: Apache-2.0
"""E[T] of an update with P workers whose mini-batches take X = Δ + Exp(μ): formulas of Dutta et al. 2018, and bounds.

    E[X_{K:P}] = Δ + (H_P − H_{P−K}) / μ                    the K-th of P that begin together
    K-sync           E[X_{K:P}]
    K-batch-sync     E of the K-th end, of P workers that begin together and go on:  K / (P μ)  for Δ = 0
    K-async          (H_P − H_{P−K}) / μ  for Δ = 0;  E[X] / P  for K = 1;  E[X_{P:P}]  for K = P;
                     else between K E[X] / P, as if no worker waited, and E[X_{K:P}]
    K-batch-async    K E[X] / P
    N of N + b       between E[X_{N:N+b}], as if the late began again, and E[X_{N:N}], as if there were no backups

Where it is known exactly, both bounds are that.
"""

from __future__ import annotations

import torch

from orchestra import BackupWorkers, KAsync, KBatchAsync, KBatchSync, KSync
from orchestra.engine.compute_times import Exponential
from orchestra.strategies.parameter_server.consistency import Consistency

Bounds = tuple[float, float]


def bounds(consistency: Consistency, x: Exponential, p: int) -> Bounds:
    """Between what E[T] must be."""
    match consistency:
        case KSync(k=k):
            least = most = ordered(x, k, p)
        case KBatchSync(k=k):
            least = most = kth_end(x, k, p)
        case KAsync(k=k):
            least, most = k * x.mean() / p, ordered(x, k, p)
            if x.shift == 0 or k == p:
                least = most
            elif k == 1:
                most = least
        case KBatchAsync(k=k):
            least = most = k * x.mean() / p
        case BackupWorkers(b=b):
            least, most = ordered(x, p - b, p), ordered(x, p - b, p - b)
        case _:
            raise ValueError(f"nothing is known about {consistency}")
    return least, most


def ordered(x: Exponential, k: int, p: int) -> float:
    """E[X_{K:P}] = Δ + (H_P − H_{P−K}) / μ."""
    return x.shift + x.scale * sum(1 / i for i in range(p - k + 1, p + 1))


def kth_end(x: Exponential, k: int, p: int, *, pieces: int = 20_000) -> float:
    """E[T] = ∫ P(fewer than K ends up to t) dt of P workers that begin together and go on, each as often as it can.

    One worker has ended n mini-batches by t if n Δ + Gamma(n, μ) ≤ t.
    """
    t = torch.linspace(0, ordered(x, 1, p) * k + 40 * x.scale / p * k**0.5, pieces, dtype=torch.float64)
    by_t = torch.stack([torch.ones_like(t), *(_ended(n, x, t) for n in range(1, k + 1))])
    one = by_t[:-1] - by_t[1:]  # P(exactly n), n < k
    all_of_them = torch.zeros_like(one)
    all_of_them[0] = 1
    for _ in range(p):
        all_of_them = torch.stack([(all_of_them[: n + 1] * one[: n + 1].flip(0)).sum(0) for n in range(k)])
    return float(torch.trapezoid(all_of_them.sum(0), t))


def _ended(n: int, x: Exponential, t: torch.Tensor) -> torch.Tensor:
    """P(a worker has ended n mini-batches by t)."""
    left = ((t - n * x.shift) / x.scale).clamp(min=0)
    share: torch.Tensor = torch.special.gammainc(torch.full_like(t, n), left)
    return share
