# SPDX-License-Identifier: Apache-2.0
"""Binomial tree: sums move towards worker 0 in lg p rounds, and the total returns in the same way.

    round k:   workers with bit k set (and no lower bit) send their sums to the worker 2^k before them, and wait
               the others receive the sum of the worker 2^k after them, if there is one, and add it
    then the same rounds in reverse, with the total

Messages of a worker: one towards worker 0, and one back to each worker whose sum it received: at most ⌈lg p⌉, of n
bytes each. Messages to several workers share its link: lg p n β towards worker 0, 1 + 2 + ... + lg p times n β on the
way back, and 2 lg p α.
"""

from __future__ import annotations

from torch import Tensor

from orchestra.core.comm import Comm


def tree(comm: Comm, x: Tensor, weight: float) -> float:
    """x ← Σ xᵢ; returns Σ wᵢ."""
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
