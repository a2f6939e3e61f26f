# SPDX-License-Identifier: Apache-2.0
"""All-reduce algorithms written as the messages that they send, one algorithm in each file.

    x ← Σᵢ wᵢ xᵢ / Σᵢ wᵢ        on every worker, the same bits everywhere

An algorithm computes sums; the weights travel with the messages. The time for n bytes among p workers, with α seconds
of latency, β seconds to send a byte and γ to add one, and the most bytes and messages that a worker sends:

    ring                2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ          2 (p-1)/p n   2 (p-1) c
    halving_doubling    2 lg p α + 2 (p-1)/p n β + (p-1)/p n γ           2 (p-1)/p n   2 lg p
    butterfly           lg p α + lg p n β + lg p n γ                     lg p n        c lg p
    tree                2 lg p α + lg p (lg p + 3)/2 n β + lg p n γ      lg p n        lg p
    double_tree         2 lg p α + 2 n β (1 + lg p / c)                  2 n           4 c
    hierarchical        2 (g+m-2) α + 2 (p-1)/p n β + (p-1)/p n γ        2 (p-1)/p n   2 (g+m-2)
    one_device          2 α + 2 (p-1) n β + (p-1) n γ                    (p-1) n       p-1

For p a power of two; m groups of g workers; c chunks, whose additions overlap with the sending of others. The formula
of the double tree holds where a chunk takes longer to send than α and than its addition. A ring sends long chunks in
c = 2 pieces, and where a piece takes longer than α and its addition, the ring takes α + 2 (p-1)/p n β.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchestra.collectives.butterfly import butterfly
from orchestra.collectives.double_tree import double_tree
from orchestra.collectives.halving_doubling import halving_doubling
from orchestra.collectives.hierarchical import hierarchical
from orchestra.collectives.one_device import one_device
from orchestra.collectives.ring import ring
from orchestra.collectives.tree import tree
from orchestra.core.comm import Comm
from orchestra.core.gradient_mask import ABSENT

Sum = Callable[[Comm, Tensor, float], float]

ALGORITHMS: dict[str, Sum] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "butterfly": butterfly,
    "tree": tree,
    "double_tree": double_tree,
    "hierarchical": hierarchical,
    "one_device": one_device,
}


@torch.no_grad()
def mean_(comm: Comm, x: Tensor, weight: float, add_up: Sum, *, most: float = 1.0) -> float:
    """x ← Σ wᵢ xᵢ / Σ wᵢ over the workers, in place. Returns Σ wᵢ; if that is zero, x is undefined.

    `most` is a weight's usual size, equal on all workers: terms are divided by N times that before they are added, so
    that numbers of low precision do not overflow.
    """
    if len(comm.workers) == 1:
        return weight
    whole = most * len(comm.workers)
    if weight:
        x.mul_(weight / whole)
    else:
        x.fill_(ABSENT)
    total = add_up(comm, x, weight)
    if total:
        x.mul_(whole / total)
    return total


__all__ = ["ALGORITHMS", "Sum", "hierarchical", "mean_"]
