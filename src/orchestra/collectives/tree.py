# SPDX-License-Identifier: Apache-2.0
"""Binomial tree: add up towards worker 0 in lg p rounds, and spread the sum back the same way.

    round k:   workers with bit k set (and none below) send all they have 2^k to the left, and wait
               the others, if there is anyone 2^k to the right, add up what comes
    then the rounds backwards, with the sum

Messages of a worker: one towards the first, unless it is that, and one back to each worker whose sum it took: at most
⌈lg p⌉, n bytes each. Those to several others share its link: lg p n β towards the first, 1 + 2 + ... + lg p times n β
back, and 2 lg p α.
"""

from __future__ import annotations

from torch import Tensor

from orchestra.core.comm import Comm


def tree(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; gives Σ wᵢ."""
    p, rank = len(comm.workers), comm.rank
    below: list[int] = []
    distance = 1
    while distance < p and not rank & distance:
        if rank + distance < p:
            came = comm.recv(rank + distance)
            comm.add_(x, came.x)
            weight += came.weight
            below.append(rank + distance)
        distance *= 2
    if rank:
        comm.send(rank - distance, x, weight=weight)
        came = comm.recv(rank - distance)
        x.copy_(came.x)
        weight = came.weight
    for child in reversed(below):
        comm.send(child, x, weight=weight)
    return weight
