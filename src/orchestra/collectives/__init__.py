# SPDX-License-Identifier: Apache-2.0
"""All-reduce as text: every algorithm is the messages it sends, and each file the page that describes it.

    x ← Σᵢ wᵢ xᵢ / Σᵢ wᵢ        on every worker, the same bits everywhere

An algorithm adds up; the weights travel with the messages. The cost of n bytes among p workers, with α seconds for a
message and β for a byte, and what one worker sends at most:

    ring                 2 (p-1) α + 2 (p-1)/p n β          2 (p-1)/p n
    halving_doubling     2 lg p α  + 2 (p-1)/p n β          2 (p-1)/p n, if p is a power of two
    butterfly              lg p α  +   lg p n β             lg p n
    tree                 2 lg p α  + lg p (lg p + 3)/2 n β  lg p n
    double_tree          2 lg p α  + about 4 n β            2 n
    hierarchical         as ring among g, and among p/g     2 (p-1)/p n
    one_device           2 (p-1) α + 2 (p-1) n β            (p-1) n
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
from orchestra.node import Comm

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
def mean_(comm: Comm, x: Tensor, weight: float, add_up: Sum) -> float:
    """x ← Σ wᵢ xᵢ / Σ wᵢ over the workers, in place. Gives Σ wᵢ; if that is zero, x is of no use."""
    if len(comm.workers) == 1:
        return weight
    x.mul_(weight) if weight else x.zero_()
    total = add_up(comm, x, weight)
    if total:
        x.div_(total)
    return total


__all__ = ["ALGORITHMS", "Sum", "mean_"]
